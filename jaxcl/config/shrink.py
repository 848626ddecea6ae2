"""Shrink any config to seconds: the same code on digits, with a tiny network."""

import ml_collections

from jaxcl import schema
from jaxcl.config import recipe


def shrink(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The config itself, with small everything; what it composes stays.

    Digits, resized to 16 colour pixels, stand in for the data set, and rings and trees
    for a set of graphs, so that no data need be there; numbers mean nothing. Values
    that follow another field (`recipe.by`) still do.
    """
    config.name = f"{config.name}_debug"
    if config.augment.get("name") == "graphs":
        config.data = {"name": "rings_and_trees"}
    else:
        config.data = {"name": "digits", "size": 16, "channels": 3}
        config.augment.size = 16
        config.augment.resize = None
        if config.augment.get("local"):
            config.augment.local.update(views=2, size=8)
        small = {"name": "resnet", "depth": 10, "width": 4, "stem": "cifar"}
        if config.encoder.name == "vit":
            small = {"name": "vit", "width": 16, "layers": 2, "heads": 2, "hidden": 32}
            small |= {"patch": 4, "image_size": 16}
        if config.encoder.name == "convnext":
            small = {"name": "convnext", "depths": (1, 1), "width": 8, "patch": 2}
        config.encoder = small
    if config.scenario.name not in ("joint", "growth"):
        # Digits are one domain: their slices stand in.
        name = "data" if config.scenario.name == "domain" else config.scenario.name
        config.scenario = {"name": name, "num_tasks": 2}
    if config.scenario.get("classes") is not None:
        with config.ignore_type():  # names, of the classes of another set
            config.scenario.classes = tuple(range(len(config.scenario.classes)))
    if config.scenario.get("per_class") is not None:
        config.scenario.per_class = 60
    if config.scenario.get("imbalance") is not None:
        config.scenario.imbalance.update(dominant=0, epoch_steps=5)
    config.batch_size = 32
    with config.ignore_type():  # a config may have a tuple here
        config.epochs = 1
    small = {"hidden_dim": 16, "output_dim": 8, "distill_hidden_dim": 16}
    small |= {"predictor_hidden_dim": 16, "queue_size": 64, "memory_size": 32}
    small |= {"drawn": 8, "prototypes": 16, "slices": 16}
    if config.method.get("projector"):  # output_dim is of a network in its place
        del small["output_dim"]
        small["projector"] = 8
    make = schema.method(config.method.name).make
    small = {name: x for name, x in small.items() if schema.may_take(make, name)}
    with config.ignore_type():  # a reference may stand there, see `recipe`
        recipe.set_where_taken(config.method, **small)
    if "replay" in config:
        config.replay.size = 8
    if "warmup_epochs" in config.schedule:
        config.schedule.warmup_epochs = 0
    for name, section in config.evaluators.items():
        if section.get("name", name) == "linear":
            section.update(epochs=3, augment=False)
        if section.get("name", name) == "filtering":
            section.update(size=32, batch_size=16)
        if section.get("name", name) == "objective":
            section.update(batch_size=16, max_rows=32)
        if section.get("name", name) == "logistic":
            section.update(passes=min(section.get("passes", 1), 1), iterations=5)
        if section.get("name", name) == "svm":
            section.update(folds=2, inner_folds=2, penalties=(1.0,), max_rows=200)
    config.workers = 0
    config.save_every = 10
    return config
