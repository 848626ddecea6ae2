"""Parts of GDumb's fit that are functions of arrays: its rates, batches, mixtures.

Prabhu, Torr and Dokania, "GDumb", ECCV 2020, as its released code trains.
"""

import math

import jax
import jax.numpy as jnp


def rate(number: int, lr: float, end_lr: float) -> float:
    """Learning rate of a pass: cosines over 1, 2, 4, 8 ... passes after the first."""
    if number == 0:
        return lr / 10
    length = 1 << (number.bit_length() - 1)
    done = (number - length) / length
    return end_lr + (lr - end_lr) * (1 + math.cos(math.pi * done)) / 2


def batch_of(key, memory, number, size: int):
    """Images, labels and mask of a pass's batch; a key shuffles a pass."""
    noise = jnp.where(memory.filled, jax.random.uniform(key, memory.filled.shape), 2)
    place, count = number * size + jnp.arange(size), jnp.sum(memory.filled)
    rows = jnp.argsort(noise)[place % jnp.maximum(count, 1)]
    return memory.items["image"][rows], memory.items["label"][rows], place < count


def mixed(key, images, label, *, probability, alpha):
    """CutMix (Yun et al., ICCV 2019): one box of each image is another image's.

    Args:
      images: f32[B,H,W,C]. label: i32[B].
      probability: that the batch is mixed at all.
      alpha: the box has a share of 1 - Beta(alpha, alpha) of the area, but for what
        sticks out and for whole pixels.

    Returns:
      Images; i32[B], labels of what fills the boxes; f32[], share outside the box.
    """
    k_any, k_share, k_rows, k_y, k_x = jax.random.split(key, 5)
    side = jnp.sqrt(1 - jax.random.beta(k_share, alpha, alpha, dtype=jnp.float32))
    rows = jax.random.permutation(k_rows, len(label))
    inside, area = True, 1.0
    for axis, k_centre in ((1, k_y), (2, k_x)):
        extent = images.shape[axis]
        centre = jax.random.randint(k_centre, (), 0, extent)
        half = jnp.floor(extent * side).astype(jnp.int32) // 2
        low = jnp.clip(centre - half, 0, extent)
        high = jnp.clip(centre + half, 0, extent)
        shape = [-1 if i == axis else 1 for i in range(4)]
        pixel = jnp.arange(extent).reshape(shape)
        inside, area = inside & (low <= pixel) & (pixel < high), area * (high - low)
    due = jax.random.uniform(k_any) < probability
    share = jnp.where(due, 1 - area / math.prod(images.shape[1:3]), 1)
    return jnp.where(inside & due, images[rows], images), label[rows], share
