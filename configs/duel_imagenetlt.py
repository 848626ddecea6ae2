"""ImageNet-LT: D-MoCo and D-SimCLR on a long tail.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024, Table 5: 160k steps of 256 rows on the 115.8k
images of ImageNet-LT (1000 classes of 1280 to 5 images), 64 pixels, ResNet-50, a memory
of 2048; the encoder is then evaluated on other sets. Paper, accuracy of a probe on
Tiny-ImageNet / STL-10 / ImageNet's validation images: MoCo v2 42.6 / 82.5 / 86.6,
D-MoCo 46.6 / 86.2 / 88.6, SimCLR 63.2 / 98.9 / 99.9, D-SimCLR 65.8 / 99.3 / 99.9.
Values near 100 suggest that the probe was evaluated on images it had trained on; they
are no goal. Ours: not run.

  python -m jaxcl.main --config=configs/duel_imagenetlt.py \
      --config.data.path=IMAGENET --config.data.lists=LISTS
  python -m jaxcl.main --config=configs/duel_imagenetlt.py:moco \
      --config.data.path=IMAGENET --config.data.lists=LISTS
  python -m jaxcl.main --config=configs/transfer.py:stl10 --config.checkpoint=RUN

IMAGENET holds the folders train and val, LISTS the files ImageNet_LT_train.txt,
ImageNet_LT_val.txt and ImageNet_LT_test.txt. Rows: d_moco (the default), moco,
d_simclr, simclr. What the paper leaves open is as in `duel_cifar10.py`.
`configs/duel_imagenetlt.py:debug` and, say, `configs/duel_imagenetlt.py:simclr,debug`
run in seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

duel = files.load_paper("duel")


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, duel.METHODS)
    heads = {"hidden_layers": 2, "hidden_dim": 512, "output_dim": 512}
    config = duel.full("imagenetlt", row, duel.METHODS[row] | heads)
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
    config.augment.update(
        size=64, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    config.epochs = 354  # 160k steps
    config.evaluators.linear.preset = "duel_longtail"
    config.eval_every = 40_000  # steps
    return shrink.shrink(config) if debug else config
