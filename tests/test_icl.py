"""ICL: whole steps in float64 from the equations, its orders, rates and baselines.

The network is a linear layer; the second view is the first one mirrored and squared, so
that nothing is chance.
"""

import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import flatten_util

from helpers import interpreted, twins
from helpers import loss_twins as f64
from jaxcl import core, optim, sharding
from jaxcl.data import stream
from jaxcl.data.augment import graphs as augment_graphs
from jaxcl.data.feed import graph_batches
from jaxcl.data.sources import toys
from jaxcl.data.stream import graph_arrays, scenarios
from jaxcl.losses import incremental
from jaxcl.methods import icl
from jaxcl.methods.icl import orders
from jaxcl.methods.icl import passes as passes_lib
from jaxcl.nets import gcn, layers
from jaxcl.run import job

B, D, SIDE, TAU, LR = 4, 3, 2, 0.25, 1.0
OPTIONS = {"temperature": TAU, "learnt_rate": False}  # of "icl"
RATES = {"low": 1e-3, "high": 0.5, "actor_width": 2, "capacity": 64}


class Flat(nn.Module):
    normed: bool = False
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, *, train, groups=1):
        x = nn.Dense(D, name="linear")(x.reshape(len(x), -1))
        if not self.normed:
            return x
        return layers.BatchNorm(name="norm")(x, train=train, groups=groups)


def parts(
    *, normed=False, augment=lambda key, images: twins.views_of(images), **changes
):
    return core.Parts(
        encoder=Flat(normed),
        augment=augment,
        tx=optim.sgd(momentum=0.0),
        lr=optim.by_task([optim.constant(LR)]),
        num_classes=2,
        batch_size=B,
    )._replace(**changes)


def make(made=None, **options):
    other = options.get("strategy", "icl") != "icl"
    given = {"temperature": TAU} if other else OPTIONS
    return icl.make(parts() if made is None else made, **(given | options))


def task(old=12, new=8, index=1, order=stream.epoch_order):
    """Old rows from 0 on, then new ones; growth is 0.4 of 20."""
    rows = np.arange(old, old + new, dtype=np.int32)
    train = stream.Source(None, rows, order)
    earlier = np.arange(old if index else 0, dtype=np.int32)
    nothing = np.zeros(0, np.int32)
    return stream.Task(index, "made", nothing, -1, train, nothing, earlier)


def batch(seed, *sides):
    rng = np.random.default_rng(seed)
    shape = (*sides, B)
    return {
        "image": rng.integers(0, 256, (*shape, SIDE, SIDE, 1)).astype(np.uint8),
        "label": np.zeros(shape, np.int32),
        "index": np.arange(np.prod(shape), dtype=np.int32).reshape(shape),
    }


def part(given, at):
    return jax.tree.map(lambda x: x[at], given)


@functools.cache
def fresh(normed=False, output_dim=0):
    """What a run begins with; agents are those of RATES, and compile only once."""
    if not normed and not output_dim:
        method = make(agent=RATES)
        return jax.jit(method.init)(jax.random.key(0), batch(0))
    passes = passes_of(parts(normed=normed), "augmented", output_dim, keep=0.0)
    return begun(passes, batch(0))


def passes_of(made, anchors, output_dim, *, keep):
    return passes_lib.Passes(
        encoder=made.encoder,
        head=passes_lib.build_head(output_dim, projector=0),
        judged=True,
        augment=made.augment,
        temperature=TAU,
        with_positive=True,
        keep=keep,
        anchors=anchors,
    )


def begun(passes, given):
    """The same with another network."""
    params, stats = jax.jit(passes.init)(jax.random.key(0), given)
    extra = fresh().extra._replace(
        first=core.copy((params, stats)), teacher=core.copy((params, stats))
    )
    return fresh().replace(params=params, stats=stats, extra=extra)


moved = functools.partial(twins.moved, low=0.1, high=0.6)


def under_way(method, the_task=None, normed=False):
    """A state in a task, its weights not those that the run began with."""
    the_task = task() if the_task is None else the_task
    state = fresh(normed)
    state = state.replace(
        params=moved(state.params, 1),
        stats=moved(state.stats, 2),
        task=jnp.int32(the_task.index),
        task_start=jnp.int32(7),  # no multiple of the steps of a turn
        step=jnp.int32(7),
    )
    return method.begin_task(state, the_task)


@functools.cache
def compiled(method):
    return interpreted.jit(method.step)


def step(method, state, given):
    return compiled(method)(state, given)


# The equations in float64


def numbers(params):
    """All parameters in one row, the bias first."""
    return np.float64(flatten_util.ravel_pytree(params)[0])


def rows_of(theta, given, view):
    """Embeddings f64[b, D] of the examples that there are."""
    images = np.float64(given["image"][np.asarray(given["index"]) >= 0])
    x = twins.views_of(images)[:, view].reshape(len(images), -1)
    return x @ theta[D:].reshape(-1, D) + theta[:D]


def f(a, b):
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return np.exp(a @ b.T / TAU)


