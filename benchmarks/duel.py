"""Cost of DUEL's policy: `python benchmarks/duel.py --peer`.

Times jaxcl.memory.duel.select in turns with the paper's Algorithm 4 as it is written,
in JAX and in eager PyTorch, counts operations, and compares the choices. `steps.py`
times whole steps with and without the policy.
"""

import argparse
import functools
import importlib.util
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import duel_algorithm
import jax
import jax.numpy as jnp
import loops
import numpy as np
import throughput

from jaxcl.memory import duel

CLASSES = 10
DOMINANT = 0.5  # probability of the first class


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, many = made.add_argument, dict(type=int, nargs="+")
    add("--memory", **many, default=[512, 2048, 8192, 65536], help="rows, K")
    add("--batch", **many, default=[64, 256, 1024], help="rows, B")
    add("--dim", **many, default=[128, 256], help="of a row, Z")
    pairs = "GiB that all pairs' scores may take"
    add("--limit", type=float, default=4.0, help=pairs)
    add("--seconds", type=float, default=0.3, help="per window, side")
    passed = "rows that have passed the full memory before, in units of K"
    add("--seen", type=float, default=2.0, help=passed)
    add("--windows", type=int, default=5)
    add("--peer", action="store_true", help="also time PyTorch")
    add("--json", help="file to append one line per row to")
    return made


