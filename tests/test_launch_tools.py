"""launch/sweep.py and launch/table.py: names, what is left to do, numbers by hand."""

import json
import pathlib
import shlex

import pytest

from helpers import config_files, run_directories
from jaxcl.run import results as results_lib

NAME = run_directories.NAME
KNN = "knn/class_incremental"
LAUNCH = config_files.ROOT / "launch"
sweep, table = (config_files.load(LAUNCH / f"{name}.py") for name in ("sweep", "table"))


# Sweep


def runs(*arguments):
    return sweep.expand(sweep.parser().parse_args(arguments))


TWO = ["--config", "configs/a.py:x", "configs/b.py", "--vary", "config.m.t", "1", "2"]


def printed(capsys, *arguments, code=0):
    assert sweep.main([*arguments, "--python=py"]) == code
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_every_combination_is_a_command_once(capsys, tmp_path):
    root = tmp_path / "my runs"
    lines = printed(capsys, *TWO, "--seeds", "3", "5", f"--root={root}")
    want = [
        [
            "py",
            "-m",
            "jaxcl.main",
            f"--config=configs/{config}",
            f"--config.m.t={t}",
            f"--config.seed={seed}",
            f"--workdir={root}/{name},m.t={t}/seed_{seed}",
        ]
        for config, name in (("a.py:x", "a+x"), ("b.py", "b"))
        for t in (1, 2)
        for seed in (3, 5)
    ]
    assert lines == want


def test_names_depend_on_the_run_alone():
    """Not on the rest of the sweep, nor on the order of its options."""
    small = runs("--config", "configs/b.py", "--vary", "config.m.t", "2")
    assert small[0].folder in [one.folder for one in runs(*TWO)]
    ab, ba = (
        runs("--config", "b.py", "--vary", first, "1", "--vary", second, "1")[0]
        for first, second in (
            ("config.a.x", "config.b.y"),
            ("config.b.y", "config.a.x"),
        )
    )
    assert ab.folder == ba.folder and ab.folder.parent.name == "b,a.x=1,b.y=1"
    assert [path for path, _ in ba.overrides] == ["config.b.y", "config.a.x"]


def leave(folder, *, tasks=2, done=2, finetune=True, **config):
    results = results_lib.empty(tasks)
    for task in range(done):
        row = [0.5] * (task + 1) + [None] * (tasks - task - 1)
        results = results_lib.add(results, task, {NAME: row}, {}, 1.0)
    if finetune:
        results["finetune"] = {NAME: [0.5] * tasks}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    results_lib.write_results(folder, results)


@pytest.mark.parametrize(
    "left, want",
    [
        ({}, True),
        ({"done": 1}, False),
        ({"finetune": False}, False),  # training on each task alone comes last
        ({"finetune": False, "plasticity": False}, True),
        ({"tasks": 1, "done": 1, "finetune": False}, True),
        ({"done": 1, "first_tasks": 1, "plasticity": False}, True),
        ({"done": 1, "first_tasks": 2, "plasticity": False}, False),
    ],
)
def test_finished_runs_are_left_out(capsys, tmp_path, left, want):
    arguments = ["--config", "b.py", f"--root={tmp_path}"]
    (one,) = runs(*arguments)
    assert not sweep.finished(one.folder)
    leave(pathlib.Path(one.folder), **left)
    assert sweep.finished(one.folder) == want
    assert len(printed(capsys, *arguments)) == (not want)
    assert len(printed(capsys, *arguments, "--all")) == 1


# Table


@pytest.fixture
def three(tmp_path):
    """er of three seeds, ace of one that has another evaluator too, b,x=1 of knn."""
    put = run_directories.leave
    put(tmp_path / "er" / "seed_0", [[0.8, None], [0.4, 0.6]], seed=0)
    put(tmp_path / "er" / "seed_1", [[0.9, None], [0.2, 0.6]], seed=1)
    put(tmp_path / "er" / "seed_2", [[0.9, None], [0.9, 0.9]], seed=2)
    put(tmp_path / "ace", [[0.8, None], [0.6, 0.8]], seed=0)
    put(tmp_path / "b,x=1", [[1.0, None], [0.5, 0.4]], seed=0, matrix_name=KNN)
    return tmp_path


def shown(capsys, *arguments, code=0):
    assert table.main([str(a) for a in arguments]) == code
    told = capsys.readouterr()
    return told.out.splitlines() if code == 0 else told.err


def row(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_mean_deviation_and_difference(capsys, three):
    lines = shown(
        capsys,
        three / "er",
        three / "ace",
        f"--matrix={NAME}",
        "--paper",
        "er=26.7",
        "--measure=average_accuracy",
        "--measure=forgetting",
    )
    assert row(lines[2]) == [
        "run",
        "matrix",
        "seeds",
        "average accuracy",
        "paper",
        "difference",
        "forgetting",
    ]
    # Averages 50, 40, 90: the squares of 10, 20 and 30 add up to 1400, over 2.
    assert row(lines[4]) == [
        "er",
        NAME,
        "3",
        "60.00 ± 26.46",
        "26.70",
        "+33.30",
        "36.67 ± 35.12",
    ]
    assert row(lines[5]) == ["ace", NAME, "1", "70.00", "no number", "-", "20.00"]
    assert len(lines) == 6
