"""Values that the configs of PNR share (Cha et al., ICML 2024).

`full` has the values of PNR's scripts, `small` those of a laptop's budget. Both follow
`config.method.base`.
"""

import ml_collections

from jaxcl.config import recipe

# base -> learning rate, weight decay, probe's learning rate, PNR's lambda
CIFAR = {
    "mocov2plus": (0.6, 1e-4, 3.0, 1.0),
    "simclr": (0.6, 1e-4, 1.0, 1.0),
    "supcon": (0.4, 1e-4, 1.0, 1.0),
    "barlow_twins": (0.4, 1e-4, 0.1, 1.0),
    "byol": (1.0, 1e-5, 3.0, 0.5),
    "vicreg": (0.3, 1e-4, 0.3, 23.0),
    # In no table of the paper: the rates are ours.
    "simsiam": (0.5, 1e-5, 3.0, 1.0),
    "dino": (0.3, 1e-6, 3.0, 1.0),
    "lejepa": (0.3, 1e-4, 0.3, 0.92),
}
IMAGENET = {
    "mocov2plus": (0.6, 1e-4, 3.0, 1.0),
    "simclr": (0.4, 1e-4, 1.0, 1.0),
    "supcon": (0.4, 1e-4, 1.0, 1.0),
    "barlow_twins": (0.4, 1e-4, 0.1, 1.0),
    "byol": (0.6, 1e-5, 3.0, 1.0),
    "vicreg": (0.4, 1e-4, 0.3, 23.0),
    # In no table of the paper: the rates are ours.
    "simsiam": (0.5, 1e-5, 3.0, 1.0),
    "dino": (0.3, 1e-6, 3.0, 1.0),
    "lejepa": (0.4, 1e-4, 0.3, 0.92),
}
# base -> learning rate of the released online head
HEAD_LR = {
    "mocov2plus": 0.3,
    "simclr": 0.1,
    "supcon": 0.3,
    "barlow_twins": 0.1,
    "byol": 0.1,
    "vicreg": 0.3,
}


def column(table, number):
    """Take a column of a table: base -> value."""
    return {name: row[number] for name, row in table.items()}


def start(name):
    """Return a config of MoCo with PNR, and the reference that its values follow."""
    config = ml_collections.ConfigDict()
    config.name = name
    config.method = recipe.Sections(
        {
            "name": "two_view",
            "base": {"name": "mocov2plus"},
            "strategy": {"name": "pnr"},
        }
    )
    return config, config.method.base.get_ref("name")


def full(name, table):
    """Return what all experiments of the paper share, and the reference to the base.

    Args:
      name: name of the run.
      table: base -> learning rate, weight decay, probe's learning rate, PNR's lambda.
    """
    config, base = start(name)
    config.seed = 5  # draws the order of the classes, too
    config.batch_size = 256
    config.precision = "auto"
    config.scenario = {"name": "class", "num_tasks": 5, "class_order": "released"}
    config.augment = photo_augment(base)
    set_lambda(config, recipe.look_up(column(table, 3), base))
    config.optimizer = lars(table, base)
    config.epochs = 400  # every config sets its own
    warmup = {"warmup_epochs": recipe.tie_warmup(config, 10), "start": 0.003}
    config.schedule = {"name": "warmup_cosine", **warmup}
    config.evaluators = {"collapse": {}, "linear": probe(table, base)}
    config.evaluators.update(knn={"k": 20}, tsne={})
    config.save_every = 1000
    return config, base


def full_cifar(name):
    """Return `full` for 32 pixels."""
    config, base = full(name, CIFAR)
    config.epochs = 500
    config.augment.update(size=32, blur=(0.0, 0.0), mean=(0.4914, 0.4822, 0.4465))
    config.encoder = resnet(18, "cifar")
    config.encoder.stem_padding = 2  # as released: 32 pixels become a map of 34
    config.evaluators.linear.batch_size = 128
    return config, base


def full_imagenet(name, table, depth=18):
    """Return `full` for 224 pixels."""
    config, base = full(name, table)
    config.precision = "bfloat16"
    config.augment.update(
        size=224,
        resize=256,  # of the shorter side, before the centre crop of evaluation
        blur=recipe.look_up({"": (1.0, 0.1), "vicreg": (0.5, 0.5)}, base),
        sigma=(0.1, 2.0),
        mean=(0.485, 0.456, 0.406),
        std=(0.228, 0.224, 0.225),
    )
    config.encoder = resnet(depth, "imagenet")
    widths = {"byol": 8192, "nnclr": 8192, "simsiam": 512}
    table = {name: {"predictor_hidden_dim": width} for name, width in widths.items()}
    recipe.set_by_name(config.method.base, table)
    return config, base


def resnet(depth, stem):
    """Return config.encoder."""
    shape = {"depth": depth, "width": 64, "stem": stem}
    return ml_collections.ConfigDict({"name": "resnet"} | shape)


