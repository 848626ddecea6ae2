"""ICL: what new data change of InfoNCE, learnt by meta-optimisation at learnt rates.

Ji et al., "Unbiased and Efficient Self-Supervised Incremental Contrastive Learning",
WSDM 2023, called P below. The first task trains an encoder on the old items X by NCE-I.
A later task brings dX, `growth` (P's alpha) of all items. ICL then trains old anchors
by NCE-II and new ones by NCE-I against all (P, Eq. 9):
  meta       for each batch of dX: theta' = theta, ceil((1 - growth) / growth) times
             theta' <- theta' - lr_s grad NCE-II(theta'), on batches of X;
             theta <- theta - lr_q grad NCE-I(theta'), first order (P, Eq. 10 to 12)
  otherwise  an epoch is a pass over X by NCE-II, then one over dX by NCE-I.
With `learnt_rate` an agent sets each of lr_s and lr_q at every step (`ddpg`), without
`meta` a single one; the update is plain SGD. Otherwise it is that of config.optimizer.

The other strategies train by NCE-I on rows of X and dX, and are what P compares with:
  "retrain"   from the weights that the run began with, on all
  "continue"  the same from the present weights: a control
  "finetune"  on dX alone
  "replay"    on dX and a drawn share of X
  "distill"   on dX, held to the old encoder's similarities (`prototype.ird`)
  "frozen", "random": controls without any update, of the present and the first weights

Departures:
- The released code of the whole method never changes the encoder. This is the paper.
- P's sums are means, and K negatives are K times a mean (`losses.incremental`).
- New anchors have all rows of an old batch and of their own as negatives, weighted as
  the mixture of P's Lemma 1 (the released code draws numbers of each by `growth`).
- Retraining begins from the weights that the old encoder began from.
- P does not say how much replay stores, nor how it distils: `replay_share`, and IRD.
- Graphs that are negatives of another set are not augmented; images are.
- Batch statistics are each pass's own. Of those within the inner loop nothing stays:
  the running ones take the passes at theta'.
- What is evaluated is the network at the end of a task, not that of its best epoch.
- Each epoch shuffles the old items anew, where the released code runs on through them.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcl import core, ddpg, schema
from jaxcl.losses import prototype
from jaxcl.methods import icl_orders, icl_passes
from jaxcl.nets import gcn

STRATEGIES = (
    "icl", "retrain", "continue", "finetune", "replay", "distill", "frozen", "random",
)  # fmt: skip
# Names of the tables of P and others -> options of `make`
VARIANTS = {
    "icl": {},
    "no_lrl": {"learnt_rate": False},
    "no_meta": {"meta": False},
    "no_both": {"meta": False, "learnt_rate": False},
} | {name: {"strategy": name} for name in STRATEGIES if name != "icl"}
TAKES_GRAPHS = True  # or images, by the encoder
ANCHORS = ("augmented", "original")
_CONTROLS = ("frozen", "random")
_NEW_ALONE = ("finetune", "distill")  # read no rows of the tasks before


class Extra(NamedTuple):
    """What ICL keeps beside the network; the same for all strategies."""

    growth: jax.Array  # f32[], new items over all items; 0 in the first task
    old_steps: jax.Array  # i32[], of an epoch without meta: those on old items,
    epoch_steps: jax.Array  # i32[], and all
    agents: dict[str, ddpg.Agent]  # "old" and "new", of the rates on these items
    first: core.PyTree  # f32, params and stats that the run began with
    teacher: core.PyTree  # f32, those from the task before


_LIMITS = {
    "temperature": (1e-6, math.inf), "inner_steps": (1, math.inf),
    "inner_lr": (0, math.inf), "keep": (0, math.inf), "replay_share": (0, 1),
    "distill_weight": (0, math.inf), "output_dim": (0, math.inf),
}  # fmt: skip


def _check(given, graphs):
    core.check_choice("config.method.strategy", given["strategy"], STRATEGIES)
    core.check_choice("config.method.anchors", given["anchors"], ANCHORS)
    core.check_ranges("config.method", given, _LIMITS)
    if given["anchors"] == "original" and not graphs:
        raise ValueError(
            "config.method.anchors='original': is for graphs; images have two views, "
            "must be 'augmented'"
        )


def make(
    parts: core.Parts, *, strategy="icl", meta=True, learnt_rate=True, temperature=0.1,
    inner_steps: int | None = None, inner_lr: float | None = None, second_order=False,
    keep=0.0, replay_share=0.2, distill_weight=1.0, anchors="augmented", output_dim=0,
    agent: dict | None = None,
) -> core.Method:  # fmt: skip
    """ICL, its variants, and what it is compared with.

    Args:
      strategy: how the tasks after the first are trained, see above.
      meta, learnt_rate: parts of "icl"; P's tables have it without either and both.
      temperature: divides the cosines.
      inner_steps: of `meta`; None: `icl_orders.inner_steps` of the task's growth.
      inner_lr: of them without `learnt_rate`; None: that of config.optimizer.
      second_order: the outer gradient passes through the inner steps.
      keep: weight of NCE-I on old anchors beside NCE-II; with 1 and whole sets their
        sum is the loss of retraining (P, Theorem 3).
      replay_share: of the old rows that "replay" has.
      distill_weight: of "distill".
      anchors: of graphs: "augmented" like their positives (P) or "original" (released).
      output_dim: width of a Linear after the encoder, of which the output is compared
        and evaluated; 0: none.
      agent: options of `ddpg.Options`.

    Raises:
      ValueError: naming the field, the value and what is allowed.
    """
    graphs = isinstance(parts.encoder, gcn.GCN)
    _check(locals(), graphs)
    chosen = schema.options(ddpg.Options, agent or {}, "config.method.agent")
    options = ddpg.Options(**chosen)
    init_net, network, pairs, plain_loss, against = icl_passes.make_passes(
        parts, temperature=temperature, keep=keep, anchors=anchors,
        output_dim=output_dim,
    )  # fmt: skip
    learns = strategy == "icl"

    def old_loss(params, stats, key, part, more, growth):
        old, _, stats = against(params, stats, key, part, more, growth)
        return old(), stats

    def new_loss(params, stats, key, part, more, growth):
        _, new, stats = against(params, stats, key, part, more, growth)
        return new(), stats

    def descended(state, params, held, key, value, grads):
        """Parameters after a step of SGD, at the rate of an agent or a fixed one."""
        if not learnt_rate:
            lr = core.rate(parts, state) if inner_lr is None else inner_lr
        else:
            k_observe, k_act = jax.random.split(key)
            held = ddpg.observe(held, k_observe, jax.lax.stop_gradient(value), options)
            lr, held = ddpg.act(held, k_act, options)
        return jax.tree.map(lambda p, g: p - lr * g, params, grads), held, lr

    def updated(state, key, value, grads, stats, metrics, passes):
        """The state after an outer step down `grads`."""
        metrics |= {"loss": value, "grad_norm": optax.tree.norm(grads)}
        if learnt_rate:
            agents = state.extra.agents
            params, held, lr = descended(
                state, state.params, agents["new"], key, value, grads
            )
            extra = state.extra._replace(agents=agents | {"new": held})
            state = state.replace(params=params, step=state.step + 1, extra=extra)
        else:
            lr = core.rate(parts, state)
            state = core.apply_gradients(state, grads, parts.tx, lr)
        metrics |= {"lr": lr, "passes": jnp.float32(passes)}
        return state.replace(stats=stats), metrics

    def meta_step(state, batch):
        size = batch["index"].shape[1]
        steps = batch["index"].shape[0] // 2 - 1
        k_inner, k_outer, k_agent = jax.random.split(core.step_key(state), 3)
        old, more, new, stored = (
            jax.tree.map(lambda x, at=at: x[at], batch)
            for at in (slice(0, steps), slice(steps, 2 * steps), -2, -1)
        )
        growth, agents = state.extra.growth, state.extra.agents

        def inner(carry, given):
            (params, stats, held), (key, part, others) = carry, given
            k_loss, k_rate = jax.random.split(key)
            (value, stats), grads = jax.value_and_grad(old_loss, has_aux=True)(
                params, stats, k_loss, part, others, growth
            )
            params, held, lr = descended(state, params, held, k_rate, value, grads)
            return (params, stats, held), (value, lr)

        def adapted(params):
            # The first loss is of other weights than the last action's.
            held = agents["old"]._replace(pending=jnp.zeros((), bool))
            carry = params, state.stats, held
            given = jax.random.split(k_inner, steps), old, more
            if graphs or not parts.unroll:
                (params, _, held), found = jax.lax.scan(inner, carry, given)
            else:
                found = []
                for i in range(steps):
                    one = jax.tree.map(lambda x, i=i: x[i], given)
                    carry, each = inner(carry, one)
                    found.append(each)
                params, _, held = carry
                found = jax.tree.map(lambda *x: jnp.stack(x), *found)
            return params, (held, found)

        def outer(params):
            return new_loss(params, state.stats, k_outer, new, stored, growth)

        if second_order:

            def through(params):
                params, aux = adapted(params)
                value, stats = outer(params)
                return value, (stats, aux)

            (value, (stats, aux)), grads = jax.value_and_grad(through, has_aux=True)(
                state.params
            )
        else:
            params, aux = adapted(state.params)
            (value, stats), grads = jax.value_and_grad(outer, has_aux=True)(params)
        held, (losses, rates) = aux
        metrics = {"inner_loss": losses.mean(), "inner_lr": rates.mean()}
        extra = state.extra._replace(agents=agents | {"old": held})
        state, passes = state.replace(extra=extra), 3 * size * (steps + 1)
        return updated(state, k_agent, value, grads, stats, metrics, passes)

    def turn_step(state, batch):
        k_loss, k_agent = jax.random.split(core.step_key(state))
        part, more = (jax.tree.map(lambda x, i=i: x[i], batch) for i in (0, 1))
        extra, done = state.extra, state.step - state.task_start
        turn = done % extra.epoch_steps < extra.old_steps

        def loss(params):
            old, new, stats = against(
                params, state.stats, k_loss, part, more, extra.growth
            )
            return jnp.where(turn, old(), new()), stats

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        passes = 3 * len(part["index"])
        return updated(state, k_agent, value, grads, stats, {}, passes)

    def plain_step(state, batch):
        key = core.step_key(state)

        def loss(params):
            value, (stats, *rows) = plain_loss(params, state.stats, key, batch)
            if strategy == "distill":
                value += distill_weight * distilled(state, key, batch, *rows)
            return value, stats

        after, stats, metrics = core.descend(parts, state, loss)
        metrics["passes"] = jnp.float32(2 * len(batch["index"]))
        trees = after.params, stats
        if strategy in _CONTROLS:
            before = state.params, state.stats
            trees = jax.tree.map(
                lambda old, new: jnp.where(state.task > 0, old, new), before, trees
            )
        return after.replace(params=trees[0], stats=trees[1]), metrics

    def distilled(state, key, part, rows, positives):
        """IRD to the encoder of the task before; 0 in the first task."""

        def apart():
            *past, _ = pairs(*state.extra.teacher, key, part, train=False)
            mask = jnp.concatenate([part["index"] >= 0] * 2)
            both = jnp.concatenate([rows, positives]), jnp.concatenate(past)
            return prototype.ird(*both, example_mask=mask)

        return jax.lax.cond(state.task == 0, lambda: jnp.zeros(()), apart)

    def step(state, batch):
        sides = batch["index"].ndim - 1
        if not sides:
            return plain_step(state, batch)
        return (meta_step if meta else turn_step)(state, batch)

    def init(key, batch):
        k_state, k_net, *k_agents = jax.random.split(key, 4)
        params, stats = init_net(k_net, batch)
        extra = Extra(
            growth=jnp.zeros((), jnp.float32),
            old_steps=jnp.zeros((), jnp.int32),
            epoch_steps=jnp.ones((), jnp.int32),
            agents={
                name: ddpg.init(k, options)
                for name, k in zip(("old", "new"), k_agents, strict=True)
            },
            first=core.copy((params, stats)),
            teacher=core.copy((params, stats)),
        )
        return core.new_state(k_state, params, stats, parts.tx, extra)

    def begin_task(state, task):
        params, stats = state.params, state.stats
        growth, old_steps, epoch_steps = 0.0, 0, 1
        if task.index > 0:
            growth = icl_orders.growth(task)
        if task.index > 0 and learns:
            old_steps, new_steps = (
                len(icl_orders.batches(task, rows, parts.batch_size, 1))
                for rows in (task.earlier, task.train.rows)
            )
            epoch_steps = old_steps + new_steps
        if task.index > 0 and strategy in ("retrain", "random"):
            params, stats = core.copy(state.extra.first)
        extra = state.extra._replace(
            growth=jnp.float32(growth),
            old_steps=jnp.int32(old_steps),
            epoch_steps=jnp.int32(epoch_steps),
            teacher=core.copy((params, stats)),
        )
        opt_state = parts.tx.init(params)
        return state.replace(
            params=params, stats=stats, extra=extra, opt_state=opt_state
        )

    def sides(task):
        if task.index == 0 or strategy in _NEW_ALONE:
            return 1
        if len(task.earlier) == 0:
            raise ValueError(
                f"config.method.strategy={strategy!r}: learns from rows of the tasks "
                f"before, too, of which {task.name} has none; join their data to it "
                "(source 'joined', of an update --join), or take 'finetune' or "
                "'distill'"
            )
        if not learns:
            return 1
        return 2 * _inner(task) + 2 if meta else 2

    def _inner(task):
        return inner_steps or icl_orders.inner_steps(icl_orders.growth(task))

    def source(state, task):
        if task.index == 0 or strategy in _NEW_ALONE:
            return task.train
        rows, earlier = task.train.rows, task.earlier
        if strategy == "replay":
            rng = np.random.default_rng(np.asarray(jax.random.key_data(state.key)))
            earlier = rng.permutation(earlier)[: round(replay_share * len(earlier))]
        both = task.train._replace(rows=np.concatenate([earlier, rows]))
        if not learns:
            return both
        if meta:
            order = functools.partial(icl_orders.meta, task=task, steps=_inner(task))
        else:
            order = functools.partial(icl_orders.turns, task=task)
        return both._replace(order=order)

    def embed(state, inputs):
        key = jax.random.key(0)  # of the dropout, of which there is none
        return network(state.params, state.stats, key, inputs, train=False)[0]

    def objective(state, key, batch):
        # With the batch's own statistics: running ones lag behind, each time otherwise.
        return plain_loss(state.params, state.stats, key, batch)[0]

    return core.Method(
        init, step, embed, begin_task=begin_task, source=source, parts=sides,
        objective=objective,
    )  # fmt: skip
