"""What online methods share, and ER, ER-ACE, ER-AML on it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import interpreted, tiny
from helpers import online_toy as toy
from jaxcl import core, optim, sharding
from jaxcl.methods import er, er_ace, er_aml, finetune, online
from jaxcl.nets import resnet

FIRST, SECOND, parts = toy.FIRST, toy.SECOND, toy.parts
LINEAR, COSINE = (online.build_network(parts(), head) for head in ("linear", "cosine"))


def started(method, task=1):
    """A state whose memory holds FIRST, of task 0, at the start of `task`."""
    state, _ = toy.step(method, toy.fresh(method), FIRST)
    return state.replace(task=jnp.int32(task))


@functools.cache
def plain_er():
    """One method, and its programs, for all that ask for a memory alone."""
    return er.make(parts())


def rows_of(images, labels, mask):
    return online.Rows(images, labels, mask, images)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("draws", [1, 2])
def test_together_is_a_pass_each_and_none_replayed_leaves_statistics(platform, draws):
    """Where it is one pass of all, their rows in turn, up to rounding."""
    made = parts(resnet.conv_net(width=2))
    net = online.build_network(made, "linear")
    one, two = made.eval_transform(FIRST["image"]), made.eval_transform(SECOND["image"])
    images = [one, two, (one + two) / 2][: 1 + draws]
    params, stats = jax.jit(net.init)(jax.random.key(0), one)
    rows = [rows_of(batch, FIRST["label"], jnp.ones(6, bool)) for batch in images]
    together = interpreted.jit(net.pass_together)
    with sharding.compile_target(platform=platform):
        text = str(jax.make_jaxpr(net.pass_together)(params, stats, *rows))
        passes = len(rows) if platform == "cpu" else 1
        assert text.count("conv_general_dilated[") == 3 * passes
        outputs, after = together(params, stats, *rows)
    one_pass = interpreted.jit(functools.partial(net.__call__, train=True))
    expected, along = [], [stats]
    for batch in images:
        output, stats_after = one_pass(params, along[-1], batch)
        expected.append(output)
        along.append(stats_after)
    ulp = float(np.finfo("float32").eps)  # of logits near 1
    exact = {"atol": 2 * ulp} if platform == "cpu" else {"rtol": 1e-5, "atol": 1e-6}
    chex.assert_trees_all_close(([*outputs], after), (expected, along[-1]), **exact)
    # Of the last draws none may exist; then the statistics are those before them.
    for empty in range(1, len(rows)):
        nobody = [own._replace(mask=jnp.zeros(6, bool)) for own in rows[-empty:]]
        _, after = together(params, stats, *rows[:-empty], *nobody)
        chex.assert_trees_all_close(after, along[-1 - empty], **exact)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_answers_are_those_of_each_part_by_itself(platform, train):
    made = parts(resnet.conv_net(width=2))
    net = online.build_network(made, "linear")
    one, two = made.eval_transform(FIRST["image"]), made.eval_transform(SECOND["image"])
    params, stats = jax.jit(net.init)(jax.random.key(0), one)
    # Running statistics that are not those of a start.
    stats = interpreted.jit(functools.partial(net, train=True))(params, stats, one)[1]
    rows = [rows_of(images, FIRST["label"], None) for images in (one, two)]
    answers = functools.partial(net.compute_logits, train=train)
    with sharding.compile_target(platform=platform):
        text = str(jax.make_jaxpr(answers)(params, stats, *rows))
        assert text.count("conv_general_dilated[") == (6 if platform == "cpu" else 3)
        found = interpreted.jit(answers)(params, stats, *rows)
    alone = interpreted.jit(functools.partial(net, train=train))
    expected = [alone(params, stats, images)[0].logits for images in (one, two)]
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_draws_repeat_rows_that_exist_and_take_allowed_ones():
    made = parts(size=6)
    memory = started(plain_er()).extra.memory
    allowed = jnp.arange(12) < 2
    draw = jax.jit(functools.partial(online.draw_rows, made, key=jax.random.key(1)))
    rows = draw(memory, allowed=allowed)
    np.testing.assert_array_equal(rows.mask, [True] * 2 + [False] * 4)
    assert sorted(np.array(rows.slots[:2])) == [0, 1]
    raw = np.array(rows.raw)
    for i in range(6):  # 0, 1, 0, 1, ..
        np.testing.assert_array_equal(raw[i], raw[i % 2])
        assert rows.label[i] == rows.label[i % 2]
    np.testing.assert_allclose(
        rows.images, made.eval_transform(rows.raw), rtol=1e-5, atol=1e-6
    )
    turned = made._replace(replay=made.replay._replace(augment="replay"))
    draw = jax.jit(
        functools.partial(online.draw_rows, turned, key=jax.random.key(1)),
        static_argnames="augment",
    )
    flipped, plain = draw(memory).images, draw(memory, augment=False).images
    np.testing.assert_allclose(flipped, plain[:, :, ::-1], rtol=1e-5)
    empty = memory._replace(filled=jnp.zeros(12, bool))
    assert not draw(empty).mask.any()


def test_er_is_the_sum_of_two_means():
    def twin(new, old):
        value = toy.cross_entropy(new, SECOND["label"])
        return value + toy.cross_entropy(old, FIRST["label"])

    images = SECOND["image"], FIRST["image"]
    toy.check_step(plain_er(), LINEAR, started(plain_er()), SECOND, images, twin)


@pytest.mark.parametrize("unseen", ["compete", "absent"])
def test_joint_er_is_one_mean_over_one_pass(unseen):
    method = er.make(parts(), passes="joint", unseen=unseen, replay_from="all")
    rows = jax.tree.map(lambda *x: jnp.concatenate(x), SECOND, FIRST)
    classes = None if unseen == "compete" else [0, 1, 2, 3]

    def twin(logits):
        return toy.cross_entropy(logits, rows["label"], classes)

    images = [rows["image"]]
    new, _ = toy.check_step(method, LINEAR, started(method), SECOND, images, twin)
    unmet = np.isinf(
        interpreted.jit(method.predict)(new, parts().eval_transform(SECOND["image"]))
    )[0]
    np.testing.assert_array_equal(unmet, [False] * 4 + [unseen == "absent"])


def test_joint_er_is_fine_tuning_while_the_memory_is_empty():
    """Nothing that fills the shape counts, in the loss or in the statistics."""
    method = er.make(parts(), passes="joint", replay_from="past_tasks")

    def twin(logits):
        return toy.cross_entropy(logits[:6], SECOND["label"])

    images = [jnp.tile(SECOND["image"], (2, 1, 1, 1))]
    toy.check_step(method, LINEAR, started(method, task=0), SECOND, images, twin)


@pytest.mark.parametrize("replay_from", ["past_tasks", "all", "other_classes"])
def test_er_replays_what_it_may(replay_from):
    state = started(plain_er(), task=0)  # the memory is of the present task
    incoming = online.Rows(None, jnp.array([0, 0, 2]), None, None)
    allowed = np.array(online.replayable(replay_from, state, incoming))
    filled = np.array(state.extra.memory.filled)
    labels = np.array(state.extra.memory.items["label"])
    expected = {
        "past_tasks": np.zeros(12, bool),
        "all": filled,
        "other_classes": filled & (labels == 1),
    }[replay_from]
    np.testing.assert_array_equal(allowed & filled, expected)
    later = state.replace(task=jnp.int32(1))
    if replay_from == "past_tasks":
        allowed = np.array(online.replayable(replay_from, later, incoming))
        np.testing.assert_array_equal(allowed & filled, filled)
    with pytest.raises(ValueError, match="replay_from='some'"):
        er.make(parts(), replay_from="some")


@pytest.mark.parametrize("form", ["paper", "code"])
def test_er_ace_masks_each_part_by_itself(form):
    method = er_ace.make(parts(), form=form)
    present, seen = ([2, 3], [0, 1, 2, 3]) if form == "paper" else ([2, 3, 4], None)

    def twin(new, old):
        value = toy.cross_entropy(new, SECOND["label"], present)
        return value + toy.cross_entropy(old, FIRST["label"], seen)

    images = SECOND["image"], FIRST["image"]
    new, _ = toy.check_step(method, COSINE, started(method), SECOND, images, twin)
    np.testing.assert_array_equal(new.extra.seen, [True] * 4 + [False])
    logits = interpreted.jit(method.predict)(
        new, parts().eval_transform(FIRST["image"])
    )
    unseen = np.isneginf(np.array(logits)).all(axis=0)
    np.testing.assert_array_equal(unseen, [False] * 4 + [form == "paper"])


def test_er_ace_finds_the_class_seen_last_in_any_order():
    """Tasks {3, 4}, {0, 1}: in the second class 1 competes, 4 no longer does."""
    method = er_ace.make(parts(), form="code")
    state, labels = toy.fresh(method), [[3, 4, 4, 3, 3, 4], [0, 1, 0, 0, 1, 1]]
    for task, rows in enumerate((FIRST, SECOND)):
        rows = rows | {"label": jnp.array(labels[task])}
        memory = state.extra.memory  # in the end that of one batch, all of it drawn
        state, _ = toy.step(method, state.replace(task=jnp.int32(task)), rows)
    state = state.replace(extra=state.extra._replace(memory=memory))
    np.testing.assert_array_equal(state.extra.task_of, [1, 1, -1, 0, 0])
    incoming = SECOND | {"label": jnp.zeros(6, jnp.int32)}

    def twin(new, old):
        value = toy.cross_entropy(new, incoming["label"], [0, 1, 2])
        return value + toy.cross_entropy(old, labels[0])

    images = SECOND["image"], FIRST["image"]
    toy.check_step(method, COSINE, state, incoming, images, twin)


def test_a_batch_is_written_after_its_updates():
    method = er_ace.make(parts(updates=2))
    init, step = toy.compiled(method)
    state, metrics = step(init(jax.random.key(0), FIRST), FIRST)
    memory = state.extra.memory
    assert int(memory.seen) == 6 and int(memory.filled.sum()) == 6
    np.testing.assert_array_equal(memory.items["image"][:6], FIRST["image"])
    np.testing.assert_array_equal(memory.items["label"][:6], FIRST["label"])
    state, _ = step(state.replace(task=jnp.int32(4)), SECOND)
    np.testing.assert_array_equal(state.extra.memory.items["task"], [0] * 6 + [4] * 6)
    assert int(state.step) == 2


def test_updates_descend_again_on_the_same_batch():
    """Fine-tuning has no draws: two updates are two steps on the batch."""
    once, twice = (finetune.make(parts(updates=n)) for n in (1, 2))
    init, step = toy.compiled(once)
    state = init(jax.random.key(0), FIRST)
    expected = core.copy(state)
    for _ in range(2):
        expected, _ = step(expected, FIRST)
    found, _ = toy.compiled(twice)[1](state, FIRST)
    chex.assert_trees_all_close(found.params, expected.params, rtol=1e-5, atol=1e-7)
    assert int(found.step) == 1 and state.extra.memory is None


def test_a_step_is_a_batch_and_the_optimizer_counts_its_updates():
    """So schedules, rows of metrics and pictures speak of batches."""
    tx = optim.adam()
    init, step = toy.compiled(finetune.make(parts(updates=3)._replace(tx=tx)))
    state = init(jax.random.key(0), FIRST)
    for _ in range(2):
        state, _ = step(state, FIRST)
    assert int(state.step) == 2
    assert int(optax.tree.get(state.opt_state, "count")) == 6


def test_iidpp_adds_the_mean_of_a_second_batch():
    method = finetune.make(parts(), double=True)
    both = FIRST | {"labelled": SECOND}
    state = jax.jit(method.init)(jax.random.key(0), both)

    def twin(one, two):
        value = toy.cross_entropy(one, FIRST["label"])
        return value + toy.cross_entropy(two, SECOND["label"])

    images = FIRST["image"], SECOND["image"]
    toy.check_step(method, LINEAR, state, both, images, twin)
    assert method.labelled and not finetune.make(parts()).labelled


def drawn_pairs(labels, memory_labels, filled, negatives, draws=4000):
    """Rows and validity of many independent picks."""
    keys = jax.random.split(jax.random.key(0), draws)
    arrays = (jnp.array(x) for x in (labels, memory_labels, filled))
    pick = functools.partial(er_aml.pick_pairs, negatives=negatives)
    return jax.jit(jax.vmap(pick, (0, None, None, None)))(keys, *arrays)


@pytest.mark.parametrize("negatives", ["incoming", "all"])
def test_picks_are_uniform_over_what_is_allowed(negatives):
    labels = np.array([2, 3, 2, 4])
    memory_labels = np.array([0, 2, 3, 1, 2, 0])  # the last two slots are empty
    filled = np.array([True] * 4 + [False] * 2)
    found = drawn_pairs(labels, memory_labels, filled, negatives)
    pool = np.concatenate([memory_labels, labels])
    there = np.concatenate([filled, np.ones(4, bool)])
    for i, label in enumerate(labels):
        same = np.flatnonzero(there & (pool == label))
        positive = [j for j in same if j != 6 + i]
        near = np.isin(pool, labels) if negatives == "incoming" else True
        negative = np.flatnonzero(there & (pool != label) & near)
        assert bool(found.valid[0, i]) == (len(positive) > 0)
        for column, allowed in ((0, positive), (1, negative)):
            rows = np.array(found.rows[:, i, column])
            if not len(allowed):
                assert (rows == 6 + i).all()
                continue
            counts = np.bincount(rows, minlength=10)
            assert counts[list(allowed)].sum() == len(rows)
            expected = len(rows) / len(allowed)
            assert (abs(counts[list(allowed)] - expected) < 5 * expected**0.5).all()
        np.testing.assert_array_equal(
            found.negative_label[:, i], pool[found.rows[:, i, 1]]
        )


@pytest.mark.parametrize("form", ["paper", "code"])
def test_er_aml_pulls_pairs_and_replays_all_classes_seen(form):
    made = parts()
    method = er_aml.make(made, form=form)
    net = online.build_network(made, "cosine")
    state = started(method)
    # The same draws as the step's.
    k_write, k_batch = jax.random.split(core.step_key(state), 2)
    _, k_update = jax.random.split(k_batch)
    _, k_pick, _ = jax.random.split(k_update, 3)
    memory = state.extra.memory
    picked = er_aml.pick_pairs(
        k_pick, SECOND["label"], memory.items["label"], memory.filled
    )
    raw = jnp.concatenate([memory.items["image"], SECOND["image"]])
    pairs = made.eval_transform(raw[picked.rows.reshape(-1)])

    def loss(params):
        new, stats = net(
            params, state.stats, made.eval_transform(SECOND["image"]), train=True
        )
        pair, stats = net(params, stats, pairs, train=True)
        old, stats = net(params, stats, made.eval_transform(FIRST["image"]), train=True)
        a, p, n = (
            x / jnp.linalg.norm(x, axis=1, keepdims=True)
            for x in (new.features, pair.features[::2], pair.features[1::2])
        )
        near, far = (
            1 - (a * x).sum(axis=1)
            if form == "paper"
            else jnp.linalg.norm(a - x, axis=1)
            for x in (p, n)
        )
        pull = jnp.maximum(near - far + 0.2, 0).mean()
        met = old.logits[:, : 4 if form == "paper" else 5]
        chances = jax.nn.log_softmax(met)[jnp.arange(6), FIRST["label"]]
        return 2 * pull - chances.mean(), stats

    new, _ = toy.compiled(method)[1](core.copy(state), SECOND)
    grads, stats = interpreted.jit(jax.grad(loss, has_aux=True))(state.params)
    params, grads = jax.device_get((state.params, grads))
    expected = jax.tree.map(lambda p, g: p - toy.LR * g, params, grads)
    chex.assert_trees_all_close(new.params, expected, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(new.stats, stats, rtol=1e-5, atol=1e-6)


def test_er_aml_code_learns_the_first_task_plainly():
    """Of incoming rows alone, the running statistics too, whatever is stored."""
    method = er_aml.make(tiny.make_parts(), form="code", head="linear")
    tiny.check_descent(method, tiny.start(3, [0, 1, 2, 3, 2], task=0), tiny.incoming(3))
