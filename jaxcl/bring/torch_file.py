"""Tensors of files that `torch.save` wrote, without PyTorch and without unpickling.

Such a file holds a pickle: a program that builds the object. Here that program is
decoded by `pickletools`, which runs nothing, and followed by a machine that knows
dicts, lists, tuples, numbers, texts and tensors. What it names, a class or a function,
is a pair of words that is never looked up: three of them mean something here (an
ordered dict, a tensor, a parameter), every other one makes a value that is of no use
and does no harm. So no code of the file can run.

Read are the zip form (since PyTorch 1.6) and the form before it. TorchScript archives,
quantised and sparse tensors are refused.
"""

import io
import math
import pickletools
import struct
import zipfile
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

_MOST_PROGRAM = 64 * 2**20  # bytes of the pickle
_MOST_TENSOR = 2**36  # bytes; a stride of 0 makes a small storage a large tensor
_MOST_DEPTH = 10_000_000  # values on the stack
_MOST_ENTRIES = 1_000_000  # of all dicts
_MAGIC = 0x1950A86A20F9469CFC6C  # of the older form
_PROTOCOL = 1001
TYPES = {
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


class Name(NamedTuple):
    """What the program asks to import; here only these words."""

    module: str
    name: str


class Opaque(NamedTuple):
    """A value that means nothing here."""

    what: str


class Storage(NamedTuple):
    """The numbers that tensors are made of."""

    key: str
    dtype: np.dtype
    count: int


class View(NamedTuple):
    """A tensor, as a view of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Refused(ValueError):
    """The file is damaged, or holds what is not read here."""


_MARK = Opaque("a mark")


class _Machine:
    """Follows one program."""

    def __init__(self):
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}  # all that are spoken of

    def run(self, file: BinaryIO) -> Any:
        """The value that the program builds."""
        for operation, argument, _ in pickletools.genops(file):
            name = operation.name
            if name == "STOP":
                (value,) = self.stack
                return value
            known = getattr(self, f"_{name.lower()}", None)
            if name in _PUSHED:
                self.stack.append(_PUSHED[name]())
            elif name in _ARGUMENTS:
                self.stack.append(argument)
            elif known is not None:
                known(argument)
            else:
                raise Refused(f"its program has {name}, which state dicts do not need")
            if len(self.stack) > _MOST_DEPTH:
                raise Refused("its program is nested too deeply")
        raise Refused("its program does not end")

    def _proto(self, version):
        if version != 2:
            raise Refused(f"its program is of protocol {version}, not 2")

    def _mark(self, _):
        self.stack.append(_MARK)

    def _since_mark(self) -> list:
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                taken = self.stack[at + 1 :]
                del self.stack[at:]
                return taken
        raise Refused("its program has no mark where it needs one")

    def _global(self, argument):
        module, _, name = argument.partition(" ")
        self.stack.append(Name(module, name))

    def _binput(self, place):
        self.memo[place] = self.stack[-1]

    _long_binput = _binput

    def _binget(self, place):
        self.stack.append(self.memo[place])

    _long_binget = _binget

    def _tuple(self, _):
        self.stack.append(tuple(self._since_mark()))

    def _tuple1(self, _):
        self._join(1)

    def _tuple2(self, _):
        self._join(2)

    def _tuple3(self, _):
        self._join(3)

    def _join(self, count):
        taken = tuple(self.stack.pop() for _ in range(count))
        self.stack.append(taken[::-1])

    def _append(self, _):
        self._extend([self.stack.pop()])

    def _appends(self, _):
        self._extend(self._since_mark())

    def _extend(self, values):
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Opaque):
            raise Refused(f"its program appends to a {type(target).__name__}")

    def _setitem(self, _):
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def _setitems(self, _):
        self._fill(self._since_mark())

    def _fill(self, pairs):
        target = self.stack[-1]
        if isinstance(target, dict) and len(pairs) % 2 == 0:
            for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                if not isinstance(key, str | int | float | bool | tuple | Name | None):
                    raise Refused(f"a key of a dict is a {type(key).__name__}")
                target[key] = value
        elif not isinstance(target, Opaque):
            raise Refused(f"its program sets items of a {type(target).__name__}")

    def _binpersid(self, _):
        storage = _storage(self.stack.pop())
        self.storages[storage.key] = storage
        self.stack.append(storage)

    def _newobj(self, _):
        self.stack.pop()
        self.stack.append(_opaque(self.stack.pop()))

    def _reduce(self, _):
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple):
            raise Refused("its program calls without a tuple of arguments")
        self.stack.append(_called(function, arguments))

    def _build(self, _):
        self.stack.pop()  # attributes, which mean nothing here
        if not isinstance(self.stack[-1], dict | Opaque):
            kind = type(self.stack[-1]).__name__
            raise Refused(f"its program sets attributes of a {kind}")


_PUSHED = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_ARGUMENTS = ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")


def _opaque(value) -> Opaque:
    words = ".".join(value) if isinstance(value, Name) else type(value).__name__
    return Opaque(words)


def _called(function, arguments) -> Any:
    """Stand in for the result of a call; knows three functions, and calls none."""
    if function == Name("collections", "OrderedDict") and arguments in ((), ([],)):
        return {}
    if function == Name("torch._utils", "_rebuild_tensor_v2"):
        return _view(*arguments[:4])
    if function == Name("torch._utils", "_rebuild_parameter"):
        return arguments[0]
    return _opaque(function)


def _whole(values) -> bool:
    """Whether all values are whole numbers, at least 0."""
    return all(type(value) is int and value >= 0 for value in values)


def _view(storage, offset, shape, strides) -> View:
    lists = isinstance(shape, tuple) and isinstance(strides, tuple)
    good = isinstance(storage, Storage) and lists and len(shape) == len(strides)
    if not good or not _whole((offset, *shape, *strides)) or len(shape) > 16:
        raise Refused("a tensor is none that NumPy knows")
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 not in shape and offset + last >= storage.count:
        raise Refused(f"a tensor of shape {shape} is larger than its storage")
    if math.prod(shape) * storage.dtype.itemsize > _MOST_TENSOR:
        raise Refused(f"a tensor of shape {shape} is too large")
    return View(storage, offset, shape, strides)


def _storage(value) -> Storage:
    """The storage that a persistent id describes."""
    good = isinstance(value, tuple) and len(value) in (5, 6) and value[0] == "storage"
    if not good or (len(value) == 6 and value[5] is not None):
        raise Refused("a storage is described in an unknown way")
    _, kind, key, _, count = value[:5]
    if not isinstance(kind, Name) or kind.name not in TYPES:
        raise Refused(f"numbers of the type {kind}: read are {', '.join(TYPES)}")
    if not isinstance(key, str) or not _whole((count,)):
        raise Refused("a storage is described in an unknown way")
    return Storage(key, TYPES[kind.name], count)


def _program(file: BinaryIO) -> tuple[Any, dict[str, Storage]]:
    """The value of a program, and the storages that it speaks of.

    Whatever is wrong with it is `Refused`.
    """
    machine = _Machine()
    try:
        return machine.run(file), machine.storages
    except Refused:
        raise
    except Exception as error:  # truncated, or an argument that is no argument
        what = f"{type(error).__name__}: {error}"
        raise Refused(f"its program is damaged ({what})") from error


def _array(view: View, data: bytes) -> np.ndarray:
    """A copy of a tensor's numbers, in order."""
    dtype = view.storage.dtype
    numbers = np.frombuffer(data, dtype)
    steps = [step * dtype.itemsize for step in view.strides]
    if 0 in view.shape:
        return np.zeros(view.shape, dtype)
    seen = np.lib.stride_tricks.as_strided(
        numbers[view.offset :], view.shape, steps, writeable=False
    )
    return np.array(seen, order="C")


def flat(value: Any) -> dict[str, View]:
    """The tensors of nested dicts, under their keys joined by dots."""
    found, todo, seen = {}, [("", value, 0)], 0
    while todo:
        name, one, depth = todo.pop()
        seen += 1
        if seen > _MOST_ENTRIES:  # or its dicts hold each other
            raise Refused("it has too many entries")
        if isinstance(one, View):
            found[name] = one
        elif isinstance(one, dict) and depth < 8:
            named = {key: part for key, part in one.items() if isinstance(key, str)}
            for key, part in named.items():
                todo.append((f"{name}.{key}" if name else key, part, depth + 1))
    return found


def read(data: bytes) -> dict[str, np.ndarray]:
    """The tensors of a file of PyTorch.

    Args:
      data: all of the file.

    Returns:
      name -> array, under the keys of nested dicts joined by dots.

    Raises:
      Refused: it is no such file, damaged, or holds what is not read here.
    """
    if data[:2] == b"PK":
        views, storages = _zipped(data)
    else:
        views, storages = _older(data)
    arrays = {}
    for name, view in views.items():
        have, want = len(storages(view.storage)), view.storage.count
        if have != want * view.storage.dtype.itemsize:
            raise Refused(f"{name}: its storage has {have} bytes, not {want} numbers")
        arrays[name] = _array(view, storages(view.storage))
    return arrays


def _zipped(data):
    """The tensors of the zip form, and storage -> its bytes."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except Exception as error:  # zipfile has errors of several kinds for damage
        raise Refused(f"it is no whole zip archive ({error})") from error
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(entries) != len(archive.infolist()):
        raise Refused("two entries have the same name")
    for name, entry in entries.items():
        plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
        if not plain or name.startswith("/") or ".." in name.split("/"):
            raise Refused(f"its entry {name!r} is none that torch.save writes")
    folders = {name.partition("/")[0] for name in entries}
    if len(folders) != 1:
        raise Refused("its entries are not in one folder")
    (folder,) = folders
    if f"{folder}/constants.pkl" in entries:
        raise Refused("it is a TorchScript archive; save the model's state_dict()")
    if f"{folder}/data.pkl" not in entries:
        raise Refused("it has no data.pkl, which torch.save writes")

    def bytes_of(name, most):
        entry = entries.get(f"{folder}/{name}")
        if entry is None:
            raise Refused(f"it has no {name}")
        if entry.file_size > most:
            raise Refused(f"its {name} has {entry.file_size} bytes")
        try:
            return archive.read(entry)
        except Exception as error:
            raise Refused(f"its {name} is damaged ({error})") from error

    if f"{folder}/byteorder" in entries and bytes_of("byteorder", 16) != b"little":
        raise Refused("its numbers are big-endian")
    value, _ = _program(io.BytesIO(bytes_of("data.pkl", _MOST_PROGRAM)))
    views = flat(value)
    return views, _kept(lambda s: bytes_of(f"data/{s.key}", _MOST_TENSOR))


def _kept(read_one):
    """Each storage is read once: many tensors may share it."""
    stored: dict[str, bytes] = {}

    def bytes_of(storage):
        if storage.key not in stored:
            stored[storage.key] = read_one(storage)
        return stored[storage.key]

    return bytes_of


def _older(data):
    """The same of the form before PyTorch 1.6: five programs, then the numbers."""
    file = io.BytesIO(data)
    if data[:2] != b"\x80\x02" or _program(file)[0] != _MAGIC:
        raise Refused("it is no file that torch.save wrote")
    if _program(file)[0] != _PROTOCOL:
        raise Refused("it is of an unknown version")
    system, _ = _program(file)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Refused("its numbers are big-endian")
    value, known = _program(file)
    keys, _ = _program(file)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise Refused("it does not say which storages it has")
    stored = {}
    for key in keys:
        count = struct.unpack("<q", file.read(8).ljust(8, b"\xff"))[0]
        if key not in known:
            raise Refused(f"it holds numbers {key!r} that its program does not name")
        size = count * known[key].dtype.itemsize
        if not 0 <= size <= len(data):
            raise Refused("it is cut short")
        stored[key] = file.read(size)

    def bytes_of(storage):
        if storage.key not in stored:
            raise Refused(f"it has no numbers {storage.key!r}")
        return stored[storage.key]

    return flat(value), bytes_of
