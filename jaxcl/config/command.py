"""Run a command until its end or a signal; choose its exit code."""

from jaxcl import numerics
from jaxcl.data.images import decode
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


def run_until_signal(make, work) -> int:
    """Prepare a run, and run it until its end or a signal.

    Args:
      make: () -> anything; its Refused or OSError is the user's to mend, 2.
      work: (what was made, stop: () -> bool) -> exit code or None.

    Returns:
      The exit code: that of `work`, 0 for None; 1, 2, 70 or 75 as in `main`.
    """
    decode.lift_pillow_limit()
    # After the distributed runtime has started, which would take SIGTERM for itself.
    with (
        terminal.outlive_terminal(),
        signals.watch_signals(terminal.complain) as stop,
        numerics.pinned(),
    ):
        try:
            return _make_and_run(make, work, stop)
        except Exception:
            return terminal.report_bug()


def _make_and_run(make, work, stop) -> int:
    try:
        run = make()
    except (Refused, OSError, lock.LockHeldError) as error:
        return terminal.complain(error)
    try:
        return work(run, stop) or 0
    except train.Interrupted as interrupted:
        message = f"{interrupted}; the same command continues"
        return terminal.complain(message, code=signals.STOPPED)
    except lock.LockHeldError as error:
        return terminal.complain(error)
    except FAILURES as error:
        return terminal.complain(error, code=1)
