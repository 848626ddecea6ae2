"""The steps of ICL: plain ones, old and new batches in turn, meta-optimisation."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcl import core, sharding
from jaxcl.losses import prototype
from jaxcl.methods.icl import ddpg, orders, passes

CONTROLS = ("frozen", "random")  # no step after the first task changes the network


class StepSetup(NamedTuple):
    """The constants of a step; for the options see `icl.make`."""

    parts: core.Parts
    passes: passes.Passes
    plan: orders.OrderPlan
    learnt_rate: bool
    fixed_lr: float | None
    inner_lr: float
    second_order: bool
    distill_weight: float
    agent: ddpg.Options


class Extra(NamedTuple):
    """ICL's state apart from the network, the same for all strategies."""

    growth: jax.Array  # f32[], new items over all items; 0 in the first task
    old_steps: jax.Array  # i32[], steps on old items in an epoch without meta
    epoch_steps: jax.Array  # i32[], all steps of such an epoch
    agents: dict[str, ddpg.AgentState]  # "old" and "new", for the rates on these items
    first: core.PyTree  # f32, params and stats at the beginning of the run
    teacher: core.PyTree  # f32, params and stats at the end of the last task


def step(setup: StepSetup, state: core.TrainState, batch: core.Batch):
    """Take a step on a batch, or on the batches that `orders` joined."""
    if batch["index"].ndim == 1:
        return _plain_step(setup, state, batch)
    return (_meta_step if setup.plan.meta else _turn_step)(setup, state, batch)


def _descend_plainly(setup, params, agent, key, value, grads, fixed):
    """Return parameters after a step of plain SGD; the agent, and the rate of the step.

    Args:
      params: parameters at which `value` and `grads` were taken.
      agent: sets the rate with `learnt_rate`.
      key: random key of the agent.
      value, grads: the loss and its gradient.
      fixed: the rate without `learnt_rate`.
    """
    lr = fixed
    if setup.learnt_rate:
        k_observe, k_act = jax.random.split(key)
        value = jax.lax.stop_gradient(value)
        agent = ddpg.observe(agent, k_observe, value, setup.agent)
        lr, agent = ddpg.choose_rate(agent, k_act, setup.agent)
    return jax.tree.map(lambda p, g: p - lr * g, params, grads), agent, lr


def _take_outer_step(setup, state, key, value, grads, stats, metrics, passes):
    """Return the state after an outer step down `grads`."""
    metrics |= {"loss": value, "grad_norm": optax.tree.norm(grads)}
    if setup.learnt_rate or setup.fixed_lr is not None:
        agents = state.extra.agents
        params, agent, lr = _descend_plainly(
            setup, state.params, agents["new"], key, value, grads, setup.fixed_lr
        )
        extra = state.extra._replace(agents=agents | {"new": agent})
        state = state.replace(params=params, step=state.step + 1, extra=extra)
    else:
        lr = core.rate(setup.parts, state)
        state = core.apply_gradients(state, grads, setup.parts.tx, lr)
    metrics |= {"lr": lr, "passes": jnp.float32(passes)}
    return state.replace(stats=stats), metrics


def _take_inner_steps(setup, state, params, key, old, new):
    """Take the inner steps (P, Eq. 10): `params`, agent, losses and rates f32[S].

    Args:
      old, new: the batches of the steps, [S, B, ...]; old rows are anchors.
    """

    def loss(params, stats, key, batch, other_batch):
        anchors_old, _, after = setup.passes.incremental_losses(
            params, stats, key, batch, other_batch, state.extra.growth
        )
        return anchors_old(), after

    def inner_step(carry, batches):
        (params, stats, agent), (key, *sides) = carry, batches
        k_loss, k_rate = jax.random.split(key)
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(
            params, stats, k_loss, *sides
        )
        params, agent, lr = _descend_plainly(
            setup, params, agent, k_rate, value, grads, setup.inner_lr
        )
        return (params, stats, agent), (value, lr)

    steps = len(old["index"])
    keys = jax.random.split(key, steps + 1)
    batches, k_reward = (keys[:-1], old, new), keys[-1]
    carry = params, state.stats, state.extra.agents["old"]
    (params, stats, agent), losses_and_rates = sharding.loop(
        inner_step, carry, batches, convolves=not setup.passes.graphs
    )
    if setup.learnt_rate:
        # The next inner loop begins at other weights, so that its first loss is no
        # reward of the last action: the last batch, seen once more, gives it.
        last_key, *sides = jax.tree.map(lambda x: x[-1], batches)
        k_loss, _ = jax.random.split(last_key)
        point = jax.lax.stop_gradient((params, stats))
        value, _ = loss(*point, k_loss, *sides)
        agent = ddpg.observe(agent, k_reward, value, setup.agent)
    return params, (agent, *losses_and_rates)


