"""Files on a disk or in a bucket, gs://BUCKET/PATH or another address etils knows."""

import contextlib
import errno
import io
import json
import os
import uuid
from collections.abc import Iterator
from typing import Any, BinaryIO

from etils import epath

Path = str | os.PathLike


class NotJson(ValueError):
    """A file is not JSON."""


def in_bucket(path: Path) -> bool:
    """Whether a path is the address of a bucket, and not a path on a disk."""
    return "://" in os.fspath(path)


def read(path: Path) -> bytes:
    """Read all bytes of a file; raises OSError if it cannot be read."""
    return epath.Path(path).read_bytes()


def whole(path: Path) -> Path | io.BytesIO:
    """Give np.load or zipfile the path, or the bytes of a file in a bucket."""
    return io.BytesIO(read(path)) if in_bucket(path) else path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` once it is whole.

    A crash leaves the old file or the new one, and processes that write the same path
    at once do not mix their bytes. What is no ordinary file, such as /dev/stdout, is
    written in place.

    Raises:
      OSError: it could not be written, e.g. a full disk; the message names `path`.
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
        reason = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, reason, os.fspath(path)) from error


def to_json(value: Any) -> bytes:
    """The text of a JSON file, as `write_json` writes it."""
    return (json.dumps(value, indent=1) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, see `replacing`; see `results.plain` for arrays.

    Raises:
      OSError: it could not be written; the message names `path`.
    """
    text = to_json(value)  # a value that JSON does not know leaves the file alone
    with replacing(path) as file:
        file.write(text)


def read_json(path: Path) -> Any:
    """Read the value in a JSON file.

    Raises:
      OSError: it cannot be read.
      NotJson: it holds something else; the message names `path`.
    """
    try:
        return json.loads(read(path))
    except ValueError as error:
        raise NotJson(f"{os.fspath(path)}: it is damaged: {error}") from error


def size(path: Path) -> int:
    """Number of bytes of a file."""
    return epath.Path(path).stat().length


def exists(path: Path) -> bool:
    """Whether a path is a file or a folder."""
    return epath.Path(path).exists()


def is_folder(path: Path) -> bool:
    """Whether a path is a folder; in a bucket, whether any name begins with it."""
    return epath.Path(path).is_dir()


def folders(path: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones."""
    if in_bucket(path):
        names = (x.name for x in epath.Path(path).iterdir() if x.is_dir())
    else:  # scandir, since it does not look at each entry again
        with os.scandir(path) as entries:
            names = [x.name for x in entries if x.is_dir()]
    return sorted(name for name in names if name[0] != ".")


def files(path: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Paths of all files below a folder with one of the suffixes, sorted.

    Links are followed; names that begin with a dot are left out.
    """
    if in_bucket(path):
        scheme = os.fspath(path).partition("://")[0]
        # Some backends give folders with the scheme and some without.
        walk = (
            (f"{scheme}://{os.fspath(where).removeprefix(scheme + '://')}", names)
            for where, _, names in epath.Path(path).walk()
        )
    else:
        walk = ((where, names) for where, _, names in os.walk(path, followlinks=True))
    paths = [os.path.join(where, name) for where, names in walk for name in names]
    return sorted(
        file
        for file in paths
        if file.lower().endswith(suffixes) and os.path.basename(file)[0] != "."
    )
