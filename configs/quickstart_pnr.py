"""Without labels: digits in three domains, MoCo v2+ with PNR against forgetting.

scikit-learn's digits as they are, inverted, and a quarter turned: three domains, a task
each, without labels. No download, about a minute on two CPU cores. Over five seeds PNR
ends 1.6 points above fine-tuning (docs/paper_pnr.md); the order of single seeds may
differ between processors. It is in no table of the PNR paper (Cha et al., ICML 2024).

  python -m jaxcl.main --config=configs/quickstart_pnr.py
  python -m jaxcl.main --config=configs/quickstart_pnr.py --workdir=runs/pnr_finetune \
      --config.method.strategy=finetune
  jaxcl compare runs/pnr_finetune runs/quickstart_pnr \
      --matrix=knn/domain_aware --out=runs/compare_pnr.png

All domains at once, the upper bound: --config.scenario.name=joint.
"""

import ml_collections

from jaxcl.config import recipe


def get_config():
    config = ml_collections.ConfigDict()
    config.name = "quickstart_pnr"
    config.seed = 0
    config.batch_size = 64
    config.epochs = 30
    config.scale_lr = False
    config.data = {"name": "digits_in_looks"}
    config.scenario = {"name": "domain"}
    config.augment = {
        "size": 8,
        "scale": (0.6, 1.0),
        "jitter": (0.2, 0.2, 0.0, 0.0),
        "grayscale": 0.0,
        "blur": (0.0, 0.0),
        "solarize": (0.0, 0.0),
        "flip": 0.0,  # digits have a handedness
        "mean": (0.305,),
        "std": (0.376,),
    }
    config.encoder = {"name": "conv_net", "width": 8}  # a larger one forgets less
    config.method = recipe.Sections(
        {
            "name": "two_view",
            "base": {"name": "mocov2plus"},
            "strategy": {"name": "pnr"},
            "hidden_dim": 128,
            "output_dim": 64,
        }
    )
    queues = dict.fromkeys(("mocov2plus", "nnclr"), {"queue_size": 256})
    recipe.set_by_name(config.method.base, queues)
    predictors = dict.fromkeys(("cassle", "pnr"), {"distill_hidden_dim": 128})
    recipe.set_by_name(config.method.strategy, predictors)
    config.optimizer = {"name": "sgd", "lr": 0.1, "weight_decay": 1e-4}
    warmup = recipe.tie_warmup(config, 3)
    config.schedule = {"name": "warmup_cosine", "warmup_epochs": warmup}
    config.evaluators = {
        "collapse": {},
        "knn": {"k": 20},
        "linear": {"lr": 2.0, "augment": False},
        "tsne": {},
    }
    config.plasticity = False
    config.save_every = 50
    return config
