"""Online continual self-supervised learning: one pass over a stream, without labels.

Each incoming batch is trained on `config.replay.updates` times, beside rows that are
drawn from a memory of earlier images; then its images, not augmented, enter the memory.
The method is told no label and no boundary between tasks. It composes a base of
`two_view/bases.py`, a memory (config.replay) and a regulariser:
- "none": the base's loss on replayed and incoming rows, L_SSL.
- "cla_r": CLA-R of Cignoni et al., "Continual Latent Alignment", arXiv 2507.10434. To
  L_SSL comes weight * mean of -cos(a(z), s) over the views of replayed rows, where s is
  stored with the row and moves towards its z with every use, and a is a predictor.
- "cassle": the distillation of CaSSLe (Fini et al., CVPR 2022) towards a frozen network
  that follows the one that learns. With SimSiam and `rows="replay"` it is CLA-E, whose
  -cos(a(z), f) is half of our 2 - 2 cos(a(z), f): our weight is half of CLA's.
- "der": DER (Buzzega et al., NeurIPS 2020) on projections, as Madaan et al. (ICLR 2022)
  apply it. To L_SSL comes weight * mean of (z - s)^2 over the views of replayed rows,
  where s is stored with the row when it comes and stays. Like DER++, and unlike DER,
  replayed rows are in L_SSL, too.
- "lump": LUMP (Madaan et al., ICLR 2022). L_SSL is of mixtures of incoming with
  replayed rows alone, see `strategies.mixed`.
- "pnr": what PNR (Cha et al., ICML 2024) adds to the base's loss, with the features of
  the same frozen network. This and what CLA does not name are OURS, of no paper.

EWC is no regulariser here: it adds a penalty at the end of each task, where the weights
fit the task, and the method is told of no end.

Departures:
- CLA's released code draws and passes nothing for replay until the memory holds more
  than `size` rows. Here shapes are fixed: until then incoming rows repeat in the place
  of replayed ones, for the batch statistics alone, and no loss counts them.
- The frozen network and the slow one of BYOL and MoCo normalise by their batch; CLA's
  text does not say how its EMA does. `frozen_bn="running"` takes averaged statistics.
- The momentum of the slow network is constant, since there is no end to count towards.
- The learning rate of all updates on a batch is that of the batch.
- Labels and numbers of tasks are stored with the images, for evaluators; no step reads
  them.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, optim, schema
from jaxcl.memory import buffer, policies, queue
from jaxcl.methods import online, two_view
from jaxcl.methods.online import probe
from jaxcl.methods.online_ssl import regularisers, stored
from jaxcl.methods.two_view import bases, networks, strategies
from jaxcl.nets import chain

_MIX = 0x10B9  # keeps LUMP's mixtures apart from the other keys of an update

Base = Literal["simclr", "simsiam", "byol", "barlow_twins", "vicreg", "mocov2plus"]


class Extra(NamedTuple):
    """What the method keeps beside the network that learns."""

    momentum: core.PyTree  # f32, slow copy of encoder and projector; {} without one
    teacher: core.PyTree  # f32, the frozen network; {} without one
    teacher_stats: core.PyTree  # f32, its running statistics; {} if it reads none
    key_queue: jax.Array | None  # f32[2,K,D] unit rows, [v] from view v of `momentum`
    frozen_queue: jax.Array | None  # f32[2,K,D] unit rows, [v] from view v of `teacher`
    pointer: jax.Array | None  # i32[], where the next rows of both queues go
    # "image" u8, "label" and "task" i32; "projection" f32[D] for "cla_r" and "der";
    # what the policy reads. None: nothing is stored
    memory: buffer.Buffer | None
    kept: core.PyTree  # what the memory's policy counts


class Setup(NamedTuple):
    """What `make` fixes: everything but arrays."""

    parts: core.Parts
    base: bases.Base
    plan: regularisers.Regulariser
    options: bases.Options
    copied: chain.Chain  # encoder and projector, which slow network and teacher copy
    predictor: chain.Chain  # the base's own; of no nets where it has none
    distiller: chain.Chain  # the predictor a of the alignment
    dim: int  # of the projections
    size: int  # rows that an update draws; 0: there is no memory
    beside: int  # of these, rows that pass beside the incoming ones; LUMP: 0
    every_row: bool  # incoming rows are aligned, too
    snapshot_every: int | None  # batches; None: the teacher is a moving average
    teacher_ema: float
    batch_bn: bool  # the teacher normalises by its batch
    momentum: float  # of the slow network
    queue_size: int
    stored_momentum: float
    mix: float


class Outputs(NamedTuple):
    """Outputs of the network that learns; fields as in `bases.Features`."""

    z: jax.Array
    o: jax.Array | None
    p: jax.Array | None


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    base: Base = "simsiam",
    regulariser: Literal["none", "cassle", "cla_r", "pnr", "der", "lump"] = "none",
    rows: Literal["replay", "all"] = "replay",
    remembers: bool = True,
    weight: schema.Weight | None = None,
    negative_weight: schema.Weight | None = None,
    teacher: Literal["ema", "snapshot"] = "ema",
    teacher_ema: schema.Share = 0.999,
    snapshot_every: schema.Count = 100,
    frozen_bn: Literal["batch", "running"] = "batch",
    stored_momentum: schema.Share = 0.5,
    mix: schema.Positive = 0.4,
    momentum: schema.Share = 0.99,
    temperature: schema.Temperature | None = None,
    distill_temperature: schema.Temperature | None = None,
    hidden_dim: schema.Width | None = None,
    output_dim: schema.Width | None = None,
    hidden_layers: schema.Layers | None = None,
    predictor_hidden_dim: schema.Width | None = None,
    distill_hidden_dim: schema.Width = 512,
    queue_size: schema.Count = 2048,
    form: Literal["code", "paper"] = "code",
    pn1: bool = True,
    pn2: bool = True,
    scale: schema.Positive = 0.1,
    off_diagonal: schema.Weight = 5e-3,
    invariance: schema.Weight = 25.0,
    variance: schema.Weight = 25.0,
    covariance: schema.Weight = 1.0,
) -> core.Method:
    """One base with a memory and one regulariser; None is the base's default.

    Args:
      parts: what the config builds.
      base: the self-supervised loss, a name in `two_view.bases.BASES`. The others there
        read labels, prototypes or random slices, and are refused.
      regulariser: a name in `regularisers.REGULARISERS`, see the head of `step.py`.
      rows: which rows are aligned, "replay" or "all".
      remembers: keep a memory and replay from it; without one `rows` must be "all".
      weight: of the alignment; under "pnr" with a base that has no negatives, of its
        distillation.
      negative_weight: PNR's lambda, for bases without negatives.
      teacher: the frozen network is an "ema" of the one that learns, or a "snapshot".
      teacher_ema: share of the old average after each update.
      snapshot_every: batches between snapshots, which are taken before the batch.
      frozen_bn: the teacher normalises by its "batch" or by "running" statistics.
      stored_momentum: share of the old vector that "cla_r" stores, CLA's alpha.
      mix: "lump" draws mixtures from Beta(mix, mix).
      momentum: of the slow network of BYOL and MoCo, after each update.
      temperature, distill_temperature: of the base's loss and of the distillation.
      hidden_dim, output_dim, hidden_layers: of the projector.
      predictor_hidden_dim: hidden units of BYOL's and SimSiam's own predictor.
      distill_hidden_dim: hidden units of the predictor a.
      queue_size: rows of each bank of MoCo's queues.
      form: "code" or "paper": which of a base's forms, see `two_view.make`.
      pn1, pn2: pseudo-negatives in PNR's first and second term.
      scale, off_diagonal: of Barlow Twins.
      invariance, variance, covariance: weights of VICReg.

    Raises:
      ValueError: naming the field, the value and what is allowed.
    """
    arguments = settled(locals())
    spec, plan = bases.get(base), regularisers.REGULARISERS[regulariser]
    _check(parts, arguments)
    unread = {"balance": "centre", "normality": 0.0}
    size = parts.replay.size if remembers else 0
    setup = Setup(
        parts=parts,
        base=spec,
        plan=plan,
        options=two_view.loss_options(arguments | unread),
        **networks.build(parts, spec, arguments),
        size=size,
        beside=0 if plan.mixes else size,
        every_row=rows == "all",
        snapshot_every=snapshot_every if teacher == "snapshot" else None,
        teacher_ema=teacher_ema,
        batch_bn=frozen_bn == "batch",
        momentum=momentum,
        queue_size=queue_size,
        stored_momentum=stored_momentum,
        mix=mix,
    )
    if regulariser == "pnr":
        bases.warn_of_distance(base, setup.options)
    method = core.Method(
        init=functools.partial(_init, setup),
        step=functools.partial(_step, setup),
        embed=setup.copied.embed,
        project=setup.copied.project,
        replays=True,
        memory=(lambda state: state.extra.memory) if remembers else None,
    )
    return probe.add(method, parts) if parts.replay.measure else method


def settled(options: dict, replay: core.Replay | None = None) -> dict:
    """The options, with the base's or the regulariser's in place of each None."""
    plan = regularisers.REGULARISERS[options["regulariser"]]
    return networks.settled(bases.get(options["base"]), plan, options)


def _check(parts: core.Parts, options: dict) -> None:
    """Refuse what the method cannot do, before anything compiles."""
    regulariser, rows = options["regulariser"], options["rows"]
    plan = regularisers.REGULARISERS[regulariser]
    if parts.batch_size == 1:
        raise ValueError(
            "config.batch_size=1: online_ssl compares rows of a batch; must be at "
            "least 2"
        )
    if not options["remembers"]:
        if plan.stores or plan.mixes or (plan.align and rows == "replay"):
            raise ValueError(
                f"config.method.remembers=False: regulariser={regulariser!r} with "
                f"rows={rows!r} reads replayed rows; must be True, or rows='all' with "
                "regulariser 'cassle' or 'pnr'"
            )
        return
    if plan.stores and rows == "all":
        raise ValueError(
            f"config.method.rows='all': regulariser {regulariser!r} aligns rows with "
            "what the memory stores of them; must be 'replay'"
        )
    stored.check(parts.replay)
    if plan.mixes:
        _check_mixtures(parts)


def _check_mixtures(parts: core.Parts) -> None:
    """Refuse a memory that "lump" cannot mix with, or that reads single rows."""
    replay = parts.replay
    if 0 < parts.batch_size < replay.size:  # 0: whoever asks does not know it yet
        raise ValueError(
            f"config.replay.size={replay.size}: regulariser 'lump' mixes each incoming "
            "row with one replayed row; must be at most config.batch_size="
            f"{parts.batch_size}"
        )
    if reads := policies.get(replay.policy).reads:
        blank = [name for name, policy in policies.POLICIES.items() if not policy.reads]
        raise ValueError(
            f"config.replay.policy={replay.policy!r}: reads {', '.join(reads)} of "
            "single rows, and regulariser 'lump' passes mixtures alone; allowed are "
            f"{', '.join(blank)}"
        )


def _init(setup, key, batch):
    k_state, k_augment, k_nets, k_distiller, *k_queues = jax.random.split(key, 6)
    images = setup.parts.augment(k_augment, batch["image"][:1])[0]
    nets = chain.Chain({**setup.copied.nets, **setup.predictor.nets})
    params, stats = nets.init(k_nets, images)
    frozen = _copied(setup, params)
    if setup.plan.distiller:
        born = setup.distiller.init(k_distiller, jnp.zeros((2, setup.dim)))
        params, stats = params | born[0], stats | born[1]
    banks = [
        core.l2_normalize(jax.random.normal(k, (2, setup.queue_size, setup.dim)))
        for k in k_queues
    ]
    base, taught = setup.base, setup.plan.teacher
    averaged = taught and not setup.batch_bn
    memory, kept = stored.create(setup, batch) if setup.size else (None, {})
    extra = Extra(
        momentum=core.copy(frozen) if base.momentum else {},
        teacher=core.copy(frozen) if taught else {},
        teacher_stats=core.copy(_copied(setup, stats)) if averaged else {},
        key_queue=banks[0] if base.queues else None,
        frozen_queue=banks[1] if base.queues and taught else None,
        pointer=jnp.zeros((), jnp.int32) if base.queues else None,
        memory=memory,
        kept=kept,
    )
    return core.new_state(k_state, params, stats, setup.parts.tx, extra)


def _copied(setup, tree):
    """The entries of a tree that slow network and teacher copy."""
    return {name: tree[name] for name in setup.copied.nets}


def _step(setup, state, batch):
    """All updates on a batch, then the write to the memory."""
    k_write, *keys = jax.random.split(
        core.step_key(state), 1 + setup.parts.replay.updates
    )
    state, step = _renewed(setup, state), state.step
    for key in keys:  # in Python: gradients in a loop of XLA's are slow on CPU
        state, told, metrics = _update(setup, state.replace(step=step), batch, key)
    if setup.size:
        state = stored.offered(setup, state, batch, told, step, k_write)
    return state, metrics


def _renewed(setup, state):
    """The state with a new snapshot as its teacher, where one is due."""
    if not setup.plan.teacher or setup.snapshot_every is None:
        return state
    due = state.step % setup.snapshot_every == 0
    return state.replace(extra=_taught(setup, state, jnp.where(due, 0.0, 1.0)))


def _taught(setup, state, keep):
    """`extra` with a teacher of which the share `keep` is the old one."""
    extra = state.extra
    teacher = optim.ema(extra.teacher, _copied(setup, state.params), keep)
    stats = extra.teacher_stats
    if stats:
        stats = optim.ema(stats, _copied(setup, state.stats), keep)
    return extra._replace(teacher=teacher, teacher_stats=stats)


def _update(setup, state, batch, key):
    """One step of the optimiser: the state, `stored.Told` of incoming rows, metrics."""
    k_stream, k_draw, k_replay = jax.random.split(key, 3)
    extra, size, beside = state.extra, setup.size, setup.beside
    rows = setup.parts.augment(k_stream, batch["image"])
    core.check_views(rows, 2, "online_ssl")
    active, held, drawn, share = jnp.zeros((), bool), None, None, 0.0
    if size:
        active = jnp.sum(extra.memory.filled) > size
        drawn = online.memory_of(setup.parts).sample(extra.memory, k_draw, size)
        items = setup.parts.split(drawn[0])
        replayed = setup.parts.augment(k_replay, items["image"])
        if setup.plan.mixes:
            k_mix, exist = jax.random.fold_in(key, _MIX), jnp.broadcast_to(active, size)
            rows, new = strategies.mixed(k_mix, setup.mix, rows, replayed, exist)
            share = 1 - new
        else:
            # A blank image would enter the batch statistics.
            repeated = rows[jnp.arange(size) % len(rows)]
            rows = jnp.concatenate([jnp.where(active, replayed, repeated), rows])
            share = size / len(rows)
        held = items.get("projection")
    images = rows.reshape((-1,) + rows.shape[2:])  # rows 2i, 2i+1: one example
    # Of networks that do not learn: those that normalise by the batch.
    still = {"k": extra.momentum, "f": extra.teacher if setup.batch_bn else {}}

    def forward(params):
        return _forward(setup, params, state.stats, images, still)

    outputs, backward, after = jax.vjp(forward, state.params, has_aux=True)
    stats, frozen = after
    if extra.teacher and not setup.batch_bn:
        frozen |= {"f": _averaged(setup, extra, images)}
    features = bases.Features(
        None,
        None,
        key_queue=extra.key_queue,
        frozen_queue=extra.frozen_queue,
        stored=held,
        **frozen,
    )
    (loss, parts), slopes = _losses(setup, outputs, features, active)
    (grads,) = backward(slopes)
    lr = core.rate(setup.parts, state)
    state = core.apply_gradients(state, grads, setup.parts.tx, lr).replace(stats=stats)
    extra = _followed(setup, state, features, active)
    told = stored.told(setup, outputs, features, active)
    if beside:
        replayed = jax.tree.map(lambda x: x[:beside], told)
        memory = stored.refreshed(setup, extra.memory, drawn, replayed, active)
        extra = extra._replace(memory=memory)
    metrics = {"loss": loss, "lr": lr, "grad_norm": core.norm(grads)}
    metrics |= parts | {"replayed": jnp.where(active, share, 0.0)}
    incoming = jax.tree.map(lambda x: x[beside:], told)
    return state.replace(extra=extra), incoming, metrics


def _averaged(setup, extra, images):
    """Projections f32[N,2,D] of the teacher of images f32[2N,H,W,C].

    It normalises by the running statistics that are averaged with it.
    """
    rows, _ = setup.copied(extra.teacher, extra.teacher_stats, images, train=False)
    return networks.two(rows)


def _forward(setup, params, stats, images, still):
    """The passes of the network that learns and of those that normalise as it does.

    Args:
      params: of all networks that learn.
      stats: their running statistics.
      images: f32[2N,H,W,C].
      still: name -> params of a network that does not learn; {} where there is none.

    Returns:
      Outputs of the network that learns; its statistics after the pass, and
      projections f32[N,2,D] of the others by name.
    """
    there = {name: own for name, own in still.items() if own}
    passing = [(own, stats, images) for own in (params, *there.values())]
    (rows, after), *others = setup.copied.beside(*passing, groups=2)
    frozen = {
        name: networks.two(own) for name, (own, _) in zip(there, others, strict=True)
    }
    o = p = None
    if setup.predictor.nets:
        o, new = setup.predictor(params, stats, rows, train=True, groups=2)
        o, after = networks.two(o), after | new
    if setup.plan.distiller:
        # Rows that are not aligned do not enter the statistics of the predictor a.
        aligned = rows if setup.every_row else rows[: 2 * setup.beside]
        queries = setup.base.distiller_input(aligned)
        p, new = setup.distiller(params, stats, queries, train=True, groups=2)
        p, after = networks.two(p), after | new
    return Outputs(networks.two(rows), o, p), (after, frozen)


def _losses(setup, outputs, features, active):
    """The loss, its parts as metrics, and its gradient with respect to `outputs`."""

    def gradient(first):
        def loss(outputs):
            joined = features._replace(**outputs._asdict())
            return _loss(setup, joined, first)

        return jax.value_and_grad(loss, has_aux=True)

    if not setup.beside:
        return gradient(0)(outputs)
    # The networks stay outside: on CPU the gradient of a convolution is slow in a cond.
    return jax.lax.cond(active, gradient(0), gradient(setup.beside), outputs)


def _loss(setup, features, first):
    """The loss of the rows from `first` on: 0, or the number of replayed ones."""
    base, options, size = setup.base, setup.options, setup.beside
    whole, replayed = _range(features, first, None), _range(features, 0, size)
    loss = base.loss(whole, options)
    align = past = jnp.zeros_like(loss)
    replays = size > 0 and first == 0
    if replays:
        past = base.loss(replayed, options)
    if setup.plan.align and (setup.every_row or replays):
        aligned = whole if setup.every_row else replayed
        align = setup.plan.align(base, aligned, options)
    parts = {
        "stream_loss": base.loss(_range(features, size, None), options),
        "replay_loss": past,
        "align": align,
    }
    return loss + (options.weight if setup.plan.weighs else 1) * align, parts


def _range(features, start, stop):
    """The features of the rows from `start` to `stop`."""
    by_row = {name: getattr(features, name) for name in ("z", "o", "p", "k", "f")}
    cut = {name: x[start:stop] for name, x in by_row.items() if x is not None}
    return features._replace(**cut)


def _followed(setup, state, features, active):
    """Slow network, teacher and queues after an update."""
    extra, params = state.extra, _copied(setup, state.params)
    if setup.base.momentum:
        slow = optim.ema(extra.momentum, params, setup.momentum)
        extra = extra._replace(momentum=slow)
    if setup.plan.teacher and setup.snapshot_every is None:
        extra = _taught(setup, state.replace(extra=extra), setup.teacher_ema)
    if setup.base.queues:
        extra = _queued(setup, extra, features, active)
    return extra


def _queued(setup, extra, features, active):
    """The queues with the keys and the frozen features of these rows."""
    size, changes = setup.beside, {}
    for name, rows in (("key_queue", features.k), ("frozen_queue", features.f)):
        bank, pointer = getattr(extra, name), extra.pointer
        if bank is None:
            continue
        rows = core.l2_normalize(rows).swapaxes(0, 1)
        enqueue = functools.partial(
            queue.enqueue, aligned=size in (0, rows.shape[1] - size)
        )
        if size:
            bank, pointer = enqueue(bank, pointer, rows[:, :size], active=active)
        bank, pointer = enqueue(bank, pointer, rows[:, size:])
        changes |= {name: bank, "pointer": pointer}
    return extra._replace(**changes)
