"""The papers' steps on the chip that is here: measured beside the least time.

  python benchmarks/accelerator.py
  python benchmarks/accelerator.py --minutes=9 --out=chip.md
  python benchmarks/accelerator.py --rehearse --out=rehearsal.md

measures each row of the table in a process of its own, ours and, where PyTorch has the
chip, the same step in PyTorch. It writes JSON and one markdown table after every row,
and stops after `--minutes`; the same command again goes on with what is missing. Images
are random. `--rehearse` is the same with tiny networks on a CPU.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import pathlib
import signal
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
import throughput

from jaxcl import estimate
from jaxcl.config import build, files
from jaxcl.data import stand_in, storage

ROOT = pathlib.Path(__file__).resolve().parents[1]
LEAST = 60  # seconds that a row should have before it begins


class Kind(NamedTuple):
    """How rows of a kind are measured."""

    parse: Callable  # list of options -> arguments
    job: Callable  # (arguments, folder) -> job
    ready: Callable  # (arguments, job, stack) -> throughput.Ours, warmed up
    tiny: tuple[str, ...]  # options that make a row as small as it gets
    peer: Callable | None = None  # (arguments, job, stack, device) -> peer.timed's


def _second_task(args, work, stack):
    return throughput.in_second_task(work, 1, stack)


def _two_view_peer(args, work, stack, device):
    return _peer("peer", args, work, throughput.begun(work, 1), device)


def _online_peer(args, work, stack, device):
    state = online.ready(args, work, stack).state
    return _peer("peer_online", args, work, state, device)


def _peer(module, args, work, state, device):
    timed = importlib.import_module(module).timed  # needs PyTorch
    state, compiled = jax.device_get(state.replace(key=None)), device == "cuda"
    how = {"device": device, "compiled": compiled}
    return timed(args, work, state, throughput.cores(), **how)


def _paper_job(name, folder):
    """The job of a config, on random images in place of its set."""
    config = files.read_config([f"--config={name}"])
    with config.unlocked(), config.ignore_type():
        config.devices, config.epochs = 1, 1000
    parts = (config.get(part, {}) for part in ("data", "scenario", "augment"))
    data = stand_in.make_for(*parts)
    if data is not None:  # None: a debug config whose set needs no files
        shape = data.train.images.shape
        images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        data = data._replace(train=data.train._replace(images=images))
    return build.plan_job(config, data, one_step=False)


_TINY = "--width=4", "--size=16", "--depth=10"
KINDS = {
    "two_view": Kind(
        throughput.parser().parse_args,
        throughput.make_job,
        _second_task,
        (*_TINY, "--hidden=16", "--output=8", "--queue=64", "--batch=8"),
        _two_view_peer,
    ),
    "online": Kind(
        online.parser().parse_args,
        lambda args, folder: online.make_job(args, "er_ace", folder),
        online.ready,
        ("--width=4", "--batch=4", "--per-class=2"),
        _online_peer,
    ),
    "duel": Kind(
        duel.parser().parse_args,
        lambda args, folder: duel.make_job(args, "d_moco", folder),
        duel.ready,
        (*_TINY, "--batch=16", "--memory=64"),
    ),
    "paper": Kind("".join, _paper_job, _second_task, (":debug",)),
}
_LONG = "--windows=5", "--steps=4000"  # of a schedule that windows are cut from
# A call of all steps of a task would outlast a window.
_ONLINE = "--steps-per-call=100", *_LONG
_PNR = "--strategy=pnr", "--size=32", "--batch=256", "--precision=bfloat16", *_LONG
_DUEL = "--depth=50", "--width=64", "--batch=256", "--precision=bfloat16", "--seen=1"
# Row of the table -> its kind, a key of KINDS, and the options of the kind.
ROWS = {
    "pnr_moco_resnet18": ("two_view", ("--base=mocov2plus", "--depth=18", *_PNR)),
    "er_ace": ("online", _ONLINE),
    "pnr_moco_resnet50": ("two_view", ("--base=mocov2plus", "--depth=50", *_PNR)),
    "pnr_byol_resnet18": ("two_view", ("--base=byol", "--depth=18", *_PNR)),
    "duel_moco": ("duel", ("step", "--base=moco", *_DUEL)),
    "cclis": ("paper", ("cclis_tinyimagenet",)),
    "icl": ("paper", ("icl_imagenet2",)),
}

# One side of one row, in a process of its own


def ours(kind: Kind, options, args, folder) -> dict:
    """Measure our step of a row, and read the program that ran."""
    with contextlib.ExitStack() as stack:
        work = kind.job(options, folder)
        step = kind.ready(options, work, stack)
        in_call = step.steps // step.calls
        times = _windows(lambda calls: step.window(calls)[0], args, steps=in_call)
    chip = estimate.chip_of(jax.devices()[0].device_kind)
    return times | {
        "examples": work.data.batch_size * work.parts(work.stream.tasks[:2][-1].index),
        "compile_seconds": step.compile_seconds,
        "program": estimate.read_program(step.compiled, work, chip),
    }


def peer(kind: Kind, options, args, folder) -> dict:
    """Measure the same step in PyTorch."""
    import torch

    options.steps = 3  # of a window that decides which form is the fastest
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with contextlib.ExitStack() as stack:
        work = kind.job(options, folder)
        window, about = kind.peer(options, work, stack, device)
    return _windows(window, args) | {"peer": about}


def _windows(window: Callable, args, *, steps: int = 1) -> dict:
    """Measure milliseconds of a step in three windows of --seconds.

    Args:
      window: number of calls -> seconds.
      steps: of a call.
    """
    window(1)
    calls = min(max(1, round(args.seconds / window(1))), 5000)
    times = [1e3 * window(calls) / (calls * steps) for _ in range(3)]
    return {"ms": float(np.median(times)), "ms_min": min(times), "ms_max": max(times)}


def about() -> dict:
    """Tell the chip and what runs on it."""
    device, there = jax.devices()[0], importlib.util.find_spec("torch")
    torch = importlib.import_module("torch") if there else None
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "torch": torch and torch.__version__,
        "torch_has_it": bool(torch and torch.cuda.is_available()),
    }


def measure(args) -> dict:
    """Measure what --one names; {"failed": why} if that raises."""
    name, _, side = args.one.partition(",")
    if name == "about":
        return about()
    kind, options = KINDS[ROWS[name][0]], ROWS[name][1]
    options = kind.parse([*options, *(kind.tiny if args.rehearse else ())])
    try:
        with tempfile.TemporaryDirectory() as folder:
            return (ours if side == "ours" else peer)(kind, options, args, folder)
    except Exception as error:  # the other rows go on
        return {"failed": f"{type(error).__name__}: {error}".strip()[:300]}


# All rows


def ask(one: str, args, timeout: float) -> dict:
    """Measure one side of one row in a process of its own.

    Returns:
      What `measure` returns; {"failed": why} if the process dies, {"late": seconds} if
      it takes longer than `timeout`.
    """
    words = [sys.executable, __file__, f"--one={one}", f"--seconds={args.seconds}"]
    words += ["--rehearse"] * args.rehearse
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if args.rehearse or one.endswith(",peer"):  # the chip is PyTorch's alone
        own["JAX_PLATFORMS"] = "cpu"
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that all that it starts ends with it
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"late": round(timeout)}
    if process.returncode:
        return {"failed": f"exit code {process.returncode}: {err.strip()[-300:]}"}
    return json.loads(out.splitlines()[-1])


def plan(args, here: dict) -> list[tuple[str, str]]:
    """List rows and sides in the order in which they are measured."""
    peers = here["torch"] and (here["torch_has_it"] or args.rehearse)
    rows = [(name, "ours") for name in args.rows]
    with_peer = [name for name in args.rows if KINDS[ROWS[name][0]].peer]
    return rows + [(name, "peer") for name in with_peer if peers]


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--minutes", type=float, default=30.0, help="of this call")
    made.add_argument("--out", default="accelerator.md", help="the table, and .json")
    made.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    made.add_argument("--again", action="store_true", help="also what is there")
    made.add_argument("--seconds", type=float, default=2.0, help="of a window")
    made.add_argument("--rehearse", action="store_true", help="tiny rows, on the CPU")
    made.add_argument("--one", help=argparse.SUPPRESS)  # ROW,SIDE or about
    return made


def main(argv=None) -> dict:
    """Measure what is missing; returns what the JSON then holds."""
    args = parser().parse_args(argv)
    if args.one:
        print(json.dumps(measure(args)), flush=True)
        return {}
    deadline = time.monotonic() + 60 * args.minutes - 10  # to write what there is
    path = pathlib.Path(args.out).with_suffix(".json")
    found = storage.read_object(path) if path.exists() else {"rows": {}}
    here = ask("about", args, 300)
    if "device" not in here or (here["platform"] == "cpu" and not args.rehearse):
        parser().error(f"no chip; --rehearse is the same in small on a CPU: {here}")
    before = found.setdefault("about", here | {"rehearsed": args.rehearse})
    if (before["device"], before["rehearsed"]) != (here["device"], args.rehearse):
        parser().error(f"{path} is of {before}, here is {here}")
    for name, side in plan(args, here):
        entry = found["rows"].get(name, {}).get(side)
        left = deadline - time.monotonic()
        if left < (1 if args.rehearse else LEAST):
            print("the time is over; the same command again goes on", flush=True)
            break
        if entry and entry.get("late", left) >= left and not args.again:
            continue  # measured, failed, or too long for the time that is left
        told = ask(f"{name},{side}", args, left)
        told["date"] = time.strftime("%Y-%m-%d")
        found["rows"].setdefault(name, {})[side] = told
        storage.write_json(path, found)
        pathlib.Path(args.out).write_text(page(found))
        print(name, side, told.get("ms", told), flush=True)
    return found


def page(found: dict) -> str:
    """Write the JSON's numbers as one markdown table."""
    here = found["about"]
    heads = ("step", "examples", "compiled, s", "GB held", "ms", "least ms")
    heads += ("ms / least", "of the peak, %", "PyTorch ms", "PyTorch / ours")
    lines = [
        f"{here['device']}, jax {here['jax']}, PyTorch {here['torch']}",
        "**A rehearsal on a CPU: the times mean nothing.**" * here["rehearsed"],
        f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}",
    ]
    told = []
    for name, sides in found["rows"].items():
        mine, other = sides.get("ours", {}), sides.get("peer", {})
        ms, program = mine.get("ms"), mine.get("program", {})
        least = program.get("least") or {}
        cells = [
            mine.get("examples"),
            mine.get("compile_seconds"),
            program and program["memory"]["held"] / 1e9,
            ms and f"{ms:.3g} ({mine['ms_min']:.3g} to {mine['ms_max']:.3g})",
            least and 1e3 * least["total"],
            least and ms / 1e3 / least["total"],
            least and 1e5 * least["arithmetic"] / ms,
            other.get("ms"),
            other.get("ms") and ms and other["ms"] / ms,
        ]
        shown = (
            x if isinstance(x, str) else estimate.format_number(x) if x else "-"
            for x in cells
        )
        lines[-1] += f"\n| {name} | {' | '.join(shown)} |"
        for side, entry in sides.items():
            why = entry.get("failed") or ("late" in entry and "not done in time")
            told += [f"- {name}, {side}: {why}"] if why else []
    return "\n\n".join(x for x in (*lines, "\n".join(told)) if x) + "\n"


if __name__ == "__main__":
    main()
