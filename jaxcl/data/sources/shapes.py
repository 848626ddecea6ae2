"""The set `shapes`: silhouettes that the library draws itself, in four domains."""

import math
import pathlib
from typing import Annotated, Literal, NamedTuple

import numpy as np
from PIL import Image

from jaxcl import schema, storage
from jaxcl.data import stream
from jaxcl.data.sources import shared

Point = tuple[float, float]
Polygon = list[Point]
Domain = Literal["plain", "outline", "busy", "night"]
DOMAINS: tuple[Domain, ...] = ("plain", "outline", "busy", "night")

_SAMPLES = 4  # per side of a pixel
_UNIT = 1 << 16  # fixed point: vertices are integers, so every machine agrees


def _star(points: int, radius: float, inner: float = 1.0) -> Polygon:
    """Return a regular polygon, or a star with every second radius times `inner`."""
    count = points if inner == 1.0 else 2 * points
    radii = [radius if i % 2 == 0 else radius * inner for i in range(count)]
    turns = [2 * math.pi * i / count - math.pi / 2 for i in range(count)]
    return [
        (r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, turns, strict=True)
    ]


def _moon() -> Polygon:
    """Return a crescent that is open to the right."""
    outer = [math.pi * (0.25 + 1.5 * i / 29) for i in range(30)]
    inner = [math.pi * (1.65 - 1.3 * i / 29) for i in range(30)]
    return [(math.cos(a), math.sin(a)) for a in outer] + [
        (0.55 + 0.75 * math.cos(a), 0.71 * math.sin(a)) for a in inner
    ]


def _heart() -> Polygon:
    """Return a heart, point down."""
    turns = [2 * math.pi * i / 40 for i in range(40)]
    return [(math.sin(t) ** 3, -_heart_height(t) / 16) for t in turns]


def _heart_height(t: float) -> float:
    waves = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t)
    return waves - math.cos(4 * t)


def _points(text: str) -> Polygon:
    """Read a polygon in SVG's form: "x,y x,y ..."."""
    return [tuple(map(float, point.split(","))) for point in text.split()]


def _rectangle(left: float, top: float, right: float, bottom: float) -> Polygon:
    """Return an axis-aligned rectangle."""
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


# Polygons of each class within about the unit circle, y downwards; their areas are
# alike, so that size does not tell the class.
SILHOUETTES: dict[str, list[Polygon]] = {
    "disc": [_star(40, 0.9)],
    "square": [_rectangle(-0.8, -0.8, 0.8, 0.8)],
    "triangle": [_star(3, 1.15)],
    "star": [_star(5, 1.2, inner=0.45)],
    "plus": [
        _points(
            "-.36,-1 .36,-1 .36,-.36 1,-.36 1,.36 .36,.36 "
            ".36,1 -.36,1 -.36,.36 -1,.36 -1,-.36 -.36,-.36"
        )
    ],
    "arrow": [_points("0,-1.1 1,0 .42,0 .42,1 -.42,1 -.42,0 -1,0")],
    "moon": [_moon()],
    "heart": [_heart()],
    "ell": [_points("-.9,-1 -.15,-1 -.15,.3 .9,.3 .9,1 -.9,1")],
    "bars": [_rectangle(-1, -0.9, 1, -0.28), _rectangle(-1, 0.28, 1, 0.9)],
}
CLASSES = tuple(SILHOUETTES)


class _Placement(NamedTuple):
    """The place of a silhouette, in samples of the canvas."""

    x: float
    y: float
    scale: float
    angle: float  # radians

    def place(self, polygon: Polygon) -> np.ndarray:
        """Return the vertices in fixed point, i64[V, 2]."""
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        placed = [
            (
                self.x + self.scale * (cos * x - sin * y),
                self.y + self.scale * (sin * x + cos * y),
            )
            for x, y in polygon
        ]
        return np.array([[round(c * _UNIT) for c in xy] for xy in placed], np.int64)


