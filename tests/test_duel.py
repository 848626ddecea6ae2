"""D-MoCo and D-SimCLR: whole steps in float64 from the equations, and what they keep.

The networks are those of `helpers/dense_net.py`; the second view is the first one
mirrored and squared, so that nothing is chance.
"""

import functools
import itertools
import types
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import dense_net, duel_twin, interpreted, twins
from helpers import loss_twins as f64
from jaxcl import core, estimate, optim, sharding
from jaxcl.data.augment import images as augment_images
from jaxcl.memory import buffer, duel, policies
from jaxcl.methods import duel as method_lib
from jaxcl.methods.duel import active_memory

K, B, D, SIDE, LR = 8, 6, 3, 4, 0.1
STORED = np.array([True, True, False, True, True, False, True, False])
# The exponential score of the twin has this tau.
OPTIONS = {"memory_size": K, "drawn": K, "output_dim": D, "temperature": 0.3}


def parts(augment=lambda key, images: twins.views_of(images)):
    return core.Parts(
        encoder=dense_net.Flat(),
        augment=augment,
        tx=optim.sgd(momentum=0.0),
        lr=optim.by_task([optim.constant(LR)]),
        num_classes=4,
    )


def make(**options):
    return method_lib.make(parts(), **(OPTIONS | options))


def batch(seed, first=0, count=B):
    """Rows `first`, `first` + 1, ... of some train split."""
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (count, SIDE, SIDE, 1)).astype(np.uint8),
        "label": rng.integers(0, 4, count).astype(np.int32),
        "index": np.arange(first, first + count, dtype=np.int32),
    }


INCOMING = batch(1, first=50)


moved = functools.partial(twins.moved, low=-0.5, high=0.5)


@functools.cache
def fresh(base, **options):
    """Few options change the state."""
    method = make(base=base, **options)
    return interpreted.jit(method.init)(jax.random.key(0), INCOMING)


def under_way(base="moco", filled=STORED, **options):
    """A state whose networks all differ, with a memory that has room."""
    state = fresh(base, **options)
    extra = state.extra._replace(
        momentum=moved(state.extra.momentum, 1),
        momentum_stats=moved(state.extra.momentum_stats, 2, low=0.1),
    )
    if extra.memory is not None:
        extra = extra._replace(memory=_held(extra.memory, filled))
    params, stats = moved(state.params, 3), moved(state.stats, 4, low=0.1)
    return state.replace(params=params, stats=stats, extra=extra)


def _held(memory, filled):
    """Rows 0 to K - 1; what is not there is far from blank."""
    rng = np.random.default_rng(5)
    features = rng.normal(size=(K, D))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    items = {
        "feature": np.float32(features),
        "label": rng.integers(0, 4, K).astype(np.int32),
        "index": np.arange(K, dtype=np.int32),
        "image": rng.integers(0, 256, (K, SIDE, SIDE, 1)).astype(np.uint8),
    }
    items = {name: jnp.asarray(items[name]) for name in memory.items}
    return buffer.Buffer(items, jnp.asarray(filled), jnp.int32(filled.sum()))


@functools.cache
def compiled(method):
    return interpreted.jit(method.step)


def step(method, state, incoming=INCOMING):
    return compiled(method)(state, incoming)


# The step in float64


def forward(params, stats, views, groups=1):
    """Projections and the running statistics after; rows of a group are every V-th."""
    nets = ("encoder", "projector")
    return dense_net.apply(nets, params, stats, views, train=True, groups=groups)[:2]


def loss_of(z, positives, example, rows, options):
    """The loss of anchors z against the rows of the memory that exist."""
    tau, negatives = options["temperature"], options.get("negatives", "mixed")
    if options.get("hml_weight") is not None:
        return f64.m_hml(z, positives, rows, options["hml_weight"], tau)
    return f64.info_nce(
        z,
        positives,
        rows if negatives != "batch" else (),
        example if negatives != "memory" else None,
        tau,
        options.get("positive_in_denominator", True),
    )


