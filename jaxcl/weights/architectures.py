"""Find a published network, such as DINOv2, by the names and shapes of its tensors.

Names show which library wrote a state dict, shapes show most of the network. A row of
architectures.json has the rest: attention heads by size, the epsilon of the norms, and
the preparation of images.
"""

import itertools
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxcl import core
from jaxcl.nets import resnet
from jaxcl.weights import names, wrappers

# Mean and deviation of ImageNet, unless a row of architectures.json has others.
_MOMENTS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


class Architecture(NamedTuple):
    """Facts about published networks that are not in the tensors."""

    kind: str  # "vit", "resnet" or "convnext", as in nets
    # How images are prepared: resize the shorter side, cut the middle, normalise.
    # "size", "resize", "interpolation", "mean", "std"; None: the user says
    images: dict[str, Any] | None
    epsilon: float | None = None  # of a ViT's norms; None: the user says
    heads: Mapping[tuple[int, int], int] = {}  # (width, blocks) -> heads
    licence: str = ""  # licence of the weights, if all of a kind have the same


def _load_architectures() -> dict[str, Architecture]:
    """Read architectures.json, whose heads are listed by "WIDTHxBLOCKS"."""
    path, architectures = pathlib.Path(__file__).with_name("architectures.json"), {}
    for name, row in json.loads(path.read_text()).items():
        images = _MOMENTS | row["images"] if "images" in row else None
        heads = row.get("heads", {}).items()
        heads = {tuple(map(int, size.split("x"))): count for size, count in heads}
        architectures[name] = Architecture(**row | {"images": images, "heads": heads})
    return architectures


ARCHITECTURES = _load_architectures()
# Tensors that are no weights.
COUNTERS = (
    ".num_batches_tracked",
    ".bias_mask",
    ".relative_position_index",
    "n_averaged",
)


# Form of a published name -> the architecture of its kind; the first that fits counts.
_PUBLISHED = {
    r".*dinov3.*convnext.*|convnext.*dinov3.*": "dinov3_convnext",
    r".*dinov3.*": "dinov3",
    r".*dinov2.*": "dinov2",
    r"(.*[^a-z])?dino([^a-z].*)?": "dino",
    r"(.*[^a-z])?deit3([^a-z].*)?": "deit3",
    r"(.*[^a-z])?deit([^a-z].*)?": "deit",
    r"(.*[^a-z])?mae([^a-z].*)?": "mae",
    r"(.*[^a-z])?moco-?_?v3([^a-z].*)?": "mocov3",
    r"vit_[a-z]+_patch\d+_\d+(\.(augreg|orig_in).*)?|vit-[a-z]+-patch\d+-\d+": "augreg",
    r"convnext(v2)?[-_.].*": "convnext",
    r"resnet-?(18|34|50|101|152)(\..*)?": "resnet",
}


def find_family(name: str) -> str:
    """Find the architecture of a network by the name that its publisher gave it.

    Args:
      name: name of an architecture; or of a network in timm, torchvision or a hub, as
        "vit_tiny_patch16_224", "dinov2_vits14", "facebook/deit-tiny-patch16-224".

    Raises:
      Refused: no form of a name fits.
    """
    if name not in ARCHITECTURES:
        short = name.lower().rpartition("/")[2]
        for form, family in _PUBLISHED.items():
            if re.fullmatch(form, short):
                return family
    core.check_choice("--architecture", name, tuple(ARCHITECTURES))
    return name


def look_up(name: str) -> Architecture:
    """Find an architecture; Refused names the nearest to a wrong name.

    Args:
      name: as for `find_family`; one that ends in the size of the images, such as
        "vit_base_patch16_384", sets it.
    """
    entry = ARCHITECTURES[find_family(name)]
    size = re.search(r"patch\d+[-_](\d+)(\.|$)", name)
    if entry.images is None or size is None or size[1] == str(entry.images["size"]):
        return entry
    sizes = {"size": int(size[1]), "resize": int(size[1])}  # timm crops nothing above
    return entry._replace(images=entry.images | sizes)


