"""ICL on some classes of CIFAR-10: an image encoder meets new images of them.

The image experiment of Ji et al., WSDM 2023, Section 5, on a set that they did not use:
the first 1 - growth of the images, shuffled by the seed, then the others; batches of
32, until the mean loss of an epoch has not come lower for 50 epochs. `scenario.classes`
names the classes, two or more.

  python -m jaxcl.data.fetch cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/icl_cifar10.py:small
  python -m jaxcl.main --config=configs/icl_cifar10.py:retrain,small \
      --config.scenario.growth=0.3 --config.seeds=5

Rows: icl (what the name of the file alone means), no_lrl, no_lrl_sgd, no_meta, no_both;
retrain, continue, finetune, replay, distill; the controls frozen and random, which
learn nothing of what is new. With `:old` the first task alone is trained, from which
each row can go on: `--config.start=runs/icl_cifar10_old`. The word `small` makes of
each what a CPU core trains in minutes: 16 pixels, three convolutions, 500 images of
each class.
`configs/icl_cifar10.py:debug` and, say, `configs/icl_cifar10.py:finetune,debug` run in
seconds, on digits.
"""

import ml_collections

from jaxcl.config import recipe, shrink
from jaxcl.methods import icl


def get_config(arg=None):
    row, small, debug = recipe.words(arg, (*icl.VARIANTS, "old"), ("", "small"))
    config = ml_collections.ConfigDict()
    config.name = "icl_cifar10"
    if row != "icl":
        config.name += f"_{row}"
    config.seeds = 1  # how many runs, from `seed` on
    config.seed = 0
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.scenario = {"name": "growth", "growth": 0.5, "classes": ("airplane", "ship")}
    config.augment = {
        "size": 16 if small else 32,
        "resize": 16 if small else 32,
        "scale": (0.2, 1.0),
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.4, 0.1),
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2470, 0.2435, 0.2616),
    }
    config.encoder = {"name": "resnet", "depth": 18, "stem": "cifar"}
    config.method = {"name": "icl", **icl.VARIANTS.get(row, {})}
    config.epochs = 1000  # at most
    config.patience = 50
    config.batch_size = 32
    config.scale_lr = False
    config.optimizer = {"name": "adam", "lr": 1e-3, "weight_decay": 1e-5}
    config.schedule = {"name": "constant"}
    config.evaluators = {"objective": {}, "svm": {"last_only": True, "max_rows": 2000}}
    config.evaluators.collapse = {}
    config.eval_epochs = 1
    config.evaluate_untrained = False
    config.plasticity = False
    if small:
        config.scenario.per_class = 500
        config.encoder = {"name": "conv_net", "width": 16}
        config.save_every = 0  # steps; a run takes minutes
    if row == "old":
        config.first_tasks = 1
    return shrink.shrink(config) if debug else config
