"""An exported encoder, read back: `jaxcl.load_encoder`.

The folder that `python -m jaxcl.export` wrote is all that is read: neither the run nor
its data need be there.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

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
from jaxcl.data import prefetch

FORMAT = 1  # of the folder
TENSORS = "encoder.safetensors"
CARD = "card.json"
_NEEDED = ("encoder", "num_features", "input", "files")


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A network without its projector or head, frozen as a run left it.

    `dataclasses.replace(encoder, params=..., stats=...)` is the same one with other
    weights, say after fine-tuning.
    """

    module: Any  # flax.linen module: (inputs, *, train) -> f32[N, D]
    num_features: int  # D
    card: dict = dataclasses.field(repr=False)  # what card.json says
    params: core.PyTree = dataclasses.field(repr=False)  # f32
    stats: core.PyTree = dataclasses.field(repr=False)  # f32, of batch norm
    _program: Callable = dataclasses.field(repr=False)  # (params, stats, inputs)

    def prepare(self, images):
        """Images as the network wants them: resized, cut, normalised.

        Args:
          images: u8[N, H, W, C], resized on the device as evaluation resizes a set in
            memory; or a sequence of u8[h, w, C] of any sizes, resized on the host as
            it resizes a set that streams.

        Returns:
          f32[N, S, S, C].

        Raises:
          ValueError: they are no such images, or of another size or channels.
        """
        return _view(self.card, images)(jnp.asarray(_cut(self.card, images)))

    def apply(self, params, stats, inputs, *, train: bool = False, key=None):
        """The network as a pure function, to train with.

        Args:
          params, stats: trees as `params` and `stats`.
          inputs: normalised images f32[N, S, S, C], see `prepare`; or graphs.
          train: normalise by the statistics of the batch, and move the running ones.
          key: of the dropout of a graph encoder in training.

        Returns:
          f32[N, D], and the statistics after this pass.
        """
        return _apply(self.module, params, stats, inputs, train=train, key=key)

    def embed(self, inputs, *, batch_size: int = 256) -> np.ndarray:
        """Features as an evaluation of the run sees them, f32[N, D].

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
        size, found = min(batch_size, 1 << (count - 1).bit_length()), []
        for start in range(0, count, size):
            images = _cut(self.card, inputs[start : start + size])
            filled = np.resize(images, (size, *images.shape[1:]))
            rows = np.asarray(run(view(jnp.asarray(filled))))
            found.append(rows[: len(images)])
        return np.concatenate(found)


def _apply(module, params, stats, inputs, *, train=False, key=None):
    variables = {"params": params, "batch_stats": stats}
    more = {} if key is None else {"key": key}
    rows, moved = module.apply(
        variables, inputs, train=train, mutable=["batch_stats"], **more
    )
    return rows, moved.get("batch_stats", stats)


def _is_array(images) -> bool:
    return hasattr(images, "ndim")


def _view(card, images):
    """The function that makes of u8[N, H, W, C] what the network is given, jitted."""
    given = card["input"]
    if given["kind"] != "images":
        raise ValueError(f"inputs: must be {given['kind']}, as the card says")
    # What is cut on the host has its size already.
    resize = given["resize"] if _is_array(images) else None
    moments = tuple(given["mean"]), tuple(given["std"])
    return _compiled_view(given["size"], resize, given["interpolation"], *moments)


@functools.lru_cache(maxsize=8)
def _compiled_view(size, resize, interpolation, mean, std):
    view = augment_images.make_eval(
        size=size, resize=resize, interpolation=interpolation, mean=mean, std=std
    )
    return jax.jit(view)


def _cut(card, images) -> np.ndarray:
    """The images as one array u8[N, H, W, C], checked."""
    given = card["input"]
    if _is_array(images):
        _check("images", images, given["channels"], axes=4)
        if given["resize"] is None and tuple(images.shape[1:3]) != (given["size"],) * 2:
            raise ValueError(
                f"images: {images.shape[1]} x {images.shape[2]} pixels, must be "
                f"{given['size']} x {given['size']}; of a list each is resized"
            )
        return np.asarray(images)
    crop = prefetch.CenterCrop(
        size=given["size"],
        resize=given["size"] if given["resize"] is None else given["resize"],
        interpolation=given["interpolation"],
        decoder=prefetch.choose_decoder(given["decoder"] or "auto"),
    )
    for i, image in enumerate(images):
        _check(f"images[{i}]", image, given["channels"], axes=3)
    return np.stack([crop(np.asarray(image)) for image in images])


def _check(name, images, channels, *, axes):
    got = f"{getattr(images, 'dtype', type(images).__name__)}"
    got += f"{list(getattr(images, 'shape', ()))}"
    good = getattr(images, "dtype", None) == np.uint8 and images.ndim == axes
    if not good or images.shape[-1] != channels:
        shape = {3: "h, w", 4: "N, H, W"}[axes]
        raise ValueError(f"{name}: is {got}, must be uint8[{shape}, {channels}]")


def _checked_graphs(card, inputs):
    width = card["input"]["features"]
    if not isinstance(inputs, graphs_lib.Graphs):
        raise ValueError(
            f"inputs: is {type(inputs).__name__}, must be a data.graphs.Graphs"
        )
    have = inputs.features.shape[-1]
    if have != width:
        raise ValueError(f"inputs: nodes have {have} features, must have {width}")
    return inputs


def module_of(section: dict):
    """The flax module that a card's "encoder" describes.

    Raises:
      ValueError: a name or an option that there is not.
    """
    section, field = dict(section), f"{CARD}: encoder"
    precision = section.pop("precision", "float32")
    core.check_choice(f"{field}.precision", precision, tuple(sections.PRECISIONS))
    make, options = schema.named(sections.ENCODERS, section, field)
    options = schema.options(make, options, field, given=("dtype",))
    return make(**options, dtype=sections.PRECISIONS[precision])


def blank(given: dict):
    """Zeros of the least shape that a card's "input" allows, for shapes."""
    if given["kind"] == "images":
        return np.zeros((1, given["size"], given["size"], given["channels"]), "f4")
    none, nothing = np.zeros(1, bool), np.zeros(1, np.int32)
    return graphs_lib.Graphs(
        np.zeros((1, given["features"]), "f4"),
        nothing,
        none,
        nothing,
        nothing,
        none,
        none,
    )


