"""FT_i: what it is, what it depends on, and that a cache changes nothing else."""

import functools
import shutil

import pytest

from helpers import toy
from jaxcl import metrics
from jaxcl.run import finish, job, task_alone, train
from jaxcl.run import results as results_lib

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
        train.run(work, tmp / f"twin_{i}")
        state = toy.saved(work, tmp / f"twin_{i}").state
        judge = toy.job(tmp / f"judge_{i}", **SMALL).evaluation.evaluators["knn"]
        found.append(judge(state, i).rows["class_incremental"][i])
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("plasticity")


@pytest.fixture(scope="module")
def first(root):
    """A run under PNR that fills the cache."""
    cache = str(root / "cache")
    changes = {"method.strategy": "pnr", "plasticity_cache": cache}
    work = work_of(root / "first", **changes)
    return finish.run(work, root / "first"), cache


def test_it_is_the_accuracy_of_the_base_alone(root, first):
    results, _ = first
    assert set(results["finetune"]) == {"knn/class_incremental", "knn/task_aware"}
    assert results["finetune"]["knn/class_incremental"] == alone_twin(root)
    matrix = results_lib.matrix(results, "knn/class_incremental")
    measures = results_lib.read_results(root / "first"), results_lib.summary(results)
    assert measures[0]["finetune"] == results["finetune"]
    want = matrix[0, 1] - alone_twin(root)[1]
    assert measures[1]["knn/class_incremental"]["plasticity"] == pytest.approx(want)
    assert want == pytest.approx(metrics.plasticity(matrix, alone_twin(root)))
    assert {p.name for p in (root / "first" / "single").iterdir()} == {
        "task_0",
        "task_1",
    }


def test_a_run_that_goes_on_from_another_is_set_against_fresh_ones(root, first):
    """And of the tasks that are not trained nothing is measured."""
    changes = {"method.strategy": "pnr", "start": str(root / "first")}
    work = work_of(root / "next", first_tasks=1, **changes)
    no_stop = {"stop": lambda: False, "step": None}
    alone = finish.single_tasks(work, root / "next" / "single", **no_stop)
    assert alone["knn/class_incremental"] == [alone_twin(root)[0], None]


class Counted:
    """job.compile_step, counting."""

    calls = 0
    compile_step = staticmethod(job.compile_step)

    def __call__(self, work):
        self.calls += 1
        return self.compile_step(work)


def test_another_strategy_finds_it_and_trains_nothing(root, first, capsys, monkeypatch):
    results, cache = first
    files = sorted((root / "cache").iterdir())
    assert len(files) == 2 and all(file.suffix == ".json" for file in files)
    before = [file.read_bytes() for file in files]
    work, here = work_of(root / "second", plasticity_cache=cache), root / "second"
    found = finish.run(work, here)
    assert found["finetune"] == results["finetune"]
    assert not (here / "single").exists()
    assert sorted((root / "cache").iterdir()) == files
    assert [file.read_bytes() for file in files] == before
    said = capsys.readouterr().out
    assert all(said.count(f"from {file}\n") == 1 for file in files)
    assert all(f"FT of {task.name}: " in said for task in work.stream.tasks)
    # A damaged file is measured again.
    path = task_alone.path(work.evaluation.alone, 1)
    path.write_text(path.read_text()[:100])
    assert task_alone.read(work.evaluation.alone, 0)
    assert task_alone.read(work.evaluation.alone, 1) is None
    monkeypatch.setattr(finish.job, "compile_step", counted := Counted())
    assert finish.run(work, here)["finetune"] == results["finetune"]
    assert [p.name for p in (here / "single").iterdir()] == ["task_1"]
    assert [file.read_bytes() for file in files] == before
    assert sorted((root / "cache").iterdir()) == files  # no draft is left
    # Without a cache: the same numbers.
    bare = toy.change(work, alone=work.evaluation.alone._replace(cache=None))
    assert finish.run(bare, here)["finetune"] == results["finetune"]
    assert sorted(p.name for p in (here / "single").iterdir()) == ["task_0", "task_1"]
    assert counted.calls == 2  # one for each run: fine-tuning shares it


def key_of(tmp_path, **changes):
    """Name of the file, built without tracing the step."""
    work = work_of(tmp_path / "keys", **{"plasticity_cache": "cache"} | changes)
    shutil.rmtree(tmp_path / "keys")  # the next one is another run
    return task_alone.path(work.evaluation.alone, 0).name


HITS = [
    {"method.strategy": "cassle"},
    {"method.strategy": "finetune"},  # as when it is left out
    {"method.strategy": "der", "method.weight": 3.0, "method.memory_size": 7},
    {"method.strategy": "pnr", "method.negative_weight": 3.0, "method.pn2": False},
    {
        "method.distill_temperature": 0.2,
        "name": "other",
        "log_every": 7,
        "save_every": 3,
    },
    {"plots": True, "devices": 2, "steps_per_call": 2, "keep": 3, "eval_every": 4},
    {"evaluate_untrained": True, "plasticity_cache": "./cache", "workers": 0},
    {"evaluators": {"knn": {"k": 5}, "tsne": {"last_only": False}}},
]
MISSES = [
    {"seed": 1},
    {"method.base": "simclr"},
    {"method.output_dim": 16},
    {"epochs": 2},
    {"batch_size": 24},
    {"optimizer.lr": 0.2},
    {"scale_lr": False},
    {"precision": "bfloat16"},
    {"augment.flip": 0.5},
    {"encoder.width": 8},
    {"scenario.num_tasks": 5},
    {"data.validation": 0.1},
    {"device_bytes": 0},
    {"evaluators": {"knn": {"k": 6}}},
    {"evaluators": {"knn": {"k": 5}, "late": {"name": "knn"}}},
]


def test_what_it_depends_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "jaxcl.config.build.job.checked", lambda method, *_: method
    )  # slow
    mine = key_of(tmp_path)
    assert len(mine) == len("x" * 64 + ".json")
    for changes in HITS:
        assert key_of(tmp_path, **changes) == mine, changes
    keys = [key_of(tmp_path, **changes) for changes in MISSES]
    assert len({mine, *keys}) == 1 + len(MISSES), MISSES
    work = work_of(tmp_path / "other", plasticity_cache="cache")
    assert task_alone.path(work.evaluation.alone, 1).name not in (mine, *keys)
    label = work.stream.dataset.train.label
    label[[0, 1]] = label[[1, 0]]
    relabelled = task_alone.fingerprint(work.stream.dataset)
    assert relabelled != work.evaluation.alone.facts["dataset"]
    monkeypatch.setattr(task_alone, "version", lambda: "0.0")
    assert key_of(tmp_path) not in (mine, *keys)
