"""Two-view self-supervised learning under a continual strategy.

One step serves every pair of a base and a strategy. A base (`bases/NAME.py`) is the
loss of one task alone; a strategy (`strategies/NAME.py`) defines the loss of later
tasks. Each names its papers and its departures; `records.py` has the fields of both.

Papers: Cha, Cho, Moon, "Regularizing with Pseudo-Negatives for Continual
Self-Supervised Learning", ICML 2024 (PNR); Fini et al., "Self-Supervised
Models are Continual Learners", CVPR 2022 (CaSSLe).

Departures:
- Negatives and batch statistics span the global batch; the released code
  takes them per device.
- The frozen network is in eval mode by default (`frozen_bn="running"`); the
  released code flips between both modes by accident.
- The momentum of the slow network follows the progress within the task at
  every step; the released code skips the first step and lags by one.
- `form="paper"` takes the papers' equations where the released code, the
  default, differs from them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from jaxcl import core, lookup, optim, schema
from jaxcl.errors import Refused
from jaxcl.methods.two_view import bases, head, networks, records, strategies
from jaxcl.nets import tuning, vit


class Extra(NamedTuple):
    """The state of two-view methods apart from the network that learns."""

    momentum: core.PyTree  # f32, slow copy of encoder and projector; {} without one
    momentum_stats: core.PyTree  # f32, its own running statistics
    teacher: core.PyTree  # f32, frozen copy of encoder and projector; {} without one
    teacher_stats: core.PyTree  # f32
    base: core.PyTree  # the base's own state, see its module; None: it has none
    strategy: core.PyTree  # the strategy's own state; None: it has none


class Setup(NamedTuple):
    """The constants that `make` sets; no arrays."""

    parts: core.Parts
    base: records.Base
    strategy: records.Strategy
    networks: networks.Networks
    head_steps: int  # first steps of the run, in which the encoder stays as it is


_FEW = 16  # images of a batch, below which contrast teaches little
_STREAM = 0xD157  # keeps the fresh g apart from the step's own keys
_BRANCHES = 0xD409  # the same for branches that the encoder drops
_LOCAL = 0x10CA  # for local crops
_MASKS = 0x1B07  # for hidden patches


def _fill_from_base(options: dict, replay: core.Replay | None = None) -> dict:
    """Fill in the base's values for options that are None."""
    base, strategy = bases.make_base(options["base"]), dict(options["strategy"])
    make = strategies.find_make(strategy["name"])
    strategy = schema.defaults(make) | strategy
    filled = networks.choose_sizes(base, options)
    return filled | {"strategy": strategy | networks.choose_sizes(base, strategy)}


@schema.checked("config.method", fill=_fill_from_base)
@schema.debug(hidden_dim=16, output_dim=8)
def make(
    parts: core.Parts,
    *,
    base: bases.BaseSection = "mocov2plus",
    strategy: strategies.StrategySection = "finetune",
    hidden_dim: schema.Width | None = None,
    output_dim: schema.Width | None = None,
    hidden_layers: schema.Layers | None = None,
    head_steps: schema.Natural = 0,
    online_head: bool = False,
    head_lr: schema.Positive = 0.1,
    head_form: head.Form = "apart",
) -> core.Method:
    """Make one base under one strategy; each is a section with options of its own.

    Args:
      parts: what the config builds.
      base: name in `bases.BASES`, or of a module of your own, "mypackage.mybase"; or a
        section with this name and options of its `make`.
      strategy: name in `strategies.STRATEGIES`, or of a module of your own; or a
        section.
      hidden_dim, output_dim, hidden_layers: of the projector; None: the base's.
      head_steps: number of first steps of the run in which only the projector, the
        predictors and the prototypes train, for an encoder that comes without them.
      online_head: train a linear head on labels of all classes, see `head.py`.
      head_lr: learning rate of that head.
      head_form: "apart", or "released", whose rows also move the network's statistics.

    Raises:
      Refused: naming the field, the value and what is allowed.
    """
    spec, plan = bases.make_base(base), strategies.make_strategy(strategy)
    names = lookup.name_of(base), lookup.name_of(strategy)
    if plan.check is not None:
        plan.check(names[0], spec)
    _check_data(parts, names[0], spec, names[1], plan)
    shape = spec.projector._replace(
        hidden_dim=hidden_dim, output_dim=output_dim, hidden_layers=hidden_layers
    )
    if spec.indexed:
        shape = shape._replace(output_dim=_count_rows(parts, shape.output_dim))
    _warn_unread(spec, online_head, {"head_lr": head_lr, "head_form": head_form})
    setup = Setup(
        parts=parts,
        base=spec,
        strategy=plan,
        networks=networks.build_networks(
            parts,
            spec,
            shape,
            distiller_hidden_dim=plan.distiller_hidden_dim,
            features=plan.features or spec.features,
        ),
        head_steps=head_steps,
    )
    method = core.Method(
        init=functools.partial(_init, setup),
        step=functools.partial(_step, setup),
        embed=setup.networks.copied.embed,
        project=setup.networks.copied.project,
        begin_task=functools.partial(_begin_task, setup),
        end_task=functools.partial(_end_task, setup),
        supervised=spec.supervised,
        alone=(("strategy", "finetune"),),
        drops_branches=True,
        takes_local=True,
    )
    if not online_head:
        return method
    return head.add(method, parts, lr=head_lr, form=head_form)


