"""docs/reproducing_others.md: its rows run, its costs are those of the configs."""

import pathlib
import re

import numpy as np
import pytest

from helpers import config_files, pages
from jaxcl.data import stream
from jaxcl.methods import icl, rehearsal
from jaxcl.methods.icl import orders
from jaxcl.report import speedup

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reproducing_others.md").read_text()
PAPERS = {
    "ER-ACE and ER-AML": "er_ace",
    "CCLIS": "cclis",
    "DUEL": "duel",
    "ICL": "icl",
}
# Train images of each set, all classes together, as the papers' sets are split.
TRAIN = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "miniimagenet": 60_000 - 12_000,
    "tinyimagenet": 100_000,
    "imagenetlt": 115_846,
}
CLASSES = {
    "cifar10": 10,
    "cifar100": 100,
    "miniimagenet": 100,
    "tinyimagenet": 200,
    "imagenetlt": 1000,
}


def part(title):
    """The page's text on one paper."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]


def load(name):
    return config_files.load(ROOT / "configs" / f"{name}.py")


def rows_of(module):
    """The words that a config takes after its colon."""
    if hasattr(module, "METHODS"):
        return list(module.METHODS)
    if hasattr(module, "CONTRASTIVE"):
        return [*module.CONTRASTIVE, *module.REPLAY]
    return [*icl.VARIANTS, "old"]


def numbers(text):
    return [int(cell.replace(",", "")) for cell in text]


def tables(text):
    """Each table of a text: rows of cells, the head first."""
    for table in re.findall(r"^\|.*(?:\n\|.*)+", text, re.M):
        lines = [pages.cells(line) for line in table.splitlines()]
        yield [lines[0], *lines[2:]]


# Rows and commands


@pytest.mark.parametrize("title", PAPERS)
def test_every_row_of_a_table_is_one_of_the_configs(title):
    text, seen = part(title), set()
    names = sorted(set(re.findall(r"configs/(\w+)\.py", text)))
    known = {name: rows_of(load(name)) for name in names if "transfer" not in name}
    allowed = {row for rows in known.values() for row in rows}
    for head, *lines in tables(text):
        if "row" in head:
            column = head.index("row")
            for line in lines:
                if line[column] in ("all", ""):
                    continue
                found = re.findall(r"`(\w+)`", line[column]) or [line[column]]
                given = {row for row in found if not row.startswith("all but")}
                assert given <= allowed, line
                seen |= given
    paper = {"er_ace": "er_ace", "cclis": "cclis", "duel": "d_moco", "icl": "icl"}
    assert paper[PAPERS[title]] in seen and len(seen) > 5


def places():
    """Commands of the page with ROW, once for each row of their config."""
    for title in PAPERS:
        for arguments in pages.commands(
            part(title), "jaxcl.main", fill=lambda word: word
        ):
            name = re.search(r"configs/(\w+)\.py", arguments[0])[1]
            filled = [pages.filled(word) for word in arguments]
            if any("config.replay.capacity" in word for word in arguments):
                arguments[0] = arguments[0].replace(":er", ":ROW")
            if "ROW" not in " ".join(arguments) or name == "transfer":
                yield pytest.param(filled, id=f"{title}-{name}")
                continue
            for row in usable(load(name), arguments):
                words = [word.replace("ROW", row) for word in arguments]
                words = [pages.filled(word) for word in words]
                yield pytest.param(words, id=f"{title}-{name}-{row}")


def usable(module, arguments):
    """Rows that the page gives a command with these options."""
    given = " ".join(arguments)
    rows = rows_of(module)
    if "config.method.memory_size" in given:
        return list(module.CONTRASTIVE)
    if "config.replay.capacity" in given:
        return list(module.REPLAY)
    if "config.replay.measure" in given:
        return ["er", "er_ace", "er_aml"]
    return [row for row in rows if row != "old"]


@pytest.mark.parametrize("arguments", list(places()))
def test_every_command_takes_every_row(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    config_files.check_options(config_files.parse(arguments))


def test_the_gradients_can_be_measured_for_the_rows_of_figure_1(monkeypatch):
    monkeypatch.chdir(ROOT)
    option = re.search(r"as Table 1, with `([^`]+)`", PAGE)[1].replace('"', "")
    for row in ("er", "er_ace", "er_aml"):
        words = [f"--config=configs/er_ace_cifar10.py:{row}", option]
        config = config_files.parse(words)
        assert config.replay.measure == ("drift", "gradients")
        config_files.check_options(config)


def test_speedups_are_asked_for_as_the_command_wants():
    found = pages.commands(PAGE, "jaxcl.speedup")
    whole = [arguments for arguments in found if arguments and "=" in arguments[0]]
    assert whole
    for arguments in whole:
        options = speedup.parser().parse_args(arguments)
        assert options.baseline == "retrain"


# Costs


def rows_a_task(name, config):
    """Train rows of each task, by hand: what is held out is of each class."""
    data = name.rpartition("_")[2]
    rows, classes = TRAIN[data], CLASSES[data]
    held = round(rows / classes * config.data.get("validation", 0.0))
    return (rows - held * classes) // config.scenario.get("num_tasks", 1)


def cost(name, config, memory=None):
    """Optimiser steps and rows of a whole run.

    Args:
      memory: rows that CCLIS and Co2L store and mix into later tasks.
    """
    size, scenario = config.batch_size, config.scenario
    if scenario.get("imbalance"):
        steps = config.epochs * scenario.imbalance.epoch_steps
        return steps, steps * size
    tasks, rows = scenario.get("num_tasks", 1), rows_a_task(name, config)
    epochs = config.epochs
    first, later = epochs if isinstance(epochs, tuple) else (epochs, epochs)
    steps = first * (rows // size)
    for _ in range(tasks - 1):
        new = size
        if memory:  # in proportion, at least one
            new = size - max(round(size * memory / (memory + rows)), 1)
        steps += later * (rows // new)
    return steps, steps * size


def cost_tables():
    for title in PAPERS:
        for head, *lines in tables(part(title)):
            if "steps" in head and head[0] == "config":
                yield from (dict(zip(head, line, strict=True)) for line in lines)


COSTS = list(cost_tables())


def meant(line, names):
    """Rows of a config that a line of a cost table is of."""
    text = line["row"]
    marked = re.findall(r"`(\w+)`", text)
    if " to " in text:
        return names[names.index(marked[0]) : names.index(marked[1]) + 1]
    if marked:
        return marked
    here = [other for other in COSTS if other["config"] == line["config"]]
    apart = [row for o in here for row in re.findall(r"`(\w+)`", o["row"])]
    return [name for name in names if name not in apart]


@pytest.mark.parametrize(
    "line", COSTS, ids=lambda line: line["config"].strip("`")[8:] + line["row"]
)
def test_costs_are_those_of_the_configs(line):
    name = re.search(r"configs/(\w+)\.py", line["config"])[1]
    module = load(name)
    want = tuple(numbers([line["steps"], line["images"]]))
    rows = meant(line, rows_of(module))
    assert rows
    for row in rows:
        config = module.get_config(row)
        memory = line.get("memory", "any")
        stored = None
        if memory != "any":
            config.method.memory_size = stored = int(memory)
        assert cost(name, config, stored) == want, row


def test_two_tasks_are_as_many_steps_as_table_1_says():
    config = load("er_ace_cifar10").get_config("er")
    each = rows_a_task("er_ace_cifar10", config) // config.batch_size
    said = re.search(r"Two of the five tasks are enough, ([\d,]+) steps", PAGE)[1]
    assert numbers([said]) == [2 * each]


def test_the_passes_of_icl_follow_from_its_inner_steps():
    for head, *lines in tables(part("ICL")):
        if head[:2] != ["growth", "inner steps"]:
            continue
        assert len(lines) == 3
        for growth, inner, retrain, own, ratio in lines:
            steps = orders.inner_steps(float(growth))
            assert int(inner) == steps and retrain == "2"
            assert float(own) == pytest.approx(3 * (steps + 1) * float(growth))
            assert float(ratio) == pytest.approx(float(own) / 2, abs=0.05)


def test_epochs_with_stored_rows_have_the_steps_that_costs_are_made_of():
    """The formula for stored rows, against batches that are really drawn."""
    size = 512
    for memory, rows in ((200, 10_000), (500, 10_000), (50, 2_000)):
        blank = np.zeros(rows + memory, np.int32)
        examples = stream.Examples(blank, blank, None)
        train = stream.Source(examples, np.arange(memory, rows + memory))
        for mixed in (
            rehearsal.together(train, np.arange(memory)),
            rehearsal.stratified(train, np.arange(memory), share=None),
        ):
            rng = np.random.default_rng(0)
            drawn = mixed.order(rng, mixed.rows, size)
            new = size - max(round(size * memory / (memory + rows)), 1)
            assert drawn.shape == (rows // new, size)
