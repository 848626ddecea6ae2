"""Load a Vision Transformer that `jaxcl export --torch` wrote, with timm.

model = load("exports/vit")
features = model(images)  # normalised float32[N, C, H, W] -> float32[N, D]
"""

import functools
import json
import pathlib

import timm
import torch
from safetensors.torch import load_file


def load(folder):
    """Load the folder of an export, ready for evaluation."""
    folder = pathlib.Path(folder)
    card = json.loads((folder / "card.json").read_text())
    options = card["encoder"]
    plain = options["positions"] == "learned" and not options["registers"]
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=card["input"]["size"],
        in_chans=card["input"]["channels"],
        patch_size=options["patch"],
        embed_dim=options["width"],
        depth=options["layers"],
        num_heads=options["heads"],
        mlp_ratio=options["hidden"] / options["width"],
        qkv_bias=options["qkv_bias"] != "none",
        init_values=options["layer_scale"],
        reg_tokens=options["registers"],
        no_embed_class=not (plain and options["class_position"]),
        norm_layer=functools.partial(torch.nn.LayerNorm, eps=options["epsilon"]),
        global_pool={"class": "token", "mean": "avg"}[options["features"]],
        fc_norm=False,
        num_classes=0,
    )
    model.load_state_dict(load_file(folder / "vit_torch.safetensors"))
    return model.eval()
