"""Read facts that are not in the tensors from the files next to the weights.

transformers writes config.json and preprocessor_config.json, timm config.json with
`pretrained_cfg`.
"""

import math
import re
from typing import Any, NamedTuple

from etils import epath

from jaxcl import storage
from jaxcl.errors import Refused

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
_NUMBERS = {  # transformers' key or timm's -> ours
    "num_attention_heads": "heads",
    "num_heads": "heads",
    "layer_norm_eps": "epsilon",
    "hidden_act": "activation",
    "act_layer": "activation",
}
_FILTERS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# Values of an image processor; others would give other pixels than ours.
_USUAL = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_offset": False,
    "rescale_factor": 1 / 255,
}
# timm's networks of these names are torchvision's; others of the same tensors are not.
_RESNETS = re.compile(r"(tv_)?resnet\d+(\..*)?")


class SideFacts(NamedTuple):
    """The content of the files; an empty mapping if there is none."""

    network: dict[str, Any]  # "heads", "epsilon", "activation"
    images: dict[str, Any]  # "size", "resize", "interpolation", "mean", "std"
    licence: str


def read_folder(folder: epath.Path, scheme: str) -> SideFacts:
    """Read the config files next to a library's weights.

    Args:
      folder: folder of the weights.
      scheme: a key of `names.SCHEMES`.

    Raises:
      Refused: a file is damaged, or describes a network that is not supported.
    """
    config, processor = (
        storage.read_object(folder / name) if (folder / name).exists() else {}
        for name in (CONFIG, PREPROCESSOR)
    )
    name = str(config.get("architecture", "resnet50"))
    if scheme == "torchvision" and not _RESNETS.fullmatch(name):
        raise Refused(
            f"{CONFIG}: architecture={name!r}: tensors of its names may be of another "
            "network than torchvision's ResNet"
        )
    try:
        stated = config.get("model_args") or config
        network = {x: stated[key] for key, x in _NUMBERS.items() if key in stated}
        turns = config.get("rope_parameters") or config
        if turns.get("rope_theta", 100) != 100:
            raise Refused(f"{CONFIG}: rope_theta={turns['rope_theta']}; must be 100")
        timm = processor.get("pretrained_cfg") or config.get("pretrained_cfg")
        if timm is None and "architecture" in config:  # as older files have it
            timm = config
        images = _transformers_images(processor) if timm is None else _timm_images(timm)
    except (KeyError, TypeError, AttributeError) as error:
        names = f"{CONFIG} or {PREPROCESSOR}"
        raise Refused(f"{folder}/{names}: it cannot be read: {error!r}") from error
    return SideFacts(network, images, str((timm or {}).get("license") or ""))


def _timm_images(config) -> dict:
    if "input_size" not in config:
        return {}
    _, height, width = config["input_size"]
    size, share = _square(height, width), config.get("crop_pct") or 0.875  # its default
    if config.get("crop_mode", "center") != "center":
        share = 1.0  # it stretches or pads images, which are cut here
    return {
        "size": size,
        "resize": math.floor(size / share),
        "interpolation": _filter(config.get("interpolation", "bicubic")),
        "mean": [float(x) for x in config["mean"]],
        "std": [float(x) for x in config["std"]],
    }


def _transformers_images(config) -> dict:
    for key, default in _USUAL.items():
        if not math.isclose(config.get(key, default), default, rel_tol=1e-4):
            raise Refused(
                f"{PREPROCESSOR}: {key}={config[key]}: not known here; move the file "
                "away and give --size, --resize, --mean and --std"
            )
    images = {"mean": config.get("image_mean"), "std": config.get("image_std")}
    if "resample" in config:
        images["interpolation"] = _filter(config["resample"])
    size, crop = config.get("size"), config.get("crop_size")
    if not config.get("do_center_crop", True):
        crop = None
    if isinstance(crop, dict):
        crop = _square(crop["height"], crop["width"])
    if isinstance(size, dict):  # older files have a number
        edge = size.get("shortest_edge")
        # Two sides stretch an image; here the shorter is resized and the middle cut.
        size = _square(size["height"], size["width"]) if edge is None else edge
    if size is not None:
        share = config.get("crop_pct") if size < 384 else None  # of ConvNeXt
        images["size"] = crop or size
        images["resize"] = int(size / share) if share else size
    return {name: value for name, value in images.items() if value is not None}


def _square(height, width) -> int:
    if height != width:
        raise Refused(f"images are made {height} x {width}; must be square")
    return height


def _filter(value) -> str:
    method = _FILTERS.get(value, value)
    if method not in _FILTERS.values():
        raise Refused(
            f"images are resized by {value!r}; must be bilinear (2) or bicubic (3)"
        )
    return method
