"""Write state dicts for PyTorch, with the names of torchvision and timm."""

from typing import Any

import numpy as np

from jaxcl import core
from jaxcl.errors import Refused
from jaxcl.nets import positions
from jaxcl.weights import encoder, names, writer


def check_supported(section: dict) -> None:
    """Refuse a network that has no counterpart in PyTorch's libraries.

    timm's ConvNeXt has four stages. With patches of 2 its first stage halves the map
    once more; with patches of 8 or more its last stage does not halve it.

    Args:
      section: section "encoder" of a card.

    Raises:
      Refused: no network fits; the message names the field.
    """
    kind = section["name"]
    core.check_choice("--torch: config.encoder.name", kind, tuple(writer.PYTORCH))
    fault = ()
    if kind == "resnet" and section["padding"] != "torch":
        # With stride 2 the windows would read other pixels than PyTorch's do.
        fault = "padding", "must be 'torch'"
    elif kind == "vit":
        if section["positions"] == "rotary" and section["qkv_bias"] == "all":
            fault = "qkv_bias", "with rotary positions must be 'query_value' or 'none'"
    elif kind == "convnext":
        if section["depths"] is not None and len(section["depths"]) != 4:
            fault = "depths", "must be of four stages"
        elif section["patch"] not in (1, 3, 4, 5, 6, 7):
            fault = "patch", "must be 1 or 3 to 7"
    if fault:
        field, allowed = fault
        raise Refused(
            f"--torch: config.encoder.{field}={section[field]!r} has no counterpart "
            f"in PyTorch; {allowed}"
        )


def torch_state(source: Any) -> dict[str, np.ndarray]:
    """Make the state dict of an encoder, without a classifier.

    Args:
      source: an `encoder.Encoder`, or the folder of one.

    Returns:
      name -> array, named as in torchvision's `ResNet`, in timm's `VisionTransformer`
      for images of the card's size (`Eva` with rotary positions), or in timm's
      `ConvNeXt` with `conv_mlp=False`.

    Raises:
      Refused: PyTorch has no such network; the folder cannot be read.
    """
    network = source
    if not isinstance(source, encoder.Encoder):
        network = encoder.load_encoder(source)
    section = network.card["encoder"]
    check_supported(section)
    flat = encoder.flatten_leaves(network.params, network.stats)
    arrays = {name.partition("/")[2]: leaf for name, leaf in flat.items()}
    if section["name"] == "vit":
        return _vit_state(section, network.card["input"]["size"], arrays)
    if section["name"] == "convnext":
        return names.write_tensors(names.SCHEMES["timm_convnext"], arrays)
    state = names.write_tensors(names.SCHEMES["torchvision"], arrays)
    seen = [name.replace("running_mean", "num_batches_tracked") for name in state]
    return state | {x: np.zeros((), np.int64) for x in seen if x.endswith("_tracked")}


def _vit_state(section, size, arrays) -> dict[str, np.ndarray]:
    """Make the state dict of timm's ViT.

    In timm's networks with registers or fixed positions the class token includes its
    position. The joint tensor of queries, keys and values has biases for all or for
    none.
    """
    kind, biased = section["positions"], section["qkv_bias"]
    plain = kind == "learned" and not section["registers"]
    if "class_position" in arrays and not plain:
        arrays["class"] = arrays["class"] + arrays.pop("class_position")
    grid = (size // section["patch"],) * 2
    if kind == "sin_cos":
        arrays["positions"] = positions.sin_cos_table(grid, len(arrays["class"]))
    elif kind == "learned":  # timm resizes by one rule, we by several
        table = positions.resize_table(arrays["positions"], grid, section["resize"])
        arrays["positions"] = np.asarray(table)
    if kind != "rotary" and biased == "query_value":
        for name in [x for x in arrays if x.endswith("attention/query/bias")]:
            arrays[name.replace("query", "key")] = np.zeros_like(arrays[name])
    scheme = "timm_dinov3" if kind == "rotary" else "timm"
    return names.write_tensors(names.SCHEMES[scheme], arrays)
