"""Files on a disk or in a bucket, gs://BUCKET/PATH or another address etils knows."""

import contextlib
import errno
import io
import json
import os
import shutil
import stat
import struct
import tarfile
import tokenize
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from etils import epath

from jaxcl.errors import Refused

Path = str | os.PathLike


class NotJson(Refused):
    """The error that a file is not JSON."""


def in_bucket(path: Path) -> bool:
    """Tell whether a path is the address of a bucket, and not a path on a disk."""
    return "://" in os.fspath(path)


def check_ordinary(path: Path) -> Path:
    """Return the path of an ordinary file; refuse others, such as a blocking pipe.

    Raises:
      OSError: the path is missing, or a pipe, a socket, a device or a folder.
    """
    if not in_bucket(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "must be an ordinary file", os.fspath(path))
    return path


def read_bytes(path: Path) -> bytes:
    """Read all bytes of a file; raises OSError if it cannot be read."""
    return epath.Path(check_ordinary(path)).read_bytes()


def open_seekable(path: Path) -> BinaryIO:
    """Open a file to read at any place; one in a bucket is read whole."""
    if in_bucket(path):
        return io.BytesIO(read_bytes(path))
    return open(check_ordinary(path), "rb")


def read_range(path: Path, start: int, length: int) -> bytes:
    """Read `length` bytes of a file from `start` on; fewer at its end."""
    if in_bucket(path):
        import fsspec  # comes with the extra "gcs"; etils has no way to read a range

        files, name = fsspec.core.url_to_fs(os.fspath(path))
        return files.cat_file(name, start, start + length)
    with open(check_ordinary(path), "rb") as file:
        file.seek(start)
        return file.read(length)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` once it is whole.

    A crash leaves the old file or the new one, and processes that write the same path
    at once do not mix their bytes. A special file such as /dev/stdout is written in
    place.

    Raises:
      OSError: the file could not be written, e.g. a full disk; the message names
        `path`.
    """
    try:
        if in_bucket(path):
            data = io.BytesIO()
            yield data
            epath.Path(path).write_bytes(data.getvalue())  # replaces an object whole
            return
        target = os.path.realpath(path)  # a link goes on to lead to the file
        if os.path.exists(target) and not os.path.isfile(target):
            with open(path, "wb") as file:
                yield file
            return
        draft = f"{target}.{uuid.uuid4().hex}.tmp"
        try:
            with open(draft, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
    except OSError as error:  # that of a full disk names no file, others the draft
        reason = (error.strerror or str(error)) + describe_room(path, error)
        raise OSError(error.errno or errno.EIO, reason, os.fspath(path)) from error


def dump_json(value: Any) -> bytes:
    """Return the text of a JSON file, as `write_json` writes it."""
    return (json.dumps(value, indent=1) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, see `replacing`; see `result_file.jsonable` for arrays.

    Raises:
      OSError: the file could not be written; the message names `path`.
    """
    text = dump_json(value)  # a value that JSON does not know leaves the file alone
    with replacing(path) as file:
        file.write(text)


def read_json(path: Path) -> Any:
    """Read the value in a JSON file.

    Raises:
      OSError: it cannot be read.
      NotJson: the file holds something else; the message names `path`.
    """
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise NotJson(f"{os.fspath(path)}: it is damaged: {error}") from error


def read_object(path: Path) -> dict:
    """Read the object in a JSON file; another value is refused."""
    value = read_json(path)
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise NotJson(f"{os.fspath(path)}: it is damaged: a {kind}, not an object")
    return value


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def describe_room(path: Path, error: OSError) -> str:
    """Describe the space left on a full disk for a message; "" for other errors."""
    if error.errno not in _FULL:
        return ""
    with contextlib.suppress(OSError, TypeError, ValueError):
        folder = os.path.dirname(os.path.abspath(path))
        return f"; {shutil.disk_usage(folder).free:,} bytes are free there"
    return ""


def free_space(path: Path) -> int:
    """Return the number of bytes that are free on the disk of a file to be written."""
    return shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free


def file_size(path: Path) -> int:
    """Return the number of bytes of a file."""
    return epath.Path(path).stat().length


def exists(path: Path) -> bool:
    """Tell whether a path is a file or a folder."""
    return epath.Path(path).exists()


def check_blank(path: Path, label: str) -> None:
    """Refuse a path that is there already, unless it is an empty folder on a disk.

    Args:
      path: path to be written.
      label: name of the path in a message, such as "--out=FOLDER".
    """
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise Refused(f"{label} is there already and not an empty folder")


def is_folder(path: Path) -> bool:
    """Tell whether a path is a folder; in a bucket, whether any name begins with it."""
    return epath.Path(path).is_dir()


# What zipfile, zlib and NumPy raise for damaged bytes.
DAMAGED = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    IndexError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    struct.error,
    tarfile.TarError,
    zlib.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn a library's errors about a file's bytes into Refused in this context."""
    try:
        yield
    except MemoryError as error:
        raise Refused(f"{path} cannot be read: too large for the memory") from error
    except DAMAGED as error:
        raise Refused(f"{path} cannot be read: {error}") from error