def pick_network(
    tensors: Mapping[str, np.ndarray], prefix: str | None
) -> tuple[dict, str, int]:
    """Pick the tensors of one network.

    Args:
      tensors: name -> array, all tensors of a file.
      prefix: start of the network's names; None: it is searched for.

    Returns:
      The tensors by names without wrappers and prefix; the prefix; the number of
      others.

    Raises:
      Refused: there is no known network, or there are several.
    """
    tensors, begins = wrappers.strip_prefixes(tensors), []
    for stem, sibling in names.STEMS.items():
        for name in tensors:
            begin = name[: len(name) - len(stem)]
            inner = sibling is None or f"{begin}{sibling}" in tensors
            if name.endswith(stem) and begin[-1:] in ("", ".") and inner:
                begins.append(begin)
    if not begins:
        examples = ", ".join(sorted(tensors)[:10])
        raise wrappers.RefusedTensors(
            f"the file holds no known ResNet, ViT or ConvNeXt, but {examples}"
        )
    if prefix is not None:
        start = wrappers.strip_name(prefix.removesuffix("."))
        start = f"{start}." if start else ""
        if start not in begins:
            raise wrappers.RefusedTensors(
                f"--prefix={prefix}: no tensor name starts with it"
            )
        begins = [start]
    if len(begins) > 1:
        shown = ", ".join(repr(begin.rstrip(".")) for begin in sorted(begins))
        raise wrappers.RefusedTensors(
            f"the file holds {len(begins)} networks; choose by --prefix one of {shown}"
        )
    begin = begins[0]
    network = {n[len(begin) :]: x for n, x in tensors.items() if n.startswith(begin)}
    return network, begin, len(tensors) - len(network)


def find_scheme(tensors: Mapping[str, Any]) -> str:
    """Find the library that named a network's tensors, a key of `names.SCHEMES`."""
    return next(scheme for scheme, *signs in names.SIGNS if {*signs} <= tensors.keys())


class _Tensors:
    """The tensors of a network, looked up by our names."""

    def __init__(self, tensors, scheme: str):
        self.tensors, self.scheme = tensors, names.SCHEMES[scheme]

    def name(self, array: str) -> str:
        """Return the library's name of a tensor; "" if there is none."""
        leaf = names.find_tensor(self.scheme, array)
        return "" if leaf is None else leaf.tensor

    def has(self, array: str) -> bool:
        return self.name(array) in self.tensors

    def shape(self, array: str, axes: int) -> tuple[int, ...]:
        name = self.name(array)
        if name not in self.tensors:
            raise wrappers.RefusedTensors(f"the file has no {name}")
        shape = self.tensors[name].shape
        if len(shape) != axes:
            raise wrappers.RefusedTensors(
                f"{name} has the shape {list(shape)}, must have {axes} axes"
            )
        return shape

    def stem(self) -> tuple[int, int, int]:
        """Return the width, channels and side of the first kernel."""
        first = {"vit": "patch", "convnext": "stem", "resnet": "conv1"}
        first = first[self.scheme.kind]
        width, channels, side, across = self.shape(f"{first}/kernel", 4)
        if side != across:
            raise wrappers.RefusedTensors(
                f"its {first} is {side} x {across}; must be square"
            )
        return width, channels, side


def channels(tensors: Mapping[str, np.ndarray], scheme: str) -> int:
    """Count the channels of the images that a network takes."""
    return _Tensors(tensors, scheme).stem()[1]


