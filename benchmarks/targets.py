"""What the compilers of TPUs and GPUs make of every method's step, as a page.

  pip install -e '.[tpu-compiler,gpu-compiler]'
  python benchmarks/targets.py
  python benchmarks/targets.py --rows mocov2plus-pnr er_ace --targets h200:8

compiles each row of the table of methods at the size of its paper's config, for each
target, by `python -m jaxcl.scaling` in a process of its own, and writes
docs/targets.json and docs/targets.md after each. No chip is needed and no data; a row
takes from half a minute to half an hour.

It can be stopped and started again. A row is asked for again when its command, the code
of jaxcl/ or configs/, or the versions of JAX and its compilers are others than before,
for any of these may change the program. Lowered, it is compiled again only if its
StableHLO is another one: the compiler gets nothing else, and compiling is what takes
the time. What was told of a program stays while the code that reads programs does;
`--kept` is the folder of programs, for when it does not.
"""

import argparse
import ast
import collections
import hashlib
import importlib.metadata
import json
import pathlib
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from jaxcl import schema
from jaxcl.methods.two_view import bases, strategies
from jaxcl.scaling import tables, targets

ROOT = pathlib.Path(__file__).resolve().parents[1]
TARGETS = ("h200:1", "h200:8", "v5e:2x4")
CIFAR100 = ("--classes=100", "--rows=50000")
PNR = ("configs/pnr_cifar100.py", *CIFAR100)
IMAGENET = ("configs/pnr_imagenet100.py", "--classes=100", "--rows=126689")
ONLINE = ("--classes=10", "--rows=50000")
CCLIS = "configs/cclis_tinyimagenet.py"
DUEL = ("--classes=1000", "--rows=115846")
ICL = "--rows=2600"
# No paper has one of these with the rows' methods: the sizes are usual ones.
VIT = {"name": "vit", "size": "small", "patch": 4, "image_size": 32}
CONVNEXT = {"name": "convnext", "size": "tiny", "patch": 2}
DROPS = {"drop_path": 0.1}
# Bases for which the config has rates.
RATES = runpy.run_path(str(ROOT / "configs/pnr_cifar100.py"))["BASES"]
BASES = tuple(base for base in bases.BASES if base in RATES)


def _two_view(base, *more):
    return (*PNR, f"--config.method.base={base}", *more)


def _paper_form(base):
    """The paper's form, of a base that has two."""
    two = "form" in schema.option_of(bases.find(base))
    return ["--config.method.form=paper"] if two else []


def _online(row, *more):
    return (f"configs/er_ace_cifar10.py:{row}", *ONLINE, *more)


def _online_ssl(row, base, *more):
    config = f"configs/online_ssl_cifar100.py:{row}"
    return (config, *CIFAR100, f"--config.method.base={base}", *more)


def _encoder(section):
    return f"--config.encoder={section}"


def _duel(row, *more):
    return (f"configs/duel_imagenetlt.py:{row}", *DUEL, *more)


