"""Facts that no tensor shows, from the files that libraries put beside their weights.

transformers writes config.json and preprocessor_config.json, timm config.json with
`pretrained_cfg`.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from jaxcl.data import storage
from jaxcl.weights import names, wrappers

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
# Their key -> our option, for every kind of network.
_TRANSFORMERS = {
    "num_attention_heads": "heads",
    "layer_norm_eps": "epsilon",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "intermediate_size": "hidden",
    "patch_size": "patch",
    "image_size": "image_size",
    "num_register_tokens": "registers",
    "num_channels": "channels",
    "depths": "depths",
    "hidden_act": "activation",
}
_TIMM = {
    "num_heads": "heads",
    "embed_dim": "width",
    "depth": "layers",
    "depths": "depths",
    "patch_size": "patch",
    "img_size": "image_size",
    "reg_tokens": "registers",
    "in_chans": "channels",
    "act_layer": "activation",
}
_FILTERS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# timm's networks of these names are torchvision's; others of the same tensors are not.
_RESNETS = re.compile(r"(tv_)?resnet\d+(\..*)?")


class Facts(NamedTuple):
    """What the files say; an empty mapping where they say nothing."""

    network: dict[str, Any]  # option -> value
    images: dict[str, Any]  # "size", "resize", "interpolation", "mean", "std"
    licence: str
    hashes: dict[str, str]  # name of each file -> its bytes' sha256
    notes: tuple[str, ...]  # what is done in another way here

    def check(self, section: Mapping[str, Any], scheme: str) -> None:
        """Refuse a network of other sizes than the files say.

        Args:
          section: options of the network, as its tensors show them.
          scheme: a key of `names.SCHEMES`.

        Raises:
          wrappers.Refused: it names the first number that differs.
        """
        rotary = section.get("positions") == "rotary"
        # transformers' DINOv2 has SiLU in its gates, whatever config.json says.
        gated = section.get("mlp") == "swiglu" and scheme != "transformers_dinov2"
        activation = self.network.get("activation", "silu" if gated else "gelu")
        if activation != ("silu" if gated else "gelu") and "mlp" in section:
            raise wrappers.Refused(
                f"{CONFIG} beside it says activation={activation!r}: no network here "
                "has it; must be 'gelu', or 'silu' where the MLP is gated"
            )
        for option, said in self.network.items():
            if option not in section or (rotary and option == "image_size"):
                continue
            found = section[option]
            found = list(found) if option == "depths" else found
            if found != said:
                raise wrappers.Refused(
                    f"{CONFIG} beside it says {option}={said}, its tensors say {found}"
                )


def read(folder: epath.Path, scheme: str) -> Facts:
    """Read the files of a folder.

    Args:
      folder: with the weights.
      scheme: a key of `names.SCHEMES`; tells what config.json must say.

    Raises:
      ValueError: a file is damaged, or asks for what no network here has.
    """
    files = {}
    for name in (CONFIG, PREPROCESSOR):
        if (folder / name).exists():
            files[name] = storage.read_object(folder / name)
    network: dict[str, Any] = {}
    images: dict[str, Any] = {}
    licence, notes = "", []
    read_now = []
    config = files.get(CONFIG, {})
    try:
        if "architecture" in config:
            network, images = _timm(config, scheme)
            licence = str(config.get("pretrained_cfg", {}).get("license") or "")
        elif "model_type" in config or scheme.startswith("transformers"):
            network = _transformers(config, scheme) if config else {}
        read_now = [CONFIG] if network or images else []
        if PREPROCESSOR in files:
            given, notes = _preprocessor(files[PREPROCESSOR])
            for key in images.keys() & given.keys():
                if images[key] != given[key]:
                    raise ValueError(
                        f"{CONFIG} says {key}={images[key]}, {PREPROCESSOR} "
                        f"{given[key]}; mend one of them"
                    )
            images = images | given
            read_now.append(PREPROCESSOR)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        where = " and ".join(files)
        raise ValueError(f"{folder}/{where}: it cannot be read: {error!r}") from error
    hashes = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in read_now
    }
    return Facts(network, images, licence, hashes, tuple(notes))


def _pick(section, keys) -> dict:
    """The options that a section states, sides of squares as one number."""
    found = {}
    for key, option in keys.items():
        value = section.get(key)
        if option in ("patch", "image_size") and isinstance(value, list):
            value = value[0] if len({*value}) == 1 else value
        if value is not None:
            found[option] = value
    return found


def _transformers(config, scheme) -> dict:
    """Options of transformers' config.json."""
    found = _pick(config, _TRANSFORMERS)
    kind = names.SCHEMES[scheme].kind
    if kind == "vit":
        config["num_attention_heads"], config["layer_norm_eps"]  # noqa: B018
        found.pop("depths", None)
        turns = config.get("rope_parameters") or config
        if turns.get("rope_theta", 100) != 100:
            raise ValueError(f"{CONFIG}: rope_theta={turns['rope_theta']}; must be 100")
        return found
    if kind == "convnext":
        widths = config.get("hidden_sizes") or [None]
        return {"width": widths[0]} | {
            key: found[key] for key in ("patch", "depths", "channels") if key in found
        }
    return {}


