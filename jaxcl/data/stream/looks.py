"""Show the images of a set in several looks: permuted pixels, or rotated.

Permuted MNIST is from Goodfellow et al., "An Empirical Investigation of Catastrophic
Forgetting", ICLR 2014; Rotated MNIST from Lopez-Paz and Ranzato, "Gradient Episodic
Memory for Continual Learning", NeurIPS 2017, here with angles in any order, as in
Buzzega et al., "Dark Experience for General Continual Learning", NeurIPS 2020.
"""

import math
from typing import Literal, get_args

import numpy as np

from jaxcl.data import stream
from jaxcl.errors import Refused

Look = Literal["permuted", "rotated"]
LOOKS = get_args(Look)
MOST_BYTES = 8 << 30  # of a split in all looks, which lies in memory


def as_domains(
    dataset: stream.Dataset, look: Look, count: int | None, seed: int
) -> stream.Dataset:
    """Show all images of a set in each of `count` looks; a look is a domain.

    An image is in the same split in every look. Train and test images of a look are
    changed in the same way.

    Args:
      dataset: dataset of one domain, with images in memory and of one size.
      look: kind of change. "permuted": each look, the first too, has its own order of
        pixels, drawn uniformly. "rotated": each has its own angle, uniform between 0
        and 180 degrees, to the left about the centre, by the nearest pixel; corners
        become black.
      count: number of looks.
      seed: seed of orders and angles; a look depends on (seed, its number) alone.

    Raises:
      Refused: no count; several domains; graphs, or images that are not in memory or
        would not fit; images that are not square, which cannot be turned.
    """
    if count is None:
        raise Refused(f"num_tasks = None: scenario {look!r} needs a number of looks")
    if len(dataset.domain_names) > 1:
        raise Refused(
            f"scenario {look!r}: {dataset.name} has {len(dataset.domain_names)} "
            "domains; must have one, since each look becomes a domain"
        )
    images = dataset.train.images
    if images is None:
        raise Refused(
            f"scenario {look!r}: needs images in memory; {dataset.name} has none"
        )
    if count * images.nbytes > MOST_BYTES:
        raise Refused(
            f"num_tasks={count}: {dataset.name} in so many looks takes "
            f"{count * images.nbytes} bytes; must be at most {MOST_BYTES}"
        )
    height, width = images.shape[1:3]
    if look == "rotated" and height != width:
        raise Refused(
            f"scenario 'rotated': must be square images, not {height} x {width}"
        )
    draws = [np.random.default_rng([seed, number]) for number in range(count)]
    if look == "permuted":
        sources = [rng.permutation(height * width) for rng in draws]
        names = [f"order {number + 1}" for number in range(count)]
    else:
        angles = [rng.uniform(0, 180) for rng in draws]
        sources = [rotate_pixels(height, angle) for angle in angles]
        # Two angles may look alike when rounded; a domain needs a name of its own.
        names = [f"{n + 1}: {angle:.1f} degrees" for n, angle in enumerate(angles)]
    joined = stream.map_splits(dataset, lambda x: _in_looks(x, sources))
    return joined._replace(domain_names=tuple(names))


def rotate_pixels(side: int, angle: float) -> np.ndarray:
    """Return the source pixel of each pixel of a rotated image.

    Args:
      side: pixels of a side.
      angle: degrees, to the left.

    Returns:
      i64[side * side], numbers of pixels row by row; -1 for pixels from outside.
    """
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    y, x = np.mgrid[:side, :side] + (1 - side) / 2  # from the middle
    # Rounding keeps exact quarter turns from falling between two pixels.
    row = np.floor(np.round(sin * x + cos * y + side / 2, 6)).astype(int)
    column = np.floor(np.round(cos * x - sin * y + side / 2, 6)).astype(int)
    inside = (0 <= row) & (row < side) & (0 <= column) & (column < side)
    return np.where(inside, row * side + column, -1).ravel()


def _in_looks(examples, sources) -> stream.Examples:
    """Return the examples in one look after another, each a domain."""
    count, (height, width, channels) = len(examples.label), examples.images.shape[1:]
    pixels = examples.images.reshape(count, height * width, channels)
    images = np.empty((len(sources), *pixels.shape), np.uint8)
    for look, source in enumerate(sources):
        np.take(pixels, source, axis=1, out=images[look], mode="wrap")
        images[look][:, source < 0] = 0
    shown = images.reshape(-1, height, width, channels)
    return stream.as_domains(examples, shown, len(sources))
