"""The encoders of docs/updating.md: a small Vision Transformer or ResNet, by SimCLR.

Four blocks of width 96 on 32 pixels, small enough for a laptop to train. It stands for
an encoder that somebody has, which benchmarks/trials/keep_fresh.py then teaches new
images in several ways. No paper has numbers for it; ours are in docs/updating.md.
`configs/keep_fresh.py:resnet` is ResNet-18 with a quarter of the usual width,
trained for twice as long.

  python -m jaxcl.main --config=configs/keep_fresh.py \
      --config.data.path=tiny_imagenet20.npz

`configs/keep_fresh.py:sets=2` trains on two sets, `sets=3` on three, and so on, to
learn the cost of a new encoder on all of them. `configs/keep_fresh.py:judge` only
evaluates the encoder of --config.checkpoint on the set.
`configs/keep_fresh.py:debug` (or `sets=2,debug`, `judge,debug`) runs the same code in
seconds, on digits.
"""

import ml_collections

from jaxcl.config import recipe, shrink


def get_config(arg=None):
    mode, resnet, debug = recipe.parse_words(
        arg, ("", "sets=N", "judge"), ("", "resnet")
    )
    config = ml_collections.ConfigDict()
    config.name = "keep_fresh"
    config.seed = 0
    config.data = {"name": "npz", "path": "data/tiny_imagenet20.npz"}
    config.scenario = {"name": "joint"}
    config.augment = {"size": 32, "resize": 32}
    config.evaluators = {"collapse": {}, "knn": {"k": 20}}
    if mode == "judge":
        config.checkpoint = ""  # --config.checkpoint=RUN
        config.evaluators.linear = {"lr": 1.0, "augment": False}
        if debug:
            config.data = {"name": "digits", "size": 16, "channels": 3}
            config.augment = {"size": 16, "resize": 16}
            config.evaluators.linear.epochs = 3
        return config
    if mode:
        # --config.data.sets[0].path=SET
        section = {"name": "npz", "path": config.data.path}
        several = [dict(section) for _ in range(int(mode.removeprefix("sets=")))]
        config.data = {"name": "joined", "sets": several}
    config.batch_size = 128
    config.epochs = 15
    config.scale_lr = False
    config.augment.update(
        scale=(0.2, 1.0),
        jitter=(0.4, 0.4, 0.2, 0.1),
        blur=(0.0, 0.0),
        solarize=(0.0, 0.0),
        mean=(0.485, 0.456, 0.406),
        std=(0.228, 0.224, 0.225),
    )
    config.encoder = {
        "name": "vit",
        "width": 96,
        "layers": 4,
        "heads": 3,
        "hidden": 384,
        "patch": 8,
        "image_size": 32,
        "features": "mean",
    }
    if resnet:
        config.encoder = {"name": "resnet", "depth": 18, "width": 16, "stem": "cifar"}
        config.epochs = 30
    config.method = recipe.Sections(
        {
            "name": "two_view",
            "base": {"name": "simclr"},
            "strategy": {"name": "finetune"},
            "hidden_dim": 256,
            "output_dim": 128,
        }
    )
    config.optimizer = {
        "name": "adam",
        "decoupled": True,
        "lr": 1e-3,
        "weight_decay": 0.05,
        "exclude_1d": True,
    }
    # Warms up from above the peak, as measured in docs/updating.md.
    warmup = {"warmup_epochs": recipe.tie_warmup(config, 2), "start": 0.003}
    config.schedule = {"name": "warmup_cosine", "per_epoch": False, **warmup}
    config.plasticity = False
    config.save_every = 200
    return shrink.shrink(config) if debug else config
