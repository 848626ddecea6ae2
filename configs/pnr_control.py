"""A control for PNR: a stream of digits in which fine-tuning forgets.

scikit-learn's digits as they are, inverted, and a quarter turned: three domains, a task
each, without labels. No download; no table of the PNR paper (Cha et al., ICML 2024). A
run takes less than a minute of a CPU core. What came out, and which other streams of
digits were tried, is in docs/results.md.

  python -m jaxcl.main --config=configs/pnr_control.py
  python -m jaxcl.main --config=configs/pnr_control.py --workdir=runs/control_finetune \
      --config.method.strategy=finetune
  python -m jaxcl.compare runs/control_finetune runs/pnr_control \
      --matrix=knn/domain_aware --out=runs/control.png

All looks at once, the line above them: --config.scenario.name=joint.
`configs/pnr_control.py:debug` runs the same code in seconds.
"""

import ml_collections

from jaxcl.config import shrink


def get_config(arg=None):
    config = ml_collections.ConfigDict()
    config.name = "pnr_control"
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
        "flip": 0.0,
        "mean": (0.305,),
        "std": (0.376,),
    }
    config.encoder = {"name": "conv_net", "width": 8}
    config.method = {
        "name": "two_view",
        "base": "mocov2plus",
        "strategy": "pnr",
        "hidden_dim": 128,
        "output_dim": 64,
        "distill_hidden_dim": 128,
        "queue_size": 256,
    }
    config.optimizer = {"name": "sgd", "lr": 0.1, "weight_decay": 1e-4}
    config.schedule = {"name": "warmup_cosine", "warmup_epochs": 3}
    config.evaluators = {"collapse": {}, "knn": {"k": 20}}
    config.plasticity = False
    config.save_every = 0
    return shrink.shrink(config) if arg == "debug" else config
