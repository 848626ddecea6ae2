"""Fifteen minutes of a GPU in one command: steps, profiles, input, PNR on CIFAR-100.

  python benchmarks/gpu_quarter_hour.py --data=data --out=quarter
  python benchmarks/gpu_quarter_hour.py --tiny --out=rehearsal

Steps of PNR and ER-ACE stand beside their least time and PyTorch's compiled steps, and
are profiled. JPEGs are read with 1 to 16 threads. PNR and fine-tuning then train on
CIFAR-100 for as many epochs as fit. Each stage is a process of its own; at its end it
adds a line to OUT/stages.jsonl and writes OUT/table.md. After a kill, the same command
continues; its minutes count from the first call. `--tiny` rehearses all on a CPU.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

import input as input_path
import jax
import kernels
import numpy as np
import steps as steps_lib

from jaxcl import estimate, storage
from jaxcl.data.sources import by_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
TASKS, MOST_EPOCHS = 5, 500  # of the paper
FIXED = 90  # seconds of a run that are not steps or their compilation, about
SAVING = 20  # seconds that a stopped run has to save
LATE = "its time was over"
# Stage -> share of the minutes after which it must have ended. PNR's step compiles for
# 70 s and `torch.compile` as long, so that steps take more than three minutes of 14.
STAGES = dict.fromkeys(("about", "pnr", "er_ace", "pnr_peer", "er_ace_peer"), 0.32)
STAGES |= {"input": 0.4} | dict.fromkeys(("plan", "run_pnr", "run_finetune"), 1.0)
# Step -> the words of `steps.py`, and those of the rehearsal. A call of ER-ACE must be
# shorter than its task.
STEPS = {
    "pnr": (
        "pnr_cifar100 --batch=256 --override precision=bfloat16",
        "pnr_cifar100 --width=4 --size=16 --batch=16 --override encoder.depth=10"
        " method.hidden_dim=16 method.output_dim=8 method.queue_size=64",
    ),
    "er_ace": (
        "er_ace_cifar10 --override method.form=paper steps_per_call=100",
        "er_ace_cifar10 --width=4 --batch=4 --override method.form=paper"
        " steps_per_call=10 replay.per_class=2",
    ),
}
_TINY_RUN = (
    "encoder.depth=10 encoder.width=4 augment.size=16 batch_size=16 save_every=10"
    " method.hidden_dim=16 method.output_dim=8 method.queue_size=64"
    " evaluators.linear.epochs=3"
).split()


# Stages, each in a process of its own


def about(args) -> dict:
    """Describe the chip, its software and the data."""
    device, data, torch = jax.devices()[0], find_data(args), None
    if importlib.util.find_spec("torch"):
        torch = importlib.import_module("torch").__version__
    found = {"platform": device.platform, "device": device.device_kind}
    found |= {"cores": steps_lib.cores(), "jax": jax.__version__, "torch": torch}
    return found | {"data": data, "rows": len(by_name.load(**data).train.label)}


def find_data(args) -> dict:
    """Return config.data; without --data, draw coloured noise of CIFAR-100's shape."""
    folder = pathlib.Path(args.data or "").absolute()
    if args.data and not args.tiny:
        archive = folder if folder.is_file() else folder / "cifar100.npz"
        name = "npz" if archive.exists() else "arrays"
        return {"name": name, "path": str(archive if name == "npz" else folder)}
    path, size = args.out / "stand_in.npz", 16 if args.tiny else 32
    if not path.exists():
        rng, parts = np.random.default_rng(0), {}
        colours = rng.integers(0, 192, (100, 1, 1, 3), np.uint8)
        counts = (800, 200) if args.tiny else (50_000, 10_000)
        for split, count in zip(("train", "test"), counts, strict=True):
            label = np.arange(count) % 100
            noise = rng.integers(0, 64, (count, size, size, 3), np.uint8)
            parts |= {f"{split}_x": colours[label] + noise, f"{split}_y": label}
        with storage.replacing(path) as file:
            np.savez(file, **parts)
    return {"name": "npz", "path": str(path)}


def make_step(args, name: str, stack):
    """Make the job of a step, its images in a folder that `stack` deletes."""
    options = steps_lib.parser().parse_args(STEPS[name][args.tiny].split())
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return steps_lib.make_job(options, *options.configs, folder)


