"""ER with LwF: its steps against the equation in float64, its teacher, its options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import flatten_util

from helpers import loss_twins as f64
from helpers import online_toy as toy
from jaxcl.methods import er_lwf, online

FIRST, SECOND, THIRD = toy.FIRST, toy.SECOND, toy.batch(2, [4, 4, 4, 2, 3, 4])
PAST = jax.tree.map(lambda *x: jnp.concatenate(x), FIRST, SECOND)
NET = online.build_network(toy.parts(), "linear")


def trained(at, images):
    """Logits of a pass in training mode, f64[B,C], and the statistics after it."""
    (logits,), stats = toy.programs(NET)[0](at.params, at.stats, [images])
    return np.asarray(logits, np.float64), stats


@pytest.mark.parametrize(
    ("form", "held", "weight", "temperature"),
    [("paper", [0, 1, 2, 3], 0.7, 1.3), ("code", [2, 3, 4], 2.0, 0.8)],
    ids=["paper", "code"],
)
def test_a_step_is_one_mean_over_all_rows(form, held, weight, temperature):
    method = er_lwf.make(
        toy.parts(size=12), form=form, weight=weight, temperature=temperature
    )
    # In the third task, which brings classes of the second one again.
    state = toy.shaken(toy.begin(method, toy.second_task(method), 2), seed=8)
    teacher = state.extra.teacher
    images = jnp.concatenate([THIRD["image"], PAST["image"]])
    labels = np.concatenate([THIRD["label"], PAST["label"]])
    told = toy.answers(NET, teacher.params, teacher.stats, images)
    if form == "code":
        told = trained(teacher, images)[0]

    def twin(logits):
        value = toy.cross_entropy(logits, labels)
        return value + weight * f64.task_distillation(
            logits, told, [held], t=temperature
        )

    new, (logits,) = toy.check_step(method, NET, state, THIRD, [images], twin)
    assert f64.task_distillation(logits, told, [held], t=temperature) > 0.01
    np.testing.assert_array_equal(new.extra.task_of, [0, 0, 1, 1, 2])
    for kept, before in zip(new.extra.teacher, teacher, strict=True):
        jax.tree.map(np.testing.assert_array_equal, kept, before)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_the_first_task_is_replay_among_what_was_met(form):
    """Nothing is held, and classes that did not come yet do not compete."""
    method = er_lwf.make(toy.parts(), form=form, weight=5.0)
    state, _ = toy.step(method, toy.begin(method, toy.fresh(method), 0), FIRST)
    images = jnp.concatenate([SECOND["image"], FIRST["image"]])
    labels = np.concatenate([SECOND["label"], FIRST["label"]])

    def twin(logits):
        return toy.cross_entropy(logits, labels, [0, 1, 2, 3])

    toy.check_step(method, NET, state, SECOND, [images], twin)


def test_rows_that_do_not_exist_are_not_held_either():
    """The batch takes the place of what cannot be replayed, and counts once."""
    method = er_lwf.make(toy.parts(), replay_from="past_tasks")
    state = toy.begin(method, toy.shaken(toy.fresh(method)), 1)
    task_of = jnp.array([0, 0, -1, -1, -1])
    seen = jnp.array([True, True, False, False, False])
    state = state.replace(extra=state.extra._replace(task_of=task_of, seen=seen))
    state = toy.shaken(state, seed=8)
    teacher = state.extra.teacher
    answers = toy.answers(NET, teacher.params, teacher.stats, SECOND["image"])

    def twin(logits):
        value = toy.cross_entropy(logits[:6], SECOND["label"], [0, 1, 2, 3])
        return value + f64.task_distillation(logits[:6], answers, [[0, 1]])

    images = jnp.concatenate([SECOND["image"], SECOND["image"]])
    new, metrics = toy.step(method, state, SECOND)
    logits, stats = trained(state, images)
    np.testing.assert_allclose(metrics["loss"], twin(logits), rtol=1e-5)
    np.testing.assert_allclose(
        *(flatten_util.ravel_pytree(x)[0] for x in (new.stats, stats)), rtol=1e-5
    )
