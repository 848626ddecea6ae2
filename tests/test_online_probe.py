"""Drift and gradients of past tasks: brute-force twins; training stays as it was."""

import functools
import itertools
import pathlib
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import toy, twins
from jaxcl import core, optim
from jaxcl.data.sources import toys
from jaxcl.memory import buffer
from jaxcl.methods import er, er_ace, online
from jaxcl.methods.online import probe
from jaxcl.methods.online import replay as replay_lib
from jaxcl.nets import mlp
from jaxcl.run import job

BOTH = ("drift", "gradients")
# Its second pass holds old rows as negatives; a linear head minds lengths.
ER_AML = {"name": "er_aml", "negatives": "all", "head": "linear"}


def make(method, measure=BOTH):
    replay = {"capacity": 40, "measure": measure}
    changes = {"method": method, "batch_size": 24, "epochs": 1, "replay": replay}
    workdir = pathlib.Path(tempfile.mkdtemp())
    return toy.job(workdir, tasks=2, **toy.ONLINE | changes)


class Seen(NamedTuple):
    """One step of a run."""

    task: int
    before: core.TrainState
    batch: dict
    after: core.TrainState
    metrics: dict


@functools.cache
def played(measure=BOTH):
    """Every step of two tasks."""
    work = make(ER_AML, measure)
    step, resident = job.compile_step(work), job.resident(work)
    state, found = job.initial_state(work), []
    for task in work.stream.tasks:
        state = job.begin_task(work, state, task)
        for _, batches, number in job.feed_batches(work, task.train, task.index, 0):
            before = core.copy(state)
            state, metrics = step(state, resident, batches, number)
            rows = jax.tree.map(lambda x: np.asarray(x)[0], batches)
            train, at = work.stream.dataset.train, rows["index"]
            batch = {"image": train.images[at], "label": train.label[at]}
            metrics = {key: np.asarray(x)[0] for key, x in metrics.items()}
            found.append(Seen(task.index, before, batch, core.copy(state), metrics))
    return work, found


def test_training_is_the_same_when_measured():
    """Two programs, which XLA may round differently; a leak would be no rounding."""
    (_, off), (_, on) = played(()), played()
    assert len(off) == len(on) > 20
    for without, with_ in zip(off, on, strict=True):
        told = set(with_.metrics) - set(without.metrics)
        assert told == {"drift", *GRADIENTS}
        for name, value in without.metrics.items():
            np.testing.assert_allclose(with_.metrics[name], value, 1e-5, err_msg=name)
    for a, b in zip(toy.leaves(off[-1].after), toy.leaves(on[-1].after), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


GRADIENTS = ("feature_gradient_norm", "prototype_gradient_norm")


def test_nothing_is_past_in_the_first_task():
    for seen in played()[1]:
        values = [float(seen.metrics[key]) for key in ("drift", *GRADIENTS)]
        assert np.isfinite(values).all()
        assert (np.array(values) > 0).tolist() == [seen.task > 0] * 3


def test_drift_is_of_stored_rows_of_past_tasks():
    """All of them: the memory has fewer slots than rows are drawn."""
    work, steps = played()
    embed = jax.jit(work.method.embed)
    first = next(i for i, seen in enumerate(steps) if seen.task == 1)
    for seen in steps[first : first + 4]:
        memory = jax.device_get(seen.after.extra.memory)
        rows = [
            i
            for i in range(40)
            if memory.filled[i] and memory.items["task"][i] < seen.task
        ]
        assert 0 < len(rows) < 40
        images = (memory.items["image"][rows].astype(np.float32) / 255 - 0.3) / 0.4
        one, other = (twins.unit(embed(s, images)) for s in (seen.before, seen.after))
        twin = np.mean([np.linalg.norm(a - b) for a, b in zip(one, other, strict=True)])
        np.testing.assert_allclose(seen.metrics["drift"], twin, rtol=1e-4)


# Of a memory made by hand


class Extra(NamedTuple):
    memory: buffer.Buffer


TASKS = np.array([0, 2, 1, 0, 1, 2, 0, 1, 0, 0, 0], np.int32)
LABELS = np.array([0, 4, 1, 0, 2, 5, 3, 1, 3, 5, 4], np.int32)
FILLED = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0], bool)


