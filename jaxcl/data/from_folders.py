"""Sets of image files in folders, a folder for each class."""

import functools
import itertools
import os
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
from absl import logging
from PIL import Image

from jaxcl import schema
from jaxcl.data import files as files_lib
from jaxcl.data import listing, splits, storage, stream

_SPLITS = ("train", "val", "test")
_LIKE_SPLITS = {*_SPLITS, "training", "valid", "validation", "testing", "dev", "eval"}
# What folders are called that hold no examples of their own, but something to images.
_MASKS = frozenset(
    "mask annotation groundtruth gt trimap segmentation seg segmap label matte alpha "
    "depth contour edge saliency segmentationclass segmentationobject labelid".split()
)
_THUMBNAILS = {"thumb", "thumbnail", "preview"}
_IMAGES = {"image", "img", "photo", "picture", "jpegimage", "rgb", "input", "original"}
_FEW = 8  # levels of a mask, most
_MANY = 50  # classes that are not compared with each other


@splits.image_source()
def image_folder(
    *,
    path: str,
    classes: str | None = None,
    folders: Literal["guess", "classes", "none"] = "guess",
    test: schema.Fraction = 0.2,
    test_seed: schema.Natural = splits.TEST_SEED,
    images: splits.ImageOptions,
) -> stream.Dataset:
    """Image files in folders, decoded row by row.

    Three layouts are known; classes are sorted by name, numbers as numbers:
      train/CLASS/*  with test/ or val/ of the same classes. If both are there, val/ is
                     the validation split. One without class folders is ignored.
      CLASS/*        alone. A share `test` of every class, drawn by `test_seed`, is the
                     test split.
      *              images without class folders: no labels, no test split.

    path: the folder.
    classes: a text file that names the classes to keep, in that order.
    folders: "guess" refuses folders that look like other splits, masks or thumbnails;
      "classes" takes each as a class; "none" reads all images below, without labels.
    test: share of each class that is the test split, where no folder is.
    test_seed: of that draw.
    """
    wanted = None if classes is None else files_lib.class_list(classes)
    left_out, name = listing.LeftOut(), os.path.basename(os.path.abspath(path))
    examples = functools.partial(from_files, path, images)
    if folders == "none":
        files = _relative(path, listing.images(path, left_out=left_out))
        if not files:
            raise ValueError(f"{path}: no images{_but(left_out)}")
        _check_inside(path, {x for file in files for x in _parts(file)[:-1]})
        data = splits.draw_test(name, (), examples([-1] * len(files), files), 0.0, 0)
        return data._replace(notes=_notes(left_out))
    inner = "train" if storage.is_folder(os.path.join(path, "train")) else ""
    inner = "" if folders == "classes" else inner
    names, *scanned = scan(path, inner, wanted, left_out=left_out)
    if folders == "guess":
        _check_splits(path, names)
        beside = left_out[_BESIDE] > 0
        _check_pairs(os.path.join(path, inner), inner, names, scanned[1], beside)
    held_out = _held_out(path, names) if inner else []
    whole = examples(*scanned)
    if not held_out:
        share = test if names else 0.0
        data = splits.draw_test(name, names, whole, share, test_seed)
        return data._replace(notes=_notes(left_out))
    parts = [
        examples(*scan(path, x, names, wanted is None, left_out)[1:]) for x in held_out
    ]
    validation = parts[0] if len(parts) == 2 else None
    data = stream.Dataset(name, names, ("all",), whole, validation, parts[-1])
    return data._replace(notes=_notes(left_out))


def is_mixed(path: str) -> bool:
    """Return whether images lie beside folders of images, which are no classes."""
    if not storage.is_folder(path) or storage.in_bucket(path):
        return False
    inner = [os.path.join(path, name) for name in listing.folders(path)]
    apart = {listing.folder_id(folder) for folder in inner}
    return bool(inner and listing.images(path, apart))


_BESIDE = "images beside the folders of classes"
_YES = 'config.data.folders="classes" takes each of them as a class'


def _notes(left_out) -> tuple[str, ...]:
    said = listing.describe(left_out)
    return (f"left out: {said}",) if said else ()


