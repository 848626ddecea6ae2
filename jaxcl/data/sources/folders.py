"""Sets of image files in folders, a folder for each class."""

import os
from collections.abc import Sequence
from typing import Literal

import numpy as np
from absl import logging

from jaxcl import schema, storage
from jaxcl.data import stream
from jaxcl.data.images import listing, readers
from jaxcl.data.sources import layouts, shared
from jaxcl.data.stream import splits
from jaxcl.errors import Refused

Folders = Literal["guess", "classes", "domains", "none"]
_BESIDE = "images beside the folders of classes"


@shared.image_source
def image_folder(
    *,
    path: str,
    classes: str | None = None,
    folders: Folders = "guess",
    test: schema.Fraction = 0.2,
    test_seed: schema.Natural = splits.TEST_SEED,
    images: shared.ImageOptions,
) -> stream.Dataset:
    """Read image files in folders, decoded row by row.

    Five layouts are known; classes are sorted by name, numbers as numbers:
      train/CLASS/*  with test/ or val/ of the same classes. If both are there, val/ is
                     the validation split. A folder of these without class folders is
                     ignored.
      CLASS/*        alone. A share `test` of every class, drawn by `test_seed`, is the
                     test split.
      CLASS/train/*  with CLASS/test/ or CLASS/val/, likewise.
      DOMAIN/CLASS/* if `folders` is "domains".
      *              images without class folders: no labels, no test split.

    path: the folder.
    classes: path of a text file that names the classes to keep, in that order.
    folders: meaning of the folders. "guess" refuses folders that look like
      splits of other names, masks or domains; "classes" takes each as a class,
      "domains" as a domain, with folders of classes in it; "none" reads all images
      below, without labels.
    test: share of each class that becomes the test split if no folder is one.
    test_seed: seed of that draw.
    """
    wanted = None if classes is None else shared.class_list(classes)
    left_out, name = listing.LeftOut(), os.path.basename(os.path.abspath(path))

    def examples(label, files, domain=None):
        reader = readers.of_files(path, files, images.decoding)
        return shared.read_by_row(reader, label, domain)

    if folders == "none":
        files = _relative(path, listing.images(path, left_out))
        if not files:
            raise Refused(f"{path}: no images{_describe_left_out(left_out)}")
        data = _one_split(name, (), examples([-1] * len(files), files))
    elif folders == "domains":
        names, domains, columns = _scan_domains(path, wanted, left_out)
        data = _one_split(name, names, examples(*columns), domains)
    else:
        inner = "train" if storage.is_folder(os.path.join(path, "train")) else ""
        inner = "" if folders == "classes" else inner
        names, label, files = scan_classes(path, inner, wanted, left_out=left_out)
        data = _one_split(name, names, examples(label, files))
        within = _check_layout(path, inner, names, files) if folders == "guess" else ""
        if within:
            data = _divide_classes(data, files)
        elif inner:
            by_split = {
                split: examples(
                    *scan_classes(path, split, names, wanted is None, left_out)[1:]
                )
                for split in _list_held_out(path, names)
            }
            data = _hold_out(data, by_split)
    if data.class_names and data.test is None:
        drawn = splits.draw_test(name, data.class_names, data.train, test, test_seed)
        data = data._replace(train=drawn.train, test=drawn.test)
    text = listing.describe(left_out)
    return data._replace(notes=(f"left out: {text}",) if text else ())


def _one_split(name, class_names, train, domain_names=("all",)) -> stream.Dataset:
    return stream.Dataset(name, class_names, domain_names, train, None, None)


def _hold_out(data, by_split) -> stream.Dataset:
    """Add the splits val and test; val alone is the test split."""
    if not by_split:
        return data
    validation = by_split["val"] if len(by_split) == 2 else None
    return data._replace(validation=validation, test=[*by_split.values()][-1])


def _check_layout(path, inner, names, files) -> bool:
    """Refuse folders that may mean something else; tell whether classes have splits."""
    folders = layouts.folders_of(files)
    layouts.check_masks(path, folders)
    _check_splits(path, names)
    if not names:
        return False
    if not inner:
        if layouts.are_splits_below(path, folders):
            return True
        layouts.check_domains(path, folders)
    elif shared := layouts.shared_classes({x[1:] for x in folders}):
        logging.warning(
            "path=%r: the folders in %s are read as classes, though each has "
            'folders %s; config.data.path=%r with config.data.folders="domains" reads '
            "domains with these classes",
            *(path, inner, [*shared[:5]], os.path.join(path, inner)),
        )
    return False


def _divide_classes(data, files) -> stream.Dataset:
    """Divide rows by the split below their class: CLASS/train/*."""
    split = np.array([file.split(b"/")[1] for file in files])
    by_split = {
        name: splits.take_rows(data.train, np.flatnonzero(split == name.encode()))
        for name in layouts.SPLITS
        if (split == name.encode()).any()
    }
    return _hold_out(data._replace(train=by_split.pop("train")), by_split)


