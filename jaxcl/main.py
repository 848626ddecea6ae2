"""Run a config: `python -m jaxcl.main --config=configs/quickstart.py`.

Options are overridden as `--config.method.temperature=0.1`. The same command
continues an interrupted run. Where `config.checkpoint` names a run, its encoder is
judged and nothing is trained, see configs/transfer.py. Exit codes: 0 finished, 1
failed, 2 the command or config is wrong, 75 stopped by a signal and saved.
"""

import signal
import sys
import threading

from absl import app, flags, logging
from ml_collections import config_flags

from jaxcl import build, checkpoint, finish, meter, record, sharding, train
from jaxcl.data import convert

# What a user can mend: one line says it. Anything else is a bug, with a traceback.
FAILURES = (
    meter.Diverged,
    checkpoint.CheckpointError,
    record.RowsLost,
    convert.Unreadable,
    OSError,
)
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file.", lock_config=False, accept_new_attributes=True
)
flags.mark_flag_as_required("config")
WORKDIR = flags.DEFINE_string("workdir", None, "Run directory; runs/NAME by default.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
PROCESSES = flags.DEFINE_integer("processes", None, "How many processes there are.")
PROCESS = flags.DEFINE_integer("process", None, "Number of this process.")


def parse_flags(argv):
    """Parse, with one line on stderr where the command is wrong."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, LookupError, AttributeError, TypeError, ValueError) as error:
        message = str(error.args[0] if error.args else error)
        if type(error) is KeyError:  # ml_collections says no more than the name
            message = f"config has no section {message!r} to override"
        # A config that refuses its argument comes with a traceback in the text.
        _, refuses, said = message.rpartition("\nValueError: ")
        if refuses:
            message = message.partition("Error whilst parsing")[0] + said.strip()
        sys.exit(_complain(message.replace("\n", " ")))
    except OSError as error:  # no such config file
        sys.exit(_complain(error))


def _complain(message, code=2):
    print(f"jaxcl: {message}", file=sys.stderr, flush=True)
    return code


def main(argv):
    """Build the job, run it, and leave results and plots."""
    if len(argv) > 1:
        return _complain(f"unknown argument {argv[1]!r}; options start with --config.")
    sharding.initialize(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    stopping = threading.Event()
    # After initialize: the distributed runtime would take SIGTERM for itself.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    logging.set_verbosity(logging.WARNING)
    try:
        workdir = WORKDIR.value or build.default_workdir(CONFIG.value)
        job = build.build(CONFIG.value, workdir)
    except (ValueError, OSError) as error:
        return _complain(error)
    try:
        finish.run(job, workdir, stop=stopping.is_set)
    except train.Interrupted as stop:
        return _complain(f"{stop}; the same command continues", code=75)
    except FAILURES as error:
        return _complain(error, code=1)
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
