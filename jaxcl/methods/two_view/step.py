"""One step of self-supervised learning, for tasks and for streams.

The step serves every pair of a base and a strategy. A base (`bases/NAME.py`) is the
loss of one task alone; a strategy (`strategies/NAME.py`) defines the loss of later
tasks, or of a stream. On a stream a batch has several updates, and rows of a memory
(`stream.py`) stand beside the incoming ones.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcl import core, optim
from jaxcl.methods.two_view import networks, records, stream
from jaxcl.nets import tuning


class Extra(NamedTuple):
    """The state of two-view methods apart from the network that learns."""

    momentum: core.PyTree  # f32, slow copy of encoder and projector; {} without one
    momentum_stats: core.PyTree  # f32, its own running statistics
    teacher: core.PyTree  # f32, frozen copy of encoder and projector; {} without one
    teacher_stats: core.PyTree  # f32
    base: core.PyTree  # the base's own state, see its module; None: it has none
    strategy: core.PyTree  # the strategy's own state; None: it has none
    memory: core.PyTree = None  # of a stream, see `stream.create`; None: there is none
    kept: core.PyTree = None  # what the policy of that memory counts


class Setup(NamedTuple):
    """The constants that `make` sets; no arrays."""

    parts: core.Parts
    base: records.Base
    strategy: records.Strategy
    networks: networks.Networks
    head_steps: int = 0  # first steps of the run, in which the encoder stays as it is
    stream: records.Stream | None = None  # None: tasks, one update on each batch


_STREAM = 0xD157  # keeps the fresh g apart from the step's own keys
_BRANCHES = 0xD409  # the same for branches that the encoder drops
_LOCAL = 0x10CA  # for local crops
_MASKS = 0x1B07  # for hidden patches


def make_method(setup: Setup, **fields) -> core.Method:
    """Make the method of a setup; `fields` are those that tasks or streams add."""
    return core.Method(
        init=functools.partial(init_state, setup),
        step=functools.partial(take_step, setup),
        embed=setup.networks.copied.embed,
        project=setup.networks.copied.project,
        drops_branches=True,
        **fields,
    )


def init_state(setup, key, batch):
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
    if setup.stream is not None and setup.stream.size:
        memory, counts = stream.create(setup, batch)
        extra = extra._replace(memory=memory, kept=counts)
    return core.new_state(start.key, start.params, start.stats, setup.parts.tx, extra)


def begin_task(setup, state, task):
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


def end_task(setup, state, task):
    """Let the strategy look back on a task."""
    if setup.strategy.end_task is None:
        return state
    ended = jax.jit(setup.strategy.end_task)(state.extra.strategy, state.params)
    return state.replace(extra=state.extra._replace(strategy=ended))


def take_step(setup, state, batch):
    """Take one update on a batch; on a stream several, then store its images."""
    if setup.head_steps:
        state = end_warm_up(setup, state)
    step, key = state.step, core.step_key(state)
    state = networks.take_snapshot(setup.strategy.teacher, state, step)
    if setup.stream is None:
        keys = records.StepKeys(key, *jax.random.split(key, 5))
        state, metrics, _ = _update(setup, state, batch, keys)
        return state, metrics
    # In Python: gradients in a loop of XLA's are slow on CPU
    for keys in stream.split_keys(key, setup.parts.replay.updates):
        state, metrics, stats = _update(setup, state.replace(step=step), batch, keys)
    if setup.stream.size:
        state = stream.store_batch(setup, state, batch, stats, step, keys.write)
    return state, metrics


def _update(setup, state, batch, keys):
    """Take one step of the optimiser.

    Returns:
      the state, metrics, and on a stream `stream.RowStats` of the incoming rows.
    """
    base, strategy, parts = setup.base, setup.strategy, setup.parts
    extra, key = state.extra, keys.step
    moment = records.Moment(key, state.task, core.progress(state))

    # Views, and what a memory adds to them
    views = parts.augment(keys.augment, batch["image"])
    reading = strategy.read(extra.strategy, keys, views, parts)
    if setup.stream is not None:
        reading = stream.add_rows(setup, extra.memory, keys, reading)
    inputs = _gather_inputs(setup, state, key, batch, reading)

    # Targets without gradient
    first = jnp.zeros((), bool)  # there is no teacher yet
    if _follows_tasks(strategy):
        first = (state.task == 0) & (not parts.starts_pretrained)
    targets, slow_stats = _compute_targets(
        setup, state, moment, batch, reading, inputs, first
    )

    # Loss and gradients
    losses, which = _list_losses(setup, reading, first)
    (loss, terms, features, stats), grads = networks.loss_and_grads(
        setup.networks, inputs, state.params, targets, losses, which
    )
    if base.mask_gradients is not None:
        of_base = {name: grads[name] for name in setup.networks.own}
        grads = grads | base.mask_gradients(moment, of_base)
    if setup.head_steps:
        grads = hold_encoder(setup, state, grads)
    lr, of_strategy = parts.lr(moment.progress, state.task), extra.strategy
    if strategy.change_gradients is not None:
        grads, of_strategy = strategy.change_gradients(of_strategy, state, grads, lr)

    # Update; slow network, teacher, queues, memories
    after = core.apply_gradients(state, grads, parts.tx, lr).replace(stats=stats)
    if setup.head_steps:
        after = keep_encoder(setup, state, after)
    extra = extra._replace(strategy=of_strategy)
    extra = _update_extra(setup, extra, after.params, moment, features, reading, ~first)
    if base.momentum:
        extra = extra._replace(momentum_stats=slow_stats)
    if strategy.store is not None:
        stored = strategy.store(
            extra.strategy, keys.write, batch["image"], features, reading
        )
        extra = extra._replace(strategy=stored)
    after = networks.average_teacher(strategy.teacher, after.replace(extra=extra))
    metrics = {"loss": loss, "lr": lr, "grad_norm": optax.tree.norm(grads)}
    if strategy.student is not None:
        finite = jnp.isfinite(features.f).all(axis=-1)
        metrics["untaught"] = jnp.mean(~finite)  # share of views
    if setup.stream is None:
        return after, metrics, None
    return stream.finish_update(setup, after, metrics | terms, features, reading)


def _list_losses(setup, reading, first):
    """List the losses of the step: one, or two of which the step takes one.

    Returns:
      functions of `Features`, (loss, metrics); of two, bool[], True takes the first.
    """
    base, strategy = setup.base, setup.strategy
    if setup.stream is not None:
        return stream.list_losses(setup, reading)
    losses = [lambda x: (strategy.compute_loss(base, x), {})]
    if not _follows_tasks(strategy):
        return losses, None
    return [lambda x: (base.loss(x), {}), *losses], first


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
    parts, local, distilled = setup.parts, None, None
    if setup.stream is not None and not setup.stream.every_row:
        distilled = 2 * setup.stream.beside
    if parts.local is not None:
        local = parts.local(jax.random.fold_in(key, _LOCAL), batch["image"])
    return networks.Inputs(
        state.stats,
        reading.views.reshape((-1, *reading.views.shape[2:])),
        views=reading.views.shape[1],
        distilled=distilled,
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
        label=None if setup.stream else batch["label"],
        index=batch["index"] if base.indexed else None,
        hides=None if inputs.masks is None else inputs.masks.hides,
        slow_params=extra.momentum,
        frozen_params=extra.teacher,
        state=extra.base,
    )
    if strategy.student is not None:
        taught = setup.parts.teacher.embed(batch["constants"], inputs.images)
        targets["f"] = taught.reshape(-1, inputs.views, taught.shape[-1])
    if base.prepare is not None:
        targets["prepared"] = base.prepare(moment, setup.networks.dim)
    return targets, slow_stats


def _update_extra(setup, extra, params, moment, features, reading, taught) -> Extra:
    """Move slow network, and the states of base and strategy, after a step.

    Args:
      params: after the step.
      taught: bool[], there is a teacher.
    """
    base, strategy = setup.base, setup.strategy
    if base.momentum:
        decay = optim.momentum_schedule(moment.progress, **base.momentum._asdict())
        copied = {name: params[name] for name in extra.momentum}
        extra = extra._replace(momentum=optim.ema(extra.momentum, copied, decay))
    groups = [(features, True, True)]
    if setup.stream is not None:
        groups = stream.group_rows(setup, features, reading)
    of_base, of_strategy = extra.base, extra.strategy
    for rows, active, aligned in groups:
        if base.update is not None:
            of_base = base.update(of_base, rows, active=active, aligned=aligned)
        if strategy.update is not None:
            active = active & taught
            of_strategy = strategy.update(
                of_strategy, rows, active=active, aligned=aligned
            )
    return extra._replace(base=of_base, strategy=of_strategy)
