"""The command `jaxcl`: each word is a command of its own, imported when used."""

import difflib
import importlib
import importlib.metadata
import os
import runpy
import sys
from collections.abc import Sequence

# word -> (module that `python -m` runs, what it does)
_RUNS = {
    "train": ("jaxcl.main", "train a config, or continue a run that was stopped"),
    "update": ("jaxcl.update", "teach a run's encoder new images, if it stays good"),
    "import": ("jaxcl.weights.import_file", "read the weights of another library"),
    "export": ("jaxcl.weights.export", "write the encoder of a run to a folder"),
    "data": ("jaxcl.data.fetch", "download or draw a well-known set of images"),
    "report": ("jaxcl.report", "write one HTML page about any runs"),
    "estimate": ("jaxcl.estimate", "memory and least time of a step, on any chip"),
}
# word -> (module with `main`, what it does)
_TELLS = {
    "compare": ("jaxcl.report.compare", "runs side by side, as a table and a picture"),
    "speedup": (
        "jaxcl.report.speedup",
        "how much sooner runs converge than a baseline",
    ),
    "list": ("jaxcl.api.list", "methods, bases, encoders, data, configs ..."),
    "options": ("jaxcl.api.options", "every option of a config, and what it means"),
}
_GROUPS = {
    "Train": ("train", "update"),
    "Models": ("import", "export"),
    "Data": ("data",),
    "Results": ("report", "compare", "speedup"),
    "Inspect": ("list", "options", "estimate"),
}
_FORMER = {"bring": "import", "show": "options"}  # until the first release
_TAKES_A_CONFIG = ("train", "estimate", "options")
_OWN_IMAGES = "own_images"

_HELP = {
    "train": """usage: jaxcl train CONFIG [--workdir=FOLDER] [--config.OPTION=VALUE ...]

Train a config. The same command continues a run that was stopped.

examples:
  jaxcl train quickstart
  jaxcl train quickstart --workdir=runs/finetune --config.method.name=finetune
  jaxcl train own_images:my_folder,encoder=vit_small --config.epochs=50

CONFIG is a name of `jaxcl list configs` or a file; :WORD behind it is its argument.

options, with their defaults:
  --workdir=FOLDER         run folder (runs/NAME, with the config's name)
  --config.OPTION=VALUE    an option of the config; `jaxcl options CONFIG --all`:
  --config.seed=N            of all that is drawn (0)
  --config.seeds=N           how many runs, from that seed on (1)
  --config.epochs=N          for each task (the config's)
  --config.batch_size=N      images of a step (the config's)
  --lost-rows              continue although rows of metrics.jsonl are lost (off)
  --coordinator=HOST:PORT  of process 0, where there are several processes (none)
  --processes=N            how many processes there are (found by JAX)
  --process=K              number of this one (found by JAX)

exit codes: 0 finished, 1 failed, 2 wrong command or config, 75 stopped and saved""",
    "update": """usage: jaxcl update --run=RUN --data=IMAGES [--test=LABELLED] [options]

Train a run's encoder on new images, and keep it only if it breaks no limit.

examples:
  jaxcl update --run=runs/mine --data=new_images
  jaxcl update --run=runs/mine --data=new_images --test=labelled_images
  jaxcl update --run=runs/mine --data=new_images --test=labelled_images \\
      --config.limits.accuracy_drop=0.05 --config.train.epochs=5

options, with their defaults:
  --run=RUN                a finished run (required)
  --data=IMAGES            new images, a path (required)
  --test=LABELLED          labelled images that both encoders are evaluated on (none)
  --old=IMAGES             images in your search index (those of the run)
  --join                   also train on the run's images (off)
  --again                  update again although the same update is done (off)
  --verbose                print all measures (off)
  --config.limits.accuracy_drop=X  most that an accuracy may fall, as a share (0.02)
  --config.limits.accuracy=X       least accuracy (none)
  --config.limits.index=keep       worst verdict on the index: keep or rotate (none)
  --config.limits.overlap=X        least share of neighbours kept (none)
  --config.train.OPTION=VALUE      an option of the training, as epochs (the run's)
  --config.rows=N                  old images that are compared (2048)
  --config.neighbours=N            neighbours of each (10)

exit codes: 0 accepted, 3 rolled back, 1 failed, 2 wrong command, 75 stopped""",
    "estimate": """usage: jaxcl estimate CONFIG [--target=CHIPS] [options]

Compile a training step for chips that need not be here, and bound memory and time.

examples:
  jaxcl estimate pnr_cifar100
  jaxcl estimate pnr_cifar100 --target=h200:8
  jaxcl estimate pnr_cifar100 --target=v5e:2x4 --json=step.json

options, with their defaults:
  --target=CHIPS         a TPU slice by its sides, or GPUs by number (this machine)
  --classes=N            classes of the data set (those of the config's set)
  --rows=N               train images of the data set (those of the config's set)
  --json=FILE            write all numbers there (none)
  --config.OPTION=VALUE  an option of the config

exit codes: 0 compiled, 1 failed, 2 wrong command or config""",
}


