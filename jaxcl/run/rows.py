"""Write and read `metrics.jsonl`, the rows that a run logs: one JSON object per line.

Nan and infinity are null there, other floats come back bit for bit. A `RowMark` says
how far the rows went when a checkpoint was saved: a resumed run cuts off what
follows.
"""

import contextlib
import errno
import io
import itertools
import json
import os
import zlib
from typing import NamedTuple

from absl import logging
from etils import epath

from jaxcl.data import storage

FILE = "metrics.jsonl"


class RowsLost(ValueError):
    """metrics.jsonl is not what it was when the checkpoint was saved."""


class RowMark(NamedTuple):
    """A place in the file, saved with each checkpoint."""

    offset: int = 0  # bytes before it
    checksum: int = 0  # crc32 of these bytes


def read_rows(workdir: epath.PathLike) -> list[dict]:
    """Read the rows of a run, without a last line that a crash cut off.

    Raises:
      RowsLost: a line is no row; the message names the file and the line.
    """
    path = epath.Path(workdir) / FILE
    rows = []
    for number, line in enumerate(_split_lines(path.read_bytes()), 1):
        row = _parse_row(line)
        if row is None:
            raise RowsLost(
                f"{path}: line {number} is damaged: it must be an object with the "
                "numbers step and task"
            )
        rows.append(row)
    return rows


class RowFile:
    """The open file; in memory for a bucket, where objects cannot grow."""

    def __init__(self, path: epath.Path, mark: RowMark, *, lost: bool = False):
        """Open the file and cut off what comes after `mark`.

        Args:
          path: of the file; made if missing.
          mark: from `save`, when the checkpoint was made.
          lost: go on with the rows that can be read where some are damaged or gone. A
            copy of the file stays beside it.

        Raises:
          RowsLost: the file does not hold the rows before `mark`, unless `lost`.
        """
        head = path.read_bytes()[: mark.offset] if path.exists() else b""
        if damage := _find_damage(head, mark):
            if not lost:
                raise RowsLost(
                    f"offset={mark.offset}: {path} held whole rows of so many bytes "
                    f"when the checkpoint was saved; now {damage}. The checkpoint is "
                    "whole, and so are the results in it. Put the file back; or go on "
                    "without the rows that are lost to curves and pages, with "
                    "--lost_rows"
                )
            head = _keep_good_lines(path, head)
        self._path, self._in_bucket = path, storage.in_bucket(path)
        self._file = io.BytesIO(head) if self._in_bucket else open(path, "ab")
        self._file.truncate(len(head))
        self._file.seek(0, io.SEEK_END)
        self._checksum = zlib.crc32(head)
        self.save()

    def append(self, row: dict) -> None:
        """Write a row of plain JSON; it is visible at once to whoever follows."""
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with self._name_errors():
            self._file.write(line)
            self._file.flush()
        self._checksum = zlib.crc32(line, self._checksum)

    def save(self) -> RowMark:
        """Bring all rows to the disk or the bucket, and mark their end."""
        with self._name_errors():
            if self._in_bucket:
                self._path.write_bytes(self._file.getvalue())
            else:
                os.fsync(self._file.fileno())  # append() flushed
        return RowMark(self._file.tell(), self._checksum)

    @contextlib.contextmanager
    def _name_errors(self):
        """Name the file in the error of a full disk, which does not."""
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
    good = all(type(row.get(key)) is int for key in ("step", "task"))
    good = good and all(type(row.get(key, {})) is dict for key in ("time", "eval"))
    return row if good else None


def _find_damage(head: bytes, mark: RowMark) -> str:
    """Say what is wrong with the bytes before a mark; "" if nothing is."""
    if len(head) < mark.offset:
        return f"it has {len(head)}"
    if zlib.crc32(head) == mark.checksum:
        return ""
    bad = [
        n for n, line in enumerate(_split_lines(head), 1) if _parse_row(line) is None
    ]
    return "they are others" + (f", line {bad[0]} is no row" if bad else "")


def _keep_good_lines(path, head: bytes) -> bytes:
    """Write the file again with the rows that can be read, and keep a copy of it.

    A row whose bytes changed and are a row still cannot be told from a good one.
    """
    if path.exists():
        names = (f"damaged-{copy}-{path.name}" for copy in itertools.count())
        copies = (path.parent / name for name in names)
        next(x for x in copies if not x.exists()).write_bytes(path.read_bytes())
    kept = b"".join(line for line in _split_lines(head) if _parse_row(line) is not None)
    with storage.replacing(path) as file:
        file.write(kept)
    count = kept.count(b"\n")
    logging.warning("%s: went on with the %d rows that can be read", path, count)
    return kept
