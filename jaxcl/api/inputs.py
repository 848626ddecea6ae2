"""Convert a caller's images to config.data: arrays, a path, a source, a section.

A Dataset of Hugging Face's `datasets` is arrays, too; the library is not imported.
"""

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jaxcl import storage
from jaxcl.config import own_images
from jaxcl.data.images import decode
from jaxcl.data.sources import by_name, huggingface, in_memory
from jaxcl.errors import Refused

# Arrays, a sequence of images, a Dataset, a path, the name or section of a source.
Images = Any


class ImageInput(NamedTuple):
    """A section config.data, and the arrays that it names."""

    section: dict
    stored_sets: tuple[in_memory.StoredSet, ...] = ()  # the section reads them


def make_input(
    images: Images,
    *,
    name: str,
    labels: Sequence[Any] | None = None,
    domains: Sequence[Any] | None = None,
    test: float | None = None,
) -> ImageInput:
    """Make the section that reads a caller's images.

    Args:
      images: u8[N, H, W] or u8[N, H, W, C]; a sequence of images of one size, arrays
        or PIL; a datasets.Dataset of such, with its labels; the path of a folder, an
        .npz file, or a directory that `jaxcl convert`, TFDS or `datasets` wrote; the
        name of a source that needs no options, as "digits"; or a section like
        config.data.
      name: name of the arrays, for messages and run directories.
      labels: labels of arrays, N integers or strings; -1 or None where unknown.
      domains: likewise, one for each image.
      test: share of each class that is held out, for sources that draw one; None: that
        of the source, a fifth of the labelled images of arrays.

    Raises:
      Refused: the images are none of these, or both they and `labels` have labels.
    """
    class_names = None
    images, labels = _unpack(name, images, labels)
    if type(images).__module__.partition(".")[0] == "datasets":
        images, column, class_names = _read_dataset(name, images)
        if labels is None:
            labels = column
        else:
            class_names = None
    text = isinstance(images, str | os.PathLike)
    if text or isinstance(images, Mapping):
        for field, value in (("labels", labels), ("tasks", domains)):
            if value is not None:
                raise Refused(
                    f"{field}: {images!r} says itself what its images are of; labels "
                    "and tasks by image go with arrays"
                )
    share = {} if test is None else {"test": test}
    if isinstance(images, Mapping):
        if "name" not in images:
            raise Refused(
                f"{name}: a dict of {sorted(map(str, images))}: must be a section like "
                'config.data, with a "name"; or {"image": images, "label": labels}'
            )
        return ImageInput(dict(images) | share)
    if text:
        path = os.fspath(images)
        if path in by_name.SOURCES and not storage.exists(path):
            return ImageInput({"name": path} | share)
        return ImageInput(own_images.make_section(path) | share)
    stored = in_memory.store_set(
        name,
        _stack_images(name, images),
        labels=labels,
        domains=domains,
        class_names=class_names,
    )
    is_labelled = bool((stored.examples.label >= 0).any())
    share = {"test": 0.2 if is_labelled else 0.0} | share
    return ImageInput(stored.section | share, (stored,))


# Usual names of the images and labels in a dict
_IMAGES = ("image", "images", "img", "x", "pixel_values", "data")
_LABELS = ("label", "labels", "y", "target", "targets")


def _unpack(name, images, labels) -> tuple:
    """Separate images from labels in pairs, in a pair of both, and in a dict."""
    paired_labels = None
    if isinstance(images, Mapping):
        keys = [key for key in _IMAGES if key in images]
        if "name" in images or len(keys) != 1:
            return images, labels
        label_keys = [key for key in _LABELS if key in images]
        if {*images} - {*keys, *label_keys} or len(label_keys) > 1:
            return images, labels
        paired_labels = images[label_keys[0]] if label_keys else None
        images = images[keys[0]]
    elif isinstance(images, tuple) and _is_pair(images, lambda x: _fits(images[0], x)):
        images, paired_labels = images
    elif _is_indexed(images) and len(images) and _is_pair(images[0], _is_label):
        pairs = [images[row] for row in range(len(images))]
        if odd := [i for i, x in enumerate(pairs) if not _is_pair(x, _is_label)]:
            raise Refused(
                f"{name}: entry 0 is a pair of an image and a label, entry {odd[0]} not"
            )
        images, paired_labels = zip(*pairs, strict=True)
        paired_labels = [x.item() if hasattr(x, "item") else x for x in paired_labels]
    if paired_labels is None:
        return images, labels
    if labels is not None:
        raise Refused(f"labels: {name} have labels with them; give the images alone")
    return images, _to_numpy(paired_labels)


def _is_indexed(images) -> bool:
    """Tell whether images are a list, or a data set that gives a row by its number."""
    lists = hasattr(images, "__getitem__") and hasattr(images, "__len__")
    library = type(images).__module__.partition(".")[0]
    return lists and not hasattr(images, "ndim") and library != "datasets"


def _is_pair(entry, is_second) -> bool:
    """Tell whether an entry is a tuple of image and label, or of images and labels."""
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        return False
    first, second = entry
    pixels = first.ndim >= 2 if hasattr(first, "ndim") else hasattr(first, "convert")
    listed = isinstance(first, list | tuple) and not _is_label(second)
    return (pixels or listed) and is_second(second)


