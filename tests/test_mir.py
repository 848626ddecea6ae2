"""MIR against float64 twins of its step."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twins

from jaxcl import core, optim
from jaxcl.memory import buffer, sharded
from jaxcl.methods import er, mir, online, online_replay

CLASSES, LR, MOMENTUM = 4, 0.7, 0.5
NEW = [2, 3, 2, 2]  # labels of the incoming rows, of task 1
OLD = [0, 1, 0, 1, 1, 0, 0, 1, 3, 2]  # of the memory; the last two are of task 1


class Tiny(nn.Module):
    """A layer and a batch norm, so that whose statistics are used shows."""

    @nn.compact
    def __call__(self, x, *, train, groups=1):
        x = nn.Dense(3, use_bias=False)(x.reshape(len(x), -1))
        return nn.BatchNorm(
            use_running_average=not train,
            momentum=MOMENTUM,
            use_scale=False,
            use_bias=False,
        )(x)


def plain(images):
    return images.astype(jnp.float32) / 128 - 1


def moved(images):
    """An augmentation that shows, of u8 or of numbers already."""
    return jnp.float32(1.5) * images[:, ::-1] + 0.25


def make_parts(**replay):
    return core.Parts(
        encoder=Tiny(),
        augment=lambda key, images: moved(plain(images))[:, None],
        plain=plain,
        tx=optim.sgd(momentum=0.0),
        lr=optim.by_task([optim.constant(LR)]),
        num_classes=CLASSES,
        replay=online_replay.settings(CLASSES, len(NEW), **{"capacity": 10, **replay}),
        num_tasks=2,
    )


def pixels(seed, count):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 2, 2, 1)).astype(np.uint8)


def incoming(seed, labels=NEW):
    label = jnp.array(labels, jnp.int32)
    return {"image": jnp.array(pixels(seed, len(labels))), "label": label}


@functools.cache
def begin(capacity):
    """ER's `init`, one program for the methods that keep no more than it does."""
    return jax.jit(er.make(make_parts(capacity=capacity)).init)


