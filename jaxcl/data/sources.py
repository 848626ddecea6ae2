"""Where examples come from: functions that return a `stream.Dataset`, by name.

Every source takes `validation`, the share of each class (and domain) that is cut
out of train by `seed`; the test split never changes with the run's seed.
"""

import difflib
import json
import os
from collections.abc import Sequence

import numpy as np
from PIL import Image

from jaxcl.data import (
    convert,
    graph_files,
    graph_toys,
    lists,
    places,
    prefetch,
    splits,
    stream,
    tiny_imagenet,
)

TEST_SEED = 0  # of test splits that we draw ourselves
MAPPED_BYTES = 4 << 30  # image files from this size on are mapped, not read
STL10 = "airplane bird car cat deer dog horse monkey ship truck"  # labels 1 to 10


def digits(
    *,
    validation: float = 0.0,
    seed: int = 0,
    size: int | None = None,
    interpolation: str = "bicubic",
    channels: int = 1,
) -> stream.Dataset:
    """scikit-learn's 1,797 handwritten digits, u8[N,8,8,1], 0..16 scaled to 0..255.

    Test is a fixed fifth of every class. `size` resizes by Pillow ("nearest" or
    "bicubic"); channels = 3 repeats the grey one.
    """
    from sklearn import datasets  # a second to import, only needed here

    if channels not in (1, 3):
        raise ValueError(f"channels = {channels}: must be 1 or 3")
    if interpolation not in ("nearest", "bicubic"):
        raise ValueError(
            f"interpolation = {interpolation!r}: must be 'nearest' or 'bicubic'"
        )
    raw = datasets.load_digits()
    images = np.round(raw.images * (255 / 16)).astype(np.uint8)
    if size is not None:
        how = Image.Resampling[interpolation.upper()]
        resized = [Image.fromarray(x).resize((size, size), how) for x in images]
        images = np.stack([np.asarray(x) for x in resized])
    images = np.repeat(images[..., None], channels, axis=-1)
    label = raw.target.astype(np.int32)
    whole = stream.Examples(label, np.zeros_like(label), images)
    names = tuple(str(digit) for digit in range(10))
    data = _split_test("digits", names, whole, 0.2, TEST_SEED)
    return splits.finish(data, validation=validation, seed=seed)


def _split_test(name, class_names, whole, fraction, seed, decoder=""):
    mask = splits.drawn(whole, fraction, [seed, 2])
    test = splits.take(whole, np.flatnonzero(mask)) if mask.any() else None
    train = splits.take(whole, np.flatnonzero(~mask))
    return stream.Dataset(name, class_names, ("all",), train, None, test, decoder)


def _examples(where, images, label, domain) -> stream.Examples:
    """Examples of arrays as files hold them: any integers, grey without channels."""
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


def npz(*, path: str, validation: float = 0.0, seed: int = 0) -> stream.Dataset:
    """An .npz file, plain or packed (see `convert.read_npz`).

    Either train_x, train_y, test_x, test_y (and train_domain, test_domain), or x, y,
    is_test (and domain); with class_names, domain_names. Images u8[N,H,W] or
    u8[N,H,W,C]; labels and the test part may be missing.
    """
    split_keys = [f"{s}_{k}" for s in ("train", "test") for k in ("x", "y", "domain")]
    keys = ("x", "y", "domain", "is_test", "class_names", "domain_names")
    data = convert.read_npz(path, (*split_keys, *keys))
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


