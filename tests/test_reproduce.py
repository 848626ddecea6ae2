"""The command that reproduces published numbers: its rows, arithmetic and page."""

import json
import math
import pathlib
import subprocess

import numpy as np
import pytest
from sklearn import datasets

from helpers import config_files
from jaxcl.config import sections
from jaxcl.reproduce import command, page, table, verdict
from jaxcl.run import results as results_lib

ROOT = pathlib.Path(__file__).parents[1]


def published(value=80.0, **fields):
    return verdict.Published(value, **fields)


# --- the verdict ---------------------------------------------------------------


@pytest.mark.parametrize("apart,agrees", [(1.9, True), (2.1, False), (-2.1, False)])
def test_means_agree_within_two_standard_errors(apart, agrees):
    """Five values with deviation 1: error 1 / sqrt(5), theirs so that both make 1."""
    ours = 80 + apart + np.array([-1, 1, 0, -1, 1])
    ours = (ours - ours.mean()) / ours.std(ddof=1) + 80 + apart
    theirs = math.sqrt(1 - 1 / 5)
    said = verdict.judge(list(ours), published(error=theirs))
    assert said.agrees == agrees
    assert said.mean == pytest.approx(80 + apart)
    assert said.deviation == pytest.approx(1)
    assert said.difference == pytest.approx(apart)
    side = "above" if apart > 0 else "below"
    inside = "within" if agrees else "more than"
    assert said.words == f"{abs(apart):.2f} {side}; {inside} two standard errors (2.00)"


@pytest.mark.parametrize("value,agrees", [(76.9, False), (77.1, True), (95.0, True)])
def test_a_source_that_tests_itself_is_asked_its_test(value, agrees):
    said = verdict.judge([value, value + 0.02], published(tolerance=3.0))
    assert said.agrees == agrees
    assert ("passes" if agrees else "fails") in said.words and "3 below" in said.words


@pytest.mark.parametrize(
    "values,fields,why",
    [
        (
            [80.0, 82.0],
            {"error": 0.0, "read": False},
            "what we recall (two standard errors: 2.00), ",
        ),
        ([80.0], {"error": 0.1, "read": False}, "0.00 above what we recall, "),
        ([80.0, 81.0], {}, "the source has no spread"),
        ([80.0], {"error": 0.1}, "one seed has no spread"),
    ],
)
def test_what_cannot_be_judged_is_not(values, fields, why):
    said = verdict.judge(values, published(**fields))
    assert said.agrees is None and why in said.words
    with pytest.raises(ValueError, match="must be of one seed at least"):
        verdict.judge([], published())


def test_spreads_become_standard_errors_of_means():
    survey = table.find("survey_er_split_cifar100").published
    assert survey.error == pytest.approx(1.22 / math.sqrt(5))
    # The code of the paper prints two standard errors.
    assert table.find("er_split_cifar10_100").published.error == pytest.approx(0.3)
    assert table.find("gdumb_split_mnist").published.tolerance == 3


# --- the table -----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Empty folders of every set."""
    for row in table.ROWS.values():
        (tmp_path / row.data).mkdir(exist_ok=True)
    return str(tmp_path)


@pytest.mark.parametrize("name", table.ROWS)
def test_every_row_is_a_config_with_a_method(name, folder):
    row = table.find(name)
    config = command.configured(row, seeds=3, data=folder)
    assert (config.seeds, config.data.path) == (3, f"{folder}/{row.data}")
    top = sections.top_of(config.to_dict())
    judged = row.measure.partition("/")[0]
    assert judged in top.evaluators
    for other in row.beside:
        assert other.measure.partition("/")[0] in top.evaluators
    config_files.made(config, 100 if row.data == "cifar100" else 10)
    scenario = dict(top.scenario)
    assert sections.tasks(top.data, scenario, top.seed)
    assert row.minutes > 0 and row.source and row.what


def test_overrides_reach_the_config(folder):
    row = table.find("er_ace_split_cifar100")
    config = command.configured(row, seeds=1, data=folder)
    assert config.method.head == "linear" and config.data.validation == 0
    assert tuple(config.augment.std) == (0.2009, 0.1984, 0.2023)
    config = command.configured(
        table.find("er_split_cifar10_100"), seeds=1, data=folder
    )
    assert config.replay.per_class == 100


