"""GCR: the memory is a weighted coreset, chosen again after every task.

Tiwari et al., "GCR: Gradient Coreset Based Replay Buffer Selection for Continual
Learning", CVPR 2022, without its optional contrastive term. The choice is algorithm 2;
`memory/coreset.py` chooses the rows of a class.

Departures (the released code cannot run; this is from the formulas):
- Rows of the two memories are mixed in proportion to the rows seen, rounded at random;
  the released code rounds down.
- Weights of earlier selections are multiplied by the new ones; the code forgets them.
- A class whose share of the memory holds all its rows keeps them and their weights.
- Candidates are not filtered by whether they are classified correctly, as the code does
  where a task has several epochs.
- Gradients of the selection are in evaluation mode, of images without augmentation.
"""

import functools
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import flatten_util

from jaxcl import core, schema, sharding
from jaxcl.losses import replay as losses
from jaxcl.memory import buffer, coreset, policies
from jaxcl.methods import online

_SELECT = 0x6C2  # keeps the selection's randomness apart from that of the next step


class Extra(NamedTuple):
    """Two memories, of earlier tasks and of the present one."""

    memory: buffer.Buffer  # also "logits" f32[C] and "weight" f32; seen: earlier rows
    seen: jax.Array  # bool[C], classes met so far
    kept: core.PyTree
    candidates: buffer.Buffer  # the same items, a reservoir of the present task


def _fill_options(options: dict, replay: core.Replay | None) -> dict:
    """Fill in the number of candidates if it is None."""
    rows = options["candidates"]
    if rows is None and replay is not None:
        rows = replay.capacity
    return {"candidates": rows}


@schema.checked("config.method", fill=_fill_options)
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    alpha: schema.Weight = 0.1,
    beta: schema.Weight = 0.5,
    ridge: Annotated[float, schema.Range(least=1e-6)] = 0.5,
    candidates: schema.Count | None = None,
) -> core.Method:
    """Minimise CE(incoming) + alpha * MSE(logits) + beta * CE(replayed).

    Means over replayed rows are weighted; each of the last two terms has its own draw.
    When a task ends, each task so far gets an equal part of the memory, and each of its
    classes a share of that, chosen by `coreset.match_gradients` so that the gradients
    of the last layer of beta * CE + alpha * MSE add up to those of all candidates.

    Args:
      head: "linear" or "cosine".
      alpha: weight of the squared differences to stored logits.
      beta: weight of the cross-entropy of replayed rows.
      ridge: ridge of the selection, in units of squared gradients; classes with
        gradients that are small compared with it get small weights.
      candidates: rows of the reservoir; None: config.replay.capacity.

    Raises:
      Refused: naming field, value and range.
    """
    net = online.build_network(parts, head)

    def extra(base, params, stats):
        example = jax.tree.map(lambda x: x[0], base.memory.items)
        reservoir = buffer.create(example, candidates)
        return Extra(base.memory, base.seen, {}, reservoir)

    terms = {"alpha": alpha, "beta": beta}
    return online.make_method(
        parts,
        net,
        functools.partial(_update, parts, net, **terms),
        write=_write_candidates,
        extra=extra,
        end_task=_selection(parts, net, **terms, ridge=ridge),
        seen_only=False,
        items=lambda logits: {"logits": logits, "weight": jnp.zeros(())},
    )


def _update(parts, net, state, incoming, key, *, alpha, beta):
    first, second = (draw_mixture(parts, state, k) for k in jax.random.split(key))

    def loss(params):
        (new, old, again), stats = net.pass_together(
            params, state.stats, incoming, first, second
        )
        value = losses.cross_entropy(new.logits, incoming.label)
        # A mask of weights makes a weighted mean.
        value += alpha * losses.der(
            old.logits,
            first.items["logits"],
            example_mask=first.items["weight"] * first.mask,
        )
        value += beta * losses.cross_entropy(
            again.logits,
            second.label,
            example_mask=second.items["weight"] * second.mask,
        )
        return value, (stats, new.logits)

    (value, (stats, logits)), grads, measured = net.gradient(state, loss)
    state, metrics = online.apply_grads(parts, state, value, stats, grads)
    return state, metrics | measured, {"logits": logits}


