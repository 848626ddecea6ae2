"""ICL: a loss for how new data change InfoNCE, by meta-optimisation at learnt rates.

Ji et al., "Unbiased and Efficient Self-Supervised Incremental Contrastive Learning",
WSDM 2023, called P below. The first task trains an encoder on the old items X by NCE-I.
A later task brings new items dX, a share `growth` (P's alpha) of all items. ICL then
trains old anchors by NCE-II and new ones by NCE-I against all items (P, Eq. 9):
  meta       for each batch of dX: theta' = theta, ceil((1 - growth) / growth) times
             theta' <- theta' - lr_s grad NCE-II(theta'), on batches of X;
             theta <- theta - lr_q grad NCE-I(theta'), first order (P, Eq. 10 to 12)
  otherwise  an epoch is a pass over X by NCE-II, then one over dX by NCE-I.
Inner steps are plain SGD, at `inner_lr` or at an agent's rate. With `learnt_rate` one
agent sets lr_s and another lr_q at every step (`ddpg`); without `meta` a single agent
sets the rate. Outer steps are then plain SGD, too, as they are at `fixed_lr`; otherwise
they are those of config.optimizer.

The other strategies, with which P compares ICL, train by NCE-I on rows of X and dX:
  "retrain"   on X and dX, from the weights at the beginning of the run
  "continue"  on X and dX, from the present weights: a control
  "finetune"  on dX alone
  "replay"    on dX and a drawn share of X
  "distill"   on dX, with the old encoder's similarities for targets (`prototype.ird`)
  "frozen", "random": controls without updates, at the present and the first weights

Departures:
- The released code of the whole method never changes the encoder. This is the paper.
- P's sums are means, and K negatives are K times a mean (`losses.incremental`).
- The negatives of new anchors are all rows of an old batch and of their own, weighted
  as the mixture of P's Lemma 1 (the released code chooses numbers of each by `growth`).
- Retraining begins with the weights that the old encoder began with.
- P does not say how much replay stores (here `replay_share`), nor how it distils (here
  IRD).
- Graphs that serve as negatives of the other set are not augmented; images are.
- An action is rewarded by the fall from its batch's loss to the next batch's. The last
  action of an inner loop has no next batch: its reward is the fall on its own batch.
- Each pass has its own batch statistics. The inner loop leaves no trace in the running
  ones; these follow the passes at theta'.
- Evaluations use the network at the end of a task, not that of its best epoch.
- Each epoch shuffles the old items; the released code continues where it stopped.
"""

import functools
from typing import Annotated, Literal, get_args

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.errors import Refused
from jaxcl.methods.icl import ddpg, orders, passes, steps

Strategy = Literal[
    "icl",
    "retrain",
    "continue",
    "finetune",
    "replay",
    "distill",
    "frozen",
    "random",
]
STRATEGIES = get_args(Strategy)
# Names in the tables of P, and more -> options of `make`
VARIANTS = {
    "icl": {},
    "no_lrl": {"learnt_rate": False},
    "no_lrl_sgd": {"learnt_rate": False, "fixed_lr": 0.03},
    "no_meta": {"meta": False},
    "no_both": {"meta": False, "learnt_rate": False},
    "retrain_sgd": {"strategy": "retrain", "fixed_lr": 0.03},
    "continue_sgd": {"strategy": "continue", "fixed_lr": 0.03},
} | {name: {"strategy": name} for name in STRATEGIES if name != "icl"}
_INNER_LR = 0.03


def _unread_options(options: dict) -> dict[str, str]:
    """Find the options that have no effect with the given ones.

    `agent` is never among them: it shapes the state that all strategies share.

    Args:
      options: options of `make`, by name.

    Returns:
      name of an option -> the option values that would read it.
    """
    icl, learnt = options["strategy"] == "icl", options["learnt_rate"]
    meta, trains = icl and options["meta"], options["strategy"] not in steps.CONTROLS
    readers = {
        "meta": (icl, "strategy='icl'"),
        "learnt_rate": (icl, "strategy='icl'"),
        "keep": (icl, "strategy='icl'"),
        "inner_steps": (meta, "strategy='icl' with meta=True"),
        "second_order": (meta, "strategy='icl' with meta=True"),
        "inner_lr": (
            meta and not learnt,
            "strategy='icl' with meta=True and learnt_rate=False",
        ),
        "fixed_lr": (
            not learnt if icl else trains,
            "strategy='icl' with learnt_rate=False, or a strategy that trains",
        ),
        "replay_share": (options["strategy"] == "replay", "strategy='replay'"),
        "distill_weight": (options["strategy"] == "distill", "strategy='distill'"),
    }
    return {name: reader for name, (read, reader) in readers.items() if not read}


def _check_read(options: dict) -> None:
    """Refuse an option that is set and that nothing reads."""
    defaults = {name: x.default for name, x in schema.option_of(make).items()}
    for name, reader in _unread_options(options).items():
        if options[name] != defaults[name]:
            raise Refused(
                f"config.method.{name}={options[name]}: is read by {reader} alone; "
                f"leave it at {defaults[name]}"
            )


