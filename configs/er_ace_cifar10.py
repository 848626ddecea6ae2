"""Online class-incremental learning on Split CIFAR-10.

WIP
"""

import ml_collections

from jaxcl import debug


def get_config(arg=None):
    config = ml_collections.ConfigDict()
    config.method = {"name": "er_ace"}
    config.name = "er_ace_cifar10"
    config.batch_size = 10
    config.epochs = 1
    config.data = {"name": "arrays", "path": "data/cifar10", "validation": 0.05}
    config.scenario = {"name": "class", "num_tasks": 5}
    config.augment = {
        "size": 32,
        "views": 1,
        "crop": False,
        "jitter": (0.0, 0.0, 0.0, 0.0),
        "grayscale": 0.0,
        "flip": 0.5,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
    }
    config.encoder = {
        "name": "resnet",
        "depth": 18,
        "width": 20,
        "pool": 4,
        "conv_init": "torch",
    }
    config.replay = {"per_class": 20}
    config.scale_lr = False
    config.optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.0}
    config.schedule = {"name": "constant"}
    config.evaluators = {"predict": {"met_only": True}}
    config.devices = 1  # ten rows do not share out over many
    config.evaluate_untrained = False
    config.plasticity = False
    config.save_every = 0
    return debug.shrink(config) if arg == "debug" else config
