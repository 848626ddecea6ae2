"""Compute log-sum-exps over products of rows without the matrix of products.

A contrastive loss needs one number for each anchor, but its logits are N anchors by K
rows. Here the logits are formed tile by tile in a loop, which keeps the maximum and the
sum so far (Milakov and Gimelshein, 2018); the backward pass forms the tiles again.
Memory grows with N + K, not with N x K. Value and gradients equal the matrix's up to
rounding.
"""

import chex
import jax
import jax.numpy as jnp

from jaxcl import core, sharding

# The logit of a pair that is left out. The difference of two -inf would be nan.
_ABSENT = -1e30
_NOBODY = jnp.iinfo(jnp.int32).min  # group of a row that does not exist
_TILE = 4096  # rows of a tile


def logsumexp(
    anchors: jax.Array,
    rows: jax.Array,
    *,
    exists: jax.Array | None = None,
    groups: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Compute the logarithm of the sum of exp(anchor . row) over rows, for each anchor.

    If several devices share the anchors, each device reads all rows.

    Args:
      anchors: f32[N, D], already divided by the temperature.
      rows: f32 or bf16 [K, D]; a product is of the narrower type of both, with sums in
        float32.
      exists: bool[K], rows that count; None: all.
      groups: i32[N] and i32[K], at least 0; a row of the anchor's own group does not
        count. None: all do.

    Returns:
      f32[N]; about -1e30 where no row counts. Gradients flow to anchors and rows.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import streaming
      >>> rows = jnp.array([[0.0, 0.0], [1.0, 0.0]])
      >>> round(float(streaming.logsumexp(jnp.eye(2), rows)[0]), 3)
      1.313
    """
    chex.assert_rank([anchors, rows], 2)
    if groups is None:
        groups = jnp.ones(len(anchors), jnp.int32), jnp.zeros(len(rows), jnp.int32)
    anchor_groups, row_groups = (jnp.asarray(x, jnp.int32) for x in groups)
    if exists is not None:
        row_groups = jnp.where(exists, row_groups, _NOBODY)
    arguments = (anchors, anchor_groups), (rows, row_groups)
    return sharding.map_per_device(_streamed, *arguments)


@jax.custom_vjp
def _streamed(anchors, anchor_groups, rows, row_groups):
    return _forward(anchors, anchor_groups, rows, row_groups)[0]


def _forward(anchors, anchor_groups, rows, row_groups):
    """Compute the log-sum-exps, and keep the arrays for their gradient."""
    left, tiles = _narrow(anchors, rows), _cut_tiles(anchors, rows, row_groups)

    def add_tile(carry, tile):
        top, total = carry
        logits, _ = _logits(left, anchor_groups, *tile)
        larger = jnp.maximum(top, jnp.max(logits, axis=1))
        added = jnp.sum(jnp.exp(logits - larger[:, None]), axis=1)
        return (larger, total * jnp.exp(top - larger) + added), None

    number = core.at_least_float32(left).dtype
    start = jnp.full(len(left), _ABSENT, number), jnp.zeros(len(left), number)
    (top, total), _ = jax.lax.scan(add_tile, start, tiles)
    logsums = top + jnp.log(total)
    return logsums, (anchors, anchor_groups, rows, row_groups, logsums)


def _backward(residuals, slope):
    """Compute the gradients in anchors and rows, tile by tile."""
    anchors, anchor_groups, rows, row_groups, logsums = residuals
    left = _narrow(anchors, rows)
    wide = core.at_least_float32(left)

    def add_tile(of_anchors, tile):
        logits, counts = _logits(left, anchor_groups, *tile)
        weights = jnp.exp(logits - logsums[:, None]) * slope[:, None]
        weights = jnp.where(counts, weights, 0)
        update = core.dot(weights, core.at_least_float32(tile[0]).T)
        return of_anchors + update, core.dot(weights.T, wide.T)

    start, tiles = jnp.zeros_like(wide), _cut_tiles(anchors, rows, row_groups)
    of_anchors, of_rows = jax.lax.scan(add_tile, start, tiles)
    of_rows = of_rows.reshape(-1, rows.shape[1])[: len(rows)]
    return of_anchors.astype(anchors.dtype), None, of_rows.astype(rows.dtype), None


_streamed.defvjp(_forward, _backward)


def _narrow(array, other):
    """Cast an array to the narrower type of both."""
    narrow = min(array.dtype, other.dtype, key=lambda x: jnp.finfo(x).bits)
    return array.astype(narrow)


def _cut_tiles(anchors, rows, row_groups):
    """Cut rows and their groups into tiles; the last ends in rows that do not exist."""
    rows = _narrow(rows, anchors)
    size = min(_TILE, len(rows))
    short = -len(rows) % size
    rows = jnp.pad(rows, ((0, short), (0, 0)))
    row_groups = jnp.pad(row_groups, (0, short), constant_values=_NOBODY)
    return rows.reshape(-1, size, rows.shape[1]), row_groups.reshape(-1, size)


def _logits(left, anchor_groups, rows, row_groups):
    """Compute the logits of a tile, f32[N, T], and which pairs count."""
    products = jnp.matmul(
        left,
        rows.T,
        precision=jax.lax.Precision.HIGH,  # see `core.dot`
        preferred_element_type=core.at_least_float32(left).dtype,
    )
    counts = (anchor_groups[:, None] != row_groups) & (row_groups != _NOBODY)
    return jnp.where(counts, products, _ABSENT), counts
