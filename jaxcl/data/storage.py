"""Files on a disk or in a bucket, gs://BUCKET/PATH or another address etils knows."""

import io
import os

from etils import epath

Path = str | os.PathLike


def in_bucket(path: Path) -> bool:
    """Whether a path is the address of a bucket, and not a path on a disk."""
    return "://" in os.fspath(path)


def read(path: Path) -> bytes:
    """All bytes of a file; raises OSError if it cannot be read."""
    return epath.Path(path).read_bytes()


def whole(path: Path) -> Path | io.BytesIO:
    """What np.load and zipfile accept: the path, or the bytes of a file in a bucket."""
    return io.BytesIO(read(path)) if in_bucket(path) else path


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
