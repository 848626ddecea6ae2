"""An exported encoder, read back: `jaxcl.load_encoder`.

It needs nothing but the folder that `python -m jaxcl.export` wrote, neither the run nor
its data.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError
from safetensors import numpy as tensors

from jaxcl import core, schema
from jaxcl.augment import images as augment_images
from jaxcl.config import sections
from jaxcl.data import graphs as graphs_lib
from jaxcl.data import prefetch, storage

FORMAT = 1  # of the folder
TENSORS = "encoder.safetensors"
CARD = "card.json"
_NEEDED = ("encoder", "num_features", "input", "files")


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A network without projector and head, as a run left it.

    `dataclasses.replace(encoder, params=..., stats=...)` is the same network with other
    weights, for instance after fine-tuning.
    """

    module: Any  # flax.linen module: (inputs, *, train) -> f32[N, D]
    num_features: int  # D
    card: dict = dataclasses.field(repr=False)  # what card.json says
    params: core.PyTree = dataclasses.field(repr=False)  # f32
    stats: core.PyTree = dataclasses.field(repr=False)  # f32, of batch norm
    _program: Callable = dataclasses.field(repr=False)  # (params, stats, inputs)

    def prepare(self, images: Any) -> jax.Array:
        """Resize, crop and normalise images as the network needs them.

        Args:
          images: u8[N, H, W, C], resized on the device, as an evaluation does for a set
            in memory; or a sequence of u8[h, w, C] of any sizes, resized on the host,
            as for a set that streams.

        Returns:
          f32[N, S, S, C].

        Raises:
          ValueError: the images are of another type, size or number of channels.
        """
        return _view(self.card, images)(jnp.asarray(_cut(self.card, images)))

    def apply(
        self,
        params: core.PyTree,
        stats: core.PyTree,
        inputs: Any,
        *,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, core.PyTree]:
        """Run the network as a pure function, for training.

        Args:
          params, stats: trees like the fields `params` and `stats`.
          inputs: normalised images f32[N, S, S, C], see `prepare`; or graphs.
          train: normalise by the statistics of the batch, and move the running ones.
          key: for the dropout of a graph encoder in training.

        Returns:
          f32[N, D], and the statistics after this pass.
        """
        return _apply(self.module, params, stats, inputs, train=train, key=key)

    def embed(self, inputs: Any, *, batch_size: int = 256) -> np.ndarray:
        """Embed inputs as an evaluation of the run does, f32[N, D].

        Args:
          inputs: images as for `prepare`; or a padded batch of graphs, see
            `data.graphs.pad`, whose empty slots get rows of zeros.
          batch_size: images at a time. The last batch is filled up; fewer images than
            this are filled up to a power of two, so that few programs are compiled.

        Raises:
          ValueError: as `prepare`.
        """
        run = functools.partial(self._program, self.params, self.stats)
        if self.card["input"]["kind"] == "graphs":
            return np.asarray(run(_checked_graphs(self.card, inputs)))
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        view, count = _view(self.card, inputs), len(inputs)
        if not count:
            return np.zeros((0, self.num_features), np.float32)
        size, features = min(batch_size, 1 << (count - 1).bit_length()), []
        for start in range(0, count, size):
            images = _cut(self.card, inputs[start : start + size])
            filled = np.resize(images, (size, *images.shape[1:]))
            rows = np.asarray(run(view(jnp.asarray(filled))))
            features.append(rows[: len(images)])
        return np.concatenate(features)


def _apply(module, params, stats, inputs, *, train=False, key=None):
    """Features, and the statistics after the pass."""
    variables = {"params": params, "batch_stats": stats}
    keys = {} if key is None else {"key": key}  # only graph encoders take one
    rows, moved = module.apply(
        variables, inputs, train=train, mutable=["batch_stats"], **keys
    )
    return rows, moved.get("batch_stats", stats)


def _is_array(images) -> bool:
    """Whether images are one array, and not a sequence of images."""
    return hasattr(images, "ndim")


