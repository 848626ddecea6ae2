"""What a run says it cost: FLOPs against counts by hand, seconds by a fake clock."""

import itertools
import json
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from helpers import toy
from jaxcl import core, sharding
from jaxcl.run import checkpoint, cost, job, result_file, train


@struct.dataclass
class State:
    task: jax.Array
    params: dict


def shapes(tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree
    )


SIMPLE = {"method.base": "simclr"}


def test_images_are_of_all_batches_of_a_step():
    """Three meta-steps of six batches of eight."""
    work = types.SimpleNamespace(
        data=types.SimpleNamespace(batch_size=8),
        batches_per_step=lambda task: 6,
        mesh=None,
        method=mock.Mock(),
    )
    state = types.SimpleNamespace(step=jnp.int32(13), task_start=jnp.int32(10))
    clock = types.SimpleNamespace(read=dict)
    with mock.patch.multiple(
        cost,
        job=mock.DEFAULT,
        count_flops=mock.DEFAULT,
        sharding=mock.DEFAULT,
    ) as found:
        found["job"].shapes.return_value = ()
        spent = cost.sum_task_cost(work, state, 1, clock)
    assert (spent.steps, spent.images) == (3, 144)


# FLOPs


def products(size, kernel, stride, pad):
    """Pairs of a pixel and a weight that meet in one channel, by walking."""
    place = range(-pad, size + pad - kernel + 1, stride)
    line = sum(0 <= p + k < size for p in place for k in range(kernel))
    return line * line


