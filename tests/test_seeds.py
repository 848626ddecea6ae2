"""Several seeds: one after another, side by side, and what they say together."""

import json

import chex
import jax
import numpy as np
import optax
import pytest

from helpers import toy
from jaxcl import core
from jaxcl.config import build
from jaxcl.data import stream
from jaxcl.run import finish, job, seeds, train
from jaxcl.run import results as results_lib

RUNS = toy.ONLINE | {
    "method": {"name": "er"},
    "scenario.num_tasks": 5,
    "epochs": 1,
    "seed": 3,
    "seeds": 2,
    "evaluators": {"predict": {}},
}


def run(workdir, **changes):
    work = build.build(toy.config(**RUNS, **changes), workdir)
    return work, finish.run(work, workdir)


def matrices(workdir):
    return {
        seed: results_lib.matrix(
            results_lib.read_results(workdir / seeds.folder(seed)),
            "predict/class_incremental",
        )
        for seed in (3, 4)
    }


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """The two runs one after another, as the CPU does them by itself."""
    workdir = tmp_path_factory.mktemp("apart")
    return workdir, *run(workdir)


def test_one_after_another_each_is_a_run_of_its_own(apart, tmp_path):
    workdir, work, found = apart
    assert work.seeds == (3, 4) and not work.side_by_side
    alone = toy.job(tmp_path, **{**RUNS, "seed": 4, "seeds": 1})
    results = train.run(alone, tmp_path)
    second = matrices(workdir)[4]
    np.testing.assert_array_equal(
        second, results_lib.matrix(results, "predict/class_incremental")
    )
    assert not np.array_equal(second, matrices(workdir)[3], equal_nan=True)
    kept = json.loads((workdir / "seed_4" / "config.json").read_text())
    assert kept["seed"] == 4 and kept["seeds"] == 1
    assert found == json.loads((workdir / seeds.SUMMARY).read_text())


def test_rows_of_a_seeds_own_are_not_read_side_by_side(tmp_path, monkeypatch):
    changes = {"method": {"name": "cclis"}, "augment.views": 1, "seeds": 2}
    with pytest.raises(ValueError, match="side_by_side=True"):
        build.build(toy.config(**changes, side_by_side=True), tmp_path)
    monkeypatch.setattr(build.sharding, "on_cpu", lambda: False)
    assert not build.build(toy.config(**changes), tmp_path).side_by_side
    more = {"method.base": "simclr", "seeds": 2}
    assert build.build(toy.config(**more), tmp_path / "simclr").side_by_side


def test_the_released_class_order_follows_the_seed(tmp_path, monkeypatch):
    """All seeds shared the split of seed 5; side by side they would share one again."""
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
    monkeypatch.setattr(build.sharding, "on_cpu", lambda: False)
    found = build.build(toy.config(**changes, seeds=2), tmp_path / "seeds")
    assert not found.side_by_side
    with pytest.raises(ValueError, match="side_by_side=True"):
        build.build(toy.config(**changes, seeds=2, side_by_side=True), tmp_path / "x")
    both = toy.config(**changes | fixed, seeds=2)
    assert build.build(both, tmp_path / "fixed").side_by_side


def test_summary_is_mean_and_standard_error(apart):
    workdir, _, found = apart
    last = np.array([m[-1].mean() for m in matrices(workdir).values()])
    measure = found["predict/class_incremental"]["average_accuracy"]
    assert measure["mean"] == pytest.approx(last.mean())
    assert measure["error"] == pytest.approx(abs(last[0] - last[1]) / 2)
    assert measure["seeds"] == 2
    curves = [
        np.mean([m[i, : i + 1].mean() for i in range(5)])
        for m in matrices(workdir).values()
    ]
    anytime = found["predict/class_incremental"]["anytime"]
    assert anytime["mean"] == pytest.approx(np.mean(curves))
    percent = 100 * last.mean()
    assert f"{percent:.1f} +- " in seeds.text(found)


