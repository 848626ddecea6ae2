"""What a caller hands over as images: arrays, a path, a source, a section."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcl import schema
from jaxcl.config import own_images
from jaxcl.data import in_memory, sources, storage

Images = Any  # arrays, a sequence of images, a path, the name or section of a source


class Given(NamedTuple):
    """Images as config.data names them."""

    section: dict
    held: tuple[in_memory.Held, ...] = ()  # to be kept while the section is read


def read(
    images: Images,
    *,
    name: str,
    labels: Sequence[Any] | None = None,
    domains: Sequence[Any] | None = None,
    test: float | None = None,
) -> Given:
    """The section that reads images.

    Args:
      images: u8[N, H, W] or u8[N, H, W, C]; a sequence of images of one size, arrays
        or PIL; the path of a folder, an .npz file, or a directory that
        jaxcl.data.convert or TFDS wrote; the name of a source that needs no options,
        as "digits"; or a section like config.data.
      name: of arrays, for messages and run directories.
      labels: of arrays, N whole numbers or texts; -1 or None where unknown.
      domains: the same, one of each image.
      test: share of each class that is held out, for sources that draw one; None: that
        of the source, a fifth of the labelled images of arrays.

    Raises:
      ValueError: the images are nothing of this, or labels come with what has its own.
    """
    text = isinstance(images, str | os.PathLike)
    if text or isinstance(images, Mapping):
        for field, value in (("labels", labels), ("tasks", domains)):
            if value is not None:
                raise ValueError(
                    f"{field}: {images!r} says itself what its images are of; labels "
                    "and tasks by image go with arrays"
                )
    share = {} if test is None else {"test": test}
    if isinstance(images, Mapping):
        return Given(dict(images) | share)
    if text:
        return Given(_of_text(os.fspath(images)) | share)
    held = in_memory.hold(name, _stacked(name, images), labels=labels, domains=domains)
    known = bool((held.examples.label >= 0).any())
    share = {"test": 0.2 if known else 0.0} | share
    return Given(held.section | share, (held,))


def whole(images: Given) -> dict:
    """The section that reads images, none of which is held out to judge."""
    make = schema.named(sources.SOURCES, images.section, "config.data")[0]
    draws = "test_seed" in schema.defaults(make)
    return images.section | ({"test": 0.0} if draws else {})


def _of_text(text: str) -> dict:
    """The section of a path, or of the name of a source."""
    if text in sources.SOURCES and not storage.exists(text):
        return {"name": text}
    return own_images.of_path(text)


def _stacked(name, images) -> np.ndarray:
    """A sequence of images as one array."""
    if hasattr(images, "ndim") or hasattr(images, "__array__"):
        return np.asarray(images)
    if not isinstance(images, Sequence) or not len(images):
        raise ValueError(
            f"{name}: {type(images).__name__}: must be an array uint8[N, H, W, C], a "
            "list of images, a path, the name of a source, or a section of a config"
        )
    arrays = [np.asarray(image) for image in images]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ValueError(
            f"{name}: images of {len(shapes)} shapes, such as "
            f"{' and '.join(str(shape) for shape in sorted(shapes)[:2])}; must be of "
            "one. Images of several sizes are read from a folder"
        )
    return np.stack(arrays)