def _scan_domains(path, wanted, left_out) -> tuple:
    """List classes, domains, and labels, files and domains of all images."""
    domains = listing.folders(path)
    if not domains:
        raise Refused("path", path, "has no folders; must have one for each domain")
    scans = [scan_classes(path, x, None, left_out=left_out) for x in domains]
    all_names = {name for names, *_ in scans for name in names}
    names = tuple(wanted or sorted(all_names, key=listing.natural_key))
    _check_missing(path, sorted({*names} - all_names), names)
    label, files, domain = [], [], []
    for number, (classes, numbers, paths) in enumerate(scans):
        if not classes:
            raise Refused(
                f"path={os.path.join(path, domains[number])!r}: has images and no "
                "folders; a domain must have a folder for each class"
            )
        for folder_number, file in zip(numbers, paths, strict=True):
            if classes[folder_number] in names:
                label.append(names.index(classes[folder_number]))
                files.append(file)
                domain.append(number)
    return names, tuple(domains), (label, files, domain)


def _check_missing(folder, missing, wanted) -> None:
    """Refuse a folder that lacks folders of the classes that the config names."""
    if missing:
        raise Refused(
            f"{folder}: {len(missing)} of the {len(wanted)} classes of "
            f"config.data.classes have no folder, such as {', '.join(missing[:3])}. "
            "For a subset name a file with fewer classes, --config.data.classes=FILE"
        )


def is_mixed(path: str) -> bool:
    """Tell whether a folder holds images beside folders, or folders of folders."""
    if not storage.is_folder(path) or storage.in_bucket(path):
        return False
    if listing.folders(path) and _images_in(path):
        return True
    files = _relative(path, listing.images(path))
    return bool(layouts.shared_classes(layouts.folders_of(files)))


def _images_in(folder) -> list[str]:
    """List the images in a folder, without its sub-folders."""
    names = (name for name in os.listdir(folder) if not name.startswith("."))
    return [name for name in names if listing.is_image(name)]


def _describe_left_out(left_out) -> str:
    """Say for messages which files were left out."""
    text = listing.describe(left_out)
    return f"; left out: {text}" if text else ""


def _relative(path, files) -> list[bytes]:
    """Make paths relative; os.path.relpath would change a bucket's."""
    start = path if storage.in_bucket(path) else os.path.normpath(path)
    return [os.fsencode(file[len(start) :].lstrip("/")) for file in files]


def _check_splits(path, names) -> None:
    """Refuse folders that may be splits or classes.

    Args:
      names: names of the class folders.
    """
    folders = listing.folders(path)
    alike = [name for name in folders if layouts.is_like_split(name)]
    others = [name for name in folders if name not in layouts.SPLITS]
    if "train" in folders:  # a train/ without class folders may be a class among others
        alike = [x for x in others if x in alike or not (names or _is_empty(path, x))]
    if alike:
        raise Refused(
            f"path={path!r}: folders {alike[:5]} look like splits, which must be "
            'called train, val and test. config.data.folders="classes" takes each of '
            "them as a class"
        )


def _is_empty(path, name) -> bool:
    """Return whether no image is below a folder."""
    return not listing.images(os.path.join(path, name))


def _list_held_out(path, names) -> list[str]:
    """List which of val/ and test/ are splits next to train/.

    If train/ has class folders, they need class folders, too.
    """
    candidates = [
        x for x in ("val", "test") if storage.is_folder(os.path.join(path, x))
    ]
    if not names:
        return candidates
    return [x for x in candidates if listing.folders(os.path.join(path, x))]


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
      only: whether class folders that are not wanted are refused.
      left_out: counter of the files that are no images.
    """
    start = path if storage.in_bucket(path) else os.path.normpath(path)
    folder = os.path.join(start, inner) if inner else start
    if not storage.is_folder(folder):
        raise Refused("path", folder, "no such directory; must hold folders or images")
    names, files, label = listing.folders(folder), [], []
    for name in names:
        if name != name.encode(errors="replace").decode():
            raise Refused(f"{os.fsencode(name)!r}: a class's name must be UTF-8")
    # In a bucket a listing of the whole folder would be needed once more.
    if names and not storage.in_bucket(path) and (loose_images := _images_in(folder)):
        logging.warning(
            "path=%r: %d %s are left out", folder, len(loose_images), _BESIDE
        )
        if left_out is not None:
            left_out[_BESIDE] += len(loose_images)
    if wanted:
        missing, extra = sorted({*wanted} - {*names}), sorted({*names} - {*wanted})
        if only and (missing or extra):
            raise Refused(
                f"{folder}: class folders missing: {missing[:5]}, unknown: "
                f"{extra[:5]}; must be those of train. config.data.path="
                f"{os.path.join(path, 'train')!r} reads train alone"
            )
        _check_missing(folder, missing, wanted)
        names = wanted
    for number, name in enumerate(names or [""]):
        place, left_here = os.path.join(folder, name), listing.LeftOut()
        images = listing.images(place, left_here)
        if not images:
            kind = f"class {name!r} has " if name else ""
            raise Refused(f"{place}: {kind}no images{_describe_left_out(left_here)}")
        if left_out is not None:
            left_out.update(left_here)
        files += _relative(path, images)
        label += [number if names else -1] * len(images)
    return tuple(names), label, files
