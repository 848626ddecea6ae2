"""Log-sum-exp over products of rows without the matrix of products.

A contrastive loss wants of its logits, N anchors by K rows, one number for each anchor.
Written plainly the whole matrix goes to the device's memory and back several times,
forward and backward. Here a kernel forms it tile by tile on the chip and keeps the
maximum and the sum so far (Milakov and Gimelshein, 2018); the backward pass forms the
tiles again. Memory grows with N + K, not with N x K.

The kernels are written in Pallas: for TPUs a grid whose columns come one after another,
for GPUs (Triton) a loop inside of each program, the columns split over programs.
Elsewhere `logsumexp` is the plain form. Its value and gradients are the same up to
rounding.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxcl import core

# Logit of a pair that is left out. With -inf the difference of two would be nan.
_ABSENT = -1e30
_NOBODY = jnp.iinfo(jnp.int32).min  # group of a row that does not exist
_TPU = 512, 1024  # rows and columns of a tile
_GPU = 64, 64
# A GPU has 108 to 132 multiprocessors: columns are split until there are twice as many
# programs.
_PROGRAMS = 256


class _Rows(NamedTuple):
    """Rows and what tells which pairs of them count."""

    rows: jax.Array  # f32 or bf16 [N, D]
    group: jax.Array  # i32[N], pairs of one group are left out


def logsumexp(
    anchors: jax.Array,
    rows: jax.Array,
    *,
    exists: jax.Array | None = None,
    groups: tuple[jax.Array, jax.Array] | None = None,
    on_each: Callable | None = None,
) -> jax.Array:
    """Logarithm of the sum of exp(anchor . row) over rows, for each anchor.

    Args:
      anchors: f32[N, D], already divided by the temperature.
      rows: f32 or bf16 [K, D]; a product is of the narrower type of both, with sums in
        float32.
      exists: bool[K], rows that count; None: all.
      groups: i32[N] and i32[K], at least 0; a row of the anchor's own group does not
        count. None: all do.
      on_each: `core.Parts.on_each`, where several devices share the anchors; each then
        meets all rows.

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
    masked = exists is not None or groups is not None
    own, others = groups or (
        jnp.ones(len(anchors), jnp.int32),
        jnp.zeros(len(rows), jnp.int32),
    )
    others = jnp.asarray(others, jnp.int32)
    if exists is not None:
        others = jnp.where(exists, others, _NOBODY)
    form = functools.partial(_streamed, masked)
    arguments = (anchors, jnp.asarray(own, jnp.int32)), (rows, others)
    return form(*sum(arguments, ())) if on_each is None else on_each(form, *arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _streamed(masked, anchors, own, rows, others):
    return _forward(masked, _Rows(anchors, own), _Rows(rows, others))


def _keep(masked, anchors, own, rows, others):
    left, right = _Rows(anchors, own), _Rows(rows, others)
    total = _forward(masked, left, right)
    return total, (left, right, total)


def _slopes(masked, kept, slope):
    left, right, total = kept
    # The compiler drops a gradient that nobody reads, such as a queue's.
    of_anchors = _backward(masked, True, left, right, total, slope)
    of_rows = _backward(masked, False, right, left, total, slope)
    of_anchors, of_rows = (
        x.astype(side.rows.dtype) for x, side in ((of_anchors, left), (of_rows, right))
    )
    return of_anchors, None, of_rows, None


_streamed.defvjp(_keep, _slopes)


def _forward(masked, left, right):
    forms = {"cuda": forward_on_gpu, "tpu": forward_on_tpu, "default": forward_plain}
    forms = {name: functools.partial(form, masked) for name, form in forms.items()}
    return jax.lax.platform_dependent(left, right, **forms)


def _backward(masked, by_outer, outer, inner, total, slope):
    forms = {"cuda": backward_on_gpu, "tpu": backward_on_tpu, "default": backward_plain}
    forms = {
        name: functools.partial(form, masked, by_outer) for name, form in forms.items()
    }
    return jax.lax.platform_dependent(outer, inner, total, slope, **forms)


def _counts(own, others):
    """Which pairs count, from groups of shapes that broadcast."""
    return (own != others) & (own != _NOBODY) & (others != _NOBODY)


def _narrowed(a, b):
    """Both in the narrower type; float32 rows beside a bfloat16 queue are cast."""
    narrow = min(a.dtype, b.dtype, key=lambda x: jnp.finfo(x).bits)
    return a.astype(narrow), b.astype(narrow)


# The plain form


def forward_plain(masked: bool, left: _Rows, right: _Rows) -> jax.Array:
    """The log-sum-exp by the matrix of all products, f32[N]."""
    logits = _logits(masked, left, right)
    return jax.nn.logsumexp(logits, axis=1)


def backward_plain(
    masked: bool,
    by_outer: bool,
    outer: _Rows,
    inner: _Rows,
    total: jax.Array,
    slope: jax.Array,
) -> jax.Array:
    """The gradient in the rows of `outer`, by the matrix of all products.

    Args:
      masked: whether some pairs are left out.
      by_outer: whether `outer` are the anchors, else `inner` are.
      outer, inner: the two sides.
      total: f32[N], the log-sum-exp of each anchor.
      slope: f32[N], the gradient in it.

    Returns:
      f32[rows of outer, D].
    """
    axis = 1 if by_outer else 0
    total, slope = (jnp.expand_dims(x, axis) for x in (total, slope))
    logits = _logits(masked, outer, inner)
    weights = jnp.where(logits > _ABSENT, jnp.exp(logits - total) * slope, 0)
    return core.dot(weights, inner.rows.astype(weights.dtype).T)


def _logits(masked, left, right):
    a, b = _narrowed(left.rows, right.rows)
    logits = core.dot(core.at_least_float32(a), core.at_least_float32(b))
    if not masked:
        return logits
    counts = _counts(left.group[:, None], right.group[None, :])
    return jnp.where(counts, logits, _ABSENT)


# What both kinds of kernels share


def _padded(x, count, value=0):
    """An array with rows added at its end."""
    short = count - len(x)
    if not short:
        return x
    return jnp.pad(x, ((0, short),) + ((0, 0),) * (x.ndim - 1), constant_values=value)


def _filled_up(masked, side, multiple):
    """Rows up to a multiple, whether pairs are masked then, and the rows there were."""
    count = -(-len(side.rows) // multiple) * multiple
    padded = _Rows(_padded(side.rows, count), _padded(side.group, count, _NOBODY))
    return padded, masked or count != len(side.rows)


def _product(a, b, axes, exact):
    """A product inside of a kernel, f32.

    Args:
      axes: which are summed over.
      exact: in full precision, where the device has it; else float32 goes as three
        products of bfloat16, which is what `core.dot` asks of a TPU.
    """
    contract = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(axes, ((), ())),
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )
    if exact or a.dtype == jnp.bfloat16:
        return contract(a, b)
    (a, a_rest), (b, b_rest) = map(_halves, (a, b))
    return contract(a, b) + (contract(a, b_rest) + contract(a_rest, b))


def _halves(x):
    """A float32 array as the sum of two of bfloat16, but for its last digits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(x.dtype)).astype(jnp.bfloat16)


_ROWS = ((1,), (1,))  # rows by rows
_WEIGHTS = ((1,), (0,))  # weights by rows


# TPUs: columns are the inner axis of the grid, which is run in order


def _spec(block, place):
    from jax.experimental import pallas as pl

    return pl.BlockSpec(block, place)


def forward_on_tpu(
    masked: bool, left: _Rows, right: _Rows, *, interpret: bool = False
) -> jax.Array:
    """As `forward_plain`, by a kernel for TPUs; `interpret`: on any device."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    count, dim = left.rows.shape
    left = left._replace(rows=_narrowed(left.rows, right.rows)[0])
    right = right._replace(rows=_narrowed(left.rows, right.rows)[1])
    high, wide = _tile(left, right)
    left, _ = _filled_up(masked, left, high)
    right, masked = _filled_up(masked, right, wide)
    grid = len(left.rows) // high, len(right.rows) // wide
    number = jnp.promote_types(left.rows.dtype, jnp.float32)
    total = pl.pallas_call(
        functools.partial(_forward_tile, masked=masked, exact=interpret),
        out_shape=jax.ShapeDtypeStruct((len(left.rows), 1), number),
        grid=grid,
        in_specs=[
            _spec((high, dim), lambda i, j: (i, 0)),
            _spec((wide, dim), lambda i, j: (j, 0)),
            _spec((high, 1), lambda i, j: (i, 0)),
            _spec((1, wide), lambda i, j: (0, j)),
        ],
        out_specs=_spec((high, 1), lambda i, j: (i, 0)),
        scratch_shapes=[pltpu.VMEM((high, 1), number)] * 2,
        compiler_params=_in_order(),
        cost_estimate=_cost(left, right, 1, grid[0]),
        interpret=interpret,
        name="logsumexp_of_products",
    )(left.rows, right.rows, left.group[:, None], right.group[None, :])
    return total[:count, 0]


def _forward_tile(x, y, own, others, total, top, sum_, *, masked, exact):
    """One tile: `top` is the largest logit so far, `sum_` of exp(logit - top)."""
    from jax.experimental import pallas as pl

    @pl.when(pl.program_id(1) == 0)
    def _():
        top[...] = jnp.full_like(top, _ABSENT)
        sum_[...] = jnp.zeros_like(sum_)

    logits = _product(x[...], y[...], _ROWS, exact)
    if masked:
        logits = jnp.where(_counts(own[...], others[...]), logits, _ABSENT)
    larger = jnp.maximum(top[...], jnp.max(logits, axis=1, keepdims=True))
    scaled = sum_[...] * jnp.exp(top[...] - larger)
    sum_[...] = scaled + jnp.sum(jnp.exp(logits - larger), axis=1, keepdims=True)
    top[...] = larger

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        total[...] = top[...] + jnp.log(sum_[...])


def backward_on_tpu(
    masked: bool,
    by_outer: bool,
    outer: _Rows,
    inner: _Rows,
    total: jax.Array,
    slope: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """As `backward_plain`, by a kernel for TPUs; `interpret`: on any device."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    count, dim = outer.rows.shape
    rows = _narrowed(outer.rows, inner.rows)
    outer, inner = outer._replace(rows=rows[0]), inner._replace(rows=rows[1])
    high, wide = _tile(outer, inner)
    outer, more = _filled_up(masked, outer, high)
    inner, masked = _filled_up(masked, inner, wide)
    masked = masked or more
    grid = len(outer.rows) // high, len(inner.rows) // wide
    number = jnp.promote_types(outer.rows.dtype, jnp.float32)
    length = len(outer.rows if by_outer else inner.rows)
    along, block = (lambda i, j: (i, 0), (high, 1))
    if not by_outer:
        along, block = (lambda i, j: (0, j), (1, wide))
    shape = (length, 1) if by_outer else (1, length)
    moved = pl.pallas_call(
        functools.partial(_backward_tile, masked=masked, exact=interpret),
        out_shape=jax.ShapeDtypeStruct((len(outer.rows), dim), number),
        grid=grid,
        in_specs=[
            _spec((high, dim), lambda i, j: (i, 0)),
            _spec((wide, dim), lambda i, j: (j, 0)),
            _spec(block, along),
            _spec(block, along),
            _spec((high, 1), lambda i, j: (i, 0)),
            _spec((1, wide), lambda i, j: (0, j)),
        ],
        out_specs=_spec((high, dim), lambda i, j: (i, 0)),
        scratch_shapes=[pltpu.VMEM((high, dim), number)],
        compiler_params=_in_order(),
        cost_estimate=_cost(outer, inner, 2, grid[0]),
        interpret=interpret,
        name="gradient_of_logsumexp",
    )(
        outer.rows,
        inner.rows,
        _padded(total, length).reshape(shape),
        _padded(slope, length).reshape(shape),
        outer.group[:, None],
        inner.group[None, :],
    )
    return moved[:count]


def _backward_tile(x, y, total, slope, own, others, moved, sum_, *, masked, exact):
    """One tile of the gradient; `sum_` is of the tiles so far."""
    from jax.experimental import pallas as pl

    @pl.when(pl.program_id(1) == 0)
    def _():
        sum_[...] = jnp.zeros_like(sum_)

    logits = _product(x[...], y[...], _ROWS, exact)
    weights = jnp.exp(logits - total[...]) * slope[...]
    if masked:
        weights = jnp.where(_counts(own[...], others[...]), weights, 0)
    sum_[...] += _product(weights.astype(y.dtype), y[...], _WEIGHTS, exact)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        moved[...] = sum_[...]


def _in_order():
    """Rows of tiles in any order, over cores; the tiles of a row one after another."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))


def _tile(outer, inner):
    """Rows and columns of a tile, no more than there are, by a TPU's registers."""
    high, wide = _TPU
    dim = outer.rows.shape[1]
    wide = max(128, min(wide, 128 * 1024 // dim // 128 * 128))
    return (
        min(high, -(-len(outer.rows) // 16) * 16),
        min(wide, -(-len(inner.rows) // 128) * 128),
    )


def _cost(outer, inner, products, reads):
    """What a kernel costs, for the compiler's own estimates."""
    from jax.experimental import pallas as pl

    pairs, dim = len(outer.rows) * len(inner.rows), outer.rows.shape[1]
    size = outer.rows.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * products * pairs * dim,
        transcendentals=pairs,
        bytes_accessed=size * dim * (len(outer.rows) + reads * len(inner.rows)),
    )


# GPUs: each program loops over its share of the columns


def forward_on_gpu(
    masked: bool, left: _Rows, right: _Rows, *, interpret: bool = False
) -> jax.Array:
    """As `forward_plain`, by a kernel for GPUs; `interpret`: on any device."""
    count = len(left.rows)
    left, right, masked, shares, tiles = _for_gpu(masked, left, right)
    high, dim = _GPU[0], left.rows.shape[1]
    number = jnp.promote_types(left.rows.dtype, jnp.float32)
    share = _spec((None, high), lambda i, j: (j, i))
    top, sum_ = _call_gpu(
        functools.partial(_forward_share, masked=masked, tiles=tiles),
        out_shape=[jax.ShapeDtypeStruct((shares, len(left.rows)), number)] * 2,
        grid=(len(left.rows) // high, shares),
        in_specs=[
            _spec((high, dim), lambda i, j: (i, 0)),
            _spec(right.rows.shape, lambda i, j: (0, 0)),
            _spec((high,), lambda i, j: (i,)),
            _spec(right.group.shape, lambda i, j: (0,)),
        ],
        out_specs=[share, share],
        cost_estimate=_cost(left, right, 1, 1),
        interpret=interpret,
        name="logsumexp_of_products",
    )(left.rows, right.rows, left.group, right.group)
    return jax.nn.logsumexp(top + jnp.log(sum_), axis=0)[:count]


def _forward_share(x, y, own, others, top, sum_, *, masked, tiles):
    """A program's share of the columns, tile by tile."""
    from jax.experimental import pallas as pl

    anchors, wide, dtype = x[...], _GPU[1], top.dtype
    first = pl.program_id(1) * tiles

    def add(tile, carry):
        largest, total = carry
        columns = pl.ds((first + tile) * wide, wide)
        logits = _gpu_product(anchors, y[columns, :], _ROWS)
        if masked:
            counts = _counts(own[...][:, None], others[columns][None, :])
            logits = jnp.where(counts, logits, _ABSENT)
        larger = jnp.maximum(largest, jnp.max(logits, axis=1))
        scaled = total * jnp.exp(largest - larger)
        return larger, scaled + jnp.sum(jnp.exp(logits - larger[:, None]), axis=1)

    start = jnp.full(top.shape, _ABSENT, dtype), jnp.zeros(top.shape, dtype)
    top[...], sum_[...] = jax.lax.fori_loop(0, tiles, add, start)


def backward_on_gpu(
    masked: bool,
    by_outer: bool,
    outer: _Rows,
    inner: _Rows,
    total: jax.Array,
    slope: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """As `backward_plain`, by a kernel for GPUs; `interpret`: on any device."""
    count, width = outer.rows.shape
    outer, inner, masked, shares, tiles = _for_gpu(masked, outer, inner)
    high, dim = _GPU[0], outer.rows.shape[1]
    number = jnp.promote_types(outer.rows.dtype, jnp.float32)
    length = len(outer.rows if by_outer else inner.rows)
    anchors = _spec((high,), lambda i, j: (i,))
    if not by_outer:
        anchors = _spec((length,), lambda i, j: (0,))
    parts = _call_gpu(
        functools.partial(_backward_share, masked=masked, tiles=tiles, outer=by_outer),
        out_shape=jax.ShapeDtypeStruct((shares, len(outer.rows), dim), number),
        grid=(len(outer.rows) // high, shares),
        in_specs=[
            _spec((high, dim), lambda i, j: (i, 0)),
            _spec(inner.rows.shape, lambda i, j: (0, 0)),
            anchors,
            anchors,
            _spec((high,), lambda i, j: (i,)),
            _spec(inner.group.shape, lambda i, j: (0,)),
        ],
        out_specs=_spec((None, high, dim), lambda i, j: (j, i, 0)),
        cost_estimate=_cost(outer, inner, 2, 1),
        interpret=interpret,
        name="gradient_of_logsumexp",
    )(
        outer.rows,
        inner.rows,
        _padded(total, length),
        _padded(slope, length),
        outer.group,
        inner.group,
    )
    return jnp.sum(parts, axis=0)[:count, :width]


def _backward_share(x, y, total, slope, own, others, moved, *, masked, tiles, outer):
    """A program's share of the columns, tile by tile."""
    from jax.experimental import pallas as pl

    rows, wide = x[...], _GPU[1]
    first = pl.program_id(1) * tiles

    def add(tile, sum_):
        columns = pl.ds((first + tile) * wide, wide)
        taken = y[columns, :]
        logits = _gpu_product(rows, taken, _ROWS)
        if outer:
            weights = jnp.exp(logits - total[...][:, None]) * slope[...][:, None]
        else:
            weights = jnp.exp(logits - total[columns][None, :])
            weights = weights * slope[columns][None, :]
        if masked:
            counts = _counts(own[...][:, None], others[columns][None, :])
            weights = jnp.where(counts, weights, 0.0)
        return sum_ + _gpu_product(weights.astype(y.dtype), taken, _WEIGHTS)

    start = jnp.zeros(moved.shape, moved.dtype)
    moved[...] = jax.lax.fori_loop(0, tiles, add, start)


def _gpu_product(a, b, axes):
    """A product inside of a kernel, as `core.dot` asks of a GPU: TF32, sums in f32."""
    return jax.lax.dot_general(
        a,
        b,
        (axes, ((), ())),
        precision=jax.lax.Precision.HIGH if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )


def _for_gpu(masked, outer, inner):
    """Both sides padded, whether pairs are masked, shares of columns, tiles of each."""
    from jax.experimental import pallas as pl

    high, wide = _GPU
    rows = _narrowed(outer.rows, inner.rows)
    dim = max(pl.next_power_of_2(rows[0].shape[1]), 16)  # what Triton multiplies
    rows = [jnp.pad(x, ((0, 0), (0, dim - x.shape[1]))) for x in rows]
    outer, inner = outer._replace(rows=rows[0]), inner._replace(rows=rows[1])
    outer, more = _filled_up(masked, outer, high)
    tiles = -(-len(inner.rows) // wide)
    shares = max(_PROGRAMS // (len(outer.rows) // high), 1)
    shares = min(2 ** (shares.bit_length() - 1), tiles)
    tiles = -(-tiles // shares)
    inner, masked = _filled_up(masked, inner, shares * tiles * wide)
    return outer, inner, masked or more, shares, tiles


def _call_gpu(kernel, *, in_specs, **options):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    dim = in_specs[0].block_shape[1]
    # Two stages of a loop's loads, or wide rows would not fit into shared memory.
    parameters = triton.CompilerParams(num_warps=4 if dim <= 128 else 8, num_stages=2)
    return pl.pallas_call(
        kernel, in_specs=in_specs, compiler_params=parameters, **options
    )