def test_side_by_side_is_the_same(apart, tmp_path):
    """Rounding differs between the two programs, and a few steps make it grow."""
    _, (first, found) = tmp_path, run(tmp_path, side_by_side=True)
    assert first.side_by_side and set(found) == set(apart[2])
    work = seeds.join_jobs({seed: first.make(seed) for seed in first.seeds})
    state = toy.saved(work, tmp_path / "together").state
    for i, seed in enumerate((3, 4)):
        one = toy.saved(first.make(seed), apart[0] / seeds.folder(seed)).state
        mine = seeds.take_state(state, i)
        chex.assert_trees_all_equal(mine.extra.memory, one.extra.memory)
        chex.assert_trees_all_close(mine.params, one.params, rtol=2e-3, atol=2e-4)
        assert (jax.random.key_data(mine.key) == jax.random.key_data(one.key)).all()
    for seed, matrix in matrices(tmp_path).items():
        np.testing.assert_allclose(matrix, matrices(apart[0])[seed], atol=0.05)


@pytest.mark.slow
def test_side_by_side_resumes_bitwise(tmp_path):
    work = build.build(toy.config(**RUNS, side_by_side=True), tmp_path)
    jobs = {seed: work.make(seed) for seed in work.seeds}
    made = seeds.join_jobs(jobs)
    step = job.compile_step(made)
    whole = train.run(made, tmp_path / "whole", step=step)
    asked = iter(range(100))
    with pytest.raises(train.Interrupted):
        train.run(made, tmp_path / "parts", step=step, stop=lambda: next(asked) == 9)
    parts = train.run(made, tmp_path / "parts", step=step)
    assert parts["matrices"] == whole["matrices"]
    one, other = (toy.saved(made, tmp_path / x).state for x in ("whole", "parts"))
    chex.assert_trees_all_equal(*(toy.leaves(x) for x in (one, other)))


def test_more_seeds_may_follow_and_wrong_ones_are_refused(apart):
    workdir, *_ = apart
    more = build.build(toy.config(**{**RUNS, "seeds": 3}), workdir)
    assert more.seeds == (3, 4, 5)
    with pytest.raises(ValueError, match=r"config\.seeds=0"):
        build.build(toy.config(**{**RUNS, "seeds": 0}), workdir)
    with pytest.raises(ValueError, match="config.epochs"):
        build.build(toy.config(**{**RUNS, "epochs": 2}), workdir)


def test_spread():
    assert seeds.spread([0.5]) == {"mean": 0.5, "error": None, "seeds": 1}
    assert seeds.spread([None, 1.0, 3.0]) == {"mean": 2.0, "error": 1.0, "seeds": 2}
    assert seeds.percent(seeds.spread([None])) == "-"


def test_an_axis_of_seeds_is_taken_off_again():
    """A seed that lacks a row or a scalar has None in its place."""
    rows = np.array([[0.5, np.nan], [0.25, np.nan]])
    results = results_lib.empty(2)
    results["untrained"] = results_lib.plain({"knn/all": rows})
    results = results_lib.add(results, 0, {"knn/all": rows}, {"knn/x": [3, 4]}, 1.0)
    judges = [
        lambda *_: core.Result({"all": np.array([0.5, 0.75])}, {"y": 1}),
        lambda *_: core.Result({}, {}),
    ]
    state = core.new_state(jax.random.key(0), {}, {}, optax.identity(), ())
    state = state.replace(key=jax.random.split(state.key))
    rows, scalars, _ = seeds._stack_evaluators((3, 4), judges)(state, 1)
    rows, scalars = ({f"knn/{k}": x for k, x in d.items()} for d in (rows, scalars))
    results = results_lib.add(results, 1, rows, scalars, 1.0)
    first, second = (seeds.take_results(results, i) for i in range(2))
    assert first["matrices"] == {"knn/all": [[0.5, None], [0.5, 0.75]]}
    assert second["matrices"] == {"knn/all": [[0.25, None], [None, None]]}
    assert second["untrained"] == {"knn/all": [0.25, None]}
    assert first["scalars"] == [{"knn/x": 3}, {"knn/y": 1}]
    assert second["scalars"] == [{"knn/x": 4}, {"knn/y": None}]
