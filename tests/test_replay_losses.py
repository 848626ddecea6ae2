"""Losses of replay methods against float64 twins that loop over rows and classes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted, twins
from helpers import loss_twins as f64
from jaxcl.losses import replay

partial = functools.partial


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def logsumexp(values):
    values = list(values)
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))


def cosine_twin(features, weights, mix, scale=10.0, eps=1e-5):
    """Sum of mix * logits, a scalar whose gradient sees every logit."""
    total = 0.0
    for b, c in np.ndindex(mix.shape):
        f, w = features[b], weights[c]
        lengths = (math.sqrt(f @ f) + eps) * (math.sqrt(w @ w) + eps)
        total += mix[b, c] * scale * sum(f * w) / lengths
    return total


def cosine_mixed(features, weights, mix, **options):
    logits = replay.cosine_logits(features, weights, **options)
    return jnp.sum(jax.lax.stop_gradient(mix) * logits)


def ace_twin(incoming, replayed, incoming_classes, replay_classes, rows, old_rows):
    first = f64.labelled_cross_entropy(
        incoming, IN_LABELS, [incoming_classes] * len(incoming), rows
    )
    second = f64.labelled_cross_entropy(
        replayed, RE_LABELS, [replay_classes] * len(replayed), old_rows
    )
    return first + second


def hinges(a, p, n, margin=0.2, euclidean=False):
    def between(x, y):
        x, y = twins.unit(x), twins.unit(y)
        return math.sqrt(sum((x - y) ** 2)) if euclidean else 1 - sum(x * y)

    return [
        between(*x[:2]) - between(*x[::2]) + margin for x in zip(a, p, n, strict=True)
    ]


def triplet_twin(a, p, n, rows=None, **options):
    values = hinges(a, p, n, **options)
    return mean(max(values[i], 0.0) for i in (range(len(a)) if rows is None else rows))


def sup_con_twin(a, p, n, rows=None, t=0.2, base=0.07):
    rows = range(len(a)) if rows is None else rows
    pool = [(twins.unit(p[i]), AML_LABELS[i]) for i in rows]
    pool += [(twins.unit(n[i]), AML_OTHERS[i]) for i in rows]
    per_row = []
    for i in rows:
        total = logsumexp(twins.unit(a[i]) @ z / t for z, _ in pool)
        same = [twins.unit(a[i]) @ z / t for z, label in pool if label == AML_LABELS[i]]
        per_row.append(mean(total - s for s in same))
    return t / base * mean(per_row)


def der_twin(logits, stored, rows=None):
    rows = range(len(logits)) if rows is None else rows
    return mean((logits[i, c] - stored[i, c]) ** 2 for i in rows for c in range(5))


def of(members, size):
    return jnp.array([i in members for i in range(size)])


IN_LABELS, RE_LABELS = [3, 1, 3, 0], [0, 4, 3]
AML_LABELS, AML_OTHERS = [1, 2, 1, 0, 2, 1], [2, 1, 0, 1, 0, 2]
INCOMING, REPLAYED, FEATURES = (4, 5), (3, 5), (6, 4)
EVERY = set(range(5))
PER_ROW = [{1, 3}, {1}, set(), {0, 1, 4}]
MASKS = jnp.array([[c in chosen for c in range(5)] for chosen in PER_ROW])


def cross(**options):
    labels = jnp.array(IN_LABELS)
    return lambda logits: replay.cross_entropy(logits, labels, **options)


def ace(seen, **options):
    def loss(incoming, replayed):
        labels = jnp.array(IN_LABELS), jnp.array(RE_LABELS)
        return replay.er_ace(
            incoming, labels[0], replayed, labels[1], of(seen, 5), **options
        )

    return loss


def aml(**options):
    labels = jnp.array(AML_LABELS), jnp.array(AML_OTHERS)
    return lambda a, p, n: replay.aml_sup_con(a, p, n, *labels, **options)


def icarl(old, **options):
    labels = jnp.array(IN_LABELS)
    return lambda logits, teacher: replay.icarl(
        logits, labels, teacher, of(old, 5), **options
    )


def tasks(numbers, **options):
    numbers = jnp.array(numbers)
    return lambda logits, teacher: replay.task_distillation(
        logits, teacher, numbers, **options
    )


# name: loss, twin, shapes, and the arguments that receive a gradient
CASES = {
    "cosine_default": (cosine_mixed, cosine_twin, [(3, 4), (5, 4), (3, 5)], (0, 1)),
    "cosine": (
        partial(cosine_mixed, scale=3.0, eps=0.5),
        partial(cosine_twin, scale=3.0, eps=0.5),
        [(3, 4), (5, 4), (3, 5)],
        (0, 1),
    ),
    "cross_entropy": (
        cross(),
        lambda z: f64.labelled_cross_entropy(z, IN_LABELS),
        [INCOMING],
        (0,),
    ),
    "cross_entropy_classes": (
        cross(class_mask=of({0, 1, 3}, 5), example_mask=of({0, 1, 3}, 4)),
        lambda z: f64.labelled_cross_entropy(z, IN_LABELS, [{0, 1, 3}] * 4, [0, 1, 3]),
        [INCOMING],
        (0,),
    ),
    "cross_entropy_classes_per_row": (
        cross(class_mask=MASKS, example_mask=of({0, 1, 2}, 4)),
        lambda z: f64.labelled_cross_entropy(z, IN_LABELS, PER_ROW, [0, 1, 2]),
        [INCOMING],
        (0,),
    ),
    "er_ace_default": (
        ace({0, 1, 3, 4}),
        lambda a, b: ace_twin(a, b, {0, 1, 3}, {0, 1, 3, 4}, range(4), range(3)),
        [INCOMING, REPLAYED],
        (0, 1),
    ),
    "er_ace_masked": (
        ace(
            {0, 1, 3, 4},
            replay_mask=of({0, 2}, 3),
            incoming_mask=of({0, 1}, 4).astype(jnp.float32),
        ),
        lambda a, b: ace_twin(a, b, {1, 3}, {0, 1, 3, 4}, [0, 1], [0, 2]),
        [INCOMING, REPLAYED],
        (0, 1),
    ),
    # Largest index seen is 3: 4 is unseen, 0 seen and absent, 2 unseen.
    "er_ace_code": (
        ace({0, 1, 3}, form="code", incoming_mask=of({1}, 4)),
        lambda a, b: ace_twin(a, b, {1, 2, 3, 4}, EVERY, [1], range(3)),
        [INCOMING, REPLAYED],
        (0, 1),
    ),
    # Class 0 came last, though 1 and 3 have larger indices.
    "er_ace_code_other_order": (
        ace(
            {0, 1, 3},
            form="code",
            incoming_mask=of({1}, 4),
            task_of=jnp.array([2, 1, -1, 0, -1]),
        ),
        lambda a, b: ace_twin(a, b, {0, 1, 2, 4}, EVERY, [1], range(3)),
        [INCOMING, REPLAYED],
        (0, 1),
    ),
    "triplet_default": (replay.triplet, triplet_twin, [FEATURES] * 3, (0, 1, 2)),
    "triplet_euclidean": (
        partial(
            replay.triplet, margin=0.5, distance="euclidean", valid=of({0, 1, 3, 5}, 6)
        ),
        partial(triplet_twin, margin=0.5, euclidean=True, rows=[0, 1, 3, 5]),
        [FEATURES] * 3,
        (0, 1, 2),
    ),
    "aml_sup_con_default": (aml(), sup_con_twin, [FEATURES] * 3, (0, 1, 2)),
    "aml_sup_con": (
        aml(temperature=0.5, base_temperature=0.2, valid=of({0, 1, 3, 4}, 6)),
        partial(sup_con_twin, t=0.5, base=0.2, rows=[0, 1, 3, 4]),
        [FEATURES] * 3,
        (0, 1, 2),
    ),
    "der_default": (replay.der, der_twin, [REPLAYED] * 2, (0,)),
    "der_masked": (
        partial(replay.der, example_mask=of({0, 2}, 3)),
        partial(der_twin, rows=[0, 2]),
        [REPLAYED] * 2,
        (0,),
    ),
    # Labels are 3, 1 and 0: of new and of old classes; 2 and 4 are nobody's.
    "icarl_default": (
        icarl({0, 1}),
        partial(f64.icarl, labels=IN_LABELS, old={0, 1}),
        [INCOMING] * 2,
        (0,),
    ),
    "icarl_masked_sum": (
        icarl(
            {0, 1},
            reduction="sum",
            class_mask=of({0, 1, 3}, 5),
            example_mask=of({1, 2}, 4),
        ),
        partial(
            f64.icarl,
            labels=IN_LABELS,
            old={0, 1},
            classes=[0, 1, 3],
            rows=[1, 2],
            summed=True,
        ),
        [INCOMING] * 2,
        (0,),
    ),
    "icarl_masked_mean": (
        icarl({0, 1}, class_mask=of({0, 1, 3}, 5)),
        partial(f64.icarl, labels=IN_LABELS, old={0, 1}, classes=[0, 1, 3]),
        [INCOMING] * 2,
        (0,),
    ),
    "tasks_default": (
        tasks([1, 0, 1, 0, 1]),
        partial(f64.task_distillation, groups=[[1, 3], [0, 2, 4]]),
        [INCOMING] * 2,
        (0,),
    ),
    # Class 1 is a task of its own, 3 and 4 are of none.
    "tasks_masked": (
        tasks([7, 2, 7, -1, -1], temperature=0.7, example_mask=of({0, 2, 3}, 4)),
        partial(f64.task_distillation, groups=[[0, 2], [1]], rows=[0, 2, 3], t=0.7),
        [INCOMING] * 2,
        (0,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_equation(name):
    loss, twin, shapes, moving = CASES[name]
    twins.check(loss, twin, twins.draw(shapes, seed=6), moving)


@pytest.mark.parametrize("name", [name for name in CASES if "default" in name])
def test_bfloat16_is_computed_in_float32(name):
    loss, _, shapes, _ = CASES[name]
    twins.check_bfloat16(loss, shapes)


# name: the loss of a mask and the arrays, the shapes, how many rows the mask has
MASKED = {
    "cross_entropy": (lambda m, z: cross(example_mask=m)(z), [INCOMING]),
    "replay": (lambda m, a, b: ace(EVERY, replay_mask=m)(b, a), [(3, 5), (4, 5)]),
    "incoming": (lambda m, a, b: ace(EVERY, incoming_mask=m)(a, b), [(4, 5), (3, 5)]),
    "triplet": (lambda m, *x: replay.triplet(*x, valid=m), [FEATURES] * 3),
    "euclidean": (
        lambda m, *x: replay.triplet(*x, valid=m, distance="euclidean"),
        [FEATURES] * 3,
    ),
    "aml_sup_con": (lambda m, *x: aml(valid=m)(*x), [FEATURES] * 3),
    "der": (lambda m, z, s: replay.der(z, s, example_mask=m), [REPLAYED] * 2),
    "icarl": (lambda m, z, s: icarl({0, 1}, example_mask=m)(z, s), [INCOMING] * 2),
    "tasks": (
        lambda m, z, s: tasks([0, 0, 1, 1, 1], example_mask=m)(z, s),
        [INCOMING] * 2,
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_rows_change_nothing_whatever_they_hold(name):
    loss, shapes = MASKED[name]
    arrays = [jnp.float32(a) for a in twins.draw(shapes, seed=1)]
    rows = shapes[0][0]
    mask = of({0, 1}, rows).astype(jnp.float32)
    # All arrays of as many rows are masked; the other part of ER-ACE is not.
    hidden = [slice(2, None) if len(a) == rows else None for a in arrays]
    value, gradients = twins.check_masked(loss, mask, arrays, hidden)
    # Of nothing: 0 and no gradient, but for the part of ER-ACE that is left.
    assert np.isfinite(value) and not np.any(np.asarray(gradients[0]))
    assert value == 0 or name in ("replay", "incoming")


def test_masked_classes_change_nothing_whatever_they_hold():
    z, labels = jnp.float32(twins.draw([INCOMING])[0]), jnp.array(IN_LABELS)
    mask = of({0, 1, 3}, 5).astype(jnp.float32)
    plain = partial(replay.cross_entropy, labels=labels, class_mask=mask)
    binary = partial(
        replay.icarl,
        labels=labels,
        teacher_logits=z,
        old_classes=of({0}, 5),
        class_mask=mask,
    )
    tasked = partial(
        replay.task_distillation,
        teacher_logits=z[::-1],
        tasks=jnp.array([0, 1, -1, 0, -1]),
    )
    for loss in (plain, binary, tasked):
        step = interpreted.jit(jax.value_and_grad(loss))
        value, gradient = step(z)
        for bad in (np.nan, 1e30, -np.inf):
            again, spoilt = step(z.at[:, 2].set(bad))
            assert again == value
            np.testing.assert_array_equal(gradient, spoilt)
            assert not np.any(np.asarray(spoilt[:, jnp.array([2, 4])]))


@pytest.mark.parametrize("scale", [100.0, 1.0, 1e-3])
def test_only_the_shares_of_weights_count(scale):
    logits = jnp.array([[1.0, 0.0], [0.0, 2.0], [0.5, 0.0]])
    labels, weights = jnp.array([0, 0, 1]), np.array([0.2, 0.5, 0.0])
    shares = weights / weights.sum()
    mask = jnp.float32(scale * weights)
    rows = [
        replay.cross_entropy(logits[i : i + 1], labels[i : i + 1]) for i in range(3)
    ]
    found = replay.cross_entropy(logits, labels, example_mask=mask)
    np.testing.assert_allclose(found, shares @ np.array(rows), rtol=1e-6)
    found = replay.der(logits, jnp.zeros_like(logits), example_mask=mask)
    np.testing.assert_allclose(found, shares @ [0.5, 2.0, 0.125], rtol=1e-6)


def test_rows_without_a_class_are_left_out_and_lost_labels_are_seen():
    z = jnp.float32(twins.draw([(2, 3)])[0])
    labels = jnp.array([0, 1])
    step = interpreted.jit(
        jax.value_and_grad(
            lambda z, m, y: replay.cross_entropy(z, y, class_mask=m), argnums=0
        )
    )
    value, gradient = step(z, jnp.zeros(3, bool), labels)
    assert value == 0 and not np.any(np.asarray(gradient))
    value, gradient = step(z, jnp.array([[1, 1, 0], [0, 0, 0]], bool), labels)
    np.testing.assert_allclose(
        value, f64.labelled_cross_entropy(z, [0], [{0, 1}], [0]), rtol=1e-5
    )
    assert np.abs(gradient[0]).max() > 1e-3 and not np.any(np.asarray(gradient[1]))
    # No probability for the label, or no such label: an infinite loss, said finitely.
    for labels in ([0, 2], [0, -1], [0, 3]):
        value, gradient = step(z, jnp.array([1, 1, 0], bool), jnp.array(labels))
        np.testing.assert_allclose(value, 5e8, rtol=1e-5)
        assert np.abs(gradient[0]).max() > 1e-3 and not np.any(np.asarray(gradient[1]))


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_equal_and_empty_rows_have_finite_gradients(distance):
    rows = jnp.float32(twins.draw([(3, 4)])[0])
    zero = jnp.zeros_like(rows)
    loss = partial(replay.triplet, distance=distance)
    inputs = [(rows, rows, rows), (rows, rows, zero), (zero, rows, rows)]
    twins.check_finite(loss, inputs)
    # d is the same for positive and negative.
    np.testing.assert_allclose(loss(rows, rows, rows), 0.2, rtol=1e-5)


def test_empty_rows_of_the_cosine_head_give_zeros_and_get_no_gradient():
    f, w = (jnp.float32(a).at[0].set(0.0) for a in twins.draw([(3, 4), (5, 4)]))
    logits = replay.cosine_logits(f, w)
    assert not logits[0].any() and not logits[:, 0].any() and logits[1:, 1:].all()
    gradients = interpreted.jit(jax.grad(cosine_mixed, (0, 1)))(f, w, jnp.ones((3, 5)))
    for gradient in gradients:
        assert np.all(np.isfinite(gradient)) and not gradient[0].any()
        assert np.abs(gradient[1:]).max() > 1e-2
