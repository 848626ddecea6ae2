"""Rows of a stream: a memory of its images, and the updates that read it.

A row of the memory has the image and the items that a strategy or the memory's policy
reads. These items change with every use. In a batch of an update the replayed rows come
first.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, optim, sharding
from jaxcl.memory import diversity, loss_aware, redundancy, sharded
from jaxcl.methods import online
from jaxcl.methods.two_view import records
from jaxcl.methods.two_view.strategies import stored_examples

_MIX = 0x10B9  # keeps LUMP's mixtures apart from the other keys of an update


class RowStats(NamedTuple):
    """Values of an update's rows, computed before the optimiser's step."""

    z: jax.Array  # f32[N,2,D], projections
    loss: jax.Array  # f32[N], see `pair_losses`
    # f32[N], see `diversity.similarity_score`; None: no policy reads it
    score: jax.Array | None


def create(setup, batch):
    """Make the memory before the first batch.

    Args:
      setup: constants of the method.
      batch: an example; only the shapes of its images are read.

    Returns:
      buffer of "image" u8, "label" and "task" i32, "projection" f32[D] if the strategy
      stores one, and the items that the policy reads; the counts of the policy.
    """
    parts, replay = setup.parts, setup.parts.replay
    scalar, vector = jnp.zeros((), jnp.int32), jnp.zeros((setup.dim,))
    example = {"image": batch["image"][0], "label": scalar, "task": scalar}
    if setup.strategy.stored_momentum is not None:
        example["projection"] = vector
    blank = {"feature": vector, "used": scalar > 0, "number": scalar}
    blank |= {"loss": jnp.zeros(()), "draws": scalar, "score": jnp.zeros(())}
    example |= {name: blank[name] for name in setup.policy.reads}
    counts = setup.policy.start(parts.num_classes, parts.num_tasks)
    return sharded.create(example, replay), counts


def split_keys(key: jax.Array, updates: int) -> list[records.StepKeys]:
    """Split a step's key into one for each update."""
    write, *keys = jax.random.split(key, 1 + updates)
    step_keys = []
    for update in keys:
        augment, draw, augment_drawn = jax.random.split(update, 3)
        mix = jax.random.fold_in(update, _MIX)
        step_keys.append(
            records.StepKeys(update, augment, mix, write, draw, augment_drawn)
        )
    return step_keys


def add_rows(setup, memory, keys, reading: records.Reading) -> records.Reading:
    """Put replayed rows before the incoming ones, or mix them in."""
    size, parts, mix = setup.size, setup.parts, setup.strategy.mix
    if not size:
        return reading._replace(active=jnp.zeros((), bool))
    active = jnp.sum(memory.filled) > size
    drawn = sharded.sample(memory, keys.draw, size)
    items, views = sharding.shard_rows_in_jit(drawn[0]), reading.views
    replayed = parts.augment(keys.augment_drawn, items["image"])
    if mix:
        exist = jnp.broadcast_to(active, size)
        views, new = stored_examples.mix_examples(keys.mix, mix, views, replayed, exist)
        share = 1 - new
    else:
        # A blank image would enter the batch statistics.
        repeated = views[jnp.arange(size) % len(views)]
        views = jnp.concatenate([jnp.where(active, replayed, repeated), views])
        share = size / len(views)
    stored = {"stored": items.get("projection")}
    return records.Reading(views, None, reading.features | stored, drawn, active, share)


def list_losses(setup, reading: records.Reading):
    """List the losses of an update: with the replayed rows, and without them.

    Returns:
      functions of `Features`, (loss, metrics), and which of them is taken, bool[]; one
      function and None where no rows pass beside the incoming ones.
    """
    beside = setup.beside
    starts = (0, beside) if beside else (0,)
    losses = [functools.partial(_compute_loss, setup, start) for start in starts]
    return losses, reading.active if beside else None


def _compute_loss(setup, start, features):
    """Compute the loss from row `start` on: 0, or the number of replayed rows."""
    base, strategy, beside = setup.base, setup.strategy, setup.beside
    rows, replayed = _cut_rows(features, start, None), _cut_rows(features, 0, beside)
    loss = base.loss(rows)
    align = replay_loss = jnp.zeros_like(loss)
    replays = beside > 0 and start == 0
    if replays:
        replay_loss = base.loss(replayed)
    if strategy.term and (setup.every_row or replays):
        align = strategy.term(base, rows if setup.every_row else replayed)
    terms = {
        "stream_loss": base.loss(_cut_rows(features, beside, None)),
        "replay_loss": replay_loss,
        "align": align,
    }
    return loss + strategy.weight * align, terms


def _cut_rows(features, start, stop):
    """Cut out the features of the rows from `start` to `stop`."""
    by_row = {name: getattr(features, name) for name in ("z", "o", "p", "k", "f")}
    cut = {name: x[start:stop] for name, x in by_row.items() if x is not None}
    return features._replace(**cut)


def group_rows(setup, features: records.Features, reading: records.Reading) -> list:
    """Group an update's rows: the replayed ones, if there are any, and the others.

    Returns:
      (features, active, aligned) of each group, see `records.Base.update`.
    """
    beside = setup.beside
    aligned = beside in (0, len(features.z) - beside)
    groups: list = [(_cut_rows(features, beside, None), True, aligned)]
    if beside:
        replayed = _cut_rows(features, 0, beside)
        groups = [(replayed, reading.active, aligned), *groups]
    return groups


