"""Which network a state dict is of: from its names and shapes, and what those lack.

Names say which library wrote it, shapes most of the network. What no tensor says is
here, by the name of the architecture: the heads of the attention, the epsilon of the
norms, and how the images were prepared.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcl import core
from jaxcl.export import encoder, torch_convnext, torch_resnet, torch_vit
from jaxcl.nets import resnet

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALVES = (0.5,) * 3, (0.5,) * 3
PLAIN = (0.0,) * 3, (1.0,) * 3  # pixels from 0 to 1, as they are


class Images(NamedTuple):
    """How images are prepared: the shorter side resized, the middle cut, normalised."""

    size: int
    resize: int
    interpolation: str
    moments: tuple


class Architecture(NamedTuple):
    """What the name of an architecture says, beyond the tensors."""

    kind: str  # of nets: "vit", "resnet" or "convnext"
    images: Images | None  # None: not known, and to be given
    epsilon: float = 1e-6
    heads: tuple[tuple[int, int], ...] = ()  # (width, heads) other than width / 64
    licence: str = ""  # of the weights, where all of a kind have one


def _vit(size, resize, moments, **options):
    return Architecture("vit", Images(size, resize, "bicubic", moments), **options)


ARCHITECTURES = {
    "vit": Architecture("vit", None),
    "augreg": _vit(224, 248, HALVES, licence="Apache-2.0"),
    "deit": _vit(224, 248, IMAGENET),
    "deit3": _vit(224, 248, IMAGENET),
    "dino": _vit(224, 248, IMAGENET),
    "mae": _vit(224, 248, IMAGENET, heads=((1280, 16),), licence="CC-BY-NC 4.0"),
    "mocov3": Architecture(
        "vit",
        Images(224, 256, "bilinear", IMAGENET),
        heads=((384, 12),),
        licence="CC-BY-NC 4.0",
    ),
    "dinov2": _vit(224, 256, IMAGENET, licence="Apache-2.0"),
    "dinov3": Architecture(
        "vit",
        Images(256, 256, "bilinear", IMAGENET),
        epsilon=1e-5,
        heads=((4096, 32),),
        licence="DINOv3 License",
    ),
    "convnext": Architecture("convnext", Images(224, 256, "bicubic", IMAGENET)),
    "dinov3_convnext": Architecture(
        "convnext", Images(256, 256, "bilinear", IMAGENET), licence="DINOv3 License"
    ),
    "resnet": Architecture("resnet", Images(224, 256, "bilinear", IMAGENET)),
    "resnet_plain": Architecture("resnet", Images(224, 256, "bicubic", PLAIN)),
}
# A tensor that every network of a kind has, once; and where its name is too common,
# another beside it.
_STEMS = {
    "patch_embed.proj.weight": None,
    "embeddings.patch_embeddings.projection.weight": None,
    "embeddings.patch_embeddings.weight": None,
    "conv1.weight": "layer1.0.conv1.weight",
    "stem.0.weight": "stages.0.blocks.0.conv_dw.weight",
    "downsample_layers.0.0.weight": None,
    "features.0.0.weight": "features.1.0.layer_scale",
    "stages.0.downsample_layers.0.weight": "layer_norm.weight",
}


class Refused(ValueError):
    """A state dict is not of the architecture, or not whole."""


def within(tensors: Mapping[str, np.ndarray], prefix: str | None) -> tuple[dict, str]:
    """The tensors of one network, by names without the prefix; and the prefix.

    Args:
      tensors: of a whole file.
      prefix: what the names of the network begin with; None: it is found.

    Raises:
      Refused: there is no network known here, or there are several.
    """
    tensors, found = _without_model(tensors), []
    for stem, beside in _STEMS.items():
        for name in tensors:
            begin = name[: len(name) - len(stem)]
            inner = beside is None or f"{begin}{beside}" in tensors
            if name.endswith(stem) and begin[-1:] in ("", ".") and inner:
                found.append(begin)
    if prefix is not None:
        asked = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
        found = [begin for begin in found if begin == asked] or [None]
    if found == [None]:
        raise Refused(f"--prefix={prefix}: no network begins so")
    if not found:
        some = ", ".join(sorted(tensors)[:10])
        raise Refused(
            f"it holds no ResNet, ViT or ConvNeXt that is known here, but {some}"
        )
    if len(found) > 1:
        names = ", ".join(repr(begin.rstrip(".")) for begin in sorted(found))
        raise Refused(f"it holds {len(found)} networks; --prefix names one of {names}")
    begin = found[0]
    own = {n[len(begin) :]: x for n, x in tensors.items() if n.startswith(begin)}
    return own, begin


def _without_model(tensors) -> dict:
    """Names of DINOv3's ConvNeXt as its files have them.

    Later releases of transformers put a "model." before all but the last norm.
    """
    return {
        re.sub(r"(^|\.)model\.(stages\.\d+\.(downsample_)?layers\.)", r"\1\2", name): x
        for name, x in tensors.items()
    }


_CONVNEXTS = {
    "stem.0.weight": "timm_convnext",
    "downsample_layers.0.0.weight": "meta_convnext",
    "features.0.0.weight": "torchvision_convnext",
    "stages.0.downsample_layers.0.weight": "transformers_dinov3_convnext",
}


def kind_of(scheme: str) -> str:
    """The kind of network that a scheme has names for."""
    if scheme in torch_convnext.SCHEMES:
        return "convnext"
    return "resnet" if scheme == "torchvision" else "vit"


def scheme_of(names) -> str:
    """The library whose names these are.

    A key of `torch_vit.SCHEMES` or of `torch_convnext.SCHEMES`; or "torchvision", for
    ResNets.
    """
    for stem, scheme in _CONVNEXTS.items():
        if stem in names:
            return scheme
    if "encoder.stages.0.layers.0.dwconv.weight" in names:
        return "transformers_convnext"
    if "storage_tokens" in names:
        return "dinov3"
    if "embeddings.patch_embeddings.weight" in names:
        return "transformers_dinov3"
    if "embeddings.patch_embeddings.projection.weight" in names:
        scaled = any("layer_scale1" in name for name in names)
        return "transformers_dinov2" if scaled else "transformers"
    if "patch_embed.proj.weight" not in names:
        return "torchvision"
    if "register_tokens" in names or "mask_token" in names:
        return "timm" if "decoder_embed.weight" in names else "dinov2"
    if "blocks.0.gamma_1" in names:
        return "deit3" if "pos_embed" in names else "timm_dinov3"
    return "timm"


def vit_section(
    tensors: Mapping[str, np.ndarray],
    name: str,
    architecture: Architecture,
    given: Mapping[str, Any],
) -> dict:
    """The options of `nets.vit.vit` that a state dict shows.

    Args:
      tensors: by the names of a library.
      name: of its scheme.
      architecture: what the tensors do not say.
      given: options that the user or a config.json states.

    Raises:
      Refused: a tensor that says it is missing or of a wrong shape.
    """
    scheme = torch_vit.SCHEMES[name]
    for odd in ("dist_token", "fc_norm.weight", "cls_norm.weight"):
        if odd in tensors:
            raise Refused(f"it has {odd}, which no network here has")
    width, _, patch, across = _shape(tensors, f"{scheme.patch}.weight", 4)
    if patch != across:
        raise Refused(f"its patches are {patch} x {across}; must be square")
    begin = re.escape(scheme.block).replace(r"\{\}", r"(\d+)")
    numbers = {int(m[1]) for n in tensors if (m := re.match(begin, n))}
    layers = len(numbers)
    if numbers != {*range(layers)} or not layers:
        absent = sorted({*range(max(numbers, default=0) + 1)} - numbers)
        lacks = scheme.block.format(absent[0])
        raise Refused(f"it has no {lacks}*, of {max(numbers, default=0) + 1} blocks")
    first = scheme.block.format(0)
    rows, side = _table(tensors, scheme, width)
    if not side and architecture.images is None:
        raise Refused(
            f"it has no {scheme.table}; rotary positions go with --architecture=dinov3"
        )
    section = {
        "width": width,
        "layers": layers,
        "heads": dict(architecture.heads).get(width, max(width // 64, 1)),
        **_mlp(tensors, scheme, first),
        "patch": patch,
        "image_size": side * patch if side else architecture.images.size,
        "registers": _registers(tensors, scheme, width),
        "positions": "learned" if side else "rotary",
        "class_position": rows == side * side + 1,
        "layer_scale": 1.0 if f"{first}{scheme.scales[0]}" in tensors else None,
        "qkv_bias": _biased(tensors, scheme, first),
        "epsilon": 1e-12 if name == "transformers" else architecture.epsilon,
    }
    section["resize"] = _rule(name, section["registers"])
    return section | given


def _shape(tensors, name, axes) -> tuple[int, ...]:
    if name not in tensors:
        raise Refused(f"it has no {name}")
    shape = tensors[name].shape
    if len(shape) != axes:
        raise Refused(f"{name} has the shape {list(shape)}, must have {axes} axes")
    return shape


def _table(tensors, scheme, width) -> tuple[int, int]:
    """Rows of the learned positions, and the side of their grid; 0: there are none."""
    if scheme.table not in tensors:
        return 0, 0
    _, rows, own = _shape(tensors, scheme.table, 3)
    for patches in (rows, rows - 1):
        side = round(max(patches, 0) ** 0.5)
        if side and side * side == patches and own == width:
            return rows, side
    raise Refused(
        f"{scheme.table} has the shape {[1, rows, own]}: must have as many rows as a "
        f"square grid has patches, or one more, each of {width} numbers"
    )


def _registers(tensors, scheme, width) -> int:
    found = tensors.get(scheme.registers)
    return 0 if found is None else found.size // width


def _mlp(tensors, scheme, first) -> dict:
    """The kind of the MLP, and its hidden units."""
    down = _shape(tensors, f"{first}{_down(tensors, scheme, first)}.weight", 2)
    fused = tensors.get(f"{first}{scheme.gated}.weight") if scheme.gated else None
    gated = fused is not None and len(fused) == 2 * down[1]
    if not scheme.gated or scheme.gated != scheme.fc[0]:
        own = scheme.gated or scheme.gate_up[0]
        gated = bool(own) and f"{first}{own}.weight" in tensors
    return {"mlp": "swiglu" if gated else "gelu", "hidden": down[1]}


def _down(tensors, scheme, first) -> str:
    """The last layer of the MLP, of either kind."""
    there = f"{first}{scheme.down}.weight" in tensors
    return scheme.down if there else scheme.fc[1]


def _biased(tensors, scheme, first) -> str:
    """Which of queries, keys and values have a bias."""
    if scheme.biases:
        there = f"{first}{scheme.biases.format('q')}" in tensors
        return "query_value" if there else "none"
    if scheme.qkv:
        if f"{first}{scheme.qkv}.bias" not in tensors:
            return "none"
        # DINOv3's files have one of keys, too, which its code masks: it is not read.
        rotary = scheme is torch_vit.SCHEMES["dinov3"]
        return "query_value" if rotary else "all"
    query, key = (
        f"{first}{scheme.heads.format(x[0] if scheme.letters else x)}.bias" in tensors
        for x in ("query", "key")
    )
    return "all" if key else "query_value" if query else "none"


def _rule(name, registers) -> str:
    """How the library resizes positions, see `nets.positions.Resize`."""
    if name == "dinov2":
        return "antialias" if registers else "offset"
    if name == "transformers_dinov2":
        return "antialias" if registers else "plain"
    return "plain" if name == "transformers" else "antialias"


def resnet_section(tensors: Mapping[str, np.ndarray], stem_padding: int | None) -> dict:
    """The options of `nets.resnet.resnet` that a state dict shows.

    Args:
      tensors: by torchvision's names.
      stem_padding: of a first convolution of 3 x 3; no tensor says it.

    Raises:
      Refused: it is no ResNet that is known here; the padding is not known.
    """
    width, _, kernel, _ = _shape(tensors, "conv1.weight", 4)
    _shape(tensors, "layer1.0.conv1.weight", 4)
    named = [re.match(r"layer(\d)\.(\d+)\.", name) for name in tensors]
    blocks = {(int(m[1]), int(m[2])) for m in named if m}
    sizes = tuple(sum(s == stage for s, _ in blocks) for stage in (1, 2, 3, 4))
    kind = "bottleneck" if "layer1.0.conv3.weight" in tensors else "basic"
    depths = {known: depth for depth, known in resnet.DEPTHS.items()}
    if (sizes, kind) not in depths or kernel not in (3, 7):
        known = ", ".join(map(str, resnet.DEPTHS))
        raise Refused(
            f"it is a ResNet of {sizes} {kind} blocks with a first convolution of "
            f"{kernel} x {kernel}; known are depths {known} with 3 x 3 or 7 x 7"
        )
    found = {"depth": depths[sizes, kind], "width": width}
    if kernel == 7:
        padding = 1 if stem_padding is None else stem_padding
        return found | {"stem": "imagenet", "stem_padding": padding}
    if stem_padding is None:
        raise Refused(
            "its first convolution is 3 x 3, and no tensor says how many pixels pad "
            "the images on each side; --stem-padding says so: 1 in most code, 2 in "
            "that of solo-learn, CaSSLe and PNR"
        )
    return found | {"stem": "cifar", "stem_padding": stem_padding}


def convnext_section(tensors: Mapping[str, np.ndarray], name: str) -> dict:
    """The options of `nets.convnext.convnext` that a state dict shows.

    Args:
      tensors: by the names of a library.
      name: of its scheme.

    Raises:
      Refused: it is no ConvNeXt that is known here.
    """
    scheme = torch_convnext.SCHEMES[name]
    width, _, patch, across = _shape(tensors, stem(name), 4)
    if patch != across:
        raise Refused(f"its stem is {patch} x {across}; must be square")

    def depth(stage):
        blocks = (torch_convnext.block_name(scheme, stage, i) for i in range(1000))
        has = (f"{begin}{scheme.depthwise}.weight" in tensors for begin in blocks)
        return len([*itertools.takewhile(bool, has)])

    depths = (*itertools.takewhile(bool, map(depth, itertools.count())),)
    first = torch_convnext.block_name(scheme, 0, 0)
    if not depths:
        raise Refused(f"it has no {first}*")
    return {
        "depths": depths,
        "width": width,
        "patch": patch,
        "layer_scale": 1e-6 if f"{first}{scheme.scale}" in tensors else None,
        "grn": bool(scheme.grn[0]) and f"{first}{scheme.grn[0]}" in tensors,
    }


def stem(name: str) -> str:
    """The name of the first kernel of a scheme."""
    if name == "torchvision":
        return "conv1.weight"
    if name in torch_convnext.SCHEMES:
        return f"{torch_convnext.SCHEMES[name].stem}.weight"
    return f"{torch_vit.SCHEMES[name].patch}.weight"


def _like(section, size, channels):
    """Names and shapes of the leaves of the network that a card's section describes."""
    card = {"kind": "images", "size": size, "channels": channels}
    module = encoder.module_of(section)
    shapes = jax.eval_shape(module.init, jax.random.key(0), encoder.blank(card))
    trees = {"params": shapes["params"], "stats": shapes.get("batch_stats", {})}
    leaves, _ = jax.tree_util.tree_flatten_with_path(trees)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}


