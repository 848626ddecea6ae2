"""Read the teacher of a run: the encoder in the folder config.teacher.

Its weights are constants of the step: no checkpoint holds them. config.json keeps the
digest of the folder, so that a run does not resume with another teacher.
"""

from typing import Any

import jax
import numpy as np

from jaxcl import core
from jaxcl.config import sections
from jaxcl.data import stream
from jaxcl.data.augment import images as augment_images
from jaxcl.errors import Refused
from jaxcl.run import encoder_folder


def describe(folder: str) -> dict:
    """Describe a teacher: its network, and digests of its card and weights."""
    card = encoder_folder.read_card(folder)
    section, _ = encoder_folder.section(card)
    return {
        "encoder": section,
        "num_features": card["num_features"],
        "weights": card["files"][encoder_folder.TENSORS],
        "checksum": card["checksum"],
    }


def read_teacher(top: sections.TopLevel, image: sections.ImageSettings):
    """Read the encoder of config.teacher as a `core.Teacher`; None if it is not set.

    Args:
      image: the images that the student sees.

    Raises:
      Refused: the folder holds no whole encoder of images.
    """
    if top.teacher is None:
        return None
    if top.augment.get("name") == "graphs":
        raise Refused("config.teacher", top.teacher, "config.augment.name is 'graphs'")
    folder = top.teacher
    if not encoder_folder.exists_at(folder):
        raise Refused(
            "config.teacher",
            folder,
            "holds no encoder; jaxcl export or jaxcl import writes one",
        )
    card = encoder_folder.read_card(folder)
    as_config = encoder_folder.as_config(folder)
    field = f"{folder}/{encoder_folder.CARD}: encoder"
    module = sections.make_module(as_config["encoder"], top.precision, field)
    inputs = card["input"]
    size, channels = inputs["size"], inputs.get("channels") or len(inputs["mean"])
    leaves = encoder_folder.read_leaves(folder, card)
    for name, leaf in leaves.items():
        if not np.isfinite(leaf).all():
            raise Refused(
                f"{folder}/{encoder_folder.TENSORS}: {name} has numbers that are not "
                "finite; export or import the teacher again"
            )
    blank = np.zeros((1, size, size, channels), np.float32)
    filled = encoder_folder.fill_trees(module, blank, leaves, folder)
    weights = jax.tree.map(np.asarray, filled)  # on the host
    variables = {"params": weights[0], "batch_stats": weights[1]}
    width = jax.eval_shape(module.apply, variables, blank).shape[1]
    if width != card["num_features"]:
        raise Refused(
            f"{folder}/{encoder_folder.CARD}: num_features={card['num_features']}, "
            f"but its encoder has {width}"
        )
    embed = _make_embed(module, card["input"], image)
    return core.Teacher(embed, weights, width, channels)


def _make_embed(module, inputs: dict[str, Any], image: sections.ImageSettings):
    """Make the function from weights and the student's views to features.

    The teacher is in evaluation mode, and sees its own size, mean and deviation.
    """
    size, interpolation = inputs["size"], inputs.get("interpolation") or "bicubic"

    def resize(view):
        return augment_images.resize_shorter_side(
            view, size=size, interpolation=interpolation
        )

    def embed(weights, views):
        params, stats = weights
        pixels = views.astype(np.float32) * np.float32(image.std)
        pixels = pixels + np.float32(image.mean)
        if image.size != size:
            pixels = jax.vmap(resize)(pixels)
        normalized = augment_images.normalize(pixels, inputs["mean"], inputs["std"])
        variables = {"params": params, "batch_stats": stats}
        rows = module.apply(variables, normalized.astype(module.dtype), train=False)
        return jax.lax.stop_gradient(core.at_least_float32(rows))

    return embed


def check_use(
    top: sections.TopLevel,
    teacher: core.Teacher | None,
    method: core.Method,
    train: stream.Examples,
) -> None:
    """Refuse a teacher that nothing reads, or one of other channels than the images."""
    if teacher is None:
        return
    if method.constants is None:
        raise Refused(
            "config.teacher",
            top.teacher,
            "this config.method reads no teacher; leave it out, or set "
            "config.method.strategy=distil",
        )
    first = train.read(0)
    if first.shape[-1] != teacher.channels:
        raise Refused(
            f"config.teacher={top.teacher!r}: its images have {teacher.channels} "
            f"channels, those of config.data have {first.shape[-1]}"
        )