def _fill_polygon(vertices: np.ndarray, side: int) -> np.ndarray:
    """Return the samples inside a polygon by the even-odd rule, bool[side, side].

    Args:
      vertices: i64[V, 2], x and y in fixed point.
    """
    (x0, y0), (x1, y1) = vertices.T, np.roll(vertices, -1, axis=0).T
    rows = np.arange(side, dtype=np.int64)[:, None] * _UNIT + _UNIT // 2
    crosses = (y0 <= rows) != (y1 <= rows)
    rise = np.where(y1 == y0, 1, y1 - y0)
    crossing = x0 + (x1 - x0) * (rows - y0) // rise
    # A sample lies right of a crossing from this column on.
    first = np.clip(-((_UNIT // 2 - crossing) // _UNIT), 0, side)
    flips = np.zeros((side, side + 1), bool)
    np.logical_xor.at(flips, (np.nonzero(crosses)[0], first[crosses]), True)
    return np.logical_xor.accumulate(flips, axis=1)[:, :side]


def _outline(mask: np.ndarray, width: int) -> np.ndarray:
    """Return the samples of a mask within `width` of its edge, bool as the mask."""
    padded = np.pad(mask, width)
    side = len(mask)
    slanted = round(0.7 * width)
    inside = mask
    for dx, dy in ((width, 0), (slanted, slanted), (0, width), (-slanted, slanted)):
        for sign in (1, -1):
            top, left = width + sign * dy, width + sign * dx
            inside = inside & padded[top : top + side, left : left + side]
    return mask & ~inside


class _DomainStyle(NamedTuple):
    """How a domain colours its images: grey levels from 0 to 255."""

    ground: tuple[int, int]  # least and most of the background
    ink: tuple[int, int]  # least and most of the silhouette
    outline: bool = False
    bars: int = 0  # lines that cross the background


_LOOKS: dict[Domain, _DomainStyle] = {
    "plain": _DomainStyle(ground=(190, 240), ink=(10, 90)),
    "outline": _DomainStyle(ground=(190, 240), ink=(10, 90), outline=True),
    "busy": _DomainStyle(ground=(150, 240), ink=(10, 60), bars=7),
    "night": _DomainStyle(ground=(5, 30), ink=(50, 100)),
}
_OFFSET = 0.12  # most distance of the centre from the image's, of a side
_SCALE = (0.24, 0.38)  # of a side
_TURN = 0.35  # most rotation, radians


def _draw_image(
    rng: np.random.RandomState, kind: str, look: _DomainStyle, size: int, noise: float
):
    """Draw one image, u8[size, size, 3]."""
    side = size * _SAMPLES
    ground, ink = (int(rng.randint(low, high + 1)) for low, high in look[:2])
    canvas = np.full((side, side), ground, np.int64)
    for _ in range(look.bars):
        shade = int(rng.randint(min(ground, 90), 256))
        canvas[_fill_polygon(_place_bar(rng, side), side)] = shade
    x, y = 0.5 + rng.uniform(-_OFFSET, _OFFSET, 2)
    pose = _Placement(
        x * side, y * side, rng.uniform(*_SCALE) * side, rng.uniform(-_TURN, _TURN)
    )
    mask = np.zeros((side, side), bool)
    for polygon in SILHOUETTES[kind]:
        mask |= _fill_polygon(pose.place(polygon), side)
    canvas[_outline(mask, side // 20) if look.outline else mask] = ink
    pixels = canvas.reshape(size, _SAMPLES, size, _SAMPLES).sum((1, 3)) // _SAMPLES**2
    tint = rng.randint(-10, 11, 3)
    # The sum of four uniform integers is near a normal one.
    steps = rng.randint(-256, 257, (4, size, size, 3)).sum(0)
    image = pixels[..., None] + tint + steps * round(noise * 221) // (256 * 256)
    return np.clip(image, 0, 255).astype(np.uint8)


def _place_bar(rng: np.random.RandomState, side: int) -> np.ndarray:
    """Return a random thick line across the canvas, i64[4, 2]."""
    x, y = rng.uniform(0, side, 2)
    angle, half = rng.uniform(0, math.pi), rng.uniform(0.012, 0.05) * side
    return _Placement(x, y, 1.0, angle).place(_rectangle(-side, -half, side, half))


_Rows = Annotated[int, schema.Range(1, 10**5)]
_Side = Annotated[int, schema.Range(8, 256)]


@shared.source
def shapes(
    *,
    domains: Annotated[tuple[Domain, ...], schema.Entries(once=True)] = DOMAINS,
    train: _Rows = 1000,
    test: _Rows = 300,
    size: _Side = 32,
    noise: Annotated[float, schema.Range(0, 100)] = 6.0,
    draw_seed: schema.Natural = 0,
) -> stream.Dataset:
    """Draw silhouettes of ten classes in up to four domains, u8[N, size, size, 3].

    Nothing is downloaded, and the same options give the same bits on every machine.

    Args:
      domains: names among "plain" (filled, on one grey), "outline" (edges alone),
        "busy" (on crossing bars) and "night" (dark, low contrast), in the order of
        their numbers.
      train, test: images of each domain.
      size: pixels of a side.
      noise: standard deviation of the pixel noise, for pixels from 0 to 255.
      draw_seed: seed of the images; another seed gives another set of the same kind.

    Raises:
      Refused: an option is out of its range.
    """
    pairs = [
        _draw_split(domains, count, size, noise, [draw_seed, number])
        for number, count in enumerate((train, test))
    ]
    return stream.Dataset("shapes", CLASSES, tuple(domains), pairs[0], None, pairs[1])


def _draw_split(domains, count, size, noise, seeds) -> stream.Examples:
    """Draw `count` images of each domain, classes in turn."""
    images = np.empty((len(domains), count, size, size, 3), np.uint8)
    for i, domain in enumerate(domains):
        # RandomState is frozen by NumPy: its numbers never change between versions.
        rng = np.random.RandomState([*seeds, DOMAINS.index(domain)])
        for row in range(count):
            images[i, row] = _draw_image(
                rng, CLASSES[row % len(CLASSES)], _LOOKS[domain], size, noise
            )
    label = np.tile(np.arange(count, dtype=np.int32) % len(CLASSES), len(domains))
    domain = np.repeat(np.arange(len(domains), dtype=np.int32), count)
    return stream.Examples(label, domain, images.reshape(-1, size, size, 3))


def write_folders(data: stream.Dataset, out: str) -> None:
    """Write a set in memory as PNG files: OUT/DOMAIN/train/CLASS/00000.png, and test.

    The folder of each domain is a set of its own for the source "image_folder".

    Args:
      data: set from `shapes`.
      out: folder that is missing or empty.

    Raises:
      Refused: the folder holds something.
    """
    storage.check_blank(out, f"--out={out}")
    for split in ("train", "test"):
        part = getattr(data, split)
        for row, image in enumerate(part.images):
            domain = data.domain_names[part.domain[row]]
            kind = data.class_names[part.label[row]]
            path = pathlib.Path(out) / domain / split / kind / f"{row:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