def _relative_change(before, after):
    """Return |after - before| / |before|, f32[]."""
    difference = jax.tree.map(lambda a, b: a - b, after, before)
    return optax.tree.norm(difference) / optax.tree.norm(before)


def _meta_step(setup, state, batch):
    steps, size = batch["index"].shape[0] // 2 - 1, batch["index"].shape[1]
    k_inner, k_outer, k_agent = jax.random.split(core.step_key(state), 3)
    inner_old, inner_new, new, old = (
        jax.tree.map(lambda x, part=part: x[part], batch)
        for part in (slice(0, steps), slice(steps, 2 * steps), -2, -1)
    )

    def outer_loss(params):
        _, anchors_new, stats = setup.passes.incremental_losses(
            params, state.stats, k_outer, new, old, state.extra.growth
        )
        return anchors_new(), stats

    def through_inner(params):
        params, aux = _take_inner_steps(
            setup, state, params, k_inner, inner_old, inner_new
        )
        value, stats = outer_loss(params)
        return value, (stats, params, aux)

    if setup.second_order:
        (value, (stats, adapted, aux)), grads = jax.value_and_grad(
            through_inner, has_aux=True
        )(state.params)
    else:
        adapted, aux = _take_inner_steps(
            setup, state, state.params, k_inner, inner_old, inner_new
        )
        (value, stats), grads = jax.value_and_grad(outer_loss, has_aux=True)(adapted)
    agent, losses, rates = aux
    metrics = {
        "inner_loss": losses.mean(),
        "inner_lr": rates.mean(),
        "inner_moved": _relative_change(state.params, adapted),
    }
    extra = state.extra._replace(agents=state.extra.agents | {"old": agent})
    state, passes = state.replace(extra=extra), 3 * size * (steps + 1)
    return _take_outer_step(setup, state, k_agent, value, grads, stats, metrics, passes)


def _turn_step(setup, state, batches):
    k_loss, k_agent = jax.random.split(core.step_key(state))
    batch, other_batch = (jax.tree.map(lambda x, i=i: x[i], batches) for i in (0, 1))
    extra, steps_done = state.extra, state.step - state.task_start
    turn = steps_done % extra.epoch_steps < extra.old_steps

    def loss(params):
        old, new, stats = setup.passes.incremental_losses(
            params, state.stats, k_loss, batch, other_batch, extra.growth
        )
        return jnp.where(turn, old(), new()), stats

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    passes = 3 * len(batch["index"])
    return _take_outer_step(setup, state, k_agent, value, grads, stats, {}, passes)


def _plain_update(setup, state, grads):
    """Step down `grads`; after the first task by plain SGD if `fixed_lr` is set.

    Returns:
      the state with new parameters, and the rate of the step.
    """
    lr = core.rate(setup.parts, state)
    after = core.apply_gradients(state, grads, setup.parts.tx, lr)
    if setup.fixed_lr is None:
        return after, lr
    rate = jnp.float32(setup.fixed_lr)
    sgd = jax.tree.map(lambda p, g: p - rate * g, state.params, grads)
    params, opt_state, lr = jax.tree.map(
        functools.partial(jnp.where, state.task > 0),
        (sgd, state.opt_state, rate),
        (after.params, after.opt_state, lr),
    )
    return after.replace(params=params, opt_state=opt_state), lr


def _plain_step(setup, state, batch):
    key = core.step_key(state)

    def loss(params):
        value, (stats, *rows) = setup.passes.plain_loss(params, state.stats, key, batch)
        if setup.plan.strategy == "distill":
            value += setup.distill_weight * _distil(setup, state, key, batch, *rows)
        return value, stats

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    after, lr = _plain_update(setup, state, grads)
    metrics = {"loss": value, "lr": lr, "grad_norm": optax.tree.norm(grads)}
    metrics["passes"] = jnp.float32(2 * len(batch["index"]))
    trees = after.params, stats
    if setup.plan.strategy in CONTROLS:
        before = state.params, state.stats
        trees = jax.tree.map(
            lambda old, new: jnp.where(state.task > 0, old, new), before, trees
        )
    return after.replace(params=trees[0], stats=trees[1]), metrics


def _distil(setup, state, key, batch, rows, positives):
    """Return IRD to the encoder of the last task; 0 in the first task."""

    def distilled():
        *past, _ = setup.passes.pairs(*state.extra.teacher, key, batch, train=False)
        mask = jnp.concatenate([batch["index"] >= 0] * 2)
        both = jnp.concatenate([rows, positives]), jnp.concatenate(past)
        return prototype.ird(*both, example_mask=mask)

    return jax.lax.cond(state.task == 0, lambda: jnp.zeros(()), distilled)
