"""The agent that sets a learning rate, against twins in numpy and on quadratics."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted, twins
from jaxcl.methods.icl import ddpg

SMALL = dict(actor_width=3, critic_width=4, batch=5, capacity=8, window=4)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def actor_twin(params, losses, known):
    """mu of each row by loops over rows, layers and steps, before the sigmoid."""
    out = []
    for row, there in zip(losses, known, strict=True):
        x = [np.array([loss]) for loss in row[len(row) - there :]]
        for layer in "12":
            h = c = np.zeros(len(params["recurrent" + layer]))
            kernel, bias = (params["input" + layer][n] for n in ("kernel", "bias"))
            for step, value in enumerate(x):
                z = value @ kernel + bias + h @ params["recurrent" + layer]
                i, f, g, o = np.split(z, 4)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                x[step] = h = sigmoid(o) * np.tanh(c)
        out.append(x[-1] @ params["output"]["kernel"][:, 0] + params["output"]["bias"])
    return np.array(out)[:, 0]


def critic_twin(params, losses, known, action):
    out = []
    for row, there, a in zip(losses, known, action, strict=True):
        x = np.append(
            np.where(np.arange(len(row)) < len(row) - there, 0, row), 2 * a - 1
        )
        for layer in "123":
            linear = params["linear" + layer]
            x = x @ linear["kernel"] + linear["bias"]
            x = x if layer == "3" else np.where(x > 0, x, 0.01 * x)
        out.append(x[0])
    return np.array(out)


def gradient(function, params):
    """Central differences of function(params), in every leaf."""
    leaves, tree = jax.tree.flatten(params)
    twin = lambda *arrays: function(jax.tree.unflatten(tree, arrays))  # noqa: E731
    found = [twins.central_difference(twin, leaves, i) for i in range(len(leaves))]
    return jax.tree.unflatten(tree, found)


def adam_step(params, grads, lr):
    """The first step of Adam: m / (1 - b1) = g and v / (1 - b2) = g^2."""
    return jax.tree.map(lambda p, g: p - lr * g / (np.abs(g) + 1e-8), params, grads)


def f64(tree):
    """Copies in numpy, as wide as they come."""
    wide = lambda x: np.asarray(x, np.float64 if x.dtype.kind == "f" else None)  # noqa: E731
    return jax.tree.map(lambda x: wide(np.asarray(x)), tree)


def begin(options):
    return interpreted.jit(lambda key: ddpg.init(key, options))(jax.random.key(0))


def shaken(agent, seed=0):
    """The agent in f64 with networks that all differ and have biases."""
    rng = np.random.default_rng(seed)
    networks = ("actor", "critic", "target_actor", "target_critic")
    agent = f64(agent._replace(memory=None))
    shake = lambda x: x + 0.3 * rng.normal(size=x.shape)  # noqa: E731
    return agent._replace(
        **{name: jax.tree.map(shake, getattr(agent, name)) for name in networks}
    )


class LinearActor(nn.Module):
    """In place of mu: what is not of the networks is compiled at once."""

    width: int

    @nn.compact
    def __call__(self, losses, known):
        return nn.Dense(1, name="out")(jnp.where(known, losses, 0))[:, 0]


class LinearCritic(nn.Module):
    width: int

    @nn.compact
    def __call__(self, losses, known, action):
        x = jnp.concatenate([jnp.where(known, losses, 0), action[:, None]], axis=1)
        return nn.Dense(1, name="out")(x)[:, 0]


@pytest.fixture
def linear(monkeypatch):
    """Networks of one layer."""
    monkeypatch.setattr(ddpg, "Actor", LinearActor)
    monkeypatch.setattr(ddpg, "Critic", LinearCritic)


def test_an_update_of_linear_networks_is_ddpg(linear):
    """mu = w s + b, Q = u s + v a + c: gradients and targets by hand."""
    options = ddpg.Options(
        standardise=False,
        actor_lr=0.01,
        critic_lr=0.1,
        discount=0.9,
        target_rate=1e-3,
        batch=2,
    )
    w, u = {"actor": (0.5, 0.1), "target_actor": (-0.7, 0.3)}, {}
    u |= {"critic": (0.4, -0.8, 0.2), "target_critic": (1.1, 0.6, -0.5)}
    agent = jax.eval_shape(lambda: ddpg.init(jax.random.key(0), options))
    agent = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), agent._replace(memory=None)
    )
    for name, (*kernel, bias) in (w | u).items():
        layer = {"kernel": np.float32(kernel)[:, None], "bias": np.float32([bias])}
        agent = agent._replace(**{name: {"out": layer}})
    losses, action = np.array([[1.0, 0.4], [2.0, 2.5]]), np.array([0.2, 0.9])
    rows = ddpg.Transitions(
        np.float32(losses), np.ones(2, np.int32), np.float32(action)
    )
    result = interpreted.jit(lambda a, r: ddpg.update_agent(a, r, options))(agent, rows)

    def flat(tree):
        return np.append(tree["out"]["kernel"][:, 0], tree["out"]["bias"])

    s, after = losses.T
    target, old = np.array(w["target_actor"]), np.array(u["target_critic"])
    then = sigmoid(target[0] * after + target[1])
    y = s - after + 0.9 * (old[0] * after + old[1] * then + old[2])
    q = np.stack([s, action, np.ones(2)], axis=1)
    slope = 2 * (q @ u["critic"] - y) @ q / 2
    np.testing.assert_allclose(10 * flat(result.critic_opt[0].mu), slope, rtol=1e-5)
    critic = u["critic"] - 0.1 * np.sign(slope)
    np.testing.assert_allclose(flat(result.critic), critic, rtol=1e-5)
    act = sigmoid(w["actor"][0] * s + w["actor"][1])
    slope = -critic[1] * act * (1 - act) @ np.stack([s, np.ones(2)], axis=1) / 2
    np.testing.assert_allclose(10 * flat(result.actor_opt[0].mu), slope, rtol=1e-5)
    actor = w["actor"] - 0.01 * np.sign(slope)
    np.testing.assert_allclose(flat(result.actor), actor, rtol=1e-5)
    for name, before, now in (("actor", target, actor), ("critic", old, critic)):
        gap = flat(getattr(result, f"target_{name}")) - before
        np.testing.assert_allclose(gap, 1e-3 * (now - before), rtol=1e-3)


@pytest.mark.parametrize("state, standardise", [("scalar", False), ("window", True)])
def test_an_update_is_ddpg(state, standardise):
    options = ddpg.Options(
        state=state,
        standardise=standardise,
        actor_lr=0.01,
        critic_lr=0.1,
        discount=0.9,
        target_rate=0.2,
        **SMALL,
    )
    length = options.length
    rng = np.random.default_rng(1)
    agent = shaken(ddpg.init(jax.random.key(0), options))
    mean, std, power = 0.4, 1.3, 0.01
    agent = agent._replace(mean=np.array(mean), variance=np.array(std**2))
    agent = agent._replace(power=np.array(power))
    # Of unknown losses the values must not matter.
    rows = ddpg.Transitions(
        losses=rng.normal(size=(5, length + 1)) * [[1], [1], [0.1], [1], [8]],
        known=np.minimum([1, 2, 3, 4, 4], length).astype(np.int32),
        action=rng.uniform(size=5),
    )
    with jax.enable_x64(True):
        given = jax.tree.map(jnp.asarray, (agent, rows))
        found = interpreted.jit(lambda a, r: ddpg.update_agent(a, r, options))(*given)
        found = f64(found)

    losses = rows.losses
    reward = losses[:, -2] - losses[:, -1]
    if standardise:
        losses = np.clip((losses - mean) / std, -5, 5)
        reward = np.clip(reward / np.sqrt(power), -5, 5)
        assert (np.abs(losses) == 5).any() and (np.abs(reward) == 5).any()
        assert (np.abs(reward) < 5).any()
    s, after = losses[:, :-1], losses[:, 1:]
    known, later = rows.known, np.minimum(rows.known + 1, length)
    action = sigmoid(actor_twin(agent.target_actor, after, later))
    y = reward + 0.9 * critic_twin(agent.target_critic, after, later, action)

    # At the first step of Adam its first moment is a tenth of the gradient.
    grads = jax.tree.map(lambda m: 10 * m, found.critic_opt[0].mu)
    error = lambda p: np.mean((critic_twin(p, s, known, rows.action) - y) ** 2)  # noqa: E731
    chex.assert_trees_all_close(
        grads, gradient(error, agent.critic), rtol=1e-6, atol=1e-8
    )
    chex.assert_trees_all_close(
        found.critic, adam_step(agent.critic, grads, 0.1), rtol=1e-9
    )

    def value(params):
        act = sigmoid(actor_twin(params, s, known))
        return -np.mean(critic_twin(found.critic, s, known, act))

    grads = jax.tree.map(lambda m: 10 * m, found.actor_opt[0].mu)
    expected = gradient(value, agent.actor)
    assert np.abs(expected["output"]["kernel"]).max() > 1e-3
    chex.assert_trees_all_close(grads, expected, rtol=1e-5, atol=1e-9)
    chex.assert_trees_all_close(
        found.actor, adam_step(agent.actor, grads, 0.01), rtol=1e-9
    )

    for name in ("actor", "critic"):
        old, new = getattr(agent, "target_" + name), getattr(found, name)
        mixed = jax.tree.map(lambda o, n: 0.8 * o + 0.2 * n, old, new)
        chex.assert_trees_all_close(getattr(found, "target_" + name), mixed, rtol=1e-12)


def test_actions_are_the_actors_with_noise_that_fades():
    options = ddpg.Options(
        state="window",
        warmup=2,
        noise_decay=6,
        noise_reversion=0.3,
        noise_scale=2.0,
        noise_step=0.25,
        low=1e-4,
        high=1.0,
        scale="log",
        **SMALL,
    )
    agent = begin(options)
    agent = agent._replace(
        losses=jnp.array([9.0, 9.0, 0.3, -0.2]),
        count=jnp.int32(2),
        mean=jnp.float32(0.1),
        variance=jnp.float32(0.04),
        noise=jnp.float32(0.7),
    )
    seen = (np.array([[0.0, 0.0, 0.3, -0.2]]) - 0.1) / 0.2
    u = actor_twin(f64(agent.actor), seen, [2])[0]
    act, x = interpreted.jit(lambda a, k: ddpg.choose_rate(a, k, options)), 0.7
    for step, key in enumerate(jax.random.split(jax.random.key(1), 8)):
        # A reward is due to an action that has a loss just before it.
        lr, agent = act(agent._replace(fresh=jnp.bool_(step != 3)), key)
        uniform, normal = jax.random.split(key)
        x = x - 0.3 * x * 0.25 + 2.0 * 0.5 * float(jax.random.normal(normal))
        action = sigmoid(u + max(1 - step / 6, 0) * x)
        if step < 2:
            action = float(jax.random.uniform(uniform))
        np.testing.assert_allclose(agent.noise, x, rtol=1e-5)
        np.testing.assert_allclose(agent.action, action, rtol=1e-5)
        np.testing.assert_allclose(lr, 1e-4 ** (1 - action), rtol=1e-4)
        assert agent.steps == step + 1 and agent.pending == (step != 3)
        assert agent.losses.tolist() == np.float32([9, 9, 0.3, -0.2]).tolist()


@pytest.mark.parametrize(
    ("scale", "middle", "place"),
    [
        ("linear", (1e-5 + 10) / 2, lambda lr: (lr - 1e-5) / (10 - 1e-5)),
        ("log", 1e-2, lambda lr: (np.log10(lr) + 5) / 6),
    ],
    ids=["linear", "log"],
)
def test_rates_span_the_range_evenly_on_their_scale(linear, scale, middle, place):
    options = ddpg.Options(low=1e-5, high=10.0, scale=scale)
    rates = ddpg.scale_action(jnp.array([0.0, 0.5, 1.0]), options)
    np.testing.assert_allclose(rates, [1e-5, middle, 10.0], rtol=1e-5)
    # The first actions are uniform.
    agent = begin(options)
    keys = jax.random.split(jax.random.key(1), 500)
    choose = jax.vmap(lambda key: ddpg.choose_rate(agent, key, options))
    lr, _ = interpreted.jit(choose)(keys)
    shares = np.sort(place(np.float64(lr)))
    np.testing.assert_allclose(shares, (np.arange(500) + 0.5) / 500, atol=0.08)


def small(**options):
    return ddpg.Options(**(dict(state="window", warmup=4) | SMALL | options))


def jitted(options):
    """`act` and `observe`."""
    return [
        interpreted.jit(lambda *a, f=f: f(*a, options))
        for f in (ddpg.choose_rate, ddpg.observe)
    ]


def test_a_transition_is_stored_once_its_loss_is_known(linear, monkeypatch):
    options = small(window=2, capacity=3, batch=3)
    monkeypatch.setattr(ddpg, "update_agent", lambda agent, rows, options: agent)
    agent = begin(options)
    key, actions = jax.random.key(1), []
    chosen, seen = jitted(options)
    act = None  # one action; else a loss
    order = [act, 5.0, act, 3.0, act, 2.5, 2.0, act, jnp.nan, act, 1.5, act, 1.0]
    for loss in [*order, act, act, 0.5, act, 0.25]:
        if loss is act:
            key = jax.random.fold_in(key, 0)
            _, agent = chosen(agent, key)
            actions.append(float(agent.action))
        else:
            agent = seen(agent, key, jnp.float32(loss))
    stored = agent.memory.items
    # Not stored: the action before any loss, those around nan, the first of two in a
    # row and the second, of which the loss before it is not known. The last transition
    # took the place of the first, [0, 5, 3].
    found = [[1.0, 0.5, 0.25], [5.0, 3.0, 2.5], [2.0, 1.5, 1.0]]
    assert stored.losses.tolist() == found
    assert stored.known.tolist() == [2, 2, 2]
    assert stored.action.tolist() == [actions[8], actions[2], actions[5]]
    assert agent.memory.seen == 4 and agent.losses.tolist() == [0.5, 0.25]
    assert agent.count == 8 and not agent.pending


def test_moments_are_those_of_the_losses_and_bounded(linear, monkeypatch):
    monkeypatch.setattr(ddpg, "update_agent", lambda agent, rows, options: agent)
    options = small(batch=8)
    agent = begin(options)
    losses = np.array([2.0, 1.5, 1.6, 40.0, 1.0, 1.1, 0.7])
    power, rewards = 0.0, losses[:-1] - losses[1:]
    for n, reward in enumerate(rewards, start=1):
        square = reward**2 if n == 1 else min(reward**2, 25 * power + 1e-12)
        power += (square - power) / n
    assert power < np.mean(rewards**2) / 2
    act, observe = jitted(options)
    for loss in losses:
        agent = observe(agent, jax.random.key(1), loss)
        _, agent = act(agent, jax.random.key(2))
    np.testing.assert_allclose(agent.mean, losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(agent.variance, losses.var(), rtol=1e-5)
    np.testing.assert_allclose(agent.power, power, rtol=1e-5)
    # With many values the newest counts for a thousandth.
    memory = agent.memory._replace(seen=jnp.int32(5000))
    late = agent._replace(count=jnp.int32(5000), memory=memory)
    then = observe(late, jax.random.key(1), 2.7)
    off = 2.7 - losses.mean()
    np.testing.assert_allclose(then.mean, losses.mean() + 1e-3 * off, rtol=1e-5)
    variance = 0.999 * (losses.var() + 1e-3 * off**2)
    np.testing.assert_allclose(then.variance, variance, rtol=1e-5)
    np.testing.assert_allclose(then.power, power + 1e-3 * (4 - power), rtol=1e-5)


def test_it_learns_from_what_is_stored_alone(linear, monkeypatch):
    options = small(state="scalar", capacity=50, batch=4)
    # What `learn` is given, seen through what it returns.
    monkeypatch.setattr(
        ddpg, "update_agent", lambda agent, rows, options: agent._replace(critic=rows)
    )
    agent = begin(options)
    empty = ddpg.Transitions(jnp.zeros((4, 2)), jnp.zeros(4, jnp.int32), jnp.zeros(4))
    agent = agent._replace(critic=empty)
    act, observe = jitted(options)
    for loss in [1.0, 2.0, 3.0, 4.0, 5.0]:
        assert not np.any(agent.critic.losses)
        before = observe(agent, jax.random.key(1), loss)
        _, agent = act(before, jax.random.key(2))
    assert np.all(agent.critic.losses > 0)  # four there are, so there was an update
    keys = jax.random.split(jax.random.key(1), 100)
    drawn = jax.vmap(observe, (None, 0, None))(agent, keys, 6.0).critic
    assert set(drawn.losses[..., 0].ravel().tolist()) == {1.0, 2.0, 3.0, 4.0, 5.0}
    np.testing.assert_array_equal(drawn.losses[..., 1], drawn.losses[..., 0] + 1)
    # No new transition, no update.
    same = observe(before._replace(critic=empty), keys[0], 6.0)
    assert not np.any(same.critic.losses)


@functools.cache
@functools.cache
def program():
    """One compiled step: the agent is told a loss and answers with a rate."""
    options = small()

    def step(agent, key, loss):
        k_observe, k_act = jax.random.split(key)
        agent = ddpg.observe(agent, k_observe, loss, options)
        return ddpg.choose_rate(agent, k_act, options)

    return options, jax.jit(step)


def told(agent, losses, seed=1, start=0, step=None):
    """Rates and the agent after some losses, which come with keys of their own."""
    step = step or program()[1]
    rates = []
    for i, loss in enumerate(losses, start=start):
        key = jax.random.fold_in(jax.random.key(seed), i)
        lr, agent = step(agent, key, jnp.float32(loss))
        rates.append(float(lr))
    return rates, agent


LOSSES = 2 + np.sin(np.arange(24.0))


def test_a_run_goes_on_bitwise_and_compiles_once():
    options, step = program()
    agent = begin(options)
    assert all(leaf.size for leaf in jax.tree.leaves(agent))
    start = agent
    rates, whole = told(agent, LOSSES)
    _, half = told(agent, LOSSES[:11])
    half = jax.tree.map(jnp.asarray, jax.device_get(half))
    later, again = told(half, LOSSES[11:], start=11)
    assert later == rates[11:] and len(set(rates)) == len(rates)
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    assert step._cache_size() == 1
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), start.critic, whole.critic)
    assert all(jax.tree.leaves(moved))
    assert jax.tree.map(lambda x: x.dtype, start) == jax.tree.map(
        lambda x: x.dtype, whole
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_loss_that_is_no_number_poisons_nothing(bad):
    options, _ = program()
    agent = begin(options)
    _, agent = told(agent, [bad, *LOSSES[:9]])
    _, after = told(agent, [bad], start=50)
    kept = ("actor", "critic", "memory", "losses", "count", "mean", "variance", "power")
    for name in kept:
        jax.tree.map(
            np.testing.assert_array_equal, getattr(after, name), getattr(agent, name)
        )
    rates, after = told(after, LOSSES[9:], start=60)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after))
    assert np.all(np.isfinite(rates))
    # Actions before the first loss, and before the bad ones, are in no transition.
    assert after.memory.seen == len(LOSSES) - 2
