"""The support vector machine against scikit-learn's own search, and over a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import model_selection
from sklearn import svm as sklearn_svm

from helpers import eval_toy, toy
from jaxcl import sharding
from jaxcl.data import stream
from jaxcl.evals import svm
from jaxcl.run import log_file, train

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
FEW = dict(folds=3, inner_folds=2, penalties=(0.1, 1.0, 10.0))


def twin(x, y, *, folds=5, inner_folds=5, penalties=PENALTIES, seed=3):
    """Nested cross-validation as its documentation shows it."""
    x = np.asarray(x, np.float64)
    search = model_selection.GridSearchCV(
        sklearn_svm.SVC(kernel="rbf", gamma="scale"),
        {"C": list(penalties)},
        cv=model_selection.StratifiedKFold(inner_folds),
    )
    outer = model_selection.StratifiedKFold(folds, shuffle=True, random_state=seed)
    return model_selection.cross_val_score(search, x, y, cv=outer).mean()


def blobs(seed, classes=2, count=60, dim=3, gap=0.8, shift=0.0):
    """Gaussian classes that overlap, features of unequal scale and mean."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(count) % classes).astype(np.int32)
    centres = rng.normal(size=(classes, dim))
    x = gap * centres[y] + rng.normal(size=(count, dim))
    x = x * np.linspace(0.3, 3, dim) + shift * np.arange(dim)
    return x.astype(np.float32), y


def nested_loops(x, y, folds, inner_folds, penalties, seed):
    """The same by hand: a kernel of squared distances, and every fold in a loop."""

    def share(train, test, penalty):
        gamma = 1 / (x.shape[1] * x[train].var())
        gaps = ((x[:, None] - x[None]) ** 2).sum(axis=2)
        kernel = np.exp(-gamma * gaps)
        machine = sklearn_svm.SVC(C=penalty, kernel="precomputed")
        machine.fit(kernel[np.ix_(train, train)], y[train])
        return (machine.predict(kernel[np.ix_(test, train)]) == y[test]).mean()

    x, shares = np.asarray(x, np.float64), []
    cut = model_selection.StratifiedKFold
    for rest, test in cut(folds, shuffle=True, random_state=seed).split(x, y):
        inner = [*cut(inner_folds).split(x[rest], y[rest])]
        means = [
            np.mean([share(rest[fit], rest[held], c) for fit, held in inner])
            for c in penalties
        ]
        shares.append(share(rest, test, penalties[int(np.argmax(means))]))
    return np.mean(shares)


@pytest.mark.parametrize("seed, classes", [(0, 2), (1, 3), (2, 3)])
def test_accuracy_is_that_of_nested_folds(seed, classes):
    x, y = blobs(seed, classes, shift=2.0 * seed)
    options = dict(folds=4, inner_folds=3, penalties=PENALTIES, seed=seed)
    found = svm.nested_accuracy(x, y, **options)
    want = nested_loops(x, y, **options)
    assert 0.3 < found < 1 and found == pytest.approx(want, abs=1e-12)


def dataset(label, images):
    examples = stream.Examples(
        np.asarray(label, np.int32), np.zeros(len(label), np.int32), images
    )
    return stream.Dataset("toy", ("a", "b", "c"), ("x",), examples, None, None)


def images_of(x):
    """Images whose first three numbers are a row's features in [0, 255]."""
    made = np.zeros((len(x), 4, 4, 3), np.uint8)
    made[:, 0, 0] = x
    return made


def parts_of(label, images, rows, devices=1, **more):
    """A stream of tasks with the given train rows; features are the first pixel."""
    data = dataset(label, images)
    parts = eval_toy.parts_of("joint", devices=devices)
    (whole,) = parts.stream.tasks
    tasks = tuple(
        whole._replace(index=t, train=stream.Source(data.train, r))
        for t, r in enumerate(rows)
    )
    given = dict(
        embed=lambda scale, images: images[:, 0, 0] * scale,
        stream=stream.Stream(data, tasks, None),
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
    )
    return parts._replace(**given | more)


@functools.cache
def three_tasks():
    """(labels, images, rows of tasks): one tells its classes apart, two do not."""
    rng = np.random.default_rng(7)
    label = np.arange(96) % 2
    tasks = np.split(rng.permutation(96), [40, 72])
    x = rng.integers(0, 256, (96, 3))
    x[tasks[0]] = 30 + 150 * label[tasks[0], None] + rng.integers(0, 40, (40, 3))
    return label, images_of(x), tasks


def judged(found):
    assert found.rows == {}
    return found.scalars


ONE = jnp.float32(1.0)


@pytest.mark.parametrize("devices", [1, 2])
def test_each_subset_is_judged_within_itself(devices):
    label, images, tasks = three_tasks()
    # A row that two tasks have counts once.
    tasks = [tasks[0], tasks[1], np.concatenate([tasks[2], tasks[0][:3]])]
    parts = parts_of(label, images, tasks, devices)
    evaluate = svm.make(parts, **FEW, batch_size=7)
    state = sharding.replicate(np.float32(1.0), parts.mesh)

    def want(*which):
        rows = np.unique(np.concatenate([tasks[t] for t in which]))
        return pytest.approx(twin(images[rows, 0, 0] / 255, label[rows], **FEW))

    found = [judged(evaluate(state, task)) for task in range(3)]
    assert found[0] == {"all": want(0)}
    assert found[1] == {"all": want(0, 1), "old": want(0), "new": want(1)}
    assert found[2] == {"all": want(0, 1, 2), "old": want(0, 1), "new": want(2)}
    assert found[1]["old"] == 1 and found[1]["new"] < 0.75 < found[1]["all"] < 1
    assert judged(evaluate(state, 1)) == found[1]


