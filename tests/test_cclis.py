"""CCLIS: its steps against the equations, what its options change, its views."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import loss_twins as f64
from helpers import rehearsal_toy as toy
from jaxcl.methods import cclis, rehearsal

NET = rehearsal.build_network(toy.parts(), prototypes=True, **toy.WIDTHS)
LABEL = toy.EXAMPLES.label
# Of the third task three rows of class 4 and two of class 5; of the memory classes
# 0, 1 and 3, one row twice.
STORED = np.concatenate([toy.rows_of(c)[:2] for c in (0, 1, 3)])
WEIGHTS = np.array([0.1, 0.3, 0.25, 0.5, 0.8, 0.06])
NEW = np.concatenate([toy.rows_of(4)[:3], toy.rows_of(5)[:2]])
ROWS = np.concatenate([NEW[:2], STORED[:4], NEW[2:], STORED[[4, 0]]])
INCOMING = toy.batch(ROWS)
IMAGES = toy.parts().eval_transform(INCOMING["image"])[:, :, ::-1]


def make(**options):
    return cclis.make(toy.parts(), memory_size=8, **toy.WIDTHS, **options)


DEFAULT, IN_FULL = make(), make(prototype_rate=toy.LR)


@functools.cache
def in_task():
    """Options of a step change no state."""
    return toy.in_task(DEFAULT, STORED, WEIGHTS)


def chance(row, current=(4, 5)):
    if row in STORED:
        return WEIGHTS[list(STORED).index(row)]
    return 1 / toy.COUNTS[LABEL[row]]


def nce(z, c, old=(0, 1, 2, 3), scope="old", tau=0.5, rows=ROWS):
    chances = [chance(row) for row in rows]
    return f64.sample_nce(c @ z.T / tau, chances, LABEL[rows], scope=scope, old=old)


def prd(z, c, teacher, past_c, classes=(0, 1, 2, 3), **temperatures):
    return f64.prd(c @ z.T, past_c @ teacher.T, classes, **temperatures)


def memory(state):
    """What the teacher says of the batch: in evaluation mode, prototypes as given."""
    past_c = np.asarray(state.extra.teacher["prototypes"], np.float64)
    assert np.abs(np.sqrt((past_c**2).sum(axis=1)) - 1).max() > 0.1
    return toy.told(NET, state, IMAGES), past_c


def check(method, state, twin, rate=0.01):
    return toy.check_step(method, NET, state, INCOMING, IMAGES, twin, rate)


@pytest.mark.parametrize(
    ("options", "of_nce", "of_prd", "weight"),
    [
        ({}, {}, {}, 0.6),
        (
            dict(
                temperature=0.3,
                weight=1.5,
                distill_temperature=0.4,
                past_temperature=0.25,
                prototype_rate=0.7,
            ),
            {"tau": 0.3},
            {"now": 0.4, "past": 0.25},
            1.5,
        ),
        ({"distill_over": "seen"}, {}, {"classes": range(6)}, 0.6),
        ({"scope": "all_negatives"}, {"scope": "all_negatives"}, {}, 0.6),
        ({"scope": "none"}, {"scope": "none"}, {}, 0.6),
        ({"scope": "all"}, {"scope": "all"}, {}, 0.6),
        # The choice of the memory and the weights are separate.
        ({"keep": "uniform"}, {}, {}, 0.6),
        ({"keep": "uniform", "scope": "none"}, {"scope": "none"}, {}, 0.6),
    ],
    ids=[
        *("default", "numbers", "seen", "negatives", "none", "all"),
        *("uniform", "uniform-none"),
    ],
)
def test_a_later_step_is_the_equation(options, of_nce, of_prd, weight):
    method = make(**options)
    state = in_task()
    teacher = memory(state)

    def twin(z, c):
        return nce(z, c, **of_nce) + weight * prd(z, c, *teacher, **of_prd)

    check(method, state, twin, options.get("prototype_rate", 0.01))


@pytest.mark.parametrize("distill_over", ["old", "seen"])
def test_the_first_task_is_plain(distill_over):
    """No distillation, whatever the teacher holds; all rows weigh 1."""
    method = make(distill_over=distill_over, prototype_rate=toy.LR)
    state = toy.shaken(toy.begin(DEFAULT, toy.fresh(DEFAULT), toy.TASKS[0]))
    rows = toy.rows_of(0, 1)[:8]
    incoming = toy.batch(rows)
    images = toy.parts().eval_transform(incoming["image"])[:, :, ::-1]

    def twin(z, c):
        return nce(z, c, scope="none", rows=rows)

    new = toy.check_step(method, NET, state, incoming, images, twin, toy.LR)
    extra = state.extra._replace(
        teacher=jax.tree.map(lambda x: 3 - x, state.extra.teacher),
        teacher_stats=jax.tree.map(lambda x: 2 + x, state.extra.teacher_stats),
    )
    other, _ = toy.step(method, state.replace(extra=extra), incoming)
    chex.assert_trees_all_equal(other.params, new.params)


def test_a_class_of_both_the_memory_and_the_task_is_not_old():
    state = toy.in_task(DEFAULT, STORED, WEIGHTS, toy.task_of(2, 1, 4, 5))
    teacher, old = memory(state), (0, 2, 3)

    def twin(z, c):  # the teacher knows the class all the same
        return nce(z, c, old=old) + 0.6 * prd(z, c, *teacher, classes=range(4))

    check(IN_FULL, state, twin, toy.LR)


def test_without_distillation_there_is_no_teacher():
    method = make(weight=0.0, prototype_rate=toy.LR)
    state = in_task()
    new = check(method, state, nce, toy.LR)
    toy.check_teacher_is_not_read(method, state, INCOMING, new)
    # Three of a pass, four of both relations, outside of any branch.
    with_one, without = (
        toy.count_products(m, state, INCOMING) for m in (IN_FULL, method)
    )
    assert with_one == without + 7


def test_the_rate_of_prototypes_follows_the_schedule_and_not_the_network():
    state, moves = in_task(), []
    start = state.params["prototypes"]
    start = start / jnp.linalg.norm(start, axis=1, keepdims=True)
    for lr, own in ((0.1, 0.2), (0.4, 0.2), (0.4, 0.1)):
        parts = toy.parts()._replace(
            lr=lambda progress, task, lr=lr: jnp.float32(lr),
            schedule_with_peak=lambda peak: (
                lambda progress, task: jnp.float32(0.5 * peak)
            ),
        )
        method = cclis.make(parts, memory_size=8, prototype_rate=own, **toy.WIDTHS)
        after, _ = toy.step(method, state, INCOMING)
        moves.append(after.params["prototypes"] - start)
    np.testing.assert_allclose(moves[0], moves[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moves[0], 2 * moves[2], rtol=1e-3, atol=1e-6)
    plain, _ = toy.step(IN_FULL, state, INCOMING)
    move = plain.params["prototypes"] - start  # at toy.LR
    np.testing.assert_allclose(moves[0], move * 0.1 / toy.LR, rtol=1e-3, atol=1e-6)
    assert jnp.abs(move).max() > 1e-2


def test_prototypes_are_moved_on_the_sphere_whatever_their_length():
    """A step from prototypes of any length is that from the unit ones."""
    state = in_task()
    long = state.params["prototypes"] * jnp.arange(1.0, 8.0)[:, None]
    found = [
        toy.step(IN_FULL, state.replace(params=state.params | {"prototypes": c}), rows)
        for c, rows in ((long, INCOMING), (state.params["prototypes"], INCOMING))
    ]
    chex.assert_trees_all_close(
        found[0][0].params, found[1][0].params, rtol=1e-5, atol=1e-6
    )
    # The class that never comes has no gradient, and is on the sphere.
    unseen = found[0][0].params["prototypes"][6]
    np.testing.assert_allclose(jnp.linalg.norm(unseen), 1, rtol=1e-6)
    start = state.params["prototypes"]
    cosine = unseen @ start[6] / jnp.linalg.norm(start[6])
    np.testing.assert_allclose(cosine, 1, rtol=1e-6)


# Views that scores are averaged over


class _Pixels:
    """A network whose rows are the pixels; statistics show if it trains."""

    def __call__(self, params, stats, images, *, train):
        return images.reshape(len(images), -1) * params + stats * (not train), None


@pytest.mark.parametrize("count", [3, 4, 10])
def test_every_view_of_every_image_is_drawn_anew(count, monkeypatch):
    """In pieces of 4, the last of which may be filled up."""
    monkeypatch.setattr(cclis, "_CHUNK", 4)
    sizes = []

    def augment(key, images):
        noise = jax.random.uniform(key, (len(images), 1, 1, 1, 1), maxval=0.5)
        return images[:, None] + jnp.concatenate([noise, noise + 100], axis=1)

    def spread(rows):
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(cclis.sharding, "shard_rows_in_jit", spread)
    made = toy.parts()._replace(augment=augment)
    images = np.arange(count, dtype=np.uint8)[:, None, None, None]
    state = toy.fresh(DEFAULT).replace(params=2.0, stats=0.25)
    found = [
        cclis.embed_views(made, _Pixels(), state, jax.random.key(seed), images, 3)
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0].shape == (3, count, 1) and set(sizes) == {min(count, 4)}
    noise = (np.array(found)[..., 0] - 0.25) / 2 - np.arange(count)
    assert (noise >= 0).all() and (noise < 0.5).all()
    assert len(np.unique(noise[[0, 2]].round(5))) == 2 * 3 * count
