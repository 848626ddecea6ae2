"""Comparing run directories: numbers by hand, and what is refused."""

import json
import types

import numpy as np
import pytest
from scipy import stats

from helpers import run_directories
from jaxcl import cli, plots
from jaxcl.report import comparability, compare, numbers, run_groups
from jaxcl.run import result_file, seeds


@pytest.fixture
def runs(tmp_path):
    leave = run_directories.leave
    leave(tmp_path / "er" / "seed_0", [[0.8, None], [0.4, 0.6]], seed=0)
    leave(tmp_path / "er" / "seed_1", [[0.9, None], [0.2, 0.6]], seed=1)
    leave(tmp_path / "er" / "seed_2", [[0.9, None], [0.9, 0.9]], seed=2)
    ace = tmp_path / "ace"
    leave(ace / "seed_0", [[0.8, None], [0.6, 0.8]], seed=0, milliseconds=20)
    leave(ace / "seed_1", [[0.8, None], [0.6, 0.6]], seed=1, flops=300)
    leave(tmp_path / "one", [[1.0, None], [0.5, 0.5]], seed=1)
    return tmp_path


def test_measures_and_paired_differences(runs):
    er, ace, one = (run_groups.read_run(runs / name) for name in ("er", "ace", "one"))
    assert list(er.results) == [0, 1, 2] and list(one.results) == [1]
    part = types.SimpleNamespace(finished_tasks=2, num_tasks=3)
    assert not run_groups.are_comparable(part, one)
    found = seeds.summary(ace.results)[run_directories.NAME]
    assert found["average_accuracy"]["mean"] == pytest.approx(0.65)
    assert found["average_accuracy"]["error"] == pytest.approx(0.05)
    assert found["anytime"]["mean"] == pytest.approx((0.75 + 0.7) / 2)
    assert found["forgetting"]["mean"] == pytest.approx(0.2)
    # Seed 2 is not in both: (0.7 - 0.5, 0.6 - 0.4).
    paired = compare.paired_difference(
        ace, er, run_directories.NAME, "average_accuracy"
    )
    assert paired == {"mean": pytest.approx(0.2), "error": pytest.approx(0), "seeds": 2}
    alone = compare.paired_difference(one, er, run_directories.NAME, "average_accuracy")
    assert alone == {"mean": pytest.approx(0.1), "error": None, "seeds": 1}


def test_curve_is_the_average_over_tasks_met(runs):
    steps, mean, error = compare.mean_curve(
        run_groups.read_run(runs / "er"), run_directories.NAME
    )
    np.testing.assert_array_equal(steps, [5, 8, 10])
    finals = np.array([0.5, 0.4, 0.9])
    np.testing.assert_allclose(mean, [np.mean([0.8, 0.9, 0.9]), 0.3, finals.mean()])
    np.testing.assert_allclose(error[2], finals.std(ddof=1) / 3**0.5)


def test_along_the_stream_every_evaluation_counts(runs):
    """At steps 5, 8 and 10; "anytime" has the tasks' ends 5 and 10 alone."""
    found = compare.mean_along_stream(
        run_groups.read_run(runs / "er"), run_directories.NAME
    )
    means = np.mean([[0.8, 0.3, 0.5], [0.9, 0.3, 0.4], [0.9, 0.3, 0.9]], axis=1)
    assert found["mean"] == pytest.approx(means.mean())
    assert found["error"] == pytest.approx(means.std(ddof=1) / 3**0.5)
    assert found["seeds"] == 3


def test_the_command_of_a_scalar(runs, capsys, monkeypatch):
    calls = []

    def keep(runs, path, task_ends, **options):
        calls.append((path, [*task_ends], options["ylabel"], options["scale"]))

    monkeypatch.setattr(plots, "anytime", keep)
    figure, folders = runs / "x.png", [str(runs / "er"), str(runs / "one")]
    told = ["--scalar=memory/entropy", "--band=std", f"--out={figure}"]
    assert cli.main(["compare", *folders, *told]) == 0
    head, er, one = table_of(capsys)
    assert "memory/entropy" in head
    assert er.split() == "er 2.0000 +- 0.0000 step 10".split()
    assert one.split()[0] == "one"
    assert calls == [(str(figure), [5, 10], "memory/entropy", 1.0)]
    assert cli.main(["compare", *folders, "--scalar=memory/x"]) == 2
    assert "--scalar=memory/x" in capsys.readouterr().err


