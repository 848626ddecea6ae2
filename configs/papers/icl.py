"""Values that the configs of ICL share (Ji et al., WSDM 2023)."""

import ml_collections

from jaxcl.methods import icl

ROWS = (*icl.VARIANTS, "old")


def start(name, row):
    """Return what all configs share.

    Args:
      name: name of the set.
      row: name of a row of `ROWS`; "old" trains the first task alone.
    """
    config = ml_collections.ConfigDict()
    config.name = f"icl_{name}" if row == "icl" else f"icl_{name}_{row}"
    config.seeds = 1  # how many runs, from `seed` on
    config.seed = 0
    config.scenario = {"name": "growth", "growth": 0.5}
    config.method = {"name": "icl", **icl.VARIANTS.get(row, {})}
    config.epochs = 1000  # at most
    config.patience = 50
    config.batch_size = 32
    config.scale_lr = False
    config.optimizer = {"name": "adam", "lr": 1e-3, "weight_decay": 1e-5}
    config.schedule = {"name": "constant"}
    config.evaluators = {"objective": {}, "svm": {"last_only": True}, "collapse": {}}
    config.eval_epochs = 1
    config.evaluate_untrained = False
    config.plasticity = False
    if row == "old":
        config.first_tasks = 1
    return config


def graphs(name, row, path):
    """Return `start` for a set of graphs and a GCN.

    Args:
      name: name of the set.
      row: name of a row of `ROWS`.
      path: a file with the arrays of docs/data.md, or a folder in TUDataset's format.
    """
    config = start(name, row)
    config.data = {"name": "graphs", "path": path}
    config.scenario.evaluation = "none"
    config.augment = {"name": "graphs"}
    config.encoder = {"name": "gcn"}
    config.save_every = 0  # steps; a run takes minutes
    return config


def images(name, row, size, stem="imagenet"):
    """Return `start` for images and a ResNet-18.

    Args:
      name: name of the set.
      row: name of a row of `ROWS`.
      size: pixels of a side.
      stem: stem of the ResNet.
    """
    config = start(name, row)
    config.augment = {
        "size": size,
        "resize": size,
        "scale": (0.2, 1.0),
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.4, 0.1),
    }
    config.encoder = {"name": "resnet", "depth": 18, "stem": stem}
    config.evaluators.svm.max_rows = 2000
    return config
