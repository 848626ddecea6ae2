"""Class-incremental learning on frozen features: no gradient, one pass, minutes.

Splits of the field: CIFAR-100 in 10 tasks of 10 classes, ImageNet-R and CUB-200 in 10
tasks of 20, in the order of the PNR experiments for the seed. The encoder is any that
`jaxcl import` or `jaxcl export` wrote.

  python -m jaxcl.main --config=configs/frozen_heads.py:cifar100 \
      --config.start=encoders/vit_base
  jaxcl train frozen_heads:imagenet_r --config.start=encoders/vit_base \
      --config.method.name=slda --workdir=runs/slda
  jaxcl train frozen_heads:shapes --config.start=exports/mine --config.method.name=acil

Words: cifar100 (the default), imagenet_r, cub200, and shapes,
which needs no download; `configs/frozen_heads.py:debug` runs in seconds, on digits.
With the word features, config.data.path is a file that `jaxcl features` wrote.
Methods: ranpac, and --config.method.name=ncm, slda, fecam, acil, stored_knn,
linear_head.

Published, CIFAR-100 after ten tasks, Vision Transformers trained on ImageNet: NCM
83.7 % (Janson et al., arXiv 2210.04428); RanPAC, with adapters trained on the first
task, 92.1 % (as the table of RL-VIG/LibContinual quotes it). No source with values of
ImageNet-R or CUB-200 was opened. No run of the three sets was made here.

Without config.start the features are those of a random ResNet-18, a control.
"""

import ml_collections

from jaxcl.config import recipe, shrink

# word -> data, tasks, size
SETS = {
    "cifar100": ({"name": "arrays", "path": "data/cifar100"}, 10, 224),
    "imagenet_r": ({"name": "image_folder", "path": "data/imagenet-r"}, 10, 224),
    "cub200": ({"name": "image_folder", "path": "data/cub200"}, 10, 224),
    "shapes": ({"name": "shapes", "domains": ("plain",), "size": 24}, 5, 24),
    "features": ({"name": "features", "path": "features.npz"}, 10, 1),
}


def get_config(arg=None):
    word, debug = recipe.parse_words(arg, SETS)
    data, tasks, size = SETS[word]
    config = ml_collections.ConfigDict()
    config.name = f"frozen_{word}"
    config.seed = 0
    config.batch_size = 128
    config.epochs = 1
    config.encoder = {"name": "resnet"}  # that of config.start takes its place
    if word == "features":
        config.encoder = {"name": "mlp", "widths": ()}  # hands them on
    config.data = data
    config.scenario = {"name": "class", "num_tasks": tasks, "class_order": "released"}
    config.augment = {"size": size, "resize": size, "views": 1, "crop": False}
    # Those of config.start take their place.
    config.augment.update(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    config.method = {"name": "ranpac"}
    config.optimizer = {"name": "sgd", "lr": 0.1}  # nothing reads it
    config.schedule = {"name": "constant"}
    config.evaluators = {"predict": {}, "collapse": {}}
    config.plasticity = False
    return shrink.shrink(config) if debug else config
