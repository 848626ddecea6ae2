"""The class-balanced probe of the visible rows, and the picture of a memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import eval_toy, memory_toy, toy
from jaxcl import sharding
from jaxcl.data import stream
from jaxcl.data.augment import images as augment_images
from jaxcl.evals import embedding, linear
from jaxcl.evals import head as head_lib
from jaxcl.methods import er, two_view
from jaxcl.nets import linear_head
from jaxcl.run import job

CLASSES, DIM = eval_toy.CLASSES, eval_toy.DIM
OPTIONS = eval_toy.OPTIONS | dict(batch_size=4, train_on="visible")


def visible_twin(parts, task):
    return sorted({*parts.stream.tasks[task].train.rows} | {*memory_toy.REPLAYED[task]})


@pytest.mark.parametrize("reading", ["features", "augmented", "streamed"])
def test_probe_trains_on_the_task_and_what_it_replayed(reading):
    parts = memory_toy.parts_of(data=eval_toy.dataset(streams=reading == "streamed"))
    more = dict(batch_size=4, train_on="visible")
    evaluate = eval_toy.probe(parts, **eval_toy.options_of(reading, **more))
    for task in (0, 1, 2):
        state, at = memory_toy.state_of(task), visible_twin(parts, task)
        assert len(at) == len(parts.stream.tasks[task].train.rows) + [0, 2, 4][task]
        result, how = evaluate(state, task), {"reading": reading, "task": task}
        eval_toy.check_probe(result, parts, state, at, 4, **how)
        aware = np.isnan(result.rows["task_aware"]).tolist()
        assert aware == [t > task for t in range(3)]


def test_every_replayed_row_is_visible_the_first_too():
    parts = memory_toy.parts_of()
    parts = parts._replace(replayed=lambda state: jnp.array([0, -1, 7, -1]))
    visible = linear._usable_rows(parts, "visible", embedding.assign_tasks(parts))
    rows = {*parts.stream.tasks[2].train.rows.tolist()}
    assert not rows & {0, 7}
    mask = visible(memory_toy.state_of(2), 2)
    assert {*np.flatnonzero(mask).tolist()} == rows | {0, 7}


def unequal():
    """i32[60] labels of four classes of six, which 40 rows in no order have."""
    rng = np.random.default_rng(0)
    labels = np.full(60, 2, np.int32)  # a class that no row of the set has
    rows = rng.permutation(60)[:40].astype(np.int32)
    labels[rows] = np.repeat([0, 1, 4, 5], [25, 10, 4, 1])
    return labels, rows


def draws(labels, rows, repeats):
    padded = np.zeros(60, np.int32)
    padded[: len(rows)] = rows

    @jax.jit
    def drawn(padded, count, labels, keys):
        return jax.vmap(head_lib.class_uniform(padded, count, labels, CLASSES))(keys)

    keys = jax.random.split(jax.random.key(7), repeats)
    return np.asarray(drawn(padded, np.int32(len(rows)), labels, keys))


def test_balanced_draws_are_uniform_over_classes_then_rows():
    labels, rows = unequal()
    found = draws(labels, rows, 500)
    assert found.shape == (500, 60)
    total = found.size
    share = np.bincount(labels[found.ravel()], minlength=CLASSES) / total
    # 30 000 draws: five standard deviations are 0.0125 of a class, here and below.
    np.testing.assert_allclose(share, [0.25, 0.25, 0, 0, 0.25, 0.25], atol=0.0125)
    counts = np.bincount(found.ravel(), minlength=60)
    assert set(np.flatnonzero(counts)) == set(rows)
    for label, n in ((0, 25), (1, 10), (4, 4), (5, 1)):
        p = 0.25 / n
        gap = np.abs(counts[rows[labels[rows] == label]] / total - p)
        assert gap.max() < 5 * np.sqrt(p * (1 - p) / total)
    # Draws are independent of each other: neighbours agree as often as chance has it.
    same = (labels[found[:, 1:]] == labels[found[:, :-1]]).mean()
    assert same == pytest.approx(0.25, abs=0.0125)
    same = (found[:, 1:] == found[:, :-1]).mean()
    want = sum((0.25 / n) ** 2 * n for n in (25, 10, 4, 1))
    assert same == pytest.approx(want, abs=0.012)


@pytest.mark.parametrize("augmented, counts", [(False, (1,)), (True, (1, 2))])
def test_balanced_probe_descends_on_its_draws(augmented, counts):
    """Anew in each epoch, as many as there are rows, on any number of devices."""
    train, task = eval_toy.dataset().train, 2
    options = OPTIONS | dict(augment=augmented, scale=(1.0, 1.0), flip=1.0)
    found = []
    for devices in counts:
        parts = memory_toy.parts_of(devices=devices)
        evaluate = eval_toy.probe(parts, balanced=True, **options)
        found.append(
            evaluate(sharding.replicate(memory_toy.state_of(task), parts.mesh), task)
        )
    images = train.images[:, :, ::-1] if augmented else train.images
    at = np.array(visible_twin(parts, task), np.int32)
    padded = np.zeros(50, np.int32)
    padded[: len(at)] = at
    k_start, k_epochs = head_lib.probe_keys(3, task, 0)
    draw = head_lib.class_uniform(jnp.asarray(padded), len(at), train.label, CLASSES)

    def order_of(epoch):
        k_order, _ = jax.random.split(jax.random.fold_in(k_epochs, epoch))
        return np.asarray(draw(k_order))[: len(at)]

    assert order_of(0).tolist() != order_of(1).tolist()
    assert len(set(order_of(0))) < len(at)  # with replacement
    x = eval_toy.embedded(memory_toy.state_of(), images)
    head = linear_head.start_head(k_start, DIM, CLASSES)
    w, b, loss = eval_toy.probe_twin(x, train.label, head, order_of, 4)
    test = parts.stream.evaluation
    guess = (eval_toy.embedded(memory_toy.state_of(), test.images) @ w + b).argmax(1)
    for result in found:
        np.testing.assert_allclose(result.scalars["train_loss"], loss, rtol=1e-4)
        want = eval_toy.accuracies(parts, guess)
        np.testing.assert_allclose(result.rows["class_incremental"], want)


COLOURS = dict(jitter_probability=0.8, grayscale=0.2, blur=0.5)


@pytest.mark.parametrize(
    "streams, given, seen",
    [
        (False, {}, dict(jitter_probability=0.0, grayscale=0.0)),
        (True, {}, dict(jitter_probability=0.0, grayscale=0.0)),
        (False, COLOURS, COLOURS | {"jitter": (0.4, 0.4, 0.4, 0.1)}),
        (True, *[COLOURS | {"jitter": [0.1, 0.2, 0.3, 0.4]}] * 2),
    ],
)
def test_probe_sees_the_augmentation_that_is_asked_for(streams, given, seen):
    """With no options crops and flips alone, from the same keys."""
    scale = (1.0, 1.0) if streams else (0.3, 1.0)  # whole: the workers draw nothing
    data, state = eval_toy.dataset(), eval_toy.state_of(0)
    parts = eval_toy.parts_of(data=eval_toy.dataset(streams=streams))
    options = eval_toy.OPTIONS | {"scale": scale}
    result = eval_toy.probe(parts, **options, **given)(state, 1)
    view = augment_images.make(
        size=4,
        views=1,
        scale=scale,
        ratio=(3 / 4, 4 / 3),
        interpolation="bilinear",
        flip=0.5,
        mean=eval_toy.MEAN,
        std=eval_toy.STD,
        **seen,
    )
    view, key_of = jax.jit(view), jax.random.fold_in
    k_start, k_epochs = head_lib.probe_keys(3, 1, 0)
    order_of = eval_toy.device_orders(50, 16, 50, k_epochs)
    weight, x, y = np.asarray(state.params["w"], np.float64), [], []
    for epoch in range(7):
        order = order_of(epoch)
        if streams:
            rng = np.random.default_rng([3, 1, epoch])
            order = stream.epoch_order(rng, np.arange(50), 16).reshape(-1)
        _, k_read = jax.random.split(key_of(k_epochs, epoch))
        for step in range(3):
            at = order[16 * step : 16 * (step + 1)]
            key = (
                key_of(k_epochs, 3 * epoch + step) if streams else key_of(k_read, step)
            )
            images = data.train.images[at]
            pixels = view(key, images[:, None] if streams else images)
            x.append(np.asarray(pixels, np.float64).reshape(16, -1) @ weight)
            y.append(data.train.label[at])
    head = linear_head.start_head(k_start, DIM, CLASSES)
    x, y = np.concatenate(x), np.concatenate(y)
    _, _, loss = eval_toy.probe_twin(
        x, y, head, lambda epoch: 48 * epoch + np.arange(48), 16
    )
    np.testing.assert_allclose(result.scalars["train_loss"], loss, rtol=1e-4)


ENTRY = {"name": "linear", "train_on": "visible", "epochs": 1, "augment": False}


@pytest.mark.parametrize("name", ["er", "two_view"])
def test_a_run_asks_its_method(name, tmp_path, monkeypatch):
    """Also the runs on single tasks, of the method as it is or of another."""
    module, asked, visible = {"er": er, "two_view": two_view}[name], [], []

    real = module.make

    @functools.wraps(real)
    def make(parts, **options):
        def replayed(state):
            asked.append(options.get("strategy", {}).get("name"))
            return jnp.stack([state.task - 1, 0 * state.task - 1])

        return real(parts, **options)._replace(replayed=replayed)

    def resident_fit(*_, **__):
        def run(state, data, rows, task, probe, lr):
            visible.append(set(rows.tolist()))
            return linear_head.LinearHead(
                jnp.zeros((data.shape[1], 10)), jnp.zeros(10)
            ), 0.0

        return run

    monkeypatch.setattr(module, "make", make)
    monkeypatch.setattr(head_lib, "make_resident_fit", resident_fit)
    changes = toy.ONLINE | {"method": {"name": "er"}} if name == "er" else {}
    if name == "two_view":
        changes["method.strategy"] = "pnr"
    changes |= {"plasticity": True, "evaluators": {"mine": ENTRY}}
    made = toy.job(tmp_path, **changes)
    state = job.initial_state(made)
    tasks = [set(task.train.rows.tolist()) for task in made.stream.tasks]
    made.evaluation.evaluators["mine"](state, 0)
    made.evaluation.evaluators["mine"](state.replace(task=state.task + 1), 1)
    alone = made.evaluation.single_tasks(made)
    alone.evaluation.evaluators["mine"](job.initial_state(alone), 0)
    assert visible == [tasks[0], tasks[1] | {0}, tasks[0]] and 0 not in tasks[1]
    want = {"er": {None}, "two_view": {"pnr", "finetune"}}[name]
    assert set(asked) == want
