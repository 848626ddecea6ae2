"""Store rows of the stream for online self-supervised learning.

A row has the image and the items that a regulariser or the memory's policy reads. These
items change with every use. `setup` is that of `step.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, optim
from jaxcl.errors import Refused
from jaxcl.memory import diversity, loss_aware, policies, redundancy, sharded
from jaxcl.methods import online
from jaxcl.methods.two_view import records

# What the memory can hold for its policy to read.
_STORED = ("feature", "used", "number", "loss", "draws", "score")


class RowStats(NamedTuple):
    """Values of an update's rows, computed before the optimiser's step."""

    z: jax.Array  # f32[N,2,D], projections
    loss: jax.Array  # f32[N], see `pair_losses`
    score: (
        jax.Array | None
    )  # f32[N], see `diversity.similarity_score`; None: no policy reads it


def check_replay(replay: core.Replay) -> None:
    """Refuse a memory that reads labels, or is too small to be replayed from.

    Raises:
      Refused: naming the field, the value and what is allowed.
    """
    if lacking := sorted({*policies.look_up(replay.policy).reads} - {*_STORED}):
        names = [n for n, x in policies.POLICIES.items() if {*x.reads} <= {*_STORED}]
        raise Refused(
            f"config.replay.policy={replay.policy!r}: reads {', '.join(lacking)}, "
            f"which online_ssl has none of; allowed are {', '.join(names)}"
        )
    if replay.capacity <= replay.size:
        raise Refused(
            f"config.replay.capacity={replay.capacity}: must be above config.replay."
            f"size={replay.size}; rows are replayed once more of them are stored"
        )
    allowed = {
        "augment": ("none", "all"),
        "measure": ((), ("drift",)),
        "statistics": ("running",),
    }
    for name, values in allowed.items():
        if (value := getattr(replay, name)) not in values:
            raise Refused(
                f"config.replay.{name}={value!r}: online_ssl augments all rows and has "
                "no head of classes; leave it out ('drift' may be measured)"
            )


def create(setup, batch):
    """Make the memory before the first batch.

    Args:
      setup: of `step.py`.
      batch: an example; only the shapes of its images are read.

    Returns:
      buffer of "image" u8, "label" and "task" i32, "projection" f32[D] if the
      regulariser stores one, and the items that the policy reads; the counts of the
      policy.
    """
    parts, replay = setup.parts, setup.parts.replay
    scalar, vector = jnp.zeros((), jnp.int32), jnp.zeros((setup.networks.dim,))
    example = {"image": batch["image"][0], "label": scalar, "task": scalar}
    if setup.plan.stores:
        example["projection"] = vector
    blank = {"feature": vector, "used": scalar > 0, "number": scalar}
    blank |= {"loss": jnp.zeros(()), "draws": scalar, "score": jnp.zeros(())}
    example |= {name: blank[name] for name in setup.policy.reads}
    kept = setup.policy.start(parts.num_classes, parts.num_tasks)
    return sharded.create(example, replay), kept


def row_stats(setup, features: records.Features, active: jax.Array) -> RowStats:
    """Compute the items to store for each row of an update, replayed rows first.

    Scores compare the gradient of each row's own loss with that of the replayed rows
    together, which are a draw from the memory; if `active` is False, nothing is
    replayed and there is nothing to compare with.

    Args:
      features: of the update's rows.
      active: bool[], the replayed rows are of the memory.
    """
    query = features.z if features.o is None else features.o
    target = features.z if features.k is None else features.k
    score = None
    if setup.size and "score" in setup.policy.reads:
        slopes = pair_slopes(query, target)
        past = jnp.sum(slopes[: setup.size], axis=0, keepdims=True)
        score = diversity.similarity_score(slopes, past, active[None])
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
    """Move what the memory stores of replayed rows to their new values.

    Args:
      setup: of `step.py`.
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
    if setup.plan.stored_momentum is not None:
        mean = jnp.mean(z, axis=1)
        moved = optim.ema(items["projection"], mean, setup.plan.stored_momentum)
        changes["projection"] = moved
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

    def put(held, slots, rows):
        return held.at[slots].set(rows, mode="drop")

    replay = setup.parts.replay
    held = memory.items | {
        name: sharded.on_each_device(replay, put, memory.items[name], slots, rows)
        for name, rows in changes.items()
    }
    return memory._replace(items=held)


def _feature(z):
    """Compute the feature that MinRed compares, n(z_1 + z_2), f32[R,D]."""
    return core.l2_normalize(jnp.sum(z, axis=1))


def store_batch(setup, state, batch, stats, number, key):
    """Offer the images of a batch to the memory; the state after it.

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
    if setup.plan.stores:
        items["projection"] = jnp.mean(stats.z, axis=1)
    return online.write_batch(setup.policy, state, key, batch, items)
