"""Load the encoder of a folder: `jaxcl.load_encoder`.

It needs only the folder that `jaxcl export` or `jaxcl import` wrote, not the run or its
data.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from PIL import Image

from jaxcl import core, lookup, numerics, schema
from jaxcl.config import sections
from jaxcl.data.augment import images as augment_images
from jaxcl.data.images import crops, decode
from jaxcl.data.stream import graph_arrays
from jaxcl.errors import Refused
from jaxcl.index import maps
from jaxcl.run import encoder_folder


@dataclasses.dataclass(frozen=True, repr=False)
class Encoder:
    """A trained network without projector and head.

    `dataclasses.replace(encoder, params=..., stats=...)` is the same network with other
    weights, for instance after fine-tuning.
    """

    module: Any  # flax.linen module: (inputs, *, train) -> f32[N, D]
    num_features: int  # D
    card: dict  # the content of card.json
    params: core.PyTree  # f32
    stats: core.PyTree  # f32, statistics of batch norm
    _program: Callable  # (params, stats, inputs)
    adapter: dict | None = None  # to the space of an old index, see `load_encoder`

    def __repr__(self) -> str:
        """Name the network, its features, its inputs and the method that trained it."""
        inputs, method = self.card.get("input", {}), self.card.get("method") or {}
        phrases = [self.card.get("encoder", {}).get("name", "a network")]
        phrases.append(f"{self.num_features} features")
        if inputs.get("kind") == "graphs":
            phrases.append("of graphs")
        elif "size" in inputs:
            side = inputs["size"]
            phrases.append(f"of images {side} x {side} x {inputs.get('channels')}")
        names = [lookup.name_of(method.get(k)) for k in ("name", "base", "strategy")]
        names = [name for name in names if name]
        if names:
            phrases.append(f"trained by {'/'.join(map(str, names))}")
        return f"Encoder({', '.join(phrases)})"

    @numerics.pinned()
    def prepare(self, images: Any) -> jax.Array:
        """Resize, crop and normalise images as the network needs them.

        Args:
          images: u8[N, H, W, C], resized on the device, as evaluation does for a set in
            memory; or a sequence of u8[h, w, C] of any sizes, resized on the host, as
            for a set that streams.

        Returns:
          f32[N, S, S, C].

        Raises:
          Refused: the images are of another type, size or number of channels.
        """
        view = _make_view(self.card, images)
        return view(jnp.asarray(_cut_images(self.card, images)))

    @numerics.pinned()
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
          train: whether to normalise by the batch's statistics, and move the running
            ones.
          key: threefry key for the dropout of a graph encoder in training.

        Returns:
          f32[N, D], and the statistics after this pass.
        """
        return _apply_module(self.module, params, stats, inputs, train=train, key=key)

    @numerics.pinned()
    def embed(self, inputs: Any, *, batch_size: int = 256) -> np.ndarray:
        """Embed images or graphs as f32[N, D], or one image as f32[D].

        Images are first prepared as the card's "input" says: the shorter side is
        resized to "resize", and the middle "size" x "size" pixels are cut out.

        Args:
          inputs: images as for `prepare`, or one image u8[h, w, C]; grey images may
            lack the last axis. Any image may be a PIL image, or the path of a file. Or
            a padded batch of graphs, see `graph_arrays.pad_batch`; its empty slots get
            rows of zeros.
          batch_size: images at a time. The last batch is padded; fewer images in all
            are padded to a power of two, so that few programs are compiled.

        Raises:
          Refused: as for `prepare`; or a file cannot be decoded.
          OSError: a file that cannot be read.
        """
        run = self._embed_prepared
        if self.card["input"]["kind"] == "graphs":
            return np.asarray(run(_check_graphs(self.card, inputs)))
        if batch_size < 1:
            raise Refused("batch_size", batch_size, "must be at least 1")
        inputs, is_single = _list_images(self.card, inputs)
        if is_single:
            return self.embed(inputs, batch_size=1)[0]
        view, count = _make_view(self.card, inputs), len(inputs)
        if not count:
            return np.zeros((0, self.num_features), np.float32)
        size, features = min(batch_size, 1 << (count - 1).bit_length()), []
        for start in range(0, count, size):
            images = inputs[start : start + size]
            if not _is_one_array(images):  # decoded now: all at once may not fit
                images = [_read_pixels(self.card, image) for image in images]
            images = _cut_images(self.card, images)
            filled = np.resize(images, (size, *images.shape[1:]))
            rows = np.asarray(run(view(jnp.asarray(filled))))
            features.append(rows[: len(images)])
        return np.concatenate(features)

    def _embed_prepared(self, inputs):
        rows = self._program(self.params, self.stats, inputs)
        if self.adapter is None:
            return rows
        return maps.map_features(self.adapter, rows)

    def picture_features(self) -> np.ndarray:
        """Embed a fixed picture that the library draws, f32[D].

        The picture has the network's size, so nothing is resized.
        """
        inputs = self.card["input"]
        side = inputs["resize"] or inputs["size"]
        row, column, channel = np.indices((side, side, inputs["channels"]))
        pixels = row * (3 + channel) + column * (5 - channel) + row * column // 7
        plain = dataclasses.replace(self, adapter=None)
        return plain.embed((pixels % 256).astype(np.uint8)[None])[0]

    def check(self, tolerance: float = 1e-2) -> float:
        """Compare the features of a fixed picture with those in the card.

        Args:
          tolerance: largest relative difference that passes. On a CPU it is about 1e-6;
            on GPUs that round float32 to TF32 about 1e-3.

        Returns:
          The relative difference.

        Raises:
          Refused: the features differ by more, or the card has none to compare with.
        """
        saved = self.card.get("check")
        if saved is None:
            raise Refused(
                f"{encoder_folder.CARD}: it has no features to check: an encoder of "
                "graphs never has; export one of images again"
            )
        error = np.linalg.norm(self.picture_features() - np.asarray(saved, np.float32))
        gap = float(error / np.linalg.norm(saved))
        if not gap <= tolerance:
            raise Refused(
                f"{encoder_folder.CARD}: check: features of the fixed picture differ "
                f"by {gap:.1%} of their length; must be at most {tolerance:.1%}"
            )
        return gap