def state_of(params, task=2, step=0):
    rng = np.random.default_rng(0)
    images = rng.integers(1, 256, (len(TASKS), 2, 2, 1)).astype(np.uint8)
    items = {"image": images, "label": LABELS, "task": TASKS}
    memory = jax.tree.map(jnp.asarray, buffer.Buffer(items, FILLED, 9))
    whole = core.new_state(jax.random.key(0), params, {}, Tx, Extra(memory))
    return whole.replace(task=jnp.asarray(task), step=jnp.asarray(step))


class Tx:
    @staticmethod
    def init(params):
        return {}


def parts_of(measure=BOTH, **more):
    given = dict(
        encoder=None,
        augment=None,
        tx=None,
        lr=None,
        num_classes=7,
        num_tasks=4,
        eval_transform=lambda images: images / 255.0,
        replay=core.Replay(11, measure=measure),
    )
    return core.Parts(**given | more)


def test_drift_is_of_a_few_rows_drawn_anew_for_each_step():
    """Every draw is a mean over three of the rows of past tasks, and all are drawn."""
    rng = np.random.default_rng(1)
    old, new = (rng.normal(size=(4, 5)) for _ in range(2))

    def embed(state, images):
        return images.reshape(len(images), -1) @ state.params

    method = core.Method(
        init=None,
        embed=embed,
        memory=lambda state: state.extra.memory,
        step=lambda state, _: (state.replace(params=jnp.asarray(new)), {"loss": 0.0}),
    )
    probed = probe.add_measures(method, parts_of(("drift",)), rows=3)
    step = jax.jit(lambda number: probed.step(state_of(old, step=number), None)[1])
    pixels = np.asarray(state_of(old).extra.memory.items["image"], np.float64) / 255
    gap = twins.unit(pixels.reshape(11, 4) @ new) - twins.unit(
        pixels.reshape(11, 4) @ old
    )
    gap = np.linalg.norm(gap, axis=1)
    past = np.flatnonzero(FILLED & (TASKS < 2))
    assert len(past) == 7
    means = {trio: gap[[*trio]].mean() for trio in itertools.combinations(past, 3)}
    met, values = set(), []
    for number in range(60):
        metrics = step(number)
        assert set(metrics) == {"loss", "drift"}
        trio = min(means, key=lambda t: abs(means[t] - metrics["drift"]))
        np.testing.assert_allclose(metrics["drift"], means[trio], rtol=1e-5)
        met |= {*trio}
        values.append(float(metrics["drift"]))
    assert met == {*past} and len({*values}) > 20
    assert abs(np.mean(values) - gap[past].mean()) < 4 * np.std(values) / 60**0.5


MEASURED = probe.Measured(None, "linear", num_classes=7, num_tasks=4)


def slope_on_sphere(twin, vector):
    """Norm of the gradient of twin(|v| u) over unit u, by differences."""
    length = np.linalg.norm(vector)

    def along(direction):
        return twin(length * twins.unit(direction))

    return np.linalg.norm(twins.central_difference(along, [twins.unit(vector)], 0))


