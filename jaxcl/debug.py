"""Shrink any config to seconds: the same code on digits, with a tiny network."""

import ml_collections


def shrink(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The config with small everything; what it composes stays.

    Digits, resized to 16 colour pixels, stand in for the data set, so that no
    data need be there; numbers that come out mean nothing.
    """
    config = ml_collections.ConfigDict(config.to_dict())
    config.name = f"{config.name}_debug"
    config.data = {"name": "digits", "size": 16, "channels": 3}
    scenario = {"name": config.scenario.name, "num_tasks": 2}
    config.scenario = {"name": "joint"} if scenario["name"] == "joint" else scenario
    config.augment.size = 16
    config.augment.resize = None
    config.batch_size = 32
    config.epochs = 1
    config.encoder = {"name": "resnet", "depth": 10, "width": 4, "stem": "cifar"}
    small = {"hidden_dim": 16, "output_dim": 8, "distill_hidden_dim": 16}
    small["queue_size"] = 64
    config.method.update({k: v for k, v in small.items() if k in config.method})
    if "warmup_epochs" in config.schedule:
        config.schedule.warmup_epochs = 0
    if "linear" in config.evaluators:
        config.evaluators.linear.update(epochs=3, milestones=(2,), augment=False)
    config.workers = 0
    config.save_every = 10
    return config