def _but(left_out) -> str:
    """Say for messages which files were left out."""
    said = listing.describe(left_out)
    return f"; left out: {said}" if said else ""


def _relative(path, files) -> list[bytes]:
    """Make paths relative; os.path.relpath would change those of a bucket."""
    start = path if storage.in_bucket(path) else os.path.normpath(path)
    return [os.fsencode(file[len(start) :].lstrip("/")) for file in files]


def _parts(file: bytes) -> list[str]:
    """Return the folders of a path, and its name."""
    return os.fsdecode(file).split("/")


def _check_splits(path, names) -> None:
    """Refuse folders of which it is not clear whether they are splits or classes.

    Args:
      names: of the classes that were found.
    """
    beside = listing.folders(path)
    alike = [name for name in beside if _is_like_split(name)]
    if "train" not in beside:
        if alike:
            raise ValueError(
                f"path = {path!r}: folders {alike[:5]} look like splits, which must "
                f"be called train, val and test. {_YES}"
            )
        return
    others = [name for name in beside if name not in _SPLITS]
    # A train/ without class folders is a class if it lies among classes.
    odd = [x for x in others if x in alike or not (names or _is_empty(path, x))]
    if odd:
        raise ValueError(
            f"path = {path!r}: folders {odd[:5]} beside train must be called val or "
            f"test. {_YES}"
        )


def _is_like_split(name) -> bool:
    return re.sub(r"[-_ ]?(set|data|[0-9]+)$", "", name.lower()) in _LIKE_SPLITS


def _is_empty(path, name) -> bool:
    """Return whether no image is below a folder."""
    return not listing.images(os.path.join(path, name))


def _word(name) -> str:
    """Return a folder's name in small letters, without signs and a plural's s."""
    return re.sub("[^a-z]", "", name.lower()).removesuffix("s")


def _check_pairs(path, inner, names, files, beside) -> None:
    """Refuse folders that hold masks or small copies of other images of the set.

    Args:
      path: the folder that holds the folders of classes.
      inner: its name, where it is a split.
      names: of the classes.
      files: all files, relative to the set.
      beside: whether images lie beside the folders of classes.
    """
    if not names or storage.in_bucket(path):
        return
    below = [_parts(x[len(inner) :].lstrip(b"/")) for x in files]
    _check_inside(path, {part for x in below for part in x[1:-1]}, splits=True)
    odd: list[str] = []
    if len(names) < _MANY:
        stems: dict[str, dict[str, str]] = {name: {} for name in names}
        for parts in below:
            stem = os.path.splitext(parts[-1])[0].lower()
            stem = re.sub(r"[-_ .](mask|gt|label|seg\w*|annotation)s?$", "", stem)
            stems[parts[0]][stem] = os.path.join(path, *parts)
        pairs = itertools.permutations(names, 2)
        odd = [two for one, two in pairs if _are_masks(stems, one, two)]
    if beside and len(names) == 1 and _word(names[0]) in _MASKS | _THUMBNAILS:
        odd.append(names[0])
    if odd:
        raise ValueError(
            f"path = {path!r}: folders {sorted({*odd})[:5]} look like masks of the "
            f"images beside them. {_YES}"
        )


def _check_inside(path, parts, splits=False) -> None:
    """Refuse masks, small copies (and splits) among folders below those of classes."""
    odd = [part for part in parts if _word(part) in _MASKS | _THUMBNAILS]
    odd += [part for part in parts if splits and _is_like_split(part)]
    if odd:
        raise ValueError(
            f"path = {path!r}: folders {sorted(odd)[:5]} among its images look like "
            "masks, small copies or splits; move them away. "
            'config.data.folders="classes" reads all below a folder as its class'
        )


