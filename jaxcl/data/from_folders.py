"""Sets of image files in folders, a folder for each class."""

import os
import re
from collections.abc import Sequence
from typing import Literal

from absl import logging

from jaxcl import schema
from jaxcl.data import files as files_lib
from jaxcl.data import listing, splits, storage, stream
from jaxcl.errors import Refused

_SPLITS = ("train", "val", "test")
_LIKE_SPLITS = {*_SPLITS, "training", "valid", "validation", "testing", "dev", "eval"}
_BESIDE = "images beside the folders of classes"


@splits.image_source
def image_folder(
    *,
    path: str,
    classes: str | None = None,
    folders: Literal["guess", "classes", "none"] = "guess",
    test: schema.Fraction = 0.2,
    test_seed: schema.Natural = splits.TEST_SEED,
    images: splits.ImageOptions,
) -> stream.Dataset:
    """Read image files in folders, decoded row by row.

    Three layouts are known; classes are sorted by name, numbers as numbers:
      train/CLASS/*  with test/ or val/ of the same classes. If both are there, val/ is
                     the validation split. One without class folders is ignored.
      CLASS/*        alone. A share `test` of every class, drawn by `test_seed`, is the
                     test split.
      *              images without class folders: no labels, no test split.

    path: the folder.
    classes: a text file that names the classes to keep, in that order.
    folders: "guess" refuses folders that look like splits of other names; "classes"
      takes each as a class; "none" reads all images below, without labels.
    test: share of each class that is the test split, if no folder is.
    test_seed: of that draw.
    """
    wanted = None if classes is None else files_lib.class_list(classes)
    left_out, name = listing.LeftOut(), os.path.basename(os.path.abspath(path))
    names: tuple[str, ...] = ()
    held_out: list[str] = []

    def examples(label, files):
        reader = files_lib.of_files(path, files, images.decoding)
        return files_lib.examples(reader, label)

    if folders == "none":
        files = _relative(path, listing.images(path, left_out))
        if not files:
            raise Refused(f"{path}: no images{_describe_left_out(left_out)}")
        label = [-1] * len(files)
    else:
        inner = "train" if storage.is_folder(os.path.join(path, "train")) else ""
        inner = "" if folders == "classes" else inner
        names, label, files = scan_classes(path, inner, wanted, left_out=left_out)
        if folders == "guess":
            _check_splits(path, names)
        held_out = _list_held_out(path, names) if inner else []
    data = stream.Dataset(name, names, ("all",), examples(label, files), None, None)
    if held_out:
        parts = [
            examples(*scan_classes(path, x, names, wanted is None, left_out)[1:])
            for x in held_out
        ]
        validation = parts[0] if len(parts) == 2 else None
        data = data._replace(validation=validation, test=parts[-1])
    elif names:
        data = splits.draw_test(name, names, data.train, test, test_seed)
    said = listing.describe(left_out)
    return data._replace(notes=(f"left out: {said}",) if said else ())


def is_mixed(path: str) -> bool:
    """Tell whether a folder holds both images and folders of images."""
    if not storage.is_folder(path) or storage.in_bucket(path):
        return False
    return bool(listing.folders(path) and _images_in(path))


def _images_in(folder) -> list[str]:
    """List the images in a folder, none of those below."""
    names = (name for name in os.listdir(folder) if not name.startswith("."))
    return [name for name in names if listing.is_image(name)]


def _describe_left_out(left_out) -> str:
    """Say for messages which files were left out."""
    said = listing.describe(left_out)
    return f"; left out: {said}" if said else ""


def _relative(path, files) -> list[bytes]:
    """Make paths relative; os.path.relpath would change those of a bucket."""
    start = path if storage.in_bucket(path) else os.path.normpath(path)
    return [os.fsencode(file[len(start) :].lstrip("/")) for file in files]


def _check_splits(path, names) -> None:
    """Refuse folders that may be splits or classes.

    Args:
      names: of the classes that were found.
    """
    beside = listing.folders(path)
    alike = [name for name in beside if _is_like_split(name)]
    others = [name for name in beside if name not in _SPLITS]
    if "train" in beside:  # a train/ without class folders may be a class among others
        alike = [x for x in others if x in alike or not (names or _is_empty(path, x))]
    if alike:
        raise Refused(
            f"path = {path!r}: folders {alike[:5]} look like splits, which must be "
            'called train, val and test. config.data.folders="classes" takes each of '
            "them as a class"
        )


def _is_like_split(name) -> bool:
    return re.sub(r"[-_ ]?(set|data|[0-9]+)$", "", name.lower()) in _LIKE_SPLITS


def _is_empty(path, name) -> bool:
    """Return whether no image is below a folder."""
    return not listing.images(os.path.join(path, name))


def _list_held_out(path, names) -> list[str]:
    """List which of val/ and test/ are splits next to train/.

    Where train/ has class folders, they need class folders, too.
    """
    there = [x for x in ("val", "test") if storage.is_folder(os.path.join(path, x))]
    if not names:
        return there
    return [x for x in there if listing.folders(os.path.join(path, x))]


def scan_classes(
    path: str,
    inner: str,
    wanted: Sequence[str] | None,
    only: bool = False,
    left_out: listing.LeftOut | None = None,
) -> tuple[tuple[str, ...], list[int], list[bytes]]:
    """List class names, labels and files (relative to `path`) below path/inner.

    Args:
      wanted: classes to read, in this order; None: every class folder.
      only: refuse class folders that are not wanted.
      left_out: counts the files that are no images.
    """
    start = path if storage.in_bucket(path) else os.path.normpath(path)
    folder = os.path.join(start, inner) if inner else start
    if not storage.is_folder(folder):
        raise Refused(
            f"path = {folder!r}: no such directory; must hold folders or images"
        )
    names, files, label = listing.folders(folder), [], []
    for name in names:
        if name != name.encode(errors="replace").decode():
            raise Refused(f"{os.fsencode(name)!r}: a class's name must be UTF-8")
    # In a bucket a listing of the whole folder would be needed once more.
    if names and not storage.in_bucket(path) and (beside := _images_in(folder)):
        logging.warning("path = %r: %d %s are left out", folder, len(beside), _BESIDE)
        if left_out is not None:
            left_out[_BESIDE] += len(beside)
    if wanted:
        missing, extra = sorted({*wanted} - {*names}), sorted({*names} - {*wanted})
        if missing or (only and extra):
            raise Refused(
                f"{folder}: class folders missing: {missing[:5]}, unknown: {extra[:5]}"
            )
        names = wanted
    for number, name in enumerate(names or [""]):
        where, left_here = os.path.join(folder, name), listing.LeftOut()
        images = listing.images(where, left_here)
        if not images:
            kind = f"class {name!r} has " if name else ""
            raise Refused(f"{where}: {kind}no images{_describe_left_out(left_here)}")
        if left_out is not None:
            left_out.update(left_here)
        files += _relative(path, images)
        label += [number if names else -1] * len(images)
    return tuple(names), label, files