def _warn_unread(spec, online_head, of_head) -> None:
    """Warn of options that are set and change nothing."""
    standard = schema.defaults(make)
    unread = [name for name, value in of_head.items() if value != standard[name]]
    of_base = [f"base.{name}" for name in spec.unread]
    for name in (*of_base, *(() if online_head else unread)):
        logging.warning("config.method.%s has no effect with the other options", name)


def _check_data(parts, base, spec, strategy, plan):
    """Refuse batches and crops that the base or the strategy cannot read.

    Warn of batches with too few rows to compare.
    """
    net = tuning.bare_module(parts.encoder)
    if spec.masks and not (isinstance(net, vit.ViT) and net.features != "both"):
        raise Refused(
            "config.method.base.ibot: hides patches of a Vision Transformer; must be "
            "0, or config.encoder.name 'vit' with features 'class' or 'mean', and "
            "config.accumulate 1"
        )
    if spec.strategies is not None:
        core.check_choice("config.method.strategy", strategy, spec.strategies)
    if parts.batch_size == 1 and not spec.one_row:
        raise Refused(
            f"config.batch_size=1: base {base!r} compares rows of a batch; must be at "
            "least 2"
        )
    if 1 < parts.batch_size < _FEW and not spec.one_row:
        logging.warning(
            "config.batch_size=%d: base %r compares the images of a batch, and fewer "
            "than %d teach it little: take fewer tasks, more images, or begin with a "
            "pretrained encoder (config.start=FOLDER)",
            parts.batch_size,
            base,
            _FEW,
        )
    if parts.local is None:
        return
    if not spec.local:
        takes = ", ".join(name for name in bases.BASES if bases.make_base(name).local)
        raise Refused(
            f"config.augment.local: base {base!r} takes no local crops; "
            f"leave the section out, or set config.method.base to one of {takes}"
        )
    if not plan.local:
        raise Refused(
            f"config.augment.local: strategy {strategy!r} reads two views alone; "
            "leave the section out"
        )


def _count_rows(parts, asked: int) -> int:
    """Choose the number of rows of a head that classifies each image by its number."""
    if asked and asked < parts.train_rows:
        raise Refused(
            f"config.method.base.rows={asked}: each of the {parts.train_rows} train "
            f"images has a row; must be at least {parts.train_rows}"
        )
    return asked or max(parts.train_rows, 1)


def _init(setup, key, batch):
    """Make the state before the first step."""
    base, strategy = setup.base, setup.strategy
    start = networks.init_networks(setup.networks, setup.parts, key, batch)
    dim, of_base, of_strategy = setup.networks.dim, None, None
    if base.init_state is not None:
        of_base = base.init_state(start.base_key, dim)
    if strategy.init_state is not None:
        image = batch["image"][0]
        of_strategy = strategy.init_state(
            records.Example(
                start.strategy_key,
                image,
                dim,
                start.params,
                base,
                setup.parts.starts_pretrained,
            )
        )
    extra = Extra(
        *(core.copy(start.copied) if base.momentum else ({}, {})),
        *(core.copy(start.copied) if strategy.teacher else ({}, {})),
        base=of_base,
        strategy=of_strategy,
    )
    return core.new_state(start.key, start.params, start.stats, setup.parts.tx, extra)


def _begin_task(setup, state, task):
    """Start the optimiser anew; make the network so far the teacher."""
    if setup.base.indexed and task.index > 0:
        state = _renew_rows(setup, state, task.train.rows)
    # One program: else each shape of the parameters' would be compiled apart.
    state = state.replace(opt_state=jax.jit(setup.parts.tx.init)(state.params))
    untaught = not setup.parts.starts_pretrained
    if not _follows_tasks(setup.strategy) or (task.index == 0 and untaught):
        return state
    if setup.networks.distiller.nets and task.index == 1 and untaught:
        # g is first used in the second task, which starts it anew.
        key = jax.random.fold_in(core.step_key(state), _STREAM)
        start = functools.partial(networks.init_distiller, setup.networks)
        params, stats = jax.jit(start)(key)
        state = state.replace(params=state.params | params, stats=state.stats | stats)
    extra = state.extra._replace(
        teacher=core.copy(networks.copy_names(setup.networks, state.params)),
        teacher_stats=core.copy(networks.copy_names(setup.networks, state.stats)),
    )
    return state.replace(extra=extra)