def arrays(
    *,
    path: str,
    resident: bool | None = None,
    validation: float = 0.0,
    seed: int = 0,
) -> stream.Dataset:
    """A directory of .npy files with a meta.json, see `jaxcl.data.convert`.

    resident: read the images whole (then compared with their sha256); False maps
    the file and reads row by row; None decides by size, 4 GiB and more are mapped.
    """
    meta_path = os.path.join(path, "meta.json")
    try:
        meta = json.loads(places.read(meta_path))
        found = meta["splits"]
        names = [tuple(meta.get(key, ())) for key in ("class_names", "domain_names")]
        parts = {split: _array_split(path, found[split], resident) for split in found}
        train = parts["train"]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
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
        convert.read_entry(path, entries[key]) if key in entries else None
        for key in ("label", "domain")
    )
    file = os.path.join(path, entries["images"]["file"])
    if resident is None:
        resident = places.size(file) < MAPPED_BYTES
    if not resident and places.in_bucket(file):
        raise ValueError(
            f"{file}: rows of a file in a bucket cannot be read one by one; copy the "
            "directory to a disk, or give resident=True"
        )
    if resident:
        images = convert.read_entry(path, entries["images"])
        return _examples(file, images, label, domain)
    images = convert.mapped(file)
    if images.dtype != np.uint8 or images.ndim != 4:
        raise ValueError(
            f"{file} is {images.dtype}{list(images.shape)}, expected uint8[N, H, W, C]"
        )
    examples = _examples(file, images, label, domain)
    load = convert.Loader(convert.Mapped(file), np.arange(len(images)))
    return examples._replace(images=None, load=load)


def image_folder(
    *,
    path: str,
    classes: str | None = None,
    test: float = 0.2,
    test_seed: int = TEST_SEED,
    size: int | None = None,
    resident: bool = False,
    channels: int = 3,
    decoder: str = "auto",
    on_corrupt: str = "error",
    cache: str | None = None,
    cache_size: int | None = None,
    validation: float = 0.0,
    seed: int = 0,
) -> stream.Dataset:
    """Image files in folders, decoded row by row.

    Layouts: train/CLASS/* with test/ or val/ of the same classes (where both are
    there, val/ is the validation split; one without class folders is left out);
    CLASS/* alone, of which `test` of every class, drawn by `test_seed`, is the test
    split; or images without class folders: unlabelled, no test split. Classes are
    sorted by name.

    classes: a text file that names the classes to keep, in that order.
    size: shorter side to `size`, then a centre crop; resident: decode all, once.
    on_corrupt: "error", or "skip": another image of the class takes the place.
    cache: a folder that keeps the decoded images for later runs, see `cache.cached`;
      cache_size: shorter sides above it are shrunk to it there.
    """
    wanted = None if classes is None else convert.class_list(classes)
    decoder = prefetch.choose_decoder(decoder)
    held = [x for x in ("val", "test") if places.is_folder(os.path.join(path, x))]
    inner = "train" if places.is_folder(os.path.join(path, "train")) else ""
    names, label, files = scan(path, inner, wanted)

    def examples(label, files):
        return from_files(path, label, files, decoder=decoder, channels=channels)

    whole, name = examples(label, files), os.path.basename(os.path.abspath(path))
    if names and inner:
        held = [x for x in held if places.folders(os.path.join(path, x))]
    if inner and held:
        parts = [examples(*scan(path, x, names, wanted is None)[1:]) for x in held]
        validation_part = parts[0] if len(parts) == 2 else None
        data = stream.Dataset(
            name, names, ("all",), whole, validation_part, parts[-1], decoder
        )
    else:
        data = _split_test(
            name, names, whole, test if names else 0.0, test_seed, decoder
        )
    return splits.finish(
        data, validation=validation, seed=seed, size=size, resident=resident,
        on_corrupt=on_corrupt, cache=cache, cache_size=cache_size,
    )  # fmt: skip


def from_files(path, label, files, *, decoder, channels=3) -> stream.Examples:
    """Examples of one domain that are read from `files`, relative to `path`."""
    reader = convert.Files(path, np.array(files, bytes), decoder, channels)
    label = np.array(label, np.int32)
    load = convert.Loader(reader, np.arange(len(files)))
    return stream.Examples(label, np.zeros_like(label), load=load)


