"""tiny-imagenet-200 as its archive unpacks: 200 classes, images of 64 x 64."""

import os

from jaxcl.data import files as files_lib
from jaxcl.data import from_folders, prefetch, splits, storage, stream

ANNOTATIONS = "val_annotations.txt"
SIZE = (200, 100_000, 64)  # classes, train rows, pixels of a side


def tiny_imagenet(
    *,
    path: str,
    classes: str | None = None,
    size: int | None = None,
    resident: bool = True,
    decoder: str = "auto",
    on_corrupt: str = "error",
    cache: str | None = None,
    cache_size: int | None = None,
    validation: float = 0.0,
    seed: int = 0,
) -> stream.Dataset:
    """tiny-imagenet-200; its annotated val split is the test split.

    Grey images turn into RGB. Rows are sorted by class, then by file. test/, which has
    no labels, is not read, nor are boxes and words.txt; a class is called by its wnid.

    path: holds train/WNID/images/*, val/images/* with val/val_annotations.txt, and
      wnids.txt. val/ may be sorted into folders, val/WNID/* or val/WNID/images/*.
    classes: a text file that names the wnids to keep, in that order. Default:
      wnids.txt, whose order is not sorted; mammoth's is the same, which Co2L and CCLIS
      take their arrays from.
    size: None: as stored; else shorter side to `size`, then a centre crop.
    resident: decode all, once, into 1.4 GB of memory.
    Others as in `from_folders.image_folder`.

    Raises ValueError for a file that is missing, a wrong line of val_annotations.txt,
    an image without an annotation or the reverse, a wnid that is not in train/, and a
    class without images.
    """
    for folder in (path, os.path.join(path, "train"), os.path.join(path, "val")):
        if not os.path.isdir(folder):
            raise ValueError(
                f"{folder}: no such directory; path = {path!r} must be the unpacked "
                "tiny-imagenet-200, with train/, val/ and wnids.txt"
            )
    file = os.path.join(path, "wnids.txt") if classes is None else classes
    wanted = files_lib.class_list(file)
    decoder = prefetch.choose_decoder(decoder)
    names, *train = from_folders.scan(path, "train", wanted, only=classes is None)
    known = storage.folders(os.path.join(path, "train"))
    if files_lib.image_files(os.path.join(path, "val", "images")):
        test = _annotated(path, names, known)
    else:
        test = _sorted(path, names, known)
    parts = [from_folders.from_files(path, *x, decoder=decoder) for x in (train, test)]
    data = stream.Dataset(
        "tiny_imagenet", names, ("all",), parts[0], None, parts[1], decoder
    )
    return splits.finish(
        data,
        validation=validation,
        seed=seed,
        size=size,
        resident=resident,
        on_corrupt=on_corrupt,
        cache=cache,
        cache_size=cache_size,
    )


def _sorted(path, names, known) -> tuple[list[int], list[bytes]]:
    """Labels and files (relative to `path`) of val/WNID."""
    where = os.path.join(path, "val")
    found = {*storage.folders(where)} - {"images"}  # which sorting leaves, empty
    if not found:
        raise ValueError(
            f"{where}: expected images/* and {ANNOTATIONS}, or folders WNID/*"
        )
    unknown = sorted(found - {*known})
    if unknown:
        raise ValueError(f"{where}: wnids that are not in train/: {unknown[:5]}")
    return from_folders.scan(path, "val", names)[1:]


def _annotated(path, names, known) -> tuple[list[int], list[bytes]]:
    """Labels and files (relative to `path`) that val_annotations.txt gives."""
    where = os.path.join(path, "val", "images")
    file = os.path.join(path, "val", ANNOTATIONS)
    given = _annotations(file, known)
    images = {os.path.relpath(x, where) for x in files_lib.image_files(where)}
    for problem, found in (
        (f"names images that {where} lacks", {*given} - images),
        (f"lacks images that are in {where}", images - {*given}),
    ):
        if found:
            raise ValueError(f"{file} {problem}: {len(found)}, {sorted(found)[:5]}")
    without = sorted({*names} - {*given.values()})
    if without:
        raise ValueError(f"{file}: classes without images: {without[:5]}")
    number = {name: i for i, name in enumerate(names)}
    # As in sorted folders: both layouts make the same rows.
    kept = sorted((number[wnid], x) for x, wnid in given.items() if wnid in number)
    files = [os.path.join("val", "images", image).encode() for _, image in kept]
    return [label for label, _ in kept], files


def _annotations(file, known) -> dict[str, str]:
    """Image -> wnid."""
    try:
        with open(file, encoding="utf-8") as opened:
            lines = opened.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    known, given = {*known}, {}
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
        if image in given:
            raise ValueError(f"{where}: {image!r} has an annotation above")
        given[image] = wnid
    return given