def _follows_tasks(strategy: records.Strategy) -> bool:
    """Tell whether the teacher is the network of the last task."""
    return strategy.teacher is not None and strategy.teacher.follows == "task"


def _renew_rows(setup, state, rows):
    """Draw new rows for a task's images, whose numbers another set may have had."""
    is_new = np.zeros(setup.networks.dim, bool)
    is_new[rows] = True
    last = f"linear{len(state.params['projector'])}"

    @jax.jit
    def draw(key, head):
        inputs = jnp.zeros((1, head["linear1"]["kernel"].shape[0]))
        net = setup.networks.copied.nets["projector"]
        born = net.init(key, inputs)["params"][last]
        drawn = jax.tree.map(lambda a, b: jnp.where(is_new, a, b), born, head[last])
        return {**head, last: drawn}

    key = jax.random.fold_in(core.step_key(state), _STREAM)
    head = draw(key, state.params["projector"])
    return state.replace(params={**state.params, "projector": head})


def _end_task(setup, state, task):
    if setup.strategy.end_task is None:
        return state
    own = jax.jit(setup.strategy.end_task)(state.extra.strategy, state.params)
    return state.replace(extra=state.extra._replace(strategy=own))


def _step(setup, state, batch):
    """Take one step of the optimiser."""
    base, strategy, parts = setup.base, setup.strategy, setup.parts
    if setup.head_steps:
        state = end_warm_up(setup, state)
    state = networks.take_snapshot(strategy.teacher, state, state.step)
    extra, key = state.extra, core.step_key(state)
    keys = records.StepKeys(*jax.random.split(key, 5))
    moment = records.Moment(key, state.task, core.progress(state))

    # Views, and what the strategy makes of them
    views = parts.augment(keys.augment, batch["image"])
    reading = strategy.read(extra.strategy, keys, views, parts)
    inputs = _gather_inputs(setup, state, key, batch, reading)

    # Targets without gradient
    first = jnp.zeros((), bool)  # there is no teacher yet
    if _follows_tasks(strategy):
        first = (state.task == 0) & (not parts.starts_pretrained)
    targets, slow_stats = _compute_targets(
        setup, state, moment, batch, reading, inputs, first
    )

    # Loss and gradients
    losses, which = [lambda x: (strategy.compute_loss(base, x), {})], None
    if _follows_tasks(strategy):
        losses, which = [lambda x: (base.loss(x), {}), *losses], first
    (loss, _, features, stats), grads = networks.loss_and_grads(
        setup.networks, inputs, state.params, targets, losses, which
    )
    if base.mask_gradients is not None:
        own = {name: grads[name] for name in setup.networks.own}
        grads = grads | base.mask_gradients(moment, own)
    if setup.head_steps:
        grads = hold_encoder(setup, state, grads)
    lr, own = parts.lr(moment.progress, state.task), extra.strategy
    if strategy.change_gradients is not None:
        grads, own = strategy.change_gradients(own, records.Update(state, grads, lr))

    # Update; slow network, queues, memory
    after = core.apply_gradients(state, grads, parts.tx, lr).replace(stats=stats)
    if setup.head_steps:
        after = keep_encoder(setup, state, after)
    done = records.StepResult(features, batch["image"], reading, keys, ~first)
    extra = _update_extra(setup, extra, after.params, moment, done, own, slow_stats)
    metrics = {"loss": loss, "lr": lr, "grad_norm": optax.tree.norm(grads)}
    after = networks.average_teacher(strategy.teacher, after.replace(extra=extra))
    return after, metrics


def end_warm_up(setup, state):
    """Restart the optimiser when the encoder begins to train.

    Moments and counts of the steps before would scale its first updates. A teacher
    without heads gets the trained ones.
    """
    change = functools.partial(jnp.where, state.step == setup.head_steps)
    fresh, extra = setup.parts.tx.init(state.params), state.extra
    opt_state = jax.tree.map(change, fresh, state.opt_state)
    if setup.strategy.teacher and setup.parts.starts_pretrained:
        params, stats = (
            networks.copy_names(setup.networks, tree)
            for tree in (state.params, state.stats)
        )
        extra = extra._replace(
            teacher=jax.tree.map(change, params, extra.teacher),
            teacher_stats=jax.tree.map(change, stats, extra.teacher_stats),
        )
    return state.replace(opt_state=opt_state, extra=extra)