class Twin:
    """What a step must give, from the state before it."""

    def __init__(self, state, incoming, options, drawn=None):
        self.options = OPTIONS | options
        self.moco = self.options.get("base", "moco") == "moco"
        to64 = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float64))
        self.params, self.stats = to64(state.params), to64(state.stats)
        self.slow = to64((state.extra.momentum, state.extra.momentum_stats))
        self.views = twins.views_of(np.asarray(incoming["image"], np.float64))
        self.memory = state.extra.memory
        if self.memory is None:
            return
        self.filled = np.asarray(self.memory.filled)
        self.features = np.asarray(self.memory.items["feature"], np.float64)
        drawn = np.arange(K) if drawn is None else drawn
        there = self.filled[drawn]
        if not self.moco or self.options.get("refresh"):
            network = self.slow if self.moco else (self.params, self.stats)
            self.rows = self.embed(network, drawn)[there]
        if self.options.get("refresh"):
            self.features[drawn[there]] = self.rows
        if self.moco:
            self.rows = self.features[drawn[there]]

    def embed(self, network, slots):
        """Features of stored images; slots that hold nothing are blank."""
        images = np.asarray(self.memory.items["image"], np.float64)[slots]
        images[~self.filled[slots]] = 0
        return twins.unit(forward(*network, twins.views_of(images)[:, 0])[0])

    def targets_after(self, network):
        """Targets by the network after a step, which renews what is stored."""
        if self.options["policy_features"] == "all":
            rows = self.embed(network, np.arange(K))
            self.features[self.filled] = rows[self.filled]
        return twins.unit(forward(*network, self.views[:, 0])[0])

    def loss(self, params):
        """The loss, the statistics after, and the targets that are kept."""
        if self.moco:
            keys, self.slow_stats = forward(*self.slow, self.views[:, 1])
            z, stats = forward(params, self.stats, self.views[:, 0])
            rows = self.rows
            return (
                loss_of(z, keys, range(B), rows, self.options),
                stats,
                twins.unit(keys),
            )
        both = self.views.reshape(2 * B, SIDE, SIDE, 1)
        z, stats = forward(params, self.stats, both, groups=2)
        partner = z.reshape(B, 2, D)[:, ::-1].reshape(2 * B, D)
        rows = None if self.memory is None else self.rows
        value = loss_of(z, partner, [i // 2 for i in range(2 * B)], rows, self.options)
        return value, stats, twins.unit(z[::2])

    def gradient(self):
        """By differences, over all parameters."""
        leaves, structure = jax.tree.flatten(self.params)

        def loss(*leaves):
            return self.loss(structure.unflatten(leaves))[0]

        slopes = [twins.central_difference(loss, leaves, i) for i in range(len(leaves))]
        return structure.unflatten(slopes)

    def slots(self, targets):
        """Where each row of the batch goes, K: nowhere."""
        if self.options.get("policy", "duel") == "fifo":
            return [(int(self.memory.seen) + i) % K for i in range(B)]
        q = duel_twin.SCORES[self.options.get("score", "affine")]
        keep = duel_twin.loop(
            self.features,
            targets,
            q,
            filled=self.filled,
            competes=self.options.get("newcomer_competes", False),
        )
        free = iter(np.flatnonzero(~keep[:K]))
        return [next(free) if comes else K for comes in keep[K:]]


CASES = {
    "moco": {},
    "moco-decoupled": {"positive_in_denominator": False, "momentum": 0.6},
    "moco-memory": {"negatives": "memory", "score": "exponential"},
    "moco-batch": {"negatives": "batch", "policy": "fifo"},
    "moco-hml": {"negatives": "memory", "hml_weight": 0.4, "newcomer_competes": True},
    "moco-refresh": {"refresh": True},
    "moco-after": {"policy_features": "batch"},
    "moco-all": {"policy_features": "all", "newcomer_competes": True},
    "simclr": {"base": "simclr", "refresh": True},
    "simclr-after": {"base": "simclr", "policy_features": "batch"},
    "simclr-all": {"base": "simclr", "policy_features": "all"},
    "simclr-decoupled": {"base": "simclr", "positive_in_denominator": False},
    "simclr-memory": {"base": "simclr", "negatives": "memory"},
    "simclr-batch": {"base": "simclr", "negatives": "batch"},
    "simclr-hml": {"base": "simclr", "negatives": "memory", "hml_weight": 0.4},
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_equation(name):
    options = CASES[name]
    method = make(**options)
    # A ring is filled from its first slot on.
    stored = np.arange(K) < 5 if options.get("policy") == "fifo" else STORED
    shapes = {"simclr-batch": {"negatives": "batch"}}
    shapes |= dict.fromkeys(("moco-refresh", "moco-all"), {"keep_images": True})
    state = under_way(options.get("base", "moco"), stored, **shapes.get(name, {}))
    blank = jax.eval_shape(method.init, jax.random.key(0), INCOMING)
    chex.assert_trees_all_equal_shapes_and_dtypes(blank, state)
    new, metrics = step(method, state)
    twin = Twin(state, INCOMING, options)
    value, stats, targets = twin.loss(twin.params)
    slopes = twin.gradient()
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=3e-6)
    np.testing.assert_allclose(metrics["loss"], value, rtol=3e-5)
    norms = [np.square(x).sum() for x in jax.tree.leaves(slopes)]
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(sum(norms)), rtol=1e-4)
    np.testing.assert_allclose(metrics["lr"], LR, rtol=1e-6)
    params = jax.tree.map(lambda p, g: p - LR * g, twin.params, slopes)
    close(new.params, params)
    # What is drawn of the memory moves no running statistics.
    close(new.stats, stats)
    assert int(new.step) == 1
    if twin.moco:
        decay = options.get("momentum", 0.9)
        slow = jax.tree.map(
            lambda a, b: decay * a + (1 - decay) * b, twin.slow[0], params
        )
        close(new.extra.momentum, slow)
        close(new.extra.momentum_stats, twin.slow_stats)
        after = slow, twin.slow[1]
    else:
        assert new.extra.momentum == new.extra.momentum_stats == {}
        after = params, twin.stats
    if "policy_features" in options:
        before = targets
        targets = twin.targets_after(after)
        assert np.abs(targets - before).max() > 1e-3
    if name == "simclr-batch":
        assert new.extra.memory is None and method.memory is None
        assert "joined" not in metrics
    else:
        _check_memory(method, new, metrics, twin, targets)


def _check_memory(method, new, metrics, twin, targets):
    """The memory holds the batch's targets where the policy puts them."""
    slots = np.array(twin.slots(targets))
    enters = slots < K
    assert enters.any()
    items = {n: np.array(x) for n, x in twin.memory.items.items()}
    items["feature"] = twin.features.copy()
    arrives = dict(INCOMING) | {"feature": targets}
    for leaf, name in zip(items.values(), items, strict=True):
        leaf[slots[enters]] = arrives[name][enters]
    names = {"feature", "label", "index"}
    if "image" in twin.memory.items:
        names.add("image")
    assert set(items) == names
    filled = twin.filled.copy()
    filled[slots[enters]] = True
    memory = method.memory(new)
    features = memory.items.pop("feature"), items.pop("feature")
    # After the step they carry the rounding of its gradient, which differences give.
    atol = 2e-5 if "policy_features" in twin.options else 1e-6
    np.testing.assert_allclose(*features, rtol=1e-5, atol=atol)
    chex.assert_trees_all_equal(memory.items, items)
    np.testing.assert_array_equal(memory.filled, filled)
    assert int(memory.seen) == int(twin.memory.seen) + B
    np.testing.assert_allclose(metrics["joined"], enters.mean(), rtol=1e-6)


@pytest.mark.parametrize("base", ["moco", "simclr"])
def test_rows_are_drawn_at_random_of_those_that_are_there(base):
    """Without replacement, MoCo's too (Algorithm 3); all slots are the whole memory."""
    method = make(base=base, drawn=3)
    state, losses, found = under_way(base), {}, set()
    for rows in itertools.combinations(np.flatnonzero(STORED), 3):
        twin = Twin(state, INCOMING, {"base": base}, np.array(rows))
        losses[rows] = twin.loss(twin.params)[0]
    assert np.diff(sorted(losses.values())).min() > 1e-5
    for seed in range(12):
        value = step(method, state.replace(key=jax.random.key(seed)))[1]["loss"]
        rows = min(losses, key=lambda rows: abs(losses[rows] - value))
        np.testing.assert_allclose(value, losses[rows], rtol=0, atol=5e-6)
        found.add(rows)
    assert len(found) > 4  # of 10
    # With fewer rows than are drawn the others are masked.
    few = np.arange(K) == 3
    state = under_way(base, few)
    twin = Twin(state, INCOMING, {"base": base}, np.array([3, 0, 1]))
    value = step(method, state)[1]["loss"]
    np.testing.assert_allclose(value, twin.loss(twin.params)[0], rtol=1e-5)


def test_an_empty_memory_has_no_negatives():
    """Nothing to be told apart from, so nothing moves; but the memory fills."""
    for base in ("moco", "simclr"):
        method = make(negatives="memory", base=base)
        state = under_way(base, np.zeros(K, bool))
        new, metrics = step(method, state)
        assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
        chex.assert_trees_all_equal(new.params, state.params)
        memory = method.memory(new)
        np.testing.assert_array_equal(memory.filled, np.arange(K) < B)
        np.testing.assert_array_equal(memory.items["index"][:B], INCOMING["index"])
        assert metrics["joined"] == 1


# What is kept


def settings(**changes):
    given = dict(
        policy="duel",
        size=K,
        dim=D,
        images=False,
        spread=False,
        safe=False,
        newcomer_competes=False,
        score="affine",
        temperature=0.3,
    )
    return active_memory.Settings(**(given | changes))


def held(rows, filled=None):
    """A memory of these rows, row i of the train split in slot i."""
    number = jnp.arange(len(rows), dtype=jnp.int32)
    filled = jnp.ones(len(rows), bool) if filled is None else jnp.asarray(filled)
    items = {"feature": jnp.float32(rows), "label": number, "index": number}
    return buffer.Buffer(items, filled, jnp.int32(filled.sum()))


def updated(given, memory, rows, seed=0):
    number = jnp.arange(100, 100 + len(rows), dtype=jnp.int32)
    incoming = {"label": number, "index": number}
    update = interpreted.jit(functools.partial(active_memory.update, given))
    return update(memory, jax.random.key(seed), incoming, np.float32(rows), ())


def circle(*degrees):
    turn = np.radians(degrees)
    return np.stack([np.cos(turn), np.sin(turn), 0 * turn], axis=1)


def test_a_ring_and_a_reservoir_are_those_of_policies():
    rng = np.random.default_rng(0)
    memory = held(twins.unit(rng.normal(size=(K, D))))
    rows = twins.unit(rng.normal(size=(5, D)))
    memory = memory._replace(seen=jnp.int32(12))
    mask = jnp.ones(5, bool)
    for seed in range(6):
        want = {
            "fifo": policies.fifo(memory, mask),
            "reservoir": policies.reservoir(memory, jax.random.key(seed), mask),
        }
        for policy, slots in want.items():
            new, joined = updated(settings(policy=policy), memory, rows, seed)
            items = {"feature": jnp.float32(rows)}
            items["label"] = items["index"] = jnp.arange(100, 105, dtype=jnp.int32)
            chex.assert_trees_all_equal(new, buffer.write(memory, slots, items))
            assert joined == np.float32(np.mean(slots < K))
    assert len({tuple(np.asarray(want[name])) for name in want}) == 2


def test_a_safe_update_keeps_the_memory_where_it_would_grow_less_distinct():
    """Rows far from the memory are alike to themselves once they are in it."""
    memory, rows = held(circle(0, 20, 40, 60)), circle(180, 181)
    for safe in (False, True):
        given = settings(size=4, safe=safe)
        new, joined = updated(given, memory, rows)
        assert (joined == 0) == safe
        assert int(new.seen) == 6
        if safe:
            chex.assert_trees_all_equal(new.items, memory.items)
        # Where there is room all come, and what makes the memory more distinct does.
        some = held(circle(0, 20, 40, 60), np.arange(4) < 2)
        assert updated(given, some, rows)[1] == 1
        assert updated(given, held(circle(0, 0, 0, 0)), circle(0, 0, 0, 90))[1] > 0


@pytest.mark.parametrize("policy", typing.get_args(active_memory.Policy))
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_rows_that_are_not_finite_never_enter(policy, wrong):
    """The others are treated as if the batch had none but them."""
    rng = np.random.default_rng(4)
    memory = held(twins.unit(rng.normal(size=(K, D))))
    rows = twins.unit(rng.normal(size=(6, D)))
    good = np.array([False, True, True, False, True, True])
    bad = np.where(good[:, None], rows, 1.0)
    bad[0, 1], bad[3] = wrong, wrong
    given = settings(policy=policy)
    new, joined = updated(given, memory, bad)
    came = np.asarray(new.items["index"])
    assert np.isfinite(new.items["feature"]).all()
    assert not {100, 103} & set(came.tolist()) and int(new.seen) == K + 4
    if policy == "reservoir":  # draws other numbers for other batches
        return
    want, _ = updated(given, memory, rows[good])
    chex.assert_trees_all_equal(new.items["feature"], want.items["feature"])
    assert joined > 0


def test_of_crops_already_cut_one_is_kept_and_used_as_it_is():
    rng = np.random.default_rng(3)
    crops = rng.integers(0, 256, (B, 2, SIDE, SIDE, 1)).astype(np.uint8)
    incoming = INCOMING | {"image": crops}
    views = augment_images.make(size=SIDE, mean=(0.5,), std=(0.5,))
    shapes = set()  # of an image, as it is augmented: whole ones would be cropped

    def augment(key, images):
        shapes.add(images.shape[1:])
        return views(key, images)

    method = method_lib.make(parts(augment), **OPTIONS, base="simclr")
    state = jax.jit(method.init)(jax.random.key(0), incoming)
    state, _ = jax.jit(method.step)(state, incoming)
    images = method.memory(state).items["image"]
    assert images.shape == (K, SIDE, SIDE, 1) and images.dtype == jnp.uint8
    np.testing.assert_array_equal(images[:B], crops[:, 0])
    state, metrics = jax.jit(method.step)(state, incoming)
    assert np.isfinite(metrics["loss"]) and shapes == {crops.shape[1:]}


# Runs


def over(devices, base):
    """Four steps with a memory that lies on the devices; the last state."""
    method = make(base=base, memory_size=24, drawn=16, sharded=True)
    mesh = sharding.mesh(devices)
    rows = [sharding.shard_rows(batch(i, 8 * i, 8), mesh) for i in range(20, 24)]
    shapes = jax.eval_shape(method.init, jax.random.key(0), rows[0])
    placed = sharding.placement(shapes, mesh), sharding.replicated(mesh)
    step = jax.jit(method.step, donate_argnums=0, out_shardings=placed)
    state = jax.jit(method.init, out_shardings=placed[0])(jax.random.key(0), rows[0])
    state = sharding.commit_placement(state, mesh)
    program = step.lower(state, rows[0]).compile()  # takes no state that lies otherwise
    if devices > 1:  # no device ever holds all rows
        text = program.as_text()
        assert "[3,3]" in text and "[24,3]" not in text and "[24,4,4,1]" not in text
    for one in rows:
        state, metrics = program(state, one)
    return method, state, metrics


@pytest.mark.parametrize("base", ["moco", "simclr"])
def test_a_memory_over_devices_is_that_of_one(base):
    method, alone, metrics = over(1, base)
    _, state, others = over(8, base)
    for leaf in jax.tree.leaves(state.extra.memory)[:-1]:  # but `seen`
        assert len(leaf) == 24 and len(leaf.addressable_shards) == 8
        assert {len(shard.data) for shard in leaf.addressable_shards} == {3}
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-5)
    close(state.params, alone.params)
    close(others, metrics)
    assert 0 < metrics["joined"] < 1
    one, spread = method.memory(alone), method.memory(state)
    close(spread.items.pop("feature"), one.items.pop("feature"))
    chex.assert_trees_all_equal(jax.device_get(spread), jax.device_get(one))


