"""A learning rate that an agent sets at every step, from the losses: ICL's LRL.

The state s_t is the loss of the present mini-batch, or the last few losses. The action
a_t in [0, 1] is the place of the learning rate in a range,
  lr_t = low + (high - low) a_t,                    scale "linear", the default
  lr_t = exp(log low + (log high - log low) a_t),   scale "log"
and the reward is how far the loss falls after it, r_t = L_t - L_{t+1} (eq. 15). An
LSTM mu picks a_t = sigmoid(mu(s_t) + e_t x_t) with Ornstein-Uhlenbeck noise x_t (eq.
14); a small network Q(s, a) judges it. Both learn by DDPG from a memory of transitions.

These are pure functions over one pytree, `AgentState`, which `init(key, options)`
makes. So they run within a jitted step, are saved with the state, and work under
`vmap`:

  options = ddpg.Options(high=1.0)
  agent = ddpg.init(key, options)
  def step(carry, key):
      params, agent = carry
      k_observe, k_act = jax.random.split(key)
      value, grads = jax.value_and_grad(loss)(params)
      agent = ddpg.observe(agent, k_observe, value, options)
      lr, agent = ddpg.choose_rate(agent, k_act, options)
      params = jax.tree.map(lambda p, g: p - lr * g, params, grads)
      return (params, agent), (value, lr)

An actor that has learnt nothing stays near a = 1/2. With the default range that is a
rate of 0.05 on the linear scale, at which plain SGD trains, and of 3e-4 on the log
scale, at which it hardly moves: set a `low` nearer to `high` there.

Departures. ICL states no range of rates and no constants of DDPG. The range, and its
linear scale, are those of the released code. The constants are Lillicrap et al.'s,
without weight decay and batch norm, except for
- noise inside the sigmoid, and 100 uniform actions at first,
- `standardise`: from raw losses, times 0.01, an agent learnt nothing,
- dt = 1, and Adam at 3e-3 for the critic: with 0.01 and 1e-3 agents learnt less often,
- transitions, which are drawn with replacement.
The released code has Options(state="window", standardise=False, actor_width=10,
actor_lr=1e-5, critic_lr=1e-5, noise_step=0.01, capacity=6_000_000).

Sources: Ji et al., WSDM 2023, Section 3.3.2; Lillicrap et al., "Continuous Control with
Deep Reinforcement Learning", ICLR 2016, Algorithm 1.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxcl import core, schema
from jaxcl.errors import Refused
from jaxcl.memory import buffer, policies

_FIELD = "config.method.agent"
_HUGE = 1e9  # losses beyond it are dropped: gradients of their squares overflow
_CLIP = 5.0  # bound of standardised losses and rewards
_WEIGHT = 1e-3  # least weight of the newest value in the running moments
_TINY = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Constants of an agent; a value out of its range raises Refused."""

    low: schema.Positive = 1e-6  # smallest learning rate
    high: schema.Positive = 0.1  # largest
    scale: Literal["linear", "log"] = "linear"  # on which actions are even between them
    state: Literal["scalar", "window"] = "scalar"  # the last losses: 1, or `window`
    window: schema.Count = 32  # losses of that state
    # Losses and rewards by running moments, see `update_agent`
    standardise: bool = True
    actor_width: schema.Width = 20  # hidden units of each of the two LSTM layers
    critic_width: schema.Width = 10  # of each of the critic's two hidden layers
    actor_lr: schema.Weight = 1e-4  # of Adam
    critic_lr: schema.Weight = 3e-3  # of Adam
    discount: schema.Share = 0.99  # gamma
    target_rate: schema.Share = 1e-3  # m, how much of the networks enters their targets
    batch: schema.Count = 32  # transitions of an update
    capacity: schema.Count = 10_000  # stored transitions, always the latest
    warmup: schema.Natural = 100  # first actions, which are uniform in [0, 1]
    noise_reversion: schema.Weight = 0.15  # theta, per unit of time
    noise_scale: schema.Weight = 0.2  # sigma, before the sigmoid
    noise_step: schema.Weight = 1.0  # dt, units of time between two actions
    noise_decay: schema.Count = 50_000  # actions after which there is no noise

    def __post_init__(self):
        schema.check_arguments(Options, vars(self), _FIELD)
        _require(self.low < self.high, "low", self.low, f"below high={self.high}")
        enough = self.capacity >= self.batch
        _require(enough, "capacity", self.capacity, f"batch={self.batch} or more")

    @property
    def length(self) -> int:
        """Count the losses of a state, W."""
        return 1 if self.state == "scalar" else self.window


