"""MoCo v2+ with PNR on scikit-learn's digits, 5 tasks x 2 classes.

No download, about a minute on 2 CPU cores. Next to nothing is forgotten here, unlike in
the quick start.

  python -m jaxcl.main --config=configs/digits.py

`configs/digits.py:debug` runs the same code in seconds.
"""

import ml_collections

from jaxcl.config import recipe, shrink


def get_config(arg=None):
    (debug,) = recipe.parse_words(arg)
    config = ml_collections.ConfigDict()
    config.name = "digits"
    config.seed = 0
    config.batch_size = 64
    config.epochs = 60
    config.scale_lr = False
    config.data = {"name": "digits"}
    config.scenario = {"name": "class", "num_tasks": 5}
    config.augment = {
        "size": 8,
        "scale": (0.6, 1.0),
        "jitter": (0.2, 0.2, 0.0, 0.0),
        "grayscale": 0.0,
        "blur": (0.0, 0.0),
        "solarize": (0.0, 0.0),
        "flip": 0.0,  # digits have a handedness
        "mean": (0.305,),
        "std": (0.376,),
    }
    config.encoder = {"name": "conv_net", "width": 32}
    config.method = recipe.Sections(
        {
            "name": "two_view",
            "base": {"name": "mocov2plus"},
            "strategy": {"name": "pnr"},
            "hidden_dim": 128,
            "output_dim": 64,
        }
    )
    queues = dict.fromkeys(("mocov2plus", "nnclr"), {"queue_size": 256})
    recipe.set_by_name(config.method.base, queues)
    predictors = dict.fromkeys(("cassle", "pnr"), {"distill_hidden_dim": 128})
    recipe.set_by_name(config.method.strategy, predictors)
    config.optimizer = {"name": "sgd", "lr": 0.1, "weight_decay": 1e-4}
    config.schedule = {
        "name": "warmup_cosine",
        "warmup_epochs": recipe.tie_warmup(config, 3),
    }
    config.evaluators = {
        "collapse": {},
        "linear": {"lr": 2.0, "augment": False},
        "knn": {"k": 20},
        "tsne": {},
    }
    config.save_every = 50
    return shrink.shrink(config) if debug else config
