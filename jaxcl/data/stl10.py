"""STL-10 as its archive unpacks: 10 classes, images of 96 x 96, most without label."""

import os

import numpy as np

from jaxcl.data import splits, storage, stream

NAMES = "airplane bird car cat deer dog horse monkey ship truck"  # labels 1 to 10
SIZE = (10, 5000, 96)  # classes, train rows, pixels of a side


@splits.source
def stl10(
    *,
    path: str,
    unlabelled: bool = False,
) -> stream.Dataset:
    """STL-10 as its archive unpacks (stl10_binary), u8[N,96,96,3], in memory.

    path: the folder.
    unlabelled: append the 100,000 images without labels, 2.8 GB, to the train split,
      with label -1.

    Raises ValueError for a missing file, a file that is not a whole number of images, a
    label that is not 1 to 10, and labels whose number is not that of the images.
    """
    train = _stl10_split(path, "train", "unlabeled_X.bin" if unlabelled else None)
    test, names = _stl10_split(path, "test"), tuple(NAMES.split())
    return stream.Dataset("stl10", names, ("all",), train, None, test)


def _stl10_split(path, split, more=None) -> stream.Examples:
    """Return a labelled split, followed by the unlabelled images of the file `more`."""
    parts = [_stl10_images(os.path.join(path, f"{split}_X.bin"))]
    file = os.path.join(path, f"{split}_y.bin")
    label = _bytes(file).astype(np.int32) - 1
    if len(label) != len(parts[0]):
        raise ValueError(f"{file}: {len(label)} labels for {len(parts[0])} images")
    if len(label) and (label.min() < 0 or label.max() > 9):
        raise ValueError(
            f"{file}: labels run from {label.min() + 1} to {label.max() + 1}, must be "
            "1 to 10"
        )
    if more is not None:
        parts.append(_stl10_images(os.path.join(path, more)))
        label = np.concatenate([label, np.full(len(parts[1]), -1, np.int32)])
    # With `out` the pixels are stored in the order of the axes. The parts are views of
    # the files, whose order is another.
    images = np.empty((len(label), 96, 96, 3), np.uint8)
    np.concatenate(parts, out=images)
    return stream.Examples(label, np.zeros_like(label), images)


def _stl10_images(file) -> np.ndarray:
    """Return u8[N,96,96,3], a view of a file of planes, column by column."""
    data = _bytes(file)
    if len(data) % (3 * 96 * 96):
        raise ValueError(
            f"{file}: {len(data)} bytes, must be a multiple of {3 * 96 * 96}, an image"
        )
    return data.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)


def _bytes(file) -> np.ndarray:
    """Return all bytes of a file."""
    try:
        return np.fromfile(storage.check_ordinary(file), np.uint8)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read: {error}; path must be the unpacked stl10_binary, "
            f"which `jaxcl data stl10 --out={os.path.dirname(file)}` gets"
        ) from error
