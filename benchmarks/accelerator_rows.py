"""The rows of accelerator.py: what each measures, one side of one row in a process.

accelerator.py starts this file for every side of every row, so that a row which fails,
or takes all memory, ends alone, and memory at the peak is that of one row. The last
line that it prints is JSON: numbers, or {"failed": why}.

A side is "ours", our step on the chip; "peer", the same step in PyTorch, with JAX on
the CPU beside it; "predicted", what the chip's own compiler says on a machine without
it (`python -m jaxcl.scaling --target`).
"""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import duel
import jax
import numpy as np
import online
import seeds as seeds_benchmark
import targets as targets_benchmark
import throughput
from absl import flags

from jaxcl import sharding
from jaxcl.config import build
from jaxcl.run import job, seeds
from jaxcl.scaling import command, compiled, hardware, targets

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIDES = ("ours", "peer", "predicted")
LONG = "--windows=5", "--steps=4000"  # of a schedule from which windows are cut
_TINY_NET = "--width=4", "--size=16"
_TINY_HEADS = "--hidden=16", "--output=8"
# Options that make rows of a kind as small as they get.
TINY = {
    "two_view": (*_TINY_NET, *_TINY_HEADS, "--depth=10", "--queue=64", "--batch=8"),
    "online": ("--width=4", "--batch=4", "--per-class=2"),
    "seeds": ("--width=4", "--batch=4", "--per-class=2", "--seeds=2"),
    "duel": (*_TINY_NET, "--depth=10", "--batch=16", "--memory=64"),
}


class Row(NamedTuple):
    """A row: its kind, a name in `KINDS`, and options of the kind's own benchmark."""

    kind: str
    options: tuple[str, ...] = ()


def _two_view(base, depth, size, batch):
    sizes = f"--depth={depth}", f"--size={size}", f"--batch={batch}"
    return Row(
        "two_view",
        (f"--base={base}", "--strategy=pnr", *sizes, "--precision=bfloat16", *LONG),
    )


_BASES = {"moco": "mocov2plus", "byol": "byol"}
_DUEL = "--depth=50", "--width=64", "--size=32", "--batch=256", "--memory=2048"
ROWS = {
    **{
        f"{short}_r{depth}_{size}px_{batch}": _two_view(base, depth, size, batch)
        for size, batches in ((32, (256, 512, 1024, 2048, 4096)), (224, (256,)))
        for depth in (18, 50)
        for short, base in _BASES.items()
        for batch in batches
    },
    "online_er_ace": Row("online", LONG),
    "online_er_ace_20_seeds": Row("seeds", ("--seeds=20", *LONG)),
    "duel_share": Row(
        "duel", ("step", "--base=moco", *_DUEL, "--precision=bfloat16", "--seen=1")
    ),
    # Rows of benchmarks/targets.py, whose predictions are in docs/targets.json.
    **{
        name: Row("paper", (name,))
        for name in ("mocov2plus-pnr", "er_ace", "cclis", "icl", "duel-moco")
    },
    "table_er_ace": Row("cell", ("--seeds=10",)),
}


class Kind(NamedTuple):
    """How rows of a kind are measured."""

    parse: Callable  # (options, whether tiny) -> arguments of its benchmark
    works: Callable  # (arguments, folder) -> name -> job, the row's own first
    ready: Callable  # (arguments, job, stack) -> throughput.Ours, warmed up
    peer: Callable | None = None  # (arguments, job, stack, device) -> as peer.timed


def _parsed(benchmark, kind):
    def parse(options, tiny):
        return benchmark.parser().parse_args([*options, *(TINY[kind] if tiny else ())])

    return parse


def _two_view_works(args, folder):
    return {"ours": throughput.make_job(args, folder)}


def _two_view_ready(args, work, stack):
    return throughput.in_second_task(work, 1, stack)


def _two_view_peer(args, work, stack, device):
    import peer

    state = jax.device_get(throughput.begun(work, 1).replace(key=None))
    return peer.timed(
        args, work, state, throughput.cores(), device=device, compiled=device == "cuda"
    )


def _online_works(args, folder):
    return {"ours": online.make_job(args, "er_ace", folder)}


def _online_peer(args, work, stack, device):
    import peer_online

    args.steps = 3
    state = jax.device_get(online.ready(args, work, stack).state.replace(key=None))
    return peer_online.timed(
        args, work, state, throughput.cores(), device=device, compiled=device == "cuda"
    )


def _seeds_works(args, folder):
    one = online.make_job(args, "er_ace", folder)
    return {
        "ours": seeds.together({k: one._replace(seed=k) for k in range(args.seeds)})
    }


def _duel_works(args, folder):
    names = [name for base in args.base for name in (duel.PAIRS[base], base)]
    return {name: duel.make_job(args, name, folder) for name in names}


def _paper_parsed(options, tiny):
    """Flags of `python -m jaxcl.scaling` for a row of targets.py."""
    (name,) = options
    config, *words = targets_benchmark.command(name, "h100:1")
    if tiny:
        config += (":" if config.endswith(".py") else ",") + "debug"
    # Of one device, and long enough for all windows; neither is part of the program.
    words += ["--config.devices=1", "--config.epochs=1000"]
    argv = ["accelerator", config, *words]
    values = flags.FlagValues()
    command.define_flags(values, argv)
    values(argv)
    return values


