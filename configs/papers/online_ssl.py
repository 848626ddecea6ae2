"""Values that the configs of online self-supervised learning share (CLA's loop)."""

import ml_collections


def start(name):
    """Return what all configs share: plain SGD at a constant rate, a probe and kNN."""
    config = ml_collections.ConfigDict()
    config.name = name
    config.seed = 0
    config.epochs = 1
    config.scale_lr = False
    config.optimizer = {
        "name": "sgd",
        "lr": 0.03,
        "momentum": 0.9,
        "weight_decay": 1e-4,
    }
    config.schedule = {"name": "constant"}
    config.evaluators = {
        "collapse": {},
        "linear": {
            "lr": 1.0,
            "lrs": (),  # rates to choose from instead
            "batch_size": 512,
            "augment": False,
            "normalize_features": True,
        },
        "knn": {"k": 20},
    }
    config.plasticity = False
    return config
