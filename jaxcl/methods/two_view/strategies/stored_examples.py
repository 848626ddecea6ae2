"""A memory of examples, for DER and LUMP."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcl import core, sharding
from jaxcl.memory import buffer, policies
from jaxcl.methods.two_view import records


def create_memory(image: jax.Array, size: int, dim: int | None = None) -> buffer.Buffer:
    """Create an empty memory of images, and of projections f32[dim] if there is one."""
    item = {"image": image}
    if dim is not None:
        item["projection"] = jnp.zeros((dim,))
    return buffer.create(item, size)


def draw_examples(
    memory: buffer.Buffer, keys: records.StepKeys, count: int, parts: core.Parts
):
    """Draw at most `count` examples.

    Returns:
      two views of each f32[R,2,H,W,C]; bool[R], those that exist; the items.
    """
    count = min(count, memory.capacity)
    # Every device holds the whole memory; each takes its share of the drawn rows.
    items, mask, _ = sharding.shard_rows_in_jit(buffer.sample(memory, keys.draw, count))
    return parts.augment(keys.augment_drawn, items["image"]), mask, items


def write_examples(
    memory: buffer.Buffer,
    key: jax.Array,
    images: jax.Array,
    features: records.Features,
    reading: records.Reading,
) -> buffer.Buffer:
    """Offer a step's examples to the memory, a reservoir."""
    offered = {"image": images, "projection": features.z[:, 0]}
    stored: Any = memory.items
    items = {name: offered[name] for name in stored}
    slots = policies.reservoir(memory, key, jnp.ones(len(images), bool))
    return buffer.write(memory, slots, items, after=reading.drawn)


def mix_examples(
    key: jax.Array,
    mix: float,
    views: jax.Array,
    stored: jax.Array,
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Mix rows with stored ones, as LUMP does (Madaan et al., ICLR 2022).

    m x + (1 - m) x', where m ~ Beta(mix, mix) is the same for the batch and all views.
    A row stays as it is while its partner does not exist.

    Args:
      key: threefry key, of m.
      mix: both parameters of the distribution.
      views: f32[B,V,H,W,C].
      stored: f32[R,V,H,W,C]; the partner of row i is row i modulo R.
      mask: bool[R], rows of `stored` that exist.

    Returns:
      the mixtures, f32[B,V,H,W,C], and m, f32[].
    """
    rows = jnp.arange(len(views)) % len(stored)
    share = jax.random.beta(key, mix, mix).astype(views.dtype)
    blend = share * views + (1 - share) * stored[rows]
    exists = mask[rows][:, None, None, None, None]
    return jnp.where(exists, blend, views), share