def usage() -> str:
    """Return the overview of all commands."""
    both = _RUNS | _TELLS
    lines = []
    for group, words in _GROUPS.items():
        lines += [group, *(f"  jaxcl {word:11} {both[word][1]}" for word in words)]
    return "\n".join(
        [
            "Contrastive and continual representation learning in JAX.",
            "",
            *lines,
            "",
            "`jaxcl WORD --help` has the options of each. For example:",
            "  jaxcl train quickstart",
            "  jaxcl train own_images:my_folder --config.epochs=50",
            "  jaxcl options own_images:my_folder",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit code 2 if there is no such word, else that of the word."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _started(words)
    except BrokenPipeError:  # whoever read it has seen enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _started(words: list[str]) -> int:
    """Start the command that the words name; return the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    word, *rest = words
    if word == "--version":
        print(_version())
        return 0
    if word in _FORMER:
        new = _FORMER[word]
        print(f"jaxcl: {word!r} is now called {new!r}: jaxcl {new}", file=sys.stderr)
        word = new
    if word not in _RUNS | _TELLS:
        near = difflib.get_close_matches(word, [*_RUNS, *_TELLS], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        known = ", ".join([*_RUNS, *_TELLS])
        print(f"jaxcl: no command {word!r}: {hint}must be {known}", file=sys.stderr)
        return 2
    if word in _HELP and {"-h", "--help"} & {*rest}:
        print(_HELP[word])
        return 0
    if word in _HELP:  # flags of absl have underscores
        rest = [_with_underscores(word) for word in rest]
    if word in _TAKES_A_CONFIG and rest and not rest[0].startswith("-"):
        rest[0] = f"--config={rest[0]}"
    if word == "train" and (wrong := _wrong_config(rest)):
        print(f"jaxcl train: {wrong}", file=sys.stderr)
        return 2
    if word in _TELLS:
        return importlib.import_module(_TELLS[word][0]).main(rest)
    sys.argv = [f"jaxcl {word}", *rest]
    runpy.run_module(_RUNS[word][0], run_name="__main__", alter_sys=True)
    return 0


def _version() -> str:
    """Return the versions of the library and of JAX, and the devices that JAX finds."""
    own = importlib.import_module("jaxcl").__version__
    found = importlib.import_module("jax").devices()
    jax = f"jax {importlib.metadata.version('jax')}"
    return f"jaxcl {own} ({jax}, {len(found)} x {found[0].device_kind})"


def _with_underscores(word: str) -> str:
    """Return --a-b=value as --a_b=value; options of a config stay as they are."""
    flag, equals, value = word.partition("=")
    if not flag.startswith("--") or flag.startswith("--config."):
        return word
    return f"--{flag[2:].replace('-', '_')}{equals}{value}"


def _wrong_config(words: list[str]) -> str:
    """Return a sentence about a config that cannot be meant; "" about any other."""
    named = [x.partition("=")[2] for x in words if x.startswith("--config=")]
    if not named:
        if "--config" in words or any(x.startswith("--flagfile") for x in words):
            return ""
        return (
            "which config? For example: jaxcl train quickstart, or jaxcl train "
            f"{_OWN_IMAGES}:FOLDER. All: jaxcl list configs"
        )
    name, _, argument = named[0].partition(":")
    stem = os.path.basename(name).removesuffix(".py")
    if stem == _OWN_IMAGES and not argument:
        return (
            f"{_OWN_IMAGES} needs a folder of images: jaxcl train {_OWN_IMAGES}:FOLDER"
        )
    if os.path.isdir(named[0]):
        return (
            f"{named[0]} is a folder: did you mean jaxcl train "
            f"{_OWN_IMAGES}:{named[0]}?"
        )
    return ""
