"""PNR and its rivals on PACS, domain-incremental, on a laptop.

photo, art_painting, cartoon, sketch: the domain-incremental scenario of the PNR paper
(Cha et al., ICML 2024, Table 4, there on DomainNet) at a budget of two minutes a run on
one CPU core: three convolutions of width 16 on 24 pixels, 12 epochs a task. The paper
has no scores for it; ours are in docs/results.md.

The data: an .npz file with x u8[N,H,W,3], y, domain, is_test, class_names and
domain_names (docs/data.md).
  python -m jaxcl.main --config=configs/pnr_pacs.py --config.data.path=pacs64.npz
  python -m jaxcl.main --config=configs/pnr_pacs.py --config.data.path=pacs64.npz \
      --workdir=runs/pacs_byol --config.method.base=byol

`config.method.base` brings its own learning rates and augmentation with it.
`configs/pnr_pacs.py:debug` runs the same code in seconds, on digits.
"""

import ml_collections

from jaxcl.config import recipe, shrink


def get_config(arg=None):
    (debug,) = recipe.words(arg)
    config = ml_collections.ConfigDict()
    config.method = {
        "name": "two_view",
        "base": "mocov2plus",
        "strategy": "pnr",
        "hidden_dim": 256,
        "output_dim": 128,
    }
    base = config.method.get_ref("base")
    recipe.set_where_taken(
        config.method,
        distill_hidden_dim=256,
        queue_size=1024,
        prototypes=1024,
        slices=256,
        negative_weight=recipe.by({"": 1.0, "vicreg": 8.0, "lejepa": 0.32}, base),
        predictor_hidden_dim=recipe.by({"": 256, "simsiam": 64}, base),
    )
    config.name = "pnr_pacs"
    config.batch_size = 64
    config.precision = "auto"
    config.epochs = 12
    config.data = {"name": "npz", "path": "data/pacs64.npz"}
    config.scenario = {"name": "domain"}
    config.augment = {
        "size": 24,
        "resize": 24,
        "scale": (0.2, 1.0),
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "solarize": recipe.by({"": (0.0, 0.2), "vicreg": (0.1, 0.1)}, base),
        "mean": (0.485, 0.456, 0.406),
        "std": (0.228, 0.224, 0.225),
    }
    config.encoder = {"name": "conv_net", "width": 16}
    config.scale_lr = False  # the rates are half of DomainNet's, for a quarter batch
    rates = {"": 0.2, "mocov2plus": 0.3, "byol": 0.3}
    config.optimizer = {
        "name": "lars",
        "lr": recipe.by(rates, base),
        "weight_decay": recipe.by({"": 1e-4, "byol": 1e-5}, base),
    }
    config.schedule = {"name": "cosine"}
    config.evaluators = {
        "collapse": {},
        "linear": {
            "epochs": 100,
            "lr": 1.0,
            "lrs": (),  # rates to choose from instead
            "batch_size": 128,
            "augment": False,
            "normalize_features": True,
        },
        "knn": {"k": 20, "last_only": True},
    }
    config.plasticity = False
    config.save_every = 0
    return shrink.shrink(config) if debug else config
