"""Thirty minutes on a chip: speed, memory and one cell of a table, as a page.

  python benchmarks/accelerator.py
  python benchmarks/accelerator.py --minutes=9 --out=chip.md
  python benchmarks/accelerator.py --rehearse --out=rehearsal.md
  python benchmarks/accelerator.py --predict h200:1 --rows moco_r18_32px_256

measures our steps on the accelerator that is here, beside what jaxcl.scaling says of
their programs, and beside the same steps in PyTorch where it has the chip too. It
writes --out, and JSON beside it, after every row. The rows of most interest come first.
It stops itself after --minutes; the same command again goes on with what is missing.

Data are random. With --data=FOLDER_OR_NPZ of CIFAR-10 the cell of a table is the
paper's. `--rehearse` is the same in small on a CPU. `--predict` needs no chip: its
compiler says beforehand what a step takes at least, see docs/scaling.md.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import accelerator_rows as rows

from jaxcl.data import storage
from jaxcl.scaling import hardware, tables, targets

FIRST = (
    "online_er_ace",
    "moco_r18_32px_256",
    "moco_r50_32px_256",
    "table_er_ace",
    "duel_share",
    "byol_r18_32px_256",
    "moco_r18_32px_4096",
    "online_er_ace_20_seeds",
    "cclis",
    "icl",
    "byol_r50_32px_256",
    "moco_r50_32px_1024",
)
ENDING = 10  # seconds that are kept for the end
LEAST = 60  # seconds that a row should have before it is begun


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--minutes", type=float, default=30.0, help="of this call")
    made.add_argument("--out", help="the page; default: docs/accelerator.md")
    made.add_argument("--rows", nargs="+", default=list(order()), choices=rows.ROWS)
    made.add_argument("--again", action="store_true", help="also what is there")
    made.add_argument("--no-peer", action="store_true", help="without PyTorch")
    made.add_argument("--data", help="CIFAR-10, .npz or a folder of arrays")
    made.add_argument("--seconds", type=float, default=2.0, help="of a window")
    made.add_argument("--windows", type=int, default=3)
    made.add_argument("--rehearse", action="store_true", help="tiny rows, on the CPU")
    made.add_argument("--predict", nargs="+", default=(), metavar="TARGET")
    made.add_argument("--kept", default=".cache/targets", help="compiled programs")
    return made


def order() -> tuple[str, ...]:
    """All rows, those of most interest first."""
    return FIRST + tuple(name for name in rows.ROWS if name not in FIRST)


def plan(args, about: dict) -> list[tuple[str, str]]:
    """Rows and sides, in the order in which they are measured."""
    peers = not args.no_peer and (about["torch_has_it"] or args.rehearse)
    peers = peers and about["torch"] is not None

    def both(names):
        yield from ((name, "ours") for name in names)
        if peers:
            yield from ((x, "peer") for x in names if "peer" in rows.sides(x))

    first = [name for name in args.rows if name in FIRST]
    return [*both(first), *both([name for name in args.rows if name not in FIRST])]


def ask(name: str, side: str, args, *, timeout: float, target=None) -> dict:
    """One side of one row, from a process of its own.

    Returns:
      What accelerator_rows.py prints; {"failed": why} where the process fails, and
      {"late": seconds} where it takes longer than `timeout`.
    """
    options = {
        "side": side,
        "seconds": args.seconds,
        "windows": args.windows,
        "kept": pathlib.Path(args.kept).resolve(),
        "data": pathlib.Path(args.data).resolve() if args.data else None,
        "target": target,
    }
    words = [name, *["--tiny"] * args.rehearse]
    words += [f"--{key}={value}" for key, value in options.items() if value]
    script = pathlib.Path(__file__).with_name("accelerator_rows.py")
    process = subprocess.Popen(
        [sys.executable, str(script), *words],
        cwd=rows.ROOT,
        env=_environment(side, args.rehearse),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # with all that it starts it can be ended
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"late": round(timeout)}
    if process.returncode:
        said = (err.strip().splitlines() or [""])[-1][:300]
        return {"failed": f"the process ended with {process.returncode}: {said}"}
    return json.loads(out.splitlines()[-1])


def _environment(side, rehearse) -> dict:
    """Variables of a process that measures one side."""
    path = [str(rows.ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    if side == "predicted":
        own |= targets.ENVIRONMENT
    elif rehearse or side == "peer":  # the chip is PyTorch's alone
        own |= {"JAX_PLATFORMS": "cpu"}
    # By default XLA takes three quarters of a GPU's memory.
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ | own


def main(argv=None) -> dict:
    """The command; returns what the JSON then holds."""
    args = parser().parse_args(argv)
    out = pathlib.Path(args.out or rows.ROOT / "docs" / "accelerator.md")
    if args.rehearse and args.out is None:
        parser().error("--rehearse: its numbers mean nothing, so it needs an --out")
    path = out.with_suffix(".json")
    found = storage.read_object(path) if path.exists() else {"rows": {}}

    def keep():
        storage.write_json(path, found)
        out.write_text(page(found))

    deadline = time.monotonic() + 60 * args.minutes - ENDING
    if args.predict:
        _predict(args, found, deadline, keep)
        return found
    about = ask("about", "ours", args, timeout=300)
    if "device" not in about:
        parser().error(f"no device: {about.get('failed') or about}")
    if about["platform"] == "cpu" and not args.rehearse:
        parser().error("JAX has the CPU alone; --rehearse is the same in small there")
    before = found.setdefault("about", about)
    if before["device"] != about["device"]:
        parser().error(f"{path} is of {before['device']}, here is {about['device']}")
    found["about"] = about | {"rehearsed": args.rehearse}
    keep()
    for name, side in plan(args, about):
        entry = found["rows"].get(name, {}).get(side)
        left = deadline - time.monotonic()
        if _measured(entry) and not args.again:
            continue
        if left < (1 if args.rehearse else LEAST):
            print("the time is over; the same command again goes on", flush=True)
            break
        if entry and entry.get("late", 0) >= left and not args.again:
            print(f"{name}, {side}: was not done in {entry['late']} s", flush=True)
            continue
        _tell(name, side, found["rows"].setdefault(name, {}), args, left)
        keep()
    return found


def _measured(entry) -> bool:
    """Whether a side needs no other run: it has numbers, or has failed."""
    return entry is not None and "late" not in entry


def _tell(name, side, into, args, timeout, **options) -> None:
    """Ask for a side, note what it says, and print it."""
    began = time.monotonic()
    told = ask(name, side, args, timeout=timeout, **options)
    told["date"] = time.strftime("%Y-%m-%d")
    into[side] = told
    said = told.get("failed") or ("late" in told and "not done in time") or "done"
    print(f"{name}, {side}: {said}, {time.monotonic() - began:.0f} s", flush=True)


def _predict(args, found, deadline, keep) -> None:
    """Fill in what the compilers of absent chips say."""
    for target in args.predict:
        targets.parse(target)
        there = found.setdefault("predicted", {}).setdefault(target, {})
        for name in args.rows:
            known = there.get(name, {}).get("predicted")
            left = deadline - time.monotonic()
            if "predicted" not in rows.sides(name) or left < 1:
                continue
            if not _measured(known) or args.again:
                options = {"target": target}
                _tell(
                    name, "predicted", there.setdefault(name, {}), args, left, **options
                )
                keep()


# The page


_HEAD = """# On an accelerator

