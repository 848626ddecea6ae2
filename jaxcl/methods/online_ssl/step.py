"""Online continual self-supervised learning: one pass over a stream, without labels.

Each incoming batch is trained on `config.replay.updates` times, beside rows that are
drawn from a memory of earlier images; then its images, not augmented, enter the memory.
The method knows no labels and no boundaries between tasks. It composes a base of
`two_view/bases/`, a memory (config.replay) and a regulariser, which is a strategy of
`two_view/strategies/` or CLA-R:
- "none": the base's loss on replayed and incoming rows, L_SSL.
- "cla_r": CLA-R of Cignoni et al., "Continual Latent Alignment", arXiv 2507.10434.
  L_SSL plus weight * mean of -cos(a(z), s) over the views of replayed rows, where s is
  stored with the row and moves towards its z with every use, and a is a predictor.
- "cassle": the distillation of CaSSLe (Fini et al., CVPR 2022) towards a frozen network
  that follows the one that learns. With SimSiam and `rows="replay"` it is CLA-E, whose
  -cos(a(z), f) is half of our 2 - 2 cos(a(z), f): our weight is half of CLA's.
- "der": DER (Buzzega et al., NeurIPS 2020) on projections, as Madaan et al. (ICLR 2022)
  apply it. L_SSL plus weight * mean of (z - s)^2 over the views of replayed rows, where
  s is stored with the row once and for all. Like DER++, and unlike DER, replayed rows
  are in L_SSL, too.
- "lump": LUMP (Madaan et al., ICLR 2022). L_SSL is of mixtures of incoming with
  replayed rows alone, see `stored_examples.mix_examples`.
- "pnr": the terms of PNR (Cha et al., ICML 2024), with features of the same frozen
  network. This, and all that CLA does not name, is OURS and in no paper.

EWC is not among them: it needs the end of each task, which the method does not know.

Departures:
- CLA's released code draws and passes nothing for replay until the memory holds more
  than `size` rows. Here shapes are fixed: until then incoming rows are repeated in
  place of replayed ones, for the batch statistics alone, without a loss.
- The frozen network and the slow one of BYOL and MoCo normalise by their batch; CLA's
  text does not say what its EMA does. `frozen_bn="running"` takes averaged statistics.
- The momentum of the slow network is constant, since there is no end to count towards.
- The learning rate of all updates on a batch is that of the batch.
- Labels and numbers of tasks are stored with the images, for evaluators; no step reads
  them.
"""

import functools
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcl import core, optim, schema, sharding
from jaxcl.errors import Refused
from jaxcl.memory import buffer, policies, queue, sharded
from jaxcl.methods.online import probe
from jaxcl.methods.online_ssl import regularisers, stored
from jaxcl.methods.two_view import bases, networks, records
from jaxcl.methods.two_view.strategies import stored_examples

_MIX = 0x10B9  # keeps LUMP's mixtures apart from the other keys of an update
QUEUE_SIZE = 2048  # default of config.method.queue_size here


class Extra(NamedTuple):
    """The method's state apart from the network that learns."""

    momentum: core.PyTree  # f32, slow copy of encoder and projector; {} without one
    teacher: core.PyTree  # f32, the frozen network; {} without one
    teacher_stats: core.PyTree  # f32, its running statistics; {} if it reads none
    base: core.PyTree  # the base's own state, see its module; None: it has none
    frozen_queue: queue.Queue | None  # of the teacher
    # "image" u8, "label" and "task" i32; "projection" f32[D] for "cla_r" and "der";
    # what the policy reads. None: nothing is stored
    memory: buffer.Buffer | None
    kept: core.PyTree  # what the memory's policy counts


class Setup(NamedTuple):
    """The constants that `make` sets; no arrays."""

    parts: core.Parts
    base: records.Base
    plan: records.Strategy
    networks: networks.Networks
    policy: policies.Policy | None  # of the memory
    size: int  # rows that an update draws; 0: there is no memory
    beside: int  # of these, rows that pass beside the incoming ones; LUMP: 0
    every_row: bool  # incoming rows are aligned, too
    momentum: float  # of the slow network


def _trains_online(base: records.Base) -> bool:
    """Tell whether a base reads no labels, numbers of images or progress of a task."""
    told = base.supervised or base.indexed or base.init_params or base.prepare
    return not (told or base.features or base.masks)


def list_bases() -> dict:
    """List the bases that can be trained online, by name, with their options here."""
    return {
        name: schema.adapt(
            make,
            # The slow network follows the option `momentum`.
            hidden=("momentum_start", "momentum_end", "streaming"),
            **{"queue_size": QUEUE_SIZE}
            if "queue_size" in schema.defaults(make)
            else {},
        )
        for name, make in bases.BASES.items()
        if _trains_online(make())
    }


