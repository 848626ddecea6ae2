"""ImageNet-LT: D-MoCo and D-SimCLR on a long tail.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024, Table 5: 160k steps of 256 rows on the 115.8k
images of ImageNet-LT (1000 classes of 1280 to 5 images), 64 pixels, ResNet-50, a memory
of 2048; the encoder is then judged on other sets.
Paper, accuracy of a probe on Tiny-ImageNet / STL-10 / ImageNet's validation images:
MoCo v2 42.6 / 82.5 / 86.6, D-MoCo 46.6 / 86.2 / 88.6, SimCLR 63.2 / 98.9 / 99.9,
D-SimCLR 65.8 / 99.3 / 99.9. Values near 100 suggest that the probe was judged on images
it had trained on; they are no goal. Ours: not run.

  python -m jaxcl.main --config=configs/duel_imagenetlt.py \
      --config.data.path=IMAGENET --config.data.lists=LISTS
  python -m jaxcl.main --config=configs/duel_imagenetlt.py:moco \
      --config.data.path=IMAGENET --config.data.lists=LISTS
  python -m jaxcl.main --config=configs/transfer.py:stl10 --config.checkpoint=RUN

IMAGENET holds the folders train and val, LISTS the files ImageNet_LT_train.txt,
ImageNet_LT_val.txt and ImageNet_LT_test.txt. Rows: d_moco (what the name of the file
alone means), moco, d_simclr, simclr. What the paper leaves open is as in
`duel_cifar10.py`. `configs/duel_imagenetlt.py:debug` and, say,
`configs/duel_imagenetlt.py:simclr,debug` run in seconds, on digits.
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
    config.name = "duel_imagenetlt"
    if row != "d_moco":
        config.name += f"_{row}"
    config.seeds = 1  # how many runs, from `seed` on
    config.seed = 0
    config.data = {
        "name": "image_lists",
        "path": "data/imagenet",
        "lists": "data/imagenet_lt",
        "train": "ImageNet_LT_train.txt",
        "validation_list": "ImageNet_LT_val.txt",
        "test": "ImageNet_LT_test.txt",
        "size": 64,
        "resident": True,
    }
    config.scenario = {"name": "joint"}
    config.augment = {
        "size": 64,
        "crop": False,
        "flip": 0.75,
        "jitter": (0.4, 0.4, 0.4, 0.1),
        "jitter_probability": 0.5,
        "grayscale": 0.2,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
    }
    config.encoder = {"name": "resnet", "depth": 50, "width": 64, "stem": "imagenet"}
    config.method = {
        **METHODS[row],
        "hidden_layers": 2,
        "hidden_dim": 512,
        "output_dim": 512,
    }
    config.epochs = 354  # 160k steps
    config.batch_size = 256
    config.precision = "auto"
    config.scale_lr = False
    config.optimizer = {"name": "adam", "lr": 0.05}
    config.schedule = {"name": "cosine", "per_epoch": False}
    config.evaluators = {
        "collapse": {},
        "linear": {
            "preset": "duel_longtail",
            "epochs": 100,
        },
        "spread": {"features": "projection"},
        "filtering": {},
    }
    if row != "simclr":  # it has no memory
        config.evaluators.memory = {}
    config.eval_every = 40_000  # steps
    config.save_every = 2_000
    return shrink.shrink(config) if debug else config
