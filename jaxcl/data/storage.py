"""Files on a disk or in a bucket: gs://BUCKET/PATH and what else etils knows."""

import io
import os

from etils import epath


def in_bucket(path) -> bool:
    """Whether a path is an address, and not of a file on a disk."""
    return "://" in os.fspath(path)


def read(path) -> bytes:
    """All bytes of a file; OSError where there are none."""
    return epath.Path(path).read_bytes()


def whole(path):
    """What np.load and zipfile read: the path, or the bytes of a file in a bucket."""
    return io.BytesIO(read(path)) if in_bucket(path) else path


def size(path) -> int:
    """Bytes of a file."""
    return epath.Path(path).stat().length


def exists(path) -> bool:
    """Whether there is a file or a folder."""
    return epath.Path(path).exists()


def is_folder(path) -> bool:
    """Whether there is a folder; in a bucket, whether anything begins with its name."""
    return epath.Path(path).is_dir()


def folders(path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones."""
    if in_bucket(path):
        found = (x.name for x in epath.Path(path).iterdir() if x.is_dir())
    else:  # one look at the disk for all
        with os.scandir(path) as entries:
            found = [x.name for x in entries if x.is_dir()]
    return sorted(name for name in found if name[0] != ".")


def files(path, suffixes: tuple[str, ...]) -> list[str]:
    """Paths of all files below a folder with one of the suffixes, sorted.

    Links are followed; names that begin with a dot are left out.
    """
    if in_bucket(path):
        scheme = os.fspath(path).partition("://")[0]
        # Its folders come with the scheme or without, as the backend has it.
        walk = (
            (f"{scheme}://{os.fspath(where).removeprefix(scheme + '://')}", names)
            for where, _, names in epath.Path(path).walk()
        )
    else:
        walk = ((where, names) for where, _, names in os.walk(path, followlinks=True))
    found = [os.path.join(where, name) for where, names in walk for name in names]
    return sorted(
        x
        for x in found
        if x.lower().endswith(suffixes) and os.path.basename(x)[0] != "."
    )