def _timm(config, scheme) -> tuple[dict, dict]:
    """Options and preparation of timm's config.json."""
    name = str(config["architecture"])
    if scheme == "torchvision" and not _RESNETS.fullmatch(name):
        raise ValueError(
            f"{CONFIG}: architecture={name!r}: tensors of its names may be of another "
            "network than torchvision's ResNet"
        )
    options = config.get("model_args") or {}
    images = config.get("pretrained_cfg", config)
    if "input_size" not in images:
        return _pick(options, _TIMM), {}
    _, height, width = images["input_size"]
    share = images.get("crop_pct") or 0.875  # timm's own, where none is said
    squash = images.get("crop_mode") == "squash"
    found = {
        "size": _square(CONFIG, height, width),
        "resize": height if squash else math.floor(height / share),
        "mean": [float(x) for x in images["mean"]],
        "std": [float(x) for x in images["std"]],
        "interpolation": _filter(CONFIG, images.get("interpolation", "bicubic")),
    }
    return _pick(options, _TIMM), found


def _square(name, height, width) -> int:
    if height != width:
        raise ValueError(f"{name}: images of {height} x {width}; must be square")
    return height


def _filter(name, value) -> str:
    found = _FILTERS.get(value, value)
    if found not in _FILTERS.values():
        raise ValueError(
            f"{name}: images are resized by {value!r}; must be bilinear (2) or bicubic "
            "(3)"
        )
    return found


def _preprocessor(config) -> tuple[dict, list[str]]:
    """Find how images are prepared; also return what is done in another way here."""
    found: dict[str, Any] = {}
    notes: list[str] = []
    if config.get("rescale_offset"):
        raise ValueError(f"{PREPROCESSOR}: rescale_offset: no network here has it")
    factor = config.get("rescale_factor", 1 / 255)
    factor = factor * 255 if config.get("do_rescale", True) else 255.0
    factor = 1.0 if math.isclose(factor, 1.0, rel_tol=1e-4) else factor
    mean, std = config.get("image_mean"), config.get("image_std")
    if not config.get("do_normalize", True):
        mean, std = [0.0], [1.0]
    if mean is not None and std is not None:
        found["mean"] = [x / factor for x in mean]
        found["std"] = [x / factor for x in std]
    if "resample" in config:
        found["interpolation"] = _filter(PREPROCESSOR, config["resample"])
    size = config.get("size")
    if size is None or not config.get("do_resize", True):
        return found, notes
    if not isinstance(size, dict):  # as older files have it
        crops = config.get("do_center_crop") and "crop_size" in config
        size = {"shortest_edge" if crops else "height": size, "width": size}
    crop = config.get("crop_size") if config.get("do_center_crop", True) else None
    if isinstance(crop, dict):
        crop = _square(PREPROCESSOR, crop["height"], crop["width"])
    if "shortest_edge" not in size:
        side = _square(PREPROCESSOR, size["height"], size["width"])
        notes.append(
            f"{PREPROCESSOR} stretches images to a square; here the shorter side is "
            "resized and the middle cut"
        )
        return found | {"size": crop or side, "resize": side}, notes
    edge = size["shortest_edge"]
    share = config.get("crop_pct")  # of ConvNeXt's
    if share and edge < 384:
        return found | {"size": edge, "resize": int(edge / share)}, notes
    return found | {"size": crop or edge, "resize": edge}, notes
