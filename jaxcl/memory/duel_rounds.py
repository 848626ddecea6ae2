"""DUEL's rounds on accelerators: a known number of them, which look at all rows.

A GPU launches the kernels of a loop one after another, and its host reads back whether
a loop of unknown length goes on. So the windows of `duel.select`, which save a CPU most
of the work, cost a GPU many times what they save. Here are two forms of the same
rounds: a loop of XLA's, and one Pallas kernel for all rounds.
"""

import functools

import jax
import jax.numpy as jnp

# Rows of [memory; incoming] that one kernel takes: a vector over them must fit into the
# registers of a multiprocessor, their products (256 MiB) into the device's memory.
MOST = 8192
_WARPS = 8


def in_turn(
    memory: jax.Array, incoming: jax.Array, present: jax.Array, limits: tuple
) -> jax.Array:
    """Play the rounds with the affine score, each over all rows.

    A row's score is its product with the sum of the present rows, computed anew in
    every round, so that no rounding piles up in the scores.

    Args:
      memory: f32[K, Z], unit rows.
      incoming: f32[B, Z].
      present: bool[K+B], rows that are there before the first round.
      limits: i32[], number of the first round; i32[], number after the last; and 1 if a
        round evicts after it inserts, else 0. Round r inserts row r of `incoming`.

    Returns:
      bool[K+B], rows that are there after the last round.
    """
    rows = jnp.concatenate([memory, incoming])
    capacity, (first, end, ahead) = len(memory), limits

    def play(round, carry):
        present, total = carry
        # Not a product of XLA's: the sum fuses with the mask, in full float32.
        scores = jnp.sum(rows * total, axis=1)
        worst = jnp.argmax(jnp.where(present, scores, -jnp.inf))
        joins = capacity + round + ahead
        gain = rows[jnp.minimum(joins, len(rows) - 1)] - rows[worst]
        order = jnp.arange(len(rows))
        after = (present & (order != worst)) | (order == joins)
        plays = (first <= round) & (round < end)
        return jnp.where(plays, after, present), jnp.where(plays, total + gain, total)

    total = jnp.sum(jnp.where(present[:, None], rows, 0), axis=0)
    return jax.lax.fori_loop(0, len(incoming), play, (present, total))[0]


def in_one_kernel(
    alike: jax.Array,
    sums: jax.Array,
    present: jax.Array,
    limits: tuple,
    *,
    capacity: int,
    form: str = "gpu",
    interpret: bool = False,
) -> jax.Array:
    """Play the rounds in one kernel, by the scores of all pairs.

    The sums run along, from those that the call begins with. Over 3,000 rounds what
    they collect of rounding stayed below that of the products.

    Args:
      alike: f32[K+B, K+B], the score of each pair of rows.
      sums: f32[K+B], of `alike` over the present rows.
      present, limits: as in `in_turn`.
      capacity: K.
      form: "gpu" or "tpu", the chip that the kernel is for.
      interpret: compute on any device, for tests.

    Returns:
      As `in_turn`.
    """
    # Not above: it takes a third of a second, and a CPU runs none of it.
    from jax.experimental import pallas as pl

    count, (first, end, ahead) = len(alike), limits
    # Of a vector in Triton; of a row of a TPU's tiles.
    padded = pl.next_power_of_2(count) if form == "gpu" else -(-count // 128) * 128
    short = padded - count
    bounds = jnp.stack([first, end]).astype(jnp.int32)
    sums, there = (jnp.pad(x.astype(sums.dtype), (0, short)) for x in (sums, present))
    alike = jnp.pad(alike, ((0, 0), (0, short)))
    call = _on_gpu if form == "gpu" else _on_tpu
    kept = call(bounds, alike, sums, there, capacity + ahead, interpret)
    return kept[:count] > 0


def _after(order, present, worst, new):
    """The rows present after a round in which one goes and another comes."""
    present = jnp.where(order == worst, 0.0, present)
    return jnp.where(order == new, 1.0, present)


def _on_gpu(bounds, alike, sums, there, joins, interpret):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        functools.partial(_gpu_kernel, joins=joins),
        out_shape=jax.ShapeDtypeStruct(there.shape, there.dtype),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="duel_rounds",
    )(bounds, alike, sums, there)


def _gpu_kernel(bounds, alike, sums, there, kept, *, joins):
    """All rounds by one multiprocessor; a round reads two rows of `alike`."""
    order = jnp.arange(sums.shape[0], dtype=jnp.int32)
    last = alike.shape[0] - 1

    def play(round, carry):
        present, scores = carry
        named = jnp.where(present > 0, scores, -jnp.inf)
        worst, new = jnp.argmax(named, axis=0).astype(jnp.int32), round + joins
        scores += alike[jnp.minimum(new, last), :] - alike[worst, :]
        return _after(order, present, worst, new), scores

    start = there[:], sums[:]
    kept[:] = jax.lax.fori_loop(bounds[0], bounds[1], play, start)[0]


def _on_tpu(bounds, alike, sums, there, joins, interpret):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    row = (1, len(sums))
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    return pl.pallas_call(
        functools.partial(_tpu_kernel, joins=joins),
        out_shape=jax.ShapeDtypeStruct(row, there.dtype),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
            whole,
            whole,
        ],
        out_specs=whole,
        scratch_shapes=[
            pltpu.VMEM((2, *row), sums.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        interpret=interpret,
        name="duel_rounds",
    )(bounds, alike[:, None], sums[None], there[None])[0]


def _tpu_kernel(bounds, alike, sums, there, kept, rows, arrived, *, joins):
    """All rounds; a round fetches two rows of `alike` from the device's memory."""
    from jax.experimental.pallas import tpu as pltpu

    order = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1)
    last = alike.shape[0] - 1

    def fetch(index, place):
        copy = pltpu.make_async_copy(alike.at[index], rows.at[place], arrived.at[place])
        copy.start()
        return copy

    def play(round, carry):
        present, scores = carry
        new = round + joins
        comes = fetch(jnp.minimum(new, last), 1)
        named = jnp.where(present > 0, scores, -jnp.inf)
        # Of equal ones the first; as floats, whose least a TPU finds.
        best = jnp.where(named == jnp.max(named), order.astype(jnp.float32), 1e9)
        worst = jnp.min(best).astype(jnp.int32)
        goes = fetch(worst, 0)
        comes.wait()
        goes.wait()
        return _after(order, present, worst, new), scores + (rows[1] - rows[0])

    start = there[...], sums[...]
    kept[...] = jax.lax.fori_loop(bounds[0], bounds[1], play, start)[0]
