"""Read tensors from a file of another library: safetensors or PyTorch's own."""

import hashlib
import io
import json
import struct
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from etils import epath

from jaxcl.errors import Refused

_MOST_HEADER = 16 * 2**20  # bytes
_MOST_TENSORS = 100_000
_TYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),  # counters of batch norms
}
_INDEX = ".safetensors.index.json"
_WEIGHTS = (".safetensors", _INDEX, ".pth", ".pt", ".bin", ".ckpt")


def read_tensors(path: epath.PathLike) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the tensors of a file, and hash the files that were read.

    Args:
      path: path of a safetensors file, of the index of a divided one
        (`model.safetensors.index.json`), or of a file that `torch.save` wrote.

    Returns:
      name -> array, floating numbers in f32; name of each file -> sha256 of its bytes.

    Raises:
      Refused: the file is damaged, or holds types that are not supported.
      OSError: it cannot be read.
    """
    path = epath.Path(path)
    if path.is_dir():
        inner = sorted(x.name for x in path.iterdir() if x.name.endswith(_WEIGHTS))
        inside = f"; in it there is {', '.join(inner[:5])}" if inner else ""
        raise Refused(f"{path}: it is a folder; must be a file of weights{inside}")
    files = {path.name: path.read_bytes()}
    names = [path.name]
    if path.name.endswith(_INDEX):
        names = _index_parts(path, files[path.name])
        files |= {name: (path.parent / name).read_bytes() for name in names}
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        data = files[name]
        # The length that a safetensors file begins with may look like a pickle.
        by_torch = data[:2] in (b"PK", b"\x80\x02") and data[8:9] != b"{"
        read = _read_by_torch if by_torch else _read_safetensors
        piece = read(path.parent / name, data)
        if twice := sorted(tensors.keys() & piece.keys()):
            raise Refused(f"{path}: two of its parts hold {twice[0]!r}")
        tensors |= piece
    if not tensors:
        raise Refused(f"{path}: there is no tensor in it")
    cast = {name: _cast_finite(path, name, x) for name, x in tensors.items()}
    return cast, {n: hashlib.sha256(data).hexdigest() for n, data in files.items()}


def _index_parts(path, data) -> list[str]:
    """Name the files of an index; they are in the same folder."""
    try:
        weights = json.loads(data)["weight_map"]
        names = sorted({*weights.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path}: it is no index of safetensors files") from error
    for name in names:
        if not isinstance(name, str) or "/" in name or "\\" in name or ".." in name:
            raise Refused(f"{path}: names {name!r}, which is not in the same folder")
    return names


def _cast_finite(path, name, x) -> np.ndarray:
    """Cast an array of floating numbers to f32; refuse numbers that are not finite."""
    if x.dtype.kind in "iub":
        return x
    x = np.asarray(x, np.float32)
    if not np.isfinite(x).all():
        raise Refused(f"{path}: {name} has numbers that are not finite")
    return x


def _read_by_torch(path, data) -> dict[str, np.ndarray]:
    """Read a file of `torch.save` by PyTorch without running code from it."""
    mend = (
        "a Python that has PyTorch makes a file of it that can be read everywhere: "
        "safetensors.torch.save_file(torch.load(FILE, weights_only=True), OTHER)"
    )
    try:
        import torch  # no other files need it
    except ImportError as error:
        raise Refused(
            f"{path}: torch.save wrote it, and PyTorch is not installed here: pip "
            f"install torch; or {mend}"
        ) from error
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return dict(_flatten_dicts("", value, torch))
    except Exception as error:  # damaged bytes raise errors of many kinds
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise Refused(f"{path}: PyTorch does not read it ({reason}); {mend}") from error


def _flatten_dicts(
    name: str, value: Any, torch: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of nested dicts, with keys joined by dots."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_quantized:
            value = value.detach()
            yield name, (value.float() if value.is_floating_point() else value).numpy()
    elif isinstance(value, dict):
        for key, part in value.items():
            if isinstance(key, str):
                yield from _flatten_dicts(f"{name}.{key}" if name else key, part, torch)


def _read_safetensors(path, data) -> dict[str, np.ndarray]:
    """Read a safetensors file; refuse a name that comes twice."""
    size = struct.unpack("<Q", data[:8].ljust(8, b"\xff"))[0]
    if size > min(_MOST_HEADER, len(data)):
        raise Refused(f"{path}: no complete safetensors file, and no PyTorch file")

    def refuse_duplicates(pairs):
        names = [name for name, _ in pairs]
        if len({*names}) < len(names) or len(names) > _MOST_TENSORS:
            raise Refused("a name occurs twice, or there are too many names")
        return dict(pairs)

    try:
        json.loads(data[8 : 8 + size], object_pairs_hook=refuse_duplicates)
        entries = safetensors.deserialize(data)
    except (ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise Refused(f"{path}: is no complete safetensors file: {error}") from error
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] not in _TYPES:
            raise Refused(
                f"{path}: {name} is of type {entry['dtype']}; read are "
                f"{', '.join(_TYPES)}"
            )
        flat = np.frombuffer(entry["data"], _TYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"]).copy()
    return tensors
