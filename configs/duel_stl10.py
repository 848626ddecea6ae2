"""Imbalanced STL-10: D-MoCo, D-SimCLR and what they are compared with.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024, Table 1: a stream of the labelled train images in
which one class has probability rho_max, 40k steps of 256 rows, ResNet-50, a memory of
2048; then a linear probe on the balanced train split.
Paper, accuracy of the probe at rho_max 0.1 / 0.25 / 0.5 / 0.75, 3 runs: MoCo v2 79.6 /
79.3 / 77.3 / 75.3, D-MoCo 79.2 / 76.0 / 78.7 / 77.2, SimCLR 70.8 / 69.6 / 67.2 / 68.8,
D-SimCLR 75.9 / 72.7 / 78.2 / 74.1, Barlow Twins 77.5 / 78.2 / 72.5 / 72.0, BYOL 68.4 /
64.0 / 58.8 / 61.8. Ours: not run.

  python -m jaxcl.main --config=configs/duel_stl10.py --config.data.path=PATH
  python -m jaxcl.main --config=configs/duel_stl10.py:moco --config.data.path=PATH \
      --config.scenario.imbalance.rho_max=0.75 --config.seed=1

PATH is what `jaxcl data stl10` wrote. Rows: d_moco (the default)
and the other keys of METHODS; what the paper leaves open is as in `duel_cifar10.py`.
`configs/duel_stl10.py:debug` and, say, `configs/duel_stl10.py:simclr,debug` run in
seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

duel = files.load_paper("duel")
METHODS = duel.METHODS | {
    "barlow_twins": {"name": "two_view", "base": "barlow_twins"},
    "byol": {
        "name": "two_view",
        "base": {"name": "byol", "momentum_start": 0.9, "momentum_end": 0.9},
    },
}


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, METHODS)
    config = duel.full("stl10", row, METHODS[row], epoch_steps=1000)
    config.data = {"name": "arrays", "path": "data/stl10"}
    config.augment.update(
        size=96, mean=(0.4467, 0.4398, 0.4066), std=(0.2603, 0.2566, 0.2713)
    )
    hidden = 4096 if row == "byol" else 512
    config.method.update(hidden_layers=1, hidden_dim=hidden, output_dim=512)
    config.epochs = 40  # of 1000 steps each
    config.eval_every = 5_000  # steps; Figures 4 and 8
    return shrink.shrink(config) if debug else config
