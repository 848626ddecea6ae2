"""A ConvNeXt's parameters under the names that PyTorch libraries give them.

As `torch_vit`: a `Scheme` has the names of one library, and a list of leaves says which
tensor each of our arrays is. `jaxcl.bring` reads it from their names to ours, `--torch`
from ours to timm's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcl.export import encoder, torch_vit

TENSORS = "convnext_torch.safetensors"


class Scheme(NamedTuple):
    """The names of one library.

    {stage} is the number of a stage from 0, {block} that of a block in it; {before} and
    {after} are twice that of a stage, and one more: in torchvision, layers of one list.
    """

    stem: str
    stem_norm: str
    down: str
    down_norm: str
    begin: str  # of the names of a block, which follow
    depthwise: str
    block_norm: str
    fc: tuple[str, str]
    scale: str
    grn: tuple[str, str]  # scale and bias
    norm: str
    dropped: tuple[str, ...]  # beginnings of what the features do not depend on


SCHEMES = {
    "timm_convnext": Scheme(
        stem="stem.0",
        stem_norm="stem.1",
        down="stages.{stage}.downsample.1",
        down_norm="stages.{stage}.downsample.0",
        begin="stages.{stage}.blocks.{block}.",
        depthwise="conv_dw",
        block_norm="norm",
        fc=("mlp.fc1", "mlp.fc2"),
        scale="gamma",
        grn=("mlp.grn.weight", "mlp.grn.bias"),
        norm="head.norm",
        dropped=("head.fc.",),
    ),
    "meta_convnext": Scheme(
        stem="downsample_layers.0.0",
        stem_norm="downsample_layers.0.1",
        down="downsample_layers.{stage}.1",
        down_norm="downsample_layers.{stage}.0",
        begin="stages.{stage}.{block}.",
        depthwise="dwconv",
        block_norm="norm",
        fc=("pwconv1", "pwconv2"),
        scale="gamma",
        grn=("grn.gamma", "grn.beta"),
        norm="norm",
        dropped=("head.", "norms."),  # DINOv3's files have `norm` twice
    ),
    "torchvision_convnext": Scheme(
        stem="features.0.0",
        stem_norm="features.0.1",
        down="features.{before}.1",
        down_norm="features.{before}.0",
        begin="features.{after}.{block}.",
        depthwise="block.0",
        block_norm="block.2",
        fc=("block.3", "block.5"),
        scale="layer_scale",
        grn=("", ""),
        norm="classifier.0",
        dropped=("classifier.2.",),
    ),
    "transformers_convnext": Scheme(
        stem="embeddings.patch_embeddings",
        stem_norm="embeddings.layernorm",
        down="encoder.stages.{stage}.downsampling_layer.1",
        down_norm="encoder.stages.{stage}.downsampling_layer.0",
        begin="encoder.stages.{stage}.layers.{block}.",
        depthwise="dwconv",
        block_norm="layernorm",
        fc=("pwconv1", "pwconv2"),
        scale="layer_scale_parameter",
        grn=("grn.weight", "grn.bias"),
        norm="layernorm",
        dropped=("classifier.",),
    ),
    "transformers_dinov3_convnext": Scheme(
        stem="stages.0.downsample_layers.0",
        stem_norm="stages.0.downsample_layers.1",
        down="stages.{stage}.downsample_layers.1",
        down_norm="stages.{stage}.downsample_layers.0",
        begin="stages.{stage}.layers.{block}.",
        depthwise="depthwise_conv",
        block_norm="layer_norm",
        fc=("pointwise_conv1", "pointwise_conv2"),
        scale="gamma",
        grn=("", ""),
        norm="layer_norm",
        dropped=(),
    ),
}


def block_name(scheme: Scheme, stage: int, block: int) -> str:
    """What the names of a block begin with, numbers from 0."""
    return _numbered(scheme.begin, stage, block)


def _numbered(name, stage, block=0) -> str:
    return name.format(stage=stage, block=block, before=2 * stage, after=2 * stage + 1)


def leaves(scheme: Scheme, section: Mapping[str, Any]) -> list[torch_vit.Leaf]:
    """All arrays of a network, by the names of a library.

    Args:
      scheme: of the library.
      section: options of `nets.convnext.convnext`, `depths` among them.
    """
    return [*_leaves(scheme, section)]


def _leaves(scheme, section) -> Iterator[torch_vit.Leaf]:
    yield from _pair("stem", scheme.stem, "conv")
    yield from _pair("stem_norm", scheme.stem_norm)
    for stage, depth in enumerate(section["depths"]):
        ours = f"stage{stage + 1}_"
        if stage:
            yield from _pair(f"{ours}norm", _numbered(scheme.down_norm, stage))
            yield from _pair(f"{ours}down", _numbered(scheme.down, stage), "conv")
        for i in range(depth):
            begin = block_name(scheme, stage, i)
            for leaf in _block(scheme, section):
                yield leaf._replace(
                    ours=f"{ours}{i}/{leaf.ours}", theirs=begin + leaf.theirs
                )
    yield from _pair("norm", scheme.norm)


def _pair(ours, theirs, kind=""):
    """A kernel and its bias; without a kind the scale and bias of a norm."""
    weight = "kernel" if kind else "scale"
    yield torch_vit.Leaf(f"{ours}/{weight}", f"{theirs}.weight", kind or "same")
    yield torch_vit.Leaf(f"{ours}/bias", f"{theirs}.bias")


def _block(scheme, section):
    """The arrays of a block, without its prefix."""
    yield from _pair("depthwise", scheme.depthwise, "conv")
    yield from _pair("norm", scheme.block_norm)
    for number, name in enumerate(scheme.fc, start=1):
        yield from _pair(f"fc{number}", name, "dense")
    if section["layer_scale"] is not None:
        yield torch_vit.Leaf("scale", scheme.scale)
    if section["grn"]:
        for ours, theirs in zip(("scale", "bias"), scheme.grn, strict=True):
            yield torch_vit.Leaf(f"grn/{ours}", theirs)


def check(section: dict) -> None:
    """Refuse what timm has no network for.

    It has four stages; with patches of 2 the first of them halves the map once more,
    with patches of 8 or more the last does not halve it.

    Raises:
      ValueError: naming the field.
    """
    if section["depths"] is not None and len(section["depths"]) != 4:
        raise ValueError(
            f"--torch: config.encoder.depths={section['depths']!r} cannot be "
            "exported to timm; must be of four stages"
        )
    if section["patch"] not in (1, 3, 4, 5, 6, 7):
        raise ValueError(
            f"--torch: config.encoder.patch={section['patch']} cannot be exported "
            "to timm, whose later stages depend on it; must be 1 or 3 to 7"
        )


def _section(section, names) -> dict:
    """A card's section, whose `depths` may be those of its size."""
    blocks = {name.split("/")[0] for name in names}
    stages = [name.partition("_") for name in blocks if name.startswith("stage")]
    numbers = [int(stage[5:]) for stage, _, own in stages if own.isdecimal()]
    depths = tuple(numbers.count(n + 1) for n in range(max(numbers)))
    return {**section, "depths": depths}


