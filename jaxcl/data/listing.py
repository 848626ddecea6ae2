"""List what a folder holds: images to read, and what is left out, by its reason."""

import bisect
import collections
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from etils import epath
from PIL import Image

from jaxcl.data import storage

# Folders that systems and network drives keep beside a user's files.
SYSTEM = frozenset(
    "@eadir @recycle @recently-snapshot @sharebin @tmp @transcode #recycle #snapshot "
    "$recycle.bin recycler __macosx __pycache__ lost+found".split()
) | {"system volume information"}
# Endings that Pillow knows, but of files that it cannot decode everywhere.
_UNDECODED = {"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF"}
# Endings of other kinds of files, which are not opened.
_OTHER = frozenset(
    ".txt .csv .tsv .json .jsonl .xml .yaml .yml .md .html .htm .pdf .py .ipynb .log "
    ".db .ini .npy .npz .mat .pkl .pt .pth .h5 .hdf5 .arrow .parquet .tfrecord .zip "
    ".tar .gz .7z .mp4 .avi .mov .mkv .wav .mp3 .doc .docx .xls .xlsx .xmp .aae "
    ".safetensors .bin .lock .tmp .part .crdownload".split()
)
# How images begin whose ending does not say what they are.
_BEGINNINGS = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF....WEBP|II\*\0|MM\0\*|8BPS\0\x01"
    rb"|BM....\0\0\0\0|P[1-6]\s|\0\0\0\x0cjP  |\xff\x4f\xff\x51|....ftypavi[fs]",
    re.DOTALL,
)

LeftOut = collections.Counter  # reason -> how many


@functools.cache
def endings() -> frozenset[str]:
    """Return endings of all files that Pillow decodes, in small letters."""
    Image.init()
    known = Image.registered_extensions().items()
    return frozenset(x for x, f in known if f in Image.OPEN and f not in _UNDECODED)


def natural_key(name: str) -> tuple:
    """Return a key to sort names by: "week 2", then "week 10"."""
    parts = re.split(r"([0-9]+)", name)
    for i in range(1, len(parts), 2):  # as text: numbers may have any length
        digits = parts[i].lstrip("0")
        parts[i] = f"{len(digits):08}{digits}"
    return (*parts, name)


def folders(path: storage.Path) -> list[str]:
    """List the folders in a folder, in order, without hidden and system ones."""
    if storage.in_bucket(path):
        names = [x.name for x in epath.Path(path).iterdir() if x.is_dir()]
    else:  # scandir, since it does not look at each entry again
        with os.scandir(path) as entries:
            names = [x.name for x in entries if _leads_to_folder(x)]
    return sorted((name for name in names if not _is_apart(name)), key=natural_key)


def images(
    path: storage.Path,
    apart: Iterable[tuple[int, int]] = (),
    left_out: LeftOut | None = None,
) -> list[str]:
    """List the paths of all images below a folder, see `files`.

    A file is an image by its ending, or where this says nothing by how it begins.
    """
    bucket = storage.in_bucket(path)
    return files(path, lambda x: _is_image(x, bucket), apart, left_out)


def files(
    path: storage.Path,
    wanted: Callable[[str], bool],
    apart: Iterable[tuple[int, int]] = (),
    left_out: LeftOut | None = None,
) -> list[str]:
    """List the paths of all wanted files below a folder, sorted.

    Links are followed, and each folder is read once, whatever ways lead to it. A link
    to a folder above is not followed: it would lead round for ever, or through the
    whole disk. Hidden names and the folders of systems are left out.

    Args:
      path: of the folder.
      wanted: whether a path is wanted.
      apart: `folder_id` of other folders that no link may lead to.
      left_out: counts what is left out, by its reason.

    Raises:
      OSError: a folder cannot be read; a pipe, a socket or a device is wanted.
    """
    left_out = LeftOut() if left_out is None else left_out
    if storage.in_bucket(path):
        return _in_bucket(path, wanted, left_out)
    start, found = os.fspath(path), []
    for entry in _walk(start, {*apart, *_above(os.path.realpath(start))}, left_out):
        if not wanted(entry.path):
            left_out[_kind(entry.name)] += 1
            continue
        # A link to nothing stays: reading it fails, and `on_corrupt` says what then.
        if not entry.is_symlink() and not entry.is_file():
            storage.check_ordinary(entry.path)
        found.append(entry.path)
    return sorted(found)


def describe(left_out: LeftOut) -> str:
    """Say what was left out and why, the most frequent reasons first; "": nothing."""
    shown = [f"{count:,} {reason}" for reason, count in left_out.most_common(6)]
    more = len(left_out) - len(shown)
    return ", ".join(shown) + (f" and {more} other kinds" if more else "")


def say_names(names: Sequence[str], most: int = 3) -> str:
    """Say how many names there are, and the first of them."""
    more = ", ..." if len(names) > most else ""
    return f"{len(names):,} ({', '.join(map(str, names[:most]))}{more})"


def folder_id(path: storage.Path) -> tuple[int, int]:
    """Return device and inode of a folder, the same by every path to it."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _is_apart(name) -> bool:
    return name[0] == "." or name.lower() in SYSTEM


def _is_image(path, bucket) -> bool:
    ending = os.path.splitext(path)[1].lower()
    if bucket or ending in endings() or ending in _OTHER:
        return ending in endings()
    try:
        with open(storage.check_ordinary(path), "rb") as file:
            return _BEGINNINGS.match(file.read(16)) is not None
    except OSError:
        return False


def _kind(name) -> str:
    """Name the kind of a file that is left out."""
    ending = os.path.splitext(name)[1].lower()[:12]
    return f"files {ending}" if ending.isprintable() and ending else "other files"


def _in_bucket(path, wanted, left_out) -> list[str]:
    scheme = os.fspath(path).partition("://")[0]
    # Some backends give folders with the scheme and some without.
    walk = (
        (f"{scheme}://{os.fspath(where).removeprefix(scheme + '://')}", names)
        for where, _, names in epath.Path(path).walk()
    )
    start, found = len(os.fspath(path).rstrip("/")) + 1, []
    for where, names in walk:
        for file in (os.path.join(where, name) for name in names):
            parts = [part for part in file[start:].split("/") if part]
            if odd := [part for part in parts if _is_apart(part)]:
                left_out[_apart_kind(odd[0])] += 1
            elif wanted(file):
                found.append(file)
            else:
                left_out[_kind(file)] += 1
    return sorted(found)


def _apart_kind(name) -> str:
    return "hidden" if name[0] == "." else f"in {name}"


def _leads_to_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _above(path: str) -> Iterator[tuple[int, int]]:
    """Yield `folder_id` of all folders that a whole path leads through."""
    while (above := os.path.dirname(path)) != path:
        path = above
        yield folder_id(path)


def _walk(path: str, apart, left_out) -> Iterator[os.DirEntry]:
    """Yield all files below a folder, none hidden; those behind links last."""
    visited: set[tuple[int, int]] = set()
    waiting, links = [path], []
    while waiting or links:
        linked = not waiting
        where = links.pop(0) if linked else waiting.pop()
        own = folder_id(where)
        if own in visited or (own in apart and where != path):
            if linked:
                left_out["links to folders that are not followed"] += 1
            continue
        visited.add(own)
        with os.scandir(where) as entries:
            for entry in entries:
                if _is_apart(entry.name):
                    left_out[_apart_kind(entry.name)] += 1
                elif not _leads_to_folder(entry):
                    yield entry
                elif entry.is_symlink():
                    bisect.insort(links, entry.path)
                else:
                    waiting.append(entry.path)