def test_of_too_many_rows_some_are_drawn(monkeypatch):
    label, images, tasks = three_tasks()
    label = np.where(np.arange(96) % 4 == 3, 0, label)  # three of class 0, one of 1
    given = []

    def remember(features, labels, **_):
        given.append((np.asarray(features), labels))
        return 0.5

    monkeypatch.setattr(svm, "nested_accuracy", remember)
    parts = parts_of(label, images, tasks)
    svm.make(parts, **FEW, max_rows=36)(ONE, 2)
    svm.make(parts, **FEW, max_rows=36)(ONE, 2)
    svm.make(parts._replace(seed=4), **FEW, max_rows=36)(ONE, 2)
    rows = [np.arange(96), np.sort(np.concatenate(tasks[:2])), tasks[2]]
    for (x, y), mine in zip(given, rows, strict=False):
        count = min(36, len(mine))
        assert len(y) == len(x) == count
        share = count * (label[mine] == 1).mean()
        assert abs((y == 1).sum() - share) <= 1
        there = {tuple(row) for row in images[mine, 0, 0]}
        drawn = np.round(255 * x).astype(int)
        assert {tuple(row) for row in drawn} <= there
    np.testing.assert_array_equal(given[0][0], given[3][0])
    assert (given[0][0] != given[6][0]).any()
    # Rows are not told apart by the draw: labels are still theirs.
    at = {tuple(row): y for row, y in zip(images[:, 0, 0], label, strict=True)}
    x, y = given[0]
    assert [at[tuple(row)] for row in np.round(255 * x).astype(int)] == y.tolist()


def test_what_has_no_accuracy_is_left_out():
    label, images, _ = three_tasks()
    label = np.append(label, -1)  # of no task: it need not have one
    images = np.append(images, images[:1], axis=0)
    # Class 0 first, then class 1, then both.
    zeros, ones = np.flatnonzero(label == 0), np.flatnonzero(label == 1)
    tasks = [zeros[:20], ones[:20], np.concatenate([zeros[20:], ones[20:]])]
    evaluate = svm.make(parts_of(label, images, tasks), **FEW)
    found = [judged(evaluate(ONE, task)) for task in range(3)]
    assert [set(each) for each in found] == [set(), {"all"}, {"all", "old", "new"}]
    assert judged(evaluate(jnp.float32(np.nan), 2)) == {}
    blank = jnp.ones(3).at[0].set(jnp.inf)
    assert judged(evaluate(blank, 2)) == {}


@pytest.mark.filterwarnings("error")  # scikit-learn warns of a fold without a class
@pytest.mark.parametrize(
    "folds, inner_folds, least", [(5, 5, 7), (2, 2, 4), (4, 2, 4), (3, 5, 8)]
)
def test_every_class_has_rows_for_every_fold(folds, inner_folds, least):
    options = dict(folds=folds, inner_folds=inner_folds, penalties=(1.0,))

    def made(count, total=40, **more):
        label = (np.arange(total) >= total - count).astype(np.int32)
        x = np.random.default_rng(0).integers(0, 256, (total, 3))
        return svm.make(
            parts_of(label, images_of(x), [np.arange(total)]), **options, **more
        )

    ((name, accuracy),) = judged(made(least)(ONE, 0)).items()
    assert name == "all" and accuracy > 0.5
    message = (
        rf"evaluators\.svm\.folds={folds}: .*inner_folds={inner_folds} {least} rows "
        rf".*the 'all' rows of task 0 of toy only "
    )
    with pytest.raises(ValueError, match=message + f"{least - 1} .*class 1"):
        made(least - 1)
    # A class that the draw of rows leaves out altogether is missed, too.
    with pytest.raises(ValueError, match=message + "0 .*class 1"):
        made(least, total=200, max_rows=12)


def test_a_run_without_evaluation_rows_is_judged(tmp_path):
    folds = {"folds": 3, "inner_folds": 2, "penalties": [1.0, 10.0]}
    scenario = {"name": "class", "num_tasks": 8, "evaluation": "none"}
    changes = {"evaluators": {"svm": folds}, "epochs": 1, "scenario": scenario}
    work = toy.job(tmp_path / "built", tasks=2, **changes)
    results = train.run_tasks(work, tmp_path / "run")
    first, second = results["scalars"][:2]
    assert set(first) == {"svm/all"}
    assert set(second) == {"svm/all", "svm/old", "svm/new"}
    state, data = toy.saved(work, tmp_path / "run").state, work.stream.dataset.train
    tasks = [task.train.rows for task in work.stream.tasks]
    embed = jax.jit(lambda x: work.method.embed(state, (x / 255.0 - 0.3) / 0.4))
    for name, rows in zip(("all", "old", "new"), [[0, 1], [0], [1]], strict=True):
        mine = np.sort(np.concatenate([tasks[t] for t in rows]))
        x = np.asarray(embed(data.images[mine]))
        want = twin(x, data.label[mine], **folds, seed=work.data.seed)
        # Rounding may move a row or two.
        assert second[f"svm/{name}"] == pytest.approx(want, abs=2.5 / len(mine))
    assert second["svm/all"] > 0.5
    rows = [r["eval"] for r in log_file.read_rows(tmp_path / "run") if "eval" in r]
    assert rows == [first, second]
