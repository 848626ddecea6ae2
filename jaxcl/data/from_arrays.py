"""Sets of images in arrays: .npz files, and directories that `convert` writes."""

import os

import numpy as np

from jaxcl import schema
from jaxcl.data import files, splits, storage, stream

MAPPED_BYTES = 4 << 30  # larger image files are mapped, not read


@schema.checked("config.data")
def npz(
    *, path: str, validation: schema.Fraction = 0.0, seed: schema.Natural = 0
) -> stream.Dataset:
    """An .npz file, plain or packed (see `files.read_npz`).

    The file holds either train_x, train_y, test_x, test_y (and train_domain,
    test_domain), or x, y, is_test (and domain), and perhaps class_names and
    domain_names. Images are u8[N,H,W] or u8[N,H,W,C]. Labels and the test part are
    optional.
    """
    split_keys = [f"{s}_{k}" for s in ("train", "test") for k in ("x", "y", "domain")]
    keys = ("x", "y", "domain", "is_test", "class_names", "domain_names")
    data = files.read_npz(path, (*split_keys, *keys))
    parts = {}
    if "train_x" in data:
        for split in ("train", "test"):
            if f"{split}_x" in data:
                values = [data.get(f"{split}_{key}") for key in ("x", "y", "domain")]
                parts[split] = _examples(f"{path}: {split}", *values)
    elif "x" in data:
        values = [data.get(key) for key in ("x", "y", "domain")]
        whole = _examples(path, *values)
        mask = data.get("is_test", np.zeros(len(whole.label), bool))
        if mask.dtype != bool or mask.shape != (len(data["x"]),):
            raise ValueError(f"{path}: is_test must be bool[{len(data['x'])}]")
        parts["train"] = splits.take(whole, np.flatnonzero(~mask))
        if mask.any():
            parts["test"] = splits.take(whole, np.flatnonzero(mask))
    else:
        raise ValueError(f"{path}: has neither train_x nor x, but {sorted(data)}")
    names = {}
    for field, key in (("label", "class_names"), ("domain", "domain_names")):
        count = 1 + max(int(getattr(x, field).max(initial=-1)) for x in parts.values())
        names[key] = tuple(str(x) for x in data.get(key, range(count)))
    name = os.path.splitext(os.path.basename(path))[0]
    data = stream.Dataset(
        name, **names, train=parts["train"], validation=None, test=parts.get("test")
    )
    return splits.finish(data, validation=validation, seed=seed)


@schema.checked("config.data")
def arrays(
    *,
    path: str,
    resident: bool | None = None,
    validation: schema.Fraction = 0.0,
    seed: schema.Natural = 0,
) -> stream.Dataset:
    """A directory of .npy files with a meta.json, see `jaxcl.data.convert`.

    resident: True reads all images into memory and checks their sha256; False maps
      the file and reads row by row; None maps files of 4 GiB and more.
    """
    meta_path = os.path.join(path, "meta.json")
    try:
        meta = storage.read_json(meta_path)
        names = [tuple(meta.get(key, ())) for key in ("class_names", "domain_names")]
        parts = {
            split: _array_split(path, entries, resident)
            for split, entries in meta["splits"].items()
        }
        train = parts["train"]
    except (OSError, KeyError, TypeError, storage.NotJson) as error:
        raise ValueError(
            f"{meta_path}: expected the file that jaxcl.data.convert writes, "
            f"got {type(error).__name__}: {error}"
        ) from error
    data = stream.Dataset(
        name=meta.get("name", os.path.basename(os.path.normpath(path))),
        class_names=names[0],
        domain_names=names[1] or ("all",),
        train=train,
        validation=parts.get("validation"),
        test=parts.get("test"),
        decoder=meta.get("decoder", ""),
        mean=tuple(meta["mean"]) if "mean" in meta else None,
        std=tuple(meta["std"]) if "std" in meta else None,
    )
    return splits.finish(data, validation=validation, seed=seed)


def _array_split(path, entries, resident) -> stream.Examples:
    label, domain = (
        files.read_entry(path, entries[key]) if key in entries else None
        for key in ("label", "domain")
    )
    file = os.path.join(path, entries["images"]["file"])
    if resident is None:
        resident = storage.size(file) < MAPPED_BYTES
    if not resident and storage.in_bucket(file):
        raise ValueError(
            f"{file}: rows of a file in a bucket cannot be read one by one; copy the "
            "directory to a disk, or give resident=True"
        )
    if resident:
        images = files.read_entry(path, entries["images"])
        return _examples(file, images, label, domain)
    images = files.mapped(file)
    if images.dtype != np.uint8 or images.ndim != 4:
        raise ValueError(
            f"{file} is {images.dtype}{list(images.shape)}, expected uint8[N, H, W, C]"
        )
    examples = _examples(file, images, label, domain)
    load = files.Loader(files.Mapped(file), np.arange(len(images)))
    return examples._replace(images=None, load=load)


def _examples(where, images, label, domain) -> stream.Examples:
    """Examples from arrays of any integer type; grey images may lack the channel."""
    if images.ndim == 3:
        images = images[..., None]
    label = np.full(len(images), -1) if label is None else label
    domain = np.zeros(len(images), int) if domain is None else domain
    for field, values in (("labels", label), ("domains", domain)):
        if not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"{where}: {field} are {values.dtype}, expected integers")
        if values.shape != images.shape[:1]:
            raise ValueError(
                f"{where}: {field} have shape {list(values.shape)} for "
                f"{len(images)} images"
            )
    return stream.Examples(label.astype(np.int32), domain.astype(np.int32), images)
