"""Downstream tasks: the frozen encoder of a run, evaluated on another data set.

PNR (Cha et al., ICML 2024), Tables 6, 11, 12 and 17, of encoders trained on
ImageNet-100. Paper, class-incremental, 5 tasks, MoCo + PNR: CIFAR-100 47.80, CIFAR-10
71.26, STL-10 67.07, Clipart 38.86; + CaSSLe 44.52, 68.09, 63.23, 28.32.
Ours: not run; ImageNet was not available.

RUN is the directory of a run, finished or not. Encoder, precision, mean and
standard deviation of the images are those of its config.json, the parameters those of
its newest checkpoint. The probe is Table 17's; its learning rate, left out below, is
the table's for the base that RUN trained with: MoCo and BYOL 3.0, SimCLR and SupCon
1.0, Barlow Twins 0.1, and 0.3 for VICReg, which the table lacks. The table's last
column has 3.0 for all bases with PNR, its scripts have those of the base:
--config.evaluators.linear.lr=3.0 takes the table's.

  python -m jaxcl.main --config=configs/transfer.py --config.checkpoint=RUN
  python -m jaxcl.main --config=configs/transfer.py:stl10 --config.checkpoint=RUN
  python -m jaxcl.main --config=configs/transfer.py:clipart --config.checkpoint=RUN \
      --config.data.path=data/domainnet --workdir=runs/clipart

The sets: cifar10 (the default), cifar100, stl10, clipart;
`configs/transfer.py:debug` runs the same code in seconds on digits, for a RUN that was
a debug one itself, and so does `configs/transfer.py:stl10,debug`.

Departure: CIFAR is resized to 96 pixels for evaluation; the probe's random crops
are cut from the 32 pixels and resized once, straight to 96.
"""

import ml_collections

from jaxcl.config import recipe

SETS = ("cifar10", "cifar100", "stl10", "clipart")


def get_config(arg=None):
    dataset, debug = recipe.parse_words(arg, SETS)
    config = ml_collections.ConfigDict()
    config.name = f"transfer_{dataset}"
    config.checkpoint = ""  # --config.checkpoint=RUN
    config.seed = 5
    config.data = {"name": "arrays", "path": f"data/{dataset}"}
    config.scenario = {"name": "joint"}
    config.augment = {"size": 96, "resize": 96}
    config.evaluators = {
        "collapse": {},
        "linear": {
            "epochs": 100,
            "batch_size": 256,
            "momentum": 0.9,
        },
    }
    if dataset == "clipart":
        config.data = {
            "name": "image_lists",
            "path": "data/domainnet",
            "train": "{domain}_train.txt",
            "test": "{domain}_test.txt",
            "domains": ["clipart"],
        }
        config.augment = {"size": 224, "resize": 256}
    if debug:
        config.name += "_debug"
        config.data = {"name": "digits", "size": 12, "channels": 3}
        config.augment = {"size": 16, "resize": 16}
        config.evaluators.linear.epochs = 3
    return config
