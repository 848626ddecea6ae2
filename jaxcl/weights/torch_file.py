"""Read the tensors of files that `torch.save` wrote, without PyTorch.

Read are the zip form (since PyTorch 1.6) and the form before it. TorchScript archives
and quantised tensors are refused; sparse tensors are passed over.
"""

import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_MOST_PROGRAM = 64 * 2**20  # bytes of a pickle
_MOST_TENSOR = 2**36  # bytes; a stride of 0 makes a small storage a large tensor
_MOST_ENTRIES = 1_000_000  # of all dicts
_MAGIC = 0x1950A86A20F9469CFC6C  # of the older form
_VERSION = 1001
_TYPES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
# All that pickles of protocol 2 need. Others may take memory before they are read.
_OPERATIONS = """
    PROTO STOP MARK GLOBAL REDUCE NEWOBJ BUILD BINPERSID BINPUT LONG_BINPUT BINGET
    LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE
    EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM
    SETITEMS
""".split()


class Refused(ValueError):
    """The file is damaged, or holds what is not read here."""


class _Storage(NamedTuple):
    """The numbers that tensors are made of."""

    key: str
    dtype: np.dtype
    count: int


class _View(NamedTuple):
    """A tensor, as a view of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _ignore(*_):
    """Do nothing."""


class _Unknown:
    """Stand in for any class or function: take every argument and do nothing."""

    def __new__(cls, *_):
        return object.__new__(cls)

    # All methods that a pickle may call. Since there is a `__setstate__`, a pickle sets
    # no attributes itself, neither of an object nor of its class.
    __init__ = __setstate__ = __setitem__ = append = extend = _ignore


class _Dict(dict):
    """Stand in for OrderedDict, whose attributes are ignored."""

    __setstate__ = _ignore


class _Tensor(_Unknown):
    def __new__(cls, storage, offset, shape, strides, *_):
        lists = isinstance(shape, tuple) and isinstance(strides, tuple)
        if not (isinstance(storage, _Storage) and lists and len(shape) == len(strides)):
            raise Refused("a tensor is described in an unknown way")
        if not _are_natural(offset, *shape, *strides) or len(shape) > 16:
            raise Refused(f"a tensor of shape {shape} is none that NumPy knows")
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape and offset + last >= storage.count:
            raise Refused(f"a tensor of shape {shape} is larger than its storage")
        if math.prod(shape) * storage.dtype.itemsize > _MOST_TENSOR:
            raise Refused(f"a tensor of shape {shape} is too large")
        return _View(storage, offset, shape, strides)


class _Parameter(_Unknown):
    def __new__(cls, tensor, *_):
        return tensor


_KNOWN = {
    ("collections", "OrderedDict"): _Dict,
    ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
    ("torch._utils", "_rebuild_parameter"): _Parameter,
}


class _Unpickler(pickle.Unpickler):
    """Build numbers, texts, dicts, lists, tuples and views of tensors, nothing else.

    The only use of pickle in the package. No code of a file can run: a name that a
    pickle imports is not looked up, but becomes one of the classes above or a new class
    that does nothing.
    """

    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data))
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module, name):
        known = _KNOWN.get((module, name))
        return known or type(name, (_Unknown,), {"__module__": module})

    def persistent_load(self, pid):
        if pid[0] == "module":  # a class, with its source
            return pid[1]
        _, kind, key, _, count, *view = pid
        if not isinstance(key, str) or not _are_natural(count) or any(view):
            raise Refused("a storage is described in an unknown way")
        if kind.__module__ != "torch" or kind.__name__ not in _TYPES:
            raise Refused(
                f"has numbers of {kind.__name__}; read are {', '.join(_TYPES)}"
            )
        storage = _Storage(key, _TYPES[kind.__name__], count)
        return self.storages.setdefault(key, storage)


def _are_natural(*values) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _unpickle(file: io.BytesIO) -> tuple[Any, dict[str, _Storage]]:
    """Read the next pickle of a file: its value, and its storages by key."""
    start = file.tell()
    for operation, argument, place in pickletools.genops(file):
        if operation.name not in _OPERATIONS:
            raise Refused(f"its pickle has {operation.name}, which no state dict needs")
        if operation.name == "PROTO" and argument != 2:
            raise Refused(f"its pickle is of protocol {argument}, not 2")
        # Memory is taken for all numbers below this one.
        if operation.name.endswith("BINPUT") and argument > place - start:
            raise Refused(f"its pickle keeps a value as number {argument}")
    unpickler = _Unpickler(file.getvalue()[start : file.tell()])
    return unpickler.load(), unpickler.storages


def _find_tensors(value: Any) -> dict[str, _View]:
    """Find the tensors of nested dicts, under their keys joined by dots."""
    found, todo, seen = {}, [("", value, 0)], 0
    while todo:
        name, one, depth = todo.pop()
        seen += 1
        if seen > _MOST_ENTRIES:  # or its dicts hold each other
            raise Refused("it has too many entries")
        if isinstance(one, _View):
            found[name] = one
        elif isinstance(one, dict) and depth < 8:
            named = {key: part for key, part in one.items() if isinstance(key, str)}
            for key, part in named.items():
                todo.append((f"{name}.{key}" if name else key, part, depth + 1))
    return found


def _copy_view(view: _View, data: bytes) -> np.ndarray:
    """Copy the numbers of a tensor, in order."""
    dtype = view.storage.dtype
    if len(data) != view.storage.count * dtype.itemsize:
        want = view.storage.count
        raise Refused(f"a storage has {len(data)} bytes, not {want} numbers")
    if 0 in view.shape:
        return np.zeros(view.shape, dtype)
    steps = [step * dtype.itemsize for step in view.strides]
    seen = np.lib.stride_tricks.as_strided(
        np.frombuffer(data, dtype)[view.offset :], view.shape, steps, writeable=False
    )
    return np.array(seen, order="C")


def read(data: bytes) -> dict[str, np.ndarray]:
    """Read the tensors of a file of PyTorch.

    Args:
      data: all of the file.

    Returns:
      name -> array, under the keys of nested dicts joined by dots.

    Raises:
      Refused: it is no such file, damaged, or holds what is not read here.
    """
    try:
        value, bytes_of = _open_zip(data) if data[:2] == b"PK" else _open_older(data)
        views, stored = _find_tensors(value), {}
        for storage in {view.storage for view in views.values()}:
            stored[storage] = bytes_of(storage.key)
        return {name: _copy_view(x, stored[x.storage]) for name, x in views.items()}
    except Refused:
        raise
    except Exception as error:  # damaged bytes raise errors of many kinds
        raise Refused(f"it is damaged ({type(error).__name__}: {error})") from error


def _open_zip(data) -> tuple[Any, Callable[[str], bytes]]:
    """Read the pickle of the zip form; also return key of a storage -> its bytes."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    names = archive.namelist()
    folder = names[0].partition("/")[0] if names else ""
    if f"{folder}/constants.pkl" in names:
        raise Refused("it is a TorchScript archive; save the model's state_dict()")
    for entry in archive.infolist():  # nothing that takes more memory than the file
        if entry.compress_type != zipfile.ZIP_STORED:
            raise Refused(
                f"its entry {entry.filename!r} is none that torch.save writes"
            )
    byteorder = f"{folder}/byteorder"
    if byteorder in names and archive.read(byteorder) != b"little":
        raise Refused("its numbers are big-endian")
    program = archive.read(f"{folder}/data.pkl")
    if len(program) > _MOST_PROGRAM:
        raise Refused(f"its data.pkl has {len(program)} bytes")
    value, _ = _unpickle(io.BytesIO(program))
    return value, lambda key: archive.read(f"{folder}/data/{key}")


def _open_older(data) -> tuple[Any, Callable[[str], bytes]]:
    """Read the form before PyTorch 1.6: five pickles, then the numbers."""
    file = io.BytesIO(data)
    if data[:2] != b"\x80\x02" or _unpickle(file)[0] != _MAGIC:
        raise Refused("it is no file that torch.save wrote")
    if _unpickle(file)[0] != _VERSION:
        raise Refused("it is of an unknown version")
    if _unpickle(file)[0]["little_endian"] is not True:
        raise Refused("its numbers are big-endian")
    value, storages = _unpickle(file)
    stored = {}
    for key in _unpickle(file)[0]:
        (count,) = struct.unpack("<q", file.read(8))
        if not 0 <= (size := count * storages[key].dtype.itemsize) <= len(data):
            raise Refused("it is cut short")
        stored[key] = file.read(size)
    return value, stored.__getitem__
