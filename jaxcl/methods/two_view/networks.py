"""The networks and the state of two-view methods, before the first step and by task."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, numerics
from jaxcl.methods.two_view import records, stream
from jaxcl.nets import chain, mlp, traits

_STREAM = 0xD157  # keeps fresh networks apart from the step's own keys


def choose_sizes(base: records.Base, options: dict) -> dict:
    """Replace options that are None by the base's own values.

    Args:
      base: has the defaults of the projector's shape and of the strategies' weights.
      options: options of the method, by name.
    """
    sizes = base.projector._asdict() | {"weight": base.weight}
    if base.pnr is None:  # one with negatives subtracts no distance
        sizes["negative_weight"] = base.negative_weight
    return {n: sizes[n] for n, value in options.items() if value is None and n in sizes}


def make_setup(
    parts: core.Parts,
    base: records.Base,
    strategy: records.Strategy,
    shape: mlp.ProjectorShape,
    *,
    student: mlp.ProjectorShape | None = None,
    **fields,
) -> records.Setup:
    """Build the networks of a base and a strategy.

    Args:
      parts: components that the config builds.
      base: says whether there is a predictor, and has parameters of its own.
      strategy: says whether there is a predictor g.
      shape: sizes of the projector.
      student: sizes of the student's head beside it; None: there is none.
      fields: further fields of `Setup`.
    """
    dtype, dim = parts.encoder.dtype, shape.output_dim
    projector = mlp.projector(shape, dtype=dtype)

    def predictor(name, width):
        if width is None:
            return chain.Chain({})
        net = mlp.predictor(hidden_dim=width, output_dim=dim, dtype=dtype)
        return chain.Chain({name: net})

    head = {} if student is None else {"student": mlp.projector(student, dtype=dtype)}
    names = ()
    if base.init_params is not None:
        key = numerics.make_key(0)
        names = tuple(jax.eval_shape(lambda: base.init_params(key, dim)))
    return records.Setup(
        parts=parts,
        base=base,
        strategy=strategy,
        copied=chain.Chain({"encoder": parts.encoder, "projector": projector}),
        predictor=predictor("predictor", base.predictor_hidden_dim),
        distiller=predictor("distiller", strategy.distiller_hidden_dim),
        student=chain.Chain(head),
        dim=dim,
        base_params=names,
        drops=traits.read_traits(parts.encoder).drop_path > 0,
        **fields,
    )


def init_state(setup, key, batch):
    """Make the state before the first step."""
    base, strategy, parts, image = (
        setup.base,
        setup.strategy,
        setup.parts,
        batch["image"],
    )
    k_state, k_augment, k_networks, k_distiller, k_base, k_strategy = jax.random.split(
        key, 6
    )
    views = parts.augment(k_augment, image[:1])
    if not ("index" in base.reads and views.shape[1] == 1):
        core.check_views(views, 2, "config.method")
    nets = chain.Chain(setup.copied.nets | setup.predictor.nets)
    params, stats = nets.init(k_networks, views[0])
    if base.init_params is not None:
        params |= base.init_params(k_networks, setup.dim)
    copied = copy_names(setup, params), copy_names(setup, stats)
    if setup.distiller.nets:
        more_params, more_stats = _init_distiller(setup, k_distiller)
        params, stats = params | more_params, stats | more_stats
    if setup.student.nets:
        encoder = chain.Chain({"encoder": parts.encoder})
        run = functools.partial(encoder, params, stats, train=False)
        rows = jax.eval_shape(run, views[0])[0]
        more_params, more_stats = setup.student.init(k_distiller, jnp.zeros(rows.shape))
        params, stats = params | more_params, stats | more_stats
    of_base = of_strategy = None
    if base.init_state is not None:
        of_base = base.init_state(k_base, setup.dim)
    if strategy.init_state is not None:
        of_strategy = strategy.init_state(setup, k_strategy, params, image[0])
    extra = records.Extra(
        *(core.copy(copied) if base.momentum else ({}, {})),
        *(core.copy(copied) if strategy.teacher else ({}, {})),
        base=of_base,
        strategy=of_strategy,
    )
    if setup.size:
        memory, counts = stream.create(setup, batch)
        extra = extra._replace(memory=memory, kept=counts)
    return core.new_state(k_state, params, stats, parts.tx, extra)


def _init_distiller(setup, key):
    """Initialise g, and the base's own parameters beside it: params, stats."""
    params, stats = setup.distiller.init(key, jnp.zeros((2, setup.dim)))
    if setup.base.init_params is not None:
        new = setup.base.init_params(key, setup.dim)
        params |= {f"distil_{name}": value for name, value in new.items()}
    return params, stats


def copy_names(setup: records.Setup, tree: dict) -> dict:
    """Pick the networks that the slow network and the teacher copy."""
    names = (*setup.copied.nets, *setup.base_params)
    return {name: tree[name] for name in names if name in tree}


def begin_task(setup, state, task):
    """Start the optimiser anew; make the network so far the teacher."""
    if "index" in setup.base.reads and task.index > 0:
        state = _renew_rows(setup, state, task.train.rows)
    # One program: else each shape of the parameters' would be compiled apart.
    state = state.replace(opt_state=jax.jit(setup.parts.tx.init)(state.params))
    teacher, untaught = setup.strategy.teacher, not setup.parts.starts_pretrained
    if teacher is None or teacher.follows != "task" or (task.index == 0 and untaught):
        return state
    if setup.distiller.nets and task.index == 1 and untaught:
        # g is first used in the second task, which starts it anew.
        key = jax.random.fold_in(core.step_key(state), _STREAM)
        params, stats = jax.jit(functools.partial(_init_distiller, setup))(key)
        state = state.replace(params=state.params | params, stats=state.stats | stats)
    extra = state.extra._replace(
        teacher=core.copy(copy_names(setup, state.params)),
        teacher_stats=core.copy(copy_names(setup, state.stats)),
    )
    return state.replace(extra=extra)


def _renew_rows(setup, state, rows):
    """Draw new rows for a task's images, whose numbers another set may have had."""
    is_new = np.zeros(setup.dim, bool)
    is_new[rows] = True
    last = f"linear{len(state.params['projector'])}"

    @jax.jit
    def draw(key, head):
        inputs = jnp.zeros((1, head["linear1"]["kernel"].shape[0]))
        fresh = setup.copied.nets["projector"].init(key, inputs)["params"][last]
        rows = jax.tree.map(lambda a, b: jnp.where(is_new, a, b), fresh, head[last])
        return {**head, last: rows}

    key = jax.random.fold_in(core.step_key(state), _STREAM)
    head = draw(key, state.params["projector"])
    return state.replace(params={**state.params, "projector": head})


def end_task(setup, state, task):
    """Let the strategy look back on a task."""
    if setup.strategy.end_task is None:
        return state
    ended = jax.jit(setup.strategy.end_task)(state.extra.strategy, state.params)
    return state.replace(extra=state.extra._replace(strategy=ended))