class Transitions(NamedTuple):
    """Transitions (s, a, r, s'); s and s' overlap and determine r."""

    losses: jax.Array  # f32[N, W+1], the W of s, oldest first, then the loss after a
    known: jax.Array  # i32[N], how many of the W exist, always the last ones
    action: jax.Array  # f32[N], a in [0, 1]


class AgentState(NamedTuple):
    """The state of an agent."""

    actor: core.PyTree  # f32, parameters of mu
    critic: core.PyTree  # f32, of Q
    target_actor: core.PyTree  # f32, of mu', which follows mu slowly
    target_critic: core.PyTree  # f32, of Q'
    actor_opt: core.PyTree  # Adam's
    critic_opt: core.PyTree
    memory: buffer.Buffer  # of `Transitions`, the oldest overwritten first
    losses: jax.Array  # f32[W], the last losses, zeros first, the newest at the end
    count: jax.Array  # i32[], losses so far
    action: jax.Array  # f32[], the last one, in [0, 1]
    fresh: jax.Array  # bool[], the loss of the present step is known
    pending: jax.Array  # bool[], the next loss decides the reward of `action`
    noise: jax.Array  # f32[], x of the Ornstein-Uhlenbeck process
    steps: jax.Array  # i32[], actions so far
    mean: jax.Array  # f32[], running mean of the losses
    variance: jax.Array  # f32[], and their running variance
    power: jax.Array  # f32[], running mean of the squared rewards


class Actor(nn.Module):
    """mu: two LSTM layers over the losses of a state, then a Linear of the last step.

    A layer starts with h = c = 0 and skips unknown losses. With the quarters
    (i, f, g, o) of x W + h U + b:
      c <- sigmoid(f) c + sigmoid(i) tanh(g),  h <- sigmoid(o) tanh(c).
    """

    width: int  # of h and of c, in both layers

    @nn.compact
    def __call__(self, losses: jax.Array, exists: jax.Array) -> jax.Array:
        """Map losses f32[B, W] and known bool[B, W] to f32[B], before the sigmoid."""
        x, exists = losses.T[..., None], exists.T[..., None]  # time first
        shape = self.width, 4 * self.width
        for layer in (1, 2):
            # All steps at once. linen's RNN is no faster and compiles longer.
            gates = nn.Dense(shape[1], name=f"input{layer}")(x)
            start = nn.initializers.orthogonal()
            recurrent = self.param(f"recurrent{layer}", start, shape)

            def run_cell(carry, step, recurrent=recurrent):
                (h, c), (gates, exists) = carry, step
                i, f, g, o = jnp.split(gates + h @ recurrent, 4, axis=-1)
                new = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
                h = jnp.where(exists, nn.sigmoid(o) * jnp.tanh(new), h)
                return (h, jnp.where(exists, new, c)), h

            zeros = jnp.zeros((len(losses), self.width), x.dtype)
            _, x = jax.lax.scan(run_cell, (zeros, zeros), (gates, exists))
        return nn.Dense(1, name="output")(x[-1])[:, 0]


class Critic(nn.Module):
    """Q: three Linears with leaky ReLUs between them; unknown losses are 0."""

    width: int  # of the two hidden layers

    @nn.compact
    def __call__(
        self, losses: jax.Array, exists: jax.Array, action: jax.Array
    ) -> jax.Array:
        """Map losses, known [B, W] and action f32[B] in [0, 1] to values f32[B]."""
        losses = jnp.where(exists, losses, 0)
        x = jnp.concatenate([losses, 2 * action[:, None] - 1], axis=-1)
        for layer in (1, 2):
            start = nn.initializers.he_normal()
            x = nn.Dense(self.width, kernel_init=start, name=f"linear{layer}")(x)
            x = nn.leaky_relu(x)
        return nn.Dense(1, name="linear3")(x)[:, 0]


def init(key: jax.Array, options: Options) -> AgentState:
    """Make an agent without experience.

    Args:
      key: threefry key.
      options: constants of the agent.
    """
    k_actor, k_critic = jax.random.split(key)
    (actor, adam_actor), (critic, adam_critic) = _build_networks(options)
    losses = jnp.zeros((1, options.length), jnp.float32)
    mu = actor.init(k_actor, losses, losses == 0)["params"]
    q = critic.init(k_critic, losses, losses == 0, losses[:, 0])["params"]

    row = jnp.zeros(options.length + 1, jnp.float32), jnp.int32(0), jnp.float32(0)
    counts = {name: jnp.zeros((), jnp.int32) for name in ("count", "steps")}
    names = "action", "noise", "mean", "variance", "power"
    numbers = {name: jnp.zeros((), jnp.float32) for name in names}
    return AgentState(  # no two leaves share a buffer, since the state is donated
        actor=mu,
        critic=q,
        target_actor=core.copy(mu),
        target_critic=core.copy(q),
        actor_opt=adam_actor.init(mu),
        critic_opt=adam_critic.init(q),
        memory=buffer.create(Transitions(*row), options.capacity),
        losses=losses[0] + 0,
        fresh=jnp.zeros((), bool),
        pending=jnp.zeros((), bool),
        **counts,
        **numbers,
    )


