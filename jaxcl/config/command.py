"""Common parts of the commands that train: flags, signals, exit codes."""

import dataclasses
import difflib
import re
import sys
import traceback

from absl import flags

from jaxcl import numerics
from jaxcl.config import files, sections
from jaxcl.data import files as images
from jaxcl.errors import Refused
from jaxcl.run import checkpoint, lock, metrics_log, signals, terminal, train

# What a user can mend: one line says it. Anything else is a bug, with a traceback.
FAILURES = (
    Refused,
    OSError,
    metrics_log.Diverged,
    checkpoint.CheckpointError,
    lock.LockLostError,
)
BUG = 70  # the exit code, as EX_SOFTWARE of sysexits.h


def parse_flags(argv, section="config", define=lambda: None):
    """Parse the flags of a command; if they are wrong, exit with one line on stderr.

    Args:
      argv: the command.
      section: of the config that has the options of a run, for hints.
      define: defines the flags; it is called first and may raise, too.
    """
    images.lift_pillow_limit()
    terminal.use_plain_warnings()
    try:
        define()
        return flags.FLAGS(files.located_in(argv))
    except (flags.Error, LookupError, AttributeError, TypeError, ValueError) as error:
        message = str(error.args[0] if error.args else error)
        if type(error) is KeyError:  # ml_collections says no more than the quoted name
            message = f"config has no section {message} to override"
        # A config that refuses its argument comes with a traceback in the text.
        before = message.partition("Error whilst parsing")[0]
        if refusal := re.search(
            r"\n(?:ValueError|jaxcl\.[\w.]+): (.*)\Z", message, re.S
        ):
            message = before + refusal[1].strip()
        if "\nTypeError: get_config() takes 0 positional" in message:
            message = f"{before}the config takes no word behind its name and a colon"
        message = _reword_flag_error(message)
        if isinstance(error, flags.UnrecognizedFlagError):
            message = message.partition(". Did you mean")[0]  # absl's words
            message += _suggest_option(error.flagname, section)
        sys.exit(complain(message.replace("\n", " ")))
    except OSError as error:  # no such config file
        sys.exit(complain(error))


def _reword_flag_error(message: str) -> str:
    """Return a message about a flag without the words of absl and of Python's `int`."""
    missing = r"flag --(\w+)=None: Flag --\1 must have a value other than None\."
    message = re.sub(missing, r"--\1 is required.", message)
    if none := re.match(r"Type <class 'NoneType'> of field (\S+) is not", message):
        return (
            f"{none[1]} is None in the config and has no type, so that the command "
            f"cannot set it; copy the config file and set {none[1]} there, or choose a "
            "config that sets it"
        )
    kinds = {"invalid literal for int": "a whole number"}
    kinds |= {"could not convert string to float": "a number"}
    for words, kind in kinds.items():
        if wrong := re.match(rf"flag --(config\.[\w.]+)=(.*?): {words}", message, re.S):
            return f"{wrong[1]}={wrong[2]!r}: must be {kind}"
    return message


def _suggest_option(flag: str, section: str) -> str:
    """Suggest the option of a config that an unknown flag may have meant."""
    options = [field.name for field in dataclasses.fields(sections.TopLevel)]
    own = [name for name in flags.FLAGS if not flags.FLAGS[name].short_name]
    known = {name: f"{section}.{name}" for name in options} | {x: x for x in own}
    first, dot, rest = flag.partition(".")
    near = difflib.get_close_matches(first, known, n=1)
    return f"; did you mean --{known[near[0]]}{dot}{rest}?" if near else ""


def complain(message, code=2) -> int:
    """Print one line on stderr; returns the exit code."""
    name = terminal.style_text("jaxcl:", "bad", sys.stderr)
    print(f"{name} {message}", file=sys.stderr, flush=True)
    return code


def report_bug() -> int:
    """Print the present traceback and ask for a report; return the exit code."""
    traceback.print_exc()
    return complain(
        "this is a bug of jaxcl: please report it with the lines above and what "
        "`jaxcl --version --verbose` prints",
        code=BUG,
    )


def run_until_signal(make, work) -> int:
    """Prepare a run, and run it until its end or a signal.

    Args:
      make: () -> anything; its Refused or OSError is the user's to mend, 2.
      work: (what was made, stop: () -> bool) -> exit code or None.

    Returns:
      The exit code: that of `work`, 0 for None; 1, 2, 70 or 75 as in `main`.
    """
    terminal.use_plain_warnings()
    images.lift_pillow_limit()
    # After the distributed runtime has started, which would take SIGTERM for itself.
    with (
        terminal.outlive_terminal(),
        signals.watch_signals(complain) as stop,
        numerics.pinned(),
    ):
        try:
            return _run_made(make, work, stop)
        except Exception:
            return report_bug()


def _run_made(make, work, stop) -> int:
    try:
        made = make()
    except (Refused, OSError, lock.LockHeldError) as error:
        return complain(error)
    try:
        return work(made, stop) or 0
    except train.Interrupted as interrupted:
        told = f"{interrupted}; the same command continues"
        return complain(told, code=signals.STOPPED)
    except lock.LockHeldError as error:
        return complain(error)
    except FAILURES as error:
        return complain(error, code=1)