def finish_update(setup, state, metrics, features, reading):
    """After an update, refresh what the memory stores with the replayed rows.

    Returns:
      the state, metrics, and `RowStats` of the incoming rows.
    """
    beside, active = setup.beside, reading.active
    stats = row_stats(setup, features, active)
    if beside:
        replayed = jax.tree.map(lambda x: x[:beside], stats)
        memory = state.extra.memory
        memory = update_stored(setup, memory, reading.drawn, replayed, active)
        state = state.replace(extra=state.extra._replace(memory=memory))
    metrics = metrics | {"replayed": jnp.where(active, reading.share, 0.0)}
    return state, metrics, jax.tree.map(lambda x: x[beside:], stats)


def row_stats(setup, features: records.Features, active: jax.Array) -> RowStats:
    """Compute the items to store for each row of an update, replayed rows first.

    Scores compare the gradient of each row's own loss with that of the replayed rows
    together, which are a draw from the memory; if `active` is False, nothing is
    replayed and there is nothing to compare with.

    Args:
      features: features of the update's rows.
      active: bool[], the replayed rows are of the memory.
    """
    query = features.z if features.o is None else features.o
    target = features.z if features.k is None else features.k
    score = None
    if setup.size and "score" in setup.policy.reads:
        slopes = pair_slopes(query, target)
        reference = jnp.sum(slopes[: setup.size], axis=0, keepdims=True)
        score = diversity.similarity_score(slopes, reference, active[None])
    return RowStats(features.z, pair_losses(query, target), score)


def pair_losses(query: jax.Array, target: jax.Array) -> jax.Array:
    """Compute the negative cosine of each image's positive pairs, f32[N].

    The mean of both directions: the predictor's output (or the projection) of one view
    with the slow network's projection (or the network's own) of the other. It is the
    whole loss of SimSiam, that of BYOL up to a factor, and the attracting part of other
    bases.

    Args:
      query, target: f32[N,2,D], of both views.
    """
    pairs = core.l2_normalize(query) * core.l2_normalize(target[:, ::-1])
    return -jnp.mean(jnp.sum(pairs, axis=2), axis=1)


def pair_slopes(query: jax.Array, target: jax.Array) -> jax.Array:
    """Compute the gradient of each image's loss with respect to a shift of its queries.

    The sum of the gradients with respect to the query of either view. It is the
    gradient of a bias of the layer that makes the queries. It does not depend on the
    order of the views.

    Args:
      query, target: f32[N,2,D], see `pair_losses`; no gradient reaches the target.

    Returns:
      f32[N,D].
    """
    slopes = jax.grad(lambda rows: jnp.sum(pair_losses(rows, target)))(query)
    return jnp.sum(slopes, axis=1)


def update_stored(setup, memory, drawn, stats, active):
    """Refresh the vectors that the memory stores with replayed rows.

    Args:
      setup: constants of the method.
      memory: the buffer before.
      drawn: items, mask and slots of the R replayed rows, as of `buffer.sample`.
      stats: `RowStats` of these rows.
      active: bool[], the rows are of the memory; if False, nothing moves.

    Returns:
      The buffer, with new values of "projection", "feature", "used", "loss" and "draws"
      (those that it has) for the drawn rows.
    """
    items, _, slots = drawn
    z = stats.z
    changes = {}
    keep = setup.strategy.stored_momentum
    if keep is not None and keep < 1:
        mean = jnp.mean(z, axis=1)
        changes["projection"] = optim.ema(items["projection"], mean, keep)
    if "feature" in items:
        # DUEL's policy, which stores no "used", moves the vector from the first use on.
        used = items.get("used", jnp.ones(len(z), bool))
        changes["feature"] = redundancy.move_vectors(
            items["feature"], _feature(z), used
        )
    if "used" in items:
        changes["used"] = jnp.ones_like(items["used"])
    if "loss" in items:
        changes["loss"] = loss_aware.move_losses(items["loss"], stats.loss)
    if "draws" in items:
        changes["draws"] = items["draws"] + 1
    if not changes:
        return memory
    slots = jnp.where(active, slots, memory.capacity)  # a slot beyond all drops its row

    def put(stored, slots, rows):
        return stored.at[slots].set(rows, mode="drop")

    replay = setup.parts.replay
    new_items = memory.items | {
        name: sharded.on_each_device(replay, put, memory.items[name], slots, rows)
        for name, rows in changes.items()
    }
    return memory._replace(items=new_items)


def _feature(z):
    """Compute the feature that MinRed compares, n(z_1 + z_2), f32[R,D]."""
    return core.l2_normalize(jnp.sum(z, axis=1))


def store_batch(setup, state, batch, stats, number, key):
    """Offer the images of a batch to the memory; return the new state.

    Args:
      stats: `RowStats` of the last update on the batch.
      number: i32[], of the batch in the stream.
    """
    count = len(batch["label"])
    new = {
        "feature": _feature(stats.z),
        "used": jnp.zeros(count, bool),
        "number": number * count + jnp.arange(count, dtype=jnp.int32),
        "loss": stats.loss,
        "draws": jnp.zeros(count, jnp.int32),
        "score": stats.score,
    }
    items = {name: new[name] for name in setup.policy.reads}
    if setup.strategy.stored_momentum is not None:
        items["projection"] = jnp.mean(stats.z, axis=1)
    return online.write_batch(setup.policy, state, key, batch, items)
