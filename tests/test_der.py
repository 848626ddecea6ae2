"""DER, DER++ and DER++ with ACE: steps against the equation, stored logits, draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted
from helpers import online_toy as toy
from jaxcl import core
from jaxcl.methods import der, online

FIRST, SECOND = toy.FIRST, toy.SECOND
NET = online.build_network(toy.parts(), "linear")


def started(method):
    """FIRST is stored, and the network has moved since."""
    return toy.shaken(toy.step(method, toy.fresh(method), FIRST)[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.5}, {"alpha": 0.7, "beta": 0.4, "ace": True}, {"ace": True}],
    ids=str,
)
def test_a_step_is_the_equation(options):
    method = der.make(toy.parts(), **options)
    state = started(method)
    stored = np.asarray(state.extra.memory.items["logits"][:6], np.float64)
    alpha, beta = options.get("alpha", 0.1), options.get("beta", 0.0)

    def twin(new, old, again=None):
        present = [2, 3] if "ace" in options else None
        value = toy.cross_entropy(new, SECOND["label"], present)
        value += alpha * ((old - stored) ** 2).mean()
        if beta:
            value += beta * toy.cross_entropy(again, FIRST["label"])
        return value

    images = [SECOND["image"], *[FIRST["image"]] * (2 if beta else 1)]
    new, logits = toy.check_step(method, NET, state, SECOND, images, twin)
    # Stored: what the incoming pass of this step gave. Never refreshed.
    found = new.extra.memory.items["logits"]
    np.testing.assert_allclose(found[6:], logits[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[:6], np.float32(stored))
    predict = interpreted.jit(method.predict)
    unseen = np.isneginf(predict(new, toy.parts().eval_transform(FIRST["image"])))
    assert unseen.all(axis=0).tolist() == [False] * 4 + ["ace" in options]


def test_logits_of_the_augmented_image_are_stored_with_the_image_as_it_came():
    made = toy.parts(augment="all")  # every image is mirrored
    method = der.make(made)
    state = toy.fresh(method)
    turned = made.eval_transform(FIRST["image"])[:, :, ::-1]
    expected, _ = NET(state.params, state.stats, turned, train=True)
    memory = toy.step(method, state, FIRST)[0].extra.memory
    np.testing.assert_allclose(
        memory.items["logits"][:6], expected.logits, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(memory.items["image"][:6], FIRST["image"])


def test_of_several_updates_the_last_pass_is_stored():
    method, once = der.make(toy.parts(updates=2)), der.make(toy.parts())
    state = toy.fresh(method)
    halfway, _ = toy.step(once, state, FIRST)
    images = toy.parts().eval_transform(FIRST["image"])
    expected, _ = NET(halfway.params, halfway.stats, images, train=True)
    memory = toy.step(method, state, FIRST)[0].extra.memory
    np.testing.assert_allclose(
        memory.items["logits"][:6], expected.logits, rtol=1e-4, atol=1e-5
    )


def drawn(disjoint, stored, size=4, draws=300):
    """Slots and masks of many pairs of draws, [draws, size] each."""
    made = toy.parts(size=size)
    memory = toy.fresh(der.make(made)).extra.memory
    memory = memory._replace(filled=jnp.arange(12) < stored)  # of its 12 slots

    def one(key):
        rows = der.several(made, memory, key, 2, disjoint=disjoint)
        return [(x.slots, x.mask) for x in rows]

    keys = jax.random.split(jax.random.key(7), draws)
    return jax.tree.map(np.array, jax.jit(jax.vmap(one))(keys))


@pytest.mark.parametrize(("stored", "halves"), [(12, (4, 4)), (5, (3, 2)), (1, (1, 0))])
def test_disjoint_draws_share_no_row_and_each_has_half_of_those_there(stored, halves):
    (a, a_mask), (b, b_mask) = drawn(True, stored)
    assert (a_mask.sum(axis=1) == halves[0]).all()
    assert (b_mask.sum(axis=1) == halves[1]).all()
    both = a_mask[:, :, None] & b_mask[:, None]
    assert not ((a[:, :, None] == b[:, None]) & both).any()
    counts = np.bincount(np.concatenate([a[a_mask], b[b_mask]]), minlength=12)
    assert (counts[stored:] == 0).all()
    expected = 300 * sum(halves) / stored
    assert np.abs(counts[:stored] - expected).max() <= 0.2 * expected


def test_disjoint_steps_train_on_both_halves():
    """Six rows, three to be matched, three to be classified."""
    made = toy.parts(size=3)
    method = der.make(made, beta=0.5, draws="disjoint")
    state = started(method)
    _, k_step = jax.random.split(core.step_key(state))
    _, key = jax.random.split(k_step)
    memory = state.extra.memory
    first, second = der.several(made, memory, key, 2, disjoint=True)
    assert sorted([*first.slots.tolist(), *second.slots.tolist()]) == list(range(6))

    def twin(new, old, again):
        stored = np.asarray(first.items["logits"], np.float64)
        value = toy.cross_entropy(new, SECOND["label"])
        value += 0.1 * ((old - stored) ** 2).mean()
        return value + 0.5 * toy.cross_entropy(again, second.label)

    images = SECOND["image"], first.raw, second.raw
    toy.check_step(method, NET, state, SECOND, images, twin)


def test_the_first_batch_is_plain_training_and_leaves_statistics_of_one_pass():
    method = der.make(toy.parts(), beta=0.5)

    def twin(new):
        return toy.cross_entropy(new, FIRST["label"])

    state = toy.fresh(method)
    toy.check_step(method, NET, state, FIRST, [FIRST["image"]], twin)
