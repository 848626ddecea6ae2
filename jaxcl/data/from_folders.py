"""Sets of image files in folders, a folder for each class."""

import functools
import os
from collections.abc import Sequence

import numpy as np
from absl import logging

from jaxcl import schema
from jaxcl.data import files as files_lib
from jaxcl.data import splits, storage, stream

_SPLITS = ("train", "val", "test")
_LIKE_SPLITS = {*_SPLITS, "training", "valid", "validation", "testing"}


@schema.checked("config.data")
@splits.with_image_options()
def image_folder(
    *,
    path: str,
    classes: str | None = None,
    test: schema.Fraction = 0.2,
    test_seed: schema.Natural = splits.TEST_SEED,
    images: splits.ImageOptions,
) -> stream.Dataset:
    """Image files in folders, decoded row by row.

    Three layouts are known; classes are sorted by name:
      train/CLASS/*  with test/ or val/ of the same classes. If both are there, val/ is
                     the validation split. One without class folders is ignored.
      CLASS/*        alone. A share `test` of every class, drawn by `test_seed`, is the
                     test split.
      *              images without class folders: no labels, no test split.

    path: the folder.
    classes: a text file that names the classes to keep, in that order.
    test: share of each class that is the test split, where no folder is.
    test_seed: of that draw.
    """
    wanted = None if classes is None else files_lib.class_list(classes)
    inner = "train" if storage.is_folder(os.path.join(path, "train")) else ""
    names, *scanned = scan(path, inner, wanted)
    _check_splits(path, names)
    held_out = _held_out(path, names) if inner else []
    examples = functools.partial(from_files, path, images)
    whole, name = examples(*scanned), os.path.basename(os.path.abspath(path))
    if not held_out:
        return splits.draw_test(name, names, whole, test if names else 0.0, test_seed)
    parts = [examples(*scan(path, x, names, wanted is None)[1:]) for x in held_out]
    validation = parts[0] if len(parts) == 2 else None
    return stream.Dataset(name, names, ("all",), whole, validation, parts[-1])


def _check_splits(path, names) -> None:
    """Refuse folders of which it is not clear whether they are splits or classes.

    Args:
      names: of the classes that were found.
    """
    beside = storage.folders(path)
    alike = [name for name in beside if name.lower() in _LIKE_SPLITS]
    if "train" not in beside:
        if alike and alike == beside:
            raise ValueError(
                f"path = {path!r}: has folders {beside}, which are no classes; splits "
                "must be called train, val and test, and train be there"
            )
        return
    others = [name for name in beside if name not in _SPLITS]
    # A train/ without class folders is a class if it lies among classes.
    odd = [x for x in others if x in alike or not (names or _is_empty(path, x))]
    if odd:
        raise ValueError(
            f"path = {path!r}: has folders {odd[:5]} with images beside train; must be "
            "the splits train, val and test, or classes of which none is called train"
        )


def _is_empty(path, name) -> bool:
    """Whether no image is below a folder."""
    return not files_lib.image_files(os.path.join(path, name))


def _held_out(path, names) -> list[str]:
    """Which of val/ and test/ are splits beside train/.

    Where train/ has class folders, they need class folders, too.
    """
    there = [x for x in ("val", "test") if storage.is_folder(os.path.join(path, x))]
    if not names:
        return there
    return [x for x in there if storage.folders(os.path.join(path, x))]


def from_files(
    path: str,
    images: splits.ImageOptions,
    label: Sequence[int],
    files: Sequence[bytes],
) -> stream.Examples:
    """Examples of one domain that are read from `files`, relative to `path`."""
    paths, label = np.array(files, bytes), np.array(label, np.int32)
    load = files_lib.Loader(
        files_lib.Files(path, paths, *images.decoding), np.arange(len(files))
    )
    return stream.Examples(label, np.zeros_like(label), load=load)


def scan(
    path: str, inner: str, wanted: Sequence[str] | None, only: bool = False
) -> tuple[tuple[str, ...], list[int], list[bytes]]:
    """Class names, labels and files (relative to `path`) below path/inner.

    Args:
      wanted: classes to read, in this order; None: every class folder.
      only: refuse class folders that are not wanted.
    """
    start = path if storage.in_bucket(path) else os.path.normpath(path)
    folder = os.path.join(start, inner) if inner else start
    if not storage.is_folder(folder):
        raise ValueError(
            f"path = {folder!r}: no such directory; expected train/CLASS/* and val/ or "
            "test/, or CLASS/*, or images"
        )
    names, files, label = storage.folders(folder), [], []
    apart = _apart(folder, [os.path.join(folder, name) for name in names])
    if inner and apart:  # nor from train/ into all of test/
        beside = (os.path.join(start, name) for name in storage.folders(start))
        apart |= {storage.identity(path) for path in beside}
    # In a bucket a listing of the whole folder would be needed once more.
    if names and not storage.in_bucket(path):
        if left_out := len(files_lib.image_files(folder, apart)):
            logging.warning(
                "path = %r: %d images beside the folders of classes are left out",
                folder,
                left_out,
            )
    if wanted:
        missing, extra = sorted({*wanted} - {*names}), sorted({*names} - {*wanted})
        if missing or (only and extra):
            raise ValueError(
                f"{folder}: class folders missing: {missing[:5]}, unknown: {extra[:5]}"
            )
        names = wanted
    for number, name in enumerate(names or [""]):
        images = files_lib.image_files(os.path.join(folder, name), apart)
        if not images:
            what = f"class {name!r} has no images" if name else "no images"
            where = os.path.join(folder, name)
            raise ValueError(f"{where}: {what}, looked for {files_lib.EXTENSIONS}")
        # Not os.path.relpath, which would change the address of a bucket.
        files += [os.fsencode(file[len(start) :].lstrip("/")) for file in images]
        label += [number if names else -1] * len(images)
    return tuple(names), label, files


def _apart(folder, classes) -> set[tuple[int, int]]:
    """Identify the folders of all classes: no link may lead from one to another.

    Raises ValueError where two classes are one folder, or a class has a name that no
    text can hold.
    """
    for path in classes:
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{os.fsencode(path)!r}: the name of a class must be UTF-8"
            ) from error
    if storage.in_bucket(folder):
        return set()
    known = {}
    for path in classes:
        other = known.setdefault(storage.identity(path), path)
        if other != path:
            raise ValueError(f"{path} and {other} are one folder: must be two classes")
    return {*known}
