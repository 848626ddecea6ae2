"""List the images of a folder, and count the files that are left out."""

import collections
import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

from etils import epath
from PIL import Image

from jaxcl import storage

# Folders that systems and network drives keep beside a user's files.
SYSTEM = frozenset(
    "@eadir @recycle @recently-snapshot @sharebin @tmp @transcode #recycle #snapshot "
    "$recycle.bin recycler __macosx __pycache__ lost+found".split()
) | {"system volume information"}
# Endings that Pillow knows, but of files that it cannot decode everywhere.
_UNDECODED = {"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF"}

LeftOut = collections.Counter  # kind of a file -> how many


@functools.cache
def endings() -> frozenset[str]:
    """Return endings of all files that Pillow decodes, in small letters."""
    Image.init()
    formats = Image.registered_extensions().items()
    return frozenset(x for x, f in formats if f in Image.OPEN and f not in _UNDECODED)


def natural_key(name: str) -> tuple:
    """Return a key to sort names by: "week 2", then "week 10"."""
    pieces = re.split(r"([0-9]+)", name)
    for i in range(1, len(pieces), 2):  # as text: numbers may have any length
        digits = pieces[i].lstrip("0")
        pieces[i] = f"{len(digits):08}{digits}"
    return (*pieces, name)


def folders(path: storage.Path) -> list[str]:
    """List the folders in a folder, in order, without hidden and system ones."""
    if storage.in_bucket(path):
        names = [x.name for x in epath.Path(path).iterdir() if x.is_dir()]
    else:  # scandir, since it does not look at each entry again
        with os.scandir(os.fspath(path)) as entries:
            names = [x.name for x in entries if _leads_to_folder(x)]
    return sorted((name for name in names if not _is_apart(name)), key=natural_key)


def images(path: storage.Path, left_out: LeftOut | None = None) -> list[str]:
    """List the paths of all images below a folder, by their endings."""
    return list_files(path, is_image, left_out)


def is_image(path: str) -> bool:
    """Tell whether a file is an image, by its ending."""
    return os.path.splitext(path)[1].lower() in endings()


def list_files(
    path: storage.Path,
    wanted: Callable[[str], bool],
    left_out: LeftOut | None = None,
) -> list[str]:
    """List the paths of all wanted files below a folder, sorted.

    Links are followed, and each folder is read once, even if several links lead to it.
    A link to a folder above is not followed: it would lead round for ever, or through
    the whole disk. Hidden names and system folders are left out.

    Args:
      path: path of the folder.
      wanted: function that tells whether a path is wanted.
      left_out: counter of the files that are not wanted.

    Raises:
      OSError: a folder cannot be read.
    """
    paths = []
    for folder, names in (_in_bucket if storage.in_bucket(path) else _on_disk)(path):
        for name in names:
            file = os.path.join(folder, name)
            if _is_apart(name):
                continue
            if wanted(file):
                paths.append(file)
            elif left_out is not None:
                left_out[f"files {os.path.splitext(name)[1].lower()[:12]}".strip()] += 1
    return sorted(paths)


def describe(left_out: LeftOut) -> str:
    """Describe the files that were left out, the most frequent kind first; "": none."""
    shown = [
        f"{count:,} {ascii(kind)[1:-1]}" for kind, count in left_out.most_common(6)
    ]
    more = len(left_out) - len(shown)
    return ", ".join(shown) + (f" and {more} other kinds" if more > 0 else "")


def say_names(names: Sequence[str], most: int = 3) -> str:
    """Write the number of names, and the first ones."""
    more = ", ..." if len(names) > most else ""
    return f"{len(names):,} ({', '.join(map(str, names[:most]))}{more})"


def _is_apart(name) -> bool:
    return name[0] == "." or name.lower() in SYSTEM


def _leads_to_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _in_bucket(path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder of a bucket, and the names of its files."""
    scheme = os.fspath(path).partition("://")[0]
    start = len(os.fspath(path).rstrip("/")) + 1
    for parent, _, names in epath.Path(path).walk():
        # Some backends give folders with the scheme and some without.
        folder = f"{scheme}://{os.fspath(parent).removeprefix(scheme + '://')}"
        if not any(_is_apart(part) for part in folder[start:].split("/") if part):
            yield folder, names


def _on_disk(path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder of a disk once, and the names of its files."""

    def refuse(error):
        raise error

    def identity(folder):
        status = os.stat(folder)
        return status.st_dev, status.st_ino

    above = pathlib.Path(os.path.realpath(path)).parents
    visited = {identity(folder) for folder in above}
    links = [os.fspath(path)]
    for start in links:  # folders behind links come last
        for where, inner, names in os.walk(start, onerror=refuse):
            if identity(where) in visited:
                inner.clear()
                continue
            visited.add(identity(where))
            inner[:] = sorted(name for name in inner if not _is_apart(name))
            paths = (os.path.join(where, name) for name in inner)
            links += [linked for linked in paths if os.path.islink(linked)]
            yield where, names
