"""Run the command `jaxcl`; each subcommand is imported when used."""

import difflib
import importlib
import importlib.metadata
import os
import pathlib
import runpy
import sys
from collections.abc import Sequence

# word -> (module, what it does). A module has `main`, which takes the words behind the
# command; one with flags of absl is run as `python -m` does.
_COMMANDS = {
    "train": ("jaxcl.main", "train a config, or continue a run that was stopped"),
    "update": ("jaxcl.update", "train a run's encoder on new images, within limits"),
    "check": ("jaxcl.update.check", "check whether an update is due; trains nothing"),
    "import": ("jaxcl.weights.import_file", "read the weights of another library"),
    "export": ("jaxcl.weights.export", "write the encoder of a run to a folder"),
    "features": ("jaxcl.weights.embed", "embed a data set once, into one file"),
    "index": ("jaxcl.api.index", "bring stored vectors to a run's newest encoder"),
    "data": ("jaxcl.data.fetch", "download or draw a well-known set of images"),
    "report": ("jaxcl.report.page", "write one HTML page about any runs"),
    "compare": ("jaxcl.report.compare", "compare runs in a table and a plot"),
    "list": ("jaxcl.api.list", "list methods, bases, encoders, data, configs ..."),
    "options": ("jaxcl.api.options", "print the options of a config and their meaning"),
    "doctor": ("jaxcl.api.doctor", "check the installation, with a run of ten steps"),
    "estimate": ("jaxcl.estimate", "estimate memory and time of a step, on any chip"),
}
_GROUPS = {
    "Train": ("train", "check", "update"),
    "Models": ("import", "export", "features", "index"),
    "Data": ("data",),
    "Results": ("report", "compare"),
    "Inspect": ("list", "options", "estimate", "doctor"),
}
_TAKES_A_CONFIG = ("train", "estimate", "options")
_OWN_IMAGES = "own_images"
_EXAMPLES = """
`jaxcl COMMAND --help` lists the options of a command. Examples:
  jaxcl train quickstart
  jaxcl train own_images:my_folder --config.epochs=50
  jaxcl options own_images:my_folder"""
_HELP = pathlib.Path(__file__).with_name("help")  # WORD.txt where absl would list flags


def usage() -> str:
    """Return the overview of all commands."""
    lines = ["Contrastive and continual representation learning in JAX.", ""]
    for group, words in _GROUPS.items():
        lines += [group, *(f"  jaxcl {word:11} {_COMMANDS[word][1]}" for word in words)]
    return "\n".join([*lines, _EXAMPLES])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code, or 2 if there is no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    # As with `python -m`, a package in the current folder is found. The folder is last,
    # so that it hides no installed package.
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
    try:
        return _start_command(words)
    except BrokenPipeError:  # whoever read it has seen enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        return importlib.import_module("jaxcl.config.command").report_bug()


def _start_command(words: list[str]) -> int:
    """Start the command that the words name; return the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    word, *rest = words
    if word == "--version":
        print(_version())
        if "--verbose" in rest:
            doctor = importlib.import_module("jaxcl.api.doctor")
            print("\n".join(doctor.list_versions()))
        return 0
    if word not in _COMMANDS:
        near = difflib.get_close_matches(word, _COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        wrong = f"unknown command {word!r}: {hint}Choose: {', '.join(_COMMANDS)}"
        print(f"jaxcl: {wrong}", file=sys.stderr)
        return 2
    page = _HELP / f"{word}.txt"
    if page.exists():
        if {"-h", "--help"} & {*rest}:
            print(page.read_text(), end="")
            return 0
        rest = [_with_underscores(word) for word in rest]  # as flags of absl have them
    if word in _TAKES_A_CONFIG and rest and not rest[0].startswith("-"):
        rest[0] = f"--config={rest[0]}"
    if word == "train" and (wrong := _wrong_config(rest)):
        print(f"jaxcl train: {wrong}", file=sys.stderr)
        return 2
    module, _ = _COMMANDS[word]
    if not page.exists():
        return importlib.import_module(module).main(rest)
    sys.argv = [f"jaxcl {word}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
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
    """Return an error about a config that cannot work; "" if there is none."""
    named = next((x.partition("=")[2] for x in words if x.startswith("--config=")), "")
    if not named:
        if "--config" in words or any(x.startswith("--flagfile") for x in words):
            return ""
        return (
            "which config? For example: jaxcl train quickstart, or jaxcl train "
            f"{_OWN_IMAGES}:FOLDER. All: jaxcl list configs"
        )
    name, _, argument = named.partition(":")
    own = os.path.basename(name).removesuffix(".py") == _OWN_IMAGES
    if own and not argument:
        return f"{_OWN_IMAGES} needs a folder: jaxcl train {_OWN_IMAGES}:FOLDER"
    hint = f"did you mean jaxcl train {_OWN_IMAGES}:{named}?"
    return f"{named} is a folder: {hint}" if os.path.isdir(named) else ""
