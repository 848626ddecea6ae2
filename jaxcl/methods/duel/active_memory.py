"""A memory of features that is filtered at every step, for `duel.py`."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jaxcl import core
from jaxcl.memory import buffer, duel, policies, sharded

POLICIES = ("duel", "fifo", "reservoir")


class Settings(NamedTuple):
    """Which rows are kept, and what of them."""

    policy: str  # one of POLICIES
    size: int  # rows, K
    dim: int  # of a feature
    images: bool  # keep u8 images, too
    spread: bool  # over the devices
    safe: bool  # no update that makes the memory less distinct to the batch
    newcomer_competes: bool
    score: str
    temperature: float
    gather: Callable = lambda tree: tree  # see `core.Parts`


def check(settings: Settings) -> None:
    """Refuse an unknown policy or score."""
    core.check_choice("config.method.policy", settings.policy, POLICIES)
    core.check_choice("config.method.score", settings.score, duel.SCORES)


def create(settings: Settings, batch):
    """An empty memory for examples like those of the batch."""
    row = _rows(settings, batch, jnp.zeros((len(batch["label"]), settings.dim)))
    example = {name: leaf[0] for name, leaf in row.items()}
    return _placed(settings, buffer.create(example, settings.size))


def whole(memory) -> buffer.Buffer:
    """The memory as `buffer` and `duel` take it, wherever its rows lie."""
    if not isinstance(memory.items, sharded.Spread):
        return memory
    return buffer.Buffer(memory.items.rows, memory.filled.rows, memory.seen)


def update(settings: Settings, memory: buffer.Buffer, key, batch, features, after):
    """The memory after a batch, and the share of the batch that it took, f32[].

    Args:
      memory: of `whole`.
      features: f32[B, D], unit rows.
      after: what was read of the memory, which is read before it is written.
    """
    rows, mask = _rows(settings, batch, features), jnp.ones(len(features), bool)
    if settings.policy == "fifo":
        slots = policies.fifo(memory, mask)
    elif settings.policy == "reservoir":
        slots = policies.reservoir(memory, key, mask)
    else:
        slots = _filtered(settings, memory, features)
    written = buffer.write(memory, slots, rows, after=after)
    return _placed(settings, written), jnp.mean(slots < memory.capacity)


def refreshed(memory: buffer.Buffer, slots, features, exists) -> buffer.Buffer:
    """The memory with new features of some rows; `exists` bool[R] masks the others."""
    slots = jnp.where(exists, slots, memory.capacity)
    stored = memory.items["feature"].at[slots].set(features, mode="drop")
    return memory._replace(items=memory.items | {"feature": stored})


def _filtered(settings, memory, features):
    """Slots of the rows that DUEL's policy lets in."""
    # The filter is a loop, whose turns would send what is split among the devices.
    both = memory.items["feature"], settings.gather(features)
    options = dict(
        score=settings.score, temperature=settings.temperature, filled=memory.filled
    )
    keep = duel.select(*both, newcomer_competes=settings.newcomer_competes, **options)
    keep = settings.gather(keep)
    slots = settings.gather(duel.slots(keep, memory.capacity))
    if settings.safe:
        slots = jnp.where(duel.is_safe(*both, keep, **options), slots, memory.capacity)
    return slots


def _rows(settings, batch, features):
    """What is kept of each example."""
    kept = {"feature": features, "label": batch["label"], "index": batch["index"]}
    if settings.images:
        image = batch["image"]  # of crops already cut, one
        kept["image"] = image if image.ndim == 4 else image[:, :1]
    return kept


def _placed(settings, memory):
    """The memory as the state holds it."""
    if not settings.spread:
        return memory
    rows, filled = sharded.Spread(memory.items), sharded.Spread(memory.filled)
    return buffer.Buffer(rows, filled, memory.seen)
