"""A ResNet's parameters under the names of torchvision's, for PyTorch."""

import re
from typing import Any

import numpy as np

from jaxcl.export import encoder

TENSORS = "resnet_torch.safetensors"
# Ours -> theirs, of a batch norm.
_NORM = {
    "params/{}/scale": "weight",
    "params/{}/bias": "bias",
    "stats/{}/mean": "running_mean",
    "stats/{}/var": "running_var",
}


def check(section: dict) -> None:
    """Refuse an encoder that no ResNet of PyTorch computes.

    Args:
      section: "encoder" of a card.

    Raises:
      ValueError: naming the field.
    """
    if section["name"] != "resnet":
        raise ValueError(
            f"--torch: config.encoder.name={section['name']!r} has no twin in "
            "torchvision; must be 'resnet'"
        )
    if section["padding"] != "torch":
        raise ValueError(
            f"--torch: config.encoder.padding={section['padding']!r} pads windows of "
            "stride 2 as PyTorch does not; must be 'torch'"
        )


def key_map(names) -> dict[str, str | None]:
    """Torchvision's name of each tensor -> ours in the exported file.

    Args:
      names: of ours, "params/layer1_0/conv1/kernel".

    Returns:
      None for what PyTorch alone has: how many batches a batch norm has seen.
    """
    modules, found = dict.fromkeys(n.rpartition("/")[0] for n in names), {}
    for module in sorted({name.partition("/")[2] for name in modules}):
        theirs = _theirs(module)
        if f"params/{module}/kernel" in names:
            found[f"{theirs}.weight"] = f"params/{module}/kernel"
            continue
        for ours, last in _NORM.items():
            found[f"{theirs}.{last}"] = ours.format(module)
        found[f"{theirs}.num_batches_tracked"] = None
    return found


def _theirs(module: str) -> str:
    """`layer1_0/downsample_bn` -> `layer1.0.downsample.1`."""
    name = re.sub(r"^layer(\d+)_(\d+)/", r"layer\1.\2.", module)
    name = re.sub(r"downsample_conv$", "downsample.0", name)
    return re.sub(r"downsample_bn$", "downsample.1", name)


def torch_state(source: Any) -> dict[str, np.ndarray]:
    """The state dict of torchvision's ResNet without `fc`, as arrays of NumPy.

    Args:
      source: a `jaxcl.export.encoder.Encoder`, or the folder of one.

    Returns:
      name -> array; kernels are OIHW, no batch has been tracked.

    Raises:
      ValueError: no ResNet of PyTorch computes the same; the folder cannot be read.
    """
    made = source
    if not isinstance(source, encoder.Encoder):
        made = encoder.load_encoder(source)
    check(made.card["encoder"])
    leaves = encoder.flat(made.params, made.stats)
    state = {}
    for theirs, ours in key_map(leaves).items():
        leaf = np.zeros((), np.int64) if ours is None else leaves[ours]
        if leaf.ndim == 4:  # what is not contiguous would be saved in another order
            leaf = np.ascontiguousarray(leaf.transpose(3, 2, 0, 1))
        state[theirs] = leaf
    return state
