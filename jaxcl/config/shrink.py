"""Shrink any config to seconds: the same code on digits, with a tiny network.

Sizes of methods, networks and evaluators are declared at their functions, see
`schema.debug`.
"""

import ml_collections
from ml_collections import config_dict

from jaxcl import lookup, schema
from jaxcl.config import recipe, sections
from jaxcl.data.stream import imbalance


def shrink(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Make everything in a config small, in place; its parts stay the same.

    Digits, resized to 16 colour pixels, stand in for the data set, and rings and trees
    for a set of graphs, so no data are needed; the resulting numbers mean nothing. If
    the config reads files and the command sets config.data.path, a few rows from there
    are read instead. Values that follow another field (`recipe.look_up`) still do.
    """
    rules = sections.SECTIONS
    config.name = f"{config.name}_debug"
    if config.augment.get("name") == "graphs":
        config.data = {"name": "rings_and_trees"}
    else:
        _shrink_images(config)
        if config.augment.get("local"):
            config.augment.local.update(_debug_sizes(sections.LOCAL_CROPS, {}))
        name = config.encoder.name if config.encoder.name in _ENCODERS else "resnet"
        config.encoder = {"name": name} | _debug_sizes(rules["encoder"], {"name": name})
    _shrink_scenario(config)
    config.batch_size = 32
    if config.get("accumulate", 1) > 1:
        config.accumulate = 2
    with config.ignore_type():  # a config may have a tuple or a reference here
        config.epochs = 1
        sizes = _debug_sizes(rules["method"], config.method)
        if "projector" in sizes:  # a network in place of one of `output_dim`
            del sizes["output_dim" if config.method.get("projector") else "projector"]
        config.method.update(sizes)
        _shrink_inner(config)
    if "replay" in config:
        config.replay.update(_debug_sizes(rules["replay"], {}))
    if "warmup_epochs" in config.schedule:
        config.schedule.warmup_epochs = 0
    for key, section in [*config.evaluators.items()]:
        if section.get("name", key) == "tsne":  # takes longer than the run
            del config.evaluators[key]
            continue
        sizes = _debug_sizes(sections.EVALUATOR, section, f"config.evaluators.{key}")
        section.update(sizes)
    config.save_every = 10
    return config


def _shrink_images(config) -> None:
    """Read digits or, if the command sets the path of files, a few of their rows."""
    before, config.data = config.data, ml_collections.ConfigDict()
    if "path" not in before:
        config.data = {"name": "digits", "size": 16, "channels": 3}
        config.augment.size = 16
        config.augment.resize = config_dict.placeholder(int)
        return
    config.data = {"name": "few_rows", "size": 16}
    config.data.path = config_dict.placeholder(str)
    config.data.classes = config_dict.placeholder(str)
    config.data.folders = before.get("folders", "guess")
    # None without a path: digits have 16 pixels
    path = config.data.get_ref("path")
    config.augment.size = 16
    config.augment.resize = recipe.compute(lambda _: 16, path, like=16)


def _shrink_inner(config) -> None:
    """Shrink the sections inside config.method, whatever names they get."""
    method = config.method = recipe.Sections(config.method)
    make = lookup.find_method(method.name).make
    for key, rule in schema.choices(make).items():
        if not isinstance(method.get(key), ml_collections.ConfigDict):
            default = schema.defaults(make)[key]
            name = method.get_ref(key) if key in method else default
            if key in method:
                del method[key]
            method[key] = ml_collections.ConfigDict({"name": name})
        sizes = {n: schema.debug_sizes(x) for n, x in rule.functions.items()}
        recipe.set_by_name(
            method[key], {n: values for n, values in sizes.items() if values}
        )


_ENCODERS = ("vit", "convnext")  # a small ResNet stands for any other


def _debug_sizes(rule: sections.Section, section, path="config") -> dict:
    """Read the small options of the function that a section names."""
    return schema.debug_sizes(rule.find(path, section))


def _shrink_scenario(config) -> None:
    """Cut two tasks of some classes and rows."""
    scenario = config.scenario
    if scenario.name not in ("joint", "growth"):
        # Digits are one domain: their slices stand in.
        name = "data" if scenario.name == "domain" else scenario.name
        config.scenario = scenario = {"name": name, "num_tasks": 2}
    if scenario.get("classes") is not None:
        with config.ignore_type():  # names, of the classes of another set
            scenario.classes = tuple(range(len(scenario.classes)))
    if scenario.get("per_class") is not None:
        scenario.per_class = 60
    if scenario.get("imbalance") is not None:
        scenario.imbalance.update(schema.debug_sizes(imbalance.dominated))