def start(seed, labels, *, capacity=10, task=1):
    """A state of the second task whose memory holds rows of `labels`, in order."""
    state = begin(capacity)(jax.random.key(seed), incoming(0))
    rng, stored = np.random.default_rng(seed + 50), len(labels)
    label = jnp.array(np.pad(np.int32(labels), (0, capacity - stored)))
    images = pixels(seed + 100, capacity)
    images[stored:] = 0
    memory = buffer.Buffer(
        items={"image": jnp.array(images), "label": label, "task": label // 2},
        filled=jnp.arange(capacity) < stored,
        seen=jnp.int32(stored),
    )
    stats = jax.tree.map(
        lambda x: x + jnp.float32(rng.uniform(0.2, 1, x.shape)), state.stats
    )
    extra = state.extra._replace(memory=memory)
    return state.replace(extra=extra, stats=stats, task=jnp.int32(task))


# The twin: numpy in float64. Parameters are [layer, head's weight, head's bias].


def arrays(state_params):
    layer = state_params["encoder"]["Dense_0"]["kernel"]
    head = state_params["head"]
    return [np.float64(x) for x in (layer, head["weight"], head["bias"])]


def raw(images):
    return np.float64(images).reshape(len(images), -1) / 128 - 1


def augmented(x):
    grid = x.reshape(len(x), 2, 2, 1)
    return 1.5 * grid[:, ::-1].reshape(len(x), -1) + 0.25


def normed(layer, x, stats=None):
    f = x @ layer
    mean, variance = (f.mean(0), f.var(0)) if stats is None else stats
    return (f - mean) / np.sqrt(variance + 1e-5)


def row_losses(params, x, label):
    layer, weight, bias = params
    z = normed(layer, x) @ weight.T + bias
    return np.log(np.exp(z).sum(1)) - z[np.arange(len(x)), label]


def slope(params, x, label, count=None):
    """Gradient of the mean loss of the first `count` rows."""

    def loss(*params):
        return row_losses(params, x, label)[:count].mean()

    return [twins.central_difference(loss, params, i) for i in range(3)]


def descended(params, grads, lr=LR):
    return [p - lr * g for p, g in zip(params, grads, strict=True)]


def raised(params, new, label, old, old_label, *, virtual="network", lr=LR):
    """By how much a step on the new rows raises the loss of old ones."""
    ahead = descended(params, slope(params, new, label), lr)
    if virtual == "head":
        ahead[0] = params[0]
    return row_losses(ahead, old, old_label) - row_losses(params, old, old_label)


def after_pass(stats, layer, x):
    """Running mean and variance after a pass of x in training mode."""
    f = x @ layer
    batch = f.mean(0), f.var(0)
    return [
        MOMENTUM * o + (1 - MOMENTUM) * n for o, n in zip(stats, batch, strict=True)
    ]


def running(state):
    found = state.stats["encoder"]["BatchNorm_0"]
    return [np.float64(found[name]) for name in ("mean", "var")]


# seed, options of the method, rows of the memory, how many may be replayed, the size,
# options of config.replay; what is not to be replayed is at the end.
CASES = {
    "past": (3, {"candidates": 8}, OLD, 8, 3, {}),
    "still": (3, {"candidates": 8, "moves_statistics": False}, OLD, 8, 3, {}),
    "all_head": (
        2,
        {"candidates": 10, "replay_from": "all", "virtual": "head"},
        OLD,
        10,
        4,
        {},
    ),
    "other_classes_augmented": (
        5,
        {"candidates": 8, "replay_from": "other_classes"},
        OLD,
        8,
        3,
        {"augment": "replay"},
    ),
    # Each of two rows is twice among the candidates, and one of them twice replayed.
    "short": (6, {"candidates": 4}, [0, 1, 2, 2], 2, 3, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_its_twin(name):
    seed, options, labels, allowed, size, replay = CASES[name]
    method = mir.make(make_parts(size=size, **replay), **options)
    state, batch = start(seed, labels), incoming(seed)
    new, label = raw(batch["image"]), np.array(NEW)
    old = raw(state.extra.memory.items["image"])[:allowed]
    old_label = np.array(labels[:allowed])
    params, virtual = arrays(state.params), options.get("virtual", "network")

    scores = raised(params, new, label, old, old_label, virtual=virtual)
    order = np.argsort(-scores)
    if size < len(scores):  # the choice is not a matter of rounding
        assert scores[order[size - 1]] - scores[order[size]] > 1e-3
    best = order[:size]
    count = len(best)  # that exist; the rest of the draw repeats them
    best = best[np.arange(size) % count]
    replayed = augmented(old[best]) if "augment" in replay else old[best]
    grads = slope(params, new, label)
    more = slope(params, replayed, old_label[best], count)
    expected = descended(descended(params, grads), more)

    after, metrics = jax.jit(method.step)(core.copy(state), batch)
    for one, other in zip(arrays(after.params), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    value = row_losses(params, new, label).mean()
    value += row_losses(params, replayed, old_label[best])[:count].mean()
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    stats = after_pass(running(state), params[0], new)
    if options.get("moves_statistics", True):
        stats = after_pass(stats, params[0], old)  # all are candidates
    stats = after_pass(stats, params[0], replayed)
    for one, other in zip(running(after), stats, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)


def test_the_size_of_the_virtual_step_decides():
    """Control: with another step the twin above would choose other rows."""
    seed, options, labels, allowed, size, _ = CASES["past"]
    state, batch = start(seed, labels), incoming(seed)
    old = raw(state.extra.memory.items["image"])[:allowed]
    args = arrays(state.params), raw(batch["image"]), np.array(NEW), old, OLD[:allowed]
    chosen = {
        lr: {*np.argsort(-raised(*args, lr=lr))[:size]} for lr in (LR, 0.1 * LR, -LR)
    }
    assert chosen[LR] != chosen[0.1 * LR] and chosen[LR] != chosen[-LR]


def test_nothing_to_replay_is_plain_descent():
    """An empty memory, and one of the present task alone."""
    step = jax.jit(mir.make(make_parts(size=3)).step)
    for labels in ([], [2, 2, 3]):
        state, batch = start(7, labels), incoming(7)
        params, new = arrays(state.params), raw(batch["image"])
        after, _ = step(core.copy(state), batch)
        expected = descended(params, slope(params, new, np.array(NEW)))
        for one, other in zip(arrays(after.params), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
        stats = after_pass(running(state), params[0], new)
        for one, other in zip(running(after), stats, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4)


def test_rows_that_do_not_exist_are_chosen_last():
    """They repeat others, with the same score, and would be replayed twice."""
    made = make_parts(size=4)
    there = 3
    items = {"image": pixels(0, 6), "label": np.arange(6) % there, "task": np.zeros(6)}
    items = {name: jnp.array(x)[np.arange(6) % there] for name, x in items.items()}
    mask = jnp.arange(6) < there
    slots = jnp.where(mask, jnp.arange(6), 10)
    pool = online.Rows(None, items["label"], mask, items["image"], items, slots)
    scores = jnp.array([-3.0, -1.0, -2.0, 9.0, 9.0, 9.0])
    rows = mir.most(made, jax.random.key(0), scores, pool)
    np.testing.assert_array_equal(rows.mask, [True, True, True, False])
    np.testing.assert_array_equal(rows.slots[:3], [1, 2, 0])
    np.testing.assert_array_equal(rows.label, [1, 2, 0, 1])


def test_options_are_checked():
    made = make_parts(size=4)
    for options, said in (
        ({"candidates": 3}, "candidates=3: must be at least 4"),
        ({"replay_from": "old"}, "replay_from='old': allowed are past_tasks, all"),
        ({"virtual": "tail"}, "virtual='tail': allowed are network, head"),
        ({"head": "cosin"}, "head='cosin'"),
    ):
        with pytest.raises(ValueError, match=f"config.method.{said}"):
            mir.make(made, **options)
    split = sharded.over(types.SimpleNamespace(size=4))
    with pytest.raises(ValueError, match="candidates=50: must be a multiple of 4"):
        mir.make(made._replace(memory=split))
    mir.make(made._replace(memory=split), candidates=52)