def vit_section(
    tensors: Mapping[str, np.ndarray], scheme: str, architecture: Architecture
) -> dict:
    """Find the options of `nets.vit.vit` that tensors show, all but heads and epsilon.

    Args:
      tensors: arrays by the names of a library.
      scheme: a key of `names.SCHEMES`.
      architecture: facts that the tensors do not show.

    Raises:
      Refused: a needed tensor is missing or has a wrong shape.
    """
    network = _Tensors(tensors, scheme)
    for name in ("dist_token", "fc_norm.weight", "cls_norm.weight"):
        if name in tensors:
            raise wrappers.RefusedTensors(
                f"the file has {name}, which no known network has"
            )
    width, _, patch = network.stem()
    layers = _count_blocks(network)
    rows, side = _position_grid(network, width)
    if not side and architecture.images is None:
        raise wrappers.RefusedTensors(
            f"the file has no {network.name('positions')}; for rotary positions take "
            "--architecture=dinov3"
        )
    registers = tensors.get(network.name("registers"))
    section = {
        "width": width,
        "layers": layers,
        **_mlp_kind(network),
        "patch": patch,
        "image_size": side * patch if side else architecture.images["size"],
        "registers": 0 if registers is None else registers.size // width,
        "positions": "learned" if side else "rotary",
        "class_position": rows == side * side + 1,
        "layer_scale": 1.0 if network.has("block_0/scale1") else None,
        "qkv_bias": _find_biases(network, scheme),
    }
    section["resize"] = _resize_rule(scheme, section["registers"])
    return section


def _count_blocks(network) -> int:
    begin, _, end = network.name("block_7/norm1/scale").partition("7")
    pattern = re.compile(f"{re.escape(begin)}(\\d+){re.escape(end[0])}")
    numbers = {int(m[1]) for name in network.tensors if (m := pattern.match(name))}
    count = max(numbers, default=0) + 1
    absent = sorted({*range(count)} - numbers)
    if absent:
        raise wrappers.RefusedTensors(
            f"it has no {begin}{absent[0]}.*, of {count} blocks"
        )
    return count


def _position_grid(network, width) -> tuple[int, int]:
    """Count the learned positions, and the side of their grid; 0: there are none."""
    if not network.has("positions"):
        return 0, 0
    _, rows, length = network.shape("positions", 3)
    for patches in (rows, rows - 1):
        side = round(max(patches, 0) ** 0.5)
        if side and side * side == patches and length == width:
            return rows, side
    raise wrappers.RefusedTensors(
        f"{network.name('positions')} has the shape {[1, rows, length]}: must have as "
        f"many rows as a square grid has patches, or one more, each of {width} numbers"
    )


def _mlp_kind(network) -> dict:
    """Find the kind of the MLP, and its hidden units."""
    block = "block_0/mlp"
    down = f"{block}/down" if network.has(f"{block}/down/kernel") else f"{block}/fc2"
    hidden = network.shape(f"{down}/kernel", 2)[1]
    gated = network.has(f"{block}/gate/kernel")
    if gated:  # timm has gate and up in one tensor, which plain MLPs have, too
        leaf = names.find_tensor(network.scheme, f"{block}/gate/kernel")
        gated = len(network.tensors[leaf.tensor]) == leaf.parts * hidden
    return {"mlp": "swiglu" if gated else "gelu", "hidden": hidden}


def _find_biases(network, scheme) -> str:
    """Find which of queries, keys and values have a bias."""
    query, key = (network.has(f"block_0/attention/{x}/bias") for x in ("query", "key"))
    # DINOv3's files have one of keys, too, which its code masks: it is not read.
    if query and key and scheme != "dinov3":
        return "all"
    return "query_value" if query else "none"


def _resize_rule(scheme, registers) -> str:
    """Name the library's way to resize positions, see `nets.positions.Resize`."""
    if scheme == "dinov2":
        return "antialias" if registers else "offset"
    if scheme == "transformers_dinov2":
        return "antialias" if registers else "plain"
    return "plain" if scheme == "transformers" else "antialias"


