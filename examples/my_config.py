"""The modules of my_package in a run: blobs, 2 tasks x 2 classes, a minute on a CPU.

Run it in the folder that holds my_package:

  python -m jaxcl.main --config=my_config.py
  python -m jaxcl.main --config=my_config.py:method
  python -m jaxcl.main --config=my_config.py:replay
  python -m jaxcl.main --config=my_config.py:online

The word behind the colon chooses what is trained: a base under a strategy (no word), a
method, experience replay with a policy, or an online method. `debug` behind a comma
trains one epoch.
"""

import ml_collections

from jaxcl.config import recipe

METHODS = {
    "": {
        "name": "two_view",
        "base": "my_package.my_base",
        "strategy": "my_package.my_strategy",
        "hidden_dim": 64,
        "output_dim": 32,
    },
    "method": {
        "name": "my_package.my_method",
        "weight": 1.0,
        "hidden_dim": 64,
        "output_dim": 32,
    },
    "replay": {"name": "er"},
    "online": {"name": "my_package.my_online"},
}


def get_config(arg=None):
    """Make the config; `arg` is what follows the colon."""
    word, debug = recipe.parse_words(arg, METHODS)
    config = ml_collections.ConfigDict()
    config.name = f"my_{word or 'base'}"
    config.batch_size = 32
    config.epochs = 1 if debug else 20
    config.scale_lr = False
    config.data = {"name": "my_package.my_source.blobs", "per_class": 100}
    config.scenario = {"name": "class", "num_tasks": 2}
    config.augment = {
        "size": 8,
        "scale": (0.6, 1.0),
        "jitter": (0.2, 0.2, 0.0, 0.0),
        "flip": 0.0,
        "mean": (0.15,),
        "std": (0.25,),
    }
    config.encoder = {"name": "my_package.my_encoder.flat", "width": 32}
    config.method = METHODS[word]
    if word in ("replay", "online"):
        config.replay = {"policy": "my_package.my_policy", "capacity": 40}
    config.optimizer = {"name": "my_package.my_optimizer.sign", "lr": 0.003}
    config.schedule = {"name": "my_package.my_optimizer.triangle"}
    config.evaluators = {
        "spread": {"name": "my_package.my_evaluator", "max_rows": 200},
        "knn": {"k": 20},
    }
    return config
