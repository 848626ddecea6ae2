"""Seq-CIFAR-10 at a laptop's budget: CCLIS, its variants, Co2L and ER.

The comparison of the CCLIS paper (Li et al., AAAI 2024, Tables 1 to 3) in some minutes
a run on one CPU core: 5 tasks x 2 classes, three convolutions of width 16 on 16 pixels,
60 epochs on the first task and 30 on each other, a memory of 200. The paper has no
scores for it; ours, with 3 seeds, are in docs/results.md.

  python -m jaxcl.data.fetch cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/cclis_cifar10_small.py
  python -m jaxcl.main --config=configs/cclis_cifar10_small.py:no_prd --config.seed=1

Rows: cclis (what the name of the file alone means) and the other keys of METHODS below.
`configs/cclis_cifar10_small.py:debug` and, say,
`configs/cclis_cifar10_small.py:co2l,debug` run in seconds, on digits.
"""

import ml_collections

from jaxcl.config import recipe, shrink

# row -> its method, learning rate, views of an image
METHODS = {
    "cclis": ({"name": "cclis"}, 0.5, 1),
    "random": ({"name": "cclis", "keep": "uniform"}, 0.5, 1),
    "no_prd": ({"name": "cclis", "weight": 0.0}, 0.5, 1),
    "neither": ({"name": "cclis", "weight": 0.0, "keep": "uniform"}, 0.5, 1),
    "co2l": ({"name": "co2l"}, 0.1, 2),
    "er": ({"name": "er", "replay_from": "all"}, 0.1, 1),
}


def get_config(arg=None):
    row, debug = recipe.words(arg, METHODS)
    method, lr, views = METHODS[row]
    config = ml_collections.ConfigDict()
    config.name = f"{row}_cifar10_small"
    config.seeds = 1  # how many runs, from `seed` on
    config.seed = 0
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.scenario = {"name": "class", "num_tasks": 5}
    config.augment = {
        "size": 16,
        "resize": 16,
        "views": views,
        "scale": (0.2, 1.0),
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.4, 0.1),
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2023, 0.1994, 0.2010),
    }
    config.encoder = {"name": "conv_net", "width": 16}
    config.scale_lr = False
    config.epochs = (60, 30)
    config.batch_size = 128
    config.schedule = {"name": "ramped_cosine", "warmup_epochs": 3}
    if row == "er":
        config.method = {**method}
        config.replay = {"capacity": 200, "size": 128, "augment": "all"}
        config.optimizer = {"name": "sgd", "lr": lr, "weight_decay": 1e-4}
        config.evaluators = {"predict": {"met_only": True}}
    else:
        config.method = {**method, "memory_size": 200, "hidden_dim": 256}
        config.optimizer = {"name": "sgd", "lr": lr, "weight_decay": 1e-4}
        config.evaluators = {
            "collapse": {},
            "linear": {
                "preset": "cclis",
                "epochs": 100,
                "lr": 0.5,
                "augment": False,
                "normalize_features": True,
            },
        }
    config.evaluate_untrained = False
    config.plasticity = False
    return shrink.shrink(config) if debug else config
