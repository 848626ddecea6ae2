"""The online head: it learns labels of all classes and tells the network nothing."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import eval_toy, online_toy, toy
from jaxcl import core, optim, sharding
from jaxcl.config import resolve, sections
from jaxcl.data.sources import by_name
from jaxcl.evals import predict
from jaxcl.methods.two_view import head
from jaxcl.nets import chain
from jaxcl.run import finish, job, log_file, result_file, train

HEAD = {"method.online_head": True}
SIMCLR = {"method.base": "simclr"}
PNR = {
    **SIMCLR,
    "method.strategy": "pnr",
    "method.head_lr": 0.7,
    # With seed 0 an activation rounds to either side of a ReLU's zero: two programs of
    # one step end 3e-3 apart.
    "seed": 1,
    "augment.solarize": (0.0, 1.0),  # views differ
}
# The crop is the image and nothing else is drawn: batches can be told by their pixels.
WHOLE = {
    "augment.scale": (1.0, 1.0),
    "augment.ratio": (1.0, 1.0),
    "augment.jitter_probability": 0.0,
}
BATCH = 48


def equal(one, other):
    one, other = toy.leaves(one), toy.leaves(other)
    assert len(one) == len(other)
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def same(one, other):
    """Equal to rounding."""
    one, other = toy.leaves(one), toy.leaves(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def host(work, task=0, start=0):
    """Index and labels of every step's batch and of its labelled one, and images."""
    found = []
    source = work.stream.tasks[task].train
    for _, batches, _ in job.feed_batches(work, source, task, start):
        found.append(jax.tree.map(lambda x: np.asarray(x)[0], batches))
    return found


def indices(batches):
    return np.stack([batch["labelled"]["index"] for batch in batches])


# What the head must leave alone


@pytest.fixture(scope="module")
def pnr(tmp_path_factory):
    """A job with a head, and its compiled step."""
    work = toy.job(tmp_path_factory.mktemp("pnr"), tasks=2, **PNR, **HEAD)
    return work, job.compile_step(work)


def test_the_network_is_the_same_with_a_head(pnr, tmp_path):
    """Two tasks: no statistic, gradient or random number of the head gets out.

    The two are different programs, which XLA may round differently.
    """
    works = {"off": (toy.job(tmp_path / "x", tasks=2, **PNR), None), "on": pnr}
    states, rows = [], []
    for name, (work, step) in works.items():
        train.run_tasks(work, tmp_path / name, step=step)
        states.append(toy.saved(work, tmp_path / name).state)
        rows.append(log_file.read_rows(tmp_path / name))
    off, on = states
    assert int(on.step) == 24 and jax.tree.leaves(off.stats["encoder"])
    same(off, on.replace(extra=on.extra.method))
    for without, with_ in zip(*rows, strict=True):
        if "loss" in without:
            told = set(with_) - set(without)
            assert told == {"head_loss", "head_accuracy"}
        names = set(without) - {"time"}
        numbers = [[row[n] for n in sorted(names)] for row in (without, with_)]
        same(*(jax.tree.map(np.asarray, x) for x in numbers))
    # A head that stands still would leave all alone, too.
    fresh = job.initial_state(pnr[0])
    assert not np.array_equal(on.extra.layer.weight, fresh.extra.layer.weight)


# What it learns


def head_twin(features, labels, layer, velocity, rate):
    """A step of SGD on a linear layer's cross-entropy, in float64."""
    (w, b), (vw, vb) = layer, velocity
    scores = features @ w + b
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    loss = -np.log(p[np.arange(len(labels)), labels]).mean()
    accuracy = (scores.argmax(axis=1) == labels).mean()
    gap = (p - np.eye(p.shape[1])[labels]) / len(labels)
    vw, vb = 0.9 * vw + features.T @ gap, 0.9 * vb + gap.sum(axis=0)
    return (w - rate * vw, b - rate * vb), (vw, vb), loss, accuracy


def lars_twin(features, labels, layer, velocity, rate):
    """`head_twin` with LARS on the weight: eta 0.02, clipped, no decay."""
    held = [np.zeros_like(x) for x in velocity]
    moved, _, loss, accuracy = head_twin(features, labels, layer, held, 1.0)
    gaps = [before - after for before, after in zip(layer, moved, strict=True)]
    share = 0.02 * np.linalg.norm(layer[0]) / (np.linalg.norm(gaps[0]) + 1e-8)
    gaps[0] = gaps[0] * min(share / rate, 1.0)
    velocity = [0.9 * v + g for v, g in zip(velocity, gaps, strict=True)]
    layer = [x - rate * v for x, v in zip(layer, velocity, strict=True)]
    return layer, velocity, loss, accuracy, share < rate