BASES = list_bases()
Section = Annotated[Any, schema.Choice(BASES)]
RegulariserSection = Annotated[Any, schema.Choice(regularisers.REGULARISERS)]


def _make_parts(base, regulariser) -> tuple[records.Base, records.Strategy]:
    """Make the records of a base and of a regulariser from their sections."""
    make, options = schema.Choice(BASES).find(base, "config.method.base")
    spec = make(**options)
    options = dict(regulariser)
    plan = regularisers.find_make(options.pop("name"))(**options)
    return spec, plan


def _fill_from_base(options: dict, replay: core.Replay | None = None) -> dict:
    """Fill in the base's values for options that are None."""
    base, _ = _make_parts(options["base"], options["regulariser"])
    regulariser = dict(options["regulariser"])
    make = regularisers.find_make(regulariser["name"])
    regulariser = schema.defaults(make) | regulariser
    regulariser |= networks.choose_sizes(base, regulariser)
    return networks.choose_sizes(base, options) | {"regulariser": regulariser}


@schema.checked("config.method", fill=_fill_from_base)
@schema.debug(hidden_dim=16, output_dim=8)
def make(
    parts: core.Parts,
    *,
    base: Section = "simsiam",
    regulariser: RegulariserSection = "none",
    rows: Literal["replay", "all"] = "replay",
    remembers: bool = True,
    momentum: schema.Share = 0.99,
    hidden_dim: schema.Width | None = None,
    output_dim: schema.Width | None = None,
    hidden_layers: schema.Layers | None = None,
) -> core.Method:
    """Make one base with a memory and one regulariser; both are sections.

    Args:
      parts: what the config builds.
      base: name of the self-supervised loss, in `list_bases()` or a module of your own;
        or a section with this name and options. Bases that read labels, prototypes or
        random slices are refused.
      regulariser: name in `regularisers.REGULARISERS`, see the head of `step.py`; or a
        section.
      rows: rows that are aligned, "replay" or "all".
      remembers: keep a memory and replay from it; without one `rows` must be "all".
      momentum: of the slow network of BYOL and MoCo, after each update.
      hidden_dim, output_dim, hidden_layers: of the projector; None: the base's.

    Raises:
      Refused: naming the field, the value and what is allowed.
    """
    spec, plan = _make_parts(base, regulariser)
    if not _trains_online(spec):
        raise Refused(
            f"config.method.base={base['name']!r}: reads labels, numbers of images, or "
            "the progress of a task, which online_ssl does not know; must be one of "
            f"{', '.join(BASES)}"
        )
    if plan.check is not None:
        plan.check(base["name"], spec)
    _check_options(parts, regulariser["name"], plan, rows, remembers)
    size = parts.replay.size if remembers else 0
    shape = spec.projector._replace(
        hidden_dim=hidden_dim, output_dim=output_dim, hidden_layers=hidden_layers
    )
    setup = Setup(
        parts=parts,
        base=spec,
        plan=plan,
        networks=networks.build_networks(
            parts,
            spec,
            shape,
            distiller_hidden_dim=plan.distiller_hidden_dim,
        ),
        policy=sharded.find_policy(parts.replay) if remembers else None,
        size=size,
        beside=0 if plan.mix else size,
        every_row=rows == "all",
        momentum=momentum,
    )
    method = core.Method(
        init=functools.partial(_init, setup),
        step=functools.partial(_step, setup),
        embed=setup.networks.copied.embed,
        project=setup.networks.copied.project,
        replays=True,
        memory=(lambda state: state.extra.memory) if remembers else None,
    )
    return probe.add_measures(method, parts) if parts.replay.measure else method


def _check_options(parts, regulariser, plan, rows, remembers) -> None:
    """Refuse what the method cannot do, before anything compiles."""
    if plan.teacher is not None and plan.teacher.follows == "task":
        raise Refused(
            "config.method.regulariser.teacher='task': online_ssl knows no tasks; must "
            "be 'ema' or 'snapshot'"
        )
    if parts.batch_size == 1:
        raise Refused(
            "config.batch_size=1: online_ssl compares rows of a batch; must be at "
            "least 2"
        )
    if not remembers:
        if plan.stores or plan.mix or (plan.term and rows == "replay"):
            raise Refused(
                f"config.method.remembers=False: regulariser={regulariser!r} with "
                f"rows={rows!r} reads replayed rows; must be True, or rows='all' with "
                "regulariser 'cassle' or 'pnr'"
            )
        return
    if plan.stores and rows == "all":
        raise Refused(
            f"config.method.rows='all': regulariser {regulariser!r} aligns rows with "
            "what the memory stores of them; must be 'replay'"
        )
    stored.check_replay(parts.replay)
    if plan.mix:
        _check_mixtures(parts)