def _are_masks(stems, one, two) -> bool:
    """Return whether the files of class `two` belong to those of class `one`.

    Args:
      stems: class -> stem of a file -> its path.
    """
    last = re.split(r"[-_ .]", two.rstrip("-_ ."))[-1]
    named = _word(last) in _MASKS or _word(two) in _MASKS
    if named and _word(one) in _IMAGES:
        return True
    same = [stem for stem in stems[two] if stem in stems[one]]
    if 2 * len(same) < len(stems[two]):
        return False
    if named or len(stems) > 3 or len(same) < 3:
        return named
    shown = [(_levels(stems[one][x]), _levels(stems[two][x])) for x in same[:3]]
    return all(1 < few <= _FEW and many > 4 * _FEW for many, few in shown)


def _levels(file) -> int:
    """Return how many levels the greys of an image have; 0 of what cannot be read."""
    try:
        with Image.open(file) as image:
            return len(np.unique(np.asarray(image.convert("L"))))
    except Exception:  # of damaged bytes Pillow's plugins raise anything
        return 0


def _held_out(path, names) -> list[str]:
    """List which of val/ and test/ are splits beside train/.

    Where train/ has class folders, they need class folders, too.
    """
    there = [x for x in ("val", "test") if storage.is_folder(os.path.join(path, x))]
    if not names:
        return there
    return [x for x in there if listing.folders(os.path.join(path, x))]


def from_files(
    path: str,
    images: splits.ImageOptions,
    label: Sequence[int],
    files: Sequence[bytes],
) -> stream.Examples:
    """Return examples of one domain that are read from `files`, relative to `path`."""
    return files_lib.examples(files_lib.of_files(path, files, images.decoding), label)


def scan(
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
      left_out: counts what is left out, by its reason.
    """
    left_out = listing.LeftOut() if left_out is None else left_out
    start = path if storage.in_bucket(path) else os.path.normpath(path)
    folder = os.path.join(start, inner) if inner else start
    if not storage.is_folder(folder):
        raise ValueError(
            f"path = {folder!r}: no such directory; must hold folders or images"
        )
    names, files, label = listing.folders(folder), [], []
    apart = _apart(folder, [os.path.join(folder, name) for name in names])
    if inner and apart:  # nor from train/ into all of test/
        beside = (os.path.join(start, name) for name in listing.folders(start))
        apart |= {listing.folder_id(path) for path in beside}
    # In a bucket a listing of the whole folder would be needed once more.
    if names and not storage.in_bucket(path):
        _refuse_archive(folder)
        if count := len(listing.images(folder, apart, left_out)):
            left_out[_BESIDE] += count
            logging.warning("path = %r: %d %s are left out", folder, count, _BESIDE)
    if wanted:
        missing, extra = sorted({*wanted} - {*names}), sorted({*names} - {*wanted})
        if missing or (only and extra):
            raise ValueError(
                f"{folder}: class folders missing: {missing[:5]}, unknown: {extra[:5]}"
            )
        names = wanted
    for number, name in enumerate(names or [""]):
        where, left_here = os.path.join(folder, name), listing.LeftOut()
        images = listing.images(where, apart, left_here)
        left_out.update(left_here)
        if not images:
            kind = f"class {name!r} has " if name else ""
            raise ValueError(f"{where}: {kind}no images{_but(left_here)}")
        files += _relative(path, images)
        label += [number if names else -1] * len(images)
    return tuple(names), label, files


def _refuse_archive(folder) -> None:
    """Refuse what macOS leaves beside an unpacked archive, in place of its folder."""
    if any(name.lower() == "__macosx" for name in os.listdir(folder)):
        raise ValueError(
            f"path = {folder!r}: holds __MACOSX, which an archive of macOS leaves; "
            "remove it, or give the set's own folder"
        )


def _apart(folder, classes) -> set[tuple[int, int]]:
    """Identify the folders of all classes: no link may lead from one to another.

    Raises ValueError where two classes are one folder, or a class has a name that no
    text can hold.
    """
    for path in classes:
        if path != path.encode(errors="replace").decode():
            raise ValueError(f"{os.fsencode(path)!r}: a class's name must be UTF-8")
    if storage.in_bucket(folder):
        return set()
    known = {}
    for path in classes:
        other = known.setdefault(listing.folder_id(path), path)
        if other != path:
            raise ValueError(f"{path} and {other} are one folder: must be two classes")
    return {*known}
