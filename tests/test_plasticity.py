"""FT_i: what it is, what it depends on, and that a cache changes nothing else."""

import functools

import jax
import pytest

from helpers import run_directories, toy
from jaxcl import metrics
from jaxcl.run import finish, job, result_file, train

SMALL = {
    "scenario.num_tasks": 2,
    "epochs": 1,
    "plasticity": True,
    "evaluators": {"knn": {"k": 5}, "late": {"name": "knn", "last_only": True}},
}


def work_of(workdir, **changes):
    return toy.job(workdir, **SMALL | changes)


@functools.cache
def alone_twin(tmp):
    """Accuracy on task i of fine-tuning that has seen task i alone."""
    found = []
    for i in range(2):
        work = toy.job(tmp / f"twin_{i}", **SMALL | {"plasticity": False})
        task = work.stream.tasks[i]._replace(index=0)
        stream = work.stream._replace(tasks=(task,))
        work = toy.change(work, stream=stream, pictures={}, evaluators={})
        train.run_tasks(work, tmp / f"twin_{i}")
        state = toy.saved(work, tmp / f"twin_{i}").state
        judge = toy.job(tmp / f"judge_{i}", **SMALL).evaluation.evaluators["knn"]
        found.append(judge(state, i).rows["class_incremental"][i])
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("plasticity")


@pytest.fixture(scope="module")
def first(root):
    """A run under PNR."""
    work = work_of(root / "first", **{"method.strategy": "pnr"})
    return finish.run_job(work, root / "first")


def test_each_task_is_a_run_of_its_own(tmp_path, monkeypatch):
    """What trains is another test's subject: here one says what it was given."""
    work = run_directories.untried(tmp_path / "run", **SMALL, first_tasks=2)
    judged, runs = [], []
    single = toy.change(
        work,
        evaluators={"knn": lambda state, task: judged.append((state, task))},
        start="another run",
        loggers=("one",),
    )
    evaluation = work.evaluation._replace(single_tasks=lambda asked: single)
    stream = work.stream._replace(tasks=(*work.stream.tasks, work.stream.tasks[0]))
    work = toy.change(work._replace(evaluation=evaluation), stream=stream)

    def run_tasks(only, place, *, stop, step):
        (task,) = only.stream.tasks
        only.evaluation.evaluators["knn"]("state", 0)
        quiet = only.logging
        assert not (quiet.loggers or quiet.progress)
        assert quiet.quiet and only.loop.start is None and task.index == 0
        runs.append((place.name, task.classes.tolist(), step, stop))
        return {"matrices": {"knn/x": [[0.1, 0.2, 0.3]], "knn/y": [[0.4, 0.5, 0.6]]}}

    monkeypatch.setattr(train, "run_tasks", run_tasks)
    monkeypatch.setattr(job, "compile_step", lambda asked: "another step")
    found = finish.single_tasks(work, tmp_path, stop="stop", step="a step")
    assert found == {"knn/x": [0.1, 0.2, None], "knn/y": [0.4, 0.5, None]}
    classes = [task.classes.tolist() for task in work.stream.tasks[:2]]
    assert judged == [("state", 0), ("state", 1)]
    assert runs == [(f"task_{i}", classes[i], "a step", "stop") for i in range(2)]
    other = work.method._replace(labelled=not work.method.labelled)
    single = single._replace(method=other)
    finish.single_tasks(work, tmp_path, stop="stop", step="a step")
    assert runs[-1][2] == "another step"


@pytest.mark.parametrize("strategy", ["pnr", "finetune"])
def test_a_task_alone_is_trained_by_the_base_without_its_strategy(tmp_path, strategy):
    changes = SMALL | {"method.strategy": strategy}
    with run_directories.untraced():
        work = toy.job(tmp_path / "run", **changes)
        single = work.evaluation.single_tasks(work)
    assert single.evaluation.evaluators.keys() == {"knn"}
    assert (single.method is work.method) == (strategy == "finetune")
    with run_directories.untraced():
        plain = toy.job(tmp_path / "plain", **SMALL | {"method.strategy": "finetune"})
    state, like = (job.shapes(x.method, x.data)[0] for x in (single, plain))
    assert jax.tree.structure(state) == jax.tree.structure(like)
    theirs = work.evaluation.evaluators["knn"]
    assert (single.evaluation.evaluators["knn"] is theirs) == (strategy == "finetune")


def test_it_is_the_accuracy_of_the_base_alone(root, first):
    results = first
    assert set(results["finetune"]) == {"knn/class_incremental", "knn/task_aware"}
    assert results["finetune"]["knn/class_incremental"] == alone_twin(root)
    matrix = result_file.matrix(results, "knn/class_incremental")
    measures = result_file.read_results(root / "first"), result_file.summary(results)
    assert measures[0]["finetune"] == results["finetune"]
    want = matrix[0, 1] - alone_twin(root)[1]
    assert measures[1]["knn/class_incremental"]["plasticity"] == pytest.approx(want)
    assert want == pytest.approx(metrics.plasticity(matrix, alone_twin(root)))
    folders = {p.name for p in (root / "first" / "single").iterdir()}
    assert folders == {"task_0", "task_1"}


def test_another_strategy_takes_it_from_there_and_trains_nothing(root, first):
    here = root / "second"
    work = work_of(here, plasticity_from=str(root / "first"))
    found = finish.run_job(work, here)
    assert found["finetune"] == first["finetune"]
    assert not (here / "single").exists()
    again = finish.run_job(work_of(root / "fresh"), root / "fresh")
    assert again["finetune"] == first["finetune"]


@pytest.fixture(scope="module")
def left(root):
    """What a run leaves that has measured FT_i."""
    with run_directories.untraced():
        work = work_of(root / "left", **{"method.strategy": "pnr"})
    results = run_directories.results_of(work, 2) | {"finetune": {"knn/x": [0.1, 0.2]}}
    result_file.write_results(root / "left", results)
    return str(root / "left")


def test_another_strategy_takes_the_numbers_of_a_run_that_has_them(left, tmp_path):
    with run_directories.untraced():
        work = work_of(tmp_path / "one", plasticity_from=left)
        assert work.evaluation.single_tasks == {"knn/x": [0.1, 0.2]}
        work_of(tmp_path / "none", plasticity=False)
        for name in ("nowhere", "none"):
            with pytest.raises(ValueError, match="plasticity_from"):
                work_of(tmp_path / "two", plasticity_from=str(tmp_path / name))


def test_a_run_that_goes_on_from_another_is_set_against_fresh_ones(root, first):
    """And of the tasks that are not trained nothing is measured."""
    changes = {"method.strategy": "pnr", "start": str(root / "first")}
    work = work_of(root / "next", first_tasks=1, **changes)
    no_stop = {"stop": lambda: False, "step": None}
    alone = finish.single_tasks(work, root / "next" / "single", **no_stop)
    assert alone["knn/class_incremental"] == [alone_twin(root)[0], None]