def test_the_interval_is_student_s_of_the_seeds():
    values = [3.0, 5.0, 4.5]
    found = numbers.estimate_mean([*values, None])
    error = np.std(values, ddof=1) / np.sqrt(3)
    want = stats.t.interval(0.95, df=2, loc=np.mean(values), scale=error)
    np.testing.assert_allclose((found.low, found.high), want)
    assert found.seeds == 3


def test_the_command(runs, capsys):
    figure = runs / "compare.png"
    folders = [str(runs / name) for name in ("er", "ace", "one")]
    assert cli.main(["compare", *folders, f"--out={figure}"]) == 0
    assert figure.stat().st_size > 5000
    er, ace, one = table_of(capsys)[1:]
    assert er.split() == (
        "er 3 60.0 +- 15.3 73.3 +- 8.3 58.9 +- 5.6 36.7 +- 20.3 10.0 1.00x 10".split()
    )
    assert ace.split()[-6:] == "15.0 2.00x 20 20.0 +- 0.0".split()  # means of seeds
    assert one.split()[:3] == ["one", "1", "50.0"] and one.endswith("10.0")


def table_of(capsys):
    """The lines of the table and its notes, without the meanings of its columns."""
    return capsys.readouterr().out.partition("\n\n")[0].splitlines()


def _stop_after_a_task(folder):
    """Make a finished run one that has done its first task alone."""
    results = result_file.read_results(folder)
    results["scalars"][1] = None
    result_file.write_results(folder, results)


def test_seeds_that_are_behind_are_left_out_and_named(runs, capsys):
    folders = [str(runs / name) for name in ("er", "ace")]
    assert cli.main(["compare", *folders]) == 0
    table = table_of(capsys)
    _stop_after_a_task(runs / "ace" / "seed_1")
    assert cli.main(["compare", *folders]) == 0
    _, er, ace, told = table_of(capsys)
    assert er == table[1]
    assert ace.split()[:3] == ["ace", "1", "70.0"] and ace.endswith(" 20.0")
    assert "ace" in told and "seed 1 (1 of 2)" in told
    ahead = run_groups.read_run(runs / "ace")
    assert list(ahead.results) == list(ahead.folders) == [0]
    assert ahead.behind == {1: 1}


def test_runs_after_other_tasks_have_no_difference(runs, capsys):
    _stop_after_a_task(runs / "one")
    folders = (str(runs / name) for name in ("er", "one", "one/../ace"))
    assert cli.main(["compare", *folders]) == 0
    _, _, one, ace, told = table_of(capsys)
    assert one.split()[:3] == ["one", "1", "100.0"] and one.endswith(" -")
    assert ace.endswith("20.0 +- 0.0")
    assert "one: 1 of 2 tasks" in told


def config(folder, **sections):
    """Give every run in a folder other sections of its configs."""
    for path in folder.rglob("config.json"):
        told = json.loads(path.read_text())
        path.write_text(json.dumps(told | sections))


DATA = {"name": "digits", "seed": 0, "validation": 0.0}
SCENARIO = {"name": "class", "num_tasks": 5}


def test_runs_that_were_not_measured_alike_are_told(runs, capsys):
    folders = [str(runs / name) for name in ("er", "ace", "one")]

    def told(*options):
        assert cli.main(["compare", *folders, *options]) == 0
        lines = table_of(capsys)
        return [line for line in lines if line.startswith("not measured alike: ")]

    # Seeds are to differ, and so are methods.
    config(runs / "er", data=DATA, scenario=SCENARIO, method={"name": "er"})
    ace = {"method": {"name": "er_ace"}, "scenario": SCENARIO | {"seed": 3}}
    config(runs / "ace", data=DATA | {"seed": 1}, **ace)
    config(runs / "one", data=DATA, scenario=SCENARIO)
    assert told() == []
    config(runs / "one", data=DATA | {"name": "rings", "size": 3}, scenario=SCENARIO)
    config(runs / "ace", scenario=SCENARIO | {"num_tasks": 2, "evaluation": "test"})
    fields = [
        'data.name: "digits" (er, ace), "rings" (one)',
        'scenario.evaluation: not set (er, one), "test" (ace)',
        "scenario.num_tasks: 5 (er, one), 2 (ace)",
    ]
    unlike = [f"not measured alike: config.{field}" for field in fields]
    assert told() == unlike == told("--scalar=memory/entropy")


