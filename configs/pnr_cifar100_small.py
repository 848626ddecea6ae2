"""PNR on CIFAR-100 at the budget of a laptop: 5 tasks, ResNet-10 of width 8.

The paper's scenario, losses, optimiser and augmentation (configs/pnr_cifar100.py)
with a network of 1/144 of the parameters, 6 epochs a task instead of 500, batch 128,
a queue of 4,096 and a probe on features without augmentation. What it measured, with
time and spread, is in docs/results.md; no number of the paper compares to it.

  python -m jaxcl.data.convert cifar100.npz data/cifar100
  python -m jaxcl.main --config=configs/pnr_cifar100_small.py \
      --config.method.strategy=pnr --config.seed=5 --workdir=runs/small_pnr_5

`configs/pnr_cifar100_small.py:debug` runs the same code in seconds, on digits.
"""

import ml_collections

from jaxcl import debug


def get_config(arg=None):
    config = ml_collections.ConfigDict()
    config.name = "pnr_cifar100_small"
    config.seed = 5
    config.batch_size = 128
    config.epochs = 6
    config.data = {"name": "arrays", "path": "data/cifar100"}
    config.scenario = {"name": "class", "num_tasks": 5, "class_order": "released"}
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
        "std": (0.247, 0.243, 0.261),
    }
    config.encoder = {"name": "resnet", "depth": 10, "width": 8, "stem": "cifar"}
    config.method = {
        "name": "two_view",
        "base": "mocov2plus",
        "strategy": "pnr",
        "temperature": 0.2,
        "distill_temperature": 0.2,
        "hidden_dim": 256,
        "output_dim": 128,
        "distill_hidden_dim": 256,
        "queue_size": 4096,
        "momentum_start": 0.99,
        "momentum_end": 0.999,
        "frozen_bn": "running",
    }
    config.optimizer = {
        "name": "lars",
        "lr": 0.6,  # times batch_size / 256
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "eta": 0.02,
        "clip": True,
        "exclude_1d": False,
    }
    config.schedule = {"name": "warmup_cosine", "warmup_epochs": 1}
    config.evaluators = {
        "linear": {
            "epochs": 60,
            "lr": 1.0,
            "milestones": (36, 48),
            "train_on": "all",
            "augment": False,
        },
    }
    config.plasticity = False
    config.save_every = 250
    return debug.shrink(config) if arg == "debug" else config
