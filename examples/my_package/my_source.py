"""A data source: grey images of one soft spot, whose place is the class.

Use it with --config.data.name=my_package.my_source.blobs.
"""

import numpy as np

from jaxcl import schema
from jaxcl.data import stream
from jaxcl.data.sources import shared
from jaxcl.data.stream import splits


@schema.checked("config.data")
def blobs(
    *,
    classes: schema.Count = 4,
    per_class: schema.Count = 100,
    size: schema.Pixels = 8,
    validation: schema.Fraction = 0.0,
    seed: schema.Natural = 0,
) -> stream.Dataset:
    """Draw the images; a fifth of each class is the test split.

    Args:
      classes: spots on a circle, one place each.
      per_class: images of each class, at least 5.
      size: pixels of a side.
      validation: share of the train split that is held out.
      seed: seed of the held-out rows; the images are the same for every seed.
    """
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(classes, dtype=np.int32), per_class)
    angle = 2 * np.pi * label / classes
    place = (size - 1) / 2 + size / 4 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    place += rng.normal(0, size / 32, place.shape)
    away = np.arange(size) - place[:, :, None]  # [N, 2, size]
    squared = away[:, 0, :, None] ** 2 + away[:, 1, None, :] ** 2
    images = np.round(255 * np.exp(-squared / (size / 4) ** 2)).astype(np.uint8)
    examples = stream.Examples(label, np.zeros_like(label), images[..., None])
    names = tuple(f"spot {c}" for c in range(classes))
    data = splits.draw_test("blobs", names, examples, 0.2, seed=0)
    return shared.finish(data, validation=validation, seed=seed)