# Row of the table of methods -> config, and options of `python -m jaxcl.scaling`.
ROWS = {
    **{
        f"{base}-{way}": _two_view(base, f"--config.method.strategy={way}")
        for base in BASES
        for way in strategies.STRATEGIES
    },
    **{
        f"{base}-joint": _two_view(
            base,
            "--config.method.strategy=finetune",
            "--config.scenario.name=joint",
            "--config.scenario.num_tasks=1",
        )
        for base in BASES
    },
    **{
        f"{base}-pnr-paper": _two_view(
            base,
            *_paper_form(base),
            "--config.method.frozen_bn=batch",
        )
        for base in BASES
    },
    "mocov2plus-pnr-imagenet100": IMAGENET,  # its images are streamed
    "mocov2plus-pnr-head": _two_view("mocov2plus", "--config.method.online_head=True"),
    "mocov2plus-pnr-vit": _two_view("mocov2plus", _encoder(VIT | DROPS)),
    "simclr-pnr-vit": _two_view(
        "simclr", _encoder(VIT | DROPS | {"frozen_patch": True})
    ),
    "simclr-pnr-convnext": _two_view("simclr", _encoder(CONVNEXT | DROPS)),
    "dino-cassle-local": _two_view(
        "dino",
        "--config.method.strategy=cassle",
        "--config.method.balance=sinkhorn",
        "--config.augment.local={'views': 6, 'size': 16}",
    ),
    **{
        name: _online(name)
        for name in ("finetune", "iidpp", "er", "er_ace", "er_aml", "mir", "gem")
        + ("agem", "aser", "gss", "gcr", "gdumb", "icarl", "ss_il", "der", "derpp")
        + ("derpp_ace",)
    },
    "agempp": _online("agem", "--config.method.plus=True"),
    "er_ace-measured": _online(
        "er_ace", "--config.replay.measure=('drift','gradients')"
    ),
    "er_ace-vit": _online("er_ace", _encoder(VIT)),
    "er-joint": ("configs/survey_cifar100.py:er", *CIFAR100),
    "er_lwf": ("configs/survey_cifar100.py:er_lwf", *CIFAR100),
    "online_ssl-cassle": _online_ssl("cla_e", "simclr"),
    "online_ssl-cla_r": _online_ssl("cla_r", "simsiam"),
    "online_ssl-der": _online_ssl(
        "replay", "simclr", "--config.method.regulariser=der"
    ),
    "online_ssl-lump": _online_ssl(
        "replay",
        "byol",
        "--config.method.regulariser=lump",
        "--config.replay.size=10",  # each is mixed with a row that comes
    ),
    "online_ssl-loss_aware": _online_ssl(
        "replay", "byol", "--config.replay.policy=loss_aware_reservoir"
    ),
    "online_ssl-pnr": _online_ssl("pnr", "mocov2plus"),
    "cclis": (CCLIS,),
    "cclis-uniform": (CCLIS, "--config.method.keep=uniform"),
    "cclis-vit": (CCLIS, _encoder(VIT | {"patch": 8, "image_size": 64})),
    "co2l": (f"{CCLIS}:co2l",),
    "duel-moco": _duel("d_moco"),
    "duel-moco-sharded": _duel("d_moco", "--config.method.sharded=True"),
    "duel-simclr": _duel("d_simclr"),
    "icl": ("configs/icl_imagenet2.py", ICL),
    "icl-no_meta": ("configs/icl_imagenet2.py:no_meta", ICL),
    "icl-retrain": ("configs/icl_imagenet2.py:retrain", ICL),
}
# Those that the papers are about come first.
FIRST = ("mocov2plus-pnr", "er_ace", "duel-moco", "cclis", "icl")
COLUMNS = (
    ("fits", "fits", None),
    ("memory, MB", ("memory", "held"), 1e-6),
    ("temporaries, MB", ("memory", "temporaries"), 1e-6),
    ("kernels", "kernels", 1),
    ("convolutions f32 / bf16", "convolutions", None),
    ("grouped", "grouped", 1),
    ("GFLOP", "flops", 1e-9),
    ("MB moved", "bytes", 1e-6),
    ("messages", "messages", 1),
    ("MB alone", "alone", 1e-6),
    ("least ms", "least_time", 1e3),
    ("arithmetic / memory / launches / messages, %", "bound", None),
    ("cycles, ms", "cycles", 1e3),
    ("compiled in s", "seconds", 1),
)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--rows", nargs="*", default=list(order()), choices=sorted(ROWS))
    made.add_argument("--targets", nargs="*", default=list(TARGETS))
    made.add_argument("--json", default=str(ROOT / "docs" / "targets.json"))
    made.add_argument("--page", default=str(ROOT / "docs" / "targets.md"))
    made.add_argument("--kept", default=".cache/targets")
    made.add_argument("--timeout", type=int, default=3600, help="seconds for each")
    return made


def order() -> tuple[str, ...]:
    """All rows, those that the papers are about first."""
    return FIRST + tuple(name for name in ROWS if name not in FIRST)


def command(row: str, target: str) -> list[str]:
    """The arguments of `python -m jaxcl.scaling` for a row."""
    config, *options = ROWS[row]
    devices = []
    batches_of_ten = ("configs/er_ace", "configs/survey", "configs/online_ssl")
    if config.startswith(batches_of_ten) and targets.parse(target).chips > 1:
        devices = ["--config.batch_size=80"]  # ten rows do not share out over many
        if row == "mir":  # replays as many of its candidates as rows come in
            devices += ["--config.method.candidates=400"]
    return [f"--config={config}", *options, *devices, f"--target={target}"]


def code() -> str:
    """A hash of the code of the package, the configs, and what compiles them.

    Comments and docstrings are not counted.
    """
    patterns = ("jaxcl/**/*.py", "jaxcl/**/*.json", "configs/*.py")
    sources = sorted(path for x in patterns for path in ROOT.glob(x))
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda12-plugin")
        if _there(name)
    ]
    digest = hashlib.sha256("\n".join(versions).encode())
    for path in sources:
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + _meant(path))
    return digest.hexdigest()[:16]


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _meant(path) -> bytes:
    """A Python file without comments and docstrings; other files as they are."""
    if path.suffix != ".py":
        return path.read_bytes()
    tree = ast.parse(path.read_bytes())
    documented = [x for x in ast.walk(tree) if isinstance(x, _DOCUMENTED)]
    for node in documented:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree).encode()


