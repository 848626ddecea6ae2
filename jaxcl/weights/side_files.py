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
_TIMM = {  # not img_size: timm resizes positions when it loads them
    "num_heads": "heads",
    "embed_dim": "width",
    "depth": "layers",
    "depths": "depths",
    "patch_size": "patch",
    "reg_tokens": "registers",
    "in_chans": "channels",
    "act_layer": "activation",
}
_FILTERS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# timm's networks of these names are torchvision's; others of the same tensors are not.
_RESNETS = re.compile(r"(tv_)?resnet\d+(\..*)?")


class SideFacts(NamedTuple):
    """The content of the files; an empty mapping if there is none."""

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
                    f"{CONFIG} beside it says {option}={said}, but its tensors or an "
                    f"option say {found}"
                )


def read_folder(folder: epath.Path, scheme: str) -> SideFacts:
    """Read the files of a folder.

    Args:
      folder: with the weights.
      scheme: a key of `names.SCHEMES`; tells what config.json must say.

    Raises:
      ValueError: a file is damaged, or asks for what no network here has.
    """
    there = [name for name in (CONFIG, PREPROCESSOR) if (folder / name).exists()]
    found = {name: storage.read_object(folder / name) for name in there}
    config, licence, notes = found.get(CONFIG, {}), "", []
    network: dict[str, Any] = {}
    images: dict[str, dict] = {}  # file -> options
    try:
        if "architecture" in config:
            network = _timm_network(config, scheme)
            cfg = config.get("pretrained_cfg", config)
            images[CONFIG] = _timm_images(cfg, notes)
            licence = str(cfg.get("license") or "")
        elif config and ("model_type" in config or scheme.startswith("transformers")):
            network = _transformers_network(config, scheme)
        if cfg := found.get(PREPROCESSOR, {}).get("pretrained_cfg"):
            images[PREPROCESSOR] = _timm_images(cfg, notes)
        elif PREPROCESSOR in found:
            images[PREPROCESSOR] = _transformers_images(found[PREPROCESSOR], notes)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        where = " and ".join(found)
        raise ValueError(f"{folder}/{where}: it cannot be read: {error!r}") from error
    one, other = (images.get(name, {}) for name in (CONFIG, PREPROCESSOR))
    for key in one.keys() & other.keys():
        if one[key] != other[key]:
            raise ValueError(
                f"{folder}: {CONFIG} says {key}={one[key]}, {PREPROCESSOR} "
                f"{other[key]}; mend one of them"
            )
    used = {*images, *([CONFIG] if network else [])}
    hashes = {x: hashlib.sha256((folder / x).read_bytes()).hexdigest() for x in used}
    return SideFacts(network, one | other, licence, hashes, tuple(notes))


def _pick_options(section, keys) -> dict:
    """Pick the options that a section states, sides of squares as one number."""
    found = {}
    for key, option in keys.items():
        value = section.get(key)
        if option in ("patch", "image_size") and isinstance(value, list):
            value = value[0] if len({*value}) == 1 else value
        if value is not None:
            found[option] = value
    return found


def _transformers_network(config, scheme) -> dict:
    found, kind = _pick_options(config, _TRANSFORMERS), names.SCHEMES[scheme].kind
    if kind == "vit":
        missing = {"heads", "epsilon"} - found.keys()
        if missing:
            raise KeyError(*missing)
        turns = config.get("rope_parameters") or config
        if turns.get("rope_theta", 100) != 100:
            raise ValueError(f"{CONFIG}: rope_theta={turns['rope_theta']}; must be 100")
        if scheme == "transformers_dinov2":  # it has mlp_ratio in its place
            found.pop("hidden", None)
        return found
    kept = ("patch", "depths", "channels") if kind == "convnext" else ()
    return {name: found[name] for name in kept if name in found}


def _timm_network(config, scheme) -> dict:
    name = str(config["architecture"])
    if scheme == "torchvision" and not _RESNETS.fullmatch(name):
        raise ValueError(
            f"{CONFIG}: architecture={name!r}: tensors of its names may be of another "
            "network than torchvision's ResNet"
        )
    return _pick_options(config.get("model_args") or {}, _TIMM)


def _timm_images(config, notes) -> dict:
    if "input_size" not in config:
        return {}
    _, height, width = config["input_size"]
    size, share = _square(height, width), config.get("crop_pct") or 0.875  # its default
    if (mode := config.get("crop_mode", "center")) != "center":
        notes.append(f"timm's crop_mode={mode!r}: {_OURS}")
        share = 1.0
    return {
        "size": size,
        "resize": math.floor(size / share),
        "mean": [float(x) for x in config["mean"]],
        "std": [float(x) for x in config["std"]],
        "interpolation": _filter(config.get("interpolation", "bicubic")),
    }


_OURS = "here the shorter side of images is resized and the middle cut"


def _square(height, width) -> int:
    if height != width:
        raise ValueError(f"images are made {height} x {width}; must be square")
    return height


def _filter(value) -> str:
    found = _FILTERS.get(value, value)
    if found not in _FILTERS.values():
        raise ValueError(
            f"images are resized by {value!r}; must be bilinear (2) or bicubic (3)"
        )
    return found


def _transformers_images(config, notes) -> dict:
    found: dict[str, Any] = {}
    if config.get("rescale_offset"):
        raise ValueError(f"{PREPROCESSOR}: rescale_offset: no network here has it")
    factor = config.get("rescale_factor", 1 / 255) * 255
    factor = factor if config.get("do_rescale", True) else 255.0
    factor = 1.0 if math.isclose(factor, 1.0, rel_tol=1e-4) else factor
    mean, std = config.get("image_mean"), config.get("image_std")
    if not config.get("do_normalize", True):
        mean, std = [0.0], [1.0]
    if mean is not None and std is not None:
        found = {"mean": [x / factor for x in mean], "std": [x / factor for x in std]}
    if "resample" in config:
        found["interpolation"] = _filter(config["resample"])
    size, crop = config.get("size"), config.get("crop_size")
    if size is None or not config.get("do_resize", True):
        return found
    if not config.get("do_center_crop", True):
        crop = None
    if isinstance(crop, dict):
        crop = _square(crop["height"], crop["width"])
    if not isinstance(size, dict):  # as older files have it
        size = {"shortest_edge": size} if crop else {"height": size, "width": size}
    if "shortest_edge" not in size:
        notes.append(f"{PREPROCESSOR} stretches images to a square: {_OURS}")
        edge = _square(size["height"], size["width"])
        return found | {"size": crop or edge, "resize": edge}
    edge, share = size["shortest_edge"], config.get("crop_pct")
    if share and edge < 384:  # ConvNeXt's
        return found | {"size": edge, "resize": int(edge / share)}
    return found | {"size": crop or edge, "resize": edge}
