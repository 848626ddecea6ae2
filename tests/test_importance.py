"""Elastic weight consolidation against the sum of its quadratics, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import toy, twins
from jaxcl import core
from jaxcl.memory import importance
from jaxcl.methods.two_view.strategies import ewc
from jaxcl.run import train

RNG = np.random.default_rng(0)
SHAPES = {"w": (3, 2), "b": (2,)}


def tree(scale=1.0):
    return {name: scale * RNG.normal(size=shape) for name, shape in SHAPES.items()}


def after_tasks(tasks):
    """The state after tasks of (gradients seen, gradients not to be seen, params)."""
    held = importance.create(tasks[0][2])
    for seen, unseen, params in tasks:
        for grads in unseen:
            held = importance.observe(held, grads, jnp.asarray(False))
        for grads in seen:
            held = importance.observe(held, grads, jnp.asarray(True))
        held = importance.consolidate(held, params)
    return held


@pytest.fixture
def tasks():
    return [([tree(), tree(), tree()], [tree(9.0)], tree()) for _ in range(3)]


def penalty(tasks, params):
    """1/2 sum_k F_k (p - p_k)^2, F_k the squares of the gradients over their mean."""
    total = 0.0
    for seen, _, anchor in tasks:
        squares = {name: sum(g[name] ** 2 for g in seen) for name in SHAPES}
        mean = np.mean(np.concatenate([x.ravel() for x in squares.values()]))
        for name in SHAPES:
            fisher = squares[name] / mean
            total += 0.5 * np.sum(fisher * (params[name] - anchor[name]) ** 2)
    return total


def test_the_gradient_is_that_of_the_sum_of_quadratics(tasks):
    params = tree()
    with jax.enable_x64(True):
        gradient = importance.gradient(after_tasks(tasks), params, weight=0.7)

    def twin(*leaves):
        return 0.7 * penalty(tasks, dict(zip(SHAPES, leaves, strict=True)))

    leaves = [params[name] for name in SHAPES]
    for i, name in enumerate(SHAPES):
        expected = twins.central_difference(twin, leaves, i)
        np.testing.assert_allclose(gradient[name], expected, rtol=1e-7)


@pytest.mark.parametrize("weight", [0.1, 1e4])
def test_a_step_never_jumps_over_the_minimum(tasks, weight):
    """A stiff penalty is met in one step; a soft one is descended as ever."""
    params, lr = tree(), 0.3
    with jax.enable_x64(True):
        held = jax.tree.map(np.asarray, after_tasks(tasks))
        gradient = importance.gradient(held, params, weight=weight, lr=lr)
        plain = importance.gradient(held, params, weight=weight)
    for name in SHAPES:
        minimum = held.anchor[name] / held.precision[name]
        stiff = weight * lr * held.precision[name] > 1
        assert stiff.all() == (weight > 1)
        expected = np.where(stiff, (params[name] - minimum) / lr, plain[name])
        np.testing.assert_allclose(gradient[name], expected, rtol=1e-9)


def test_a_run_consolidates_at_the_end_of_each_task(tmp_path):
    """The loop tells the method once: by then each task has had all of its steps.

    A run that stops between a task's end and its evaluation does not end it again.
    """
    changes = {"method.strategy": "ewc", "method.base": "simclr", "epochs": 1}
    work = toy.job(tmp_path, tasks=2, **changes)
    told, end_task = [], work.method.end_task

    def noted(state, task):
        told.append((int(state.task), int(state.step), task.index))
        return end_task(state, task)

    @jax.jit
    def step(state, resident, batches, count):
        """Each step squares a gradient of 1."""
        held = state.extra.strategy
        held = held._replace(squares=jax.tree.map(lambda x: x + 1, held.squares))
        extra = state.extra._replace(strategy=held)
        ones = jnp.ones(1)
        metrics = {"loss": ones, "lr": ones, "grad_norm": ones}
        return state.replace(step=state.step + count, extra=extra), metrics

    method = work.method._replace(end_task=noted)
    work = work._replace(method=method)
    asked = iter([False] * 7 + [True])  # first, after each step, before the evaluation
    with pytest.raises(train.Interrupted):
        train.run_tasks(work, tmp_path, step=step, stop=lambda: next(asked))
    assert told == [(0, 6, 0)]
    # Steps, and the end of the training and of the evaluation of every task.
    assert toy.saved(work, tmp_path).number == 6 + 1
    train.run_tasks(work, tmp_path, step=step)
    assert told == [(0, 6, 0), (1, 12, 1)]
    saved = toy.saved(work, tmp_path)
    assert saved.number == 12 + 2 * 2
    state, held = saved.state, saved.state.extra.strategy
    for precision, anchor, squares, param in zip(
        *map(jax.tree.leaves, (*held, state.params)), strict=True
    ):
        np.testing.assert_allclose(precision, np.full(param.shape, 2.0))  # of two tasks
        np.testing.assert_allclose(anchor, 2 * param, rtol=1e-6)
        assert not squares.any()


@pytest.mark.parametrize("share, counted", [(0.01, [9]), (0.25, [8, 9])])
def test_the_last_step_of_a_task_counts_however_small_the_share(share, counted):
    """Of ten steps, the first of which is number 4 of the run."""
    change = ewc.make(weight=0.0, fisher_share=share).change_gradients
    weights, found = np.zeros(2), []
    for step in range(10):
        place = dict(step=4 + step, task_start=4, task_steps=10)
        state = core.TrainState(
            key=None, task=0, params=weights, stats={}, opt_state=(), extra=(), **place
        )
        _, after = change(importance.create(weights), state, weights + 3, 0.1)
        found += [step] * bool(np.any(after.squares))
    assert found == counted
