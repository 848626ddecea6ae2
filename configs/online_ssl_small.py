"""Online continual self-supervised learning on CIFAR-10 at a laptop's budget.

The loop of CLA (Cignoni et al., arXiv 2507.10434), see docs/online_ssl.md, with three
convolutions of width 16 on 16 pixels: 10,000 images once, in 5 tasks x 2 classes that
the method does not know, in batches of 20 with 44 replayed, two updates on
each; three minutes on two busy cores, a third of them training. No paper has scores for
it; ours are in docs/online_ssl.md.

  jaxcl data cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/online_ssl_small.py
  python -m jaxcl.main --config=configs/online_ssl_small.py --workdir=runs/blurry \
      --config.scenario.name=blurry --config.method.regulariser=cla_r

`config.method.base` brings its own learning rate with it.
`configs/online_ssl_small.py:cifar100` has 100 images of each class, in 10 tasks x 10
classes; `configs/online_ssl_small.py:pacs` the 7,213 images of PACS on 24 pixels, one
domain after another (`--config.data.path`, see configs/pnr_pacs.py).
`configs/online_ssl_small.py:debug` (or `cifar100,debug`) runs the same code in seconds,
on digits.
"""

from jaxcl.config import files, recipe, shrink

online_ssl = files.load_paper("online_ssl")
# base -> learning rate; these are guesses
RATES = {
    "simsiam": 0.03,
    "simclr": 0.1,
    "mocov2plus": 0.03,
    "byol": 0.05,
    "barlow_twins": 0.01,
    "vicreg": 0.005,
}


def get_config(arg=None):
    dataset, debug = recipe.parse_words(arg, ("", "cifar100", "pacs"))
    config = online_ssl.start("online_ssl_small")
    config.batch_size = 20
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.scenario = {"name": "class", "num_tasks": 5, "per_class": 1000}
    config.augment = {
        "size": 16,
        "resize": 16,
        "scale": (0.2, 1.0),
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "blur": (0.0, 0.0),
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.247, 0.243, 0.261),
    }
    config.encoder = {"name": "conv_net", "width": 16}
    config.replay = {"capacity": 500, "policy": "fifo", "size": 44, "updates": 2}
    config.method = recipe.Sections(
        {
            "name": "online_ssl",
            "base": {"name": "simsiam"},
            "regulariser": {"name": "cassle"},
            "hidden_dim": 256,
            "output_dim": 128,
        }
    )
    predictors = dict.fromkeys(("simsiam", "byol"), {"predictor_hidden_dim": 64})
    recipe.set_by_name(config.method.base, predictors)
    half, narrow = {"weight": 0.5}, {"distill_hidden_dim": 128}
    terms = dict.fromkeys(("cassle", "cla_r", "pnr"), half | narrow) | {"der": half}
    recipe.set_by_name(config.method.regulariser, terms)
    base = config.method.base.get_ref("name")
    config.optimizer.lr = recipe.look_up(RATES, base)
    config.evaluators.linear.epochs = 15
    config.save_every = 0
    if dataset == "cifar100":
        config.name = "online_ssl_small_cifar100"
        config.data.path = "data/cifar100"
        config.scenario.update(num_tasks=10, per_class=100)
        config.augment.update(
            mean=(0.5071, 0.4866, 0.4409), std=(0.2673, 0.2564, 0.2762)
        )
    if dataset == "pacs":
        config.name = "online_ssl_small_pacs"
        config.data = {"name": "npz", "path": "data/pacs64.npz"}
        config.scenario = {"name": "domain"}
        config.augment.update(
            size=24,
            resize=24,
            mean=(0.485, 0.456, 0.406),
            std=(0.228, 0.224, 0.225),
        )
    return shrink.shrink(config) if debug else config
