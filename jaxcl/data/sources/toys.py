"""Small sets that need no files: digits, and generated graphs."""

from typing import Annotated, Literal

import numpy as np
from PIL import Image

from jaxcl import schema
from jaxcl.data import stream
from jaxcl.data.images import decode
from jaxcl.data.sources import graphs, shared
from jaxcl.data.stream import splits
from jaxcl.errors import Refused

Look = Literal["plain", "inverted", "rotated"]
_LOOKS = {
    "plain": lambda images: images,
    "inverted": lambda images: 255 - images,
    "rotated": lambda images: np.rot90(images, axes=(1, 2)),
}
_NODES = 10**6  # of all graphs: they are made one by one
_Nodes = Annotated[int, schema.Range(4, 10**6)]
_Side = Annotated[int, schema.Range(1, 256)]  # pixels; all digits are in memory


@shared.source
def digits(
    *,
    size: _Side | None = None,
    interpolation: Literal["nearest", "bicubic"] = "bicubic",
    channels: decode.Channels = 1,
) -> stream.Dataset:
    """Read scikit-learn's 1,797 digits, u8[N,8,8,1], 0..16 scaled to 0..255.

    The test split is a fixed fifth of every class.

    size: pixels of a side, by Pillow's resizing; None: 8, as stored.
    interpolation: filter of that resizing, "nearest" or "bicubic".
    channels: number of channels: 1, or 3 to repeat the grey channel.
    """
    from sklearn import datasets  # takes a second, and few sources need it

    raw = datasets.load_digits()
    images = np.round(raw.images * (255 / 16)).astype(np.uint8)
    if size is not None:
        resampling = Image.Resampling[interpolation.upper()]
        resized = [Image.fromarray(x).resize((size, size), resampling) for x in images]
        images = np.stack([np.asarray(x) for x in resized])
    images = np.repeat(images[..., None], channels, axis=-1)
    label = raw.target.astype(np.int32)
    examples = stream.Examples(label, np.zeros_like(label), images)
    names = tuple(str(digit) for digit in range(10))
    return splits.draw_test("digits", names, examples, 0.2, splits.TEST_SEED)


@schema.checked("config.data")
def digits_in_looks(
    *,
    looks: Annotated[tuple[Look, ...], schema.Entries(once=True)] = tuple(_LOOKS),
    validation: schema.Fraction = 0.0,
    seed: schema.Natural = 0,
    size: _Side | None = None,
    interpolation: Literal["nearest", "bicubic"] = "bicubic",
    channels: decode.Channels = 1,
) -> stream.Dataset:
    """Read the images of `digits` once in each of three domains.

    A digit is in the same split in all domains.

    looks: names among "plain", "inverted" (black on white) and "rotated" (a quarter
      turn to the left), in the order of the domains.
    validation, seed, size, interpolation, channels: options of `digits`.
    """
    data = digits(
        validation=validation,
        seed=seed,
        size=size,
        interpolation=interpolation,
        channels=channels,
    )
    joined = stream.map_splits(data, lambda x: _in_looks(x, looks))
    return joined._replace(name="digits_in_looks", domain_names=tuple(looks))


def _in_looks(examples, looks) -> stream.Examples:
    """Show the examples in one look after another, each a domain."""
    images = np.concatenate([_LOOKS[look](examples.images) for look in looks])
    return stream.as_domains(examples, images, len(looks))


@schema.checked("config.data")
def rings_and_trees(
    *,
    count: Annotated[int, schema.Range(2, 10**7)] = 96,
    nodes: tuple[_Nodes, _Nodes] = (6, 14),
    seed: schema.Natural = 0,
) -> stream.Dataset:
    """Make graphs of two classes: rings with two chords, and random trees.

    Node features are degree profiles, see `graphs.degree_profile`.

    Args:
      count: number of graphs.
      nodes: least and most nodes of a graph.
      seed: seed of sizes, chords and trees.

    Raises:
      Refused: a number is out of its range.
    """
    if nodes[0] > nodes[1]:
        raise Refused("config.data.nodes", nodes, "must be (least, most)")
    if count * nodes[1] > _NODES:
        raise Refused(
            f"config.data.count={count} x nodes={nodes}: must be at most {_NODES} nodes"
        )
    rng = np.random.default_rng(seed)
    pairs, sizes = [], rng.integers(nodes[0], nodes[1], size=count, endpoint=True)
    starts = np.cumsum(sizes) - sizes
    for graph, size in enumerate(sizes):
        numbers = np.arange(size)
        if graph % 2:
            edges = [(i, rng.integers(i)) for i in numbers[1:]]
        else:
            edges = [(i, (i + 1) % size) for i in numbers]
            edges += [(i, (i + size // 2) % size) for i in rng.choice(size, 2)]
        pairs.append(np.array(edges) + starts[graph])
    name, numbers = "rings_and_trees", np.arange(count)
    arrays = {
        "where": name,
        "pairs": np.concatenate(pairs).T,
        "graph": np.repeat(numbers, sizes),
        "label": numbers % 2,
        "class_names": ("rings", "trees"),
    }
    return graphs.make_dataset(name, name, arrays, features=("ldp",), normalise=False)
