"""SS-IL: its steps against the equation, its teacher, and who competes with whom."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import loss_twins as f64
from helpers import online_toy as toy
from jaxcl.methods import online, ss_il
from jaxcl.methods.online import distillation

FIRST, SECOND, THIRD = toy.FIRST, toy.SECOND, toy.batch(2, [4, 4, 4, 2, 3, 4])
TASKS = [[0, 1], [2, 3]]  # their classes
NET = online.build_network(toy.parts(), "linear")


def taught(state, images):
    teacher = state.extra.teacher
    return toy.answers(NET, teacher.params, teacher.stats, images)


@pytest.mark.parametrize(
    ("form", "distill", "temperature"),
    [("paper", True, 2.0), ("code", True, 0.5), ("paper", False, 2.0)],
)
def test_each_side_competes_by_itself_and_old_tasks_are_held(
    form, distill, temperature
):
    """In the third task, which brings classes of the second one again."""
    made = toy.parts(size=12)
    method = ss_il.make(made, form=form, distill=distill, temperature=temperature)
    state = toy.shaken(toy.begin(method, toy.second_task(method), 2), seed=8)
    past = jax.tree.map(lambda *x: jnp.concatenate(x), FIRST, SECOND)
    held = [past, THIRD][: 2 if form == "paper" else 1] if distill else []
    told = [taught(state, rows["image"]) for rows in held]
    weight = temperature**2 if form == "paper" else 1

    def twin(new, old):
        sides = [[4] if label == 4 else [0, 1, 2, 3] for label in THIRD["label"]]
        value = toy.cross_entropy(new, THIRD["label"], sides)
        value += toy.cross_entropy(old, past["label"], [0, 1, 2, 3])
        for z, said in zip((old, new), told, strict=False):
            value += weight * f64.task_distillation(z, said, TASKS, t=temperature)
        return value

    images = THIRD["image"], past["image"]
    new, _ = toy.check_step(method, NET, state, THIRD, images, twin)
    np.testing.assert_array_equal(new.extra.task_of, [0, 0, 1, 1, 2])


def test_the_first_task_is_a_softmax_over_what_came():
    method = ss_il.make(toy.parts())
    state, _ = toy.step(method, toy.begin(method, toy.fresh(method), 0), FIRST)

    def twin(new):
        return toy.cross_entropy(new, SECOND["label"], [0, 1, 2, 3])

    toy.check_step(method, NET, state, SECOND, [SECOND["image"]], twin)


def test_rows_of_the_present_task_are_not_replayed():
    method = ss_il.make(toy.parts(), distill=False)
    state = toy.second_task(method)

    def twin(new, old):
        value = toy.cross_entropy(new, SECOND["label"], [2, 3])
        return value + toy.cross_entropy(old, FIRST["label"], [0, 1])

    images = SECOND["image"], FIRST["image"]
    toy.check_step(method, NET, state, SECOND, images, twin)


def test_classes_by_the_task_in_which_they_came_first():
    task_of = jnp.array([0, 0, 1, -1, -1])
    found = distillation.record_tasks(task_of, jnp.array([3, 0, 3, 2]), jnp.int32(2))
    np.testing.assert_array_equal(found, [0, 0, 1, 2, -1])
    rivals = ss_il.rivals(found, jnp.array([3, 0, 2]), jnp.int32(2))
    old = [True, True, True, False, False]
    new = [False, False, False, True, False]
    np.testing.assert_array_equal(rivals, [new, old, old])