def reader() -> str:
    """A hash of what tells numbers from a compiled program."""
    names = ("collectives.py", "compiled.py", "hardware.py", "hlo.py", "kernels.py")
    digest = hashlib.sha256()
    for name in (*names, "targets.py", "chips.json"):
        digest.update(_meant(ROOT / "jaxcl" / "scaling" / name))
    return digest.hexdigest()[:16]


def _there(name) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def summary(found: dict) -> dict:
    """What the page needs of what `python -m jaxcl.scaling --json` writes."""
    if "error" in found:
        return {"fits": False, "error": found["error"], "program": found["program"]}
    sent = found["collectives"]
    return {
        "fits": found["fits"],
        "program": found["program"],
        "compiler": found["compiler"],
        "batch_size": found["batch_size"],
        "seconds": found["seconds"],
        "options": found["options"],
        "memory": found["memory"],
        "kernels": sum(found["kernels"].values()),
        "products": found["products"],
        "grouped": found["grouped"],
        "flops": found["flops"],
        "bytes": found["bytes"],
        "messages": sum(x["times"] for x in sent),
        "alone": sum(
            x["times"] * part["bytes"]
            for x in sent
            if not x["beside"]
            for part in x["parts"]
        ),
        "least": found["least"],
        "cycles": found["cycles"],
        "copies": [x for x in found["copies"] if x["bytes"] >= 1e6],
        "unknown_loops": found["unknown_loops"],
        "host_transfers": found["host_transfers"],
    }


def ask(
    row: str, target: str, *, kept: str, timeout: int, known: str | None = None
) -> dict:
    """The summary of a row for a target, {"failed": why}, or {"same": True}.

    The last where the program is `known`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.json"
        words = [*command(row, target), f"--kept={kept}", f"--timeout={timeout}"]
        words += [] if known is None else [f"--known={known}"]
        ran = subprocess.run(
            [sys.executable, "-m", "jaxcl.scaling", *words, f"--json={path}"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if ran.returncode:
            lines = [x for x in ran.stderr.splitlines() if x.startswith("jaxcl: ")]
            said = (lines or ran.stderr.splitlines() or [""])[-1]
            return {"failed": said.removeprefix("jaxcl: ")[:300]}
        (found,) = json.loads(path.read_text())["targets"]
        return {"same": True} if found.get("same") else summary(found)


def _cell(row, value, scale) -> str:
    if value == "fits":
        return "yes" if row["fits"] else "**no**"
    if value == "convolutions":
        kinds = row["products"]["convolution"]
        wide, narrow = kinds.get("float32", 0), kinds.get("bfloat16", 0)
        return f"{wide:g} / {narrow:g}"
    parts = row["least"]
    if value == "least_time":
        return tables.number(1e3 * sum(parts.values()))
    if value == "bound":
        total = sum(parts.values())
        shares = (100 * parts[name] / total for name in targets.Least._fields)
        return " / ".join(f"{share:.0f}" for share in shares)
    found = row["memory"][value[1]] if isinstance(value, tuple) else row[value]
    return "-" if found is None else tables.number(found * scale)


_HEAD = """# What compilers make of each method

```
pip install -e '.[tpu-compiler,gpu-compiler]'
python benchmarks/targets.py
```