def key_map(names: Sequence[str], section: dict) -> dict[str, str]:
    """Timm's name of each tensor -> our name in the exported file.

    Args:
      names: our names, as "params/stage1_0/norm/scale".
      section: "encoder" of a card.
    """
    written = _section(section, [name.partition("/")[2] for name in names])
    found = leaves(SCHEMES["timm_convnext"], written)
    return {leaf.theirs: f"params/{leaf.ours}" for leaf in found}


def torch_state(source: Any) -> dict[str, np.ndarray]:
    """The state dict of timm's ConvNeXt without a classifier, as NumPy arrays.

    That is `timm.models.convnext.ConvNeXt` with `conv_mlp=False` and `num_classes=0`.

    Args:
      source: a `jaxcl.export.encoder.Encoder`, or the folder of one.

    Raises:
      ValueError: timm has no such network; the folder cannot be read.
    """
    network = source
    if not isinstance(source, encoder.Encoder):
        network = encoder.load_encoder(source)
    check(network.card["encoder"])
    flat = encoder.flat(network.params, network.stats)
    arrays = {name.partition("/")[2]: leaf for name, leaf in flat.items()}
    written = _section(network.card["encoder"], arrays)
    found = leaves(SCHEMES["timm_convnext"], written)
    return torch_vit.theirs_of(found, arrays)