class Grown(nn.Module):
    """Pixels times a factor; each pass that trains moves what it keeps of them."""

    @nn.compact
    def __call__(self, x, *, train, groups=1):
        kept = self.variable("batch_stats", "kept", jnp.zeros, ())
        if train:
            kept.value = kept.value / 2 + jnp.mean(x)
        return self.param("factor", nn.initializers.ones, ()) * x.reshape(len(x), -1)


@pytest.mark.parametrize("form", ["apart", "released"])
def test_the_head_reads_the_network_before_the_step_and_each_task_its_own_momentum(
    form,
):
    """Beside a network that doubles its features in every step."""

    def step(state, batch):
        grown = jax.tree.map(lambda x: 2 * x, state.params)
        kept = jax.tree.map(lambda x: x + 5, state.stats)
        state = state.replace(params=grown, stats=kept, step=state.step + 1)
        return state, {"loss": jnp.zeros(())}

    encoder = chain.Chain({"encoder": Grown()})
    factor = {"encoder": {"factor": jnp.ones(())}}
    method = core.Method(
        init=lambda key, batch: core.new_state(
            key, factor, {"encoder": {"kept": jnp.zeros(())}}, optax.identity(), {}
        ),
        step=step,
        embed=encoder.embed,
    )
    schedule = optim.by_task([optim.cosine(0.7, epochs=1, per_epoch=False)])
    parts = online_toy.parts(Grown())._replace(schedule_with_peak=lambda _: schedule)
    parts = parts._replace(
        augment=lambda key, images: parts.eval_transform(images)[:, None]
    )
    method = head.add(method, parts, lr=0.7, form=form)
    batch = {"labelled": online_toy.FIRST}
    state = method.init(jax.random.key(0), batch).replace(task_steps=jnp.int32(4))
    layer = [np.asarray(x, np.float64) for x in state.extra.layer]
    rows = np.reshape(parts.eval_transform(online_toy.FIRST["image"]), (6, -1))
    label, kept = np.asarray(online_toy.FIRST["label"]), 0
    for number in range(4):
        if number % 2 == 0:
            state = method.begin_task(state, None)
            velocity = [np.zeros_like(x) for x in layer]
        features, rate = 2.0**number * rows, 0.7 * (1 + np.cos(np.pi * number / 4)) / 2
        twin = head_twin if form == "apart" else lars_twin
        layer, velocity, loss, *_ = twin(features, label, layer, velocity, rate)
        state, metrics = method.step(state, batch)
        np.testing.assert_allclose(metrics["head_loss"], loss, rtol=1e-4)
        np.testing.assert_allclose(state.extra.layer.weight, layer[0], rtol=1e-3)
        # The step's statistics; those of the released form move once more.
        kept = (kept + 5) / 2 + rows.mean() if form == "released" else kept + 5
        np.testing.assert_allclose(state.stats["encoder"]["kept"], kept, rtol=1e-5)


