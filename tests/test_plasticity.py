"""FT_i: what it is, what it depends on, and that a cache changes nothing else."""

import functools

import pytest

from helpers import toy
from jaxcl import metrics
from jaxcl.run import finish, result_file, train

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


def test_a_run_that_goes_on_from_another_is_set_against_fresh_ones(root, first):
    """And of the tasks that are not trained nothing is measured."""
    changes = {"method.strategy": "pnr", "start": str(root / "first")}
    work = work_of(root / "next", first_tasks=1, **changes)
    no_stop = {"stop": lambda: False, "step": None}
    alone = finish.single_tasks(work, root / "next" / "single", **no_stop)
    assert alone["knn/class_incremental"] == [alone_twin(root)[0], None]


def test_another_strategy_takes_it_from_there_and_trains_nothing(root, first):
    here = root / "second"
    work = work_of(here, plasticity_from=str(root / "first"))
    found = finish.run_job(work, here)
    assert found["finetune"] == first["finetune"]
    assert not (here / "single").exists()
    again = finish.run_job(work_of(root / "fresh"), root / "fresh")
    assert again["finetune"] == first["finetune"]


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"method.base": "simclr"},
        {"epochs": 2},
        {"batch_size": 24},
        {"optimizer.lr": 0.2},
        {"scale_lr": False},
        {"precision": "bfloat16"},
        {"augment.flip": 0.5},
        {"encoder.width": 8},
        {"scenario.num_tasks": 5},
        {"data.validation": 0.1},
        {"evaluators": {"knn": {"k": 6}}},
    ],
)
def test_a_run_that_would_find_other_numbers_is_refused(root, first, changes, tmp_path):
    with pytest.raises(ValueError, match="plasticity_from.*differ"):
        work_of(tmp_path, plasticity_from=str(root / "first"), **changes)


def test_a_run_that_has_not_measured_it_is_refused(root, first, tmp_path):
    for name in ("nowhere", "first/single/task_0"):
        with pytest.raises(ValueError, match="plasticity_from"):
            work_of(tmp_path, plasticity_from=str(root / name))