def within(theta, given):
    """f+ and E of the batch itself, of each anchor, and K."""
    table = f(rows_of(theta, given, 0), rows_of(theta, given, 1))
    positive = np.diag(table)
    own = (table.sum(axis=1) - positive) / (len(table) - 1)
    return positive, own, len(given["index"]) - 1


def nce_one(theta, given):
    positive, own, k = within(theta, given)
    return -np.mean(np.log(positive / (positive + k * own)))


def across(theta, given, other):
    return f(rows_of(theta, given, 0), rows_of(theta, other, 0)).mean(axis=1)


def nce_two(theta, old, new, growth, keep=0.0):
    positive, e_old, k = within(theta, old)
    ratio = (positive + k * across(theta, old, new)) / (positive + k * e_old)
    change = np.mean(np.log(growth * ratio + 1 - growth))
    return change + keep * nce_one(theta, old)


def nce_new(theta, new, old, growth):
    positive, e_new, k = within(theta, new)
    e = (1 - growth) * across(theta, new, old) + growth * e_new
    return -np.mean(np.log(positive / (positive + k * e)))


def slope(loss, theta, h=1e-5):
    return twins.central_difference(loss, [theta], 0, h)


def adapted(theta, given, steps, growth, rate):
    """Weights after the inner steps, and the losses before each."""
    losses = []
    for i in range(steps):
        old, new = part(given, i), part(given, steps + i)
        loss = functools.partial(nce_two, old=old, new=new, growth=growth)
        losses.append(loss(theta))
        theta = theta - rate * slope(loss, theta)
    return theta, losses


def fell(before, after, rate=LR):
    """The gradient that a step of SGD went down."""
    return (numbers(before.params) - numbers(after.params)) / rate


close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=3e-5)


@pytest.mark.parametrize(
    "steps, second_order, unroll",
    [
        (1, True, True),
        (3, False, False),
        pytest.param(1, False, True, marks=pytest.mark.slow),
        pytest.param(3, False, True, marks=pytest.mark.slow),
        pytest.param(3, True, True, marks=pytest.mark.slow),
        pytest.param(3, True, False, marks=pytest.mark.slow),
    ],
)
def test_a_meta_step_is_the_equation(steps, second_order, unroll):
    inner = LR if steps == 1 else 0.5
    with sharding.compile_target(platform="cpu" if unroll else "any"):
        method = make(
            parts(), inner_steps=steps, second_order=second_order, inner_lr=inner
        )
    state, given = under_way(method), batch(7, 2 * steps + 2)
    after, metrics = step(method, state, given)
    theta, growth = numbers(state.params), 0.4
    there, losses = adapted(theta, given, steps, growth, inner)
    outer = functools.partial(
        nce_new, new=part(given, -2), old=part(given, -1), growth=growth
    )
    first = slope(outer, there)
    second = slope(
        lambda t: outer(adapted(t, given, steps, growth, inner)[0]), theta, h=1e-4
    )
    # Neither order is the other, nor the gradient without any inner step.
    for one, other in itertools.combinations((first, second, slope(outer, theta)), 2):
        assert np.abs(one - other).max() > 1e-3
    expected = second if second_order else first
    close(fell(state, after), expected)
    np.testing.assert_allclose(metrics["loss"], outer(there), rtol=1e-5)
    np.testing.assert_allclose(metrics["inner_loss"], np.mean(losses), rtol=1e-4)
    np.testing.assert_allclose(metrics["inner_lr"], inner, rtol=1e-6)
    moved_by = np.linalg.norm(there - theta) / np.linalg.norm(theta)
    np.testing.assert_allclose(metrics["inner_moved"], moved_by, rtol=1e-3)
    np.testing.assert_allclose(metrics["lr"], LR, rtol=1e-6)
    np.testing.assert_allclose(
        metrics["grad_norm"], np.linalg.norm(expected), rtol=1e-3
    )
    assert metrics["passes"] == 3 * B * (steps + 1)
    assert after.step == state.step + 1
    for name in ("first", "teacher", "growth"):
        chex.assert_trees_all_equal(
            getattr(after.extra, name), getattr(state.extra, name)
        )


@pytest.mark.slow
def test_a_meta_step_takes_the_statistics_of_its_outer_pass():
    made = parts(normed=True)
    method = make(made, inner_steps=1, inner_lr=0.0)
    state = under_way(method, normed=True)
    given = batch(8, 4)
    after = step(method, state, given)[0]
    # Two views, then the old batch, one after another; momentum is 0.9.
    mean = np.asarray(state.stats["encoder"]["norm"]["mean"], np.float64)
    layer = jax.tree.map(np.float64, state.params["encoder"]["linear"])

    def sent(given, view):
        x = twins.views_of(np.float64(given["image"]))[:, view].reshape(B, -1)
        return x @ layer["kernel"] + layer["bias"]

    both = [sent(part(given, -2), view) for view in (0, 1)]
    for rows in (*both, sent(part(given, -1), 0)):
        mean = 0.9 * mean + 0.1 * rows.mean(axis=0)
    np.testing.assert_allclose(after.stats["encoder"]["norm"]["mean"], mean, rtol=1e-4)


