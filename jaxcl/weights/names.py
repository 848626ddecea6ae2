"""Translate between our names of parameters and PyTorch libraries' names.

names.json has a `Scheme` for each library, and the tensors by which a library and a
network are known. Both directions read it: `read_array` converts a library's tensors to
our arrays, `write_tensors` converts back.
"""

import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxcl.errors import Refused


class Scheme(NamedTuple):
    """The names of one library for one kind of network."""

    kind: str  # "vit", "resnet" or "convnext", as in nets
    # Our module, or one array of it -> theirs. Numbers in our names are "#". " 1/3"
    # behind a name: ours is the second of three equal parts of that tensor.
    names: Mapping[str, str]
    dropped: tuple[str, ...]  # beginnings of names that the features do not depend on


_BLOCKS = {"vit": "block_#/", "convnext": "stage#_#/", "resnet": "layer#_#/"}
_TABLES = json.loads(pathlib.Path(__file__).with_name("names.json").read_text())


def _load_schemes() -> dict[str, Scheme]:
    """Read the schemes; a library that is "like" another inherits the other's names."""
    rows, schemes = _TABLES["schemes"], {}
    for name, row in rows.items():
        if "like" in row:
            base = rows[row["like"]]
            inner = {key: base[key] | row.get(key, {}) for key in ("network", "block")}
            row = rows[name] = base | row | inner
        prefix = _BLOCKS[row["kind"]]
        block = {f"{prefix}{x}": row["begin"] + y for x, y in row["block"].items()}
        names = row["network"] | block
        schemes[name] = Scheme(row["kind"], names, tuple(row["dropped"]))
    return schemes


SCHEMES = _load_schemes()
# A tensor that each network of a kind has exactly once -> a second one if the name of
# the first is too common.
STEMS: dict[str, str | None] = _TABLES["stems"]
# Scheme and tensors that show it, none of which a scheme further down has.
SIGNS: list[list[str]] = _TABLES["signs"]
# The last part of our name -> theirs.
_LAST = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_LAST |= {"mean": "running_mean", "var": "running_var"}
_NUMBERS = re.compile(r"^(block_|stage|layer)(\d+)(?:_(\d+))?(?=[/_])")
_POSITIONS = ("class_position", "positions")  # in one tensor
_TOKENS = {"class", "registers", *_POSITIONS}  # [1, N, D] in every library


class TensorPlace(NamedTuple):
    """The place of one of our arrays among a library's tensors."""

    tensor: str
    part: int = 0  # number among `parts` equal parts of axis 0
    parts: int = 1


def find_tensor(scheme: Scheme, array: str) -> TensorPlace | None:
    """Find the tensor that holds one of our arrays.

    Args:
      array: path of our array, such as "block_0/norm1/scale".

    Returns:
      The place; None if the library has no name for it.
    """
    numbers: dict[str, int] = {}
    if match := _NUMBERS.match(array):
        first, second = int(match[2]), int(match[3] or 0)
        numbers = {"block": first if match[1] == "block_" else second}
        numbers |= {"layer": first, "stage": first - 1}  # stages count from 0 there
        # The layers of torchvision's one list: twice the stage, and the next.
        numbers |= {"before": 2 * first - 2, "after": 2 * first - 1}
    key = _NUMBERS.sub(lambda m: m[1] + ("#_#" if m[3] else "#"), array)
    module, _, last = key.rpartition("/")
    name = scheme.names.get(key) or scheme.names.get(module)
    if name is None:
        return None
    name, _, part = name.format(**numbers).partition(" ")
    if key not in scheme.names:
        name = f"{name}.{_LAST[last]}"
    return TensorPlace(name, *map(int, part.split("/"))) if part else TensorPlace(name)


def read_array(
    leaf: TensorPlace, array: str, tensor: np.ndarray, shape: tuple
) -> np.ndarray:
    """Convert a library's tensor into one of our arrays.

    Raises:
      Refused: the tensor does not make an array of that shape.
    """
    rows, last = np.asarray(tensor), array.rpartition("/")[2]
    fits = rows.ndim > 0 and len(rows) % leaf.parts == 0
    rows = np.split(rows, leaf.parts)[leaf.part] if fits else rows
    if array in _POSITIONS and rows.ndim == 3:  # the class token's row comes first
        patches = rows[0, -math.prod(shape[:-1]) :]
        rows = rows[0, 0] if array == "class_position" else patches
        rows = rows.reshape(shape) if rows.size == math.prod(shape) else rows
    elif last == "kernel" and rows.ndim == 4:
        # A convolution of 1 x 1 is a dense layer, too.
        dense = len(shape) == 2 and rows.shape[2:] == (1, 1)
        rows = rows[:, :, 0, 0].T if dense else rows.transpose(2, 3, 1, 0)
    elif last == "kernel":
        rows = rows.T
    else:  # tokens and factors may have axes of 1 around them
        while rows.ndim > len(shape) and len(rows) == 1:
            rows = rows[0]
        while rows.ndim > len(shape) and rows.shape[-1] == 1:
            rows = rows[..., 0]
    if not fits or rows.shape != shape:
        raise Refused(
            f"{leaf.tensor} has the shape {list(np.shape(tensor))}, which does not "
            f"make {array} of the shape {list(shape)}"
        )
    return np.ascontiguousarray(rows)


def write_tensors(
    scheme: Scheme, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Convert all our arrays into a library's tensors; the reverse of `read_array`.

    Args:
      arrays: arrays by path, such as "block_0/norm1/scale".
    """
    slices_of_tensor: dict[str, list[tuple[int, np.ndarray]]] = {}
    for array in sorted(arrays):  # the class token's position before the patches'
        leaf, x = find_tensor(scheme, array), np.asarray(arrays[array])
        if array in _TOKENS:
            x = x.reshape(-1, x.shape[-1])
        elif array.endswith("kernel"):
            x = x.T if x.ndim == 2 else x.transpose(3, 2, 0, 1)
        slices_of_tensor.setdefault(leaf.tensor, []).append((leaf.part, x))
    state = {}
    for name, slices in slices_of_tensor.items():
        rows = [x for _, x in sorted(slices, key=lambda pair: pair[0])]
        state[name] = np.concatenate(rows) if len(rows) > 1 else rows[0]
    for array in arrays.keys() & _TOKENS:
        name = scheme.names[array]
        state[name] = state[name].reshape(1, -1, state[name].shape[-1])
    return {name: np.ascontiguousarray(x) for name, x in state.items()}