def _paper_works(values, folder):
    """The job of a config, on random images where its set must be read."""
    data = command.stand_in(values)
    if data is not None and data.train.images is not None:
        shape = data.train.images.shape
        images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        data = data._replace(train=data.train._replace(images=images))
    return {"ours": build.planned(values.config, data, one_step=False)}


KINDS = {
    "two_view": Kind(
        _parsed(throughput, "two_view"),
        _two_view_works,
        _two_view_ready,
        _two_view_peer,
    ),
    "online": Kind(
        _parsed(online, "online"), _online_works, online.ready, _online_peer
    ),
    "seeds": Kind(
        _parsed(seeds_benchmark, "seeds"), _seeds_works, seeds_benchmark.ready
    ),
    "duel": Kind(_parsed(duel, "duel"), _duel_works, duel.ready),
    "paper": Kind(_paper_parsed, _paper_works, _two_view_ready),
}


def sides(name: str) -> tuple[str, ...]:
    """The sides that a row has."""
    kind = KINDS.get(ROWS[name].kind)
    if kind is None:  # a cell of a table
        return ("ours",)
    return SIDES if kind.peer else ("ours", "predicted")


def ours(name: str, *, tiny: bool, seconds: float, windows: int, folder) -> dict:
    """Our step of a row, measured on the device that is here.

    Args:
      tiny: whether as small as it gets.
      seconds: of a window, about.
      windows: how many.
      folder: an empty one.

    Returns:
      Numbers for JSON: milliseconds of a step (median, least, most), "examples" of a
      step, seconds to compile, bytes planned and at the peak, FLOPs as written, and
      "program", what `targets.program` says of the compiled text. Where the row has a
      method beside it, its milliseconds, and the share that is ours alone.
    """
    kind = KINDS[ROWS[name].kind]
    args = kind.parse(ROWS[name].options, tiny)
    with contextlib.ExitStack() as stack:
        works = kind.works(args, folder)
        running = {x: kind.ready(args, work, stack) for x, work in works.items()}
        times = timed(running, seconds=seconds, windows=windows)
    (first, step), *others = running.items()
    work = works[first]
    task = work.stream.tasks[:2][-1].index
    precision = work.config.get("precision", "float32")
    planned = step.compiled.memory_analysis()
    held = compiled.held(compiled.memory_of(planned)) if planned else None
    stats = jax.local_devices()[0].memory_stats() or {}
    found = _milliseconds("", times[first]) | {
        "examples": work.rows * work.parts(task),
        "compile_seconds": step.compile_seconds,
        "planned_bytes": held,
        "peak_bytes": stats.get("peak_bytes_in_use") if not others else None,
        "precision": precision,
        "flops": throughput.flops(work, task),
        "peak_flops": throughput.device_peak(jax.devices()[0], precision),
        "seeds": len(work.together) or None,
        "program": in_numbers(step.compiled.as_text(), work.steps_per_call),
    }
    for other, _ in others:
        ratio = np.divide(times[other], times[first])
        found |= _milliseconds("base_", times[other])
        found |= {"base": other, "share": 1 - float(np.median(ratio))}
    return found


def _milliseconds(prefix, times) -> dict:
    return {
        f"{prefix}ms": 1e3 * float(np.median(times)),
        f"{prefix}ms_min": 1e3 * min(times),
        f"{prefix}ms_max": 1e3 * max(times),
    }


def timed(running: dict, *, seconds: float, windows: int) -> dict[str, list[float]]:
    """Seconds of a step in each window, of several steps in turns."""
    calls = {}
    for name, step in running.items():
        step.window(1)
        calls[name] = min(max(1, round(seconds / step.window(1)[0])), 1000)
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(windows):
        for name, step in running.items():
            in_call = step.steps // step.calls
            spent = step.window(calls[name])[0]
            times[name].append(spent / (calls[name] * in_call))
    return times


def in_numbers(text: str, steps: int) -> dict | None:
    """What jaxcl.scaling says of the program that runs here; None of an unknown chip.

    A CPU is unknown, and its program is read as if it were an H100's: rehearsed, but
    for its times.
    """
    device = jax.devices()[0]
    machine = throughput.machine(device)
    if machine is None and device.platform != "cpu":
        return None
    found = targets.program(text, steps, machine or hardware.MACHINES["h100"])
    least = found["least"] if machine is not None else None
    kernels = sum(found["kernels"].values())
    return {
        "kernels": kernels,
        "flops": found["flops"],
        "bytes": found["bytes"],
        "least": least,
    }