def hold_encoder(setup, state, grads):
    """Zero the gradient of the encoder in the first steps."""
    waits = state.step < setup.head_steps
    held = jax.tree.map(lambda g: jnp.where(waits, 0.0, g), grads["encoder"])
    return {**grads, "encoder": held}


def keep_encoder(setup, before, after):
    """Undo a step's changes to the encoder, in the first steps."""
    waits = before.step < setup.head_steps

    def keep(old, new):
        # Dropout's key, which lies among the statistics, moves on.
        is_number = jnp.issubdtype(new.dtype, jnp.floating)
        return jnp.where(waits, old, new) if is_number else new

    kept = {
        name: {**tree, "encoder": jax.tree.map(keep, old["encoder"], tree["encoder"])}
        for name, old, tree in (
            ("params", before.params, after.params),
            ("stats", before.stats, after.stats),
        )
    }
    return after.replace(**kept)


def _gather_inputs(setup, state, key, batch, reading) -> networks.Inputs:
    """Gather what the pass of `networks.forward` needs besides the parameters."""
    parts, local = setup.parts, None
    if parts.local is not None:
        local = parts.local(jax.random.fold_in(key, _LOCAL), batch["image"])
    return networks.Inputs(
        state.stats,
        reading.views.reshape((-1, *reading.views.shape[2:])),
        views=reading.views.shape[1],
        key=jax.random.fold_in(key, _BRANCHES) if setup.networks.drops else None,
        local=local,
        replayed=reading.replayed,
        stored_mask=reading.features.get("stored_mask"),
        masks=_draw_masks(setup, key, reading.views) if setup.base.masks else None,
    )


def _draw_masks(setup, key, views) -> records.Masks:
    """Draw the same number of patches in each view; a share of the views hides them."""
    rows, (height, width) = views.shape[0] * views.shape[1], views.shape[2:4]
    side = tuning.bare_module(setup.parts.encoder).patch
    patches = (height // side) * (width // side)
    share, chance = setup.base.masks
    k_places, k_hides = jax.random.split(jax.random.fold_in(key, _MASKS))
    order = jnp.argsort(jax.random.uniform(k_places, (rows, patches)), axis=1)
    hides = jax.random.bernoulli(k_hides, chance, (rows,))
    count = max(round(share * patches), 1)
    return records.Masks(order[:, :count], hides.astype(jnp.int32), patches)


def _compute_targets(setup, state, moment, batch, reading, inputs, first):
    """Compute all that the losses read besides the outputs of the network that learns.

    The first task has no teacher, unless the encoder was trained before: then it is the
    teacher, with the projector that the run begins with.

    Returns:
      fields of `records.Features`, and the slow network's statistics after its pass.
    """
    base, strategy, extra = setup.base, setup.strategy, state.extra
    project = functools.partial(networks.project_views, setup.networks, inputs=inputs)
    targets, slow_stats = dict(reading.features), {}
    if base.momentum:
        _, targets["k"], targets["slow_patches"], slow_stats = project(
            extra.momentum, extra.momentum_stats, train=True, patches=True
        )
    if strategy.teacher:

        def teach():
            train = strategy.teacher.statistics == "batch"
            h, f, *_ = project(extra.teacher, extra.teacher_stats, train=train)
            return {"f": f, "frozen_h": h} if setup.networks.features else {"f": f}

        if not _follows_tasks(strategy):
            targets |= teach()
        else:
            shapes = jax.eval_shape(teach)
            absent = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            targets |= jax.lax.cond(first, lambda: absent, teach)
    targets |= dict(
        label=batch["label"],
        index=batch["index"] if base.indexed else None,
        hides=None if inputs.masks is None else inputs.masks.hides,
        slow_params=extra.momentum,
        frozen_params=extra.teacher,
        state=extra.base,
    )
    if base.prepare is not None:
        targets["prepared"] = base.prepare(moment, setup.networks.dim)
    return targets, slow_stats


def _update_extra(setup, extra, params, moment, done, own, slow_stats) -> Extra:
    """Move slow network, and the states of base and strategy, after a step.

    Args:
      params: after the step.
      own: the strategy's state after `change_gradients`.
      slow_stats: running statistics of the slow network after its pass.
    """
    base, strategy = setup.base, setup.strategy
    if base.momentum:
        decay = optim.momentum_schedule(moment.progress, **base.momentum._asdict())
        copied = {name: params[name] for name in extra.momentum}
        slow = optim.ema(extra.momentum, copied, decay)
        extra = extra._replace(momentum=slow, momentum_stats=slow_stats)
    if base.update is not None:
        extra = extra._replace(base=base.update(extra.base, done.features))
    if strategy.update is not None:
        own = strategy.update(own, done)
    return extra._replace(strategy=own)