def test_the_head_is_sgd_on_features_of_the_network_before_the_step(pnr):
    """Steps of a task and of the next: its momentum is dropped, the layer stays."""
    work, step = pnr
    state, resident = job.initial_state(work), job.resident(work)
    layer = [np.asarray(x, np.float64) for x in state.extra.layer]
    assert [x.shape for x in layer] == [(16, 10), (10,)]
    assert 0.2 < max(abs(x).max() for x in layer) <= 0.25  # nn.Linear's 16 ** -0.5
    make_parts, _ = sections.read_parts(
        sections.read_top(resolve.resolve(toy.config(**PNR).to_dict()))
    )
    parts = make_parts(num_classes=10)
    view = jax.jit(lambda key, images: parts.augment(key, images)[:, 1])
    embed = jax.jit(work.method.embed)
    train_set = work.stream.dataset.train
    images, labels = train_set.images, train_set.label
    for task in work.stream.tasks:
        state = job.begin_task(work, state, task)
        velocity = [np.zeros_like(x) for x in layer]
        for i, batch in enumerate(host(work, task.index)[:4]):
            rows = batch["labelled"]["index"]
            key = jax.random.fold_in(core.step_key(state), head._STREAM)
            features = np.asarray(embed(state, view(key, images[rows])), np.float64)
            rate = 0.7 * (1 + np.cos(np.pi * i / 12)) / 2
            layer, velocity, loss, accuracy = head_twin(
                features, labels[rows], layer, velocity, rate
            )
            placed = sharding.shard_rows(
                jax.tree.map(lambda x: x[None], batch), work.mesh, axis=1
            )
            state, metrics = step(state, resident, placed, jnp.int32(1))
            for ours, twin in zip(state.extra.layer, layer, strict=True):
                np.testing.assert_allclose(ours, twin, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(metrics["head_loss"], loss, rtol=1e-4)
            np.testing.assert_allclose(metrics["head_accuracy"], accuracy, rtol=1e-5)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8, 8, 1)), "float32")
    want = np.asarray(embed(state, images), np.float64) @ layer[0] + layer[1]
    got = work.method.predict(state, images)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_the_released_head_moves_the_statistics_with_rows_of_all_classes(tmp_path):
    """After the method's own rows; parameters are as without a head."""
    leaks = HEAD | {"method.head_form": "released"}
    work = toy.job(tmp_path / "leaks", tasks=2, **PNR, **leaks)
    plain = toy.job(tmp_path / "plain", tasks=2, **PNR)
    make_parts, _ = sections.read_parts(
        sections.read_top(resolve.resolve(toy.config(**PNR).to_dict()))
    )
    parts = make_parts(num_classes=10)
    view = jax.jit(lambda key, images: parts.augment(key, images)[:, 1])
    encoder = chain.Chain({"encoder": parts.encoder})
    passed = jax.jit(functools.partial(encoder, train=True))
    step, alone = job.compile_step(work), jax.jit(plain.method.step)
    state, resident = job.initial_state(work), job.resident(work)
    state = job.begin_task(work, state, work.stream.tasks[0])
    layer = [np.asarray(x, np.float64) for x in state.extra.layer]
    velocity = [np.zeros_like(x) for x in layer]
    rate_of, clipped = parts.schedule_with_peak(0.7), set()
    images = work.stream.dataset.train.images
    labels = work.stream.dataset.train.label
    for batch in host(work)[:4]:
        own, _ = alone(
            core.copy(state.replace(extra=state.extra.method)),
            {"image": images[batch["index"]], "label": labels[batch["index"]]},
        )
        rows = batch["labelled"]["index"]
        key = jax.random.fold_in(core.step_key(state), head._STREAM)
        features, moved = passed(state.params, own.stats, view(key, images[rows]))
        rate = float(rate_of(core.progress(state), state.task))
        layer, velocity, loss, accuracy, short = lars_twin(
            np.asarray(features, np.float64), labels[rows], layer, velocity, rate
        )
        clipped.add(bool(short))
        before = core.copy(own.stats["encoder"])
        placed = jax.tree.map(lambda x: x[None], batch)
        placed = sharding.shard_rows(placed, work.mesh, axis=1)
        state, metrics = step(state, resident, placed, jnp.int32(1))
        same(own.params, state.params)
        same(moved["encoder"], state.stats["encoder"])
        assert not np.allclose(toy.leaves(before)[0], toy.leaves(moved)[0], rtol=1e-3)
        for name in set(own.stats) - {"encoder"}:
            same(own.stats[name], state.stats[name])
        for ours, twin in zip(state.extra.layer, layer, strict=True):
            np.testing.assert_allclose(ours, twin, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(metrics["head_loss"], loss, rtol=1e-4)
        np.testing.assert_allclose(metrics["head_accuracy"], accuracy, rtol=1e-5)
    assert True in clipped  # or LARS was not seen at work


# The labelled rows


@pytest.fixture(scope="module")
def incremental(tmp_path_factory):
    return toy.job(tmp_path_factory.mktemp("x"), tasks=2, **HEAD)


def test_labelled_rows_are_of_all_classes_in_an_order_of_their_own(incremental):
    first, second = host(incremental), host(incremental, task=1)
    assert len(first) == len(second) == 12  # the task's steps, not the set's
    labels = incremental.stream.dataset.train.label
    for batches, task in zip((first, second), incremental.stream.tasks, strict=True):
        assert all(np.isin(labels[b["index"]], task.classes).all() for b in batches)
        rows = indices(batches)
        assert len(np.unique(rows)) == rows.size == 12 * BATCH  # one epoch, no repeats
        counts = np.bincount(labels[rows[:6].ravel()], minlength=10)
        assert (counts > 10).all() and (counts < 50).all()
    assert not np.array_equal(indices(first), indices(second))
    again = host(incremental)
    assert all(equal(a, b) for a, b in zip(first, again, strict=True))
    later = host(incremental, start=5)
    assert all(equal(a, b) for a, b in zip(first[5:], later, strict=True))
    data = incremental.data
    seeded = host(incremental._replace(data=data._replace(seed=1)))
    assert not np.array_equal(indices(first), indices(seeded))
    # A task may be longer than the set is, or be the set.
    assert len(host(incremental._replace(data=data._replace(epochs=6)))) == 36
    task = incremental.stream.tasks[0]
    task = task._replace(train=task.train._replace(rows=np.arange(len(labels))))
    whole = data._replace(stream=data.stream._replace(tasks=(task,)))
    batch = host(incremental._replace(data=whole))[0]
    assert not np.array_equal(batch["index"], batch["labelled"]["index"])


def test_processes_share_a_labelled_batch(incremental, monkeypatch):
    source = incremental.stream.tasks[0].train
    whole = indices(list(job._host_batches(incremental, source, 0, 0)))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    parts = []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda p=process: p)
        parts.append(indices(list(job._host_batches(incremental, source, 0, 0))))
    assert parts[0].shape == (12, BATCH // 2)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_labels_belong_to_images_on_the_device_and_streaming(tmp_path):
    """What the step sees, where it looks rows up and where a second reader cuts."""

    def spy(state, batch):
        return state, jax.tree.map(lambda x: x, batch["labelled"])

    found = {}
    for name, size in (("resident", 2**30), ("streams", 100)):
        work = toy.job(
            tmp_path / name, tasks=1, device_bytes=size, **HEAD, **WHOLE, workers=0
        )
        assert work.data.resident == (name == "resident")
        method = work.method._replace(step=spy)
        step = job.compile_step(work._replace(method=method))
        state, resident = job.initial_state(work), job.resident(work)
        batches = []
        for _, placed, number in job.feed_batches(
            work, work.stream.tasks[0].train, 0, 2
        ):
            state, seen = step(state, resident, placed, number)
            batches.append(jax.tree.map(lambda x: np.asarray(x)[0], seen))
        found[name] = batches
        train_set = work.stream.dataset.train
        for batch in batches:
            images = train_set.images[batch["index"]]
            views = batch["image"] if name == "streams" else batch["image"][:, None]
            for view in range(views.shape[1]):
                np.testing.assert_array_equal(views[:, view], images)
            labels = train_set.label[batch["index"]]
            np.testing.assert_array_equal(batch["label"], labels)
            assert len(set(labels)) > 5
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(one["index"], other["index"])


def test_a_set_that_streams_trains_a_head_and_resumes(tmp_path):
    work = toy.job(tmp_path / "x", tasks=1, device_bytes=100, **SIMCLR, **HEAD)
    step = job.compile_step(work)
    train.run_tasks(work, tmp_path / "whole", step=step)
    asked = iter([False] * 4 + [True])
    with pytest.raises(train.Interrupted):
        train.run_tasks(work, tmp_path / "parts", step=step, stop=lambda: next(asked))
    train.run_tasks(work, tmp_path / "parts", step=step)
    one, two = (toy.saved(work, tmp_path / x).state for x in ("whole", "parts"))
    assert equal(one, two) and int(one.step) == 12
    assert any(np.abs(leaf).max() > 0 for leaf in toy.leaves(one.extra.velocity))


def test_rows_without_labels_and_wrong_options_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"config\.method\.head_lr=0\.0"):
        toy.job(tmp_path, **HEAD, **{"method.head_lr": 0.0})
    with pytest.raises(ValueError, match=r"config\.method\.head_form='x'"):
        toy.job(tmp_path, **{"method.head_form": "x"})
    monkeypatch.setitem(by_name.SOURCES, "digits", toy.unlabelled)
    joint = {"scenario": {"name": "joint"}}
    words = r"1 of \d+ of digits have none.*config\.method\.online_head"
    with pytest.raises(ValueError, match=words):
        toy.job(tmp_path, **joint, **HEAD)
    toy.job(tmp_path, **joint)  # without the head nothing asks


