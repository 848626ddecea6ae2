"""Read and write files of features, .npz or .safetensors, as `jaxcl features` does.

A file has train_x f32[N, D], and perhaps train_y i[N] and train_domain i[N]; the same
of validation and test; and `about`, JSON: class_names, domain_names, and the card of
the encoder. Rows reach a method as images of one pixel and D channels, f32[N, 1, 1, D],
which config.encoder = {"name": "mlp", "widths": ()} passes on unchanged.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import numpy as tensors

from jaxcl import storage
from jaxcl.data import stream
from jaxcl.data.images import array_files
from jaxcl.data.sources import arrays, shared
from jaxcl.errors import Refused

_ABOUT = "about"
_SUFFIXES = (".npz", ".safetensors")


@shared.source
def features(*, path: str) -> stream.Dataset:
    """Read features from a file, such as `jaxcl features` writes.

    path: the file, .npz or .safetensors; see `sources.features` for what it holds.
    """
    columns, metadata = read(path)
    by_split = {}
    for split in stream.SPLITS:
        if f"{split}_x" in columns:
            values = [columns.get(f"{split}_{key}") for key in ("x", "y", "domain")]
            by_split[split] = _examples(f"{path}: {split}", *values)
    if "train" not in by_split:
        raise Refused(f"{path}: has no train_x, but {sorted(columns)[:10]}")
    name = os.path.splitext(os.path.basename(path))[0]
    names = [metadata.get(key) or None for key in ("class_names", "domain_names")]
    return arrays.dataset(name, by_split, *names)


def _examples(origin, rows, label, domain) -> stream.Examples:
    if rows.dtype != np.float32 or rows.ndim != 2:
        raise Refused(f"{origin}_x is {rows.dtype}{list(rows.shape)}, not f32[N, D]")
    if not np.isfinite(rows).all():
        raise Refused(f"{origin}_x has numbers that are not finite")
    return arrays.with_numbers(origin, rows[:, None, None], label, domain, -1)


def check_suffix(path: str) -> None:
    """Refuse a path that does not end in .npz or .safetensors."""
    if not path.endswith(_SUFFIXES):
        raise Refused(f"{path}: must end in {' or '.join(_SUFFIXES)}")


def read(path: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays of a file, and its description of them.

    Raises:
      Refused: the file is damaged or of another kind.
      OSError: it cannot be read.
    """
    check_suffix(path)
    if path.endswith(".npz"):
        arrays = array_files.read_npz(path)
        text = str(arrays.pop(_ABOUT, "{}"))
    else:
        data = storage.read_bytes(path)
        try:
            arrays = tensors.load(data)
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])
        except Exception as error:  # the library has an exception of its own
            raise Refused(f"{path} cannot be read: {error}") from error
        text = header.get("__metadata__", {}).get(_ABOUT, "{}")
    with storage.reading(path):
        metadata = json.loads(text)
    if not isinstance(metadata, dict):
        raise Refused(f"{path}: {_ABOUT} must be an object of JSON")
    return arrays, metadata


def write(path: str, arrays: Mapping[str, np.ndarray], metadata: Mapping) -> None:
    """Write a file of features; the same arguments give the same bytes.

    Raises:
      OSError: it could not be written.
    """
    text = json.dumps(metadata, sort_keys=True)
    with storage.replacing(path) as file:
        if path.endswith(".npz"):
            np.savez(file, allow_pickle=False, **arrays, **{_ABOUT: np.array(text)})
        else:
            file.write(tensors.save(dict(arrays), metadata={_ABOUT: text}))
