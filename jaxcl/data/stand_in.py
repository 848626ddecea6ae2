"""A set of blank images, to compile programs for a set that is not at hand."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxcl.data import stream


class _Blank(NamedTuple):
    """Row -> a blank image."""

    shape: tuple[int, int, int]

    def __call__(self, row: int) -> np.ndarray:
        return np.zeros(self.shape, np.uint8)


def dataset(
    *,
    classes: int,
    rows: int,
    pixels: int,
    channels: int = 3,
    class_names: Sequence[str] = (),
    domain_names: Sequence[str] = ("all",),
    in_memory: bool = False,
) -> stream.Dataset:
    """A set whose splits are each `rows` blank images, classes and domains in turn.

    Args:
      pixels: side of the (square) images.
      class_names: of the first classes; the others are named by their numbers.
      in_memory: the images are one array (a broadcast zero, which takes no memory).

    Raises:
      ValueError: too few rows for one of each class in each domain.
    """
    domains = len(domain_names)
    if rows < classes * domains:
        raise ValueError(
            f"--rows={rows}: must be at least {classes * domains}, one of each of "
            f"{classes} classes in each of {domains} domains"
        )
    row = np.arange(rows)
    label = (row % classes).astype(np.int32)
    domain = (row // classes % domains).astype(np.int32)
    shape = (pixels, pixels, channels)
    if in_memory:
        images = np.broadcast_to(np.uint8(0), (rows, *shape))
        split = stream.Examples(label, domain, images)
    else:
        split = stream.Examples(label, domain, load=_Blank(shape))
    others = [f"class {i}" for i in range(len(class_names), classes)]
    names = (*class_names, *others)
    return stream.Dataset("stand-in", names, tuple(domain_names), split, split, split)