def flat(params, stats) -> dict[str, np.ndarray]:
    """The leaves under their names in the file, "params/conv1/kernel"."""
    found = jax.tree_util.tree_flatten_with_path({"params": params, "stats": stats})
    return {
        "/".join(entry.key for entry in path): np.ascontiguousarray(leaf)
        for path, leaf in found[0]
    }


def make(card: dict, params, stats) -> Encoder:
    """An encoder of its parts; the number of features is counted, not read."""
    module = module_of(card["encoder"])
    rows = jax.eval_shape(
        lambda *given: _apply(module, *given)[0], params, stats, blank(card["input"])
    )
    program = jax.jit(lambda *given: _apply(module, *given)[0])
    return Encoder(module, rows.shape[-1], card, params, stats, program)


def read_card(folder) -> dict:
    """What card.json of an exported folder says.

    Raises:
      ValueError: there is none, it is damaged, or of a format that is not known.
    """
    path = epath.Path(folder) / CARD
    try:
        card = json.loads(path.read_text())
        missing = sorted({"format", *_NEEDED} - set(card))
    except OSError as error:
        raise ValueError(
            f"{folder}: it has no {CARD} that can be read; name a folder that "
            "python -m jaxcl.export wrote"
        ) from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: it is damaged: {error}") from error
    if card.get("format", FORMAT) != FORMAT:
        raise ValueError(
            f"{path}: format={card['format']!r}: this version of jaxcl reads {FORMAT}"
        )
    if missing:
        raise ValueError(f"{path}: it lacks {missing}")
    return card


def load_encoder(folder: Any) -> Encoder:
    """The encoder of a folder that `python -m jaxcl.export` wrote.

    Args:
      folder: its path, which may be in a bucket.

    Raises:
      ValueError: a file is missing, damaged, or not what the card says, naming what
        differs first.
    """
    card, path = read_card(folder), epath.Path(folder) / TENSORS
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read: {error}") from error
    have, want = hashlib.sha256(data).hexdigest(), card["files"].get(TENSORS)
    if have != want:
        raise ValueError(
            f"{path}: its sha256 is {have}, {CARD} says {want}: it is damaged or of "
            "another export; export again"
        )
    try:
        leaves = tensors.load(data)
    except SafetensorError as error:
        raise ValueError(f"{path}: it is no safetensors file: {error}") from error
    params, stats = _trees(card, leaves, path)
    made = make(card, params, stats)
    if made.num_features != card["num_features"]:
        raise ValueError(
            f"{CARD}: num_features={card['num_features']}, but its encoder has "
            f"{made.num_features}"
        )
    return made


def _trees(card, leaves: dict, path):
    """Parameters and statistics of the card's network, filled with the leaves."""
    module, inputs = module_of(card["encoder"]), blank(card["input"])
    like = jax.eval_shape(module.init, jax.random.key(0), inputs)
    like = {"params": like["params"], "stats": like.get("batch_stats", {})}
    found, tree = jax.tree_util.tree_flatten_with_path(like)
    want = {"/".join(entry.key for entry in path): leaf for path, leaf in found}
    misfit = core.first_misfit(leaves, want)
    if misfit:
        name, have, expected = misfit
        raise ValueError(
            f"{path}: {name} is {have}, in the network of {CARD} it is {expected}"
        )
    filled = jax.tree.unflatten(tree, [jnp.asarray(leaves[name]) for name in want])
    return filled["params"], filled["stats"]