def test_gradients_are_along_the_sphere_and_of_past_tasks_alone():
    """Two passes; a loss that also depends on lengths; rows of all kinds."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 5, 3))
    # Task 3 is yet to come, -1 does not count.
    tasks = np.array([[0, 1, 2, -1, 1], [2, 0, 3, 1, -1]], np.int32)
    encoder, head, target = (rng.normal(size=s) for s in ((3, 4), (7, 4), (2, 5, 7)))

    def value(f, weight, norm, tanh):
        logits = (f[0] @ weight.T, f[1] @ weight.T / norm(f[1], axis=1)[:, None])
        parts = [tanh(z - t).sum(axis=1) for z, t in zip(logits, target, strict=True)]
        return parts[0].mean() + 2.0 * (parts[1] ** 2).mean()

    def loss(params):
        f = [
            probe.tap_gradients(params, jnp.asarray(rows) @ params["encoder"], t)
            for rows, t in zip((x, y), jnp.asarray(tasks), strict=True)
        ]
        weight = params["head"]["weight"]
        return value(f, weight, jnp.linalg.norm, jnp.tanh), jnp.float32(7)

    params = {"encoder": jnp.asarray(encoder), "head": {"weight": jnp.asarray(head)}}
    state = state_of(params)
    (found, more), grads, metrics = MEASURED.gradient(state, loss)
    assert more == 7 and set(grads) == set(params)
    plain = jax.value_and_grad(loss, has_aux=True)(params)
    off = online.Network(None, "linear", 7).gradient(state, loss)
    assert found == plain[0][0] == off[0][0] and off[2] == {}
    for other in (grads, off[1]):
        pairs = zip(jax.tree.leaves(other), jax.tree.leaves(plain[1]), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)

    features = np.stack([x @ encoder, y @ encoder])
    whole = functools.partial(value, norm=np.linalg.norm, tanh=np.tanh)

    def moved(at, rows):
        copy = features.copy()
        copy[at] = rows
        return whole(copy, head)

    norms = [
        slope_on_sphere(functools.partial(moved, at), features[at])
        for at in np.ndindex(2, 5)
        if 0 <= tasks[at] < 2
    ]
    assert len(norms) == 5
    np.testing.assert_allclose(
        metrics["feature_gradient_norm"], np.mean(norms), rtol=1e-4
    )

    def turned(c, row):
        copy = head.copy()
        copy[c] = row
        return whole(features, copy)

    # Of classes that a stored row of task 0 or 1 has: not 4 and 5, nor the absent 6.
    norms = [slope_on_sphere(functools.partial(turned, c), head[c]) for c in range(4)]
    np.testing.assert_allclose(
        metrics["prototype_gradient_norm"], np.mean(norms), rtol=1e-4
    )
    first = MEASURED.gradient(state_of(params, task=0), loss)[2]
    assert [float(first[name]) for name in GRADIENTS] == [0.0, 0.0]


def test_a_loss_that_taps_nothing_is_refused():
    """Or its zeros would pass for a measurement."""
    params = {"head": {"weight": jnp.ones((7, 2))}}

    def loss(params):
        f = probe.tap_gradients(params, params["head"]["weight"], None)
        return jnp.sum(f**2), None

    with pytest.raises(ValueError, match=r"config\.replay\.measure.*'gradients'"):
        MEASURED.gradient(state_of(params), loss)


def switched(make, seeds, **options):
    """Measure the second of two tasks of digits, {name: f[seeds, steps]}.

    The classes are 0 and 1, then 2 and 3; 84 batches of ten a task, 80 rows stored.
    """
    train = toys.digits().train
    images, labels = jnp.asarray(train.images), jnp.asarray(train.label)

    def order(seed):
        rng = np.random.default_rng(seed)
        pools = [np.flatnonzero(np.isin(train.label, x)) for x in ((0, 1), (2, 3))]
        rows = [[rng.permutation(x)[:280] for _ in range(3)] for x in pools]
        return np.reshape(rows, (2, -1, 10))

    def plain(images):
        return images.astype(jnp.float32) / 128 - 1

    parts = core.Parts(
        encoder=mlp.perceptron(widths=(64, 32)),
        augment=lambda key, images: plain(images)[:, None],
        eval_transform=plain,
        tx=optim.sgd(momentum=0.0),
        lr=optim.by_task([optim.constant(0.1)]),
        num_classes=10,
        num_tasks=2,
        replay=replay_lib.settings(10, 10, capacity=80, measure=BOTH),
    )
    method = make(parts, **options)

    def batch(rows):
        return {"image": images[rows], "label": labels[rows], "index": rows}

    def run(key, tasks):
        state = method.init(key, batch(tasks[0, 0]))
        for number, rows in enumerate(tasks):
            state = state.replace(task=jnp.int32(number))
            state, metrics = jax.lax.scan(
                lambda state, rows: method.step(state, batch(rows)), state, rows
            )
        return metrics

    orders = jnp.asarray(np.stack([order(seed) for seed in range(seeds)]))
    keys = jax.random.split(jax.random.key(0), seeds)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(run))(keys, orders))


def test_er_ace_moves_old_features_less_than_er_when_new_classes_come():
    """The thesis of its paper, in the first ten steps and with the same head."""
    plain = switched(er.make, 5, head="cosine")
    asymmetric = switched(er_ace.make, 5)
    for name in ("drift", "feature_gradient_norm", "prototype_gradient_norm"):
        first, second = (x[name][:, :10].mean(axis=1) for x in (plain, asymmetric))
        assert (second < first).all() and second.mean() < 0.8 * first.mean()
        # It is the switch that does it: later steps are calmer.
        assert plain[name][:, 10:].mean() < 0.7 * first.mean()