def measure_ours(args, name: str) -> dict:
    """Measure and profile our step, and read its program."""
    with contextlib.ExitStack() as stack:
        work = make_step(args, name, stack)
        step = steps_lib.in_second_task(work, 1, stack)
        in_call = step.steps // step.calls
        result = _windows(step.window, args, steps=in_call)
        chip = estimate.chip_of(jax.devices()[0].device_kind)
        result |= {
            "examples": work.data.batch_size,
            "compile_seconds": step.compile_seconds,
            "program": estimate.read_program(step.compiled, work, chip),
            "first_task_flops": steps_lib.flops(work, 0),
        }
        note(args.out, name, result)  # the profile may fail, or come too late
        calls = -(-(4 if args.tiny else 20) // in_call)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        with kernels.recorded(folder) as trace:
            step.window(calls)
        rows = kernels.read(trace[0], step.compiled.as_text())
    found = kernels.summarize(rows, calls * in_call, untraced_ms=result["ms"])
    storage.write_json(args.out / f"{name}_kernels.json", found)
    return result | {"profile": found | {"kernels": found["kernels"][:20]}}


def measure_peer(args, name: str) -> dict:
    """Measure the same step in PyTorch, compiled where it has the chip."""
    if importlib.util.find_spec("torch") is None:
        return {"not_done": "PyTorch is not installed"}
    if not (args.tiny or importlib.import_module("torch").cuda.is_available()):
        return {"not_done": "PyTorch does not see the chip"}
    with contextlib.ExitStack() as stack:
        work = make_step(args, name, stack)
        if name == "pnr":
            state = steps_lib.second_task(work)
        else:  # it replays from a full memory
            state = steps_lib.in_second_task(work, 1, stack).state
        how = {"device": "cpu" if args.tiny else "cuda", "compiled": not args.tiny}
        window, form = steps_lib.time_peer(work, state, **how)
    return _windows(window, args) | {"peer": form}


def read_input(args) -> dict:
    """Count images a second that 1, 2, 4 ... threads decode and crop."""
    decoder = "cv2" if importlib.util.find_spec("cv2") else "pillow"
    words = ["--images=8", "--batch=2"] if args.tiny else ["--images=1024"]
    options = input_path.parser().parse_args([*words, "--repeats=2"])
    with tempfile.TemporaryDirectory() as name:
        input_path.write(pathlib.Path(name) / "images", options.images)
        rows = [*input_path.by_threads(options, pathlib.Path(name), decoder)]
    return {"decoder": decoder, "threads": rows}


def _windows(window: Callable, args, *, steps: int = 1) -> dict:
    """Measure milliseconds of a step in three windows.

    Args:
      window: number of calls -> seconds.
      args: the command line.
      steps: number of steps in a call.
    """
    window(1)
    calls = min(max(1, round((0.05 if args.tiny else 2.0) / window(1))), 5000)
    times = [1e3 * window(calls) / (calls * steps) for _ in range(3)]
    return {"ms": float(np.median(times)), "ms_min": min(times), "ms_max": max(times)}


# The runs


def plan(notes: dict, left: float, *, tiny: bool) -> dict:
    """Choose the epochs of a task, so that two runs take nine tenths of the time left.

    Fine-tuning and the first task have no teacher: their steps take a smaller share.

    Args:
      notes: results by stage; "pnr" and "about" are read.
      left: seconds.
      tiny: whether this is the rehearsal.
    """
    step, batch = notes["pnr"], 16 if tiny else 256
    share = step["first_task_flops"] / step["program"]["flops"]
    steps = notes["about"]["rows"] // TASKS // batch
    epoch = steps * step["ms"] / 1e3  # seconds of an epoch of a later task
    fixed = FIXED + (step["compile_seconds"] or 0)
    epochs = {"pnr": epoch * (share + TASKS - 1), "finetune": epoch * share * TASKS}
    count = int(0.9 * (left - 2 * fixed) / sum(epochs.values()))
    count = min(max(count, 1), 2 if tiny else MOST_EPOCHS)
    seconds = {name: fixed + count * value for name, value in epochs.items()}
    return {"epochs": count, "steps_per_epoch": steps, "left": left, "seconds": seconds}


def run_command(args, strategy: str, notes: dict) -> list[str]:
    """Write the command of a run on CIFAR-100: the paper's config with overrides."""
    epochs, data = notes["plan"]["epochs"], notes["about"]["data"]
    off = ("plots", "tensorboard", "plasticity", "evaluate_untrained")
    changes = [
        f"method.strategy={strategy}",
        *(f"data.{key}={value}" for key, value in data.items()),
        f"epochs={epochs}",
        f"schedule.warmup_epochs={min(10, epochs // 10)}",
        # A probe on new views in each epoch would take most of the time.
        *("evaluators.linear.augment=False", "evaluators.linear.last_only=True"),
        *("evaluators.tsne.skip=True", *(f"{name}=False" for name in off)),
        *(_TINY_RUN if args.tiny else ()),
    ]
    words = ["-m", "jaxcl.main", f"--config={ROOT / 'configs' / 'pnr_cifar100.py'}"]
    words += [f"--workdir={args.out / 'runs' / strategy}"]
    return [sys.executable, *words, *(f"--config.{x}" for x in changes)]


def read_run(args, strategy: str) -> dict:
    """Read the tasks and accuracies that a run has so far."""
    path = args.out / "runs" / strategy / "results.json"
    results = storage.read_object(path) if path.exists() else {"summary": {}}
    rows, keys = results["summary"], ("average_accuracy", "forgetting")
    tasks = [len(row["average_accuracy_per_task"]) for row in rows.values()]
    measures = {name: {k: row[k] for k in keys} for name, row in rows.items()}
    return {"tasks": max(tasks, default=0), "measures": measures}


# Their order, their time, their notes


def note(out: pathlib.Path, stage: str, result: dict) -> dict:
    """Append the result of a stage, write the page, and return all results."""
    with open(out / "stages.jsonl", "a", encoding="utf-8") as file:
        line = {"stage": stage, "time": time.time(), **result}
        file.write(json.dumps(line) + "\n")
    notes = read_notes(out)
    (out / "table.md").write_text(page(notes))
    return notes


def read_notes(out: pathlib.Path) -> dict[str, dict]:
    """Read stage -> its last result; a line that a kill cut off is left out."""
    notes, path = {}, out / "stages.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            notes[row["stage"]] = row
    return notes


def is_done(notes: dict, stage: str) -> bool:
    """Tell whether a stage needs no further call; a failed one does not, either."""
    row = notes.get(stage, {"not_done": LATE})
    if "not_done" in row:
        return row["not_done"] != LATE
    return stage not in STEPS or "profile" in row


def carry_out(words: list[str], log: pathlib.Path, seconds: float, env: dict):
    """Run a command; return its exit code, None if its time was over."""
    with open(log, "a", encoding="utf-8") as file:
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=file, stderr=file)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.terminate()  # a run saves
            try:
                process.wait(SAVING)
            except subprocess.TimeoutExpired:
                process.kill()