def _view(card, images):
    """The jitted function from u8[N, H, W, C] to the network's inputs."""
    inputs = card["input"]
    if inputs["kind"] != "images":
        raise ValueError(f"inputs: must be {inputs['kind']}, as the card says")
    # Images that were cropped on the host have the right size already.
    resize = inputs["resize"] if _is_array(images) else None
    moments = tuple(inputs["mean"]), tuple(inputs["std"])
    return _compiled_view(inputs["size"], resize, inputs["interpolation"], *moments)


@functools.lru_cache(maxsize=8)
def _compiled_view(size, resize, interpolation, mean, std):
    view = augment_images.make_eval(
        size=size, resize=resize, interpolation=interpolation, mean=mean, std=std
    )
    return jax.jit(view)


def _cut(card, images) -> np.ndarray:
    """The images as one checked array u8[N, H, W, C]; a sequence is cropped."""
    inputs = card["input"]
    size, resize, channels = (inputs[k] for k in ("size", "resize", "channels"))
    if _is_array(images):
        _check("images", images, channels, axes=4)
        if resize is None and tuple(images.shape[1:3]) != (size, size):
            raise ValueError(
                f"images: {images.shape[1]} x {images.shape[2]} pixels, must be "
                f"{size} x {size}; of a list each is resized"
            )
        return np.asarray(images)
    crop = prefetch.CenterCrop(
        size=size,
        resize=size if resize is None else resize,
        interpolation=inputs["interpolation"],
        decoder=prefetch.choose_decoder(inputs["decoder"] or "auto"),
    )
    for i, image in enumerate(images):
        _check(f"images[{i}]", image, channels, axes=3)
    return np.stack([crop(np.asarray(image)) for image in images])


def _check(name, images, channels, *, axes):
    """Refuse an array that is not u8 with these channels and number of axes."""
    got = f"{getattr(images, 'dtype', type(images).__name__)}"
    got += f"{list(getattr(images, 'shape', ()))}"
    good = getattr(images, "dtype", None) == np.uint8 and images.ndim == axes
    if not good or images.shape[-1] != channels:
        shape = {3: "h, w", 4: "N, H, W"}[axes]
        raise ValueError(f"{name}: is {got}, must be uint8[{shape}, {channels}]")


def _checked_graphs(card, inputs):
    """The graphs; refuses other inputs, and nodes with another number of features."""
    width = card["input"]["features"]
    if not isinstance(inputs, graphs_lib.Graphs):
        raise ValueError(
            f"inputs: is {type(inputs).__name__}, must be a data.graphs.Graphs"
        )
    have = inputs.features.shape[-1]
    if have != width:
        raise ValueError(f"inputs: nodes have {have} features, must have {width}")
    return inputs


def module_of(section: dict) -> nn.Module:
    """The flax module that a card's "encoder" describes.

    Raises:
      ValueError: an unknown name or option.
    """
    section, field = dict(section), f"{CARD}: encoder"
    precision = section.pop("precision", "float32")
    core.check_choice(f"{field}.precision", precision, tuple(sections.PRECISIONS))
    make, options = schema.named(sections.ENCODERS, section, field)
    options = schema.options(make, options, field, given=("dtype",))
    return make(**options, dtype=sections.PRECISIONS[precision])


def blank(inputs: dict) -> np.ndarray | graphs_lib.Graphs:
    """Inputs of zeros, of the smallest shape that a card's "input" allows."""
    if inputs["kind"] == "images":
        return np.zeros((1, inputs["size"], inputs["size"], inputs["channels"]), "f4")
    masked, zero = np.zeros(1, bool), np.zeros(1, np.int32)
    return graphs_lib.Graphs(
        features=np.zeros((1, inputs["features"]), "f4"),
        node_graph=zero,
        node_mask=masked,
        senders=zero,
        receivers=zero,
        edge_mask=masked,
        graph_mask=masked,
    )