@pytest.mark.parametrize("gathers", [True, False])
def test_no_turn_of_the_filter_sends_anything(gathers):
    """Control: the loop, left to itself, is split over the devices as the batch is."""
    mesh, given = sharding.mesh(2), settings(size=64)
    shapes = jax.eval_shape(lambda: held(jnp.zeros((64, D))))
    number = jax.ShapeDtypeStruct((8,), jnp.int32)
    incoming = {"label": number, "index": number}
    features = jax.ShapeDtypeStruct((8, D), jnp.float32)
    update = functools.partial(active_memory.update, given, after=())
    if not gathers:

        def update(memory, key, incoming, features):
            return duel.select(memory.items["feature"], features), incoming, key

    whole, parted = sharding.replicated(mesh), sharding.split_sharding(mesh)
    jitted = jax.jit(update, in_shardings=(whole, whole, parted, parted))
    with sharding.use_mesh(mesh):
        lowered = jitted.lower(shapes, jax.random.key(0), incoming, features)
    text = lowered.compile().as_text()
    found = estimate.collectives(text)
    assert found
    assert all(message.counted for message in found) == gathers


def test_a_task_may_begin_with_an_empty_memory():
    """The even start of an uneven stream: networks stay, rows go."""
    state = under_way(filled=np.ones(K, bool))
    task = types.SimpleNamespace(index=1)
    after = make(fresh_memory=True).begin_task(state, task)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(after.extra.memory))
    kept = after.extra._replace(memory=state.extra.memory)
    chex.assert_trees_all_equal(after.replace(extra=kept), state)


