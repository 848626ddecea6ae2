"""PNR and baselines on CIFAR-100 at the budget of a laptop: 5 tasks, a tiny ResNet-10.

The paper's scenario, losses, optimiser and augmentation (configs/pnr_cifar100.py)
with a network of 1/144 of the parameters, 6 epochs a task instead of 500, batch 128,
a queue of 4,096, heads of width 256 and a probe on features without augmentation.
What it measured, with time and spread, is in docs/paper_pnr.md; no number of the paper
compares to it. Cost: 5 tasks x 6 epochs x 78 steps of 2 x 128 images of 32 pixels.

  jaxcl data cifar100 --out=data/cifar100
  python -m jaxcl.main --config=configs/pnr_cifar100_small.py \
      --config.method.strategy=pnr --config.seed=5 --workdir=runs/small_pnr_5

`config.method.base` brings its own learning rates, decay, augmentation and lambda with
it. `configs/pnr_cifar100_small.py:debug` runs the same code in seconds, on digits.

`config.regime` "released" trains and evaluates as the released run, see `set_regime` of
configs/papers/pnr.py.

Departures, beside the budget: those of configs/pnr_cifar100.py; the stem pads by 1;
the probe's learning rate is at most 1.0, since its features have no augmentation.
"""

from jaxcl.config import files, recipe, shrink

pnr = files.load_paper("pnr")


def get_config(arg=None):
    (debug,) = recipe.parse_words(arg)
    config, base = pnr.full_cifar("pnr_cifar100_small")
    config.batch_size = 128
    del config.precision
    config.epochs = 6
    config.data = {"name": "arrays", "path": "data/cifar100"}
    config.augment.std = (0.247, 0.243, 0.261)
    config.encoder = {"name": "resnet", "depth": 10, "width": 8, "stem": "cifar"}
    lambdas = pnr.column(pnr.CIFAR, 3)
    pnr.set_small_heads(config, base, queue_size=4096, lambdas=lambdas)
    config.schedule = {
        "name": "warmup_cosine",
        "warmup_epochs": recipe.tie_warmup(config, 1),
    }
    rates = {name: min(rate, 1.0) for name, rate in pnr.column(pnr.CIFAR, 2).items()}
    config.evaluators = {
        "collapse": {},
        "linear": {
            "epochs": 60,
            "lr": recipe.look_up(rates, base),
            "lrs": (),  # rates to choose from instead
            "train_on": "all",
            "augment": False,
        },
    }
    config.plasticity = False
    config.save_every = 250
    pnr.set_regime(config)
    return shrink.shrink(config) if debug else config