# The evaluator


def scores(state, images):
    return eval_toy.embed(state, images) @ jnp.asarray(LAYER, jnp.float32)


LAYER = np.random.default_rng(5).normal(size=(eval_toy.DIM, eval_toy.CLASSES))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("scenario", ["class", "domain", "data"])
def test_predict_judges_the_rows_of_the_tasks_met(scenario, streams):
    """And reads no others, unless it is asked to; the last task has no test rows."""
    data = eval_toy.dataset(streams=streams)
    images, labels = eval_toy.dataset().test.images, data.test.label
    rows = []

    def read(row):
        rows.append(row)
        return images[row]

    if streams:
        data = data._replace(test=eval_toy.streamed(eval_toy.dataset().test, read))
    parts = eval_toy.parts_of(scenario, data, devices=2, predict=scores)
    *tasks, last = parts.stream.tasks
    tasks = [*tasks, last._replace(test=last.test[:0])]
    parts = parts._replace(stream=parts.stream._replace(tasks=tuple(tasks)))
    state = eval_toy.state_of(3)
    found = eval_toy.embedded(state, images) @ LAYER
    right = found.argmax(axis=1) == labels
    told = np.array(right)
    for task in tasks:
        best = found[task.test][:, task.classes].argmax(axis=1)
        told[task.test] = task.classes[best] == labels[task.test]
    evaluate, of_all = predict.make(parts), predict.make(parts, met_only=False)
    for t in range(3):
        result = of_all(state, t)
        # A row of no task may be any class.
        np.testing.assert_allclose(result.scalars["accuracy"], np.mean(right))
        for name, row in result.rows.items():
            verdict = told if name == "task_aware" else right
            want = [np.mean(verdict[task.test]) for task in tasks[:2]]
            np.testing.assert_allclose(row[:2], want)
        rows.clear()
        result = evaluate(state, t)
        met = sorted({int(row) for task in tasks[: t + 1] for row in task.test})
        if streams:
            assert set(rows) == set(met)
        for name, row in result.rows.items():
            verdict = told if name == "task_aware" else right
            want = [np.mean(verdict[task.test]) for task in tasks[: min(t + 1, 2)]]
            np.testing.assert_allclose(row, want + [np.nan] * (3 - len(want)))
        assert ("task_aware" in result.rows) == (scenario == "class")
        np.testing.assert_allclose(result.scalars["accuracy"], np.mean(right[met]))
    if scenario != "data":
        assert 0 < len(met) < len(labels)