def flat(params: core.PyTree, stats: core.PyTree) -> dict[str, np.ndarray]:
    """The leaves by their names in the file, such as "params/conv1/kernel"."""
    trees = {"params": params, "stats": stats}
    leaves, _ = jax.tree_util.tree_flatten_with_path(trees)
    return {
        "/".join(entry.key for entry in path): np.ascontiguousarray(leaf)
        for path, leaf in leaves
    }


def make(card: dict, params: core.PyTree, stats: core.PyTree) -> Encoder:
    """An encoder from its parts; the number of features is that of the network."""
    module = module_of(card["encoder"])

    def features(params, stats, inputs):
        return _apply(module, params, stats, inputs)[0]

    rows = jax.eval_shape(features, params, stats, blank(card["input"]))
    return Encoder(module, rows.shape[-1], card, params, stats, jax.jit(features))


def checksum(card: dict) -> str:
    """sha256 of all else in a card."""
    rest = {key: value for key, value in card.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_card(folder: str | os.PathLike) -> dict:
    """Read card.json of an exported folder.

    Raises:
      ValueError: it is missing, damaged, or of an unknown format.
      OSError: it could not be read now, and may be whole.
    """
    path = epath.Path(folder) / CARD
    try:
        card = storage.read_object(path)
        missing = sorted({"format", *_NEEDED} - set(card))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder}: it has no {CARD} that can be read; name a folder that "
            "python -m jaxcl.export wrote"
        ) from error
    if card.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"{path}: format={card['format']!r}: this version of jaxcl reads {FORMAT}"
        )
    if missing:
        raise ValueError(f"{path}: it lacks {missing}")
    now = checksum(card)
    if card.get("checksum", now) != now:  # earlier versions wrote none
        raise ValueError(
            f"{path}: it was changed since it was written, or is damaged: its checksum "
            f"is {card['checksum']}, that of its contents {now}"
        )
    return card


def load_encoder(folder: Any) -> Encoder:
    """Load the encoder of a folder that `python -m jaxcl.export` wrote.

    Args:
      folder: its path, which may be in a bucket.

    Raises:
      ValueError: a file is missing, damaged, or not what the card says; the message has
        the first difference.
    """
    card, path = read_card(folder), epath.Path(folder) / TENSORS
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{path}: it cannot be read: {error}") from error
    have, want = hashlib.sha256(data).hexdigest(), card["files"].get(TENSORS)
    if have != want:
        raise ValueError(
            f"{path}: its sha256 is {have}, {CARD} says {want}: it is damaged or of "
            "another export; export again"
        )
    leaves = read_tensors(data, path)
    params, stats = _trees(card, leaves, path)
    encoder = make(card, params, stats)
    if encoder.num_features != card["num_features"]:
        raise ValueError(
            f"{CARD}: num_features={card['num_features']}, but its encoder has "
            f"{encoder.num_features}"
        )
    return encoder


def read_tensors(data: bytes, path: os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file.

    The library checks the header: its length, sizes and places of arrays against each
    other and the file's. What it lets through fails as another error here.

    Raises:
      ValueError: it is no such file, or has arrays that NumPy does not know.
    """
    try:
        return tensors.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: it is no safetensors file: {error}") from error


def _trees(card, leaves: dict, path):
    """Parameters and statistics of the card's network, filled with the leaves."""
    module, inputs = module_of(card["encoder"]), blank(card["input"])
    shapes = jax.eval_shape(module.init, jax.random.key(0), inputs)
    shapes = {"params": shapes["params"], "stats": shapes.get("batch_stats", {})}
    by_path, tree = jax.tree_util.tree_flatten_with_path(shapes)
    want = {"/".join(entry.key for entry in path): leaf for path, leaf in by_path}
    for name, have, expected in core.misfits(leaves, want):
        raise ValueError(
            f"{path}: {name} is {have}, in the network of {CARD} it is {expected}"
        )
    filled = jax.tree.unflatten(tree, [jnp.asarray(leaves[name]) for name in want])
    return filled["params"], filled["stats"]
