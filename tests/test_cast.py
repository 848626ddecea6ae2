"""Kernels that a GPU casts where they are moved, and not in every pass."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import toy
from jaxcl import core, sharding
from jaxcl.nets import cast, chain, mlp, resnet
from jaxcl.run import job, seeds

NARROW = {"precision": "bfloat16", "save_every": 0}
PNR = {"method.base": "mocov2plus", "method.strategy": "pnr"}


def carried(program):
    """The types of what the loop over a call's steps carries."""
    for equation in program.eqns:
        if equation.primitive.name == "while":
            yield [x.aval for x in equation.invars]
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", None)
            if equation.primitive.name != "while" and hasattr(inner, "eqns"):
                yield from carried(inner)


class Extra(NamedTuple):
    slow: dict
    teacher: dict


class Frozen(NamedTuple):
    teacher: dict
    teacher_stats: dict


def nets(dtype):
    return {
        "encoder": resnet.ConvNet(width=4, dtype=dtype),
        "projector": mlp.MLP(features=(6, 5), batch_norm=True, dtype=dtype),
    }


def test_cast_kernels_give_the_same_outputs():
    """All other leaves stay, and those of nets that do not say what they cast."""
    both = chain.Chain(nets(jnp.bfloat16))
    x = jax.random.normal(jax.random.key(1), (4, 6, 6, 1))
    params, stats = both.init(jax.random.key(0), x)
    state = core.TrainState(*8 * (None,), Extra({}, {})).replace(params=params)
    read = cast.read(state, cast.kernels(state, nets=both)).params
    for path, leaf in jax.tree_util.tree_flatten_with_path(read)[0]:
        kernel = path[-1].key == "kernel"
        assert leaf.dtype == (jnp.bfloat16 if kernel else jnp.float32)
    outputs = [both(p, stats, x, train=False)[0] for p in (params, read)]
    np.testing.assert_array_equal(*outputs)
    silent = chain.Chain({"encoder": nn.Dense(3, dtype=jnp.bfloat16)})
    assert not jax.tree.leaves(silent.cast({"encoder": {"kernel": x}}))


def test_float32_is_not_carried_twice():
    both = chain.Chain(nets(jnp.float32))
    params, _ = both.init(jax.random.key(0), jnp.zeros((2, 6, 6, 1)))
    assert not jax.tree.leaves(both.cast(params))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_gpu_carries_cast_kernels_through_a_call(platform, tmp_path):
    """Those of all networks, and nothing of them is saved."""
    changes = PNR | NARROW | {"optimizer": {"name": "lars", "lr": 0.3}}
    with sharding.for_elsewhere(platform=platform):
        work = toy.job(tmp_path, **changes)
        state = job.initial_state(work)
        step, call = job.compile_step(work), toy.first_call(work)
        program = jax.make_jaxpr(step)(state, *call)
    types = next(carried(program.jaxpr))
    narrow = [x for x in types if x.dtype == jnp.bfloat16]
    # Of the encoder and of the projector, three times, and the teacher's has three
    # norms, of which an offset is left; g has two.
    kernels, offsets = 3 * (3 + 2) + 2, 3
    assert len(narrow) == (kernels + offsets if platform == "gpu" else 0)
    after = jax.eval_shape(step, state, *call)[0]
    assert {x.dtype for x in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}


def test_kernels_of_networks_that_stay_are_taken_over():
    both = chain.Chain(nets(jnp.bfloat16))
    params, _ = both.init(jax.random.key(0), jnp.zeros((2, 6, 6, 1)))

    options = {"nets": both, "moved": ("slow",), "still": ("teacher",)}
    state = core.TrainState(*8 * (None,), Extra(params, params)).replace(params=params)
    first = cast.kernels(state, **options)
    assert first.extra.keys() == {"slow", "teacher"}
    twice = jax.tree.map(lambda x: 2 * x, params)
    after = state.replace(params=twice, extra=Extra(twice, params))
    second = cast.kernels(after, first, **options)
    assert second.extra["teacher"] is first.extra["teacher"]
    expected = both.cast(twice)
    for found in (second.params, second.extra["slow"]):
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert cast.read(state, None) is state


def own_norms(seed, params, stats):
    """Every number of batch norms drawn anew."""
    rng = np.random.default_rng(seed)

    def drawn(path, leaf):
        if path[-1].key == "kernel":
            return leaf
        low, high = (0.5, 2.0) if path[-1].key in ("scale", "var") else (-1.0, 1.0)
        return jnp.asarray(rng.uniform(low, high, leaf.shape), leaf.dtype)

    return [jax.tree_util.tree_map_with_path(drawn, tree) for tree in (params, stats)]


def chain_of(encoder, dtype):
    heads = {"batch_norm": True, "last_norm": encoder == "bottleneck", "dtype": dtype}
    encoders = {
        "basic": resnet.ResNet((1, 1), width=4, dtype=dtype),
        "bottleneck": resnet.ResNet((1, 1), "bottleneck", width=4, dtype=dtype),
        "conv_net": resnet.ConvNet(width=4, dtype=dtype),
    }
    return chain.Chain(
        {"encoder": encoders[encoder], "projector": mlp.MLP((6, 5), **heads)}
    )


