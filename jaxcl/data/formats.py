"""Look at the formats of a set's images: bits, transparency, frames."""

import concurrent.futures
import io
import warnings
from typing import NamedTuple

import numpy as np
from PIL import Image

from jaxcl.data import files as files_lib
from jaxcl.data import stream

LOOKED_AT = 512  # images of a set, evenly spaced
# Files of these endings have 8 bits, one frame and no transparency.
_PLAIN = (".jpg", ".jpeg", ".jfif", ".bmp")
_TIFF_BITS = 258  # the tag BitsPerSample
_DARK = 16  # of 255: images that are darker were not meant so


class Format(NamedTuple):
    """The format of an image."""

    grey: int | None = None  # largest value of 16-bit greys; None: of 8 bits
    colour: int | None = None  # the same of 16 bits a colour, after cutting to eight
    transparent: bool = False  # some pixels
    frames: int = 1


def find_bits(dataset: stream.Dataset, decoding: files_lib.Decoding) -> stream.Dataset:
    """Tell the readers of a set how many bits its 16-bit greys use.

    Its notes say what is lost where pixels are converted.
    """
    found = _look(dataset)
    greys = [x.grey for x in found if x.grey is not None]
    colours = [x.colour for x in found if x.colour is not None]
    bits, notes, of = decoding.bits, [], f"of {len(found):,} images looked at"
    if greys and bits is None:
        bits = max(max(greys).bit_length(), 8)
        if bits < 16:
            text = (
                f"{dataset.name}: {len(greys):,} {of} are 16-bit greys from 0 to "
                f"{max(greys):,}: they are read as of {bits} bits, of which the upper "
                "eight are kept; config.data.bits sets another number"
            )
            warnings.warn(text, stacklevel=2)
    # Some bright pixels must not leave all other images black, unless one says so.
    left = _DARK
    if greys and decoding.bits is None:
        left = int(np.percentile(greys, 95)) >> (bits - 8)
    if left < _DARK or max(colours, default=_DARK) < _DARK:
        raise ValueError(
            f"{dataset.name}: of nearly all 16-bit images at most level "
            f"{min([left, *colours])} of 255 would be left; config.data.bits must be "
            "lower for greys, and colours must be of 8 bits"
        )
    if greys:
        notes.append(f"16-bit greys, read as of {bits} bits")
    if colours:
        notes.append(f"{len(colours):,} {of} have 16 bits a colour, cut to eight")
    if count := sum(x.transparent for x in found):
        ground = decoding.background
        notes.append(f"{count:,} {of} are transparent, shown on grey level {ground}")
    if count := sum(x.frames > 1 for x in found):
        notes.append(f"{count:,} {of} have several frames, of which the first is read")
    whole = dataset._replace(bits=bits, notes=(*dataset.notes, *notes))
    if bits is None:
        return whole
    readers: dict = {}  # splits of one set share a reader

    def with_bits(examples):
        if examples.load is None:
            return examples
        read = examples.load.read
        new = readers.setdefault(
            id(read), read._replace(decoding=decoding._replace(bits=bits))
        )
        return examples._replace(load=examples.load._replace(read=new))

    return stream.map_splits(whole, with_bits)


def _look(dataset) -> list[Format]:
    """Look at some hundred images, evenly spaced over all splits."""
    parts = stream.splits_of(dataset).values()
    loads = [(x.load, len(x.label)) for x in parts if x.load is not None]
    ends = np.cumsum([count for _, count in loads])
    count = int(ends[-1]) if loads else 0
    rows = np.unique(np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(int))

    def look(row):
        part = int(np.searchsorted(ends, row, "right"))
        load, size = loads[part]
        return _format(load, int(row - ends[part] + size))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [x for x in pool.map(look, rows) if x is not None]


def _format(load, row) -> Format | None:
    """Return the format of an image; None of what cannot be read."""
    try:
        if load.name(row).lower().endswith(_PLAIN):
            return Format()
        data = load.raw(row)
        if data[:2] == b"\xff\xd8":
            return Format()
        with Image.open(io.BytesIO(data)) as image:
            grey = colour = None
            transparent, frames = False, getattr(image, "n_frames", 1)
            deep = data[:4] == b"\x89PNG" and data[24] == 16
            deep = deep or getattr(image, "tag_v2", {}).get(_TIFF_BITS, (8,))[0] == 16
            if image.mode == "I" or image.mode.startswith("I;16"):
                grey = int(np.asarray(image).max())
            elif deep:
                colour = int(np.asarray(image).max())
            if files_lib.is_transparent(image):
                transparent = image.convert("RGBA").getextrema()[3][0] < 255
            return Format(grey, colour, transparent, frames)
    except Exception:  # of damaged bytes Pillow's plugins raise anything
        return None
