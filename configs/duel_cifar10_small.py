"""Imbalanced CIFAR-10 at a laptop's budget: D-MoCo, D-SimCLR, MoCo v2, SimCLR.

The comparison of the DUEL paper (Choi et al., AAAI 2024, Tables 1 and 2) in some
minutes a run on one CPU core: a stream in which one class has probability rho_max,
three convolutions of width 16 on 16 pixels, 1.5k steps of 128 rows, a memory of 1024.
The paper has no scores for it; ours, with 3 seeds, are in docs/results.md.

  python -m jaxcl.data.fetch cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/duel_cifar10_small.py
  python -m jaxcl.main --config=configs/duel_cifar10_small.py:moco \
      --config.scenario.imbalance.rho_max=0.75 --config.seed=1

Rows: d_moco (what the name of the file alone means), moco, d_simclr, simclr. Unlike the
paper's, views are cropped and the learning rate is small: without crops so small a net
learns little, and Adam does not train it at 0.05.
`configs/duel_cifar10_small.py:debug` and, say,
`configs/duel_cifar10_small.py:simclr,debug` run in seconds, on digits.
"""

import ml_collections

from jaxcl.config import recipe, shrink

# row -> its method
METHODS = {
    "d_moco": {"name": "duel"},
    "moco": {"name": "duel", "policy": "fifo"},
    "d_simclr": {"name": "duel", "base": "simclr"},
    "simclr": {"name": "duel", "base": "simclr", "negatives": "batch"},
}


def get_config(arg=None):
    row, debug = recipe.words(arg, METHODS)
    config = ml_collections.ConfigDict()
    config.name = "duel_cifar10_small"
    if row != "d_moco":
        config.name += f"_{row}"
    config.seeds = 1  # how many runs, from `seed` on
    config.seed = 0
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.scenario = {
        "name": "joint",
        "imbalance": {"rho_max": 0.5, "dominant": 0, "epoch_steps": 100},
    }
    config.augment = {
        "size": 16,
        "resize": 16,
        "scale": (0.2, 1.0),
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.4, 0.1),
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2470, 0.2435, 0.2616),
    }
    config.encoder = {"name": "conv_net", "width": 16}
    config.method = {
        **METHODS[row],
        "memory_size": 1024,
        "drawn": 128,
        "output_dim": 64,
    }
    config.epochs = 15  # of 100 steps each
    config.batch_size = 128
    config.scale_lr = False
    config.optimizer = {"name": "adam", "lr": 1e-3}
    config.schedule = {"name": "cosine", "per_epoch": False}
    config.evaluators = {
        "collapse": {},
        "linear": {
            "preset": "duel",
            "epochs": 50,
        },
        "spread": {"features": "projection"},
        "filtering": {"size": 1024, "batch_size": 128},
    }
    if row != "simclr":  # it has no memory
        config.evaluators.memory = {}
        config.evaluators.tsne = {"show": "filter"}
    config.eval_every = 500  # steps
    return shrink.shrink(config) if debug else config
