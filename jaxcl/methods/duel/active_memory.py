"""A memory of features that is filtered at every step, for `step.py`."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, sharding
from jaxcl.memory import buffer, duel, policies, sharded

Policy = Literal["duel", "fifo", "reservoir"]


class Settings(NamedTuple):
    """Options that decide which rows, and which items of a row, are kept."""

    policy: Policy
    size: int  # rows, K
    dim: int  # of a feature
    images: bool  # also keep u8 images
    spread: bool  # split over the devices
    safe: bool  # no update that makes the memory less distinct to the batch
    newcomer_competes: bool
    score: duel.Score
    temperature: float
    logsumexp: Callable | None = None  # in place of the matrix of products


def create(settings: Settings, batch: core.Batch) -> buffer.Buffer:
    """Return an empty memory for examples like those of the batch."""
    row = _stored_items(settings, batch, jnp.zeros((len(batch["label"]), settings.dim)))
    example = {name: leaf[0] for name, leaf in row.items()}
    return _place_memory(settings, buffer.create(example, settings.size))


def join_shards(memory: buffer.Buffer) -> buffer.Buffer:
    """Return the memory in the form that `buffer` and `duel` read."""
    if not isinstance(memory.items, sharded.SplitRows):
        return memory
    filled: Any = memory.filled  # SplitRows, too
    return buffer.Buffer(memory.items.rows, filled.rows, memory.seen)


def update(
    settings: Settings,
    memory: buffer.Buffer,
    key: jax.Array,
    batch: core.Batch,
    features: jax.Array,
    after: core.PyTree,
):
    """Offer a batch to the memory; also return the share of rows stored, f32[].

    Args:
      settings: settings of the rows that are kept.
      memory: memory that `join_shards` returned.
      key: threefry key, for the policy "reservoir".
      batch: the incoming rows.
      features: f32[B, D], unit rows. A row that is not finite is not stored.
      after: arrays that the step read from the memory, see `buffer.write`.
    """
    mask = jnp.isfinite(features).all(axis=1)
    features = jnp.where(mask[:, None], features, 0)
    rows = _stored_items(settings, batch, features)
    if settings.policy == "fifo":
        slots = policies.fifo(memory, mask)
    elif settings.policy == "reservoir":
        slots = policies.reservoir(memory, key, mask)
    else:
        slots = _filter_rows(settings, memory, features, mask)
    written = buffer.write(memory, slots, rows, mask, after=after)
    return _place_memory(settings, written), jnp.mean(slots < memory.capacity)


def refresh_rows(
    memory: buffer.Buffer, slots: jax.Array, features: jax.Array, exists: jax.Array
) -> buffer.Buffer:
    """Write features f32[R, D] to `slots` where `exists` bool[R].

    A row that is not finite leaves the old one.
    """
    finite = jnp.isfinite(features).all(axis=1)
    slots = jnp.where(exists & finite, slots, memory.capacity)
    stored = memory.items["feature"].at[slots].set(features, mode="drop")
    return memory._replace(items=memory.items | {"feature": stored})


def _filter_rows(settings, memory, features, mask):
    """Return the slots of the existing rows that DUEL's policy admits."""
    # The filter is a loop; without this each iteration would send the split rows.
    both = memory.items["feature"], sharding.gather(features)
    mask = sharding.gather(mask)
    options = dict(score=settings.score, temperature=settings.temperature)

    def choose(memory, incoming, filled, mask):
        return duel.select(
            memory,
            incoming,
            filled=filled,
            incoming_mask=mask,
            newcomer_competes=settings.newcomer_competes,
            split=settings.spread,
            **options,
        )

    inputs = *both, memory.filled, mask
    if settings.spread:
        keep = choose(*inputs)
    else:  # each device filters the whole memory alike, which sends nothing
        keep = sharding.map_per_device(choose, (), inputs)
    keep = sharding.gather(keep)
    slots = sharding.gather(duel.incoming_slots(keep, memory.capacity))
    if settings.safe:
        options |= dict(filled=memory.filled, logsumexp=settings.logsumexp)
        slots = jnp.where(duel.is_safe(*both, keep, **options), slots, memory.capacity)
    return slots


def _stored_items(settings, batch, features):
    """Return the items that are kept of each example."""
    items = {"feature": features, "label": batch["label"], "index": batch["index"]}
    if settings.images:
        image = batch["image"]  # with crops already cut, the first of them
        items["image"] = image if image.ndim == 4 else image[:, 0]
    return items


def _place_memory(settings, memory):
    """Place the memory as the state holds it, split over the devices or not."""
    if not settings.spread:
        return memory
    rows, filled = sharded.SplitRows(memory.items), sharded.SplitRows(memory.filled)
    return buffer.Buffer(rows, filled, memory.seen)
