"""Folders of small encoders that teach; no training made them."""

import json

import numpy as np

from jaxcl.run import encoder_folder
from jaxcl.weights import writer


def leave(where, *, size=6, width=5, channels=1, seed=3, leaves=None, drop=(), **more):
    """Write a perceptron of any numbers.

    Args:
      leaves: arrays by name, to change in the file.
      drop: entries of the card's "input" that it lacks.
      more: further entries of "input"; or "num_features".
    """
    rng = np.random.default_rng(seed)
    count = size * size * channels
    kernel = rng.normal(0, count**-0.5, (count, width)).astype("f4")
    bias = rng.uniform(0.2, 0.6, width).astype("f4")
    arrays = {"params/linear1/kernel": kernel, "params/linear1/bias": bias}
    packed = writer.pack_tensors(arrays | (leaves or {}), "flax")
    files = {encoder_folder.TENSORS: packed}
    card = {"format": encoder_folder.FORMAT, "encoder": {"name": "mlp"}}
    card["encoder"]["widths"] = [width]
    card["num_features"] = more.pop("num_features", width)
    inputs = {"kind": "images", "channels": channels, "size": size, "resize": size}
    inputs |= {"mean": [0.2] * channels, "std": [0.5] * channels}
    inputs |= {"interpolation": "bicubic", "decoder": None} | more
    card["input"] = {name: x for name, x in inputs.items() if name not in drop}
    card["files"] = writer.hash_files(files)
    card["checksum"] = encoder_folder.checksum(card)
    where.mkdir(parents=True, exist_ok=True)
    (where / encoder_folder.CARD).write_text(json.dumps(card))
    (where / encoder_folder.TENSORS).write_bytes(packed)
