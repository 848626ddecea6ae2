"""PNR and baselines on CIFAR-10 at a laptop's budget, class-incremental.

The comparison of the PNR paper (Cha et al., ICML 2024, Table 1) in two minutes a run
on one CPU core: 5 tasks x 2 classes, three convolutions of width 16 on 16 pixels, 2
epochs a task. The paper has no scores for it; ours, for every base under fine-tuning,
CaSSLe and PNR with 3 seeds, are in docs/paper_pnr.md.

  jaxcl data cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/pnr_cifar10_small.py
  python -m jaxcl.main --config=configs/pnr_cifar10_small.py --workdir=runs/small_byol \
      --config.method.base=byol --config.method.strategy=cassle

`config.method.base` brings its own learning rate, augmentation and lambda with it.
`configs/pnr_cifar10_small.py:debug` runs in seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

pnr = files.load_paper("pnr")

# base -> learning rate: half of CIFAR's, except for two
RATES = {name: rate / 2 for name, rate in pnr.column(pnr.CIFAR, 0).items()}
RATES |= {"vicreg": 0.05, "dino": 0.3}  # VICReg diverges at 0.15


def get_config(arg=None):
    (debug,) = recipe.parse_words(arg)
    lambdas = pnr.column(pnr.CIFAR, 3)
    config, base = pnr.small("pnr_cifar10_small", 16, lambdas)
    config.epochs = 2
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.scenario = {"name": "class", "num_tasks": 5}
    config.augment.update(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.243, 0.261))
    config.optimizer = {
        "name": "lars",
        "lr": recipe.look_up(RATES, base),
        "weight_decay": recipe.look_up(pnr.column(pnr.CIFAR, 1), base),
    }
    config.evaluators.linear.update(epochs=15, batch_size=512)
    return shrink.shrink(config) if debug else config
