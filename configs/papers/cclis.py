"""Values that the configs of CCLIS share (Li et al., AAAI 2024)."""

import ml_collections

from jaxcl.config import recipe

UNIFORM = {"name": "cclis", "keep": "uniform", "scope": "none"}
NO_PRD = {"weight": 0.0}
# row -> its method, learning rate, views of an image
CONTRASTIVE = {
    "cclis": ({"name": "cclis"}, 1.0, 1),
    # What the released code does by mistake: every negative has a weight, and scores
    # keep a term of the row's own class.
    "released": (
        {"name": "cclis", "scope": "all_negatives", "leftover": True},
        1.0,
        1,
    ),
    # Tables 3 and 4: uniform sampling; importance chooses but weights nothing.
    "random": (UNIFORM, 1.0, 1),
    "no_prd": ({"name": "cclis"} | NO_PRD, 1.0, 1),
    "selection_only": ({"name": "cclis", "scope": "none"} | NO_PRD, 1.0, 1),
    "neither": (UNIFORM | NO_PRD, 1.0, 1),
    # Not in the paper: choice and weights one by one, with PRD; weights of every row.
    "choice_only": ({"name": "cclis", "scope": "none"}, 1.0, 1),
    "weights_only": ({"name": "cclis", "keep": "uniform"}, 1.0, 1),
    "all_weighted": ({"name": "cclis", "scope": "all"}, 1.0, 1),
    "co2l": ({"name": "co2l"}, 0.5, 2),
    # Table 9: the loss of Co2L without distillation.
    "co2l_no_ird": ({"name": "co2l", "weight": 0.0}, 0.5, 2),
}
# row -> its method, learning rate; rates of the codes that the paper quotes
REPLAY = {
    "er": ({"name": "er", "replay_from": "all"}, 0.1),
    "icarl": ({"name": "icarl"}, 0.1),
    "gem": ({"name": "gem", "form": "code"}, 0.03),
    "gss": ({"name": "gss"}, 0.03),
    "der": ({"name": "der", "alpha": 0.3}, 0.03),
    "derpp": ({"name": "der", "alpha": 0.1, "beta": 0.5}, 0.03),
    "gcr": ({"name": "gcr"}, 0.03),
}
ROWS = (*CONTRASTIVE, *REPLAY)
# Moments of the pixels
CIFAR10 = {
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2023, 0.1994, 0.2010),
}


def start(name):
    """Return what all configs share."""
    config = ml_collections.ConfigDict()
    config.name = name
    config.seeds = 1  # how many runs, from `seed` on
    config.seed = 0
    config.scenario = {"name": "class", "num_tasks": 5}
    config.augment = {
        "scale": (0.2, 1.0),
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.4, 0.1),
    }
    config.scale_lr = False
    config.evaluate_untrained = False
    config.plasticity = False
    return config


def full(name, row, contrastive=CONTRASTIVE, replay=REPLAY):
    """Return what the experiments of the paper share.

    Args:
      name: name of the run.
      row: a key of one of the tables.
      contrastive: row -> its method, learning rate, views of an image.
      replay: row -> its method, learning rate.
    """
    config = start(name)
    config.encoder = {"name": "resnet", "depth": 18, "width": 64}
    if row in contrastive:
        method, lr, views = contrastive[row]
        config.method = {**method, "memory_size": 200}
        config.augment.views = views
        config.batch_size = 512
        config.precision = "auto"
        config.epochs = (500, 100)
        config.optimizer = {"name": "sgd", "lr": lr, "weight_decay": 1e-4}
        config.schedule = {
            "name": "ramped_cosine",
            "warmup_epochs": recipe.tie_warmup(config, 10),
        }
        config.evaluators = {
            "collapse": {},
            "linear": {"preset": "cclis", "epochs": 100, "lr": 0.5},
            "tsne": {},
        }
    else:
        method, lr = replay[row]
        config.method = {**method}
        crop = {"views": 1, "crop": False, "pad": 4, "grayscale": 0.0}
        config.augment.update(crop | {"jitter": (0.0, 0.0, 0.0, 0.0)})
        config.replay = {"capacity": 200, "size": 32, "augment": "all"}
        config.batch_size = 32
        config.epochs = 50
        config.optimizer = {"name": "sgd", "lr": lr, "momentum": 0.0}
        config.schedule = {"name": "constant"}
        config.evaluators = {"predict": {"met_only": True}}
    return config
