"""Cost of DUEL's policy, by itself and in a step of training.

  python benchmarks/duel.py policy --peer
  python benchmarks/duel.py step

`policy` times jaxcl.memory.duel.select in turns with the paper's Algorithm 4 as it is
written, in JAX and in eager PyTorch, counts operations, and compares the choices.
`step` times whole steps of D-MoCo and D-SimCLR in turns with MoCo v2 and SimCLR, jobs
built from configs/duel_cifar10.py.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.util
import json
import os
import pathlib
import runpy
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import duel_algorithm
import jax
import jax.numpy as jnp
import loops
import ml_collections
import numpy as np
import throughput

from jaxcl.config import build, sections
from jaxcl.memory import duel
from jaxcl.run import job

_CONFIG = pathlib.Path(__file__).resolve().parents[1] / "configs" / "duel_cifar10.py"
CLASSES = 10
DOMINANT = 0.5  # probability of the first class


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = made.add_subparsers(dest="part", required=True)
    policy = parts.add_parser("policy", help="the policy by itself")
    many = dict(type=int, nargs="+")
    sizes = [512, 2048, 8192, 65536]
    policy.add_argument("--memory", **many, default=sizes, help="rows, K")
    policy.add_argument("--batch", **many, default=[64, 256, 1024], help="rows, B")
    policy.add_argument("--dim", **many, default=[128, 256], help="of a row, Z")
    policy.add_argument(
        "--limit", type=float, default=4.0, help="GiB that all pairs' scores may take"
    )
    policy.add_argument("--seconds", type=float, default=0.3, help="per window, side")
    policy.add_argument("--peer", action="store_true", help="also time PyTorch")
    step = parts.add_parser("step", help="whole steps of training")
    pairs = (*PAIRS,)
    step.add_argument("--base", nargs="+", default=pairs, choices=pairs)
    step.add_argument("--depth", type=int, default=18, help="of the ResNet")
    step.add_argument("--width", type=int, default=16, help="of its first stage")
    step.add_argument("--size", type=int, default=32, help="pixels of a side")
    step.add_argument("--batch", type=int, default=128)
    step.add_argument("--memory", type=int, default=2048, help="rows, K")
    step.add_argument("--precision", default="float32", choices=(*sections.PRECISIONS,))
    step.add_argument("--steps-per-call", type=int, help="default: as in training")
    step.add_argument("--steps", type=int, default=2, help="per window")
    for part, seen in ((policy, 2.0), (step, 1.0)):
        part.add_argument(
            "--seen",
            type=float,
            default=seen,
            help=("rows that have passed the full memory before, in units of K"),
        )
        part.add_argument("--windows", type=int, default=5)
        part.add_argument("--json", help="file to append one line per row to")
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


def policy_rows(args):
    """Lists of lines of the table, one list for each size."""
    for capacity in args.memory:
        for dim in args.dim:
            stream = Rows(dim)
            memory, label = settled(stream, capacity, args.seen)
            for count in args.batch:
                batches = [stream.take(count)[0] for _ in range(args.windows)]
                size = {"K": capacity, "B": count, "Z": dim}
                size["dominant_share"] = float(np.mean(label == 0))
                yield [size | row for row in measure_policy(args, memory, batches)]


# Whole steps

PAIRS = {"moco": "d_moco", "simclr": "d_simclr"}  # names in the config


def config(args, name: str, data: str) -> ml_collections.ConfigDict:
    """The job's config: the paper's, on the images of a file and of these sizes."""
    made = runpy.run_path(str(_CONFIG))["get_config"](name)
    made.data = {"name": "npz", "path": data}
    made.scenario.evaluation = "none"
    made.evaluators = {}
    made.augment.size = args.size
    made.encoder.update(depth=args.depth, width=args.width)
    made.method.memory_size = args.memory
    made.method.drawn = min(256, args.memory)
    made.batch_size, made.precision = args.batch, args.precision
    # Rows must not all become the same one: how often the policy looks at all of the
    # memory depends on them.
    made.optimizer.lr = 1e-3
    made.devices, made.steps_per_call = 1, args.steps_per_call
    made.save_every = made.eval_every = 0
    return made


def _settling(args, steps_per_call) -> int:
    """Calls after which the memory is full and `--seen` more rows have passed."""
    rows = (1 + args.seen) * args.memory
    return -int(-rows // (args.batch * steps_per_call))


def make_job(args, name: str, directory) -> job.Job:
    """The job; its images are a pattern for each class, and noise."""
    rng, shape = np.random.default_rng(0), (args.size, args.size, 3)
    label = np.arange(max(2 * args.batch, 20 * CLASSES)) % CLASSES
    pattern = rng.integers(0, 128, (CLASSES, *shape), np.uint8)
    noise = rng.integers(0, 128, (len(label), *shape), np.uint8)
    path = pathlib.Path(directory) / "random.npz"
    np.savez(path, train_x=pattern[label] + noise, train_y=label)
    return build.build(config(args, name, str(path)), pathlib.Path(directory) / name)


def ready(args, work: job.Job, stack) -> throughput.Ours:
    """The step, its memory, if there is one, settled; `stack` closes its feed."""
    state = throughput.begun(work, 0)
    feed = job.feed_batches(work, work.stream.tasks[0].train, 0, 0)
    feed = stack.enter_context(contextlib.closing(feed))
    ours = throughput.Ours(work, state, feed, args.steps)
    remembers = state.extra.memory is not None
    ours.window(_settling(args, work.loop.steps_per_call) if remembers else 1)
    return ours


def step_rows(args):
    """Lists of lines of the table, one list for each pair."""
    for base in args.base:
        with tempfile.TemporaryDirectory() as directory:
            yield measure_step(args, (base, PAIRS[base]), directory)


def measure_step(args, names, directory) -> list[dict]:
    """What the table says of a method and of the one with an active memory."""
    with contextlib.ExitStack() as stack:
        sides = {
            name: ready(args, make_job(args, name, directory), stack) for name in names
        }
        seconds, busy = ({name: [] for name in names} for _ in range(2))
        for _ in range(args.windows):  # in turns: noise of the machine hits both
            for name, ours in sides.items():
                start = time.process_time()
                seconds[name].append(ours.window()[0] / ours.steps)
                busy[name].append((time.process_time() - start) / ours.steps)
    found = []
    for name, ours in sides.items():
        times = _times(seconds[name], seconds[names[0]], busy[name])
        sizes = ours.compiled.memory_analysis()
        bytes_of = sizes and sizes.temp_size_in_bytes + sizes.argument_size_in_bytes
        about = {"share": 1 - 1 / times["ratio"], "memory_bytes": bytes_of}
        found.append({"method": name} | times | about)
    return found


_HEADS = {
    "policy": (
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
    ),
    "step": (
        ("method", 9),
        ("step ms", 32),
        ("CPU ms", 10),
        ("time / base", 22),
        ("share of a step", 16),
        ("memory MB", 10),
    ),
}


def line(part: str, found: dict | None = None) -> str:
    """One row of a table, or its head."""
    heads, widths = zip(*_HEADS[part], strict=True)
    cells = heads
    if found is not None:

        def show(name, digits=2, scale=1.0):
            value = found[name]
            return "-" if value is None else f"{scale * value:,.{digits}f}"

        def span(name):
            low, high = show(f"{name}_min"), show(f"{name}_max")
            return f"{show(name)} ({low} to {high})"

        times = span("ms"), show("cpu_ms"), span("ratio")
        if part == "policy":
            cells = (
                *(str(found[name]) for name in ("K", "B", "Z", "side")),
                *times,
                show("temporary_bytes", 2, 1e-6),
                show("flops", 1, 1e-6),
                show("opened", 1),
                f"{show('same', 1, 100)} %",
                show("distinctiveness", 5),
            )
        else:
            share = f"{show('share', 1, 100)} %"
            cells = found["method"], *times, share, show("memory_bytes", 1, 1e-6)
    return "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))


def main(argv=None) -> list[dict]:
    """Measure one part, print its table, return what it holds."""
    args = parser().parse_args(argv)
    if getattr(args, "peer", False) and importlib.util.find_spec("torch") is None:
        parser().error("--peer: PyTorch is missing, pip install --group peers")
    # PyTorch must find memory on a GPU too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    about = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": throughput.cores(),
    }
    setting = {k: v for k, v in vars(args).items() if k != "json" and v is not None}
    for values in (about, setting):
        print(" ".join(f"{k}={v}" for k, v in values.items()))
    print(line(args.part), flush=True)
    rows = []
    for group in (policy_rows if args.part == "policy" else step_rows)(args):
        load = {"load": round(os.getloadavg()[0], 1)}
        for row in group:
            print(line(args.part, row), flush=True)
            rows.append(about | setting | load | row)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    return rows


if __name__ == "__main__":
    main()
