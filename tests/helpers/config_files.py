"""Configs as the command line makes them, checked as far as no data are needed."""

import importlib.util
import pathlib

import numpy as np

from jaxcl import cli, schema
from jaxcl.config import files, resolve, sections, teacher
from jaxcl.data import stream
from jaxcl.data.stream import scenarios
from jaxcl.methods.online import replay
from jaxcl.run import evaluation, transfer

ROOT = pathlib.Path(__file__).parents[2]


def load(path):
    """A file as a module that no `import` finds."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(arguments):
    """The config that a command runs, overrides applied, as `jaxcl train` has it."""
    return files.read_config(cli.make_parser("train").parse_args(arguments).config)


def check_options(config):
    """All that `build` checks before it reads data; and the scenario, on a stand-in."""
    raw = config.to_dict()
    trains = raw.get("checkpoint") is None
    top = sections.read_top(
        sections.nest_method(raw if trains else transfer.complete(raw, run_config()))
    )
    sections.read_tasks(top.data, top.scenario)
    if trains:
        made(config, 100)
    else:
        sections.make_encoder(top)
        schema.options(sections.check_image, top.augment, "config.augment")
    for name, section in top.evaluators.items():
        evaluation.read_entry(name, section)
    scenario = dict(top.scenario)
    if scenario.get("per_class") is not None:
        scenario["per_class"] = min(scenario["per_class"], 6)
    if scenario.get("classes") is not None:  # names, of the classes of another set
        scenario["classes"] = range(len(scenario["classes"]))
    name = scenario.pop("name")
    domains = 1 if name in ("permuted", "rotated") else 6
    scenarios.make(stand_in(domains), name=name, **scenario)


def run_config():
    """The config of the run that commands call RUN."""
    return parse([f"--config={ROOT}/configs/pnr_imagenet100.py"]).to_dict()


def stand_in(domains=6):
    """A set of 100 classes and 6 rows of each, a scenario's to cut."""
    label = np.tile(np.arange(100, dtype=np.int32), 6)
    domain = np.repeat(np.arange(6, dtype=np.int32), 100) % domains
    images = np.zeros((600, 1, 1, 1), np.uint8)
    split = stream.Examples(label, domain, images)
    names = [tuple(map(str, range(n))) for n in (100, domains)]
    return stream.Dataset("stand-in", *names, split, split, split)


def take(name, argument):
    return parse([f"--config={ROOT}/configs/{name}.py:{argument}"])


def made(config, classes):
    """The method that a config names, of all that its sections make."""
    top = sections.read_top(resolve.resolve(config.to_dict()))
    make_parts, image = sections.read_parts(top)
    options = schema.options(replay.settings, top.replay or {}, "config.replay")
    settings = replay.settings(classes, top.batch_size, **options)
    taught = teacher.read_teacher(top, image)
    parts = make_parts(num_classes=classes, replay=settings, teacher=taught)
    chosen = sections.find_method(top.method)
    return top, parts, sections.make_method(top, chosen, parts), settings