def _apply_module(module, params, stats, inputs, *, train=False, key=None):
    """Return the features and the statistics after the pass."""
    variables = {"params": params, "batch_stats": stats}
    keys = {} if key is None else {"key": key}  # only graph encoders take one
    rows, updates = module.apply(
        variables, inputs, train=train, mutable=["batch_stats"], **keys
    )
    return rows, updates.get("batch_stats", stats)


def _list_images(card, images) -> tuple[Any, bool]:
    """Return images as one array or a sequence, and whether there was one image.

    An array stays one array if `_cut_images` takes it, so that it is resized on the
    device.
    """
    channels, size, resize = (card["input"][k] for k in ("channels", "size", "resize"))
    if isinstance(images, str | os.PathLike | Image.Image):
        return [images], True
    if not _is_one_array(images):
        if not hasattr(images, "__getitem__") or not hasattr(images, "__len__"):
            raise Refused(
                f"images: {type(images).__name__}: must be an array, a list of images, "
                "or one image"
            )
        return images, False
    if images.ndim == 2 or (images.ndim == 3 and images.shape[-1] == channels):
        image = images[..., None] if images.ndim == 2 else images
        fits = resize is not None or image.shape[:2] == (size, size)
        return image[None] if fits else [image], True
    if images.ndim == 3 and channels == 1:
        return images[..., None], False
    return images, False


def _read_pixels(card, image):
    """Read an image as u8[h, w, C]; an array is checked later."""
    inputs = card["input"]
    decoding = decode.Decoding(
        decode.choose_decoder(inputs["decoder"] or "auto"),
        channels=inputs["channels"],
        background=inputs.get("background", 255),
        bits=inputs.get("bits"),
    )
    if isinstance(image, str | os.PathLike):
        return decoding(epath.Path(image).read_bytes(), str(image))
    if isinstance(image, Image.Image):
        return decoding.convert(image, "images")
    return image[..., None] if getattr(image, "ndim", 0) == 2 else image