def test_judges_that_several_runs_have_and_defaults_are_compared():
    def of(evaluators, resolved=None):
        asked = {"data": DATA, "evaluators": evaluators}
        every = asked | {"evaluators": resolved}
        return comparability.Configs(asked, None if resolved is None else every)

    knn = {"knn": {"train_on": "all", "k": 20}}
    a, b = of({"knn": {}, "linear": {"lr": 1}}), of({"knn": {"train_on": "all"}})
    field = 'config.evaluators.knn.train_on: not set (a), "all" (b)'
    assert comparability.list_differences({"a": a, "b": b}) == [field]
    both = {"a": of({"knn": {}}, knn), "b": of(knn, knn)}
    assert comparability.list_differences(both) == []  # what is not set is the default
    old = comparability.Configs(a.asked, None)
    assert comparability.list_differences({"a": old, "b": both["b"]})[-1] == field
    other = of(knn, {"knn": {"train_on": "all", "k": 5}})
    (field,) = comparability.list_differences({**both, "c": other})
    assert field == "config.evaluators.knn.k: 20 (a, b), 5 (c)"
    assert comparability.list_differences({"a": a, "b": comparability.Configs()}) == []


def test_refuses_what_is_no_run(runs, capsys):
    assert cli.main(["compare", str(runs / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    run_directories.leave(
        runs / "other", [[1.0, None], [0.5, 0.5]], seed=0, matrix_name="knn/x"
    )
    assert cli.main(["compare", str(runs / "er"), str(runs / "other")]) == 2
    assert "--matrix" in capsys.readouterr().err
    assert cli.main(["compare", str(runs / "er"), "--matrix=linear"]) == 2
    assert run_directories.NAME in capsys.readouterr().err


def test_numbers_of_a_page_are_means_of_seeds(monkeypatch):
    """The last task's scalars, the time left over, and the steps of all seeds."""
    monkeypatch.setattr(numbers.run_groups, "are_comparable", lambda *pair: True)

    def group(values, seconds, logged=None):
        spent = {
            "train_seconds": 2.0,
            "compile_seconds": 1.0,
            "evaluation_seconds": 4.0,
        }
        spent |= {"steps": 10, "images": 40, "flops": 80, "peak_bytes": 7}
        results = {
            seed: {
                "scalars": [{"a": -9.0}, {"a": value}, None],
                "seconds": [*seconds, None],
                "cost": {"total": spent},
                "untrained": {"m": [value, None, 0.5]},
                "matrices": {
                    "m": [[value, None, None], [1.0, value, None], [None] * 3]
                },
            }
            for seed, value in enumerate(values)
        }
        return types.SimpleNamespace(
            results=results, finished_tasks=2, logged_rows=logged or {}
        )

    run, first = group([0.5, 0.7], [4.0, 9.0]), group([0.2, 0.1, 0.9], [1.0, 2.0])
    ((mean, delta),) = numbers.mean_scalars(run, first).values()
    assert mean.mean == pytest.approx(0.6) and delta.mean == pytest.approx(0.45)
    spent = numbers.mean_run_cost(run)
    assert (spent["rest"], spent["train"], spent["milliseconds"]) == (6.0, 2.0, 200.0)
    assert numbers.mean_run_cost(first)["rest"] == 0
    assert compare.mean_step_cost(run) == {
        "milliseconds": 200,
        "flops": 8,
        "per_image": 2,
    }
    np.testing.assert_allclose(
        numbers.mean_row(run, "untrained", "m"), [0.6, np.nan, 0.5]
    )
    want = [[0.6, np.nan, np.nan], [1, 0.6, np.nan]]
    np.testing.assert_allclose(numbers.mean_matrix(run, "m"), want)
    assert numbers.untrained_accuracy(run, "m").mean == pytest.approx(0.55)
    rows = [{"step": n, "task": 0, "eval": {"a": float(n)}} for n in (0, 5, 9)]
    logged = {0: rows, 1: rows[:2], 2: [rows[0], rows[0] | {"step": 5}, rows[2]]}
    steps, means, error = compare.mean_curve(group([0.1], [1.0], logged), "a")
    assert steps.tolist() == [5] and means.tolist() == [pytest.approx(10 / 3)]
    assert error[0] == pytest.approx(np.std([5, 5, 0], ddof=1) / 3**0.5)