def peer(name: str, *, tiny: bool, seconds: float, windows: int, folder) -> dict:
    """The step of a row in PyTorch; the arguments of `ours`."""
    import torch

    kind = KINDS[ROWS[name].kind]
    assert kind.peer is not None
    args = kind.parse(ROWS[name].options, tiny)
    args.steps = 3
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with contextlib.ExitStack() as stack:
        (work,) = kind.works(args, folder).values()
        window, about = kind.peer(args, work, stack, device)
    steps = min(max(1, round(seconds / window(1))), 5000)
    times = [window(steps) / steps for _ in range(windows)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return _milliseconds("", times) | {"peer": about, "peak_bytes": peak}


def predicted(name: str, *, tiny: bool, target: str, kept: str | None, folder) -> dict:
    """What a chip's own compiler says of a row; see `targets_benchmark.summary`."""
    aim = targets.parse(target)
    if lacks := targets.missing(aim):
        return {"failed": f"not installed: {lacks}"}
    kind = KINDS[ROWS[name].kind]
    args = kind.parse(ROWS[name].options, tiny)
    with sharding.for_elsewhere(targets.devices(aim)):
        work: job.Job = next(iter(kind.works(args, folder).values()))
        task = work.stream.tasks[:2][-1].index
        machine = hardware.MACHINES[aim.machine]
        return targets_benchmark.summary(
            targets.measure(work, task, aim, machine, kept=kept)
        )


def cell(name: str, *, tiny: bool, data: str | None, folder) -> dict:
    """A cell of a table, by the command that a user gives.

    ER-ACE on Split CIFAR-10 with 20 images a class in its memory (Caccia et al., Table
    2: 43.7), all seeds side by side. Without `data` the images are random, and its time
    alone means something.
    """
    (count,) = ROWS[name].options
    if tiny:
        words = ["--config=configs/er_ace_cifar10.py:debug", "--config.seeds=2"]
    else:
        words = [
            "--config=configs/er_ace_cifar10.py",
            count.replace("--", "--config."),
            *_images(data, folder),
        ]
    began = time.monotonic()
    run = pathlib.Path(folder) / "run"
    ran = subprocess.run(
        [sys.executable, "-m", "jaxcl.main", *words, f"--workdir={run}"]
        + ["--config.side_by_side=True"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if ran.returncode:
        return {"failed": (ran.stderr.splitlines() or [""])[-1][:300]}
    told = json.loads((run / seeds.SUMMARY).read_text())
    accuracy = told["predict/class_incremental"]["average_accuracy"]
    return {"seconds": time.monotonic() - began, "random": data is None, **accuracy}


def _images(data, folder) -> list[str]:
    """Options that name the set of the cell; random images of its size, if none is."""
    if data is not None and pathlib.Path(data).is_dir():
        return [f"--config.data.path={data}"]  # arrays, as the config has it
    path = data or pathlib.Path(folder) / "random.npz"
    if data is None:
        rng, made = np.random.default_rng(0), {}
        for split, rows in (("train", 50_000), ("test", 10_000)):
            made[f"{split}_x"] = rng.integers(0, 256, (rows, 32, 32, 3), np.uint8)
            made[f"{split}_y"] = np.arange(rows) % 10
        np.savez(path, **made)
    return ["--config.data.name=npz", f"--config.data.path={path}"]


def about() -> dict:
    """The chip and what runs on it."""
    device = jax.devices()[0]
    try:
        import torch
    except ImportError:
        torch = None
    cuda = torch is not None and torch.cuda.is_available()
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "machine": machine_name(device),
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "torch": torch.__version__ if torch is not None else None,
        "torch_has_it": cuda,
        "cores": throughput.cores(),
    }


def machine_name(device) -> str | None:
    """The name in jaxcl/scaling of a device's kind."""
    known = throughput.machine(device)
    return next((k for k, v in hardware.MACHINES.items() if v == known), None)


_FULL = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "OutOfMemoryError")


def guarded(measure: Callable, *args, **options) -> dict:
    """What a measurement returns, or {"failed": why}."""
    try:
        return measure(*args, **options)
    except Exception as error:  # whatever it is, the other rows go on
        text = f"{type(error).__name__}: {error}"
        if any(word in text for word in _FULL):
            return {"failed": "out of memory"}
        lines = text.strip().splitlines()
        return {"failed": " ".join(lines[:2])[:300]}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("name", choices=["about", *ROWS])
    made.add_argument("--side", choices=SIDES, default="ours")
    made.add_argument("--tiny", action="store_true")
    made.add_argument("--seconds", type=float, default=2.0, help="of a window")
    made.add_argument("--windows", type=int, default=3)
    made.add_argument("--target", help="for --side=predicted: h200:1, v5e:1x1")
    made.add_argument("--kept", help="as of benchmarks/targets.py")
    made.add_argument("--data", help="CIFAR-10 for the cell of a table")
    return made


def main(argv=None) -> dict:
    """One side of one row; the last line printed is JSON."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.name == "about":
            found = about()
        elif ROWS[args.name].kind == "cell":
            found = guarded(
                cell, args.name, tiny=args.tiny, data=args.data, folder=folder
            )
        elif args.side == "predicted":
            options = {"target": args.target, "kept": args.kept, "folder": folder}
            found = guarded(predicted, args.name, tiny=args.tiny, **options)
        else:
            timing = {"seconds": args.seconds, "windows": args.windows}
            measure = ours if args.side == "ours" else peer
            found = guarded(measure, args.name, tiny=args.tiny, folder=folder, **timing)
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    main()
