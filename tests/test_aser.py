"""ASER against coalitions counted out, and float64 twins of its choices and steps."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted, tiny, twins
from jaxcl import core
from jaxcl.memory import shapley
from jaxcl.methods import aser, er, online

CLASSES = tiny.CLASSES
VALUES = interpreted.jit(shapley.shapley_values, static_argnames="neighbours")


def brute(features, labels, row, label, k):
    """Shapley values by their definition: a sum over all sets of the others."""
    count = len(labels)
    order = np.argsort(np.square(features - row).sum(1), kind="stable")

    def worth(members):
        nearest = [i for i in order if i in members][:k]
        return sum(labels[i] == label for i in nearest) / k

    found = np.zeros(count)
    for i in range(count):
        others = [j for j in range(count) if j != i]
        for size in range(count):
            weight = math.factorial(size) * math.factorial(count - size - 1)
            for chosen in itertools.combinations(others, size):
                gain = worth({*chosen, i}) - worth({*chosen})
                found[i] += gain * weight / math.factorial(count)
    return found


def recursion(features, labels, rows, row_labels, k):
    """Jia et al., Theorem 1, one candidate after another, f64[E,N]."""
    found = np.zeros((len(rows), len(labels)))
    for e, (row, label) in enumerate(zip(rows, row_labels, strict=True)):
        order = np.argsort(np.square(features - row).sum(1), kind="stable")
        own = [float(labels[i] == label) for i in order]
        value = 0.0
        for m in range(len(order), 0, -1):
            after = own[m] if m < len(order) else 0.0
            value += (own[m - 1] - after) / k * min(k, m) / m
            found[e, order[m - 1]] = value
    return found


def drawn(seed, candidates, rows, classes=2):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(candidates, 3)).astype(np.float32),
        rng.integers(0, classes, candidates),
        rng.normal(size=(rows, 3)).astype(np.float32),
        rng.integers(0, classes, rows),
    )


def test_values_equal_the_definition():
    """Also with fewer candidates than neighbours."""
    for seed, (count, k) in enumerate([(6, 2), (5, 7), (1, 3)]):
        features, labels, rows, row_labels = drawn(seed, count, 4)
        found = VALUES(features, labels, rows, row_labels, neighbours=k)
        expected = [
            brute(features, labels, *e, k) for e in zip(rows, row_labels, strict=True)
        ]
        np.testing.assert_allclose(found, expected, atol=1e-6)
        twin = recursion(features, labels, rows, row_labels, k)
        np.testing.assert_allclose(twin, expected, atol=1e-12)


def test_masked_candidates_change_nothing_whatever_they_hold():
    features, labels, rows, row_labels = drawn(3, 40, 6, classes=3)
    mask = np.random.default_rng(4).random(40) < 0.6
    expected = recursion(features[mask], labels[mask], rows, row_labels, 3)
    for blank in (0.0, np.nan, np.inf):
        spoilt = np.where(mask[:, None], features, np.float32(blank))
        found = VALUES(spoilt, labels, rows, row_labels, neighbours=3, mask=mask)
        np.testing.assert_allclose(found[:, mask], expected, atol=1e-6)
        assert not np.any(np.asarray(found)[:, ~mask])
    none = VALUES(features, labels, rows, row_labels, neighbours=3, mask=mask & False)
    assert not np.any(np.asarray(none))


def score_twin(adversarial, cooperative, variant):
    """Of cooperative rows that exist."""
    columns = []
    for i in range(adversarial.shape[1]):
        helps, harms = [*cooperative[:, i]], [*adversarial[:, i]]
        columns.append(
            {
                "mean": (sum(helps) / len(helps) if helps else 0)
                - sum(harms) / len(harms),
                "max_min": (max(helps) if helps else 0) - min(harms),
                "adversarial": -sum(harms),
            }[variant]
        )
    return np.array(columns)


@pytest.mark.parametrize("variant", shapley.VARIANTS)
def test_scores(variant):
    rng = np.random.default_rng(5)
    harms, helps = rng.normal(size=(3, 4)), rng.normal(size=(5, 4)) - 3
    mask = np.array([True, False, True, True, False])
    for there in (mask, mask & False):
        spoilt = np.where(there[:, None], helps, np.nan)
        found = shapley.aser_score(
            jnp.float32(harms), jnp.float32(spoilt), jnp.array(there), variant=variant
        )
        expected = score_twin(harms, helps[there], variant)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="variant='max'"):
        shapley.aser_score(harms, helps, mask, variant="max")


def test_ranks():
    mask = jnp.array([True, True, False, True, True])
    scores = jnp.array([0.5, -1.0, 9.0, 2.0, 0.5])
    rank = interpreted.jit(shapley.rank_rows)
    firsts = set()
    for seed in range(20):
        order = rank(jax.random.key(seed), scores, mask).tolist()
        assert order[0] == 3 and order[3:] == [1, 2]
        firsts.add(order[1])
    assert firsts == {0, 4}  # equal ones in random order


def test_replace():
    replace = interpreted.jit(shapley.replace_slots, static_argnames="capacity")
    for seed in range(20):
        rng = np.random.default_rng(seed)
        scores = rng.normal(size=9)
        mask = rng.random(9) < 0.7
        slots = np.where(mask[:5], rng.permutation(20)[:5], 20)
        found = replace(
            jax.random.key(seed),
            jnp.float32(scores),
            jnp.array(mask),
            jnp.array(slots),
            capacity=20,
        )
        room = mask[:5].sum()
        stays = sorted((i for i in range(9) if mask[i]), key=lambda i: -scores[i])
        stays = {*stays[:room]}
        entering = [i for i in range(4) if 5 + i in stays]
        leaving = {int(slots[i]) for i in range(5) if mask[i] and i not in stays}
        given = [int(found[i]) for i in entering]
        assert len(given) == len(leaving) and {*given} == leaving
        assert all(found[i] == 20 for i in range(4) if i not in entering)


def test_balanced_draws():
    labels = np.array([2, 0, 2, 2, 0, 2, 3, 2, 1, 1])
    allowed = np.array([1, 1, 1, 1, 1, 1, 1, 0, 0, 0], bool)
    draw = interpreted.jit(
        functools.partial(shapley.draw_balanced, num_classes=5, per_class=3)
    )
    counts = np.zeros(10)
    for seed in range(300):
        slots, mask = draw(jax.random.key(seed), jnp.array(labels), jnp.array(allowed))
        slots, mask = np.array(slots).reshape(5, 3), np.array(mask).reshape(5, 3)
        assert mask.sum(1).tolist() == [2, 0, 3, 1, 0]
        assert (slots[~mask] == 10).all() and not (mask[:, 1:] & ~mask[:, :-1]).any()
        for c in range(5):
            mine = slots[c, mask[c]]
            assert (labels[mine] == c).all() and allowed[mine].all()
            assert len({*mine}) == len(mine)
        counts[slots[mask]] += 1
    assert (counts[[1, 4, 6]] == 300).all() and not counts[~allowed].any()
    # Of class 2 three of four slots, each as often: within 4 deviations.
    of_two = counts[[0, 2, 3, 5]]
    assert np.abs(of_two - 225).max() < 4 * (300 * 0.75 * 0.25) ** 0.5


# The method. Draws are made to be of the first slots of each class, for twins.


def first_slots(key, labels, allowed, *, num_classes, per_class):
    index = jnp.arange(len(labels))
    rows = []
    for c in range(num_classes):
        mine = jnp.sort(jnp.where(allowed & (labels == c), index, len(labels)))
        rows.append(mine[:per_class])
    slots = jnp.concatenate(rows)
    return slots, slots < len(labels)


def first_twin(labels, allowed, per_class):
    found = []
    for c in range(CLASSES):
        found += [i for i in allowed if labels[i] == c][:per_class]
    return found


def features(state, images):
    """In evaluation mode, float64."""
    layer = tiny.arrays(state.params)[0]
    return tiny.normed(layer, tiny.raw(images), tiny.running(state))


def retrieve(options, *, size):
    """(state, batch) -> what is replayed; incoming images as trained on are blank."""
    components = tiny.make_parts(size=size, augment="replay")
    judge = aser.Selector(
        components, online.build_network(components, "linear"), **options, minority=True
    )

    def retrieved(state, batch):
        images, mask = jnp.full((4, 2, 2, 1), jnp.nan), jnp.ones(4, bool)
        rows = online.Rows(images, batch["label"], mask, batch["image"])
        return judge.retrieve(state, rows, jax.random.key(0))

    return interpreted.jit(retrieved)


@pytest.mark.parametrize("variant", shapley.VARIANTS)
def test_what_is_replayed_when_the_memory_is_full(variant, monkeypatch):
    monkeypatch.setattr(shapley, "draw_balanced", first_slots)
    labels = [0, 1, 0, 1, 1, 0, 0, 1, 3, 0]
    label, new_label = np.array(labels), np.array([1, 3, 2, 1])
    retrieved = retrieve({"variant": variant, "per_class": 2, "neighbours": 2}, size=3)
    pool = first_twin(labels, range(10), 2)
    helped = first_twin(labels, [i for i in range(10) if i not in pool], 2)
    for seed in range(6):
        state, batch = tiny.start(seed, labels), tiny.incoming(seed, new_label)
        chosen = retrieved(state, batch)
        old = features(state, state.extra.memory.items["image"])
        new = features(state, batch["image"])
        harms = recursion(old[pool], label[pool], new, new_label, 2)
        helps = recursion(old[pool], label[pool], old[helped], label[helped], 2)
        scores = score_twin(harms, helps, variant)
        assert chosen.mask.all() and len({*chosen.slots.tolist()}) == 3
        found = [scores[pool.index(slot)] for slot in chosen.slots.tolist()]
        np.testing.assert_allclose(found, -np.sort(-scores)[:3], atol=1e-6)
        np.testing.assert_array_equal(chosen.label, label[chosen.slots])
        stored = state.extra.memory.items["image"][chosen.slots]
        images = tiny.moved(tiny.plain(stored))
        np.testing.assert_allclose(chosen.images, images, rtol=1e-6)


def test_few_candidates_are_all_replayed_and_no_more():
    options = {"variant": "mean", "per_class": 1, "neighbours": 3}
    state, batch = tiny.start(8, [0, 1] * 5), tiny.incoming(8)
    chosen = retrieve(options, size=6)(state, batch)
    assert chosen.mask.tolist() == [True, True] + [False] * 4
    assert {*chosen.label[:2].tolist()} == {0, 1} == {*chosen.label.tolist()}


# Classes 0 and 1 have half of the slots, and are never rare; the others are.
FULL, COMING = [0, 1, 0, 1, 1, 0, 0, 1, 1, 0], [2, 0, 2, 1]


def staying(old, new, minority):
    """Rows of a full memory and of a batch (from 10) that are stored after it."""
    helped = first_twin(FULL, range(10), 2)
    rest = [i for i in range(10) if i not in helped]
    rows, label = np.concatenate([old, new]), np.array(FULL + COMING)
    pool = rest + [10, 11, 12, 13]
    judges = helped + ([10, 12] if minority else [])
    scores = recursion(rows[pool], label[pool], rows[judges], label[judges], 2).sum(0)
    order = np.argsort(-scores)
    assert scores[order[len(rest) - 1]] > scores[order[len(rest)]] + 1e-4
    return {pool[i] for i in order[: len(rest)]} | {*helped}


class Plain(aser.Selector):
    """Its features are the pixels, so that no network passes."""

    def features(self, state, *images):
        return [x.reshape(len(x), -1) / 255.0 for x in images]


@pytest.mark.parametrize("minority", [True, False])
def test_rows_that_are_helped_stay_and_the_others_compete(minority, monkeypatch):
    monkeypatch.setattr(shapley, "draw_balanced", first_slots)
    judge = Plain(tiny.make_parts(), None, "mean", 2, 2, minority)
    places = interpreted.jit(judge.places)
    for seed in range(3):
        state, batch = tiny.start(seed, FULL), tiny.incoming(seed, COMING)
        slots = np.asarray(places(state, jax.random.key(seed), batch))
        old, new = (
            np.reshape(x, (len(x), -1)) / 255
            for x in (state.extra.memory.items["image"], batch["image"])
        )
        enter = [10 + i for i in range(4) if slots[i] < 10]
        assert {*range(10)} - {*slots} | {*enter} == staying(old, new, minority)


def test_empty_slots_count_for_no_class():
    """Their label is 0; of 10 slots and 4 classes, a class of 3 rows is never rare."""
    judge = Plain(tiny.make_parts(), None, "mean", 2, 2, True)
    memory = tiny.start(0, [1, 1, 1]).extra.memory
    for seed in range(3):
        found = judge.mark_rare(jax.random.key(seed), memory, jnp.arange(CLASSES))
        assert found.tolist() == [True, False, True, True]


@pytest.mark.parametrize("minority", [True, False])
def test_what_is_stored_when_the_memory_is_full(minority, monkeypatch):
    monkeypatch.setattr(shapley, "draw_balanced", first_slots)
    components = tiny.make_parts()
    method = aser.make(components, per_class=2, neighbours=2, minority=minority)
    step, label = interpreted.jit(method.step), np.array(FULL + COMING)
    for seed in range(3):
        state, batch = tiny.start(seed, FULL), tiny.incoming(seed, COMING)
        after, _ = step(core.copy(state), batch)
        # Features are those after the step.
        old = features(after, state.extra.memory.items["image"])
        new = features(after, batch["image"])
        expected = staying(old, new, minority)
        images = np.concatenate([state.extra.memory.items["image"], batch["image"]])
        number = {image.tobytes(): i for i, image in enumerate(images)}
        memory = after.extra.memory
        held = [number[np.array(image).tobytes()] for image in memory.items["image"]]
        assert {*held} == expected and len({*held}) == 10
        np.testing.assert_array_equal(memory.items["label"], label[held])
        task = np.array([*np.array(state.extra.memory.items["task"]), 1, 1, 1, 1])
        np.testing.assert_array_equal(memory.items["task"], task[held])
        # Who stays does not move.
        assert all(slot == i for slot, i in enumerate(held) if i < 10)
        assert memory.seen == 14 and memory.filled.all()


def test_the_memory_fills_up_and_the_rest_of_a_batch_competes(monkeypatch):
    monkeypatch.setattr(shapley, "draw_balanced", first_slots)
    components = tiny.make_parts(capacity=6, size=2)
    step = interpreted.jit(aser.make(components, per_class=1, neighbours=2).step)
    # In the last, row 4, which fits, would tip the balance if it were a judge.
    for seed in (0, 1, 2, 3, 4, 41):
        state = tiny.start(seed, [], capacity=6)
        first = tiny.incoming(seed, [0, 1, 0, 1])
        second = tiny.incoming(seed + 10, [2, 1, 2, 1])
        state, _ = step(state, first)
        memory = state.extra.memory
        assert memory.filled.tolist() == [True] * 4 + [False] * 2 and memory.seen == 4
        np.testing.assert_array_equal(memory.items["image"][:4], first["image"])
        state, _ = step(state, second)
        memory = state.extra.memory
        assert memory.filled.all() and memory.seen == 8
        np.testing.assert_array_equal(memory.items["image"][4:], second["image"][:2])

        # Slots 0 and 1 are judges, with the rare row 6 of both batches; slots 2 and 3
        # and rows 6 and 7 compete, and nobody else does.
        images = np.concatenate([first["image"], second["image"]])
        pool, judges = [2, 3, 6, 7], [0, 1, 6]
        label = np.array([0, 1, 0, 1, 2, 1, 2, 1])
        rows = features(state, images)
        scores = recursion(rows[pool], label[pool], rows[judges], label[judges], 2)
        scores = dict(zip(pool, scores.sum(0), strict=True))
        number = {image.tobytes(): i for i, image in enumerate(images)}
        held = {number[np.array(image).tobytes()] for image in memory.items["image"]}
        assert held > {0, 1, 4, 5} and len(held) == 6
        found = [scores[i] for i in held - {0, 1, 4, 5}]
        best = sorted(scores.values())[2:]
        np.testing.assert_allclose(sorted(found), best, atol=1e-6)  # equal ones: any


@pytest.mark.parametrize(("form", "stored"), [("paper", 3), ("code", 3), ("code", 0)])
def test_a_step_equals_its_twin(form, stored):
    """The memory is not full: as many rows as it holds are all replayed."""
    components = tiny.make_parts(size=stored or len(tiny.NEW))
    method = aser.make(components, per_class=1, form=form)
    labels = [0, 2, 1][:stored]
    state, batch = tiny.start(9, labels), tiny.incoming(9)
    params, new = tiny.arrays(state.params), tiny.raw(batch["image"])
    old = tiny.raw(state.extra.memory.items["image"])[:stored]

    def losses(*params):
        return tiny.row_losses(params, new, tiny.NEW)

    def loss(*params):
        if not stored:  # in either form the incoming rows alone
            return losses(*params).mean()
        if form == "code":
            rows = np.concatenate([new, old])
            return tiny.row_losses(params, rows, tiny.NEW + labels).mean()
        return losses(*params).mean() + tiny.row_losses(params, old, labels).mean()

    grads = [twins.central_difference(loss, params, i) for i in range(3)]
    after, metrics = interpreted.jit(method.step)(core.copy(state), batch)
    np.testing.assert_allclose(metrics["loss"], loss(*params), rtol=1e-5)
    expected = tiny.descended(params, grads)
    for one, other in zip(tiny.arrays(after.params), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-4, atol=3e-5)


def test_keep_policy_stores_as_er_does():
    made, states = tiny.make_parts(capacity=5), []
    for method in (aser.make(made, keep="policy"), er.make(made)):
        state, step = tiny.start(0, [], capacity=5), interpreted.jit(method.step)
        for seed in range(4):
            state, _ = step(state, tiny.incoming(seed))
        states.append(state)
    one, other = (state.extra.memory for state in states)
    assert one.filled.all()
    jax.tree.map(np.testing.assert_array_equal, one, other)
