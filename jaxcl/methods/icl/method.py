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

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.methods.icl import ddpg, orders, steps
from jaxcl.methods.icl import passes as passes_lib
from jaxcl.nets import gcn

STRATEGIES = (
    "icl",
    "retrain",
    "continue",
    "finetune",
    "replay",
    "distill",
    "frozen",
    "random",
)
# Names of the tables of P and others -> options of `make`
VARIANTS = {
    "icl": {},
    "no_lrl": {"learnt_rate": False},
    "no_meta": {"meta": False},
    "no_both": {"meta": False, "learnt_rate": False},
} | {name: {"strategy": name} for name in STRATEGIES if name != "icl"}
TAKES_GRAPHS = True  # or images, by the encoder
ANCHORS = ("augmented", "original")

_LIMITS = {
    "temperature": (1e-6, math.inf),
    "inner_steps": (1, math.inf),
    "inner_lr": (0, math.inf),
    "keep": (0, math.inf),
    "replay_share": (0, 1),
    "distill_weight": (0, math.inf),
    "output_dim": (0, math.inf),
}


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
    parts: core.Parts,
    *,
    strategy="icl",
    meta=True,
    learnt_rate=True,
    temperature=0.1,
    inner_steps: int | None = None,
    inner_lr: float | None = None,
    second_order=False,
    keep=0.0,
    replay_share=0.2,
    distill_weight=1.0,
    anchors="augmented",
    output_dim=0,
    agent: dict | None = None,
) -> core.Method:
    """ICL, its variants, and what it is compared with.

    Args:
      strategy: how the tasks after the first are trained, see above.
      meta, learnt_rate: parts of "icl"; P's tables have it without either and both.
      temperature: divides the cosines.
      inner_steps: of `meta`; None: `orders.inner_steps` of the task's growth.
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
    passes = passes_lib.make_passes(
        parts,
        temperature=temperature,
        keep=keep,
        anchors=anchors,
        output_dim=output_dim,
    )
    plan = orders.Plan(strategy, meta, inner_steps, replay_share)
    setup = steps.Setup(
        parts,
        passes,
        plan,
        learnt_rate,
        inner_lr,
        second_order,
        distill_weight,
        ddpg.Options(**chosen),
        parts.unroll and not graphs,
    )

    def embed(state, inputs):
        key = jax.random.key(0)  # of the dropout, of which there is none
        return passes.network(state.params, state.stats, key, inputs, train=False)[0]

    def objective(state, key, batch):
        # With the batch's own statistics: running ones lag behind, each time otherwise.
        return passes.plain_loss(state.params, state.stats, key, batch)[0]

    return core.Method(
        functools.partial(_init, setup),
        functools.partial(steps.step, setup),
        embed,
        begin_task=functools.partial(_begin_task, setup),
        source=functools.partial(orders.source, plan),
        parts=functools.partial(orders.sides, plan),
        objective=objective,
    )


def _init(setup, key, batch):
    k_state, k_net, *k_agents = jax.random.split(key, 4)
    params, stats = setup.passes.init(k_net, batch)
    extra = steps.Extra(
        growth=jnp.zeros((), jnp.float32),
        old_steps=jnp.zeros((), jnp.int32),
        epoch_steps=jnp.ones((), jnp.int32),
        agents={
            name: ddpg.init(k, setup.agent)
            for name, k in zip(("old", "new"), k_agents, strict=True)
        },
        first=core.copy((params, stats)),
        teacher=core.copy((params, stats)),
    )
    return core.new_state(k_state, params, stats, setup.parts.tx, extra)


def _begin_task(setup, state, task):
    plan, params, stats = setup.plan, state.params, state.stats
    if task.index > 0 and plan.strategy in ("retrain", "random"):
        params, stats = core.copy(state.extra.first)
    growth = orders.growth(task) if task.index > 0 else 0.0
    old_steps, epoch_steps = orders.epoch(plan, task, setup.parts.batch_size)
    extra = state.extra._replace(
        growth=jnp.float32(growth),
        old_steps=jnp.int32(old_steps),
        epoch_steps=jnp.int32(epoch_steps),
        teacher=core.copy((params, stats)),
    )
    opt_state = setup.parts.tx.init(params)
    return state.replace(params=params, stats=stats, extra=extra, opt_state=opt_state)
