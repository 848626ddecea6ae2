"""PNR and its rivals on CIFAR-10 at a laptop's budget, class-incremental.

The comparison of the PNR paper (Cha et al., ICML 2024, Table 1) in two minutes a run
on one CPU core: 5 tasks x 2 classes, three convolutions of width 16 on 16 pixels, 2
epochs a task. The paper has no scores for it; ours, for every base under fine-tuning,
CaSSLe and PNR with 3 seeds, are in docs/results.md.

  python -m jaxcl.data.fetch cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/pnr_cifar10_small.py
  python -m jaxcl.main --config=configs/pnr_cifar10_small.py --workdir=runs/small_byol \
      --config.method.base=byol --config.method.strategy=cassle

`config.method.base` brings its own learning rate, augmentation and lambda with it.
`configs/pnr_cifar10_small.py:debug` runs in seconds, on digits.
"""

import ml_collections

from jaxcl.config import recipe, shrink

# base -> learning rate, weight decay, PNR's lambda
BASES = {
    "mocov2plus": (0.3, 1e-4, 1.0),
    "simclr": (0.3, 1e-4, 1.0),
    "supcon": (0.2, 1e-4, 1.0),
    "barlow_twins": (0.2, 1e-4, 1.0),
    "byol": (0.5, 1e-5, 0.5),
    "vicreg": (0.05, 1e-4, 23.0),  # it diverges at 0.15
    # In no table of the paper: the rates are ours.
    "simsiam": (0.25, 1e-5, 1.0),
    "dino": (0.3, 1e-6, 1.0),
    "lejepa": (0.15, 1e-4, 0.92),
}


def get_config(arg=None):
    (debug,) = recipe.words(arg)
    config = ml_collections.ConfigDict()
    config.method = {
        "name": "two_view",
        "base": "mocov2plus",
        "strategy": "pnr",
        "hidden_dim": 256,
        "output_dim": 128,
    }
    base = config.method.get_ref("base")
    lr, decay, apart = (
        recipe.by({name: row[column] for name, row in BASES.items()}, base)
        for column in range(3)
    )
    recipe.set_where_taken(
        config.method,
        distill_hidden_dim=256,
        queue_size=1024,
        prototypes=1024,
        slices=256,
        negative_weight=apart,
        predictor_hidden_dim=recipe.by({"": 256, "simsiam": 64}, base),
    )
    config.name = "pnr_cifar10_small"
    config.batch_size = 64
    config.epochs = 2
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.scenario = {"name": "class", "num_tasks": 5}
    config.augment = {
        "size": 16,
        "resize": 16,
        "scale": (0.2, 1.0),
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "solarize": recipe.by({"": (0.0, 0.2), "vicreg": (0.1, 0.1)}, base),
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.247, 0.243, 0.261),
    }
    config.encoder = {"name": "conv_net", "width": 16}
    config.scale_lr = False  # the rates are half of CIFAR-100's, for a quarter batch
    config.optimizer = {"name": "lars", "lr": lr, "weight_decay": decay}
    config.schedule = {"name": "cosine"}
    config.evaluators = {
        "collapse": {},
        "linear": {
            "epochs": 15,
            "lr": 1.0,
            "lrs": (),  # rates to choose from instead
            "batch_size": 512,
            "augment": False,
            "normalize_features": True,
        },
        "knn": {"k": 20, "last_only": True},
    }
    config.plasticity = False
    config.save_every = 0
    return shrink.shrink(config) if debug else config
