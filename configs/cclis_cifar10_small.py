"""Seq-CIFAR-10 at a laptop's budget: CCLIS, its variants, Co2L and ER.

The comparison of the CCLIS paper (Li et al., AAAI 2024, Tables 1 to 3) in some minutes
a run on one CPU core: 5 tasks x 2 classes, three convolutions of width 16 on 16 pixels,
60 epochs on the first task and 30 on each other, a memory of 200. The paper has no
scores for it; ours, with 3 seeds, are in docs/paper_cclis.md.

  jaxcl data cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/cclis_cifar10_small.py
  python -m jaxcl.main --config=configs/cclis_cifar10_small.py:no_prd --config.seed=1

Rows: cclis (the default) and the other keys of METHODS below.
`configs/cclis_cifar10_small.py:debug` and, say,
`configs/cclis_cifar10_small.py:co2l,debug` run in seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

cclis = files.load_paper("cclis")
# row -> its method, learning rate, views of an image
METHODS = {
    row: (method, 0.1 if method["name"] == "co2l" else 0.5, views)
    for row, (method, _, views) in cclis.CONTRASTIVE.items()
} | {"er": ({"name": "er", "replay_from": "all"}, 0.1, 1)}


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, METHODS)
    method, lr, views = METHODS[row]
    config = cclis.start(f"{row}_cifar10_small")
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.augment.update(size=16, resize=16, views=views, **cclis.CIFAR10)
    config.encoder = {"name": "conv_net", "width": 16}
    config.epochs = (60, 30)
    config.batch_size = 128
    config.optimizer = {"name": "sgd", "lr": lr, "weight_decay": 1e-4}
    config.schedule = {
        "name": "ramped_cosine",
        "warmup_epochs": recipe.tie_warmup(config, 3),
    }
    if row == "er":
        config.method = {**method}
        config.replay = {"capacity": 200, "size": 128, "augment": "all"}
        config.evaluators = {"predict": {"met_only": True}}
    else:
        config.method = {**method, "memory_size": 200, "hidden_dim": 256}
        probe = {
            "name": "linear",
            "preset": "cclis",
            "epochs": 100,
            "lr": 0.5,
            "augment": False,
            "normalize_features": True,
        }
        config.evaluators = {
            "collapse": {},
            "linear": probe,
            # The same probe on all rows of the classes so far shows what was learnt,
            # not which rows are stored.
            "linear_seen": probe | {"train_on": "seen"},
        }
    return shrink.shrink(config) if debug else config