```
python benchmarks/accelerator.py
```

measures the steps on a chip and writes this page and the JSON beside it;
`benchmarks/README.md` says how, and what the columns mean. Data are random."""
_number = tables.number
_COLUMNS = (
    ("examples", lambda x: _show(x.ours, "examples")),
    ("ms a step", lambda x: _span(x.ours, "ms")),
    ("examples/s", lambda x: x.of(lambda o: _number(1e3 * o["examples"] / o["ms"]))),
    ("of the peak, %", lambda x: x.of(lambda o: _number(100 * _speed(o)))),
    ("least ms, before", lambda x: x.expect(lambda e: _number(_least(e)))),
    ("least ms, its program", lambda x: x.of(lambda o: _number(_least(o["program"])))),
    ("ms / least", lambda x: x.of(lambda o: _number(o["ms"] / _least(o["program"])))),
    ("kernels", lambda x: x.of(lambda o: _number(o["program"]["kernels"]))),
    ("MB, before", lambda x: x.expect(lambda e: _mb(e["memory"]["held"]))),
    ("MB, planned", lambda x: x.of(lambda o: _mb(o["planned_bytes"]))),
    ("MB, peak", lambda x: x.of(lambda o: _mb(o["peak_bytes"]))),
    ("compiled in s", lambda x: _show(x.ours, "compile_seconds")),
    ("PyTorch, ms", lambda x: _span(x.peer, "ms")),
    ("PyTorch / ours", lambda x: x.of(lambda o: _number(x.peer["ms"] / o["ms"]))),
)


class _Line:
    """A row of the page: our side, the peer's, and what was expected of it."""

    def __init__(self, sides, expected):
        self.ours = sides.get("ours", {})
        self.peer = sides.get("peer", {})
        self.expected = expected or {}

    def of(self, function) -> str:
        return _tried(function, self.ours)

    def expect(self, function) -> str:
        return _tried(function, self.expected)