def test_a_run_is_judged_by_its_head_alone_tasks_too(tmp_path):
    """Digits in two tasks: far above the chance of 1 in 10, FT_i as well."""
    changes = {
        "scenario": {"name": "class", "num_tasks": 2},
        "epochs": 4,
        "method.head_lr": 1.0,
        "plasticity": True,
        "evaluate_untrained": True,
        "evaluators": {"predict": {"met_only": False}, "met": {"name": "predict"}},
    }
    work = toy.job(tmp_path, **changes, **SIMCLR, **HEAD)
    results = finish.run_job(work, tmp_path)
    matrix = np.array(results["matrices"]["predict/class_incremental"])
    aware = np.array(results["matrices"]["predict/task_aware"])
    untrained = np.array(results["untrained"]["predict/class_incremental"])
    alone = results["finetune"]["predict/class_incremental"]
    print(matrix, aware, untrained, alone)
    assert matrix.shape == (2, 2) and untrained.mean() < 0.25
    assert (matrix > 0.5).all() and (aware >= matrix).all()
    # The first task is its own run alone; both see all classes in every task.
    np.testing.assert_allclose(alone[0], matrix[0, 0])
    assert alone[1] > 0.5
    assert results["scalars"][1]["predict/accuracy"] > 0.5
    # With the tasks met alone: nothing above the diagonal, and so no plasticity.
    met = np.array(results["matrices"]["met/class_incremental"], float)
    np.testing.assert_array_equal(met, np.where([[1, 0], [1, 1]], matrix, np.nan))
    met = np.array(results["untrained"]["met/class_incremental"], float)
    np.testing.assert_array_equal(met, [untrained[0], np.nan])
    assert results["finetune"]["met/class_incremental"] == alone
    found = result_file.summary(results)
    assert found["met/class_incremental"]["plasticity"] is None
    assert found["predict/class_incremental"]["plasticity"] is not None
    for measure in ("average_accuracy", "forgetting"):
        ours = [found[f"{x}/class_incremental"][measure] for x in ("met", "predict")]
        assert ours[0] == ours[1]