@pytest.mark.parametrize("stride, pad", [(1, 0), (2, 1)])
def test_a_convolution_net_costs_two_flops_per_product(stride, pad):
    """Forward, gradient of the weights and, but for the first layer, of the input."""
    size, batch, kernel, widths, classes = 12, 4, 3, (3, 16, 32), 10
    params = {
        "one": jnp.zeros((kernel, kernel, *widths[:2])),
        "two": jnp.zeros((kernel, kernel, *widths[1:])),
        "head": jnp.zeros((widths[2], classes)),
    }

    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            [(pad, pad)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def loss(params, x):
        x = conv(conv(x, params["one"]), params["two"])
        return jnp.sum((x.mean((1, 2)) @ params["head"]) ** 2)

    def step(state, x):
        slopes = jax.grad(loss)(state.params, x)
        return state.replace(params=slopes), {}

    inner = (size + 2 * pad - kernel) // stride + 1
    one = batch * products(size, kernel, stride, pad) * widths[0] * widths[1]
    two = batch * products(inner, kernel, stride, pad) * widths[1] * widths[2]
    want = 2 * (2 * one + 3 * two + 3 * batch * widths[2] * classes)
    x = jnp.zeros((batch, size, size, widths[0]))
    found = cost.count_flops(step, *shapes((State(jnp.int32(0), params), x)), 0)
    assert want <= found < 1.02 * want  # the rest: the mean, the square


def square(x):
    return x @ x


def dear(x):
    return square(square(square(x)))


SIZE = 64
PRODUCT = 2 * SIZE**3


@pytest.mark.parametrize("jitted", [False, True])
def test_a_branch_that_a_task_does_not_take_costs_nothing(jitted):
    """Three products in later tasks, two of them in a conditional in another."""

    def body(state, x):
        more = jax.lax.cond(
            state.task == 0,
            lambda: x,
            lambda: jax.lax.cond(
                state.task < 9, lambda: square(square(x)), lambda: dear(x)
            ),
        )
        return state, {"x": square(x) + more}

    step = jax.jit(body) if jitted else body
    given = shapes((State(jnp.int32(0), {}), jnp.zeros((SIZE, SIZE))))
    found = [cost.count_flops(step, *given, task) for task in (0, 1, 5)]
    np.testing.assert_allclose(found, [PRODUCT, 3 * PRODUCT, 3 * PRODUCT], rtol=0.02)


@pytest.mark.parametrize("jitted", [False, True])
def test_every_turn_of_a_loop_counts(jitted):
    """7 turns of one product and of a loop of 3; then a branch with a loop of 5."""

    def loop(length, body, x):
        return jax.lax.scan(lambda x, _: (body(x), None), x, length=length)[0]

    def body(state, x):
        x = loop(7, lambda x: loop(3, square, square(x)), x)
        x = jax.lax.cond(x[0, 0] > 0, lambda x: loop(5, square, x), square, x)
        return state, jax.lax.map(square, jnp.stack([x] * 2))

    step = jax.jit(body) if jitted else body
    given = shapes((State(jnp.int32(0), {}), jnp.zeros((SIZE, SIZE))))
    want = 7 * (1 + 3) + 5 + 2
    assert cost.count_flops(step, *given, 0) == pytest.approx(want * PRODUCT, rel=0.03)


@pytest.mark.parametrize("devices", [1, 8])
def test_the_work_of_all_devices_counts_on_one_cpu(devices, monkeypatch):
    """JAX counts for CPUs alone: the program may name no other device."""
    mesh, lowered = sharding.mesh(devices), []
    count = jax.stages.Lowered.cost_analysis
    monkeypatch.setattr(
        jax.stages.Lowered,
        "cost_analysis",
        lambda self: lowered.append(self) or count(self),
    )

    def step(state, x):
        with sharding.use_mesh(mesh):
            x = sharding.shard_rows_in_jit(x)
            x, _ = jax.lax.scan(lambda x, _: (square(x), None), x, length=7)
            return state, sharding.map_per_device(
                lambda x, w: x @ w, (x,), (sharding.gather(x),)
            )

    given = shapes((State(jnp.int32(0), {}), jnp.zeros((SIZE, SIZE))))
    assert cost.count_flops(step, *given, 0) == pytest.approx(8 * PRODUCT, rel=0.03)
    (program,) = lowered
    (device,) = program.compile().input_shardings[0][1].device_set
    assert device == jax.local_devices(backend="cpu")[0]


def test_the_first_task_costs_less_where_a_teacher_follows(tmp_path):
    pnr, alone = (
        toy.job(tmp_path / name, **{"method.strategy": name, **SIMPLE})
        for name in ("pnr", "finetune")
    )
    given = job.shapes(pnr.method, pnr.data)
    compiled = jax.jit(pnr.method.step).lower(*given).compile().cost_analysis()
    later, compiled = cost.count_flops(pnr.method.step, *given, 1), compiled["flops"]
    # XLA's compiler adds a little, and takes the dearest branch of conditionals.
    assert 0.85 * compiled < later <= 1.02 * compiled
    first = cost.count_flops(pnr.method.step, *given, 0)
    without = cost.count_flops(
        alone.method.step, *job.shapes(alone.method, alone.data), 0
    )
    # g runs in the first task too, unused; the teacher does not.
    assert without <= first < 1.05 * without and first < 0.75 * later


def test_what_cannot_be_counted_is_null(tmp_path, monkeypatch, caplog):
    def refuse():
        raise RuntimeError("no cpu here")

    monkeypatch.setattr(sharding, "on_host", refuse)
    work = toy.job(tmp_path)
    found = cost.sum_task_cost(work, job.initial_state(work), 0, cost.Clock({}))
    assert found.flops_per_step is None and found.steps == 0
    assert "no cpu here" in caplog.text
    made = cost.add_task(cost.empty_cost(1), 0, found)
    assert made["total"]["flops"] is made["per_task"][0]["flops"] is None


# Seconds


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so."""
    clock = types.SimpleNamespace(now=0.0)
    monotonic = types.SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(cost, "time", monotonic)
    return clock


def test_what_runs_inside_goes_to_its_own_name(clock):
    watch = cost.Clock({"train": 5.0, "old": 1.0})
    clock.now += 1
    with watch.count("train"):
        clock.now += 10
        with pytest.raises(OSError), watch.count("evaluation"):
            clock.now += 100
            raise OSError
        clock.now += 1000
        assert watch.read() == {"train": 1015, "old": 1, "rest": 1, "evaluation": 100}
    clock.now += 10000
    assert watch.read()["rest"] == 10001
    clock.now += 1
    watch.restart()
    clock.now += 3
    with watch.count("train"):
        clock.now += 4
    assert watch.read() == {"rest": 3, "train": 4}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return job.compile_step(toy.job(tmp_path_factory.mktemp("step"), **SIMPLE))


def timed(workdir, compiled, clock, **changes):
    """A job and its step, as a new process has them; each part takes its own time."""
    calls = itertools.count()

    def step(*arguments):
        clock.now += 1 if next(calls) else 30
        return compiled(*arguments)

    def evaluate(state, task):
        clock.now += 1000
        return core.Result({"x": np.zeros(8)}, {})

    def draw(state, task):
        clock.now += 1e9
        return core.Result({}, {})

    work = toy.job(workdir, tasks=2, **SIMPLE, **changes)
    return toy.change(work, evaluators={"e": evaluate}, pictures={"p": draw}), step


@pytest.fixture
def slow_save(clock, monkeypatch):
    save = checkpoint.Checkpoints.save

    def slow(*arguments):
        clock.now += 1e6
        save(*arguments)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", slow)


def test_a_run_tells_apart_what_time_went_to(
    tmp_path, compiled, clock, slow_save, monkeypatch
):
    """12 steps a task; two saves and two evaluations within one, and at its end."""
    changes = {"save_every": 5, "eval_every": 4, "evaluate_untrained": True}
    wait, fetch = 2.0**-10, sharding.copy_to_host

    def fetched(metrics):
        clock.now += wait
        return fetch(metrics)

    monkeypatch.setattr(sharding, "copy_to_host", fetched)
    work, step = timed(tmp_path, compiled, clock, **changes)
    results = train.run_tasks(work, tmp_path, step=step)
    first, second, third = results["cost"]["per_task"][:3]
    names = ("compile_seconds", "train_seconds", "evaluation_seconds")
    assert [first[name] for name in names] == [30, 11 + 12 * wait, 4000]
    assert [second[name] for name in names] == [0, 12 + 12 * wait, 3000]
    assert third is None
    # The last save of a task is after its results, so in the next one.
    assert results["seconds"][:2] == [3e6 + 4041 + 12 * wait, 4e6 + 3012 + 12 * wait]
    total = results["cost"]["total"]
    assert [total[name] for name in names] == [30, 23 + 24 * wait, 7000]
    assert compiled._cache_size() == 1


def test_a_resumed_run_adds_up(tmp_path, compiled, clock):
    """Stopped in the first task, and between training and evaluation of the second."""

    def process(where, calls):
        """What a process ends with; it is told to stop after some calls, or never."""
        work, step = timed(where, compiled, clock)
        asked = itertools.count(1)
        try:
            return train.run_tasks(
                work, where, step=step, stop=lambda: next(asked) == calls
            )
        except train.Interrupted:
            clock.now += 1e12  # nobody works

    ends = [process(tmp_path / "whole", None)]
    # It is asked at the start and after each of 12 steps a task; then before the
    # evaluation of the task, before each of its evaluators (here one), and after it.
    for calls in (1 + 4, 1 + 8 + 3 + 12 + 1, None):
        ends.append(process(tmp_path / "parts", calls))
    assert ends[1:3] == [None, None]
    ends = [ends[0], ends[3]]
    for name, end in zip(("whole", "parts"), ends, strict=True):
        assert result_file.read_results(tmp_path / name)["cost"] == end["cost"]
    whole, parts = (end["cost"]["per_task"][:2] for end in ends)
    for one, other in zip(whole, parts, strict=True):
        for key in ("steps", "images", "flops", "evaluation_seconds"):
            assert one[key] == other[key] > 0
        assert one["steps"] == 12 and one["images"] == 12 * 48
        assert one["flops"] == 12 * ends[0]["cost"]["flops_per_step"]["first_task"]
    # Each process's first call of the step is apart; the last process calls none.
    for found, first in ((whole, (30, 11)), (parts, (60, 10))):
        seconds = [(x["compile_seconds"], x["train_seconds"]) for x in found]
        assert seconds == [first, (0, 12)]
    assert ends[1]["seconds"][:2] == [1070, 1012]


# Results


def spent(**changes):
    machine = {"device": "abacus", "num_devices": 2, "peak_bytes": None}
    machine |= {k: changes.pop(k) for k in list(changes) if k in machine}
    base = {"steps": 3, "images": 30, "flops_per_step": 7, "machine": machine}
    return cost.TaskCost(**{**base, "seconds": {"train": 1.5, "rest": 9.0}, **changes})


def test_costs_of_tasks_add_up():
    before = cost.empty_cost(3)
    one = cost.add_task(before, 0, spent(peak_bytes=90))
    two = cost.add_task(
        one, 1, spent(steps=4, flops_per_step=8, peak_bytes=80, images=40)
    )
    three = cost.add_task(two, 2, spent(steps=5, flops_per_step=8, device="slide rule"))
    assert before == cost.empty_cost(3) and one["per_task"][1:] == [None, None]
    assert [entry["flops"] for entry in three["per_task"]] == [21, 32, 40]
    assert three["total"] == {
        "steps": 12,
        "images": 100,
        "flops": 93,
        "train_seconds": 4.5,
        "compile_seconds": 0.0,
        "evaluation_seconds": 0.0,
        "peak_bytes": 90,
    }
    assert three["flops_per_step"] == {"first_task": 7, "later_tasks": 8}
    assert one["flops_per_step"] == {"first_task": 7, "later_tasks": None}
    assert (two["device"], three["device"]) == ("abacus", "slide rule")
    assert three["jax"] == jax.__version__ and three["num_devices"] == 2
    again = cost.add_task(two, 1, spent(flops_per_step=None))
    assert again["total"]["flops"] is None and again["total"]["steps"] == 6
    assert json.loads(json.dumps(three)) == three
