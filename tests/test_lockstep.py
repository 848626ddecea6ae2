"""Networks of one form that pass together and share the sums of batch norm."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import toy
from jaxcl import sharding
from jaxcl.nets import chain, lockstep, mlp, norm, resnet
from jaxcl.run import job

NETS = chain.Chain(
    {
        "encoder": resnet.ResNet((1, 1), width=4),
        "projector": mlp.MLP(features=(6, 5), batch_norm=True),
    }
)
LAYERS = 6 + 1  # batch norms of the encoder, and of the projector
SHORTCUTS = 1  # of those, in the encoder
# Its teacher normalises by the batch.
STREAM = {"name": "online_ssl", "regulariser": "cassle", "hidden_dim": 8}


def networks(count):
    """Params, stats and images of some networks, all different."""
    made = []
    for k_net, k_images in zip(
        jax.random.split(jax.random.key(0), count),
        jax.random.split(jax.random.key(1), count),
        strict=True,
    ):
        images = jax.random.normal(k_images, (64, 8, 8, 3))
        params, stats = NETS.init(k_net, images)
        moved = jax.tree.map(lambda x: x + 0.1, stats)
        made.append((params | {"another": jnp.ones(3)}, moved, images))
    return made


def loss(first, *others):
    """Of all outputs, and so a gradient that would show if networks were mixed up."""
    own = [first, *((jax.lax.stop_gradient(p), s, x) for p, s, x in others)]
    made = NETS.beside(*own, groups=2)
    weighed = [(k + 1) * jnp.sum(jnp.sin(rows)) for k, (rows, _) in enumerate(made)]
    return sum(weighed), made


def one_by_one(function, own):
    """In place of `lockstep.passes`."""
    return [function(*arguments) for arguments in own]


@pytest.mark.parametrize("count", [2, 3])
def test_values_and_gradients_are_those_of_separate_passes(count, monkeypatch):
    own = networks(count)

    def program():
        """A new function, or JAX would take the other's trace."""
        slope = jax.value_and_grad(lambda *own: loss(*own), has_aux=True)
        with sharding.for_elsewhere(platform="gpu"):
            return jax.jit(slope)(*own)

    together = program()
    monkeypatch.setattr(lockstep, "passes", one_by_one)
    apart = program()
    chex.assert_trees_all_close(together, apart, rtol=1e-3, atol=1e-4)
    (_, made), (of_params, *_) = together
    assert "another" not in made[0][1] and not np.any(of_params["another"])
    assert np.any(of_params["encoder"]["conv1"]["kernel"])
    # A control: the networks have no outputs in common.
    assert np.abs(made[0][0] - made[1][0]).max() > 0.1


def sums(function, *arguments):
    """How many sums the trace of a function has, those of inner functions, too."""

    def count(jaxpr):
        inner = [count(x) for eqn in jaxpr.eqns for x in within(eqn)]
        own = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum"]
        return len(own) + sum(inner)

    def within(equation):
        """Not what a derivative is kept for: it is no part of the program."""
        parts = jax.tree.leaves(
            [x for name, x in equation.params.items() if "thunk" not in name],
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        )
        found = [getattr(x, "jaxpr", x) for x in parts]
        return [x for x in found if hasattr(x, "eqns")]

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_gpu_sums_once_for_all_networks(platform):
    """A TPU sums within each convolution: for mean and square, for each network."""

    def beside(*own):
        return NETS.beside(*own, groups=2)

    own = networks(2)
    with sharding.for_elsewhere(platform=platform):
        last = 2  # means over the maps at the end of each encoder
        count = sums(beside, *own) - last
    assert count == {"gpu": LAYERS - SHORTCUTS, "tpu": 2 * 2 * LAYERS}[platform]


def test_a_shortcut_is_summed_with_what_it_is_added_to(monkeypatch):
    """Forward and backward, in one network that passes alone."""
    ((params, stats, images),) = networks(1)

    def count():
        def loss(params):
            rows, after = NETS(params, stats, images, train=True, groups=2)
            return jnp.sum(jnp.sin(rows)), after

        with sharding.for_elsewhere(platform="gpu"):
            return sums(jax.grad(loss, has_aux=True), params)

    together = count()
    monkeypatch.setattr(lockstep, "passes", one_by_one)
    assert count() - together == 2 * SHORTCUTS


def test_what_comes_after_the_last_sum_and_before_the_first():
    """Arguments that come out as they are, literals, and results without a use."""

    def function(x, y):
        unused, near = jnp.split(x, 2)
        with sharding.for_elsewhere(platform="gpu"):
            mean, _ = norm.moments_apart(near[:, None] + 1.0)
        return {"first": x, "number": 2.0, "mean": mean + y, "none": None}

    rng = np.random.default_rng(0)
    own = [(rng.normal(size=(6, 3)), rng.normal(size=3)) for _ in range(2)]
    own = jax.tree.map(jnp.float32, own)
    for found, (x, y) in zip(lockstep.passes(function, own), own, strict=True):
        assert found["number"] == 2.0 and found["none"] is None
        np.testing.assert_array_equal(found["first"], x)
        expected = np.mean(np.asarray(x, float)[3:] + 1.0, axis=0) + np.asarray(y)
        np.testing.assert_allclose(found["mean"].reshape(3), expected, rtol=1e-5)


def test_networks_of_other_forms_are_refused():
    first, second = networks(2)
    with (
        sharding.for_elsewhere(platform="gpu"),
        pytest.raises(ValueError, match="one form"),
    ):
        NETS.beside(first, (*second[:2], second[2][:32]), groups=2)


@pytest.mark.parametrize(
    "method",
    [
        {"method.base": "mocov2plus", "method.strategy": "pnr"},
        {"method.base": "byol", "method.strategy": "cassle"},
        {"method": {"name": "duel", "memory_size": 64, "hidden_dim": 8}},
        toy.ONLINE | {"augment.views": 2, "method": STREAM | {"base": "byol"}},
        toy.ONLINE | {"augment.views": 2, "method": STREAM | {"base": "simclr"}},
    ],
    ids=["mocov2plus", "byol", "duel", "online_ssl-byol", "online_ssl-teacher"],
)
def test_the_slow_network_of_a_step_has_no_sums_of_its_own(
    method, tmp_path, monkeypatch
):
    """The sums of a step, beside those of one whose networks pass one by one."""

    def count(work):
        state, batch = job.placed(work, work.parts(1))
        return sums(work.method.step, state, batch)

    with sharding.for_elsewhere(platform="gpu"):
        together = count(toy.job(tmp_path / "a", **method))
        monkeypatch.setattr(lockstep, "passes", one_by_one)
        apart = count(toy.job(tmp_path / "b", **method))
    assert apart - together >= 3  # the encoder's, and the projector's if it has any
