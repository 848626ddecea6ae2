"""Recognise what the folders of a set mean: classes, splits, domains, or masks."""

import os
import re
from collections.abc import Iterable, Sequence

from jaxcl.data.images import listing
from jaxcl.errors import Refused

SPLITS = ("train", "val", "test")
_LIKE_SPLITS = {*SPLITS, "training", "valid", "validation", "testing", "dev", "eval"}
# Folders of pictures that say what is in other images
_MASKS = frozenset(
    "masks annotations annotation trimaps trimap groundtruth groundtruths gts labelids "
    "segmentation segmentations segmentationclass segmentationobject segmasks".split()
)
_MAY_BE_MASKS = frozenset("mask label labels gt seg target targets".split())
_IMAGES = frozenset(
    "image images img imgs photo photos input inputs rgb jpegimages picture pictures "
    "color colour".split()
)
_ANYWAY = 'config.data.folders="classes" takes each first folder as a class'


def is_like_split(name: str) -> bool:
    """Tell whether a folder is named like a split, or nearly so."""
    return re.sub(r"[-_ ]?(set|data|[0-9]+)$", "", name.lower()) in _LIKE_SPLITS


def folders_of(files: Iterable[bytes]) -> set[tuple[str, ...]]:
    """Return the folders that hold files, each as its names from the root down."""
    paths = {os.path.dirname(file) for file in files}
    return {tuple(os.fsdecode(path).split("/")) for path in paths}


def check_masks(path: str, folders: set[tuple[str, ...]]) -> None:
    """Refuse folders of masks beside the images that they belong to.

    Args:
      path: the folder of the set.
      folders: folders from `folders_of`.

    Raises:
      Refused: the message names them, and the folder of the images alone.
    """
    names = {
        (re.sub(r"[-_ ]", "", name.lower()), place[:i], name)
        for place in folders
        for i, name in enumerate(place)
    }
    image_folders = {above: name for plain, above, name in names if plain in _IMAGES}
    masks = sorted(
        "/".join([*above, name])
        for plain, above, name in names
        if plain in _MASKS or (plain in _MAY_BE_MASKS and above in image_folders)
    )
    if not masks:
        return
    images = sorted("/".join([*above, name]) for above, name in image_folders.items())
    advice = "give a folder without them"
    if len(images) == 1:
        image_path = os.path.join(path, images[0])
        advice = f"config.data.path={image_path!r} reads the images alone"
    raise Refused(
        f"path={path!r}: folders {masks[:5]} look like masks of other images, not "
        f"like classes: {advice}; {_ANYWAY}"
    )


def are_splits_below(path: str, folders: set[tuple[str, ...]]) -> bool:
    """Tell whether each class folder is divided into splits: CLASS/train/*.

    Raises:
      Refused: some are, but not all.
    """
    below = {(names[0], names[1] if len(names) > 1 else "") for names in folders}
    odd = sorted("/".join(pair) for pair in below if is_like_split(pair[1]))
    if not odd:
        return False
    classes = {name for name, _ in below}
    trained = {name for name, split in below if split == "train"}
    if {split for _, split in below} <= {*SPLITS} and trained == classes:
        return True
    raise Refused(
        f"path={path!r}: folders {odd[:5]} look like splits of a class: every class "
        "must then have a folder train, and beside it val and test alone; or put the "
        f"splits above the classes: train/CLASS; {_ANYWAY}"
    )


def check_domains(path: str, folders: set[tuple[str, ...]]) -> None:
    """Refuse folders that are domains, with the same classes in each.

    Raises:
      Refused: the message says how to read them.
    """
    if shared := shared_classes(folders):
        first = sorted({names[0] for names in folders}, key=listing.natural_key)
        raise Refused(
            f"path={path!r}: each of the folders {first[:5]} has folders "
            f'{list(shared[:5])}: config.data.folders="domains" takes the first as '
            f"domains and the second as classes; {_ANYWAY}"
        )


def shared_classes(folders: set[tuple[str, ...]]) -> Sequence[str]:
    """Return the sub-folder names that all folders have; () if most names differ."""
    inside: dict[str, set[str]] = {}
    for first, *rest in folders:
        inside.setdefault(first, set()).add(rest[0] if rest else "")
    if len(inside) < 2:
        return ()
    in_all = set.intersection(*inside.values())
    in_any = set.union(*inside.values())
    alike = len(in_all) > 1 and 2 * len(in_all) >= len(in_any)
    if "" in in_any or not alike:
        return ()
    return sorted(in_all, key=listing.natural_key)
