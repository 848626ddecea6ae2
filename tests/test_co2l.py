"""Co2L: its steps against the equations, what its options change."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import loss_twins as f64
from helpers import rehearsal_toy as toy
from jaxcl.methods import co2l, rehearsal

NET = rehearsal.build_network(toy.parts(2), prototypes=False, **toy.WIDTHS)
LABEL = toy.EXAMPLES.label
# Of the third task's classes three rows and one, of the memory's 0 and 1 two and one.
STORED = np.concatenate([toy.rows_of(0)[:2], toy.rows_of(1)[:1]])
NEW = np.concatenate([toy.rows_of(4)[:3], toy.rows_of(5)[:1]])
ROWS = np.concatenate([NEW[:2], STORED, NEW[2:]])
INCOMING = toy.batch(ROWS)


def views(incoming):
    """Rows 2i and 2i + 1 are those of image i; the second is the mirrored one."""
    plain = toy.parts().eval_transform(incoming["image"])
    rows = [image for one in plain for image in (one, one[:, ::-1])]
    return jnp.stack(rows)


IMAGES = views(INCOMING)


def make(**options):
    return co2l.make(toy.parts(2), memory_size=8, **toy.WIDTHS, **options)


DEFAULT = make()


@functools.cache
def in_task(*classes):
    """Options of a step change no state."""
    task = toy.task_of(2, *classes) if classes else toy.TASKS[2]
    return toy.in_task(DEFAULT, STORED, task=task)


def contrast(z, current=(4, 5), tau=0.5, rows=ROWS):
    """The mean over all rows, of which old ones count 0."""
    label = np.repeat(LABEL[rows], 2)
    return f64.sup_con(z, label, tau, mask=np.isin(label, current))


@pytest.mark.parametrize(
    ("options", "scale", "tau", "weight", "of_ird", "train"),
    [
        ({}, 0.5 / 0.07, 0.5, 1.0, {}, True),
        ({"frozen_bn": "running", "loss_scale": 1.0}, 1.0, 0.5, 1.0, {}, False),
        (
            dict(
                temperature=0.2,
                weight=0.4,
                distill_temperature=0.3,
                past_temperature=0.15,
            ),
            0.2 / 0.07,
            0.2,
            0.4,
            {"now": 0.3, "past": 0.15},
            True,
        ),
    ],
    ids=["default", "running", "numbers"],
)
def test_a_later_step_is_the_equation(options, scale, tau, weight, of_ird, train):
    state = in_task()
    teacher = toy.told(NET, state, IMAGES, train=train)
    other = toy.told(NET, state, IMAGES, train=not train)
    assert np.abs(teacher - other).max() > 0.05

    def twin(z):
        return scale * contrast(z, tau=tau) + weight * f64.ird(z, teacher, **of_ird)

    toy.check_step(make(**options), NET, state, INCOMING, IMAGES, twin)


def test_the_first_task_is_contrast_alone():
    """Whatever the teacher holds; every row is an anchor."""
    state = toy.shaken(toy.begin(DEFAULT, toy.fresh(DEFAULT), toy.TASKS[0]))
    rows = toy.rows_of(0, 1)[:6]
    incoming = toy.batch(rows)

    def twin(z):
        return 0.5 / 0.07 * contrast(z, current=(0, 1), rows=rows)

    new = toy.check_step(DEFAULT, NET, state, incoming, views(incoming), twin)
    toy.check_teacher_is_not_read(DEFAULT, state, incoming, new)


def test_without_distillation_there_is_no_teacher():
    method, state = make(weight=0.0), in_task()

    def twin(z):
        return 0.5 / 0.07 * contrast(z)

    new = toy.check_step(method, NET, state, INCOMING, IMAGES, twin)
    toy.check_teacher_is_not_read(method, state, INCOMING, new)
    with_one, without = (
        toy.count_products(m, state, INCOMING) for m in (DEFAULT, method)
    )
    assert with_one == without + 7  # three of a pass, four of both relations


def test_rows_of_the_memory_are_anchors_where_their_class_is_current():
    state = in_task(1, 4, 5)
    teacher = toy.told(NET, state, IMAGES, train=True)

    def twin(z):
        return 0.5 / 0.07 * contrast(z, current=(1, 4, 5)) + f64.ird(z, teacher)

    toy.check_step(DEFAULT, NET, state, INCOMING, IMAGES, twin)


def test_a_batch_without_current_classes_distils_alone():
    state, incoming = in_task(), toy.batch(STORED)
    images = views(incoming)
    teacher = toy.told(NET, state, images, train=True)

    def twin(z):
        return f64.ird(z, teacher)

    toy.check_step(DEFAULT, NET, state, incoming, images, twin)


def test_a_factor_of_nothing_is_no_default():
    options = {"loss_scale": 0.0, "temperature": 0.5}
    assert co2l._fill_options(options, None) == {"loss_scale": 0.0}
