"""Quick start: five tasks of two silhouettes each, ER-ACE against forgetting.

The drawn set `shapes`: ten classes in four domains. Labels are used, two classes come
at a time, and a memory of 200 images is replayed. No download, under a minute on two
CPU cores. docs/getting_started.md has five seeds of each command.

  python -m jaxcl.main --config=configs/quickstart.py
  python -m jaxcl.main --config=configs/quickstart.py --workdir=runs/finetune \
      --config.method.name=finetune
  python -m jaxcl.main --config=configs/quickstart.py --workdir=runs/joint \
      --config.method.name=finetune --config.scenario.name=joint
  jaxcl compare runs/finetune runs/quickstart \
      --matrix=predict/class_incremental --out=runs/compare.png

The method is of Caccia et al., "Reducing Representation Drift in Online Continual
Learning", 2021; no paper has a score on this set.
"""

import ml_collections

from jaxcl.config import recipe


def get_config():
    config = ml_collections.ConfigDict()
    config.name = "quickstart"
    config.seed = 0
    config.batch_size = 16
    config.epochs = 10
    config.data = {"name": "shapes", "size": 24, "train": 600, "test": 100}
    config.scenario = {"name": "class"}
    scenario = config.scenario.get_ref("name")
    config.scenario.num_tasks = recipe.look_up({"": 5, "joint": 1}, scenario)
    config.augment = {
        "size": 24,
        "views": 1,
        "crop": False,
        "pad": 3,
        "jitter": (0.0, 0.0, 0.0, 0.0),
        "grayscale": 0.0,
        "flip": 0.0,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.25, 0.25, 0.25),
    }
    config.encoder = {"name": "conv_net", "width": 16}
    config.replay = {"per_class": 20, "augment": "all"}
    config.method = {"name": "er_ace"}
    config.scale_lr = False
    config.optimizer = {"name": "adam", "lr": 3e-3}
    config.schedule = {"name": "cosine"}
    config.evaluators = {"predict": {"met_only": False}}
    config.evaluators.knn = {"k": 20}
    # Labels draw the embeddings of a class together: their rank may fall unwarned.
    config.evaluators.collapse = {"share": 0.0}
    config.devices = 1  # sixteen images do not share out over many
    config.plasticity = False
    config.save_every = 1000
    return config
