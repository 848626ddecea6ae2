"""Print errors; colour text if the terminal has colours; outlive a closed terminal."""

import contextlib
import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Literal, TextIO

# Errors of a full disk, which may have room again
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CODES = {"good": 32, "bad": 31, "strong": 1}
BUG = 70  # the exit code, as EX_SOFTWARE of sysexits.h


def complain(message: object, code: int = 2) -> int:
    """Print one line on stderr; return the exit code."""
    name = style_text("jaxcl:", "bad", sys.stderr)
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


def style_text(
    text: str, style: Literal["good", "bad", "strong"], file: TextIO | None = None
) -> str:
    """Return the text in green, red or bold if `file` is a terminal with colours.

    Otherwise, or if the variable NO_COLOR is set (no-color.org), the text is unchanged.

    Args:
      text: one line or more.
      style: "good", "bad" or "strong".
      file: output of the text; None: stdout.
    """
    file = sys.stdout if file is None else file
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not file.isatty():
        return text
    return f"\033[{_CODES[style]}m{text}\033[0m"


class _PlainHandler(logging.Handler):
    """Prints a log record as "jaxcl: warning: MESSAGE", over a progress bar if any."""

    def emit(self, record) -> None:
        """Print the line of a record on stderr."""
        level = style_text(f"{record.levelname.lower()}:", "bad", sys.stderr)
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        line = f"{clear}jaxcl: {level} {record.getMessage()}"
        print(line, file=sys.stderr, flush=True)


def use_plain_warnings() -> None:
    """Log warnings and errors only, without time, thread and line of the source."""
    from absl import logging as absl_logging  # a command's help needs no absl

    absl_logging.set_verbosity(absl_logging.WARNING)
    logger = absl_logging.get_absl_logger()
    if not any(isinstance(handler, _PlainHandler) for handler in logger.handlers):
        logger.addHandler(_PlainHandler())
        # Without any handler absl adds one to the root, which would print each again.
        logger.propagate = bool(logging.root.handlers)


class _Lossy(io.FileIO):
    """A file that drops what cannot be written, as to a terminal that is gone."""

    def write(self, data) -> int:
        """Write bytes; return how many there are, written or not."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                _send_to_nowhere(self.fileno())
            return memoryview(data).nbytes


def _send_to_nowhere(fileno: int) -> None:
    """Let writes to a file succeed, also through other objects that hold it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fileno)
    os.close(nowhere)


@contextlib.contextmanager
def outlive_terminal() -> Iterator[None]:
    """Enter a context in which prints to a closed terminal or pipe raise no error.

    A run's files hold everything that it prints. Streams that are not the process's
    own, such as a notebook's, stay as they are.
    """
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is getattr(sys, f"__{name}__") and stream is not None:
                stack.enter_context(_replace_stream(name, stream))
        yield


@contextlib.contextmanager
def _replace_stream(name, stream) -> Iterator[None]:
    """Replace a stream of `sys` by one that raises no error."""
    try:
        raw = _Lossy(stream.fileno(), "wb", closefd=False)
    except (OSError, ValueError):  # it has no file
        yield
        return
    _flush(stream)
    lossy = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    setattr(sys, name, lossy)
    try:
        yield
    finally:
        if getattr(sys, name) is lossy:
            setattr(sys, name, stream)
        lossy.close()
        _flush(stream)


def _flush(stream) -> None:
    """Write what a stream holds; drop it if that fails."""
    try:
        stream.flush()
    except OSError:
        _send_to_nowhere(stream.fileno())
