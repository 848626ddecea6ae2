"""Small networks by the names of every library that the package reads."""

import functools
from typing import NamedTuple

import numpy as np
import safetensors.numpy as st

from jaxcl import schema
from jaxcl.nets import convnext, resnet, vit
from jaxcl.weights import encoder, names

MAKERS = {"vit": vit.vit, "convnext": convnext.convnext, "resnet": resnet.resnet}
SMALL = dict(width=16, layers=3, heads=2, hidden=24, patch=4, image_size=12)
TURNED = {"positions": "rotary", "qkv_bias": "query_value", "class_position": False}
SCALED = {"layer_scale": 1.0}
STAGES = {"depths": (1, 2), "width": 4, "patch": 2}
V2 = {"grn": True, "layer_scale": None}


class Family(NamedTuple):
    """A network, and how it is imported."""

    architecture: str
    options: dict  # of the network
    given: dict  # to the import


def _vit(architecture, **options):
    return Family(architecture, SMALL | options, {"size": 12, "heads": 2})


# scheme, or scheme-variant -> the network whose names it has
FAMILIES = {
    "timm": _vit("deit"),
    "timm-registers": _vit("dinov2", registers=2, class_position=False),
    "deit3": _vit("deit3", class_position=False, **SCALED),
    "dinov2": _vit("dinov2", registers=2, mlp="swiglu", **SCALED),
    "dinov2-plain": _vit("dinov2", **SCALED),
    "dinov3": _vit("dinov3", registers=2, **TURNED, **SCALED),
    "timm_dinov3": _vit("dinov3", mlp="swiglu", **TURNED, **SCALED),
    "transformers": _vit("augreg"),
    "transformers_dinov2": _vit("dinov2", registers=1, **SCALED),
    "transformers_dinov3": _vit("dinov3", mlp="swiglu", **TURNED, **SCALED),
    **{
        scheme: Family(
            "dinov3_convnext" if "dinov3" in scheme else "convnext", STAGES, {"size": 8}
        )
        for scheme, known in names.SCHEMES.items()
        if known.kind == "convnext"
    },
    **{
        f"{scheme}-v2": Family("convnext", STAGES | V2, {"size": 8})
        for scheme, known in names.SCHEMES.items()
        if "stage#_#/grn/scale" in known.names
    },
    "torchvision": Family(
        "resnet", {"depth": 10, "width": 4, "stem": "imagenet"}, {"size": 32}
    ),
    "torchvision-small": Family(
        "resnet",
        {"depth": 10, "width": 4, "stem_padding": 2},
        {"size": 32, "stem_padding": 2},
    ),
}


def scheme_of(family: str) -> str:
    return family.partition("-")[0]


def make(family: str, seed: int = 0) -> tuple[dict, dict]:
    """The tensors of a network by a library's names, and our arrays by their names."""
    tensors, arrays = _made(family, seed)
    return dict(tensors), dict(arrays)


@functools.cache
def _made(family, seed):
    scheme, options = names.SCHEMES[scheme_of(family)], FAMILIES[family].options
    section = schema.defaults(MAKERS[scheme.kind]) | options
    section = {"name": scheme.kind, **section}
    section.pop("dtype")
    size = FAMILIES[family].given["size"]
    card = {"encoder": section, "input": {"kind": "images", "size": size}}
    card["input"]["channels"] = 3
    rng, arrays = np.random.default_rng(seed), {}
    for name, shape in encoder.array_shapes(card).items():
        scale = np.prod(shape[:-1]) ** -0.5 if name.endswith("kernel") else 0.3
        arrays[name] = (scale * rng.normal(size=shape)).astype("f4")
        if name.endswith(("scale", "scale1", "scale2", "var")):
            arrays[name] = np.abs(arrays[name]) + np.float32(0.7)
    tensors = names.write_tensors(
        scheme, {n.partition("/")[2]: x for n, x in arrays.items()}
    )
    if family == "dinov3":  # its files have biases of keys, which its code masks
        for name in [n for n in tensors if n.endswith("attn.qkv.bias")]:
            q, v = np.split(tensors[name], 2)
            tensors[name] = np.concatenate([q, np.full_like(q, 7.0), v])
    if family == "dinov2-plain":  # else its names are timm's
        tensors["mask_token"] = np.zeros((1, 16), "f4")
    return tensors, arrays


def write(path, tensors) -> str:
    """Write a safetensors file."""
    data = st.save({n: np.ascontiguousarray(x) for n, x in tensors.items()})
    path.write_bytes(data)
    return str(path)
