"""tiny-imagenet-200 as its archive unpacks: 200 classes, images of 64 x 64."""

import os

from jaxcl.data import files as files_lib
from jaxcl.data import from_folders, listing, splits, storage, stream

ANNOTATIONS = "val_annotations.txt"
SIZE = (200, 100_000, 64)  # classes, train rows, pixels of a side


@splits.image_source(resident=True)
def tiny_imagenet(
    *,
    path: str,
    classes: str | None = None,
    images: splits.ImageOptions,
) -> stream.Dataset:
    """tiny-imagenet-200; its annotated val split is the test split.

    Grey images become RGB. Rows are sorted by class, then by file. A class is named by
    its wnid. test/, which has no labels, boxes and words.txt are not read.

    path: holds train/WNID/images/*, val/images/* with val/val_annotations.txt, and
      wnids.txt. val/ may be sorted into folders, val/WNID/* or val/WNID/images/*.
    classes: a text file that names the wnids to keep, in that order. Default:
      wnids.txt, whose order is not sorted. It is the order of mammoth's arrays, which
      Co2L and CCLIS use.
    resident: decode all images once, into 1.4 GB of memory.

    Raises ValueError for a missing file, a malformed line of val_annotations.txt, an
    image without an annotation or the reverse, a wnid that is not in train/, and a
    class without images.
    """
    _check_folders(path)
    file = os.path.join(path, "wnids.txt") if classes is None else classes
    wanted = files_lib.class_list(file)
    names, *train = from_folders.scan(path, "train", wanted, only=classes is None)
    test = _scan_val(path, names)
    train, test = (from_folders.from_files(path, images, *x) for x in (train, test))
    return stream.Dataset("tiny_imagenet", names, ("all",), train, None, test)


def _check_folders(path):
    """Refuse a path that is not the unpacked archive."""
    for folder in (path, os.path.join(path, "train"), os.path.join(path, "val")):
        if not os.path.isdir(folder):
            raise ValueError(
                f"{folder}: no such directory; path = {path!r} must be the unpacked "
                "tiny-imagenet-200, with train/, val/ and wnids.txt, which `jaxcl data "
                f"tiny_imagenet --out={path}` gets"
            )


def _scan_val(path, names) -> tuple[list[int], list[bytes]]:
    """Return labels and files (relative to `path`) of val/, in either layout."""
    known = listing.folders(os.path.join(path, "train"))
    where = os.path.join(path, "val")
    images = os.path.join(where, "images")
    if storage.is_folder(images) and listing.images(images):
        return _annotated(path, names, known)
    # Sorting val/ into folders leaves an empty images/ behind.
    folders = {*listing.folders(where)} - {"images"}
    if not folders:
        raise ValueError(
            f"{where}: expected images/* and {ANNOTATIONS}, or folders WNID/*"
        )
    if unknown := sorted(folders - {*known}):
        raise ValueError(f"{where}: wnids that are not in train/: {unknown[:5]}")
    return from_folders.scan(path, "val", names)[1:]


def _annotated(path, names, known) -> tuple[list[int], list[bytes]]:
    """Return labels and files (relative to `path`) that val_annotations.txt gives."""
    where = os.path.join(path, "val", "images")
    file = os.path.join(path, "val", ANNOTATIONS)
    wnids = _annotations(file, known)
    images = {os.path.relpath(x, where) for x in listing.images(where)}
    for problem, odd in (
        (f"names images that {where} lacks", {*wnids} - images),
        (f"lacks images that are in {where}", images - {*wnids}),
        ("lacks classes", {*names} - {*wnids.values()}),
    ):
        if odd:
            raise ValueError(f"{file} {problem}: {len(odd)}, {sorted(odd)[:5]}")
    number = {name: i for i, name in enumerate(names)}
    # Sorted, so that both layouts give the same rows.
    kept = sorted((number[wnid], x) for x, wnid in wnids.items() if wnid in number)
    files = [os.path.join("val", "images", image).encode() for _, image in kept]
    return [label for label, _ in kept], files


def _annotations(file, known) -> dict[str, str]:
    """Return image -> wnid, from val_annotations.txt; `known` are the allowed wnids."""
    with files_lib.reading(file):
        lines = storage.read(file).decode().split("\n")
    known, wnids = {*known}, {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where, fields = f"{file}, line {number}: {line[:200]!r}", line.split("\t")
        if len(fields) != 6 or not all(fields):
            raise ValueError(
                f"{where} is not file, wnid, x, y, width and height, with tabs between"
            )
        image, wnid = fields[:2]
        if wnid not in known:
            raise ValueError(f"{where}: wnid {wnid!r} is not in train/")
        if image in wnids:
            raise ValueError(f"{where}: {image!r} has an annotation above")
        wnids[image] = wnid
    return wnids