def draw_mixture(
    parts: core.Parts, state: core.TrainState, key: jax.Array
) -> online.Rows:
    """Draw rows from both memories; augment them."""
    k_draw, k_augment = jax.random.split(key)
    memory, candidates = state.extra.memory, state.extra.candidates
    span = -(-memory.capacity // (state.task + 1))
    drawn = coreset.draw_mixture(
        k_draw, memory, candidates, parts.replay.size, span=span
    )
    return online.augment_drawn(parts, k_augment, *drawn)


def _write_candidates(state, key, batch, stored):
    """Offer a batch to the reservoir of the present task."""
    candidates, ones = state.extra.candidates, jnp.ones(batch["label"].shape)
    items = online.stored_rows(state, batch, logits=stored["logits"], weight=ones)
    slots = policies.reservoir(candidates, key, ones.astype(bool))
    read = jax.tree.leaves(state.params)[0]  # depends on all that was read of it
    candidates = buffer.write(candidates, slots, items, after=read)
    return state.replace(extra=state.extra._replace(candidates=candidates))


def _selection(parts, net, *, alpha, beta, ridge) -> Callable:
    """Return the function that chooses the memory after a task: (state, task) -> state.

    The rows of both memories pass through the network once, in evaluation mode. Only
    the head's gradient is computed. The host reads only labels, tasks and weights.
    """
    pool_of = jax.jit(functools.partial(_pool_of, parts, net))
    rebuilt = jax.jit(_rebuild_memory)

    @jax.jit
    def atoms_of(head, items, features, rows):
        return gradients(
            net,
            head,
            features[rows],
            items["logits"][rows],
            items["label"][rows],
            items["weight"][rows],
            alpha=alpha,
            beta=beta,
        )

    def end_task(state, task):
        items, filled, features = pool_of(state)
        facts = {name: items[name] for name in ("weight", "task", "label")}
        facts = sharding.copy_to_host(facts | {"filled": filled})
        capacity = parts.replay.capacity
        weight = coreset.reselect(
            jax.random.fold_in(core.step_key(state), _SELECT),
            lambda rows: atoms_of(state.params["head"], items, features, rows),
            **facts,
            capacity=capacity,
            ridge=ridge,
        )
        rows = np.flatnonzero(weight)
        filled = np.arange(capacity) < len(rows)
        rows = np.pad(rows, (0, capacity - len(rows)))
        return rebuilt(state, items, rows, weight[rows] * filled, filled)

    return end_task


def _pool_of(parts, net, state):
    """Return items of both memories, which of them exist, their features f32[N,D]."""
    buffers = state.extra.memory, state.extra.candidates
    items = jax.tree.map(lambda *x: jnp.concatenate(x), *(b.items for b in buffers))
    filled = jnp.concatenate([b.filled for b in buffers])

    def features(image):
        images = parts.eval_transform(image[None])
        return net(state.params, state.stats, images, train=False)[0].features[0]

    return items, filled, jax.lax.map(features, items["image"], batch_size=256)


def _rebuild_memory(state, items, rows, weight, filled):
    """Return the state with a memory of `rows` of the pool and no candidates."""
    memory, candidates = state.extra.memory, state.extra.candidates
    items = jax.tree.map(lambda x: x[rows], items) | {"weight": weight}
    memory = buffer.Buffer(items, filled, memory.seen + candidates.seen)
    empty = jax.tree.map(jnp.zeros_like, candidates)
    return state.replace(extra=state.extra._replace(memory=memory, candidates=empty))


def gradients(
    net: online.Network,
    head: core.PyTree,
    features: jax.Array,
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    alpha: float,
    beta: float,
) -> jax.Array:
    """Return each row's gradient of w (beta * CE + alpha * MSE) in the head, f32[N, P].

    Args:
      net: maps features to logits by `head`.
      head: parameters of the head.
      features: f32[N,D].
      logits: f32[N,C], stored.
      labels: i32[N].
      weights: f32[N], w.
      alpha, beta: weights of the two losses, see `make`.
    """

    def loss(head, feature, stored, label):
        logits = net.logits({"head": head}, feature[None])
        value = beta * losses.cross_entropy(logits, label[None])
        return value + alpha * losses.der(logits, stored[None])

    def weighted(feature, stored, label, weight):
        slope = jax.grad(loss)(head, feature, stored, label)
        return weight * flatten_util.ravel_pytree(slope)[0]

    return jax.vmap(weighted)(features, logits, labels, weights)