def _check_options(parts: core.Parts, options: dict) -> None:
    """Refuse options without effect, or that do not fit each other."""
    _check_read(options)
    projector, output_dim = options["projector"], options["output_dim"]
    if options["anchors"] == "original" and not passes.reads_graphs(parts.encoder):
        raise Refused(
            "config.method.anchors='original': is for graphs; images have two views, "
            "must be 'augmented'"
        )
    if projector and output_dim:
        raise Refused(
            f"config.method.projector={projector}: must be 0 with "
            f"output_dim={output_dim}; only one network follows the encoder"
        )
    if options["strategy"] == "icl" and not options["with_positive"]:
        raise Refused(
            "config.method.with_positive=False: must be True with strategy='icl': "
            "NCE-II has the positive in both denominators"
        )
    if parts.batch_size == 1:
        raise Refused(
            "config.batch_size=1: an anchor is compared with the other rows of its "
            "batch; must be at least 2"
        )


def _fill_agent(options: dict, replay: core.Replay | None) -> dict:
    """Fill in the agent's options; the number of inner steps follows each task."""
    return {"agent": schema.defaults(ddpg.Options) | dict(options["agent"] or {})}


@schema.checked("config.method", fill=_fill_agent)
@schema.debug(output_dim=8, projector=8)
def make(
    parts: core.Parts,
    *,
    strategy: Strategy = "icl",
    meta: bool = True,
    learnt_rate: bool = True,
    temperature: schema.Temperature = 0.1,
    with_positive: bool = True,
    inner_steps: Annotated[int, schema.Range(1, 1000)] | None = None,
    fixed_lr: schema.Weight | None = None,
    inner_lr: schema.Weight = _INNER_LR,
    second_order: bool = False,
    keep: schema.Weight = 0.0,
    replay_share: schema.Share = 0.2,
    distill_weight: schema.Weight = 1.0,
    anchors: Literal["augmented", "original"] = "augmented",
    output_dim: Annotated[int, schema.Range(0, 2**20)] = 0,
    projector: Annotated[int, schema.Range(0, 2**20)] = 0,
    agent: dict | None = None,
) -> core.Method:
    """Make ICL, one of its variants, or a strategy that it is compared with.

    Args:
      strategy: training of the tasks after the first, see above.
      meta, learnt_rate: parts of "icl"; P's tables leave out either or both.
      temperature: divides the cosines.
      with_positive: NCE-I has the positive in its denominator; False is GraphCL's loss,
        not for "icl".
      inner_steps: number of inner steps; None: `orders.inner_steps` of the growth.
      fixed_lr: rate of plain SGD in the tasks after the first, in place of agents and
        of config.optimizer; "icl" needs learnt_rate=False. None: config.optimizer.
      inner_lr: rate of the inner steps without `learnt_rate`.
      second_order: pass the outer gradient through the inner steps.
      keep: weight of NCE-I on old anchors, added to NCE-II; with 1 and whole sets their
        sum is the loss of retraining (P, Theorem 3).
      replay_share: share of the old rows that "replay" reads.
      distill_weight: weight of IRD in "distill".
      anchors: anchors of graphs, "augmented" like their positives (P) or "original"
        (released code).
      output_dim: width of a Linear after the encoder, whose output is compared and
        evaluated; 0: none.
      projector: width of two Linears after the encoder, a ReLU between them, whose
        output is compared but not evaluated; 0: none.
      agent: options of `ddpg.Options`.

    Raises:
      Refused: naming field, value and range; an option that the
        strategy does not read is not at its default.
    """
    _check_options(
        parts,
        {
            "strategy": strategy,
            "meta": meta,
            "learnt_rate": learnt_rate,
            "with_positive": with_positive,
            "inner_steps": inner_steps,
            "fixed_lr": fixed_lr,
            "inner_lr": inner_lr,
            "second_order": second_order,
            "keep": keep,
            "replay_share": replay_share,
            "distill_weight": distill_weight,
            "anchors": anchors,
            "output_dim": output_dim,
            "projector": projector,
        },
    )
    chosen = schema.options(ddpg.Options, agent or {}, "config.method.agent")
    nets = passes.Passes(
        encoder=parts.encoder,
        head=passes.build_head(output_dim, projector),
        judged=not projector,
        augment=parts.augment,
        temperature=temperature,
        with_positive=with_positive,
        keep=keep,
        anchors=anchors,
    )
    plan = orders.OrderPlan(strategy, meta, inner_steps, replay_share)
    setup = steps.StepSetup(
        parts=parts,
        passes=nets,
        plan=plan,
        learnt_rate=learnt_rate,
        fixed_lr=fixed_lr,
        inner_lr=inner_lr,
        second_order=second_order,
        distill_weight=distill_weight,
        agent=ddpg.Options(**chosen),
    )
    return core.Method(
        init=functools.partial(_init_state, setup),
        step=functools.partial(steps.step, setup),
        embed=lambda state, inputs: nets.embed(state.params, state.stats, inputs),
        begin_task=functools.partial(_begin_task, setup),
        source=functools.partial(orders.source, plan),
        batches_per_step=functools.partial(orders.batches_per_step, plan),
        objective=functools.partial(_objective, nets),
        takes_graphs=True,
        embeds="encoder and head" if output_dim else "encoder",
    )


def _objective(nets, state, key, batch):
    # With the batch's own statistics: the running ones lag behind by varying amounts.
    return nets.plain_loss(state.params, state.stats, key, batch)[0]


def _init_state(setup, key, batch):
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
    old_steps, epoch_steps = orders.count_epoch_steps(
        plan, task, setup.parts.batch_size
    )
    extra = state.extra._replace(
        growth=jnp.float32(growth),
        old_steps=jnp.int32(old_steps),
        epoch_steps=jnp.int32(epoch_steps),
        teacher=core.copy((params, stats)),
    )
    opt_state = setup.parts.tx.init(params)
    return state.replace(params=params, stats=stats, extra=extra, opt_state=opt_state)
