"""PNR and baselines on CIFAR-10, class-incremental, 5 tasks x 2 classes.

Not a table of the paper: the hyper-parameters of its CIFAR-100 experiments
(configs/pnr_cifar100.py) on a smaller set.

Ours: not run at this budget. Cost: 5 tasks x
500 epochs x 39 steps of 2 x 256 images of 32 pixels, and as much again for plasticity
(--config.plasticity=False leaves that out).

  jaxcl data cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/pnr_cifar10.py
  python -m jaxcl.main --config=configs/pnr_cifar10.py --workdir=runs/c10_byol_cassle \
      --config.method.base=byol --config.method.strategy=cassle

`config.method.base` brings its own learning rates, decay, augmentation and lambda with
it. Joint: --config.scenario.name=joint --config.scenario.num_tasks=1.
`configs/pnr_cifar10.py:debug` runs the same code in seconds, on digits.

Departures: as configs/pnr_cifar100.py; and the classes come in their own order.
"""

from jaxcl.config import files, recipe, shrink

pnr = files.load_paper("pnr")


def get_config(arg=None):
    (debug,) = recipe.parse_words(arg)
    config, _ = pnr.full_cifar("pnr_cifar10")
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.scenario.class_order = "sorted"
    config.augment.std = (0.247, 0.2435, 0.2616)
    return shrink.shrink(config) if debug else config
