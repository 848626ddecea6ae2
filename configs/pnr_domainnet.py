"""PNR and its rivals on DomainNet, domain-incremental (Cha et al., ICML 2024, Table 4).

6 tasks, real to clipart, each with the same 345 classes; ResNet-18, 200 epochs a task,
3 seeds. Paper, A_6, domain-aware, the mean of six probes on one domain each:

              MoCo    SimCLR  Barlow  BYOL    VICReg
  joint       48.20   48.50   49.50   53.80   52.12

Its cells of finetune, cassle and pnr are not repeated here: in the copy of the paper
that this was written from their column was missing.
Ours: not run; DomainNet is not at hand where this was written. Cost: 6 tasks x 200
epochs x 130 to 472 steps of 2 x 256 images of 224 pixels, 319,400 steps in all, and 200
epochs of forward passes over all 409,832 images for the probes.

The data, folders and lists as docs/data.md has them:

  python -m jaxcl.main --config=configs/pnr_domainnet.py \
      --config.data.path=data/domainnet --workdir=runs/dn_mocov2plus_pnr
  python -m jaxcl.main --config=configs/pnr_domainnet.py \
      --config.method.base=byol --config.method.strategy=cassle \
      --workdir=runs/dn_byol_cassle

The table's number is the average accuracy of linear/domain_aware;
linear/class_incremental is one probe on all domains. `config.method.base` brings its
own learning rates, decay, augmentation and lambda with it. Joint:
--config.scenario.name=joint, and then a probe for each domain by configs/transfer.py,
see docs/reproducing.md. `configs/pnr_domainnet.py:debug` runs the same code in seconds,
on digits, whose slices stand for domains.

Fine-tuning and CaSSLe were trained in the paper at other rates than here, by CaSSLe's
scripts (docs/methods.md has both): they do not compare with runs of this file. Probe
rates are the scripts' and, but for VICReg, Table 16's of each base; for PNR Table 16
has 3.0 with every base: --config.evaluators.linear.lr=3.0.

Departures: as configs/pnr_imagenet100.py. CaSSLe's scripts have 64 images on each of 4
GPUs, PNR's 128 on each of 2. The probes run after the last task alone and there is no
plasticity, for their cost (--config.evaluators.linear.last_only=False and
--config.plasticity=True bring them).
"""

import ml_collections

from jaxcl.config import recipe, shrink

# base -> learning rate, weight decay, probe's learning rate, PNR's lambda
BASES = {
    "mocov2plus": (0.6, 1e-4, 3.0, 1.0),
    "simclr": (0.4, 1e-4, 1.0, 1.0),
    "supcon": (0.4, 1e-4, 1.0, 1.0),
    "barlow_twins": (0.4, 1e-4, 0.1, 1.0),
    "byol": (0.6, 1e-5, 3.0, 1.0),
    "vicreg": (0.4, 1e-4, 0.3, 8.0),
    # In no table of the paper: the rates are ours.
    "simsiam": (0.5, 1e-5, 3.0, 1.0),
    "dino": (0.3, 1e-6, 3.0, 1.0),
    "lejepa": (0.4, 1e-4, 0.3, 0.32),
}


def get_config(arg=None):
    (debug,) = recipe.words(arg)
    config = ml_collections.ConfigDict()
    config.method = {"name": "two_view", "base": "mocov2plus", "strategy": "pnr"}
    base = config.method.get_ref("base")
    lr, decay, probe_lr, apart = (
        {name: row[column] for name, row in BASES.items()} for column in range(4)
    )
    config.name = "pnr_domainnet"
    config.seed = 5
    config.batch_size = 256
    config.epochs = 200
    config.precision = "bfloat16"
    config.workers = 16
    config.data = {
        "name": "image_lists",
        "path": "data/domainnet",
        "domains": ("real", "quickdraw", "painting", "sketch", "infograph", "clipart"),
    }
    config.scenario = {"name": "domain"}  # in the order of the domains above
    config.augment = {
        "size": 224,
        "resize": 256,  # of the shorter side, before the centre crop of evaluation
        "scale": recipe.by({"": (0.08, 1.0), "vicreg": (0.2, 1.0)}, base),
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "jitter_probability": 0.8,
        "grayscale": 0.2,
        "blur": recipe.by({"": (1.0, 0.1), "vicreg": (0.5, 0.5)}, base),
        "sigma": (0.1, 2.0),
        "solarize": recipe.by({"": (0.0, 0.2), "vicreg": (0.1, 0.1)}, base),
        "flip": 0.5,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.228, 0.224, 0.225),
    }
    config.encoder = {"name": "resnet", "depth": 18, "width": 64, "stem": "imagenet"}
    recipe.set_where_taken(
        config.method,
        predictor_hidden_dim=recipe.by({"": 8192, "simsiam": 512}, base),
        negative_weight=recipe.by(apart, base),
    )
    config.optimizer = {
        "name": "lars",
        "lr": recipe.by(lr, base),  # times batch_size / 256
        "momentum": 0.9,
        "weight_decay": recipe.by(decay, base),
        # PNR's MoCo scripts scale 1-D parameters too; all others exclude them.
        "exclude_1d": recipe.by({"": True, "mocov2plus": False}, base),
    }
    config.schedule = {"name": "warmup_cosine", "warmup_epochs": 10, "start": 0.003}
    config.evaluators = {
        "collapse": {},
        "linear": {
            "epochs": 100,
            "batch_size": 256,
            "lr": recipe.by(probe_lr, base),
            "lrs": (),  # rates to choose from instead
            "momentum": 0.9,
            "train_on": "all",
            "last_only": True,
        },
        "knn": {"k": 20},
        "tsne": {},
    }
    config.plasticity = False
    config.save_every = 1000
    return shrink.shrink(config) if debug else config
