"""Write and read `metrics.jsonl`, the rows that a run logs: one JSON object per line.

Nan and infinity are null there, other floats are exact. A checkpoint has the length of
the rows when it was saved; a resumed run cuts off later rows.
"""

import contextlib
import errno
import io
import json
import os

from absl import logging
from etils import epath

from jaxcl import storage
from jaxcl.errors import Refused

FILE = "metrics.jsonl"


class Damaged(Refused):
    """Raised if a line of metrics.jsonl is not a row."""


def read_rows(workdir: epath.PathLike) -> list[dict]:
    """Read the rows of a run, without a last line that a crash cut off.

    Raises:
      Damaged: a line is no row; the message names the file and the line.
    """
    path = epath.Path(workdir) / FILE
    rows = []
    for number, line in enumerate(_split_lines(path.read_bytes()), 1):
        row = _parse_row(line)
        if row is None:
            raise Damaged(
                f"{path}: line {number} is damaged: it must be an object with the "
                "numbers step and task"
            )
        rows.append(row)
    return rows


class RowFile:
    """The open metrics.jsonl; in memory for a bucket, where objects cannot grow."""

    def __init__(self, path: epath.Path, offset: int):
        """Open the file and cut it after the first `offset` bytes.

        If earlier rows are lost or damaged, the run continues with the other rows and
        keeps a copy of the file: its results are in the checkpoint.

        Args:
          path: path of the file, created if missing.
          offset: bytes returned by `save` when the checkpoint was made.
        """
        head = path.read_bytes()[:offset] if path.exists() else b""
        rows = [line for line in _split_lines(head) if _parse_row(line) is not None]
        readable = b"".join(rows)
        if len(readable) < offset:
            path.with_name(f"damaged-{path.name}").write_bytes(head)
            with storage.replacing(path) as file:
                file.write(readable)
            text = "%s has lost rows: went on with the %d that can be read"
            logging.warning(text, path, len(rows))
        self._path, self._in_bucket = path, storage.in_bucket(path)
        self._file = io.BytesIO(readable) if self._in_bucket else open(path, "ab")
        self._file.truncate(len(readable))
        self._file.seek(0, io.SEEK_END)
        self.save()

    def append(self, row: dict) -> None:
        """Write a row of plain JSON, visible to other readers at once."""
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with self._name_errors():
            self._file.write(line)
            self._file.flush()

    def save(self) -> int:
        """Write all rows to the disk or the bucket; return their bytes."""
        with self._name_errors():
            if self._in_bucket:
                self._path.write_bytes(self._file.getvalue())
            else:
                os.fsync(self._file.fileno())  # append() flushed
        return self._file.tell()

    @contextlib.contextmanager
    def _name_errors(self):
        """Add the file's name to the error of a full disk."""
        try:
            yield
        except OSError as error:
            reason = (error.strerror or str(error)) + storage.describe_room(
                self._path, error
            )
            code = error.errno or errno.EIO
            raise OSError(code, reason, os.fspath(self._path)) from error

    def close(self) -> None:
        """Save all rows and close the file."""
        with self._file:
            self.save()


def _split_lines(data: bytes) -> list[bytes]:
    """Split into lines, without the last one if it was cut off."""
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def _parse_row(line: bytes) -> dict | None:
    """Read the row in a line; None if there is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    valid = all(type(row.get(key)) is int for key in ("step", "task"))
    valid = valid and all(type(row.get(key, {})) is dict for key in ("time", "eval"))
    return row if valid else None