def resnet_section(tensors: Mapping[str, np.ndarray], stem_padding: int | None) -> dict:
    """Find the options of `nets.resnet.resnet` that a state dict shows.

    Args:
      tensors: arrays by torchvision's names.
      stem_padding: padding of a 3 x 3 first convolution; the tensors do not show it.

    Raises:
      Refused: the ResNet is of no known kind, or the padding is not known.
    """
    width, _, kernel = _Tensors(tensors, "torchvision").stem()
    named = [re.match(r"layer(\d)\.(\d+)\.", name) for name in tensors]
    blocks = {(int(m[1]), int(m[2])) for m in named if m}
    sizes = tuple(sum(s == stage for s, _ in blocks) for stage in (1, 2, 3, 4))
    kind = "bottleneck" if "layer1.0.conv3.weight" in tensors else "basic"
    depths = {shape: depth for depth, shape in resnet.DEPTHS.items()}
    if (sizes, kind) not in depths or kernel not in (3, 7):
        allowed = ", ".join(map(str, resnet.DEPTHS))
        raise wrappers.RefusedTensors(
            f"it is a ResNet of {sizes} {kind} blocks with a first convolution of "
            f"{kernel} x {kernel}; known are depths {allowed} with 3 x 3 or 7 x 7"
        )
    if kernel == 3 and stem_padding is None:
        raise wrappers.RefusedTensors(
            "the first convolution is 3 x 3, and no tensor shows its padding: give "
            "--stem-padding, 1 in most code, 2 in solo-learn, CaSSLe and PNR. No max "
            "pool may follow it"
        )
    return {
        "depth": depths[sizes, kind],
        "width": width,
        "stem": "imagenet" if kernel == 7 else "cifar",
        "stem_padding": 1 if stem_padding is None else stem_padding,
    }


def convnext_section(tensors: Mapping[str, np.ndarray], scheme: str) -> dict:
    """Find the options of `nets.convnext.convnext` that a state dict shows.

    Args:
      tensors: arrays by the names of a library.
      scheme: a key of `names.SCHEMES`.

    Raises:
      Refused: the ConvNeXt is of no known kind.
    """
    network = _Tensors(tensors, scheme)
    width, _, patch = network.stem()

    def stage_depth(stage):
        has = (network.has(f"stage{stage}_{i}/depthwise/kernel") for i in range(1000))
        return len([*itertools.takewhile(bool, has)])

    depths = (*itertools.takewhile(bool, map(stage_depth, itertools.count(1))),)
    if not depths:
        raise wrappers.RefusedTensors(
            f"it has no {network.name('stage1_0/depthwise/kernel')}"
        )
    return {
        "depths": depths,
        "width": width,
        "patch": patch,
        "layer_scale": 1e-6 if network.has("stage1_0/scale") else None,
        "grn": network.has("stage1_0/grn/scale"),
    }


def fill_arrays(
    tensors: Mapping[str, np.ndarray], scheme: str, shapes: Mapping[str, tuple]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Fill the arrays of our network from a library's tensors.

    Args:
      tensors: arrays by the names of a library.
      scheme: a key of `names.SCHEMES`.
      shapes: shape of each of our arrays, by names such as "params/norm/scale".

    Returns:
      Our arrays, and the names of tensors that the features do not depend on.

    Raises:
      Refused: tensors are missing, of another shape, or unknown; it names the first.
    """
    mapping = names.SCHEMES[scheme]
    places = {x: names.find_tensor(mapping, x.partition("/")[2]) for x in shapes}
    needed = {leaf.tensor for leaf in places.values()}
    missing = sorted(needed - tensors.keys())
    ignored = (*mapping.dropped,)
    unused = [
        name
        for name, x in tensors.items()
        if name not in needed and x.size and not name.startswith(ignored)
        if not name.endswith(COUNTERS)
    ]
    if missing or unused:
        faults = [f"it lacks {_name_some(missing)}"] if missing else []
        faults += [f"it also has {_name_some(unused)}"] if unused else []
        raise wrappers.RefusedTensors(
            f"tensors do not fit the network: {'; '.join(faults)}"
        )
    arrays = {}
    for array, leaf in places.items():
        path, x = array.partition("/")[2], tensors[leaf.tensor]
        try:
            arrays[array] = names.read_array(leaf, path, x, shapes[array])
        except ValueError as error:
            raise wrappers.RefusedTensors(
                f"tensors do not fit the network: {error}"
            ) from error
    return arrays, sorted(tensors.keys() - needed)


def _name_some(items) -> str:
    shown = ", ".join(items[:3])
    return f"{shown} and {len(items) - 3} more" if len(items) > 3 else shown