class Rows:
    """An endless stream of unit rows around ten directions, half around the first."""

    def __init__(self, dim: int, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.centres = self._unit(CLASSES, dim)

    def _unit(self, count, dim, around=0.0):
        # Two rows of a class have a product of about 1/2.
        noise = self.rng.standard_normal((count, dim), np.float32) / dim**0.5
        made = around + noise
        return made / np.linalg.norm(made, axis=1, keepdims=True)

    def take(self, count: int):
        """Rows f32[N, Z], and their classes."""
        dominant = self.rng.random(count) < DOMINANT
        label = np.where(dominant, 0, self.rng.integers(1, CLASSES, count))
        centres = self.centres[label]
        return self._unit(*centres.shape, around=centres), label


def settled(stream: Rows, capacity: int, seen: float):
    """A memory that so many more rows than it holds have passed, and its classes.

    A policy that looks at one row after another does not care how they are batched.
    """
    memory, label = stream.take(capacity)
    choose = jax.jit(duel.select)
    left = round(seen * capacity)
    while left:
        rows, classes = stream.take(min(left, 8192))
        left -= len(rows)
        keep = np.asarray(choose(memory, rows))
        memory = np.concatenate([memory, rows])[keep]
        label = np.concatenate([label, classes])[keep]
    return memory, label


class Side(NamedTuple):
    """One form of the policy."""

    place: Callable  # numpy -> its kind of array, on its device
    call: Callable  # incoming -> what is held; returns when it is there
    temporary: int | None  # bytes that the compiled program takes, besides arguments


def jax_side(function, memory, incoming) -> Side:
    """A jitted form."""
    memory = jnp.asarray(memory)
    compiled = jax.jit(function).lower(memory, incoming).compile()

    def call(rows):
        return jax.block_until_ready(compiled(memory, rows))

    sizes = compiled.memory_analysis()
    return Side(jnp.asarray, call, sizes and sizes.temp_size_in_bytes)


def torch_side(memory) -> Side:
    """The form in PyTorch."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(throughput.cores())

    def place(rows):
        return torch.from_numpy(np.array(rows)).to(device)

    def call(rows):
        with torch.inference_mode():
            held = duel_algorithm.in_torch(memory, rows)
        return held.cpu()

    memory = place(memory)
    return Side(place, call, None)


def distinctness(rows, queries) -> float:
    """Mean distinctiveness of a memory to some rows, affine score, in float64."""
    products = queries @ rows.mean(0, dtype=np.float64)
    return float(-np.log((1 + products) / 2).mean())


def measure_policy(args, memory, batches) -> list[dict]:
    """What the table says of each side, on one memory and several batches."""
    rows, first = len(memory) + len(batches[0]), batches[0]
    functions, sides = {"ours": duel.select}, {}
    if 4 * rows**2 <= args.limit * 2**30:
        functions["plain"] = duel_algorithm.in_jax
        if args.peer:
            sides["PyTorch"] = torch_side(memory)
    else:
        print(f"all scores take {4 * rows**2 / 2**30:.1f} GiB: ours alone", flush=True)
    sides = {n: jax_side(f, memory, first) for n, f in functions.items()} | sides
    programs = {n: jax.make_jaxpr(f)(memory, first) for n, f in functions.items()}
    calls = {}
    for name, side in sides.items():
        placed = side.place(first)
        side.call(placed)
        once = _timed(functools.partial(side.call, placed), 1)[0]
        calls[name] = max(1, round(args.seconds / once))
    measured, counts = {n: [] for n in sides}, {n: [] for n in programs}
    for batch in batches:
        both, reference = np.concatenate([memory, batch]), None
        for name, side in sides.items():  # in turns: noise of the machine hits all
            placed = side.place(batch)
            held = np.asarray(side.call(placed))
            reference = held if reference is None else reference
            same = np.sum(~held & ~reference) / len(batch)
            times = _timed(functools.partial(side.call, placed), calls[name])
            measured[name].append((*times, same, distinctness(both[held], batch)))
        for name, program in programs.items():
            counts[name].append(loops.operations(program, memory, batch))
    return [_summary(name, sides[name], measured, counts) for name in sides]


def _summary(name, side, measured, counts) -> dict:
    seconds, busy, same, distinct = np.transpose(measured[name])
    flops, turns = zip(*counts.get(name, [(None, None)]), strict=True)
    return (
        {"side": name}
        | _times(seconds, np.transpose(measured["ours"])[0], busy)
        | {
            "temporary_bytes": side.temporary,
            "flops": float(np.mean(flops)) if name in counts else None,
            "opened": float(np.mean(turns)) if name == "ours" else None,
            "same": float(same.mean()),
            "distinctiveness": float(distinct.mean()),
        }
    )


def _timed(call, calls):
    """Seconds of a call, on the wall and of the process."""
    start, busy = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - start, time.process_time() - busy
    return tuple(each / calls for each in spent)


def _times(seconds, reference, busy) -> dict:
    """Times of a side, and their ratio to those of the side beside it."""
    ratio = np.divide(seconds, reference)
    return {
        "ms": 1e3 * float(np.median(seconds)),
        "ms_min": 1e3 * min(seconds),
        "ms_max": 1e3 * max(seconds),
        "cpu_ms": 1e3 * float(np.mean(busy)),
        "ratio": float(np.median(ratio)),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
    }


def policy_rows(args, directory):
    """Measure each size: a row for each side."""
    del directory
    for capacity in args.memory:
        for dim in args.dim:
            stream = Rows(dim)
            memory, label = settled(stream, capacity, args.seen)
            for count in args.batch:
                batches = [stream.take(count)[0] for _ in range(args.windows)]
                size = {"K": capacity, "B": count, "Z": dim}
                size["dominant_share"] = float(np.mean(label == 0))
                yield from (size | row for row in measure_policy(args, memory, batches))


_HEADS = (
    ("K", 6),
    ("B", 5),
    ("Z", 4),
    ("side", 8),
    ("ms", 34),
    ("CPU ms", 10),
    ("time / ours", 28),
    ("temp. MB", 9),
    ("M FLOP", 10),
    ("opened", 7),
    ("same", 8),
    ("I_d", 9),
)


def line(row: dict | None = None) -> str:
    """Write a row of the table, or its head."""
    heads, widths = zip(*_HEADS, strict=True)
    cells = heads
    if row is not None:

        def show(name, digits=2, scale=1.0):
            value = row[name]
            return "-" if value is None else f"{scale * value:,.{digits}f}"

        def span(name):
            low, high = show(f"{name}_min"), show(f"{name}_max")
            return f"{show(name)} ({low} to {high})"

        cells = (
            *(str(row[name]) for name in ("K", "B", "Z", "side")),
            span("ms"),
            show("cpu_ms"),
            span("ratio"),
            show("temporary_bytes", 2, 1e-6),
            show("flops", 1, 1e-6),
            show("opened", 1),
            f"{show('same', 1, 100)} %",
            show("distinctiveness", 5),
        )
    return "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))


def main(argv=None) -> list[dict]:
    """Measure the policy at all sizes, print the table, return its rows."""
    args = parser().parse_args(argv)
    if args.peer and importlib.util.find_spec("torch") is None:
        parser().error("--peer: PyTorch is missing, pip install --group peers")
    # PyTorch must find memory on a GPU too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return throughput.lines(args, policy_rows, line)


if __name__ == "__main__":
    main()
