"""Imbalanced CIFAR-10 at a laptop's budget: D-MoCo, D-SimCLR, MoCo v2, SimCLR.

The comparison of the DUEL paper (Choi et al., AAAI 2024, Tables 1 and 2) in some
minutes a run on one CPU core: a stream in which one class has probability rho_max,
three convolutions of width 16 on 16 pixels, 1.5k steps of 128 rows, a memory of 1024
of which each step draws 128. The paper has no scores for it; ours, with 3 seeds, are in
docs/paper_duel.md.

  jaxcl data cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/duel_cifar10_small.py
  python -m jaxcl.main --config=configs/duel_cifar10_small.py:moco \
      --config.scenario.imbalance.rho_max=0.75 --config.seed=1

Rows: d_moco (the default), moco, d_simclr, simclr. With the
word `warm` the stream has two tasks, the first of even classes; runs of several rows
start from one (docs/duel.md). Unlike the paper's, views are cropped and the learning
rate is small: without crops so small a net learns little, and Adam does not train it at
0.05.
`configs/duel_cifar10_small.py:debug` and, say,
`configs/duel_cifar10_small.py:simclr,debug` run in seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

duel = files.load_paper("duel")


def get_config(arg=None):
    row, warm, debug = recipe.parse_words(arg, duel.METHODS, ("", "warm"))
    heads = {"memory_size": 1024, "drawn": 128, "output_dim": 64}
    method = duel.METHODS[row] | heads
    config = duel.start("cifar10_small", row, method, epoch_steps=100)
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.augment.update(
        size=16,
        resize=16,
        scale=(0.2, 1.0),
        interpolation="bilinear",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )
    config.encoder = {"name": "conv_net", "width": 16}
    config.epochs = 15  # of 100 steps each
    config.batch_size = 128
    config.optimizer.lr = 1e-3
    if warm:
        phases = {"name": "data", "num_tasks": 2, "imbalance.rho_max": (0.1, 0.75)}
        recipe.change(config, {f"scenario.{name}": x for name, x in phases.items()})
        config.epochs = 6
        # The second task of every row begins with the networks of the first alone.
        config.method.update(fresh_memory=True, keep_images=True)
    config.evaluators.linear.epochs = 50
    config.evaluators.filtering = {"size": 1024, "batch_size": 128}
    config.eval_every = 500  # steps
    return shrink.shrink(config) if debug else config