def choose_rate(agent: AgentState, key: jax.Array, options: Options):
    """Choose the learning rate for a step down the loss that the agent observed last.

    The first `warmup` actions are uniform in [0, 1]. Then a = sigmoid(mu(s) + e x) with
    e = max(1 - steps / noise_decay, 0); at each action, with n standard normal,
      x <- x - theta x dt + sigma sqrt(dt) n.

    Args:
      agent: state of the agent, which has observed the loss.
      key: threefry key.
      options: constants of the agent.

    Returns:
      lr: f32[], in [low, high].
      agent: new state, which expects the loss after this step next. If the step is
        undone, set `pending` to False, so that the next loss is not its reward.
    """
    k_uniform, k_noise = jax.random.split(key)
    (actor, _), _ = _build_networks(options)
    dtype = agent.losses.dtype
    count = jnp.minimum(agent.count, options.length)
    state = _make_network_input(agent, agent.losses[None], count[None], options)
    mu = actor.apply({"params": agent.actor}, *state)[0]
    fading = jnp.maximum(1 - agent.steps / options.noise_decay, 0).astype(dtype)
    pull = options.noise_reversion * agent.noise * options.noise_step
    kick = math.sqrt(options.noise_step) * jax.random.normal(k_noise, (), dtype)
    noise = agent.noise - pull + options.noise_scale * kick
    action = jnp.where(
        agent.steps < options.warmup,
        jax.random.uniform(k_uniform, (), dtype),
        nn.sigmoid(mu + fading * noise),
    )
    agent = agent._replace(
        action=action,
        fresh=jnp.zeros_like(agent.fresh),
        pending=agent.fresh,  # no reward without a loss just before the action
        noise=noise,
        steps=agent.steps + 1,
    )
    return scale_action(action, options), agent


def scale_action(action: jax.Array, options: Options) -> jax.Array:
    """Map actions in [0, 1] to learning rates in [low, high], by `options.scale`."""
    if options.scale == "linear":
        return options.low + (options.high - options.low) * action
    low, high = math.log(options.low), math.log(options.high)
    return jnp.exp(low + (high - low) * action)


def observe(
    agent: AgentState, key: jax.Array, loss: jax.Array, options: Options
) -> AgentState:
    """Show the agent the loss of a step, before the step is made; the agent learns.

    The loss is the state of the next action and decides the reward of the last one.
    The transition of the last action is stored now, over the oldest one if the memory
    is full. Once `batch` transitions are stored, an update follows (`update_agent`) on
    `batch` uniformly drawn ones.

    A loss that is nan, infinite or beyond 1e9 is dropped, and so are the actions before
    and after it, since a transition needs both losses. If two losses follow an action,
    the second ends no transition.

    Args:
      agent: the agent so far.
      key: threefry key.
      loss: f32[], mean over the mini-batch.
      options: constants of the agent.
    """
    loss = jnp.asarray(loss, agent.losses.dtype)
    chex.assert_rank(loss, 0)
    usable = jnp.abs(loss) < _HUGE
    loss = jnp.where(usable, loss, 0)
    stored = agent.pending & usable
    losses = jnp.append(agent.losses, loss)
    row = Transitions(losses, jnp.minimum(agent.count, options.length), agent.action)
    row, mask = jax.tree.map(lambda x: x[None], (row, stored))
    slots = policies.fifo(agent.memory, mask)
    memory = buffer.write(agent.memory, slots, row, mask)
    agent = _move_moments(agent, loss, usable, stored, memory.seen)
    agent = agent._replace(
        losses=jnp.where(usable, losses[1:], agent.losses),
        count=agent.count + usable,
        fresh=usable,
        pending=jnp.zeros_like(agent.pending),
    )
    # A draw without replacement would sort a number for every slot of the memory.
    filled = jnp.minimum(memory.seen, memory.capacity)
    drawn = jax.random.randint(key, (options.batch,), 0, jnp.maximum(filled, 1))
    rows = jax.tree.map(lambda x: x[drawn], memory.items)
    # The memory stays outside of the cond, which may copy its operands.
    agent = jax.lax.cond(
        stored & (filled >= options.batch),
        lambda agent: update_agent(agent, rows, options),
        lambda agent: agent,
        agent._replace(memory=None),
    )
    return agent._replace(memory=memory)


