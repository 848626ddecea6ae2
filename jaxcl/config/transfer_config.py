"""Make configs that evaluate, or only embed with, the encoder of a run."""

import ml_collections


def make_config(section: dict, evaluation: str, parent_config: dict) -> dict:
    """Make a transfer config of one dataset, with the image size of the run.

    Args:
      section: config.data.
      evaluation: name of the evaluation split, as in config.scenario.
      parent_config: `transfer.config_of` the run, or the folder of an encoder.
    """
    augment = parent_config["augment"]
    return {
        "data": dict(section),
        "scenario": {"name": "joint", "evaluation": evaluation},
        "augment": {k: v for k, v in augment.items() if k in ("size", "resize")},
        "evaluators": {},
        "tensorboard": False,
        "plots": False,
        "progress": False,
    }


def add_checkpoint(config: dict, run: str) -> ml_collections.ConfigDict:
    """Complete a transfer config with the encoder of a run."""
    return ml_collections.ConfigDict({**config, "checkpoint": str(run)})