def _check_mixtures(parts: core.Parts) -> None:
    """Refuse a memory that "lump" cannot mix with, or that reads single rows."""
    replay = parts.replay
    if 0 < parts.batch_size < replay.size:  # 0: whoever asks does not know it yet
        raise Refused(
            f"config.replay.size={replay.size}: regulariser 'lump' mixes each incoming "
            "row with one replayed row; must be at most config.batch_size="
            f"{parts.batch_size}"
        )
    if reads := policies.look_up(replay.policy).reads:
        blank = [name for name, policy in policies.POLICIES.items() if not policy.reads]
        raise Refused(
            f"config.replay.policy={replay.policy!r}: reads {', '.join(reads)} of "
            "single rows, and regulariser 'lump' passes mixtures alone; allowed are "
            f"{', '.join(blank)}"
        )


def _init(setup, key, batch):
    """Make the state before the first step."""
    base, teacher = setup.base, setup.plan.teacher
    start = networks.init_networks(setup.networks, setup.parts, key, batch)
    params, stats = start.copied
    frozen_queue = of_base = None
    if base.init_state is not None:
        of_base = base.init_state(start.base_key, setup.networks.dim)
    if base.queue_size and setup.plan.queues:
        frozen_queue = queue.start_queue(
            start.strategy_key, base.queue_size, setup.networks.dim
        )
    memory, kept = stored.create(setup, batch) if setup.size else (None, {})
    extra = Extra(
        momentum=core.copy(params) if base.momentum else {},
        teacher=core.copy(params) if teacher else {},
        teacher_stats=core.copy(stats)
        if teacher and teacher.statistics == "running"
        else {},
        base=of_base,
        frozen_queue=frozen_queue,
        memory=memory,
        kept=kept,
    )
    return core.new_state(start.key, start.params, start.stats, setup.parts.tx, extra)


def _step(setup, state, batch):
    """Take all updates on a batch, then write to the memory."""
    k_write, *keys = jax.random.split(
        core.step_key(state), 1 + setup.parts.replay.updates
    )
    teacher, step = setup.plan.teacher, state.step
    state = networks.take_snapshot(teacher, state, step)
    for key in keys:  # in Python: gradients in a loop of XLA's are slow on CPU
        state, stats, metrics = _update(setup, state.replace(step=step), batch, key)
    if setup.size:
        state = stored.store_batch(setup, state, batch, stats, step, k_write)
    return state, metrics


class UpdateKeys(NamedTuple):
    """Random keys of an update, by use."""

    augment: jax.Array
    draw: jax.Array
    augment_drawn: jax.Array
    mix: jax.Array


class Rows(NamedTuple):
    """The rows of an update."""

    views: jax.Array  # f32[N,2,H,W,C], replayed ones first
    active: jax.Array  # bool[], the replayed rows are of the memory
    share: float | jax.Array  # of replayed rows, or of their part in mixtures
    drawn: tuple | None = None  # items, mask and slots of the replayed rows
    stored: jax.Array | None = None  # f32[R,D], projections stored with them


def _update(setup, state, batch, key):
    """Take one step of the optimiser.

    Returns: the state, `stored.RowStats` of the incoming rows, metrics.
    """
    parts, extra, beside = setup.parts, state.extra, setup.beside
    keys = UpdateKeys(*jax.random.split(key, 3), jax.random.fold_in(key, _MIX))

    # Views, replayed ones first
    rows = _read_rows(setup, extra, batch, keys)
    images = rows.views.reshape((-1, *rows.views.shape[2:]))  # 2i, 2i+1: one example

    # Targets without gradient
    inputs = networks.Inputs(
        state.stats, images, distilled=None if setup.every_row else 2 * beside
    )
    targets = _compute_targets(setup, state, rows, inputs)

    # Loss and gradients
    losses, which = [functools.partial(_compute_loss, setup, first=0)], None
    if beside:
        alone = functools.partial(_compute_loss, setup, first=beside)
        losses, which = [*losses, alone], rows.active
    (loss, terms, features, net_stats), grads = networks.loss_and_grads(
        setup.networks, inputs, state.params, targets, losses, which
    )

    # Update; slow network, teacher, queues, memory
    lr = core.rate(parts, state)
    state = core.apply_gradients(state, grads, parts.tx, lr).replace(stats=net_stats)
    extra = _update_extra(setup, state, features, rows.active)
    stats = stored.row_stats(setup, features, rows.active)
    if beside:
        extra = _update_memory(setup, extra, rows, stats)
    metrics = {"loss": loss, "lr": lr, "grad_norm": optax.tree.norm(grads)}
    metrics |= terms | {"replayed": jnp.where(rows.active, rows.share, 0.0)}
    incoming = jax.tree.map(lambda x: x[beside:], stats)
    return state.replace(extra=extra), incoming, metrics