def scan(path, inner, wanted, only=False):
    """Class names, labels and files (relative to `path`) below path/inner."""
    start = path if places.in_bucket(path) else os.path.normpath(path)
    folder = os.path.join(start, inner) if inner else start
    if not places.is_folder(folder):
        raise ValueError(
            f"path = {folder!r}: no such directory; expected train/CLASS/* and val/ or "
            "test/, or CLASS/*, or images"
        )
    names, files, label = places.folders(folder), [], []
    if wanted:
        missing, extra = sorted({*wanted} - {*names}), sorted({*names} - {*wanted})
        if missing or (only and extra):
            raise ValueError(
                f"{folder}: class folders missing: {missing[:5]}, unknown: {extra[:5]}"
            )
        names = wanted
    for number, name in enumerate(names or [""]):
        found = convert.image_files(os.path.join(folder, name))
        if not found:
            what = f"class {name!r} has no images" if name else "no images"
            where = os.path.join(folder, name)
            raise ValueError(f"{where}: {what}, looked for {convert.EXTENSIONS}")
        # Not os.path.relpath, which takes an address for a path.
        files += [file[len(start) :].lstrip("/").encode() for file in found]
        label += [number if names else -1] * len(found)
    return tuple(names), label, files


def stl10(
    *, path: str, unlabelled: bool = False, validation: float = 0.0, seed: int = 0
) -> stream.Dataset:
    """STL-10 as its archive unpacks (stl10_binary), u8[N,96,96,3], in memory.

    unlabelled: the 100,000 images without labels join the train split, after the 5,000
      that have them, with label -1; 2.8 GB more.

    Raises ValueError for a file that is missing or no whole number of images, a label
    that is not 1 to 10, and another number of labels than of images.
    """
    train = _stl10_split(path, "train", "unlabeled_X.bin" if unlabelled else None)
    test, names = _stl10_split(path, "test"), tuple(STL10.split())
    data = stream.Dataset("stl10", names, ("all",), train, None, test)
    return splits.finish(data, validation=validation, seed=seed)


def _stl10_split(path, split, more=None) -> stream.Examples:
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
    # Without `out` the images would lie in memory as the files have them.
    images = np.empty((len(label), 96, 96, 3), np.uint8)
    np.concatenate(parts, out=images)
    return stream.Examples(label, np.zeros_like(label), images)


def _stl10_images(file) -> np.ndarray:
    """u8[N,96,96,3], a view of what the file holds: planes, each column by column."""
    data = _bytes(file)
    if len(data) % (3 * 96 * 96):
        raise ValueError(
            f"{file}: {len(data)} bytes, must be a multiple of {3 * 96 * 96}, an image"
        )
    return data.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)


def _bytes(file) -> np.ndarray:
    try:
        return np.fromfile(file, np.uint8)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read: {error}; path must be the unpacked stl10_binary"
        ) from error


def tfds(*, path: str | Sequence[str], **options) -> stream.Dataset:
    """A TFDS directory on disk or in a bucket, see `tfds_source.read`."""
    from jaxcl.data import tfds_source  # which imports this module

    return tfds_source.read(path=path, **options)


def graphs(
    *,
    path: str,
    features: Sequence[str] | None = None,
    std: str = "sample",
    normalise: bool = True,
) -> stream.Dataset:
    """A set of graphs, all of it for training: there is no test part.

    Args:
      path: an .npz file (`graph_files.npz`) or a folder in the text format of the
        TUDataset collection (`graph_files.tu`).
      features, std, normalise: options of both.
    """
    read = graph_files.npz if path.endswith(".npz") else graph_files.tu
    features = None if features is None else tuple(features)
    found = read(path=path, features=features, std=std, normalise=normalise)
    domain = np.zeros_like(found.label)
    train = stream.Examples(label=found.label, domain=domain, graphs=found)
    return stream.Dataset(found.name, found.class_names, ("all",), train, None, None)


SOURCES = {
    f.__name__: f
    for f in (
        digits,
        npz,
        arrays,
        graphs,
        graph_toys.rings_and_trees,
        image_folder,
        lists.image_lists,
        tiny_imagenet.tiny_imagenet,
        stl10,
        tfds,
    )
}


def load(name: str, **options) -> stream.Dataset:
    """The source called `name`; raises ValueError naming all for an unknown one."""
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"source {name!r} is unknown, did you mean {near!r}? All: {(*SOURCES,)}"
        )
    return SOURCES[name](**options)
