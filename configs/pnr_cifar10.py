"""PNR and its rivals on CIFAR-10, class-incremental, 5 tasks x 2 classes.

Not a table of the paper: the hyper-parameters of its CIFAR-100 experiments
(configs/pnr_cifar100.py) on a set that costs less to look at.

Ours: not run at this budget; docs/results.md is where it would stand. Cost: 5 tasks x
500 epochs x 39 steps of 2 x 256 images of 32 pixels, and as much again for plasticity
(--config.plasticity=False leaves that out).

  python -m jaxcl.data.fetch cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/pnr_cifar10.py
  python -m jaxcl.main --config=configs/pnr_cifar10.py --workdir=runs/c10_byol_cassle \
      --config.method.base=byol --config.method.strategy=cassle

`config.method.base` brings its own learning rates, decay, augmentation and lambda with
it. Joint: --config.scenario.name=joint --config.scenario.num_tasks=1.
`configs/pnr_cifar10.py:debug` runs the same code in seconds, on digits.

Departures: as configs/pnr_cifar100.py; and the classes come in their own order.
"""

import ml_collections

from jaxcl.config import recipe, shrink

# base -> learning rate, weight decay, probe's learning rate, PNR's lambda
BASES = {
    "mocov2plus": (0.6, 1e-4, 3.0, 1.0),
    "simclr": (0.6, 1e-4, 1.0, 1.0),
    "supcon": (0.4, 1e-4, 1.0, 1.0),
    "barlow_twins": (0.4, 1e-4, 0.1, 1.0),
    "byol": (1.0, 1e-5, 3.0, 0.5),
    "vicreg": (0.3, 1e-4, 0.3, 23.0),
    # In no table of the paper: the rates are ours.
    "simsiam": (0.5, 1e-5, 3.0, 1.0),
    "dino": (0.3, 1e-6, 3.0, 1.0),
    "lejepa": (0.3, 1e-4, 0.3, 0.92),
}


def get_config(arg=None):
    (debug,) = recipe.words(arg)
    config = ml_collections.ConfigDict()
    config.method = {"name": "two_view", "base": "mocov2plus", "strategy": "pnr"}
    base = config.method.get_ref("base")
    lr, decay, probe_lr, apart = (
        {name: row[column] for name, row in BASES.items()} for column in range(4)
    )
    config.name = "pnr_cifar10"
    config.seed = 5
    config.batch_size = 256
    config.precision = "auto"
    config.epochs = 500
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.scenario = {"name": "class", "num_tasks": 5, "class_order": "sorted"}
    config.augment = {
        "size": 32,
        "scale": recipe.by({"": (0.08, 1.0), "vicreg": (0.2, 1.0)}, base),
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "jitter_probability": 0.8,
        "grayscale": 0.2,
        "blur": (0.0, 0.0),
        "solarize": recipe.by({"": (0.0, 0.2), "vicreg": (0.1, 0.1)}, base),
        "flip": 0.5,
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.247, 0.2435, 0.2616),
    }
    config.encoder = {
        "name": "resnet",
        "depth": 18,
        "width": 64,
        "stem": "cifar",
        "stem_padding": 2,  # as released: 32 pixels become a map of 34
    }
    recipe.set_where_taken(config.method, negative_weight=recipe.by(apart, base))
    config.optimizer = {
        "name": "lars",
        "lr": recipe.by(lr, base),  # times batch_size / 256
        "momentum": 0.9,
        "weight_decay": recipe.by(decay, base),
        # PNR's MoCo scripts scale 1-D parameters too; all others exclude them.
        "exclude_1d": recipe.by({"": True, "mocov2plus": False}, base),
    }
    config.schedule = {"name": "warmup_cosine", "warmup_epochs": 10, "start": 0.003}
    config.evaluators = {
        "collapse": {},
        "linear": {
            "epochs": 100,
            "batch_size": 128,
            "lr": recipe.by(probe_lr, base),
            "lrs": (),  # rates to choose from instead
            "momentum": 0.9,
            "train_on": "all",
        },
        "knn": {"k": 20},
        "tsne": {},
    }
    config.save_every = 1000
    return shrink.shrink(config) if debug else config
