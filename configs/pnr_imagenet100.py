"""PNR on ImageNet-100, class-incremental (Cha et al., ICML 2024, Table 3).

Paper, MoCo + PNR: A_5 67.85 (0.44), A_10 60.75 (0.39); + CaSSLe 63.49 and 52.71,
fine-tuning 57.87 and 47.48, joint 76.67. ResNet-18, 400 epochs a task, 3 seeds.
Ours: not run; ImageNet is not at hand where this was written.

The data: a folder of ImageNet-1k or of its 100 classes (train/WNID/*.JPEG,
val/WNID/*.JPEG) and the usual class list of CMC in configs/imagenet100.txt, which
you may replace. A TFDS directory works as well: --config.data.name=tfds.
  python -m jaxcl.main --config=configs/pnr_imagenet100.py \
      --config.data.path=/data/imagenet --workdir=runs/pnr_imagenet100

`configs/pnr_imagenet100.py:debug` runs the same code in seconds, on digits.
"""

import pathlib

import ml_collections

from jaxcl import debug


def get_config(arg=None):
    config = ml_collections.ConfigDict()
    config.name = "pnr_imagenet100"
    config.seed = 5
    config.batch_size = 256  # released: 128 on each of 2 GPUs
    config.epochs = 400
    config.precision = "bfloat16"
    config.workers = 16
    config.data = {
        "name": "image_folder",
        "path": "data/imagenet",
        "classes": str(pathlib.Path(__file__).parent / "imagenet100.txt"),
    }
    config.scenario = {"name": "class", "num_tasks": 5, "class_order": "released"}
    config.augment = {
        "size": 224,
        "resize": 256,  # of the shorter side, before the centre crop of evaluation
        "scale": (0.08, 1.0),
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "jitter_probability": 0.8,
        "grayscale": 0.2,
        "blur": (1.0, 0.1),
        "sigma": (0.1, 2.0),
        "solarize": (0.0, 0.2),
        "flip": 0.5,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.228, 0.224, 0.225),
    }
    config.encoder = {"name": "resnet", "depth": 18, "width": 64, "stem": "imagenet"}
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
        "lr": 0.6,  # times batch_size / 256
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "eta": 0.02,
        "clip": True,
        "exclude_1d": False,  # PNR's MoCo scripts; all others exclude
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