def test_old_and_new_anchors_take_turns():
    method = make(meta=False, keep=0.7)
    # Three batches of old rows, two of new ones.
    state, given = under_way(method, task(old=13, new=8)), batch(9, 2)
    growth, theta = 8 / 21, numbers(state.params)
    one, other = part(given, 0), part(given, 1)
    losses = [
        functools.partial(nce_two, old=one, new=other, growth=growth, keep=0.7),
        functools.partial(nce_new, new=one, old=other, growth=growth),
    ]
    assert abs(losses[0](theta) - losses[1](theta)) > 1e-2
    slopes = [slope(loss, theta) for loss in losses]
    found = []
    for done in range(11):
        now = state.replace(step=state.task_start + done)
        after, metrics = step(method, now, given)
        which = int(abs(metrics["loss"] - losses[1](theta)) < 1e-5)
        np.testing.assert_allclose(metrics["loss"], losses[which](theta), rtol=1e-5)
        close(fell(now, after), slopes[which])
        found.append(which)
    assert found == [0, 0, 0, 1, 1] * 2 + [0]
    assert metrics["passes"] == 3 * B


# Learnt rates


def heavy(**changes):
    """With an optimiser that has something to remember."""
    return parts(tx=optim.sgd(momentum=0.9), **changes)


def test_both_agents_set_rates_of_plain_sgd():
    method = make(heavy(), learnt_rate=True, agent=RATES, inner_steps=1)
    state = under_way(method)
    begun, opt_state = int(state.step), moved(state.opt_state, 3)
    state, rates = state.replace(opt_state=opt_state), []
    for seed in (12, 13):
        given = batch(seed, 4)
        after, metrics = step(method, state, given)
        inner, lr = float(metrics["inner_lr"]), float(metrics["lr"])
        theta = numbers(state.params)
        there, losses = adapted(theta, given, 1, 0.4, inner)
        outer = functools.partial(
            nce_new, new=part(given, -2), old=part(given, -1), growth=0.4
        )
        wanted = theta - lr * slope(outer, there)
        np.testing.assert_allclose(numbers(after.params), wanted, rtol=1e-4, atol=3e-6)
        agents = after.extra.agents
        # The single inner step is rewarded by the fall of its own batch's loss.
        ends = nce_two(there, part(given, 0), part(given, 1), 0.4)
        assert abs(losses[0] - ends) > 1e-2 * ends
        stored = jax.tree.map(lambda x, at=seed - 12: x[at], agents["old"].memory.items)
        np.testing.assert_allclose(stored.losses, [losses[0], ends], rtol=1e-4)
        at = (inner - RATES["low"]) / (RATES["high"] - RATES["low"])
        np.testing.assert_allclose(stored.action, at, rtol=1e-4)
        assert stored.known == 1 and not agents["old"].pending
        np.testing.assert_allclose(agents["old"].losses[-1], ends, rtol=1e-4)
        np.testing.assert_allclose(agents["new"].losses[-1], outer(there), rtol=1e-4)
        assert agents["old"].memory.seen == seed - 11
        chex.assert_trees_all_equal(after.opt_state, opt_state)
        state, rates = after, [*rates, inner, lr]
    assert after.step == begun + 2
    assert all(RATES["low"] <= rate <= RATES["high"] for rate in rates)
    assert len(set(rates)) == 4
    old, new = (state.extra.agents[name] for name in ("old", "new"))
    assert old.steps == new.steps == new.count == 2 and new.memory.seen == 1
    assert old.count == 4