def photo_augment(base):
    """Return config.augment without sizes, blur and moments."""
    return {
        "scale": recipe.look_up({"": (0.08, 1.0), "vicreg": (0.2, 1.0)}, base),
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "jitter_probability": 0.8,
        "grayscale": 0.2,
        "solarize": recipe.look_up({"": (0.0, 0.2), "vicreg": (0.1, 0.1)}, base),
        "flip": 0.5,
    }


def lars(table, base):
    """Return config.optimizer."""
    return {
        "name": "lars",
        "lr": recipe.look_up(column(table, 0), base),  # times batch_size / 256
        "momentum": 0.9,
        "weight_decay": recipe.look_up(column(table, 1), base),
        # PNR's MoCo scripts scale 1-D parameters too; all others exclude them.
        "exclude_1d": recipe.look_up({"": True, "mocov2plus": False}, base),
    }


def probe(table, base, **more):
    """Return options of the linear probe; each has a learning rate of its own."""
    return more | {
        "epochs": 100,
        "batch_size": 256,
        "lr": recipe.look_up(column(table, 2), base),
        "lrs": (),  # rates to choose from instead
        "momentum": 0.9,
        "train_on": "all",
    }


def set_lambda(config, value):
    """Set the weight of the distance that PNR subtracts, a number or a reference."""
    recipe.set_by_name(config.method.strategy, {"pnr": {"negative_weight": value}})


def set_small_heads(config, base, *, queue_size, lambdas):
    """Give heads of width 256, and what goes with them, to a small network.

    Args:
      config: result of `start`.
      base: the reference to the base.
      queue_size: keys that MoCo holds.
      lambdas: base -> PNR's lambda; "" for all others.
    """
    config.method.update(hidden_dim=256, output_dim=128)
    bases = {
        "byol": {"predictor_hidden_dim": 256},
        "simsiam": {"predictor_hidden_dim": 64},
        "mocov2plus": {"queue_size": queue_size},
        "nnclr": {"predictor_hidden_dim": 256, "queue_size": queue_size},
        "dino": {"prototypes": 1024},
        "swav": {"prototypes": 1024},
        "lejepa": {"slices": 256},
    }
    strategies = dict.fromkeys(("cassle", "pnr"), {"distill_hidden_dim": 256})
    recipe.set_by_name(config.method.base, bases)
    recipe.set_by_name(config.method.strategy, strategies)
    set_lambda(config, recipe.look_up(lambdas, base))


def small(name, size, lambdas):
    """Return what runs on small images with three convolutions share, and the base.

    Args:
      name: name of the run.
      size: pixels of a side.
      lambdas: base -> PNR's lambda.
    """
    config, base = start(name)
    set_small_heads(config, base, queue_size=1024, lambdas=lambdas)
    config.batch_size = 64
    config.augment = {
        "size": size,
        "resize": size,
        "scale": (0.2, 1.0),
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "solarize": recipe.look_up({"": (0.0, 0.2), "vicreg": (0.1, 0.1)}, base),
    }
    config.encoder = {"name": "conv_net", "width": 16}
    config.scale_lr = False  # the rates are half of the paper's, for a quarter batch
    config.schedule = {"name": "cosine"}
    config.evaluators = {
        "collapse": {},
        "linear": {
            "lr": 1.0,
            "lrs": (),  # rates to choose from instead
            "augment": False,
            "normalize_features": True,
        },
        "knn": {"k": 20, "last_only": True},
    }
    config.plasticity = False
    config.save_every = 0
    return config, base


def set_regime(config):
    """Set what follows config.regime: "library", or "released" as PNR's CIFAR runs.

    "released": the teacher normalises by batch statistics, as it did in all epochs of
    a task but the first; the probe has no momentum; and a head learns labels beside
    the network, whose test accuracy (`predict`) most likely is what the tables hold.
    That head LEAKS: its rows, of later tasks too, move the batch norm statistics that
    the network is evaluated with. Numbers of the two regimes do not compare.
    """
    config.regime = "library"  # or "released"
    regime, base = config.get_ref("regime"), config.method.base.get_ref("name")

    def choose(library, released):
        return recipe.look_up({"library": library, "released": released}, regime)

    frozen_bn = {"frozen_bn": choose("running", "batch")}
    taught = ("cassle", "pnr", "less_forget", "lwf_features")
    recipe.set_by_name(config.method.strategy, dict.fromkeys(taught, frozen_bn))
    config.method.update(
        online_head=choose(False, True),
        head_form=choose("apart", "released"),
        head_lr=recipe.look_up(
            {("released", name): lr for name, lr in HEAD_LR.items()},
            regime,
            base,
            default=0.1,
        ),
    )
    config.evaluators.linear.momentum = choose(0.9, 0.0)
    config.evaluators.predict = {"met_only": False, "skip": choose(True, False)}
