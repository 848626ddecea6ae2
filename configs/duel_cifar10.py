"""Imbalanced CIFAR-10: D-MoCo, D-SimCLR and what they are compared with.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024, Tables 1 to 4: a stream in which one class has
probability rho_max, 160k steps of 256 rows, ResNet-50 with a 3x3 first convolution, a
memory of 2048; then a linear probe on the balanced train split.
Paper, accuracy of the probe at rho_max 0.1 / 0.25 / 0.5 / 0.75, 3 runs: MoCo v2 81.0 /
82.5 / 76.5 / 70.1, D-MoCo 82.6 / 81.4 / 80.5 / 78.0, SimCLR 82.3 / 78.9 / 76.7 / 72.8,
D-SimCLR 82.8 / 82.4 / 79.6 / 75.2, Barlow Twins 51.7 / 51.6 / 54.9 / 53.5, BYOL 67.9 /
69.3 / 67.5 / 60.4. Class entropy of the memory at 0.1 / 0.5 / 0.75 (Table 2): MoCo
2.299 / 1.839 / 1.052, D-MoCo 2.299 / 2.165 / 1.831. Hours on an RTX 3090 Ti (Table 3):
9.4, 11.0, 13.5, 17.3. Ours: not run at this size; `duel_cifar10_small.py` was.

  jaxcl data cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/duel_cifar10.py
  python -m jaxcl.main --config=configs/duel_cifar10.py:moco \
      --config.scenario.imbalance.rho_max=0.75 --config.seed=1

Rows: d_moco (the default) and the other keys of METHODS;
simclr, memory_only, mixed_eps0 and d_simclr are Table 4. The learning rate is the one
that the paper prints, large for Adam; it says neither which class dominates (here the
first) nor how likely the grayscale of its colour distortion is (here 0.2, as SimCLR's).
`configs/duel_cifar10.py:debug` and, say, `configs/duel_cifar10.py:simclr,debug` run in
seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

duel = files.load_paper("duel")
METHODS = duel.METHODS | {
    "memory_only": {
        "name": "duel",
        "base": "simclr",
        "negatives": "memory",
        "positive_in_denominator": False,
    },
    "mixed_eps0": {"name": "duel", "base": "simclr", "positive_in_denominator": False},
    "barlow_twins": {"name": "two_view", "base": "barlow_twins", "output_dim": 256},
    "byol": {
        "name": "two_view",
        "base": {"name": "byol", "momentum_start": 0.9, "momentum_end": 0.9},
        "hidden_dim": 2048,
        "output_dim": 256,
    },
}


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, METHODS)
    config = duel.full("cifar10", row, METHODS[row], epoch_steps=1000, stem="cifar")
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.augment.update(
        size=32, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)
    )
    if row == "barlow_twins":
        config.method.hidden_layers = 0
    config.epochs = 160  # of 1000 steps each
    config.eval_every = 10_000  # steps; Figures 4 and 8
    return shrink.shrink(config) if debug else config