compiles the step of a later task for chips that need not be there, at the size of the
paper's config and in its precision, and writes this page and `docs/targets.json`.
**Nothing was run: these are facts of programs, and bounds on their time.** What each
number is says [How a run would scale](scaling.md#by-the-chips-own-compiler); each row's
command is in `benchmarks/targets.py`. No paper has the rows of ViTs and ConvNeXts;
their encoders have usual sizes. All are of one step on one device. The online
methods' batches of 10 are 80 where there are eight chips, since ten rows do not share
out, and MIR's candidates 400; LUMP still mixes ten of the 80. "MB alone" are those
of messages beside which the compiler put nothing. Seconds of compiling are of two cores
that did much else."""


def page(found: dict) -> str:
    """docs/targets.md of what docs/targets.json holds."""
    asked = [name for name in order() if found.get(name)]
    blocks = [_HEAD, *(_of_target(target, asked, found) for target in TARGETS)]
    missing = [name for name in order() if name not in asked]
    if missing:
        names = ", ".join(missing)
        text = f"{len(missing)} of {len(ROWS)} rows, for no target so far: {names}."
        blocks.append(f"## What is missing\n\n{text}")
    return "\n\n".join(blocks) + "\n"


def _of_target(target, asked, found) -> str:
    """The section of a target, of the rows that were asked for at all."""
    rows = {name: found[name].get(target) for name in asked}
    done = {x: row for x, row in rows.items() if row and "failed" not in row}
    fit = {x: row for x, row in done.items() if "error" not in row}
    blocks = [f"## {target}"]
    if fit:
        blocks += [_made(fit.values()), _short(fit), _table(fit)]
    blocks.append("\n".join(_notes(fit)))
    for word, key in (("Does not fit", "error"), ("Refused", "failed")):
        lines = [f"- {x}: {row[key]}" for x, row in rows.items() if row and key in row]
        if lines:
            blocks.append("\n".join([f"{word}:", "", *lines]))
    missing = [name for name, row in rows.items() if not row]
    if missing:
        blocks.append(f"Not asked for yet: {', '.join(missing)}.")
    return "\n\n".join(block for block in blocks if block)


def _made(rows) -> str:
    """Who compiled rows, and when."""
    made, jax, dates = (
        sorted({row[key] for row in rows}) for key in ("compiler", "jax", "date")
    )
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Compiled by {', '.join(made)} under jax {', '.join(jax)}, {when}."


def _short(rows) -> str:
    """How far apart the rows are."""
    spans = []
    for label, of, unit in (
        ("kernels", lambda row: row["kernels"], ""),
        ("least time", lambda row: 1e3 * sum(row["least"].values()), " ms"),
        ("memory", lambda row: row["memory"]["held"] / 1e6, " MB"),
    ):
        values = {name: of(row) for name, row in rows.items()}
        low, high = (
            f"{tables.number(values[name])}{unit} ({name})"
            for name in (min(values, key=values.get), max(values, key=values.get))
        )
        spans.append(f"{label} from {low} to {high}")
    count = sum(row["fits"] for row in rows.values())
    return f"{count} of {len(rows)} fit; " + "; ".join(spans) + "."


def _table(rows) -> str:
    lines = ["| method | " + " | ".join(x for x, _, _ in COLUMNS) + " |"]
    lines.append("|---|" + "---:|" * len(COLUMNS))
    for name, row in rows.items():
        cells = [_cell(row, value, scale) for _, value, scale in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _notes(rows) -> list[str]:
    """What else is to be said, once for all rows that it is true of."""
    notes: dict[str, list[str]] = {}
    for name, row in rows.items():
        for note in _notes_of(row):
            notes.setdefault(note, []).append(name)
    return [f"- {note}: {', '.join(names)}" for note, names in notes.items()]


def _notes_of(row) -> Iterator[str]:
    if row["unknown_loops"]:
        yield f"{row['unknown_loops']} loops of unknown length, once each"
    if row["host_transfers"]:
        yield "transfers with the host"
    for name, value in row.get("options", {}).items():
        yield f"compiled with {name}={value}, for the compiler fails without"
    copies = [(copy["shape"], copy["bytes"]) for copy in row["copies"][:3]]
    for (shape, size), count in collections.Counter(copies).items():
        often = "" if count == 1 else f"{count} times "
        yield f"copies {often}{shape}, {tables.number(size / 1e6)} MB a step"


def main(argv=None) -> dict:
    """The command; returns what docs/targets.json then holds."""
    args = parser().parse_args(argv)
    path, kept = pathlib.Path(args.json), pathlib.Path(args.kept).resolve()
    found = json.loads(path.read_text()) if path.exists() else {}
    sources, reads = code(), reader()
    for target in args.targets:
        for row in args.rows:
            words = "\n".join(command(row, target)) + sources
            key = hashlib.sha256(words.encode()).hexdigest()[:16]
            there = found.get(row, {}).get(target)
            if there and there["key"] == key:
                continue
            began = time.monotonic()
            read_so = there and there.get("reader") == reads
            known = there.get("program") if read_so else None
            options = {"kept": str(kept), "timeout": args.timeout, "known": known}
            told = ask(row, target, **options)
            if told.get("same"):
                told, said = there, "as it was"
            else:
                said = told.get("failed") or told.get("error") or "done"
                told["date"] = time.strftime("%Y-%m-%d")
                told["jax"] = importlib.metadata.version("jax")
            told |= {"key": key, "reader": reads}
            found.setdefault(row, {})[target] = told
            path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            pathlib.Path(args.page).write_text(page(found))
            print(
                f"{row}, {target}: {said}, {time.monotonic() - began:.0f} s", flush=True
            )
    pathlib.Path(args.page).write_text(page(found))
    return found


if __name__ == "__main__":
    main()
