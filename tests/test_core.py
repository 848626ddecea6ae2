"""The state: what a step reads of it, how a step moves it, where a task begins."""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcl import core, optim, sharding
from jaxcl.data import stream
from jaxcl.run import encoder_folder, job


def tree(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"encoder": {"w": (3, 2), "b": (2,)}, "head": (2, 4), "prototypes": (5, 2)}
    return jax.tree.map(
        lambda shape: jnp.float32(rng.normal(size=shape)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def state_of(tx=None, **numbers):
    tx = optim.sgd(momentum=0.0) if tx is None else tx
    state = core.new_state(jax.random.key(7), tree(), {"mean": jnp.ones(2)}, tx, ())
    return state.replace(**{name: jnp.int32(n) for name, n in numbers.items()})


def parts_of(tx, *rates):
    return types.SimpleNamespace(tx=tx, lr=optim.by_task(rates))


@pytest.mark.parametrize("steps", [1, 7, 3000])
@pytest.mark.parametrize("start", [0, 12, 123_456])
def test_progress_is_the_share_of_the_task_that_is_done(start, steps):
    at = jax.jit(core.progress)
    for done in {0, steps // 2, steps - 1}:
        state = state_of(step=start + done, task_start=start, task_steps=steps)
        np.testing.assert_allclose(at(state), done / steps, rtol=1e-6)
        assert 0 <= at(state) < 1
    half = state_of(step=start + 4, task_start=start, task_steps=8)
    assert at(half) == 0.5


def words(state):
    return tuple(np.asarray(jax.random.key_data(core.step_key(state))).tolist())


def test_every_step_of_every_task_has_a_key_of_its_own():
    """Steps of a task follow on those of the task before."""
    met = set()
    for task in range(3):
        for within in range(4):
            step = 4 * task + within
            state = state_of(step=step, task=task, task_start=4 * task, task_steps=4)
            met.add(words(state))
            # Of the step alone: a task that is cut elsewhere draws the same.
            assert words(state) == words(state_of(step=step))
            assert words(state) == words(state.replace(params=tree(1)))
    assert len(met) == 12
    other = state_of(step=3).replace(key=jax.random.key(8))
    assert words(other) not in met


def test_each_task_has_its_rates_and_later_ones_the_last():
    """Each schedule sees the progress of its own task."""
    rates = [
        optim.constant(0.5),
        optim.cosine(0.4, epochs=2, per_epoch=False),
        optim.step_decay(0.1, epochs=4, milestones=(2,)),
    ]
    rate = jax.jit(lambda state: core.rate(parts_of(None, *rates), state))
    rates_at = {}
    for task in range(5):
        for done in (0, 3, 6, 9):
            state = state_of(
                step=100 + done, task=task, task_start=100, task_steps=12
            )  # 0, 1/4, 1/2 and 3/4 of a task
            rates_at[task, done] = float(rate(state))
    cosine = [0.2 * (1 + np.cos(np.pi * done / 12)) for done in (0, 3, 6, 9)]
    expected = [[0.5] * 4, cosine] + [[0.1, 0.1, 0.01, 0.01]] * 3
    for task, row in enumerate(expected):
        got = [rates_at[task, done] for done in (0, 3, 6, 9)]
        np.testing.assert_allclose(got, row, rtol=1e-6)
    assert rate._cache_size() == 1


def test_shares_scale_the_entries_that_they_name():
    """Of plain SGD, whose direction is the gradient, and of momentum's first step."""
    tx, grads = optim.sgd(weight_decay=0.1), tree(1)
    state = state_of(tx, step=3)
    shares = {"head": 0.25, "prototypes": 0.0}
    after = core.apply_gradients(state, grads, tx, jnp.float32(0.5), shares)
    for name, share in {"encoder": 1.0, **shares}.items():
        expected = jax.tree.map(
            lambda p, g, share=share: p - 0.5 * share * (g + 0.1 * p),
            state.params[name],
            grads[name],
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            after.params[name],
            expected,
        )
    assert after.step == 4 and after.task == 0
    # The optimiser's own state has no share in it.
    plain = core.apply_gradients(state, grads, tx, jnp.float32(0.5))
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, plain.opt_state)
    jax.tree.map(np.testing.assert_array_equal, after.stats, state.stats)


def test_a_step_down_a_loss_is_that_of_its_gradient():
    tx = optim.sgd(momentum=0.0)
    parts = parts_of(tx, optim.constant(0.2), optim.constant(0.1))
    state = state_of(tx, step=5, task=1, task_start=4, task_steps=8)

    def loss(params):
        squares = sum(jnp.sum(x * x) for x in jax.tree.leaves(params))
        return squares / 2, {"seen": 2 * params["head"]}

    after, aux, metrics = jax.jit(
        lambda state: core.descend(parts, state, loss, {"head": 0.5})
    )(state)
    leaves = [np.float64(x) for x in jax.tree.leaves(state.params)]
    squares = sum(np.sum(x * x) for x in leaves)
    np.testing.assert_allclose(metrics["loss"], squares / 2, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(squares), rtol=1e-6)
    np.testing.assert_allclose(metrics["lr"], 0.1, rtol=1e-6)
    for name, left in (("encoder", 0.9), ("prototypes", 0.9), ("head", 0.95)):
        jax.tree.map(
            lambda a, b, left=left: np.testing.assert_allclose(a, left * b, rtol=1e-6),
            after.params[name],
            state.params[name],
        )
    # What the loss gives beside its value is of the parameters before the step.
    np.testing.assert_array_equal(aux["seen"], 2 * state.params["head"])
    assert after.step == 6


def pointers(tree):
    arrays = [jax.random.key_data(x) if x is tree.key else x for x in leaves(tree)]
    return [x.unsafe_buffer_pointer() for x in arrays]


def leaves(tree):
    return jax.tree.leaves(tree)


def test_a_new_state_holds_no_array_twice():
    """A step donates it; a buffer that is there twice would be refused."""
    tx = optim.sgd()
    state = core.new_state(jax.random.key(0), tree(), {"mean": jnp.ones(2)}, tx, ())
    buffers = pointers(state)
    assert len(set(buffers)) == len(buffers)
    counts = state.step, state.task, state.task_start, state.task_steps
    assert [int(n) for n in counts] == [0, 0, 0, 1]
    assert all(n.dtype == jnp.int32 and n.shape == () for n in counts)
    moved = jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)(state)
    assert moved.step == 1


def test_a_copy_has_buffers_of_its_own():
    held = {"a": jnp.arange(3.0), "key": jax.random.key(3), "b": (jnp.ones(()), None)}
    copied = core.copy(held)
    assert jax.tree.structure(copied) == jax.tree.structure(held)
    np.testing.assert_array_equal(copied["a"], held["a"])
    assert copied["a"].unsafe_buffer_pointer() != held["a"].unsafe_buffer_pointer()
    # Both can be held away.
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(held["a"]))
    assert held["a"].is_deleted() and copied["a"].tolist() == [0.0, 1.0, 2.0]
    assert (
        jax.random.key_data(copied["key"]) == jax.random.key_data(held["key"])
    ).all()


