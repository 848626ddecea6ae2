"""One step of self-supervised learning, for tasks and for streams.

The step serves every pair of a base and a strategy. A base (`bases/NAME.py`) is the
loss of one task alone; a strategy (`strategies/NAME.py`) defines the loss of later
tasks, or of a stream. On a stream a batch has several updates, and rows of a memory
(`stream.py`) stand beside the incoming ones.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxcl import core, optim
from jaxcl.methods.two_view import networks, records, stream
from jaxcl.nets import chain, tuning

_BRANCHES = 0xD409  # keeps branches that the encoder drops apart from other draws
_LOCAL = 0x10CA  # the same for local crops
_MASKS = 0x1B07  # for hidden patches
_REPLAYED = 0x4E91  # for branches in the pass of stored images; above any block number


def make_method(setup: records.Setup, **fields) -> core.Method:
    """Make the method of a setup; `fields` are those that tasks or streams add."""
    return core.Method(
        init=functools.partial(networks.init_state, setup),
        step=functools.partial(take_step, setup),
        embed=setup.copied.embed,
        project=setup.copied.project,
        drops_branches=True,
        **fields,
    )


def take_step(setup, state, batch):
    """Take one update on a batch; on a stream several, then store its images."""
    if setup.head_steps:
        state = end_warm_up(setup, state)
    step, key, teacher = state.step, core.step_key(state), setup.strategy.teacher
    if teacher is not None and teacher.follows == "snapshot":
        keep = jnp.where(step % teacher.snapshot_every == 0, 0.0, 1.0)
        state = state.replace(extra=_move_teacher(state, keep))
    if not setup.online:
        keys = records.StepKeys(key, *jax.random.split(key, 5))
        state, metrics, _ = _update(setup, state, batch, keys)
        return state, metrics
    # In Python: gradients in a loop of XLA's are slow on CPU
    for keys in stream.split_keys(key, setup.parts.replay.updates):
        state, metrics, stats = _update(setup, state.replace(step=step), batch, keys)
    if setup.size:
        state = stream.store_batch(setup, state, batch, stats, step, keys.write)
    return state, metrics


def _update(setup, state, batch, keys):
    """Take one step of the optimiser.

    Returns:
      the state, metrics, and on a stream `stream.RowStats` of the incoming rows.
    """
    base, strategy, parts = setup.base, setup.strategy, setup.parts
    extra, key, progress = state.extra, keys.step, core.progress(state)

    # Views, and what a memory adds to them
    views = parts.augment(keys.augment, batch["image"])
    reading = strategy.read(extra.strategy, keys, views, parts)
    if setup.online:
        reading = stream.add_rows(setup, extra.memory, keys, reading)
    if parts.local is not None:
        local = parts.local(jax.random.fold_in(key, _LOCAL), batch["image"])
        reading = reading._replace(local=local)
    images = reading.views.reshape((-1, *reading.views.shape[2:]))
    if setup.drops:
        reading = reading._replace(key=jax.random.fold_in(key, _BRANCHES))
    if base.masks:
        reading = _hide_patches(setup, key, reading)

    # Targets without gradient
    first = None  # bool[], there is no teacher yet; None: there is one from the start
    if strategy.teacher and strategy.teacher.follows == "task":
        first = (state.task == 0) & (not parts.starts_pretrained)
    targets, slow_stats = _compute_targets(setup, state, batch, reading, images, first)
    if base.prepare is not None:
        targets["prepared"] = base.prepare(key, state.task, progress, setup.dim)

    # Loss and gradients
    if setup.online:
        losses, use_first = stream.list_losses(setup, reading)
    else:
        losses, use_first = [lambda x: (compute_loss(base, strategy, x), {})], first
        if first is not None:
            losses = [lambda x: (base.loss(x), {}), *losses]
    (loss, terms, features, stats), grads = loss_and_grads(
        functools.partial(forward, setup, state.stats, images, reading),
        state.params,
        targets,
        losses,
        use_first,
    )
    if base.mask_gradients is not None:
        of_base = {name: grads[name] for name in setup.base_params}
        grads = grads | base.mask_gradients(state.task, progress, of_base)
    if setup.head_steps:
        grads = hold_encoder(setup, state, grads)
    lr, of_strategy = parts.lr(progress, state.task), extra.strategy
    if strategy.change_gradients is not None:
        grads, of_strategy = strategy.change_gradients(of_strategy, state, grads, lr)

    # Update; slow network, teacher, queues, memories
    after = core.apply_gradients(state, grads, parts.tx, lr).replace(stats=stats)
    if setup.head_steps:
        after = keep_encoder(setup, state, after)
    extra = extra._replace(strategy=of_strategy)
    if base.momentum:
        start, end = base.momentum
        decay = optim.momentum_schedule(progress, start=start, end=end)
        copied = {name: after.params[name] for name in extra.momentum}
        extra = extra._replace(
            momentum=optim.ema(extra.momentum, copied, decay),
            momentum_stats=slow_stats,
        )
    has_teacher = True if first is None else ~first
    extra = _update_states(setup, extra, features, reading, has_teacher)
    if strategy.store is not None:
        stored = strategy.store(
            extra.strategy, keys.write, batch["image"], features, reading
        )
        extra = extra._replace(strategy=stored)
    after = after.replace(extra=extra)
    if strategy.teacher is not None and strategy.teacher.follows == "ema":
        after = after.replace(extra=_move_teacher(after, strategy.teacher.ema))
    metrics = {"loss": loss, "lr": lr, "grad_norm": optax.tree.norm(grads)}
    if strategy.student is not None:
        finite = jnp.isfinite(features.f).all(axis=-1)
        metrics["untaught"] = jnp.mean(~finite)  # share of views
    if not setup.online:
        return after, metrics, None
    return stream.finish_update(setup, after, metrics | terms, features, reading)


def compute_loss(
    base: records.Base, strategy: records.Strategy, x: records.Features
) -> jax.Array:
    """Compute the loss of the tasks after the first, f32[]."""
    if strategy.loss is not None:
        return strategy.loss(base, x)
    total = base.loss(x)
    if strategy.term is None:
        return total
    return total + strategy.weight * strategy.term(base, x)


def _hide_patches(setup, key, reading):
    """Draw the same number of patches in each view; a share of the views hides them."""
    count, views, height, width, _ = reading.views.shape
    rows, patches = count * views, _count_patches(setup, height, width)
    share, chance = setup.base.masks
    k_places, k_hides = jax.random.split(jax.random.fold_in(key, _MASKS))
    order = jnp.argsort(jax.random.uniform(k_places, (rows, patches)), axis=1)
    hides = jax.random.bernoulli(k_hides, chance, (rows,)).astype(jnp.int32)
    return reading._replace(
        places=order[:, : max(round(share * patches), 1)], hides=hides
    )


def _count_patches(setup, height, width):
    """Count the patches that the encoder sees in an image."""
    side = tuning.bare_module(setup.parts.encoder).patch
    return (height // side) * (width // side)


def _compute_targets(setup, state, batch, reading, images, first):
    """Compute the outputs of slow network and teacher, and gather what losses read.

    The first task has no teacher, unless the encoder was trained before: then it is the
    teacher, with the projector that the run begins with.

    Returns:
      fields of `records.Features`, and the slow network's statistics after its pass.
    """
    base, strategy, extra = setup.base, setup.strategy, state.extra
    project = functools.partial(_project_views, setup, images, reading)
    targets, slow_stats = dict(reading.features), {}
    if base.momentum:
        _, targets["k"], targets["slow_patches"], slow_stats = project(
            extra.momentum, extra.momentum_stats, train=True, patches=True
        )
    if strategy.teacher:

        def teach():
            train = strategy.teacher.statistics == "batch"
            h, f, *_ = project(extra.teacher, extra.teacher_stats, train=train)
            reads_h = "h" in (*base.reads, *strategy.reads)
            return {"f": f, "frozen_h": h} if reads_h else {"f": f}

        if first is None:
            targets |= teach()
        else:
            shapes = jax.eval_shape(teach)
            absent = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            targets |= jax.lax.cond(first, lambda: absent, teach)
    if strategy.student is not None:
        rows = setup.parts.teacher.embed(batch["constants"], images)
        targets["f"] = rows.reshape(-1, reading.views.shape[1], rows.shape[-1])
    targets |= dict(
        label=None if setup.online else batch["label"],
        index=batch["index"] if "index" in base.reads else None,
        hides=reading.hides,
        slow_params=extra.momentum,
        frozen_params=extra.teacher,
        state=extra.base,
    )
    return targets, slow_stats


def loss_and_grads(
    run: Callable,
    params: core.PyTree,
    targets: dict,
    losses: Sequence[Callable],
    use_first: jax.Array | None = None,
):
    """Compute a loss of the networks' outputs, and its gradients in the parameters.

    Two losses are branches of a `cond`. On CPU the gradient of a convolution is slow
    inside a cond, and residuals of both branches, as large as the logits, would leave
    it. So each branch takes its gradient by the outputs, and one `vjp` of the networks
    stands outside.

    Args:
      run: pass through the networks that learn, params -> outputs, statistics.
      params: parameters of all networks that learn.
      targets: the other fields of `records.Features`.
      losses: functions of `Features`, (loss, metrics); one, or two to choose from.
      use_first: bool[], takes the first of two losses, else the second.

    Returns:
      (loss, metrics, `Features`, statistics after the pass), gradients.
    """
    outputs, params_vjp, stats = jax.vjp(run, params, has_aux=True)

    gradient = jax.value_and_grad(
        lambda loss, outputs: loss(records.Features(**outputs, **targets)),
        argnums=1,
        has_aux=True,
    )
    branches = [functools.partial(gradient, loss) for loss in losses]
    if use_first is None:
        (loss, metrics), output_grads = branches[0](outputs)
    else:
        (loss, metrics), output_grads = jax.lax.cond(use_first, *branches, outputs)
    (grads,) = params_vjp(output_grads)
    return (loss, metrics, records.Features(**outputs, **targets), stats), grads


def forward(setup, stats, images, reading: records.Reading, params: core.PyTree):
    """Pass images through the networks that learn.

    Args:
      setup: constants of the method.
      stats: running statistics of the networks that learn.
      images: f32[VB,H,W,C], the V views of an example one after another.
      reading: the other images of the step.
      params: parameters of all networks that learn.

    Returns:
      name -> output, fields of `records.Features`; the statistics after the pass.
    """
    views, key = reading.views.shape[1], reading.key
    h, rows, after, patches = _pass_copied(
        setup, params, stats, images, reading, train=True, key=key
    )
    o = p = replayed_z = local_z = None
    if setup.predictor.nets:
        o, new = setup.predictor(params, stats, rows, train=True, groups=views)
        o, after = o.reshape(-1, views, setup.dim), after | new
    if setup.distiller.nets:
        # Rows that are not aligned do not enter the statistics of g.
        aligned = rows
        if setup.online and not setup.every_row:
            aligned = rows[: 2 * setup.beside]
        queries = setup.base.distiller_input(aligned)
        p, new = setup.distiller(params, stats, queries, train=True, groups=views)
        p, after = p.reshape(-1, views, setup.dim), after | new
    if setup.student.nets:
        p, new = setup.student(params, stats, h, train=True, groups=views)
        p, after = p.reshape(-1, views, p.shape[-1]), after | new
    if reading.local is not None:
        count, crops = reading.local.shape[1], reading.local
        local_z, new = setup.copied(
            params,
            after,
            crops.reshape(-1, *crops.shape[2:]),
            train=True,
            groups=count,
            key=None if key is None else jax.random.fold_in(key, _LOCAL),
        )
        local_z, after = local_z.reshape(-1, count, setup.dim), after | new
    if reading.replayed is not None:
        replayed_z, after = _pass_replayed(setup, params, after, reading)
    names = [n for n in params if n.removeprefix("distil_") in setup.base_params]
    reads_h = "h" in (*setup.base.reads, *setup.strategy.reads)
    outputs = {
        "z": rows.reshape(-1, views, setup.dim),
        "o": o,
        "p": p,
        "replayed": replayed_z,
        "local": local_z,
        "h": h.reshape(-1, views, h.shape[-1]) if reads_h else None,
        "params": {name: params[name] for name in names},
        "patches": patches,
    }
    return outputs, after


def _project_views(setup, images, reading, params, stats, *, train, patches=False):
    """Project the views of a step by a network that does not learn.

    Args:
      setup: constants of the method.
      images: f32[VB,H,W,C].
      reading: says which patches of the images iBOT hides.
      params, stats: trees of encoder and projector, and maybe others.
      train: argument of `chain.Chain`.
      patches: project masked patches, too; this network sees them.

    Returns:
      features of the encoder f32[B,V,H], projections f32[B,V,D], projections of the
      patches or None, and the statistics after the pass.
    """
    views = reading.views.shape[1]
    if patches and reading.places is not None:
        reading = reading._replace(hides=0 * reading.hides)
    else:
        reading = reading._replace(places=None)
    h, z, after, patches = _pass_copied(
        setup, params, stats, images, reading, train=train
    )
    h, z = (x.reshape(-1, views, x.shape[-1]) for x in (h, z))
    return h, z, patches, after


def _pass_copied(setup, params, stats, images, reading, *, train, key=None):
    """Pass the views through encoder and projector.

    Args:
      setup: constants of the method.
      params, stats: trees of encoder and projector, and maybe others.
      images: f32[N,H,W,C].
      reading: says which patches to project, and which of them are hidden.
      train, key: arguments of `chain.Chain`.

    Returns:
      Features of the encoder f32[N,H], projections f32[N,D], statistics after the pass,
      projections of the patches f32[N,M,D] or None.
    """
    encoder, projector = (
        chain.Chain({name: net}) for name, net in setup.copied.nets.items()
    )
    views, places = reading.views.shape[1], reading.places
    hidden = patches = None
    if places is not None:
        count = _count_patches(setup, *images.shape[1:3])
        hidden = jax.nn.one_hot(places, count, dtype=bool, axis=-1).any(axis=1)
        hidden &= (reading.hides > 0)[:, None]
    h, after = encoder(
        params, stats, images, train=train, groups=views, key=key, hidden=hidden
    )
    if places is not None:
        h, tokens = h
        chosen = jnp.take_along_axis(tokens, places[..., None], axis=1)
        rows, _ = projector(
            params, stats, chosen.reshape(-1, chosen.shape[-1]), train=train
        )
        patches = rows.reshape(*places.shape, setup.dim)
    z, projector_stats = projector(params, stats, h, train=train, groups=views)
    return h, z, after | projector_stats, patches


def _pass_replayed(setup, params, stats, reading):
    """Project replayed images, f32[R,D]; return the moved statistics, too."""
    key = None if reading.key is None else jax.random.fold_in(reading.key, _REPLAYED)
    rows, new_stats = setup.copied(params, stats, reading.replayed, train=True, key=key)
    # In the first step of a run nothing is stored, and the images are blank.
    any_stored = jnp.any(reading.features["stored_mask"])
    return rows, stats | {
        name: jax.tree.map(lambda a, b: jnp.where(any_stored, a, b), new, stats[name])
        for name, new in new_stats.items()
    }


def _update_states(setup, extra, features, reading, has_teacher):
    """Update the states of base and strategy after a step.

    Args:
      has_teacher: bool[], there is a teacher.
    """
    base, strategy = setup.base, setup.strategy
    groups = [(features, True, True)]
    if setup.online:
        groups = stream.group_rows(setup, features, reading)
    of_base, of_strategy = extra.base, extra.strategy
    for rows, active, aligned in groups:
        if base.update is not None:
            of_base = base.update(of_base, rows, active=active, aligned=aligned)
        if strategy.update is not None:
            active = active & has_teacher
            of_strategy = strategy.update(
                of_strategy, rows, active=active, aligned=aligned
            )
    return extra._replace(base=of_base, strategy=of_strategy)


def _move_teacher(state, keep) -> records.Extra:
    """Move the teacher and its statistics to the networks; the share `keep` stays.

    Returns:
      `extra` of the state.
    """
    extra, updates = state.extra, {}
    for name, tree in (("teacher", state.params), ("teacher_stats", state.stats)):
        old = getattr(extra, name)
        updates[name] = optim.ema(old, {net: tree[net] for net in old}, keep)
    return extra._replace(**updates)


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
            networks.copy_names(setup, tree) for tree in (state.params, state.stats)
        )
        extra = extra._replace(
            teacher=jax.tree.map(change, params, extra.teacher),
            teacher_stats=jax.tree.map(change, stats, extra.teacher_stats),
        )
    return state.replace(opt_state=opt_state, extra=extra)


def hold_encoder(setup, state, grads):
    """Zero the encoder's gradient while only the heads train."""
    waits = state.step < setup.head_steps
    zeroed = jax.tree.map(lambda g: jnp.where(waits, 0.0, g), grads["encoder"])
    return {**grads, "encoder": zeroed}


def keep_encoder(setup, before, after):
    """Undo changes to the encoder while only the heads train."""
    waits = before.step < setup.head_steps

    def keep(old, new):
        # Dropout's key, which lies among the statistics, moves on.
        is_number = jnp.issubdtype(new.dtype, jnp.floating)
        return jnp.where(waits, old, new) if is_number else new

    trees = {
        name: {**tree, "encoder": jax.tree.map(keep, old["encoder"], tree["encoder"])}
        for name, old, tree in (
            ("params", before.params, after.params),
            ("stats", before.stats, after.stats),
        )
    }
    return after.replace(**trees)
