"""Run the command `jaxcl`; each subcommand is imported when used.

A subcommand is an entry of `COMMANDS` and a module with two functions:
`add_options(parser)` declares its options, `main(options)` does the work and returns
the exit code. A `Refused` or `OSError` of `main` is printed in one line, exit code 2.
Any other error is a bug, exit code 70.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from jaxcl.errors import Refused
from jaxcl.run import terminal

# word -> (group, module of jaxcl, what it does)
COMMANDS = {
    "train": ("Train", "main", "train a config, or continue a stopped run"),
    "check": ("Train", "update.check", "check whether an update is due; no training"),
    "update": ("Train", "update.command", "train a run on new images, within limits"),
    "import": ("Models", "weights.import_file", "read the weights of another library"),
    "export": ("Models", "weights.export", "write the encoder of a run to a folder"),
    "features": ("Models", "weights.embed", "embed a data set once, into one file"),
    "index": ("Models", "api.index", "bring stored vectors to a run's newest encoder"),
    "data": (
        "Data",
        "data.sources.fetch",
        "download or draw a well-known set of images",
    ),
    "convert": (
        "Data",
        "data.sources.convert",
        "write a set as arrays or as tar shards",
    ),
    "report": ("Results", "report.page", "write one HTML page about any runs"),
    "compare": ("Results", "report.compare", "compare runs in a table and a plot"),
    "list": ("Inspect", "api.list", "list methods, bases, encoders, data, configs ..."),
    "options": ("Inspect", "api.options", "print a config's options and their meaning"),
    "doctor": (
        "Inspect",
        "api.doctor",
        "check the installation, by a run of ten steps",
    ),
    "estimate": ("Inspect", "estimate", "bound memory and time of a step, on any chip"),
}
_EXAMPLES = """
`jaxcl COMMAND --help` lists the options of a command. Examples:
  jaxcl train quickstart
  jaxcl train own_images:my_folder --config.epochs=50
  jaxcl options own_images:my_folder"""


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest option of an unknown one.

    It reads --a_b as --a-b, and refuses what is wrong in place of an exit.
    """

    def __init__(self, **options):
        self.names: list[str] = []  # of all options
        self.section = ""  # section of a config with the options of a run
        self.has_words = False  # commands of the command
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def add_argument(self, *names, **options):
        """Add an option, as `argparse` does."""
        self.names += [x for x in names if x.startswith("--") and "." not in x]
        return super().add_argument(*names, **options)

    def add_subparsers(self, **options):
        """Add subcommands, as `argparse` does."""
        self.has_words = True
        return super().add_subparsers(**options)

    def add_config(self) -> None:
        """Take a config, by its name or as --config, and overrides of its options.

        The option `config` is then a list of words, as `config.files.read_config` has.
        """
        text = "name from `jaxcl list configs`, or a file; NAME:WORD passes it a word"
        self.add_argument(
            "config", nargs="?", metavar="CONFIG", default=argparse.SUPPRESS, help=text
        )
        self.add_argument("--config", help=argparse.SUPPRESS)
        self.add_override("config.OPTION", "option; `jaxcl options CONFIG --all`")
        self.section = "config"

    def add_override(self, name: str, text: str) -> None:
        """Add an option of a config to the help, as one example of its section."""
        self.add_argument(
            f"--{name}", metavar="VALUE", default=argparse.SUPPRESS, help=text
        )

    def parse_known_args(self, args=None, namespace=None):
        """Parse the command's words; refuse unknown ones."""
        overrides, words = _split_overrides(list(args or ()))
        unknown = [word for word in words if _name(word) not in self.names]
        unknown = [word for word in unknown if word.startswith("--") and word != "--"]
        if not self.section:
            unknown += overrides
        if unknown and not self.has_words:
            self.error(f"unknown option {unknown[0]}{self._suggest(_name(unknown[0]))}")
        options, others = super().parse_known_args(words, namespace)
        if others:
            self.error(f"unknown argument {others[0]!r}")
        if "--config" in self.names:
            if options.config is None:
                self.error(
                    f"which config? For example: {self.prog} quickstart, or "
                    f"{self.prog} own_images:FOLDER. All: jaxcl list configs"
                )
            overrides.insert(0, f"--config={options.config}")
        if self.section:
            options.config = overrides
        return options, []

    def error(self, message):
        """Raise Refused with a message and the command that lists the options."""
        stop = "" if message.endswith("?") else ";"
        raise Refused(f"{message}{stop} `{self.prog} --help` lists the options")

    def _suggest(self, name: str) -> str:
        """Name the option that an unknown one may have meant."""
        first, dot, rest = name.removeprefix("--").partition(".")
        nearest = {option.removeprefix("--"): option for option in self.names}
        if self.section:
            top = importlib.import_module("jaxcl.config.sections").TopLevel
            fields = top.__dataclass_fields__
            nearest = {x: f"--{self.section}.{x}" for x in fields} | nearest
        near = importlib.import_module("difflib").get_close_matches(first, nearest, n=1)
        return f"; did you mean {nearest[near[0]]}{dot}{rest}?" if near else ""


def _split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the overrides of a config, as --config.a=b, from the other words."""
    overrides, others = [], []
    while words:
        word = words.pop(0)
        if not word.startswith(("--config.", "--noconfig.")):
            others.append(word.replace(_name(word), _name(word).replace("_", "-"), 1))
            continue
        takes_next = "=" not in word and word.startswith("--config.")
        if takes_next and words and not words[0].startswith("--"):
            word = f"{word}={words.pop(0)}"
        overrides.append(word)
    return overrides, others


def _name(word: str) -> str:
    """Return the name of an option, without its value; "" for any other word."""
    return word.partition("=")[0] if word.startswith("--") else ""


def import_command(word: str):
    """Import the module of a command."""
    return importlib.import_module(f"jaxcl.{COMMANDS[word][1]}")


def make_parser(word: str) -> Parser:
    """Make the parser of a command."""
    text = COMMANDS[word][2]
    parser = Parser(prog=f"jaxcl {word}", description=f"{text[0].upper()}{text[1:]}.")
    import_command(word).add_options(parser)
    return parser


def usage() -> str:
    """Return the overview of all commands."""
    lines = ["Contrastive and continual representation learning in JAX.", ""]
    for group in dict.fromkeys(group for group, *_ in COMMANDS.values()):
        lines.append(group)
        for word, (name, _, text) in COMMANDS.items():
            if name == group:
                lines.append(f"  jaxcl {word:11} {text}")
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
    except (Refused, OSError) as error:
        return terminal.complain(error)
    except Exception:
        return terminal.report_bug()


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
    if word not in COMMANDS:
        near = importlib.import_module("difflib").get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise Refused(f"unknown command {word!r}: {hint}Choose: {', '.join(COMMANDS)}")
    options = make_parser(word).parse_args(rest)
    terminal.use_plain_warnings()
    return import_command(word).main(options)


def _version() -> str:
    """Return the versions of the library and of JAX, and the devices that JAX finds."""
    library = importlib.import_module("jaxcl").__version__
    jax = importlib.import_module("jax")
    devices = jax.devices()
    hardware = f"{len(devices)} x {devices[0].device_kind}"
    return f"jaxcl {library} (jax {jax.__version__}, {hardware})"