def _tried(function, numbers) -> str:
    """A cell, "-" where a number of it is not known."""
    try:
        return function(numbers)
    except (KeyError, TypeError):
        return "-"


def _mb(value: float) -> str:
    return _number(1e-6 * value)


def _least(numbers) -> float:
    """Milliseconds of the bound that `targets.least` is.

    Raises:
      TypeError: there is none, as nobody knows the figures of this machine.
    """
    shares = numbers["least"]
    return 1e3 * sum(shares[name] for name in shares)


def _speed(ours) -> float:
    """Share of the peak, FLOPs as written."""
    return ours["flops"] / (1e-3 * ours["ms"]) / ours["peak_flops"]


def _show(numbers, name) -> str:
    return _tried(lambda x: _number(x[name]), numbers)


def _span(numbers, name) -> str:
    def text(x):
        low, high = _number(x[f"{name}_min"]), _number(x[f"{name}_max"])
        return f"{_number(x[name])} ({low} to {high})"

    return _tried(text, numbers)


def target_of(machine: str | None) -> str | None:
    """One chip of a machine, as `jaxcl.scaling --target` has it."""
    chip = hardware.CHIPS.get(machine or "", {})
    if "tpu" in chip:
        return f"{chip['tpu']['name']}:" + "x".join("1" * chip["tpu"]["axes"])
    return f"{machine}:1" if chip else None


def expected(found: dict, name: str, target: str | None) -> dict | None:
    """What was predicted of a row for a chip: here, or in docs/targets.json."""
    own = found.get("predicted", {}).get(target, {}).get(name, {}).get("predicted")
    if own or rows.ROWS[name].kind != "paper":
        return own
    there = rows.ROOT / "docs" / "targets.json"
    told = storage.read_object(there) if there.exists() else {}
    return told.get(name, {}).get(target)


