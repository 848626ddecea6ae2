"""The steps of ICL: plain ones, old and new batches in turn, meta-optimisation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcl import core
from jaxcl.losses import prototype
from jaxcl.methods.icl import ddpg, orders
from jaxcl.methods.icl import passes as passes_lib

CONTROLS = ("frozen", "random")  # whose network no step changes after the first task


class Setup(NamedTuple):
    """What a step knows beside its state; for the options see `icl.make`."""

    parts: core.Parts
    passes: passes_lib.Passes
    plan: orders.Plan
    learnt_rate: bool
    inner_lr: float | None
    second_order: bool
    distill_weight: float
    agent: ddpg.Options
    written_out: bool  # the inner steps, one after another; otherwise a scan


class Extra(NamedTuple):
    """What ICL keeps beside the network; the same for all strategies."""

    growth: jax.Array  # f32[], new items over all items; 0 in the first task
    old_steps: jax.Array  # i32[], of an epoch without meta: those on old items,
    epoch_steps: jax.Array  # i32[], and all
    agents: dict[str, ddpg.Agent]  # "old" and "new", of the rates on these items
    first: core.PyTree  # f32, params and stats that the run began with
    teacher: core.PyTree  # f32, those from the task before


def step(setup: Setup, state, batch):
    """One step on a batch, or on the parts that `icl_orders` laid side by side."""
    if batch["index"].ndim == 1:
        return _plain_step(setup, state, batch)
    return (_meta_step if setup.plan.meta else _turn_step)(setup, state, batch)


def _descended(setup, state, params, held, key, value, grads):
    """Parameters after a step of SGD, at the rate of an agent or a fixed one."""
    if setup.learnt_rate:
        k_observe, k_act = jax.random.split(key)
        value = jax.lax.stop_gradient(value)
        held = ddpg.observe(held, k_observe, value, setup.agent)
        lr, held = ddpg.act(held, k_act, setup.agent)
    else:
        fixed = setup.inner_lr
        lr = core.rate(setup.parts, state) if fixed is None else fixed
    return jax.tree.map(lambda p, g: p - lr * g, params, grads), held, lr


def _updated(setup, state, key, value, grads, stats, metrics, passes):
    """The state after an outer step down `grads`."""
    metrics |= {"loss": value, "grad_norm": optax.tree.norm(grads)}
    if setup.learnt_rate:
        agents = state.extra.agents
        params, held, lr = _descended(
            setup, state, state.params, agents["new"], key, value, grads
        )
        extra = state.extra._replace(agents=agents | {"new": held})
        state = state.replace(params=params, step=state.step + 1, extra=extra)
    else:
        lr = core.rate(setup.parts, state)
        state = core.apply_gradients(state, grads, setup.parts.tx, lr)
    metrics |= {"lr": lr, "passes": jnp.float32(passes)}
    return state.replace(stats=stats), metrics


def _adapted(setup, state, params, key, old, more):
    """P, Eq. 10: `params` after the inner steps, the agent, losses and rates f32[S]."""

    def inner(carry, given):
        (params, stats, held), (key, part, others) = carry, given
        k_loss, k_rate = jax.random.split(key)

        def loss(params):
            anchors_old, _, after = setup.passes.against(
                params, stats, k_loss, part, others, state.extra.growth
            )
            return anchors_old(), after

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        params, held, lr = _descended(setup, state, params, held, k_rate, value, grads)
        return (params, stats, held), (value, lr)

    # The first loss is of other weights than the last action's.
    held = state.extra.agents["old"]._replace(pending=jnp.zeros((), bool))
    steps = len(old["index"])
    given = jax.random.split(key, steps), old, more
    carry = params, state.stats, held
    if not setup.written_out:
        (params, _, held), found = jax.lax.scan(inner, carry, given)
        return params, (held, *found)
    found = []
    for i in range(steps):
        carry, each = inner(carry, jax.tree.map(lambda x, i=i: x[i], given))
        found.append(each)
    params, _, held = carry
    return params, (held, *jax.tree.map(lambda *x: jnp.stack(x), *found))


def _meta_step(setup, state, batch):
    steps, size = batch["index"].shape[0] // 2 - 1, batch["index"].shape[1]
    k_inner, k_outer, k_agent = jax.random.split(core.step_key(state), 3)
    old, more, new, stored = (
        jax.tree.map(lambda x, at=at: x[at], batch)
        for at in (slice(0, steps), slice(steps, 2 * steps), -2, -1)
    )

    def outer(params):
        _, anchors_new, stats = setup.passes.against(
            params, state.stats, k_outer, new, stored, state.extra.growth
        )
        return anchors_new(), stats

    def through(params):
        params, aux = _adapted(setup, state, params, k_inner, old, more)
        value, stats = outer(params)
        return value, (stats, aux)

    if setup.second_order:
        (value, (stats, aux)), grads = jax.value_and_grad(through, has_aux=True)(
            state.params
        )
    else:
        params, aux = _adapted(setup, state, state.params, k_inner, old, more)
        (value, stats), grads = jax.value_and_grad(outer, has_aux=True)(params)
    held, losses, rates = aux
    metrics = {"inner_loss": losses.mean(), "inner_lr": rates.mean()}
    extra = state.extra._replace(agents=state.extra.agents | {"old": held})
    state, passes = state.replace(extra=extra), 3 * size * (steps + 1)
    return _updated(setup, state, k_agent, value, grads, stats, metrics, passes)


def _turn_step(setup, state, batch):
    k_loss, k_agent = jax.random.split(core.step_key(state))
    part, more = (jax.tree.map(lambda x, i=i: x[i], batch) for i in (0, 1))
    extra, done = state.extra, state.step - state.task_start
    turn = done % extra.epoch_steps < extra.old_steps

    def loss(params):
        old, new, stats = setup.passes.against(
            params, state.stats, k_loss, part, more, extra.growth
        )
        return jnp.where(turn, old(), new()), stats

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    passes = 3 * len(part["index"])
    return _updated(setup, state, k_agent, value, grads, stats, {}, passes)


def _plain_step(setup, state, batch):
    key = core.step_key(state)

    def loss(params):
        value, (stats, *rows) = setup.passes.plain_loss(params, state.stats, key, batch)
        if setup.plan.strategy == "distill":
            value += setup.distill_weight * _distilled(setup, state, key, batch, *rows)
        return value, stats

    after, stats, metrics = core.descend(setup.parts, state, loss)
    metrics["passes"] = jnp.float32(2 * len(batch["index"]))
    trees = after.params, stats
    if setup.plan.strategy in CONTROLS:
        before = state.params, state.stats
        trees = jax.tree.map(
            lambda old, new: jnp.where(state.task > 0, old, new), before, trees
        )
    return after.replace(params=trees[0], stats=trees[1]), metrics


def _distilled(setup, state, key, part, rows, positives):
    """IRD to the encoder of the task before; 0 in the first task."""

    def apart():
        *past, _ = setup.passes.pairs(*state.extra.teacher, key, part, train=False)
        mask = jnp.concatenate([part["index"] >= 0] * 2)
        both = jnp.concatenate([rows, positives]), jnp.concatenate(past)
        return prototype.ird(*both, example_mask=mask)

    return jax.lax.cond(state.task == 0, lambda: jnp.zeros(()), apart)
