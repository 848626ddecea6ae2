"""Read a set that lies in the memory of the program and in no file.

The config names the set and the sha256 of its bytes, so that a resumed run continues
with the same images or not at all.
"""

import dataclasses
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcl import schema
from jaxcl.data import stream
from jaxcl.data.images import listing
from jaxcl.data.sources import arrays, shared
from jaxcl.data.stream import splits
from jaxcl.errors import Refused


@dataclasses.dataclass(eq=False)
class StoredSet:
    """A set in memory, which the source finds as long as this object exists."""

    name: str
    examples: stream.Examples
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]

    def __post_init__(self):
        self.sha256 = _digest(self.examples, self.class_names, self.domain_names)

    @property
    def section(self) -> dict:
        """The section config.data that reads the set."""
        return {"name": "in_memory", "set": self.name, "sha256": self.sha256}


_SETS: weakref.WeakValueDictionary[str, StoredSet] = weakref.WeakValueDictionary()


def store_set(
    name: str,
    images: np.ndarray,
    *,
    labels: Sequence[Any] | None = None,
    domains: Sequence[Any] | None = None,
    class_names: Sequence[str] | None = None,
) -> StoredSet:
    """Hand a set over to the source `in_memory`.

    Args:
      name: name of the set, for messages and run directories.
      images: u8[N, H, W] or u8[N, H, W, C], C from 1 to 16; not copied, so
        leave it alone.
      labels: N integers or strings, the classes in sorted order; -1 or None where
        unknown.
      domains: N integers or strings, sorted, digits in strings by value;
        None: one domain.
      class_names: names for labels that are numbers, from 0 on; None: the numbers.

    Raises:
      Refused: an array is of another type or length.
    """
    images = np.asarray(images)
    if images.dtype.kind == "f":
        raise Refused(
            f"{name}: images are {images.dtype}, expected uint8 from 0 to 255; from "
            "numbers between 0 and 1 make (255 * images).round().astype('uint8')"
        )
    if images.dtype == np.uint16:
        most = int(images.max(initial=1))
        raise Refused(
            f"{name}: images are uint16 up to {most}, expected uint8; from numbers of "
            f"{max(most.bit_length(), 8)} bits make "
            f"(images >> {max(most.bit_length() - 8, 0)}).astype('uint8')"
        )
    label, names = _number_names(f"{name}: labels", labels)
    if class_names is not None:
        most = max(map(int, names), default=-1)
        if most >= len(class_names):
            raise Refused(f"{name}: {len(class_names)} class_names, but label {most}")
        names = tuple(class_names[int(number)] for number in names)
    domain, domain_names = _number_names(f"{name}: domains", domains)
    if domain is not None and (domain < 0).any():
        raise Refused(f"{name}: domains: some images have none; must be 0 or more")
    examples = arrays.examples(name, images, label, domain)
    stored = StoredSet(name, examples, names, domain_names or ("all",))
    return _SETS.setdefault(stored.sha256 + name, stored)


def _number_names(origin, values) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Number values from 0, -1 where unknown; return the names, too."""
    if values is None:
        return None, ()
    values = np.asarray(values)
    if values.ndim != 1:
        raise Refused(f"{origin} have shape {list(values.shape)}, expected [N]")
    if values.dtype.kind in "iu":
        mask = values >= 0  # of millions of labels, without a loop in Python
    else:
        entries = values if values.dtype.kind == "O" else ()
        fits = all(isinstance(x, str | int | np.integer | None) for x in entries)
        if values.dtype.kind not in "UO" or not fits:
            raise Refused(f"{origin} are {values.dtype}, expected integers or texts")
        mask = np.array([_is_known(x) for x in values], bool)
        if len({isinstance(x, str) for x in values[mask]}) > 1:
            raise Refused(f"{origin} are texts and numbers; must be of one kind")
    names = sorted({*values[mask].tolist()}, key=lambda x: listing.natural_key(str(x)))
    number = {name: i for i, name in enumerate(names)}
    numbers = np.full(len(values), -1, np.int32)
    numbers[mask] = [number[name] for name in values[mask].tolist()]
    return numbers, tuple(map(str, names))


def _is_known(label: str | int | None) -> bool:
    """Tell whether a label is a string, or a number from 0."""
    return isinstance(label, str) or (label is not None and label >= 0)


def _digest(examples, class_names, domain_names) -> str:
    """Return the sha256 of everything that a run reads from a set."""
    digest = hashlib.sha256(repr((class_names, domain_names)).encode())
    for array in (examples.images, examples.label, examples.domain):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


@shared.source
def in_memory(
    *,
    set: str,
    sha256: str,
    test: schema.Fraction = 0.0,
    test_seed: schema.Natural = splits.TEST_SEED,
) -> stream.Dataset:
    """Read arrays that this process holds, see `store_set`.

    set: name of the set.
    sha256: digest of its bytes, as in `StoredSet.section`.
    test: share of each class's labelled images, drawn by `test_seed`, that becomes the
      test split.
    test_seed: seed of that draw.

    Raises:
      Refused: the process holds no such set, or another one of that name.
    """
    stored = _SETS.get(sha256 + set)
    if stored is None:
        others = [x.sha256 for x in list(_SETS.values()) if x.name == set]
        has = f"the arrays handed over have {others[0]}" if others else "there are none"
        raise Refused(
            f"config.data.set={set!r}: must be the arrays with sha256 {sha256}, but "
            f"{has} in this process; hand them over with jaxcl.fit, which takes them, "
            "or jaxcl.data.sources.in_memory.store_set"
        )
    data = splits.draw_test(set, stored.class_names, stored.examples, test, test_seed)
    return data._replace(domain_names=stored.domain_names)