def test_an_eighth_of_the_memory_is_drawn_unless_the_config_says_how_many():
    """256 of 2048, as the paper's Appendix E has it."""
    given = [
        method_lib.make(parts(), memory_size=size, **options).step.args[0].drawn
        for size, options in ((2048, {}), (1024, {}), (4, {}), (8, {"drawn": 8}))
    ]
    assert given == [256, 128, 1, 8]


def test_what_carries_over_between_tasks():
    """All but the optimiser's state."""
    tx = optim.sgd(momentum=0.9)
    method = method_lib.make(parts()._replace(tx=tx), **OPTIONS)
    state = under_way()
    state = state.replace(opt_state=moved(tx.init(state.params), 7))
    after = method.begin_task(state, types.SimpleNamespace(index=1))
    assert any(np.any(x) for x in jax.tree.leaves(state.opt_state))
    assert not any(np.any(x) for x in jax.tree.leaves(after.opt_state))
    chex.assert_trees_all_equal(after.replace(opt_state=state.opt_state), state)


def test_evaluators_read_the_encoder_and_the_projector_in_evaluation_mode():
    method, state = make(), under_way()
    images = np.float32(twins.views_of(np.asarray(INCOMING["image"]))[:, 0])
    nets = ("encoder", "projector")
    for read, names in ((method.embed, nets[:1]), (method.project, nets)):
        params, stats = twins.to64((state.params, state.stats))
        want, *_ = dense_net.apply(names, params, stats, images, train=False)
        np.testing.assert_allclose(read(state, images), want, rtol=1e-4, atol=1e-5)