@pytest.mark.parametrize(
    "second_order, unroll",
    [(False, False), *(pytest.param(x, True, marks=pytest.mark.slow) for x in (0, 1))],
)
def test_every_inner_action_has_its_reward(second_order, unroll):
    """By the next batch's loss; by that of its own batch if it is the last."""
    with sharding.compile_target(platform="cpu" if unroll else "any"):
        method = make(
            heavy(),
            learnt_rate=True,
            agent=RATES,
            inner_steps=3,
            second_order=bool(second_order),
        )
    state = under_way(method)
    for done in (1, 2):
        given, theta = batch(done, 8), numbers(state.params)
        state, metrics = step(method, state, given)
        old, new = (state.extra.agents[name] for name in ("old", "new"))
        assert (old.steps, old.count, new.steps) == (3 * done, 4 * done, done)
        assert old.memory.seen == 3 * done and new.memory.seen == done - 1
        stored = jax.tree.map(
            lambda x, done=done: np.float64(x[3 * done - 3 : 3 * done]),
            old.memory.items,
        )
        rates = RATES["low"] + (RATES["high"] - RATES["low"]) * stored.action
        np.testing.assert_allclose(metrics["inner_lr"], rates.mean(), rtol=1e-4)
        losses = []
        for i, rate in enumerate(rates):
            sides = {"old": part(given, i), "new": part(given, 3 + i)}
            loss = functools.partial(nce_two, growth=0.4, **sides)
            losses.append(loss(theta))
            theta = theta - rate * slope(loss, theta)
        pairs = np.stack([losses, [*losses[1:], loss(theta)]], axis=1)
        np.testing.assert_allclose(stored.losses, pairs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("meta", [True, False])
def test_a_fixed_rate_is_that_of_plain_sgd(meta):
    """It is that of outer steps; inner ones have a default of their own, 0.03."""
    method = make(heavy(), fixed_lr=0.3, meta=meta)
    state, given = under_way(method), batch(21, 6 if meta else 2)
    opt_state = moved(state.opt_state, 3)
    state = state.replace(opt_state=opt_state)
    after, metrics = step(method, state, given)
    theta = numbers(state.params)
    loss = functools.partial(
        nce_two, old=part(given, 0), new=part(given, 1), growth=0.4
    )
    if meta:
        theta, _ = adapted(theta, given, 2, 0.4, 0.03)
        np.testing.assert_allclose(metrics["inner_lr"], 0.03, rtol=1e-6)
        loss = functools.partial(
            nce_new, new=part(given, -2), old=part(given, -1), growth=0.4
        )
    close(fell(state, after, 0.3), slope(loss, theta))
    np.testing.assert_allclose(metrics["lr"], 0.3, rtol=1e-6)
    # The optimiser remembers nothing of it, and no agent has been asked.
    chex.assert_trees_all_equal(after.opt_state, opt_state)
    chex.assert_trees_all_equal(after.extra, state.extra)
    assert after.step == state.step + 1


def test_one_agent_sets_the_rates_without_meta():
    method = make(heavy(), learnt_rate=True, agent=RATES, meta=False)
    state, given = under_way(method), batch(14, 2)
    before = state
    for done in (0, 1, int(state.extra.old_steps)):  # an old anchor's, a new one's
        state = state.replace(step=state.task_start + done)
        after, metrics = step(method, state, given)
        theta, growth = numbers(state.params), 0.4
        equation = nce_two if done < 2 else nce_new
        loss = functools.partial(equation, growth=growth)
        sides = part(given, 0), part(given, 1)
        slopes = slope(lambda t, loss=loss, sides=sides: loss(t, *sides), theta)
        wanted = theta - float(metrics["lr"]) * slopes
        np.testing.assert_allclose(numbers(after.params), wanted, rtol=1e-4, atol=3e-6)
        assert RATES["low"] <= metrics["lr"] <= RATES["high"]
        state = after
    agents = state.extra.agents
    assert agents["new"].steps == 3 and agents["new"].memory.seen == 2
    chex.assert_trees_all_equal(agents["old"], before.extra.agents["old"])
    chex.assert_trees_all_equal(state.opt_state, before.opt_state)


def test_the_first_task_is_nce_one_by_the_optimiser():
    method = make(learnt_rate=True, agent=RATES)
    state, given = under_way(method, task(index=0)), batch(15)
    assert method.batches_per_step(task(index=0)) == 1
    after, metrics = step(method, state, given)
    theta = numbers(state.params)
    loss = functools.partial(nce_one, given=given)
    np.testing.assert_allclose(metrics["loss"], loss(theta), rtol=1e-5)
    close(fell(state, after), slope(loss, theta))
    np.testing.assert_allclose(metrics["lr"], LR, rtol=1e-6)
    assert metrics["passes"] == 2 * B
    chex.assert_trees_all_equal(after.extra, state.extra)


# What ICL is compared with


@pytest.mark.parametrize("strategy", ["retrain", "continue"])
def test_the_baselines_by_plain_sgd(strategy):
    """After the first task, which is the optimiser's."""
    method, given = make(heavy(), strategy=strategy, fixed_lr=0.3), batch(15)
    loss = functools.partial(nce_one, given=given)
    for index, rate in ((0, LR), (1, 0.3)):
        state = under_way(method, task(index=index))
        state = state.replace(opt_state=moved(state.opt_state, 3))
        after, metrics = step(method, state, given)
        slopes, fallen = slope(loss, numbers(state.params)), fell(state, after, rate)
        np.testing.assert_allclose(metrics["lr"], rate, rtol=1e-6)
        if index:
            close(fallen, slopes)
            chex.assert_trees_all_equal(after.opt_state, state.opt_state)
        else:  # with its momentum
            assert np.abs(fallen - slopes).max() > 0.05


def test_strategies_read_their_rows():
    state, the_task = fresh(), task(old=20, new=5)
    new, every = np.arange(20, 25), np.arange(25)
    for strategy in icl.STRATEGIES:
        share = {"replay_share": 0.3} if strategy == "replay" else {}
        method = make(strategy=strategy, **share)
        first = method.source(state, task(index=0))
        np.testing.assert_array_equal(first.rows, task(index=0).train.rows)
        source = method.source(state, the_task)
        if strategy == "replay":
            assert len(set(source.rows)) == len(source.rows) == 11
            assert set(source.rows) < set(every) and set(new) < set(source.rows)
            again = method.source(state, the_task)
            np.testing.assert_array_equal(source.rows, again.rows)
            # By the key of the state, and by nothing that a step changes.
            other = method.source(state.replace(step=jnp.int32(3)), the_task)
            np.testing.assert_array_equal(source.rows, other.rows)
            other = method.source(state.replace(key=jax.random.key(1)), the_task)
            assert {*source.rows} != {*other.rows}
        else:
            few = strategy in ("finetune", "distill")
            np.testing.assert_array_equal(source.rows, new if few else every)
        assert (source.order is stream.epoch_order) == (strategy != "icl")
        assert method.batches_per_step(task(index=0)) == 1
        assert method.batches_per_step(the_task) == (10 if strategy == "icl" else 1)
    assert make(strategy="icl", inner_steps=2).batches_per_step(the_task) == 6
    assert make(strategy="icl", meta=False).batches_per_step(the_task) == 2
    share = {0.0: 5, 1.0: 25}
    for value, count in share.items():
        method = make(strategy="replay", replay_share=value)
        assert len(method.source(state, the_task).rows) == count


@pytest.mark.parametrize("strategy", icl.STRATEGIES)
def test_a_task_begins_with_its_weights(strategy):
    method = make(heavy(normed=True), strategy=strategy)
    state = fresh(normed=True)
    state = state.replace(
        params=moved(state.params, 1),
        stats=moved(state.stats, 2),
        opt_state=moved(heavy().tx.init(state.params), 3),
    )
    first = method.begin_task(state, task(index=0))
    chex.assert_trees_all_equal(
        (first.params, first.stats), (state.params, state.stats)
    )
    assert first.extra.growth == 0
    later = method.begin_task(state, task(old=13))
    kept = state.extra.first, (state.params, state.stats)
    wanted = kept[0] if strategy in ("retrain", "random") else kept[1]
    chex.assert_trees_all_equal((later.params, later.stats), wanted)
    chex.assert_trees_all_equal(later.extra.teacher, wanted)
    chex.assert_trees_all_equal(later.extra.first, state.extra.first)
    np.testing.assert_allclose(later.extra.growth, 8 / 21, rtol=1e-6)
    # Turns of old and new rows are taken by ICL alone.
    turns = (3, 5) if strategy == "icl" else (0, 1)
    assert (later.extra.old_steps, later.extra.epoch_steps) == turns
    for each in (first, later):
        assert not any(np.any(x) for x in jax.tree.leaves(each.opt_state))
        # Donated, no array may be there twice.
        pointers = [
            x.unsafe_buffer_pointer()
            for x in jax.tree.leaves(
                (each.params, each.stats, each.extra.first, each.extra.teacher)
            )
        ]
        assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("strategy", ["frozen", "random"])
def test_controls_learn_the_first_task_alone(strategy):
    method = make(parts(normed=True), strategy=strategy)
    given = batch(16)
    for index in (0, 1, 2):
        state = under_way(method, task(index=index), normed=True)
        after, metrics = step(method, state, given)
        assert np.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
        assert after.step == state.step + 1
        for old, new in zip(
            jax.tree.leaves((state.params, state.stats)),
            jax.tree.leaves((after.params, after.stats)),
            strict=True,
        ):
            assert np.array_equal(old, new) == (index > 0)


def both_views(theta, given):
    return np.concatenate([rows_of(theta, given, view) for view in (0, 1)])


def test_distillation_holds_to_the_task_before():
    method, given = make(strategy="distill", distill_weight=0.6), batch(17)
    given["index"][1] = -1  # is no example
    for index in (0, 1):
        state = under_way(method, task(index=index))
        past = numbers(state.extra.teacher)
        state = state.replace(params=moved(state.params, 4))

        def loss(theta, index=index, past=past):
            now, then = (both_views(x, given) for x in (theta, past))
            return nce_one(theta, given) + (0.6 * f64.ird(now, then) if index else 0.0)

        after, metrics = step(method, state, given)
        theta = numbers(state.params)
        np.testing.assert_allclose(metrics["loss"], loss(theta), rtol=1e-5)
        close(fell(state, after), slope(loss, theta))


def test_the_teacher_sees_the_same_views():
    seen = []

    def augment(key, images):
        views = jax.random.uniform(key, (len(images), 2, SIDE, SIDE, 1))
        jax.debug.callback(lambda x: seen.append(np.array(x)), views)
        return views

    method = make(parts(augment=augment), strategy="distill")
    jax.block_until_ready(step(method, under_way(method), batch(18)))
    jax.effects_barrier()
    assert len(seen) == 2
    np.testing.assert_array_equal(*seen)


def test_the_teacher_is_in_evaluation_mode():
    method = make(parts(normed=True), strategy="distill")
    state, given = under_way(method, normed=True), batch(19)
    teacher, stats = state.extra.teacher
    losses = []
    for there in (stats, moved(stats, 5)):
        extra = state.extra._replace(teacher=(teacher, there))
        losses.append(step(method, state.replace(extra=extra), given)[1]["loss"])
    assert abs(losses[0] - losses[1]) > 1e-3


def test_what_is_evaluated():
    method, given = make(parts(normed=True), output_dim=2), batch(20)
    state = fresh(normed=True, output_dim=2)
    state = state.replace(params=moved(state.params, 1), stats=moved(state.stats, 2))
    images = twins.views_of(np.float64(given["image"]))[:, 0]
    tree = jax.tree.map(np.float64, (state.params, state.stats["encoder"]["norm"]))
    params, kept = tree
    layer = params["encoder"]["linear"]
    bn = params["encoder"]["norm"]
    head = params["head"]["linear1"]
    x = images.reshape(B, -1) @ layer["kernel"] + layer["bias"]
    x = (x - kept["mean"]) / np.sqrt(kept["var"] + 1e-5) * bn["scale"] + bn["bias"]
    wanted = x @ head["kernel"] + head["bias"]
    found = method.embed(state, jnp.float32(images))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    # The objective is what a plain step lowers.
    value = method.objective(state, jax.random.key(1), given)
    loss = step(method, method.begin_task(state, task(index=0)), given)[1]["loss"]
    np.testing.assert_allclose(value, loss, rtol=1e-5)


def test_graphcl_leaves_the_positive_out_and_the_projector_unjudged():
    made = parts()
    method = make(made, strategy="retrain", with_positive=False, projector=5)
    given = batch(22)
    given["index"][2] = -1  # is no example; K is that of four
    state = jax.jit(method.init)(jax.random.key(0), batch(0))
    state = state.replace(params=moved(state.params, 1))
    state = method.begin_task(state, task(index=0))
    layers = state.params["head"]
    assert [layers[f"linear{i}"]["kernel"].shape for i in (1, 2)] == [(D, 5), (5, 5)]
    unravel = flatten_util.ravel_pytree(state.params)[1]
    real = np.asarray(given["index"]) >= 0

    def loss(theta):
        tree = jax.tree.map(np.float64, unravel(jnp.float64(theta)))
        layer, head = tree["encoder"]["linear"], tree["head"]
        views = []
        for view in (0, 1):
            x = twins.views_of(np.float64(given["image"][real]))[:, view].reshape(3, -1)
            x = x @ layer["kernel"] + layer["bias"]
            x = x @ head["linear1"]["kernel"] + head["linear1"]["bias"]
            x = np.maximum(x, 0) @ head["linear2"]["kernel"]
            views.append(x + head["linear2"]["bias"])
        table = f(*views)
        positive = np.diag(table)
        own = (table.sum(axis=1) - positive) / 2
        return -np.mean(np.log(positive / (3 * own)))

    after, metrics = step(method, state, given)
    with jax.enable_x64(True):
        theta = np.float64(flatten_util.ravel_pytree(state.params)[0])
        np.testing.assert_allclose(metrics["loss"], loss(theta), rtol=1e-4)
        wanted = slope(loss, theta)
    close(theta - np.float64(flatten_util.ravel_pytree(after.params)[0]), wanted)
    images = jnp.float32(twins.views_of(np.float64(given["image"]))[:, 0])
    plain = icl.make(made).embed(state, images)
    assert plain.shape == (B, D)
    np.testing.assert_array_equal(method.embed(state, images), plain)


# Orders


def sides_of(order, count):
    """i32[steps, P, B] as the feed cuts them, place P i + p being row i of part p."""
    return np.stack([job._side_by_side(rows, count) for rows in order])


def test_inner_steps_are_those_of_the_paper():
    found = [orders.inner_steps(x) for x in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)]
    assert found == [9, 4, 3, 1, 1, 1]
    assert orders.inner_steps(orders.growth(task(old=12, new=8))) == 2
    method = make(strategy="icl")
    for old, new, steps in ((12, 8, 2), (7, 6, 1), (23, 11, 2), (16, 5, 3), (18, 5, 4)):
        assert method.batches_per_step(task(old=old, new=new)) == 2 * steps + 2, (
            old,
            new,
        )