def _is_one_array(images) -> bool:
    """Tell whether images are one array, and not a sequence of images."""
    return hasattr(images, "ndim")


def _make_view(card, images):
    """Return the jitted function from u8[N, H, W, C] to the network's inputs."""
    inputs = card["input"]
    if inputs["kind"] != "images":
        raise Refused(f"inputs: must be {inputs['kind']}, as the card says")
    # Images that were cropped on the host have the right size already.
    resize = inputs["resize"] if _is_one_array(images) else None
    moments = tuple(inputs["mean"]), tuple(inputs["std"])
    return _compile_view(inputs["size"], resize, inputs["interpolation"], *moments)


@functools.lru_cache(maxsize=8)
def _compile_view(size, resize, interpolation, mean, std):
    view = augment_images.make_eval(
        size=size, resize=resize, interpolation=interpolation, mean=mean, std=std
    )
    return jax.jit(view)


def _cut_images(card, images) -> np.ndarray:
    """Make the images one checked array u8[N, H, W, C]; crop images of a sequence."""
    inputs = card["input"]
    size, resize, channels = (inputs[k] for k in ("size", "resize", "channels"))
    if _is_one_array(images):
        _check_array("images", images, channels, axes=4)
        if resize is None and tuple(images.shape[1:3]) != (size, size):
            raise Refused(
                f"images: {images.shape[1]} x {images.shape[2]} pixels, must be "
                f"{size} x {size}; of a list each is resized"
            )
        return np.asarray(images)
    crop = crops.CenterCrop(
        size=size,
        resize=size if resize is None else resize,
        interpolation=inputs["interpolation"],
        decoder=decode.choose_decoder(inputs["decoder"] or "auto"),
    )
    for i, image in enumerate(images):
        _check_array(f"images[{i}]", image, channels, axes=3)
    return np.stack([crop(np.asarray(image)) for image in images])


def _check_array(name, images, channels, *, axes):
    """Refuse an array that is not u8 with these channels and number of axes."""
    actual = f"{getattr(images, 'dtype', type(images).__name__)}"
    actual += f"{list(getattr(images, 'shape', ()))}"
    is_valid = getattr(images, "dtype", None) == np.uint8 and images.ndim == axes
    if not is_valid or images.shape[-1] != channels:
        shape = {3: "h, w", 4: "N, H, W"}[axes]
        raise Refused(f"{name}: is {actual}, must be uint8[{shape}, {channels}]")


def _check_graphs(card, inputs):
    """Refuse inputs that are no graphs, or of another number of features."""
    width = card["input"]["features"]
    if not isinstance(inputs, graph_arrays.Graphs):
        raise Refused(f"inputs: {type(inputs).__name__}: must be graph_arrays.Graphs")
    count = inputs.features.shape[-1]
    if count != width:
        raise Refused(f"inputs: nodes have {count} features, must have {width}")
    return inputs


def make_module(section: dict) -> nn.Module:
    """Make the flax module that a card's "encoder" describes.

    Raises:
      Refused: an unknown name or option.
    """
    section, field = dict(section), f"{encoder_folder.CARD}: encoder"
    precision = section.pop("precision", "float32")
    core.check_choice(f"{field}.precision", precision, tuple(sections.PRECISIONS))
    make, options = lookup.find_function(sections.ENCODERS, section, field)
    options = schema.options(make, options, field, excluded=("dtype",))
    return make(**options, dtype=sections.PRECISIONS[precision])


def blank_inputs(inputs: dict) -> np.ndarray | graph_arrays.Graphs:
    """Make inputs of zeros in the smallest shape that a card's "input" allows."""
    if inputs["kind"] == "images":
        return np.zeros((1, inputs["size"], inputs["size"], inputs["channels"]), "f4")
    masked, zero = np.zeros(1, bool), np.zeros(1, np.int32)
    return graph_arrays.Graphs(
        features=np.zeros((1, inputs["features"]), "f4"),
        node_graph=zero,
        node_mask=masked,
        senders=zero,
        receivers=zero,
        edge_mask=masked,
        graph_mask=masked,
    )