def _compute_targets(setup, state, rows, inputs) -> dict:
    """Compute all that the losses read besides the outputs of the network that learns.

    Returns:
      fields of `records.Features`.
    """
    extra, queued = state.extra, state.extra.frozen_queue
    project = functools.partial(networks.project_views, setup.networks, inputs=inputs)
    targets = dict(label=None, state=extra.base, stored=rows.stored)
    targets["frozen_queue"] = None if queued is None else queued.rows
    if extra.momentum:  # it normalises by its batch
        _, targets["k"], *_ = project(extra.momentum, state.stats, train=True)
    if extra.teacher:
        batch = setup.plan.teacher.statistics == "batch"
        stats = state.stats if batch else extra.teacher_stats
        _, targets["f"], *_ = project(extra.teacher, stats, train=batch)
    return targets


def _update_memory(setup, extra, rows, stats) -> Extra:
    """Move what the memory stores of the replayed rows."""
    own = jax.tree.map(lambda x: x[: setup.beside], stats)
    memory = stored.update_stored(setup, extra.memory, rows.drawn, own, rows.active)
    return extra._replace(memory=memory)


def _read_rows(setup, extra, batch, keys) -> Rows:
    """Augment incoming rows; put replayed ones before them, or mix them in."""
    size, parts = setup.size, setup.parts
    views = parts.augment(keys.augment, batch["image"])
    if not size:
        return Rows(views, jnp.zeros((), bool), 0.0)
    active = jnp.sum(extra.memory.filled) > size
    drawn = sharded.sample(extra.memory, keys.draw, size)
    items = sharding.spread(drawn[0])
    replayed = parts.augment(keys.augment_drawn, items["image"])
    if setup.plan.mix:
        exist = jnp.broadcast_to(active, size)
        views, new = stored_examples.mix_examples(
            keys.mix, setup.plan.mix, views, replayed, exist
        )
        share = 1 - new
    else:
        # A blank image would enter the batch statistics.
        repeated = views[jnp.arange(size) % len(views)]
        views = jnp.concatenate([jnp.where(active, replayed, repeated), views])
        share = size / len(views)
    return Rows(views, active, share, drawn, items.get("projection"))


def _compute_loss(setup, features, first):
    """Compute the loss from row `first` on: 0, or the number of replayed rows."""
    base, plan, size = setup.base, setup.plan, setup.beside
    whole, replayed = _cut_rows(features, first, None), _cut_rows(features, 0, size)
    loss = base.loss(whole)
    align = past = jnp.zeros_like(loss)
    replays = size > 0 and first == 0
    if replays:
        past = base.loss(replayed)
    if plan.term and (setup.every_row or replays):
        align = plan.term(base, whole if setup.every_row else replayed)
    parts = {
        "stream_loss": base.loss(_cut_rows(features, size, None)),
        "replay_loss": past,
        "align": align,
    }
    return loss + plan.weight * align, parts


def _cut_rows(features, start, stop):
    """Cut out the features of the rows from `start` to `stop`."""
    by_row = {name: getattr(features, name) for name in ("z", "o", "p", "k", "f")}
    cut = {name: x[start:stop] for name, x in by_row.items() if x is not None}
    return features._replace(**cut)


def _update_extra(setup, state, features, active):
    """Move slow network, teacher, the base's state and the teacher's queue."""
    extra, base, teacher = state.extra, setup.base, setup.plan.teacher
    if base.momentum:
        params = {name: state.params[name] for name in extra.momentum}
        slow = optim.ema(extra.momentum, params, setup.momentum)
        extra = extra._replace(momentum=slow)
    extra = networks.average_teacher(teacher, state.replace(extra=extra)).extra
    if base.update is not None:
        updated = _update_by_rows(setup, base.update, extra.base, features, active)
        extra = extra._replace(base=updated)
    if extra.frozen_queue is not None:
        held = _update_by_rows(
            setup,
            lambda held, x, **how: queue.push_features(held, x.f, **how),
            extra.frozen_queue,
            features,
            active,
        )
        extra = extra._replace(frozen_queue=held)
    return extra


def _update_by_rows(setup, update, held, features, active):
    """Update a state by the replayed rows, if there are any, then by the others."""
    size = setup.beside
    aligned = size in (0, len(features.z) - size)
    if size:
        replayed = _cut_rows(features, 0, size)
        held = update(held, replayed, active=active, aligned=aligned)
    return update(held, _cut_rows(features, size, None), aligned=aligned)