def filled(
    tensors: Mapping[str, np.ndarray], name: str, section: dict, size: int
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Our leaves, and the names of tensors that the features do not depend on.

    Args:
      tensors: by the names of a library.
      name: of its scheme.
      section: "encoder" of a card.
      size: of images, pixels of a side.

    Raises:
      Refused: tensors are missing, of another shape, or unknown; it names the first.
    """
    like = _like(section, size, tensors[stem(name)].shape[1])
    if name == "torchvision":
        pairs = [
            torch_vit.Leaf(ours, theirs, "conv" if ours.endswith("kernel") else "same")
            for theirs, ours in torch_resnet.key_map(like).items()
            if ours is not None
        ]
        counted = [t for t, ours in torch_resnet.key_map(like).items() if ours is None]
        dropped = ("fc.", *counted)
    else:
        if name in torch_convnext.SCHEMES:
            convnext = torch_convnext.SCHEMES[name]
            found = torch_convnext.leaves(convnext, section)
            dropped = convnext.dropped
        else:
            vit = torch_vit.SCHEMES[name]
            found = torch_vit.leaves(vit, section, section["layers"])
            dropped = vit.dropped
        pairs = [leaf._replace(ours=f"params/{leaf.ours}") for leaf in found]
    needed = {leaf.theirs for leaf in pairs}
    missing = sorted(needed - tensors.keys())
    more = [
        n
        for n, x in tensors.items()
        if n not in needed and x.size and not _is_dropped(n, dropped)
    ]
    if missing or more:
        said = [f"it lacks {_some(missing)}"] if missing else []
        said += [f"it also has {_some(more)}"] if more else []
        raise Refused(f"it is not of this network: {'; '.join(said)}")
    leaves = {}
    for leaf in pairs:
        try:
            leaves[leaf.ours] = torch_vit.ours_of(
                leaf, tensors[leaf.theirs], like[leaf.ours]
            )
        except ValueError as error:
            raise Refused(f"it is not of this network: {error}") from error
    assert leaves.keys() == like.keys()
    return leaves, sorted(tensors.keys() - needed)


# Tensors that are no weights.
COUNTERS = (".num_batches_tracked", ".bias_mask", ".relative_position_index")


def _is_dropped(name, beginnings) -> bool:
    return name.startswith(tuple(beginnings)) or name.endswith(COUNTERS)


def _some(names) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def get(name: str) -> Architecture:
    """The architecture of that name; a ValueError names the nearest to a wrong one."""
    core.check_choice("--architecture", name, tuple(ARCHITECTURES))
    return ARCHITECTURES[name]
