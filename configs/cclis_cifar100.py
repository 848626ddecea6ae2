"""Class-incremental learning on Seq-CIFAR-100: CCLIS, its variants and its rivals.

Li et al., "Contrastive Continual Learning with Importance Sampling and
Prototype-Instance Relation Distillation", AAAI 2024, Table 1: 5 tasks x 20 classes,
500 epochs on the first task and 100 on each other, batches of 512, ResNet-18; rivals
with a head of their own 50 epochs a task, batches of 32 with 32 replayed. Paper, final
accuracy over all classes / within the task with a memory of 200 and of 500: CCLIS
42.4 / 72.9 and 46.1 / 74.5, GCR 33.7 / 64.2 and 45.9 / 71.6, DER 31.2 / 63.1 and 41.4 /
71.7, iCaRL 28.0 / 51.4 and 33.3 / 58.2, Co2L 27.7 / 54.3 and 36.4 / 62.0, ER 21.8 /
60.2 and 27.7 / 66.2, GEM 20.8 / 58.8 and 25.5 / 66.3, GSS 19.4 / 55.4 and 21.9 / 60.3.
Ours: not run at this size.

The released code weighs every negative here and keeps a term of a row's own class in
its score, both by mistake: the row `released`, most likely that of the paper's numbers.

  python -m jaxcl.main --config=configs/cclis_cifar100.py --config.data.path=PATH
  python -m jaxcl.main --config=configs/cclis_cifar100.py:er \
      --config.data.path=PATH --config.replay.capacity=500

PATH holds what `python -m jaxcl.data.convert cifar100.npz PATH` writes. Rows: cclis
(what the name of the file alone means) and the other keys of CONTRASTIVE and REPLAY
below. `configs/cclis_cifar100.py:debug` and, say,
`configs/cclis_cifar100.py:co2l,debug` run in seconds, on digits.
"""

import ml_collections

from jaxcl.config import recipe, shrink

# row -> its method, learning rate, views of an image
CONTRASTIVE = {
    "cclis": ({"name": "cclis"}, 1.0, 1),
    # What the released code does by mistake: every negative has a weight, and scores
    # keep a term of the row's own class.
    "released": (
        {"name": "cclis", "scope": "all_negatives", "leftover": True},
        1.0,
        1,
    ),
    # Tables 3 and 4: uniform sampling; importance chooses but weights nothing.
    "random": ({"name": "cclis", "keep": "uniform"}, 1.0, 1),
    "no_prd": ({"name": "cclis", "weight": 0.0}, 1.0, 1),
    "selection_only": ({"name": "cclis", "weight": 0.0, "scope": "none"}, 1.0, 1),
    "neither": ({"name": "cclis", "weight": 0.0, "keep": "uniform"}, 1.0, 1),
    "co2l": ({"name": "co2l"}, 0.5, 2),
    # Table 9: the loss of Co2L without distillation.
    "co2l_no_ird": ({"name": "co2l", "weight": 0.0}, 0.5, 2),
}
# row -> its method, learning rate; rates of the codes that the paper quotes
REPLAY = {
    "er": ({"name": "er", "replay_from": "all"}, 0.1),
    "icarl": ({"name": "icarl"}, 0.1),
    "gem": ({"name": "gem", "form": "code"}, 0.03),
    "gss": ({"name": "gss"}, 0.03),
    "der": ({"name": "der", "alpha": 0.3}, 0.03),
    "derpp": ({"name": "der", "alpha": 0.1, "beta": 0.5}, 0.03),
    "gcr": ({"name": "gcr"}, 0.03),
}


def get_config(arg=None):
    row, debug = recipe.words(arg, CONTRASTIVE | REPLAY)
    config = ml_collections.ConfigDict()
    config.name = f"{row}_cifar100"
    config.seeds = 1  # how many runs, from `seed` on
    config.seed = 0
    config.data = {"name": "arrays", "path": "data/cifar100"}
    config.scenario = {"name": "class", "num_tasks": 5}
    config.augment = {
        "size": 32,
        "scale": (0.2, 1.0),
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.4, 0.1),
        "mean": (0.5153, 0.4961, 0.4497),
        "std": (0.2608, 0.2551, 0.2779),
    }
    config.encoder = {"name": "resnet", "depth": 18, "width": 64}
    config.scale_lr = False
    if row in CONTRASTIVE:
        method, lr, views = CONTRASTIVE[row]
        config.method = {**method, "memory_size": 200}
        config.augment.views = views
        config.batch_size = 512
        config.precision = "auto"
        config.epochs = (500, 100)
        config.optimizer = {"name": "sgd", "lr": lr, "weight_decay": 1e-4}
        config.schedule = {"name": "ramped_cosine", "warmup_epochs": 10}
        config.evaluators = {
            "collapse": {},
            "linear": {
                "preset": "cclis",
                "epochs": 100,
                "lr": 0.1,
            },
            "tsne": {"show": "memory"},  # Figure 3
        }
    else:
        method, lr = REPLAY[row]
        config.method = {**method}
        crop = {"views": 1, "crop": False, "pad": 4, "grayscale": 0.0}
        config.augment.update(crop | {"jitter": (0.0, 0.0, 0.0, 0.0)})
        config.replay = {"capacity": 200, "size": 32, "augment": "all"}
        config.batch_size = 32
        config.epochs = 50
        config.optimizer = {"name": "sgd", "lr": lr, "momentum": 0.0}
        config.schedule = {"name": "constant"}
        config.evaluators = {"predict": {"met_only": True}}
    config.evaluate_untrained = False
    config.plasticity = False
    return shrink.shrink(config) if debug else config