def test_an_order_with_meta():
    the_task = task(old=23, new=11)
    old, new = set(range(23)), set(range(23, 34))
    order = functools.partial(orders.meta_epoch, task=the_task, steps=2)
    made = order(np.random.default_rng(0), None, 6 * B)
    # 11 new rows are two batches and three that stay out.
    assert made.shape == (2, 6 * B)
    sides = sides_of(made, 6)
    np.testing.assert_array_equal(made[1, 2::6], sides[1, 2])
    anchors = sides[:, 4].ravel()
    assert len(set(anchors)) == 8 and set(anchors) <= new
    stored = sides[:, [0, 1, 5]].reshape(6, B)
    assert set(stored.ravel()) <= old
    # Five batches of 23 rows are an epoch, the sixth is of the next.
    assert len(set(stored[:5].ravel())) == 20
    beside = sides[:, 2:4].reshape(4, B)
    assert set(beside.ravel()) <= new
    for epoch in (beside[:2], beside[2:]):
        assert len(set(epoch.ravel())) == 8
    again = order(np.random.default_rng(0), None, 6 * B)
    np.testing.assert_array_equal(made, again)
    assert (order(np.random.default_rng(1), None, 6 * B) != made).any()


def test_an_order_without_meta():
    the_task = task(old=13, new=9)
    old, new = set(range(13)), set(range(13, 22))
    order = functools.partial(orders.alternating_epoch, task=the_task)
    made = order(np.random.default_rng(0), None, 2 * B)
    assert made.shape == (5, 2 * B)
    sides = sides_of(made, 2)
    for first, last, own, other in ((0, 3, old, new), (3, 5, new, old)):
        anchors, beside = (sides[first:last, i].ravel() for i in (0, 1))
        assert len(set(anchors)) == len(anchors) and set(anchors) <= own
        assert set(beside) <= other
    # What is beside the anchors goes through shuffled epochs, too.
    assert len(set(sides[:2, 1].ravel())) == len(set(sides[3:, 1].ravel())) == 8
    np.testing.assert_array_equal(made, order(np.random.default_rng(0), None, 2 * B))
    assert (order(np.random.default_rng(1), None, 2 * B) != made).any()
    # The steps are as many as a task is told.
    extra = make(meta=False).begin_task(fresh(), the_task).extra
    assert (extra.old_steps, extra.epoch_steps) == (3, 5)