def flatten_leaves(params: core.PyTree, stats: core.PyTree) -> dict[str, np.ndarray]:
    """Name the arrays of a network as in the file, such as "params/conv1/kernel"."""
    leaves = _name_leaves(params, stats).items()
    return {name: np.ascontiguousarray(leaf) for name, leaf in leaves}


def _name_leaves(params, stats) -> dict[str, Any]:
    trees = {"params": params, "stats": stats}
    leaves, _ = jax.tree_util.tree_flatten_with_path(trees)
    return {"/".join(entry.key for entry in path): leaf for path, leaf in leaves}


@numerics.pinned()
def array_shapes(card: dict) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's arrays by their names in the file."""
    module, inputs = make_module(card["encoder"]), blank_inputs(card["input"])
    variables = jax.eval_shape(module.init, numerics.make_key(0), inputs)
    leaves = _name_leaves(variables["params"], variables.get("batch_stats", {}))
    return {name: leaf.shape for name, leaf in leaves.items()}


@numerics.pinned()
def make_encoder(card: dict, params: core.PyTree, stats: core.PyTree) -> Encoder:
    """Make an encoder from a card and its arrays."""
    module = make_module(card["encoder"])
    try:
        program = _compile_network(module)
    except TypeError:  # a user's module with an option that has no hash
        program = _compile_network.__wrapped__(module)
    rows = jax.eval_shape(program, params, stats, blank_inputs(card["input"]))
    return Encoder(module, rows.shape[-1], card, params, stats, program)


@functools.lru_cache(maxsize=32)
def _compile_network(module):
    """Compile the network once for all encoders with its options."""
    return jax.jit(lambda *arguments: _apply_module(module, *arguments)[0])


@numerics.pinned()
def load_encoder(
    folder: Any, *, check: bool = False, into: Literal["old"] | None = None
) -> Encoder:
    """Load the encoder of a folder that `jaxcl export` or `jaxcl import` wrote.

    Args:
      folder: path of the folder, which may be in a bucket.
      check: whether to compare the features of a fixed picture with the card's, see
        `Encoder.check`.
      into: space of the features. "old": the space of the index before the last update,
        by the folder's adapter.safetensors; rows then have length 1.

    Raises:
      Refused: a file is missing, damaged, or contradicts the card; the message has
        the first difference.
    """
    card = encoder_folder.read_card(folder)
    leaves = encoder_folder.read_leaves(folder, card)
    path = epath.Path(folder) / encoder_folder.TENSORS
    encoder = make_from_leaves(card, leaves, path)
    if encoder.num_features != card["num_features"]:
        raise Refused(
            f"{encoder_folder.CARD}: num_features={card['num_features']}, but its "
            f"encoder has {encoder.num_features}"
        )
    if check:
        encoder.check()
    if into is None:
        return encoder
    core.check_choice("into", into, ("old",))
    if maps.FILE not in card["files"]:
        raise Refused(
            f"{folder}: into='old': it has no {maps.FILE}; an accepted update with "
            "the verdict 'adapt' leaves one, and jaxcl export copies it"
        )
    arrays = encoder_folder.read_leaves(folder, card, maps.FILE)
    adapter = maps.check_map(arrays, epath.Path(folder) / maps.FILE)
    return dataclasses.replace(encoder, adapter=adapter)


@numerics.pinned()
def make_from_leaves(
    card: dict, leaves: dict[str, Any], path: Any = encoder_folder.TENSORS
) -> Encoder:
    """Make an encoder from a card and the arrays of its file.

    Args:
      card: dict with "encoder" and "input".
      leaves: arrays by their names in the file, see `flatten_leaves`.
      path: path of the file, for messages.

    Raises:
      Refused: the leaves do not fit the card's network.
    """
    module, inputs = make_module(card["encoder"]), blank_inputs(card["input"])
    return make_encoder(card, *encoder_folder.fill_trees(module, inputs, leaves, path))
