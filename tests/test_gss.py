"""GSS: scores and replacement against brute force, gradients against differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import gss_twin, interpreted, twins
from helpers import online_toy as toy
from jaxcl import sharding
from jaxcl.memory import buffer, diversity, policies
from jaxcl.methods import gss, online
from jaxcl.methods.two_view import stream
from jaxcl.nets import resnet

FIRST, SECOND = toy.FIRST, toy.SECOND
NET = online.build_network(toy.parts(), "linear")
FULL = jnp.array([1.6, 0.4, 1.0, 0.8])
ALL = jnp.ones(4, bool)


def score_twin(gradients, references):
    return [max(twins.cosine(g, r) for r in references) + 1 for g in gradients]


def test_score_is_the_largest_cosine_plus_one():
    rng = np.random.default_rng(0)
    gradients, references = rng.normal(size=(6, 3)), rng.normal(size=(5, 3))
    gradients[4], references[1] = 0, 0
    gradients[5] = -7 * references[2]
    with jax.enable_x64(True):
        for rows in ([0, 1, 2, 3, 4], [2], [0, 2, 3]):
            valid = np.isin(np.arange(5), rows)
            found = diversity.similarity_score(gradients, references, valid)
            expected = score_twin(gradients, references[rows])
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        none = diversity.similarity_score(gradients, references, np.zeros(5, bool))
    np.testing.assert_allclose(none, 1.1)  # 0.1 as a cosine, as in the code
    opposite = diversity.similarity_score(
        np.float32(gradients), np.float32(references), ALL_FIVE
    )
    assert (np.asarray(opposite) >= 0).all()


ALL_FIVE = np.ones(5, bool)


def outcomes(choose, count=40000):
    """Share of each tuple of slots over many keys."""
    slots = jax.jit(jax.vmap(choose))(jax.random.split(jax.random.key(1), count))
    found, times = np.unique(np.asarray(slots), axis=0, return_counts=True)
    return {tuple(map(int, f)): t / count for f, t in zip(found, times, strict=True)}


def check_agree(found, expected, count=40000):
    assert set(found) == {k for k, p in expected.items() if p > 1e-9}
    for slots, p in expected.items():
        bound = 4.5 * np.sqrt(p * (1 - p) / count)
        assert abs(found.get(slots, 0) - p) <= bound, slots
    np.testing.assert_allclose(sum(expected.values()), 1)


def in_turn_twin(stored, scores):
    """Probability of each tuple of slots of rows offered to a full memory."""
    if not scores:
        return {(): 1.0}
    own, total, ways = scores[0], sum(stored), {}

    def add(slot, p, after):
        for rest, q in in_turn_twin(after, scores[1:]).items():
            ways[(slot, *rest)] = ways.get((slot, *rest), 0) + p * q

    stays = 1.0
    if own < 1:
        for i, old in enumerate(stored):
            p = old / total * old / (old + own)
            stays -= p
            add(i, p, [*stored[:i], own, *stored[i + 1 :]])
    add(len(stored), stays, stored)
    return ways


@pytest.mark.parametrize("scores", [[0.9], [0.0], [1.0], [1.4, 0.5], [0.2, 0.9]])
def test_in_turn_is_algorithm_two(scores):
    choose = functools.partial(
        diversity.choose_in_turn, stored=FULL, filled=ALL, scores=jnp.array(scores)
    )
    expected = in_turn_twin([float(x) for x in FULL], scores)
    check_agree(outcomes(lambda key: choose(key)), expected)


def test_in_turn_fills_first_whatever_rows_score():
    filled = jnp.arange(4) < 2
    rows = jnp.array([1.9, 1.3, 0.5])
    found = outcomes(
        lambda key: diversity.choose_in_turn(key, FULL * filled, filled, rows), 40000
    )
    # The third row meets a full memory, with the scores of the two before it.
    third = in_turn_twin([*map(float, FULL[:2]), 1.9, 1.3], [0.5])
    check_agree(found, {(2, 3, *slot): p for slot, p in third.items()})


def at_once_twin(stored, scores, left=None):
    """The same of the code: candidates by min-max scores, without replacement."""
    if not scores:
        return {(): 1.0}
    low, high = min(stored), max(stored)
    weights = [(x - low) / (high - low + 0.01) for x in stored]
    left = set(range(len(stored))) if left is None else left
    total, ways = sum(weights[i] for i in left), {}
    for i in left:
        if weights[i] == 0:
            continue
        accept = stored[i] / (stored[i] + scores[0])
        for rest, q in at_once_twin(stored, scores[1:], left - {i}).items():
            p = weights[i] / total * q
            for slot, share in ((i, accept), (len(stored), 1 - accept)):
                ways[(slot, *rest)] = ways.get((slot, *rest), 0) + p * share
    return ways


@pytest.mark.parametrize("scores", [[0.9], [1.7], [0.3, 1.2]])
def test_at_once_is_the_code(scores):
    rows = jnp.array(scores)
    choose = functools.partial(diversity.choose_at_once, batch_score=jnp.float32(0.99))
    found = outcomes(lambda key: choose(key, FULL, ALL, rows))
    check_agree(found, at_once_twin([float(x) for x in FULL], scores))


def test_at_once_asks_the_batch_first_and_drops_what_does_not_fit():
    key, rows = jax.random.key(0), jnp.array([0.1, 0.2, 0.3])
    similar = diversity.choose_at_once(key, FULL, ALL, rows, jnp.float32(1.0))
    np.testing.assert_array_equal(similar, [4, 4, 4])
    filled = jnp.arange(4) < 2
    for batch_score in (0.5, 1.5):
        found = diversity.choose_at_once(
            key, FULL, filled, rows, jnp.float32(batch_score)
        )
        np.testing.assert_array_equal(found, [2, 3, 4])
    many = jnp.zeros(7)  # more rows than slots: one slot never, three at most
    found = diversity.choose_at_once(key, FULL, ALL, many, jnp.float32(0.5))
    assert sorted(np.asarray(found)) == [0, 2, 3, 4, 4, 4, 4]


def test_the_policy_of_online_ssl_is_algorithm_two_row_by_row():
    """Batches with rows that do not exist fill a memory, then compete for it."""
    rng, entered = np.random.default_rng(3), 0
    memory = buffer.create({"score": np.zeros((), np.float32)}, 7)
    offer, write = jax.jit(policies.POLICIES["gss"].choose), jax.jit(buffer.write)
    for turn in range(12):
        mask, key = rng.random(5) < 0.8, jax.random.key(turn)
        scores = rng.uniform(0.2, 1.4, 5).astype(np.float32)
        scores[turn % 5] = 1  # a cosine of 0 does not enter
        held = jax.tree.map(np.asarray, memory)
        slots, kept = offer(memory, {}, key, {"score": scores}, mask)
        want = gss_twin.slots(key, held.items["score"], held.filled, scores, mask)
        np.testing.assert_array_equal(slots, want)
        assert not kept
        entered += held.filled.all() * int((np.asarray(slots) < 7).sum())
        memory = write(memory, slots, {"score": scores}, mask)
    assert entered > 5


def test_the_gradient_of_an_image_is_that_of_a_shift_of_its_queries():
    rng = np.random.default_rng(4)
    query, target = rng.normal(size=(2, 5, 2, 3))

    def loss(shift, row):  # both queries move together
        pairs = query[row] + shift, target[row]
        return float(stream.pair_losses(*(x[None] for x in pairs))[0])

    with jax.enable_x64(True):
        found = np.asarray(stream.pair_slopes(query, target))
        turned = stream.pair_slopes(query[:, ::-1], target[:, ::-1])
        np.testing.assert_allclose(turned, found, rtol=1e-12)
        for row in range(5):
            by_hand = gss_twin.slope(query[row], target[row])
            np.testing.assert_allclose(found[row], by_hand, rtol=1e-10)
            differences = [
                (loss(step, row) - loss(-step, row)) / 2e-5 for step in 1e-5 * np.eye(3)
            ]
            np.testing.assert_allclose(found[row], differences, rtol=1e-6, atol=1e-9)


@functools.cache
def compiled(gradients, platform):
    made = toy.parts()

    @interpreted.jit
    def function(state, images, label, mask):
        return gss.group_gradients(made, NET, state, gradients, images, label, mask)

    return function


def vectors(state, gradients, rows, mask=None):
    """Of groups in the shape of the mask; None: one group for each row."""
    images, label = toy.parts().eval_transform(rows["image"]), rows["label"]
    mask = jnp.ones((len(label), 1), bool) if mask is None else jnp.asarray(mask)
    images, label = images.reshape(*mask.shape, 8, 8, 1), label.reshape(mask.shape)
    found = compiled(gradients, sharding.platform())(state, images, label, mask)
    return np.asarray(found, np.float64)


def test_gradients_of_groups():
    state = toy.shaken(toy.fresh(gss.make(toy.parts())))
    images, label = FIRST["image"], FIRST["label"]
    single = vectors(state, "all", FIRST)
    mask = np.array([[True, True, True], [True, False, True]])
    groups = vectors(state, "all", FIRST, mask)
    # In evaluation mode rows know nothing of each other.
    np.testing.assert_allclose(groups[0], single[:3].mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(groups[1], single[[3, 5]].mean(0), rtol=1e-4, atol=1e-6)
    with sharding.compile_target():
        mapped = vectors(state, "all", FIRST, mask)
    np.testing.assert_allclose(mapped, groups, rtol=1e-4, atol=1e-6)
    head = vectors(state, "head", FIRST)
    np.testing.assert_allclose(head, single[:, -head.shape[1] :], rtol=1e-4, atol=1e-6)
    # The head's in closed form: (p - y) and its product with the features.
    out, _ = NET(
        state.params, state.stats, toy.parts().eval_transform(images), train=False
    )
    logits, features = (np.asarray(x, np.float64) for x in (out.logits, out.features))
    errors = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    errors -= np.eye(toy.CLASSES)[np.asarray(label)]
    outer = errors[:, :, None] * features[:, None]
    closed = np.concatenate([errors, outer.reshape(6, -1)], axis=1)
    np.testing.assert_allclose(head, closed, rtol=1e-3, atol=1e-5)


ONE, TWO = toy.batch(0, [0, 1]), toy.batch(1, [2, 3])


@pytest.mark.parametrize(("form", "gradients"), [("paper", "all"), ("code", "head")])
def test_rows_are_scored_after_the_update(form, gradients, monkeypatch):
    asked, at_once = [], diversity.choose_at_once

    def recorded(key, stored, filled, scores, batch_score):
        jax.debug.callback(lambda x: asked.append(float(x)), batch_score)
        return at_once(key, stored, filled, scores, batch_score)

    monkeypatch.setattr(diversity, "choose_at_once", recorded)
    # As many vectors of one row as there are slots: each stored row is one of them.
    made = toy.parts(augment="all", capacity=4)
    options = {"form": form, "gradients": gradients, "vectors": 99, "rows": 1}
    method = gss.make(made, **options)
    state, _ = toy.step(method, toy.fresh(method), ONE)
    np.testing.assert_allclose(state.extra.memory.items["score"][:2], 1.1)
    new, _ = toy.step(method, toy.shaken(state), TWO)
    own, past = (vectors(new, gradients, rows) for rows in (TWO, ONE))
    found = new.extra.memory.items
    expected = score_twin(own, past)
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(found["score"][2:], expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(found["image"][2:], TWO["image"])
    np.testing.assert_array_equal(found["label"][2:], TWO["label"])
    if form == "code":  # the score of the batch is that of its mean loss
        jax.effects_barrier()
        whole = score_twin(vectors(new, gradients, TWO, np.ones((1, 2), bool)), past)
        np.testing.assert_allclose(asked, [1.1, *whole], rtol=1e-3)
        assert min(np.abs(np.array(expected) - whole)) > 0.01


@pytest.mark.parametrize(
    ("stored", "whole"), [(6, [1, 1, 1]), (5, [1, 1, 0]), (1, [1, 0, 0]), (0, [0] * 3)]
)
def test_references_are_disjoint_draws_of_images_as_they_are(stored, whole):
    """Only whole draws count, and the first, however few rows it has."""
    made = toy.parts(augment="all")  # a mirror
    rows = {**FIRST, "task": jnp.zeros(6, jnp.int32)}
    memory = buffer.create(jax.tree.map(lambda x: x[0], rows), 7)
    slots = jnp.where(jnp.arange(6) < stored, jnp.arange(6), 7)
    memory = buffer.write(memory, slots, rows)
    images, counts = gss._references(
        made, lambda images, *_: images, memory, jax.random.key(0), 3, 2
    )
    assert counts.tolist() == whole and images.shape[:2] == (3, 2)
    if stored < 6:
        return
    found = np.sort(np.reshape(images, (6, -1)), axis=0)
    want = np.sort(np.reshape(made.eval_transform(FIRST["image"]), (6, -1)), axis=0)
    np.testing.assert_array_equal(found, want)


@functools.cache
def small(form):
    made = toy.parts(encoder=resnet.conv_net(width=2), capacity=2)
    return gss.make(made, form=form, gradients="head", rows=2)


def opposed(method):
    """A full memory of ONE's images, each with the other label, and scores."""
    state, _ = toy.step(method, toy.fresh(method), ONE)
    memory, bias = state.extra.memory, jnp.array([0.0, 0.0, -30.0, -30.0, -30.0])
    scores = jnp.array([0.7, 1.9])
    items = {**memory.items, "label": 1 - memory.items["label"], "score": scores}
    head = {**state.params["head"], "bias": bias}
    return state.replace(
        params={**state.params, "head": head},
        extra=state.extra._replace(memory=memory._replace(items=items)),
    )


