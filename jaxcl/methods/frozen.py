"""Methods with a frozen encoder: only a rule on its features learns.

The encoder is what `config.start` names, the folder of an encoder; without it, a random
network. A file of features needs none. A rule reads every train row once in an epoch,
without augmentation, as in evaluation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import logging

from jaxcl import core
from jaxcl.data import stream
from jaxcl.errors import Refused
from jaxcl.nets import chain, mlp, pieces


class Rows(NamedTuple):
    """Features of the rows of a batch."""

    features: jax.Array  # f32[B,D]
    label: jax.Array  # i32[B]
    index: jax.Array  # i32[B], number of the row in the train split
    mask: jax.Array  # bool[B], False: no row, it fills the shape


class Rule(NamedTuple):
    """A classifier that learns row by row; pure functions of arrays."""

    start: Callable  # (key, D, C) -> state, a tree of arrays
    add: Callable  # (state, Rows) -> state that has met these rows, too
    scores: Callable  # (what `fit` returned, f32[B,D]) -> f32[B,C]
    # state -> what `scores` reads, once for each evaluation; by default the state
    fit: Callable = lambda state: state


class ClassMeans(NamedTuple):
    """Running mean of each class, and its number of rows."""

    mean: jax.Array  # f32[C,D], zeros for a class not met yet
    counts: jax.Array  # i32[C]; a float32 would stop at 2^24


class Extra(NamedTuple):
    """The state of a frozen method."""

    rule: core.PyTree  # state of its rule
    fitted: Any = None  # what `Rule.fit` returned, in an evaluation only


def make_method(parts: core.Parts, rule: Rule) -> core.Method:
    """Make the method of a rule. It reads neither config.optimizer nor config.schedule.

    Args:
      parts: components that the config builds.
      rule: the classifier on the features.

    Raises:
      Refused: config.accumulate is set, which only training uses.
    """
    _check_encoder(parts)
    nets = chain.Chain({"encoder": parts.encoder})

    def init(key, batch):
        k_state, k_net, k_rule = jax.random.split(key, 3)
        images = parts.eval_transform(batch["image"][:1])
        params, stats = nets.init(k_net, images)
        outputs, _ = jax.eval_shape(lambda: nets(params, stats, images, train=False))
        extra = Extra(rule.start(k_rule, outputs.shape[1], parts.num_classes))
        return core.new_state(k_state, params, stats, optax.identity(), extra)

    def step(state, batch):
        features = nets.embed(state, parts.eval_transform(batch["image"]))
        mask = (batch["index"] >= 0) & (batch["label"] >= 0)
        rows = Rows(
            jnp.where(mask[:, None], core.at_least_float32(features), 0),
            batch["label"],
            batch["index"],
            mask,
        )
        extra = Extra(rule.add(state.extra.rule, rows))
        zero = jnp.zeros(())
        state = state.replace(extra=extra, step=state.step + 1)
        return state, {"loss": zero, "lr": zero}

    def predict(state, images):
        fitted = state.extra.fitted
        fitted = rule.fit(state.extra.rule) if fitted is None else fitted
        return rule.scores(fitted, core.at_least_float32(nets.embed(state, images)))

    fit = jax.jit(rule.fit)

    def eval_state(state):
        fitted = fit(state.extra.rule)
        return state.replace(extra=state.extra._replace(fitted=fitted))

    return core.Method(
        init=init,
        step=step,
        embed=nets.embed,
        predict=predict,
        eval_state=eval_state,
        source=_every_row,
        supervised=True,
    )


def _check_encoder(parts: core.Parts) -> None:
    """Refuse an encoder that passes in pieces; warn of one that was never trained."""
    if isinstance(parts.encoder, pieces.PiecewiseEncoder):
        raise Refused(
            f"config.accumulate={parts.encoder.count}: this method does not train its "
            "encoder, so there are no activations to save; must be 1"
        )
    read = isinstance(parts.encoder, mlp.Perceptron) and not parts.encoder.widths
    if not parts.starts_pretrained and not read:  # from a file of features
        logging.warning(
            "config.start is not set: features are those of a random network; "
            "--config.start=FOLDER names an encoder"
        )


def _every_row(state, task) -> stream.Source:
    """Return the rows of a task, the last incomplete batch included.

    Streams in an order of their own leave that batch out.
    """
    source = task.train
    if source.order is stream.epoch_order:
        source = source._replace(order=stream.filled_order)
    return source


def one_hot(rows: Rows, num_classes: int) -> jax.Array:
    """Return the labels as f32[B,C], zeros for rows that do not exist."""
    return jax.nn.one_hot(rows.label, num_classes) * rows.mask[:, None]


def count_rows(rows: Rows, num_classes: int) -> jax.Array:
    """Count the rows of each class, i32[C]."""
    return one_hot(rows, num_classes).sum(0, dtype=jnp.int32)


def start_means(classes: int, dim: int) -> ClassMeans:
    """Return the means before the first row."""
    return ClassMeans(jnp.zeros((classes, dim)), jnp.zeros((classes,), jnp.int32))


def move_means(
    means: ClassMeans, rows: Rows
) -> tuple[ClassMeans, jax.Array, jax.Array]:
    """Move the running means row by row (Welford, 1962).

    Sums of many long rows would round away what tells classes apart, and differences of
    second moments a small variance. Equal rows have gaps of 0, apart from rounding.

    Args:
      means: the means before the rows.
      rows: rows of a batch, in order.

    Returns:
      The means after the rows; f32[B,D], the gap of each row to the mean of its class
      before it; i32[B], the number of rows of its class before it.
    """
    classes = one_hot(rows, len(means.counts))
    label = jnp.where(rows.mask, rows.label, 0)
    offset = jnp.where(rows.mask[:, None], rows.features - means.mean[label], 0)
    # Entry [i, j]: row j came before row i and is of its class.
    earlier = jnp.tril(core.dot(classes, classes), k=-1)
    before = means.counts[label] + earlier.sum(1, dtype=jnp.int32)
    shift = sum_products(earlier.T, offset) / jnp.maximum(before, 1)[:, None]
    counts = means.counts + count_rows(rows, len(means.counts))
    change = sum_products(classes, offset) / jnp.maximum(counts, 1)[:, None]
    return ClassMeans(means.mean + change, counts), offset - shift, before


def sum_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sum the products of rows, f32[B,N] and f32[B,M] -> f32[N,M]."""
    return jnp.einsum("bn,bm->nm", a, b, precision="highest")


def known_only(scores: jax.Array, counts: jax.Array) -> jax.Array:
    """Return scores f32[B,C] with -inf for classes without any row so far."""
    return jnp.where(counts > 0, scores, -jnp.inf)
