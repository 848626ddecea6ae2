"""Values that the configs of DUEL share (Choi et al., AAAI 2024)."""

import ml_collections

# row -> its method
METHODS = {
    "d_moco": {"name": "duel"},
    "moco": {"name": "duel", "policy": "fifo"},
    "d_simclr": {"name": "duel", "base": "simclr"},
    "simclr": {"name": "duel", "base": "simclr", "negatives": "batch"},
}
_NO_MEMORY = ("simclr", "barlow_twins", "byol")


def start(name, row, method, epoch_steps=None):
    """Return what all configs share.

    Args:
      name: name of the set.
      row: row of the table.
      method: config.method.
      epoch_steps: steps of an epoch in which a class dominates; None: there is none.
    """
    config = ml_collections.ConfigDict()
    config.name = f"duel_{name}" if row == "d_moco" else f"duel_{name}_{row}"
    config.seeds = 1  # how many runs, from `seed` on
    config.seed = 0
    config.scenario = {"name": "joint"}
    if epoch_steps is not None:
        uneven = {"rho_max": 0.5, "dominant": 0, "epoch_steps": epoch_steps}
        config.scenario.imbalance = uneven
    config.augment = {"jitter": (0.4, 0.4, 0.4, 0.1)}
    config.method = method
    config.scale_lr = False
    config.optimizer = {"name": "adam", "lr": 0.05}
    config.schedule = {"name": "cosine", "per_epoch": False}
    config.evaluators = {
        "collapse": {},
        "linear": {"preset": "duel", "epochs": 100},
        "spread": {"features": "projection"},  # Table 2, Figure 9
        "spread_encoder": {"name": "spread"},  # what a probe reads
        "filtering": {},  # Figures 9 and 10, with the network held fixed
    }
    if row not in _NO_MEMORY:
        config.evaluators.memory = {}  # Table 2
    return config


def full(name, row, method, epoch_steps=None, stem="imagenet"):
    """Return `start` with a ResNet-50 and views that are not cropped."""
    config = start(name, row, method, epoch_steps)
    config.augment.update(crop=False, flip=0.75, jitter_probability=0.5, grayscale=0.2)
    config.encoder = {"name": "resnet", "depth": 50, "width": 64, "stem": stem}
    config.batch_size = 256
    config.precision = "auto"
    config.save_every = 2_000
    return config