def test_paper_and_code_replace_rows_of_a_full_memory():
    """Two classes, equally likely: turned labels turn the gradient around."""
    taken = set()
    for form in ("paper", "code"):
        method = small(form)
        state = opposed(method)
        for seed in range(12):
            begun = state.replace(key=jax.random.key(seed))
            memory = toy.step(method, begun, ONE)[0].extra.memory.items
            for slot in range(2):
                if memory["score"][slot] in state.extra.memory.items["score"]:
                    continue
                assert memory["score"][slot] < 1
                # The row that came in, whole: image and label belong together.
                row = ONE["image"].tolist().index(memory["image"][slot].tolist())
                assert int(memory["label"][slot]) == row
                taken.add((form, slot))
        # The code never gives up the row that is least like the others.
    assert taken == {("paper", 0), ("paper", 1), ("code", 1)}


def test_a_step_trains_as_experience_replay():
    method = gss.make(toy.parts())
    state = toy.shaken(toy.step(method, toy.fresh(method), FIRST)[0])

    def twin(new, old):
        value = toy.cross_entropy(new, SECOND["label"])
        return value + toy.cross_entropy(old, FIRST["label"])

    images = [SECOND["image"], FIRST["image"]]
    new, _ = toy.check_step(method, NET, state, SECOND, images, twin)
    # Each stored row is a reference, and what is new is stored with its score.
    expected = score_twin(*(vectors(new, "all", rows) for rows in (SECOND, FIRST)))
    found = new.extra.memory.items["score"]
    np.testing.assert_allclose(found, [1.1] * 6 + expected, rtol=1e-3, atol=1e-4)
