"""A ResNet's parameters under torchvision's names, for PyTorch."""

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from jaxcl.export import encoder

TENSORS = "resnet_torch.safetensors"
# Our name -> torchvision's, for a batch norm.
_NORM = {
    "params/{}/scale": "weight",
    "params/{}/bias": "bias",
    "stats/{}/mean": "running_mean",
    "stats/{}/var": "running_var",
}


def check(section: dict) -> None:
    """Refuse an encoder that is no ResNet of torchvision.

    Args:
      section: "encoder" of a card.

    Raises:
      ValueError: naming the field.
    """
    if section["name"] != "resnet":
        raise ValueError(
            f"--torch: config.encoder.name={section['name']!r} cannot be "
            "exported to torchvision; must be 'resnet'"
        )
    if section["padding"] != "torch":
        raise ValueError(
            f"--torch: config.encoder.padding={section['padding']!r} pads windows of "
            "stride 2 as PyTorch does not; must be 'torch'"
        )


def key_map(
    names: Collection[str], section: dict | None = None
) -> dict[str, str | None]:
    """Torchvision's name of each tensor -> our name in the exported file.

    Args:
      names: our names, such as "params/layer1_0/conv1/kernel".
      section: "encoder" of a card; of a ResNet the names say all.

    Returns:
      The names; None for a tensor that only PyTorch has, the number of batches that a
      batch norm has seen.
    """
    modules, names_of = dict.fromkeys(n.rpartition("/")[0] for n in names), {}
    for module in sorted({name.partition("/")[2] for name in modules}):
        theirs = _theirs(module)
        if f"params/{module}/kernel" in names:
            names_of[f"{theirs}.weight"] = f"params/{module}/kernel"
            continue
        for ours, last in _NORM.items():
            names_of[f"{theirs}.{last}"] = ours.format(module)
        names_of[f"{theirs}.num_batches_tracked"] = None
    return names_of


def _theirs(module: str) -> str:
    """`layer1_0/downsample_bn` -> `layer1.0.downsample.1`."""
    name = re.sub(r"^layer(\d+)_(\d+)/", r"layer\1.\2.", module)
    name = re.sub(r"downsample_conv$", "downsample.0", name)
    return re.sub(r"downsample_bn$", "downsample.1", name)


def torch_state(source: Any) -> dict[str, np.ndarray]:
    """The state dict of torchvision's ResNet without `fc`, as NumPy arrays.

    Args:
      source: a `jaxcl.export.encoder.Encoder`, or the folder of one.

    Returns:
      name -> array; kernels are OIHW, and num_batches_tracked is 0.

    Raises:
      ValueError: the encoder is no ResNet of torchvision; the folder cannot be read.
    """
    network = source
    if not isinstance(source, encoder.Encoder):
        network = encoder.load_encoder(source)
    check(network.card["encoder"])
    leaves = encoder.flat(network.params, network.stats)
    state = {}
    for theirs, ours in key_map(leaves).items():
        leaf = np.zeros((), np.int64) if ours is None else leaves[ours]
        if leaf.ndim == 4:  # safetensors saves the memory as it is: make it contiguous
            leaf = np.ascontiguousarray(leaf.transpose(3, 2, 0, 1))
        state[theirs] = leaf
    return state