def do_stage(stage: str, args, seconds: float, notes: dict) -> dict:
    """Do a stage in so many seconds; return its result."""
    needs = {"plan": ("pnr", "first_task_flops"), "run_": ("plan", "epochs")}
    for name, (other, field) in needs.items():
        if stage.startswith(name) and field not in notes.get(other, {}):
            return {"not_done": f"{other} has no {field}"}
    if stage == "plan":
        return plan(notes, seconds, tiny=args.tiny)
    folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "JAX_COMPILATION_CACHE_DIR": str(args.out / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    env |= os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    if args.tiny or stage == "input" or stage.endswith("_peer"):
        env["JAX_PLATFORMS"] = "cpu"  # PyTorch has the chip alone
    is_run, strategy = stage.startswith("run_"), stage.removeprefix("run_")
    words = [sys.executable, __file__, f"--out={args.out}", f"--one={stage}"]
    words += ["--tiny"] * args.tiny + [f"--data={args.data}"] * bool(args.data)
    words = run_command(args, strategy, notes) if is_run else words
    log = args.out / f"{stage}.log"
    code = carry_out(words, log, max(seconds - SAVING * is_run, 1), env)
    result = read_run(args, strategy) if is_run else read_notes(args.out).get(stage, {})
    if code == 0:
        return result
    why = LATE if code is None else f"exit code {code}: {log.read_text()[-300:]}"
    return result | {"not_done": why}


def measure(args, stage: str) -> dict:
    """Do a stage in this process."""
    if stage in ("about", "input"):
        return {"about": about, "input": read_input}[stage](args)
    name = stage.removesuffix("_peer")
    return (measure_ours if name == stage else measure_peer)(args, name)


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--minutes", type=float, default=14.0, help="of all calls")
    made.add_argument("--call", type=float, help="minutes of this call; default: all")
    made.add_argument("--data", help="cifar100.npz, its folder, or a folder of arrays")
    made.add_argument("--out", default="quarter_hour", help="folder of the results")
    made.add_argument("--stages", nargs="+", default=[*STAGES], choices=STAGES)
    made.add_argument("--tiny", action="store_true", help="a rehearsal without --data")
    made.add_argument("--one", help=argparse.SUPPRESS)  # a stage
    return made


def main(argv=None) -> dict[str, dict]:
    """Do the stages that are missing; return all results by stage."""
    args, begun = parser().parse_args(argv), time.time()
    args.out = pathlib.Path(args.out).absolute()
    if args.one:
        return note(args.out, args.one, measure(args, args.one))
    if args.data and not pathlib.Path(args.data).exists():
        parser().error(f"--data={args.data}: there is no such file or folder")
    if __name__ == "__main__":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # and stops the stage
    args.out.mkdir(parents=True, exist_ok=True)
    notes = read_notes(args.out)
    if "start" not in notes:
        notes = note(args.out, "start", {"minutes": args.minutes, "tiny": args.tiny})
    if notes["start"]["tiny"] != args.tiny:
        parser().error(f"--out={args.out}: its --tiny was {not args.tiny}")
    for stage in args.stages:
        if notes.get("about", {}).get("platform") == "cpu" and not args.tiny:
            parser().error("there is no chip; --tiny rehearses on a CPU")
        if is_done(notes, stage):
            continue
        end = notes["start"]["time"] + 60 * args.minutes * STAGES[stage]
        end = min(end, begun + 60 * (args.call or args.minutes))
        seconds = end - time.time()
        if seconds < SAVING:
            print(f"{stage}: no time is left", flush=True)
            continue
        print(f"{stage}: {seconds:.0f} s at most", flush=True)
        result = do_stage(stage, args, seconds, notes)
        notes = read_notes(args.out)
        if "time" not in result or "not_done" in result:  # not noted by the stage
            notes = note(args.out, stage, {**result, "time": time.time()})
        row = notes[stage].items()
        print({k: v for k, v in row if k not in ("program", "profile")}, flush=True)
    return notes


# The page


def page(notes: dict[str, dict]) -> str:
    """Write all results as one Markdown page."""
    here, planned = notes.get("about", {}), notes.get("plan", {})
    heads = ("device", "cores", "jax", "torch")
    parts = [", ".join(f"{name} {here.get(name)}" for name in heads)]
    if notes["start"]["tiny"]:
        parts.append("**A rehearsal on a CPU: no number means anything.**")
    if "stand_in" in here.get("data", {}).get("path", ""):
        parts.append("**No data were given: CIFAR-100 is coloured noise.**")
    steps = [x for x in STEPS if "ms" in notes.get(x, {})]
    heads = ("step", "examples", "compiled, s", "GB held", "ms", "least ms")
    rows = [_step_cells(notes[x], notes.get(f"{x}_peer", {})) for x in steps]
    rows = [(name, *cells) for name, cells in zip(steps, rows, strict=True)]
    parts.append(_table((*heads, "PyTorch ms", "PyTorch"), rows))
    profiles = {x: notes[x]["profile"] for x in steps if "profile" in notes[x]}
    kinds = dict.fromkeys(kind for x in profiles.values() for kind in x["ms"])
    rows = [[kind, *(_share(notes[x], kind) for x in profiles)] for kind in kinds]
    parts.append(_table(("ms of a step, share", *profiles), rows))
    for name, profile in profiles.items():
        keys = ("name", "kind", "ms", "count", "from")
        rows = [[x[key] for key in keys] for x in profile["kernels"]]
        parts.append(_table((f"longest of {name}", *keys[1:3], "a step", "from"), rows))
    threads = notes.get("input", {}).get("threads", ())
    rows = [(x["threads"], x["images"]) for x in threads]
    parts.append(_table(("threads", "images/s"), rows))
    if "epochs" in planned:
        parts.append(f"Planned: {planned['epochs']} epochs a task; seconds of a run: ")
        parts[-1] += ", ".join(f"{k} {v:.0f}" for k, v in planned["seconds"].items())
    rows = [
        (stage, run["tasks"], name, *(x and 100 * x for x in row.values()))
        for stage, run in notes.items()
        for name, row in run.get("measures", {}).items()
    ]
    parts.append(_table(("run", "tasks", "evaluator", "average %", "forgetting"), rows))
    failed = [f"- {k}: {x['not_done']}" for k, x in notes.items() if "not_done" in x]
    return "\n\n".join(x for x in (*parts, "\n".join(failed)) if x) + "\n"


def _step_cells(step: dict, other: dict) -> tuple:
    program, spread = step["program"], f"({step['ms_min']:.3g} to {step['ms_max']:.3g})"
    least = program["least"] and 1e3 * program["least"]["total"]
    cells = (step["examples"], step["compile_seconds"], program["memory"]["held"] / 1e9)
    cells += (f"{step['ms']:.3g} {spread}", least)
    return (*cells, other.get("ms"), other.get("peer"))


def _share(step: dict, kind: str) -> str | None:
    ms = step["profile"]["ms"].get(kind)
    return None if ms is None else f"{ms:.3g} ({100 * ms / step['ms']:.0f} %)"


def _table(heads: Iterable[str], rows: Iterable) -> str:
    """Write a table, "" if it has no rows."""

    def show(cell):
        return cell if isinstance(cell, str) else estimate.format_number(cell)

    lines = [["-" if x is None else show(x) for x in row] for row in rows]
    lines = [heads, ["---"] * len([*heads]), *lines] if lines else []
    return "\n".join(f"| {' | '.join(x)} |" for x in lines)


if __name__ == "__main__":
    main()