def _fits(images, labels) -> bool:
    """Tell whether there is one label for each image."""
    return np.ndim(labels) == 1 and len(labels) == len(images)


def _is_label(value) -> bool:
    number = isinstance(value, int | str | np.integer) or value is None
    return number or (hasattr(value, "item") and np.ndim(value) == 0)


def _to_numpy(values) -> Any:
    """Convert a tensor of PyTorch on any device, with or without gradients."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # which NumPy lacks
            values = values.float()
    return np.asarray(values) if hasattr(values, "__array__") else values


def split_pair(test: Any) -> tuple:
    """Split (images, labels); labels of a path, a section or a source are None."""
    pair = test if isinstance(test, tuple) else (test, None)
    if len(pair) != 2:
        raise Refused(f"test: {len(pair)} entries: must be (images, labels)")
    return pair


def _read_dataset(name, dataset) -> tuple[list, list | None, list[str] | None]:
    """Read images and labels of a Dataset, and the names of its classes.

    `huggingface.choose_columns` chooses the columns of images and labels.
    """
    kind, saved = type(dataset).__name__, "or give the path that `save_to_disk` wrote"
    if kind == "DatasetDict":
        raise Refused(
            f"{name}: a DatasetDict of {', '.join(dataset)}: give one of them, and in "
            f"test= the evaluation images, {saved}"
        )
    if kind != "Dataset":
        raise Refused(f"{name}: datasets.{kind}: must be a datasets.Dataset; {saved}")
    types = {key: type(x).__name__ for key, x in dataset.features.items()}
    pictures = [key for key, x in types.items() if x in ("Image", "Array2D", "Array3D")]
    named = [key for key, x in types.items() if x == "ClassLabel"]
    if not pictures:
        raise Refused(
            f"{name}: columns are {', '.join(types)}: must have one of Image, Array2D "
            "or Array3D"
        )
    if getattr(dataset, "format", {}).get("type") == "custom":
        raise Refused(
            f"{name}: has a transform (set_transform or with_transform), which is not "
            "applied to what is read; apply it with map, or call reset_format()"
        )
    image, label = huggingface.choose_columns(name, [*types], pictures, named)
    rows = dataset.with_format(None)
    arrays = _arrays(name, rows, image)
    names = getattr(dataset.features[label], "names", None) if label else None
    return arrays, list(rows[label]) if label else None, names


def _arrays(name, rows, column) -> list[np.ndarray]:
    """Read the images of a column as arrays, all of them grey or all in colour."""
    feature = rows.features[column]
    if type(feature).__name__ != "Image":
        return [np.asarray(image, feature.dtype) for image in rows[column]]
    # As they are stored: `datasets` would turn photographs, and files are not turned.
    stored = rows.cast_column(column, type(feature)(decode=False))[column]
    return _decode_images(name, [_open_image(image, feature.mode) for image in stored])


def _open_image(stored, mode) -> Image.Image:
    """Open the PIL image of {"bytes", "path"}."""
    data = stored["bytes"]
    with Image.open(stored["path"] if data is None else io.BytesIO(data)) as image:
        image.load()
        return image if mode is None else image.convert(mode)


def _decode_images(name, images) -> list[np.ndarray]:
    """Convert PIL images to arrays, all of them grey or all in colour."""
    modes = {getattr(image, "mode", None) for image in images}
    if odd := modes - {"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"}:
        raise Refused(
            f"{name}: images of mode {sorted(map(str, odd))[0]}: must be grey or RGB; "
            "see Image.convert of PIL"
        )
    grey = modes <= {"1", "L", "LA"}
    decoding = decode.Decoding("pillow", channels=1 if grey else 3)
    arrays = [decoding.convert(image, name) for image in images]
    return [array[..., 0] for array in arrays] if grey else arrays


def _open_file(path) -> Image.Image:
    """Open an image file; refuse what is none."""
    with storage.reading(os.fspath(path)), Image.open(path) as image:
        image.load()
        return image


def _stack_images(name, images) -> np.ndarray:
    """Stack a sequence of images into one array."""
    if hasattr(images, "ndim") or hasattr(images, "__array__"):
        return _to_numpy(images)
    if not isinstance(images, Sequence) or not len(images):
        raise Refused(
            f"{name}: {type(images).__name__}: must be an array uint8[N, H, W, C], a "
            "list of images, a path, the name of a source, or a section of a config"
        )
    if all(isinstance(image, str | os.PathLike) for image in images):
        images = [_open_file(path) for path in images]
    # Or the numbers of a palette would pass for grey.
    if all(hasattr(image, "convert") for image in images):
        images = _decode_images(name, images)
    arrays = [np.asarray(_to_numpy(image)) for image in images]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise Refused(
            f"{name}: images of {len(shapes)} shapes, such as "
            f"{' and '.join(str(shape) for shape in sorted(shapes)[:2])}; must be of "
            "one. Images of several sizes are read from a folder, or from what "
            "`save_to_disk` of a datasets.Dataset wrote"
        )
    return np.stack(arrays)
