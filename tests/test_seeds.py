"""Several seeds, one after another, and what they say together."""

import json

import numpy as np
import pytest
from etils import epath

from helpers import toy
from jaxcl.config import build
from jaxcl.data import stream
from jaxcl.errors import Refused
from jaxcl.run import finish, result_file, seeds, train

RUNS = toy.ONLINE | {
    "method": {"name": "er"},
    "encoder": {"name": "mlp", "widths": (8,)},
    "augment.jitter_probability": 0.0,
    "scenario.num_tasks": 5,
    "epochs": 1,
    "seed": 3,
    "seeds": 2,
    "evaluators": {"predict": {}},
}


def run(workdir, **changes):
    work = build.build(toy.config(**RUNS, **changes), workdir)
    return work, finish.run_job(work, workdir)


def test_one_after_another_each_is_a_run_of_its_own(tmp_path):
    workdir = tmp_path / "apart"
    work, found = run(workdir)
    alone = toy.job(tmp_path, **{**RUNS, "seed": 4, "seeds": 1})
    results = [result_file.read_results(workdir / seeds.folder(x)) for x in work.seeds]
    results.append(train.run_tasks(alone, tmp_path))
    first, second, again = (
        result_file.matrix(x, "predict/class_incremental") for x in results
    )
    np.testing.assert_array_equal(second, again)
    assert not np.array_equal(first, second, equal_nan=True)
    kept = json.loads((workdir / "seed_4" / "config.json").read_text())
    assert kept["seed"] == 4 and kept["seeds"] == 1
    assert found == json.loads((workdir / seeds.SUMMARY).read_text())


def test_the_released_class_order_follows_the_seed(tmp_path):
    section = {"name": "class", "num_tasks": 2, "class_order": "released"}
    changes = {"method.base": "simclr", "scenario": section}

    def classes(seed, **more):
        own = toy.config(**changes | more, seed=seed)
        tasks = build.build(own, tmp_path / f"{seed}{len(more)}").stream.tasks
        return np.concatenate([task.classes for task in tasks]).tolist()

    count = len(classes(5))
    orders = {s: stream.released_permutation(count, seed=s).tolist() for s in (5, 6)}
    assert {seed: classes(seed) for seed in orders} == orders and orders[5] != orders[6]
    fixed = {"scenario": section | {"seed": 5}}
    assert classes(6, **fixed) == orders[5]


def test_each_seed_starts_from_the_run_of_that_seed(tmp_path, monkeypatch):
    asked, of_one = [], build.build

    def built(config, workdir):
        asked.append((config.seed, config.start, config.plasticity_from))
        config.start = config.plasticity_from = None  # there are no such runs
        return of_one(config, workdir)

    two = toy.config(seed=4, seeds=2)
    two.start, two.plasticity_from = str(tmp_path / "one"), str(tmp_path / "other")
    monkeypatch.setattr(build, "build", built)
    runs = of_one(two, tmp_path / "runs")
    runs.make(5)
    resolved = json.loads((tmp_path / "runs" / "resolved.json").read_text())
    assert runs.seeds == (4, 5) and (resolved["seed"], resolved["seeds"]) == (4, 2)
    resolved = json.loads((tmp_path / "runs" / "seed_5" / "resolved.json").read_text())
    assert (resolved["seed"], resolved["seeds"]) == (5, 1)
    assert asked == [
        (seed, *(str(tmp_path / x / f"seed_{seed}") for x in ("one", "other")))
        for seed in (4, 5)
    ]


def test_each_seed_has_a_folder_and_all_one_program(tmp_path, monkeypatch, capsys):
    """What trains is another test's subject: here one says what it was given."""
    runs, compiled = [], []

    def make(seed):
        if seed == 9:
            raise Refused("config.x: is wrong")
        return f"job {seed}"

    def run_one(own, place, stop, step):
        runs.append((own, place.name, stop, step))
        row = np.array([0.1 * len(runs)])
        results = result_file.empty_results(1)
        return result_file.add_task(results, 0, {"knn/x": row}, {}, 1.0)

    monkeypatch.setattr(finish, "_run_one", run_one)
    monkeypatch.setattr(finish.job, "compile_step", lambda x: compiled.append(x) or 7)
    work = seeds.SeedRuns((3, 4), make)
    found = finish._run_seeds(work, epath.Path(tmp_path), "stop")
    assert runs == [(f"job {i}", f"seed_{i}", "stop", 7) for i in (3, 4)]
    assert compiled == ["job 3"]
    assert found["knn/x"]["average_accuracy"]["mean"] == pytest.approx(0.15)
    assert found == json.loads((tmp_path / seeds.SUMMARY).read_text())
    assert "15.0 +- 5.0" in capsys.readouterr().out
    with pytest.raises(Refused, match="seed 9: config.x"):
        finish._run_seeds(work._replace(seeds=(9,)), epath.Path(tmp_path), "stop")


def test_spread():
    assert seeds.mean_and_error([0.5]) == {"mean": 0.5, "error": None, "seeds": 1}
    found = seeds.mean_and_error([None, 1.0, 3.0])
    assert found == {"mean": 2.0, "error": 1.0, "seeds": 2}
    assert seeds.percent(seeds.mean_and_error([None])) == "-"


def test_seeds_are_in_order_and_a_curve_with_gaps_has_no_mean(tmp_path):
    for name in ("seed_10", "seed_2", "seed_x"):
        (tmp_path / name).mkdir()
    assert [*seeds.folders(tmp_path)] == [2, 10]
    results = result_file.empty_results(2)
    for task, row in enumerate(([None, None], [0.5, 0.75])):  # by `last_only`
        results = result_file.add_task(results, task, {"x": row}, {}, 1.0)
    found = seeds.measures(results)["x"]
    assert found["anytime"] is None and found["average_accuracy"] == 0.625


def test_more_seeds_may_follow_and_wrong_ones_are_refused(tmp_path):
    run(tmp_path)
    more = build.build(toy.config(**{**RUNS, "seeds": 3}), tmp_path)
    assert more.seeds == (3, 4, 5)
    with pytest.raises(ValueError, match=r"config\.seeds=0"):
        build.build(toy.config(**{**RUNS, "seeds": 0}), tmp_path)
    with pytest.raises(ValueError, match="config.epochs"):
        build.build(toy.config(**{**RUNS, "epochs": 2}), tmp_path)
