"""The command `jaxcl`: each word is a command of its own, imported when used."""

import difflib
import importlib
import os
import runpy
import sys
from collections.abc import Sequence

# word -> (module that `python -m` runs, what it does)
_RUNS = {
    "train": ("jaxcl.main", "train a config, or go on with a run that was stopped"),
    "update": ("jaxcl.update", "teach a run's encoder new images, if it stays good"),
    "bring": ("jaxcl.bring", "read the weights of another library"),
    "export": ("jaxcl.export", "write the encoder of a run to a folder"),
    "data": ("jaxcl.data.fetch", "get a well-known set of images"),
    "report": ("jaxcl.report", "one HTML page about any runs"),
    "estimate": ("jaxcl.estimate", "memory and least time of a step, on any chip"),
}
# word -> (module with `main`, what it does)
_TELLS = {
    "list": ("jaxcl.front.listing", "methods, bases, encoders, data, configs ..."),
    "show": ("jaxcl.front.shown", "every option of a config, and what it means"),
    "compare": ("jaxcl.report.compare", "runs side by side, as a table and a picture"),
    "speedup": (
        "jaxcl.report.speedup",
        "how much sooner runs converge than a baseline",
    ),
}
_TAKES_A_CONFIG = ("train", "estimate", "show")


def usage() -> str:
    """What the command can do."""
    both = _RUNS | _TELLS
    lines = [f"  jaxcl {word:11} {what}" for word, (_, what) in both.items()]
    return "\n".join(
        [
            "Contrastive and continual representation learning in JAX.",
            "",
            *lines,
            "",
            "`jaxcl WORD --help` has the options of each. For instance:",
            "  jaxcl train quickstart",
            "  jaxcl train own_images:my_folder --config.epochs=50",
            "  jaxcl show own_images:my_folder",
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
    """Start what the words say; returns the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    word, *rest = words
    if word == "--version":
        print(importlib.import_module("jaxcl").__version__)
        return 0
    if word not in _RUNS | _TELLS:
        near = difflib.get_close_matches(word, [*_RUNS, *_TELLS], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        known = ", ".join([*_RUNS, *_TELLS])
        print(f"jaxcl: no command {word!r}: {hint}must be {known}", file=sys.stderr)
        return 2
    if word in _TAKES_A_CONFIG and rest and not rest[0].startswith("-"):
        rest[0] = f"--config={rest[0]}"
    if word in _TELLS:
        return importlib.import_module(_TELLS[word][0]).main(rest)
    sys.argv = [f"jaxcl {word}", *rest]
    runpy.run_module(_RUNS[word][0], run_name="__main__", alter_sys=True)
    return 0
