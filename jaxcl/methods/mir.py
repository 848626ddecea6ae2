"""MIR: replay of the rows that a step on the incoming rows would harm most.

Aljundi et al., "Online Continual Learning with Maximally Interfered Retrieval",
NeurIPS 2019 (its ER-MIR), as a baseline of Caccia et al., "Reducing Representation
Drift in Online Continual Learning", 2021.

Departures:
- Scoring normalises by the batch statistics of the candidates and moves the running
  ones, as in released code, not in the papers; docs/paper_er_ace.md has the effect on
  Split CIFAR-10. `moves_statistics=False` leaves the running ones alone.
- The MNIST experiments' comparison with the lowest loss that a row ever had is left
  out, and so is MIR for generative replay.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxcl import core, schema
from jaxcl.errors import Refused
from jaxcl.memory import sharded
from jaxcl.methods import online


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    candidates: schema.Count = 50,
    replay_from: online.ReplayFrom = "past_tasks",
    virtual: Literal["network", "head"] = "network",
    moves_statistics: bool = True,
) -> core.Method:
    """Replay the candidates whose loss the incoming rows would raise most.

    Let g be the gradient of the incoming rows' mean cross-entropy and
    theta' = theta - lr g. The rows with the largest CE(theta') - CE(theta) are
    replayed; theta then moves by g plus their gradient, both taken at theta.

    Args:
      head: "linear" or "cosine".
      candidates: rows drawn to choose from; they are scored without augmentation.
      replay_from: "past_tasks", "all" or "other_classes", see `er.make`.
      virtual: parameters that the virtual step moves, the "network" or its "head" alone
        (an option of the later code of Caccia et al.), which spares a forward pass.
      moves_statistics: scoring at theta moves the running statistics of batch norm.

    Raises:
      Refused: naming field, value and range.
    """
    _check_candidates(parts, candidates)
    net = online.build_network(parts, head)
    slope = jax.value_and_grad(
        functools.partial(online.cross_entropy, net), has_aux=True
    )

    def update(state, incoming, key):
        k_draw, k_augment = jax.random.split(key)
        allowed = online.replayable(replay_from, state, incoming)
        pool = online.draw_rows(
            parts,
            state.extra.memory,
            k_draw,
            size=candidates,
            allowed=allowed,
            augment=False,
        )
        params = state.params
        (value, stats), grads = slope(params, state.stats, incoming)

        lr = core.rate(parts, state)
        ahead = jax.tree.map(lambda p, g: p - lr * g, params, grads)
        if virtual == "head":
            ahead = params | {"head": ahead["head"]}
        scores, scored = interference(net, params, ahead, stats, pool)
        stats = scored if moves_statistics else stats
        replayed = pick_highest(parts, k_augment, scores, pool)

        (old_value, stats), old_grads = slope(params, stats, replayed)
        grads = jax.tree.map(jnp.add, grads, old_grads)
        return *online.apply_grads(parts, state, value + old_value, stats, grads), {}

    return online.make_method(parts, net, update, seen_only=False)


def _check_candidates(parts, candidates):
    least = parts.replay.size
    if candidates < least:
        raise Refused(
            f"config.method.candidates={candidates}: must be at least {least}, the "
            "rows to be replayed (config.replay.size)"
        )
    shards = sharded.count_shards(parts.replay)
    if candidates % shards:
        raise Refused(
            f"config.method.candidates={candidates}: must be a multiple of {shards}, "
            "the devices that share the memory (config.replay.sharded)"
        )


def interference(
    net: online.Network,
    params: core.PyTree,
    ahead: core.PyTree,
    stats: core.PyTree,
    rows: online.Rows,
):
    """Return the rise of each row's loss by a step from `params` to `ahead`.

    Returns:
      CE(ahead) - CE(params), f32[R], in nats, both with the batch statistics of the
      rows; the running statistics after the pass at `params`.
    """

    def loss(params):
        out, after = net.pass_replayed(params, stats, rows)
        ce = optax.softmax_cross_entropy_with_integer_labels(out.logits, rows.label)
        return ce, after

    # Not one pass under vmap: it makes a grouped convolution, 5 times slower on CPU.
    (before, scored), (later, _) = loss(params), loss(ahead)
    return later - before, scored


def pick_highest(
    parts: core.Parts, key: jax.Array, scores: jax.Array, pool: online.Rows
) -> online.Rows:
    """Pick the config.replay.size rows of the pool with the largest scores."""
    wanted: Any = parts.replay.size  # which the config has settled
    size = min(wanted, len(scores))
    # A row that does not exist repeats one that does, and must not be taken for it.
    _, best = jax.lax.top_k(jnp.where(pool.mask, scores, -jnp.inf), size)
    items, mask, slots = jax.tree.map(
        lambda x: x[best], (pool.items, pool.mask, pool.slots)
    )
    return online.augment_drawn(parts, key, items, mask, slots)