def folded(nets, params, stats, images):
    """Outputs by kernels with norms in them; of the norms only offsets are read."""
    weights, offsets = nets.folded(params, stats)
    leaves = jax.tree_util.tree_leaves_with_path(offsets)
    assert {path[-1].key for path, _ in leaves} == {"offset"}
    return nets(cast.with_kernels(params, weights), offsets, images, train=False)[0]


@pytest.mark.parametrize("encoder", ["basic", "bottleneck", "conv_net"])
def test_norms_in_kernels_give_the_same_outputs(encoder):
    """In bfloat16 they are as near to those in float32 as norms apart are."""
    exact, narrow = (chain_of(encoder, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    off = []
    for seed in range(4):
        x = jax.random.normal(jax.random.key(seed), (16, 8, 8, 3))
        params, stats = own_norms(seed, *exact.init(jax.random.key(seed), x))
        expected = exact(params, stats, x, train=False)[0]
        outputs = [folded(nets, params, stats, x) for nets in (exact, narrow)]
        np.testing.assert_allclose(outputs[0], expected, rtol=1e-4, atol=1e-5)
        outputs[0] = narrow(params, stats, x, train=False)[0]
        off.append([np.std(rows - expected) / np.std(expected) for rows in outputs])
    apart, inside = np.mean(off, axis=0)
    assert 0 < inside < 1.5 * apart < 0.02
    # A control: norms are far from doing nothing.
    blank = exact.init(jax.random.key(seed), x)[1]
    assert np.std(exact(params, blank, x, train=False)[0] - expected) > 0.1


def test_norms_of_a_teacher_are_put_into_its_kernels_once_a_call():
    both = chain.Chain(nets(jnp.float32))
    x = jax.random.normal(jax.random.key(1), (4, 6, 6, 1))
    params, stats = own_norms(0, *both.init(jax.random.key(0), x))
    extra = Frozen(params, stats)
    state = core.TrainState(*8 * (None,), extra).replace(params=params)
    options = {"nets": both, "still": ("teacher",), "fold": True}
    first = cast.kernels(state, **options)
    read = cast.read(state, first)
    assert (
        read.params["encoder"]["conv1"]["kernel"]
        is params["encoder"]["conv1"]["kernel"]
    )
    rows = [
        both(own.extra.teacher, own.extra.teacher_stats, x, train=False)[0]
        for own in (read, state)
    ]
    np.testing.assert_allclose(*rows, rtol=1e-5, atol=1e-6)
    second = cast.kernels(state, first, **options)
    assert second.extra["teacher"] is first.extra["teacher"]
    assert second.stats is first.stats and first.stats.keys() == {"teacher"}


@pytest.mark.parametrize("name", ["two_view", "co2l"])
def test_a_teacher_that_normalises_by_the_batch_keeps_its_norms(name, tmp_path):
    two_view = {"name": name, "base": "mocov2plus", "strategy": "pnr"}
    method = two_view if name == "two_view" else {"name": name}
    for frozen_bn in ("running", "batch"):
        options = {"method": method | {"frozen_bn": frozen_bn}}
        work = toy.job(tmp_path / frozen_bn, **options, **NARROW)
        kernels = work.method.cast(job.initial_state(work), None)
        assert "teacher" in kernels.extra
        assert [*kernels.stats] == (["teacher"] if frozen_bn == "running" else [])


def test_a_call_by_cast_kernels_is_the_call(tmp_path):
    """Eight steps, of which each goes by the kernels that the one before has moved."""
    with sharding.for_elsewhere(platform="gpu"):
        work = toy.job(tmp_path, **PNR, **NARROW)
        casting = work.method
        ends = []
        for method in (casting, casting._replace(cast=None)):
            state = job.initial_state(work)
            step = job.compile_step(work._replace(method=method))
            ends.append(step(state, *toy.first_call(work))[0])
    assert int(ends[0].step) == 8
    for ours, theirs in zip(*(jax.tree.leaves(x.params) for x in ends), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_seeds_side_by_side_carry_kernels_of_their_own(tmp_path):
    with sharding.for_elsewhere(platform="gpu"):
        alone = [
            toy.job(tmp_path / str(seed), seed=seed, **PNR, **NARROW) for seed in (0, 1)
        ]
        works = [*alone, seeds.together(dict(enumerate(alone)))]
        ends = []
        for work in works:
            state = job.initial_state(work)
            ends.append(job.compile_step(work)(state, *toy.first_call(work))[0].params)
    for i, own in enumerate(ends[:2]):
        together = jax.tree.map(lambda x, i=i: x[i], ends[2])
        for ours, theirs in zip(*map(jax.tree.leaves, (own, together)), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=0.03)
    first, second = (x["encoder"]["conv1"]["kernel"] for x in ends[:2])
    assert np.abs(first - second).max() > 0.3
