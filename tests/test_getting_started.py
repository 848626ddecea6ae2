"""docs/getting_started.md: its commands and code run, in its order."""

import json
import pathlib
import re
import shlex
import shutil

import pytest

from helpers import pages, processes
from jaxcl.run import result_file, updates

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "getting_started.md").read_text()
STREAM = [
    "--config.epochs=1",
    "--config.data.train=80",
    "--config.data.test=20",
    "--config.encoder.width=4",
]
# Less of everything: of options that a command gives the value, else one more.
SMALL = {
    "--config=configs/quickstart.py": STREAM,
    "--config=configs/quickstart_pnr.py": [
        "--config.epochs=2",
        "--config.schedule.warmup_epochs=1",
        "--config.encoder.width=8",
    ],
    "own_images:shapes/plain,encoder=conv_net": [
        "--config.epochs=1",
        "--config.encoder.width=8",
        "--config.evaluators.tsne.max_points=60",
    ],
    "--config=configs/transfer.py": ["--config.evaluators.linear.epochs=5"],
    "update": ["--config.limits.accuracy_drop=1.0", "--config.train.epochs=1"],
}


def blocks():
    """("python" or "command", text) of what the page runs, in its order."""
    found = []
    for language, body in pages.FENCE.findall(PAGE):
        if language == "python":
            found.append((language, body))
        elif re.match(r"(python -m jaxcl|jaxcl) ?", body):
            lines = re.sub(r"\\\n\s*", " ", body).strip().splitlines()
            found += [("command", line) for line in lines]
    return found


def smaller(words):
    """A command with the values of SMALL in place of its own."""
    for mark, options in SMALL.items():
        if mark in words:
            names = {option.partition("=")[0] for option in options}
            kept = [word for word in words if word.partition("=")[0] not in names]
            words = kept + options
    return words


def run_page(folder):
    """Run all of the page in a folder, with less of everything.

    Returns:
      what each command and each piece of code printed.
    """
    shutil.copytree(ROOT / "configs", folder / "configs")
    printed = []
    for kind, body in blocks():
        words = ["python", "-c", body]
        if kind == "command":
            words = smaller(shlex.split(body))
        if words[0] == "jaxcl":
            words[:1] = ["python", "-m", "jaxcl"]
        printed.append(processes.run(words[1:], folder))
    return printed


def named(pattern):
    """Inline code of the page's prose that matches."""
    names = re.findall(r"`([^`\n]+)`", pages.prose(PAGE))
    return [name for name in names if re.match(pattern, name)]


@pytest.mark.slow
def test_the_page_runs_and_leaves_what_it_names(tmp_path):
    printed = run_page(tmp_path)
    paths = named(r"(runs|exports)/")
    assert len(paths) > 5
    for path in paths:
        assert (tmp_path / path).exists(), path
    for word in (
        "forgetting",
        "stability",
        "plasticity",
        "untrained",
        "cost of 5 tasks: ",
    ):
        assert word in printed[0]
    results = result_file.read_results(tmp_path / "runs" / "quickstart")
    measures = result_file.summary(results)["predict/class_incremental"]
    assert printed[1].split("]]")[1].split()[0] == str(measures["average_accuracy"])
    config = json.loads((tmp_path / "runs" / "finetune" / "config.json").read_text())
    assert config["method"]["name"] == "finetune"
    config = json.loads((tmp_path / "runs" / "joint" / "config.json").read_text())
    assert config["scenario"] == {"name": "joint", "num_tasks": 1}
    assert "finetune" in printed[4]
    mine = tmp_path / "runs" / "mine"
    results = result_file.read_results(mine)
    assert len(results["task_names"]) == 1
    judged = result_file.read_results(tmp_path / "runs" / "outlines")
    accuracy = result_file.summary(judged)["linear/class_incremental"][
        "average_accuracy"
    ]
    assert 0.1 < accuracy < 1 and judged["checkpoint"]["path"] == "runs/mine"
    update = updates.read_report(mine / "updates" / "0001")
    assert update["accepted"]
    (told,) = (text for text in printed if "Search index: " in text)
    assert re.search(r"[\d.]+ -> [\d.]+ %, ", told) and "Accepted" in told
    card = json.loads((tmp_path / "exports" / "mine" / "card.json").read_text())
    assert card["checkpoint"]["run"].startswith("sha256:")  # no path of this machine
    assert card["input"]["size"] == 24 and card["input"]["channels"] == 3
    count, width = re.search(r"It prints `\((\d+), (\d+)\)`", PAGE).groups()
    shape, kinds = re.match(r"(\(.*?\)) (\[.*\])", printed[-1]).groups()
    assert int(count) == len([*(tmp_path / "labelled").rglob("*.png")])
    assert shape == f"({count}, {int(width) // 4})"  # a quarter of its width, see SMALL
    assert json.loads(kinds.replace("'", '"'))[0] == "arrow"