@pytest.mark.parametrize("old, new, few", [(12, 3, 3), (2, 8, 2)])
def test_too_few_rows_are_refused(old, new, few):
    the_task, rng = task(old=old, new=new), np.random.default_rng(0)
    message = rf"config\.batch_size=4: task 1 has only {few} old or new rows"
    for fails in (
        lambda: orders.meta_epoch(rng, None, 4 * B, task=the_task, steps=1),
        lambda: orders.alternating_epoch(rng, None, 2 * B, task=the_task),
        lambda: make().begin_task(fresh(), the_task),
    ):
        with pytest.raises(ValueError, match=message):
            fails()


# Graphs


SET = toys.rings_and_trees(count=15, nodes=(4, 6))
ROWS = np.array([3, 8, 1, 12, -1, -1], np.int32)


def shaken(key, given):
    """Noise on the features that only the place in the batch decides."""
    keys = graph_arrays.node_keys(key, given)
    noise = jax.vmap(lambda k: jax.random.normal(k, given.features.shape[1:]))(keys)
    return given._replace(features=given.features + 0.5 * noise)


def graph_parts(augment=shaken, **options):
    return core.Parts(
        encoder=gcn.GCN(width=3, layers=1, **options),
        augment=augment,
        tx=optim.sgd(momentum=0.0),
        lr=optim.by_task([optim.constant(LR)]),
        num_classes=2,
        batch_size=B,
    )