def test_a_task_begins_where_the_run_stands():
    """Its steps are those of all its epochs, of what the method reads."""
    images = np.zeros((20, 2, 2, 1), np.uint8)
    nothing = np.zeros(20, np.int32)
    examples = stream.Examples(nothing, nothing, images)
    train = stream.Source(examples, np.arange(8, dtype=np.int32))
    task = stream.Task(2, "third", np.array([0]), -1, train, np.zeros(0, np.int32))
    told = []

    def begin_task(state, task):
        told.append((int(state.task), int(state.task_start), int(state.task_steps)))
        return state.replace(stats={"mean": state.stats["mean"] + task.index})

    method = core.Method(
        init=None,
        step=None,
        embed=None,
        begin_task=begin_task,
        source=lambda state, task: task.train._replace(rows=np.arange(20)),
    )
    work = types.SimpleNamespace(
        method=method,
        data=types.SimpleNamespace(seed=0, epochs=(9, 9, 3), batch_size=4),
        mesh=sharding.mesh(1),
        batches_per_step=lambda index: 1,
    )
    state = job.begin_task(work, state_of(step=31, task=1, task_start=11), task)
    assert told == [(2, 31, 15)]  # 3 epochs of 20 rows in batches of 4
    assert (state.step, state.task, state.task_start) == (31, 2, 31)
    assert state.task_steps == 15 and core.progress(state) == 0
    np.testing.assert_array_equal(state.stats["mean"], [3.0, 3.0])


def test_the_leaves_that_do_not_fit_are_named():
    ours = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int32)}
    assert encoder_folder.shape_mismatches(dict(ours), ours) == []
    wide = ours | {"b": np.zeros(5, np.int32)}
    wider = ("b", "int32[5]", "int32[4]")
    assert encoder_folder.shape_mismatches(wide, ours) == [wider]
    half = wide | {"a": np.zeros((2, 3), np.float16)}
    narrow = ("a", "float16[2, 3]", "float32[2, 3]")
    assert encoder_folder.shape_mismatches(half, ours) == [narrow, wider]
    assert encoder_folder.shape_mismatches({"b": ours["b"]}, ours) == [
        ("a", "absent", "float32[2, 3]")
    ]
    more = ours | {"c": np.zeros((), np.uint8)}
    assert encoder_folder.shape_mismatches(more, ours) == [("c", "uint8[]", "absent")]


def test_a_state_is_settled_by_one_program(monkeypatch):
    """After every task the same state is settled twice."""
    traced, mesh = [], sharding.mesh(2)
    monkeypatch.setattr(sharding, "_identity", lambda tree: traced.append(tree) or tree)
    tree = sharding.replicate({"a": np.zeros(3), "b": np.ones((2, 2))}, mesh)
    for _ in range(3):
        tree = sharding.commit_placement(tree, mesh)
    assert len(traced) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_an_unrolled_scan_has_no_loop(count):
    rows = {"x": jnp.arange(1.0, count + 1), "y": jnp.ones((count, 2))}

    def body(carry, row):
        carry = carry * row["x"] + row["y"].sum()
        return carry, (carry, row["y"])

    def run(convolves):
        scan = functools.partial(sharding.loop, body, rows=rows, convolves=convolves)
        return jax.jit(scan).lower(jnp.float32(2.0))

    found, expected = run(True), run(False)
    assert "stablehlo.while" not in found.as_text()
    assert "stablehlo.while" in expected.as_text()  # the search finds a loop
    chex.assert_trees_all_close(
        found.compile()(jnp.float32(2.0)), expected.compile()(jnp.float32(2.0))
    )
