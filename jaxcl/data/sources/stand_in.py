"""Make a set of blank images, to compile programs without the real set."""

from collections.abc import Mapping

import numpy as np

from jaxcl.data import stream
from jaxcl.data.images import readers
from jaxcl.data.sources import by_name, shared
from jaxcl.errors import Refused

ROWS_PER_CLASS = 1000  # where nothing tells the number of rows
# Last part of a path -> classes, train rows and pixels of a side of the set there.
KNOWN = {
    "cifar10": (10, 50_000, None),
    "cifar100": (100, 50_000, None),
    "mnist": (10, 60_000, None),
    "stl10": (10, 5000, 96),
    "tiny_imagenet": (200, 100_000, 64),
}


def make_blank_dataset(
    data: Mapping,
    scenario: Mapping,
    augment: Mapping,
    *,
    classes: int | None = None,
    rows: int | None = None,
) -> stream.Dataset | None:
    """Make a set of blank images with the shapes of the set that a config names.

    Args:
      data, scenario, augment: sections of the config.
      classes, rows: numbers of classes and of train rows; None: as the sections say.

    Returns:
      The set, whose three splits are equal; None if the config's own set needs no
      files. Classes without a name are named by their numbers.

    Raises:
      Refused: a set of graphs, an unknown number of classes, or fewer rows than pairs
        of a class and a domain.
    """
    name = data.get("name")
    if by_name.needs_nothing(name):
        return None
    if name == "graphs":
        raise Refused(
            "config.data.name='graphs': no blank graphs can stand in for a set; must "
            "be a set of images, or 'rings_and_trees'"
        )
    place = str(data.get("path")).rstrip("/").rpartition("/")[2]
    count, known_rows, side = KNOWN.get(place, (None, None, None))
    names = _first_name_list(scenario.get("classes"), scenario.get("class_order"))
    if data.get("classes") is not None:
        names, known_rows = shared.class_list(data["classes"]), None
        count = len(names)
    classes = classes or count or len(names)
    if not classes:
        raise Refused(
            f"--classes: missing, and config.data.name={name!r} does not state their "
            "number; for images without classes give --classes=1"
        )
    domains = _first_name_list(data.get("domains"), data.get("domain_names"))
    domains = domains or _first_name_list(scenario.get("domain_order")) or ("all",)
    rows = rows or known_rows or ROWS_PER_CLASS * classes * len(domains)
    if rows < classes * len(domains):
        raise Refused(
            f"--rows={rows}: must be at least {classes * len(domains)}, one of each of "
            f"{classes} classes in each of {len(domains)} domains"
        )
    row = np.arange(rows)
    label = (row % classes).astype(np.int32)
    domain = (row // classes % len(domains)).astype(np.int32)
    pixels = data.get("size") or side or augment["size"]
    shape = (pixels, pixels, len(augment["mean"]))
    resident = data.get("resident")
    if resident is None:
        resident = name in by_name.IN_MEMORY
    if resident:
        # A broadcast zero takes no memory.
        images = np.broadcast_to(np.uint8(0), (rows, *shape))
        split = stream.Examples(label, domain, images)
    else:
        blank = np.zeros(shape, np.uint8)
        reader = readers.FunctionRows(lambda row: blank, rows, "blank")
        split = stream.Examples(label, domain, reader=reader)
    others = [f"class {i}" for i in range(len(names), classes)]
    names = (*names[:classes], *others)
    return stream.Dataset("stand-in", names, domains, split, split, split)


def _first_name_list(*options) -> tuple[str, ...]:
    """Return the first option that is a list of names, () if none is."""
    for option in options:
        if not isinstance(option, str | None) and isinstance(option[0], str):
            return tuple(option)
    return ()
