"""PNR on CIFAR-10, class-incremental, 5 tasks x 2 classes.

Not a table of the paper: its CIFAR-100 hyper-parameters (configs/pnr_cifar100.py)
on a set that costs less to look at. Ours: docs/results.md where it was run.

  python -m jaxcl.data.convert cifar10.npz data/cifar10
  python -m jaxcl.main --config=configs/pnr_cifar10.py

`configs/pnr_cifar10.py:debug` runs the same code in seconds, on digits.
"""

import ml_collections

from jaxcl import debug


def get_config(arg=None):
    config = ml_collections.ConfigDict()
    config.name = "pnr_cifar10"
    config.seed = 5
    config.batch_size = 256
    config.epochs = 500
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.scenario = {"name": "class", "num_tasks": 5, "class_order": "sorted"}
    config.augment = {
        "size": 32,
        "scale": (0.08, 1.0),
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "jitter_probability": 0.8,
        "grayscale": 0.2,
        "blur": (0.0, 0.0),
        "solarize": (0.0, 0.2),
        "flip": 0.5,
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.247, 0.2435, 0.2616),
    }
    config.encoder = {
        "name": "resnet",
        "depth": 18,
        "width": 64,
        "stem": "cifar",
        "stem_padding": 2,
    }
    config.method = {
        "name": "two_view",
        "base": "mocov2plus",
        "strategy": "pnr",
        "temperature": 0.2,
        "distill_temperature": 0.2,
        "hidden_dim": 2048,
        "output_dim": 128,
        "distill_hidden_dim": 2048,
        "queue_size": 65536,
        "momentum_start": 0.99,
        "momentum_end": 0.999,
        "frozen_bn": "running",
    }
    config.optimizer = {
        "name": "lars",
        "lr": 0.6,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "eta": 0.02,
        "clip": True,
        "exclude_1d": False,
    }
    config.schedule = {"name": "warmup_cosine", "warmup_epochs": 10, "start": 0.003}
    config.evaluators = {
        "linear": {
            "epochs": 100,
            "batch_size": 256,
            "lr": 3.0,
            "momentum": 0.9,
            "milestones": (60, 80),
            "train_on": "all",
        },
        "knn": {"k": 20},
        "tsne": {},
    }
    config.save_every = 1000
    return debug.shrink(config) if arg == "debug" else config