def test_refuses_what_is_not_there(tmp_path, capsys):
    assert command.main(["er_split_mnist_20", f"--data={tmp_path}"]) == 2
    assert "did you mean er_split_mnist_200" in capsys.readouterr().err
    assert command.main(["er_split_mnist_200", f"--data={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert f"--data={tmp_path}: has neither mnist/" in said and "mnist.npz" in said
    for wrong, words in (
        ([], "give the NAME of a row, or --list"),
        (["--list", "x"], "give the NAME of a row, or --list"),
        (["x", "--seeds=0"], "--seeds=0: must be at least 1"),
        (["x", "--page=a.txt"], "--page=a.txt: must end in .md"),
    ):
        with pytest.raises(SystemExit):
            command.main(wrong)
        assert words in capsys.readouterr().err


def test_the_list_has_every_row(capsys):
    assert command.main(["--list"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:-1]] == list(table.ROWS)
    assert "80.43?" in said[1 + list(table.ROWS).index("er_split_mnist_200")]


# --- the page and the whole command --------------------------------------------


def results(matrix, scalar):
    empty = results_lib.empty(2)
    for task, row in enumerate(matrix):
        empty = results_lib.add(empty, task, {"a/b": row}, {"a/c": scalar}, 1.0)
    return empty


def test_measured_is_the_last_mean_over_tasks_or_a_scalar():
    whole = results([[0.9, np.nan], [0.5, 0.7]], 0.25)
    assert page.measured(whole, "a/b") == pytest.approx(0.6)
    assert page.measured(whole, "a/c") == 0.25
    with pytest.raises(ValueError, match="a/d: the run has not measured it"):
        page.measured(whole, "a/d")
    with pytest.raises(ValueError, match="a/b: the run has not done its last task"):
        page.measured(results([[0.9, np.nan]], 0.25), "a/b")


def test_a_probe_stands_beside_the_accuracy_that_is_published_with_it(tmp_path):
    row = table.find("survey_er_split_cifar100")
    (probe,) = row.beside
    assert (probe.published.value, probe.published.read) == (44.91, True)
    assert probe.published.error == pytest.approx(0.9 / math.sqrt(5))
    cost = {"train_seconds": 60.0, "compile_seconds": 0.0, "evaluation_seconds": None}
    runs = {}
    for seed, (accuracy, judged) in enumerate([(0.281, 0.4425), (0.284, 0.4575)]):
        runs[seed] = results_lib.add(
            results_lib.empty(1),
            0,
            {},
            {"predict/accuracy": accuracy, probe.measure: judged},
            1.0,
        )
        runs[seed]["cost"] = {"num_devices": 1, "device": "cpu"}
    path = tmp_path / "numbers.json"
    own = page.add(path, row, runs, [cost], "abc")[row.name]
    assert own["values"] == {"0": 28.1, "1": 28.4}
    assert own["beside"] == {"logistic/accuracy": {"0": 44.25, "1": 45.75}}
    said = page.comparison(row, own).splitlines()
    at = said.index("  and a probe of the final encoder:")
    assert said[at + 1] == "  ours       45.00 +- 1.06   (2 seeds: 44.25 45.75)"
    assert said[at + 2] == "  published  44.91 +- 0.9, 5 runs"
    assert "0.09 above; within two standard errors (1.70)" in said[at + 3]
    text = page.written({row.name: own})
    assert "- And a probe of the final encoder, `logistic/accuracy`: 45.00" in text
    assert "; a probe of the final encoder **agrees**: 0.09 above; within" in text
    assert "28.15 +- 1.22, 5 runs; a probe of the final encoder: 44.91" in page.written(
        {}
    )
    # A row that was measured before the probe was: its page has the one number.
    del own["beside"]
    assert "final encoder" not in page.comparison(row, own) + page.written(
        {row.name: own}
    )


def test_the_commit_says_whether_its_folder_was_changed(tmp_path):
    assert page.commit(tmp_path) == ""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "a.py").write_text("")

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        words = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    git("init")
    git("add", ".")
    git("commit", "--message=a")
    commit = git("rev-parse", "--short", "HEAD").strip()
    assert page.commit(folder) == commit != ""
    (tmp_path / "beside.py").write_text("")
    assert page.commit(folder) == commit
    (folder / "a.py").write_text("1")
    assert page.commit(folder) == f"{commit}+"


def test_a_row_runs_whole_and_again(tmp_path, capsys):
    """On 300 digits enlarged to 24 pixels, within 28 as MNIST's are."""
    digits = datasets.load_digits()
    images = np.kron(np.uint8(15 * digits.images), np.ones((1, 3, 3), np.uint8))
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    label = digits.target.astype(np.int32)
    parts = {"train": slice(0, 300), "test": slice(300, 500)}
    arrays = {f"{n}_x": images[rows] for n, rows in parts.items()}
    arrays |= {f"{n}_y": label[rows] for n, rows in parts.items()}
    np.savez(tmp_path / "mnist.npz", **arrays)
    name, written = "replay_split_mnist", tmp_path / "numbers.md"
    arguments = [name, "--seeds=2", f"--data={tmp_path}", f"--out={tmp_path / 'runs'}"]
    arguments += [f"--page={written}"]
    assert command.main(arguments) == 0
    said = capsys.readouterr().out
    stored = json.loads((tmp_path / "numbers.json").read_text())
    values = stored[name]["values"]
    assert list(values) == ["0", "1"] and values["0"] != values["1"]
    assert all(10 < value < 100 for value in values.values())
    for seed, value in values.items():
        run = results_lib.read_results(tmp_path / "runs" / name / f"seed_{seed}")
        assert value == round(100 * run["scalars"][-1]["predict/accuracy"], 4)
    assert page.comparison(table.find(name), stored[name]) in said
    assert written.read_text() == page.written(stored)
    # Again: all is there already, and rows that were measured before stay.
    stored["er_split_mnist_200"] = stored[name]
    (tmp_path / "numbers.json").write_text(json.dumps(stored))
    assert command.main(arguments) == 0
    again = json.loads((tmp_path / "numbers.json").read_text())
    assert again[name]["values"] == values and "er_split_mnist_200" in again


def test_the_page_is_made_of_the_numbers_beside_it():
    found = json.loads((ROOT / "docs" / "reproductions.json").read_text())
    assert set(found) <= set(table.ROWS)
    assert (ROOT / "docs" / "reproductions.md").read_text() == page.written(found)
    assert not any(own["commit"].endswith("+") for own in found.values())