def page(found: dict) -> str:
    """The page of what the JSON holds."""
    about, blocks = found.get("about"), [_HEAD]
    if about is None:
        blocks.append("**Nothing was measured yet: no chip was at hand.**")
    else:
        blocks += _measurements(found, about)
    for target in found.get("predicted", {}):
        blocks.append(_predictions(found, target))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _measurements(found, about):
    """Blocks of what was measured on a chip."""
    if about["rehearsed"]:
        yield "**A rehearsal with tiny rows on a CPU: its numbers mean nothing.**"
    torch = about["torch"] or "not installed"
    yield (
        f"{about['device']}, one of {about['devices']}; jax {about['jax']}, PyTorch "
        f"{torch}; {about['cores']} cores."
    )
    target = target_of(about["machine"])
    names = [name for name in order() if name in found["rows"]]
    steps = [x for x in names if "ms" in found["rows"][x].get("ours", {})]
    lines = {x: _Line(found["rows"][x], expected(found, x, target)) for x in steps}
    yield "## Steps\n\n" + _table(_COLUMNS, lines) if steps else ""
    forms = {line.peer["peer"] for line in lines.values() if "peer" in line.peer}
    yield "\n".join(f"- {form}" for form in sorted(forms))
    yield _in_words(found["rows"])
    told = [
        f"- {name}, {side}: {entry.get('failed') or 'not done in time'}"
        for name in names
        for side, entry in found["rows"][name].items()
        if "failed" in entry or "late" in entry
    ]
    yield "Failed:\n\n" + "\n".join(told) if told else ""
    missing = [name for name in order() if name not in found["rows"]]
    yield f"Not measured yet: {', '.join(missing)}." if missing else ""


def _in_words(entries) -> str:
    """What is more than a step: several seeds, DUEL's share, the cell of a table."""

    def ours(name):
        entry = entries.get(name, {}).get("ours", {})
        return entry if "failed" not in entry and "late" not in entry else {}

    lines, one = [], ours("online_er_ace")
    many, duel = ours("online_er_ace_20_seeds"), ours("duel_share")
    cell = ours("table_er_ace")
    if one and many:
        times = many["ms"] / one["ms"]
        lines.append(
            f"- ER-ACE, {many['seeds']} seeds side by side: {_number(times)} times the "
            "step of one"
        )
    if duel:
        lines.append(
            f"- D-MoCo's step: {_number(duel['ms'])} ms, {duel['base']}'s "
            f"{_number(duel['base_ms'])}; DUEL is {100 * duel['share']:.1f} % of it"
        )
    if cell:
        error = "" if cell["error"] is None else f" +- {100 * cell['error']:.1f}"
        said = (
            "random images, 10 is chance" if cell["random"] else "the paper's is 43.7"
        )
        lines.append(
            f"- ER-ACE, Split CIFAR-10, 20 images a class, {cell['seeds']} seeds: "
            f"{100 * cell['mean']:.1f}{error} ({said}) in {_number(cell['seconds'])} s"
        )
    return "\n".join(lines)


def _table(columns, lines) -> str:
    heads = [head for head, _ in columns]
    made = ["| row | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name, line in lines.items():
        cells = [cell(line) for _, cell in columns]
        made.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(made)


_PREDICTED = (
    ("least ms", lambda x: x.expect(lambda e: _number(_least(e)))),
    (
        "arithmetic / memory / launches, %",
        lambda x: x.expect(
            lambda e: " / ".join(
                f"{1e5 * e['least'][part] / _least(e):.0f}"
                for part in ("arithmetic", "memory", "launches")
            )
        ),
    ),
    ("kernels", lambda x: x.expect(lambda e: _number(e["kernels"]))),
    ("GFLOP", lambda x: x.expect(lambda e: _number(1e-9 * e["flops"]))),
    ("MB moved", lambda x: x.expect(lambda e: _mb(e["bytes"]))),
    ("memory, MB", lambda x: x.expect(lambda e: _mb(e["memory"]["held"]))),
)


def _predictions(found, target) -> str:
    """The section of a target: what its compiler says beforehand."""
    told = {name: expected(found, name, target) for name in order()}
    there = {x: e for x, e in told.items() if e}
    lines = {x: _Line({}, e) for x, e in there.items() if "least" in e}
    blocks = [f"## {target}, by its compiler"]
    if lines:
        blocks.append(_table(_PREDICTED, lines))
    failed = [
        f"- {name}: {e.get('failed') or e.get('error') or 'not done in time'}"
        for name, e in there.items()
        if "least" not in e
    ]
    return "\n\n".join([*blocks, *(["\n".join(failed)] if failed else [])])


if __name__ == "__main__":
    main()