@functools.cache
def graph_task():
    made = scenarios.make(SET, name="growth", growth=0.4, evaluation="none")
    return made.tasks[1]


# As in a config, and two with a cheap augmentation.
GRAPHS = {
    "icl": {"agent": RATES, "learnt_rate": True, "inner_steps": 2},
    "no_both": {"meta": False},
    "retrain": {"strategy": "retrain", "anchors": "original"},
}
ROWS_OF = [pytest.param(n, marks=[pytest.mark.slow] * (n != "retrain")) for n in GRAPHS]


@pytest.mark.parametrize("name", ROWS_OF)
def test_a_step_of_graphs(name):
    made = graph_parts(augment_graphs.make() if name == "icl" else shaken)
    method = make(made, **GRAPHS[name])
    the_task, blank = graph_task(), graph_batches.blank_batch(SET.train, 1)
    if name == "icl":
        state = jax.jit(method.init)(jax.random.key(0), blank)
    else:
        state = begun(graph_passes("augmented", 0, 0.5), blank)
    source, count = method.source(state, the_task), method.batches_per_step(the_task)
    feed = graph_batches.batches(
        source, seed=0, task=1, epochs=1, batch_size=B, num_batches=count
    )
    # The last one has fewer graphs.
    given = [each for each in feed if (each["index"] < 0).any()][-1]
    assert given["index"].shape == ((count, B) if count > 1 else (B,))
    state = method.begin_task(state.replace(task=jnp.int32(1)), the_task)
    after, metrics = step(method, state, given)
    chex.assert_tree_all_finite((after.params, after.stats, metrics))
    assert np.abs(numbers(after.params) - numbers(state.params)).max() > 1e-4
    if name == "icl":
        assert after.extra.agents["old"].steps == 2
    # Room for more nodes and edges changes nothing.
    room = given["graph"].features.shape[-2] + 7, given["graph"].senders.shape[-1] + 9
    rows = np.atleast_2d(given["index"])
    padded = graph_arrays.pad_batches(
        SET.train.graphs, rows, (graph_arrays.Budget(*room, B),)
    )
    if count == 1:
        padded = part(padded, 0)
    again, more = step(method, state, given | {"graph": padded})
    np.testing.assert_allclose(more["loss"], metrics["loss"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        numbers(again.params), numbers(after.params), rtol=1e-4, atol=1e-5
    )


@functools.cache
def graph_passes(anchors, output_dim=2, dropout=0.0):
    made = graph_parts(dropout=dropout)
    return passes_of(made, anchors, output_dim, keep=0.3)


def graph_part(rows):
    return graph_batches._padded(
        SET.train, rows[None], (graph_arrays.Budget(64, 128, len(rows)),), False
    )


def test_empty_slots_are_no_anchors_and_no_negatives():
    """Of six slots two are empty; K is that of six."""
    passes, growth, key = graph_passes("augmented"), 0.3, jax.random.key(3)
    params, stats = passes.init(jax.random.key(0), graph_part(ROWS))
    other = np.array([5, -1, 7, 0, 2, -1], np.int32)
    k_part, _ = jax.random.split(key)

    @jax.jit
    def losses(part, more):
        old, new, after = passes.incremental_losses(
            params, stats, key, part, more, growth
        )
        return old(), new(), passes.plain_loss(params, stats, k_part, part)[0], after

    @jax.jit
    def rows(part, more):
        own = passes.pairs(params, stats, k_part, part)[:2]
        return *own, passes.network(params, stats, key, more["graph"], train=True)[0]

    found = losses(graph_part(ROWS), graph_part(other))
    # The others are not augmented.
    a, p, n = rows(graph_part(ROWS[:4]), graph_part(other[other >= 0]))
    assert a.shape == (4, 2) and not np.allclose(a, p, rtol=1e-2)
    given = {"temperature": TAU, "num_negatives": 5}
    own = incremental.others(4)
    plain = incremental.nce_one(a, p, p, negative_mask=own, **given)
    old = incremental.nce_two(a, p, p, n, growth=growth, old_mask=own, **given)
    new = incremental.nce_one(
        a, p, n, more_negatives=p, more_mask=own, growth=growth, **given
    )
    wanted = old + 0.3 * plain, new, plain
    np.testing.assert_allclose(found[:3], wanted, rtol=1e-4)
    # Three passes of batch norm.
    before, after = stats["encoder"]["bn1"]["mean"], found[3]["encoder"]["bn1"]["mean"]
    assert np.abs(before - after).max() > 1e-4


UNREAD = [
    ({"strategy": "retrain"}, {"meta": False}),
    ({"strategy": "finetune"}, {"keep": 1.0}),
    ({"meta": False}, {"inner_steps": 2}),
    ({"meta": False, "learnt_rate": False}, {"inner_lr": 0.1}),
    ({}, {"inner_lr": 0.1}),
    ({"strategy": "replay"}, {"distill_weight": 0.5}),
]


@pytest.mark.parametrize(("variant", "unread"), UNREAD)
def test_an_option_that_a_variant_does_not_read_is_refused(variant, unread):
    ((name, value),) = unread.items()
    made = parts()
    icl.make(made, **variant)
    with pytest.raises(ValueError) as refused:
        icl.make(made, **variant, **unread)
    assert f"config.method.{name}={value}" in str(refused.value)


def test_theorem_3_holds_in_training():
    """NCE-II with `keep` 1 comes where `continue` does; without it, elsewhere."""
    made = parts(
        augment=lambda key, images: twins.views_of(images)[:, :1].repeat(2, axis=1)
    )
    given = batch(23)
    rows = [part(given, np.array(side)) for side in ([0, 1, 2, 3], [2, 3, 0, 1])]
    for each in rows:  # two old and two new items, both sets whole
        each["index"] = np.array([0, 1, -1, -1], np.int32)
    sides = [jax.tree.map(lambda *x: np.stack(x), *pair) for pair in (rows, rows[::-1])]

    def trained(rate, **options):
        method = make(made, fixed_lr=rate, **options)
        state = start = under_way(method)
        turns = options.get("strategy") is None
        for _ in range(60):
            for turn, side in enumerate(sides if turns else [given]):
                # An anchor's own item is left out: 2 of 3 others are new, or 1 of 3.
                extra = state.extra._replace(
                    growth=jnp.float32((2 - turn) / 3),
                    old_steps=jnp.int32(1),
                    epoch_steps=jnp.int32(2),
                )
                state = state.replace(extra=extra) if turns else state
                state, _ = step(method, state, side)
        return numbers(start.params), numbers(state.params)

    # Two steps down half of the loss each, or one down the whole of it.
    _, kept = trained(0.01, meta=False, keep=1.0)
    _, alone = trained(0.01, meta=False)
    start, wanted = trained(0.02, strategy="continue")
    way = np.linalg.norm(wanted - start)
    assert way > 0.05
    assert np.linalg.norm(kept - wanted) < 0.02 * way
    assert np.linalg.norm(alone - wanted) > 0.5 * way