def update_agent(agent: AgentState, rows: Transitions, options: Options) -> AgentState:
    """Update the agent by DDPG (Lillicrap et al., Alg. 1), where no state is terminal.

      y = r + gamma Q'(s', mu'(s'))
      theta_Q:  a step of Adam down the mean of (Q(s, a) - y)^2
      theta_mu: a step of Adam up the mean of Q(s, mu(s)), Q the new one
      theta' <- theta' + m (theta - theta'), for both networks

    where mu includes the sigmoid. With `standardise` a loss L enters a state as
    (L - mean) / std and r is divided by the root of its mean square, both by running
    moments and clipped to +-5.

    Args:
      agent: the agent so far.
      rows: the transitions of a mini-batch.
      options: constants of the agent.
    """
    (actor, adam_actor), (critic, adam_critic) = _build_networks(options)

    def act_by(params, state):
        return nn.sigmoid(actor.apply({"params": params}, *state))

    def value_of(params, state, action):
        return critic.apply({"params": params}, *state, action)

    inputs = _make_network_input(agent, rows.losses[:, :-1], rows.known, options)
    count = jnp.minimum(rows.known + 1, options.length)
    next_inputs = _make_network_input(agent, rows.losses[:, 1:], count, options)
    reward = rows.losses[:, -2] - rows.losses[:, -1]
    if options.standardise:
        reward = jnp.clip(reward / jnp.sqrt(agent.power + _TINY), -_CLIP, _CLIP)
    action = act_by(agent.target_actor, next_inputs)
    y = reward + options.discount * value_of(agent.target_critic, next_inputs, action)

    def critic_loss(params):
        return jnp.mean((value_of(params, inputs, rows.action) - y) ** 2)

    grads = jax.grad(critic_loss)(agent.critic)
    step, critic_opt = adam_critic.update(grads, agent.critic_opt)
    new_critic = optax.apply_updates(agent.critic, step)

    def actor_loss(params):
        return -jnp.mean(value_of(new_critic, inputs, act_by(params, inputs)))

    grads = jax.grad(actor_loss)(agent.actor)
    step, actor_opt = adam_actor.update(grads, agent.actor_opt)
    new_actor = optax.apply_updates(agent.actor, step)
    m = options.target_rate
    return agent._replace(
        actor=new_actor,
        critic=new_critic,
        target_actor=optax.incremental_update(new_actor, agent.target_actor, m),
        target_critic=optax.incremental_update(new_critic, agent.target_critic, m),
        actor_opt=actor_opt,
        critic_opt=critic_opt,
    )


def _build_networks(options):
    """Return actor and critic, each with its optimiser."""
    actor = Actor(options.actor_width), optax.adam(options.actor_lr)
    return actor, (Critic(options.critic_width), optax.adam(options.critic_lr))


def _make_network_input(agent, losses, count, options):
    """Return input of the networks: losses [B, W], and which of them are known."""
    if options.standardise:
        std = jnp.sqrt(agent.variance + _TINY)
        losses = jnp.clip((losses - agent.mean) / std, -_CLIP, _CLIP)
    length = options.length
    return losses, jnp.arange(length) >= length - count[:, None]


def _move_moments(agent, loss, usable, stored, rewards):
    """Add a loss, and if `stored` its reward, to the agent's running moments.

    The newest of n values has the weight max(1 / n, 1e-3). A squared reward counts at
    most 25 times their mean, so that one outlier does not outweigh all others.
    """
    weight = jnp.maximum(1 / (agent.count + 1), _WEIGHT).astype(loss.dtype)
    deviation = loss - agent.mean
    variance = (1 - weight) * (agent.variance + weight * deviation**2)
    square = (agent.losses[-1] - loss) ** 2
    most = _CLIP**2 * agent.power + _TINY
    square = jnp.where(rewards > 1, jnp.minimum(square, most), square)
    share = jnp.maximum(1 / jnp.maximum(rewards, 1), _WEIGHT).astype(loss.dtype)
    power = agent.power + share * (square - agent.power)
    return agent._replace(
        mean=jnp.where(usable, agent.mean + weight * deviation, agent.mean),
        variance=jnp.where(usable, variance, agent.variance),
        power=jnp.where(stored, power, agent.power),
    )


def _require(is_valid, name, value, allowed):
    if not is_valid:
        raise Refused(f"{_FIELD}.{name}={value}: must be {allowed}")
