"""The networks of two-view methods: their start and their passes.

Online self-supervised learning (`methods/online_ssl`) has the same networks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, numerics, optim
from jaxcl.methods.two_view import records
from jaxcl.nets import chain, mlp, traits


class Networks(NamedTuple):
    """The networks of a base; slow network and teacher copy those in `copied`."""

    base: records.Base
    copied: chain.Chain  # encoder and projector
    predictor: chain.Chain  # the base's own; of no nets where it has none
    distiller: chain.Chain  # the predictor g; of no nets where there is none
    student: (
        chain.Chain
    )  # its head beside the projector; of no nets where there is none
    dim: int  # of the projections
    own: tuple[str, ...]  # names of the base's own parameters
    features: bool  # a loss reads features of the encoder
    drops: bool  # the encoder drops branches, by a key that it is given


class InitialNetworks(NamedTuple):
    """Networks before the first step, and keys for the other parts of the state."""

    params: dict
    stats: dict
    copied: tuple[dict, dict]  # params and stats that slow network and teacher copy
    key: jax.Array  # of the run
    base_key: jax.Array  # of the base's state
    strategy_key: jax.Array  # of the strategy's state


class Inputs(NamedTuple):
    """The images of a step, and all that their pass needs besides the parameters."""

    stats: core.PyTree  # running statistics of the networks that learn
    images: jax.Array  # f32[VB,H,W,C], the V views of an example one after another
    views: int = 2  # V
    distilled: int | None = None  # images that g reads, the first ones; None: all
    key: jax.Array | None = None  # for an encoder that drops branches; None: drops none
    local: jax.Array | None = None  # f32[B,L,h,w,C], local crops
    replayed: jax.Array | None = None  # f32[R,H,W,C], images that pass by themselves
    stored_mask: jax.Array | None = None  # bool[R], the replayed rows that exist
    # Patches that the network that learns does not see; None: it sees all
    masks: records.Masks | None = None


def choose_sizes(base: records.Base, options: dict) -> dict:
    """Give options that are None the base's own values.

    Args:
      base: has the defaults of the projector's shape and of the strategies' weights.
      options: of the method, by name.
    """
    own = base.projector._asdict() | {"weight": base.weight}
    if base.pnr is None:  # one with negatives subtracts no distance
        own["negative_weight"] = base.negative_weight
    return {n: own[n] for n, value in options.items() if value is None and n in own}


def build_networks(
    parts: core.Parts,
    base: records.Base,
    shape: mlp.ProjectorShape,
    *,
    distiller_hidden_dim: int | None,
    features: bool = False,
    student: mlp.ProjectorShape | None = None,
) -> Networks:
    """Build the networks of a base.

    Args:
      parts: what the config builds.
      base: says whether there is a predictor, and has parameters of its own.
      shape: of the projector.
      distiller_hidden_dim: hidden units of g; None: there is none.
      features: whether the loss of the strategy reads features of the encoder.
      student: shape of the student's head; None: there is none.
    """
    dtype, dim = parts.encoder.dtype, shape.output_dim
    projector = mlp.projector(shape, dtype=dtype)

    def predictor(name, width):
        if width is None:
            return chain.Chain({})
        net = mlp.predictor(hidden_dim=width, output_dim=dim, dtype=dtype)
        return chain.Chain({name: net})

    return Networks(
        base=base,
        copied=chain.Chain({"encoder": parts.encoder, "projector": projector}),
        predictor=predictor("predictor", base.predictor_hidden_dim),
        distiller=predictor("distiller", distiller_hidden_dim),
        student=chain.Chain(
            {} if student is None else {"student": mlp.projector(student, dtype=dtype)}
        ),
        dim=dim,
        own=()
        if base.init_params is None
        else tuple(jax.eval_shape(lambda: base.init_params(numerics.make_key(0), dim))),
        features=features,
        drops=traits.read_traits(parts.encoder).drop_path > 0,
    )


def init_networks(
    networks: Networks, parts: core.Parts, key: jax.Array, batch
) -> InitialNetworks:
    """Initialise all networks that learn.

    Args:
      networks: of `build_networks`.
      parts: what the config builds.
      key: of the run.
      batch: an example; only the shapes of its images are read.
    """
    keys = jax.random.split(key, 6)
    k_state, k_augment, k_networks, k_distiller, k_base, k_strategy = keys
    views = parts.augment(k_augment, batch["image"][:1])
    if not (networks.base.indexed and views.shape[1] == 1):
        core.check_views(views, 2, "config.method")
    nets = chain.Chain(networks.copied.nets | networks.predictor.nets)
    params, stats = nets.init(k_networks, views[0])
    if networks.base.init_params is not None:
        params |= networks.base.init_params(k_networks, networks.dim)
    copied = copy_names(networks, params), copy_names(networks, stats)
    if networks.distiller.nets:
        own_params, own_stats = init_distiller(networks, k_distiller)
        params, stats = params | own_params, stats | own_stats
    if networks.student.nets:
        encoder = chain.Chain({"encoder": networks.copied.nets["encoder"]})
        run = functools.partial(encoder, params, stats, train=False)
        rows = jax.eval_shape(run, views[0])[0]
        head = networks.student.init(k_distiller, jnp.zeros(rows.shape))
        params, stats = params | head[0], stats | head[1]
    return InitialNetworks(params, stats, copied, k_state, k_base, k_strategy)


def init_distiller(networks: Networks, key: jax.Array) -> tuple[dict, dict]:
    """Initialise g, and the base's own parameters for distillation."""
    params, stats = networks.distiller.init(key, jnp.zeros((2, networks.dim)))
    if networks.base.init_params is not None:
        own = networks.base.init_params(key, networks.dim)
        params |= {f"distil_{name}": value for name, value in own.items()}
    return params, stats


def copy_names(networks: Networks, tree: dict) -> dict:
    """Pick the entries, one per network, that slow network and teacher copy."""
    names = (*networks.copied.nets, *networks.own)
    return {name: tree[name] for name in names if name in tree}


def move_teacher(state, keep) -> core.PyTree:
    """Move the teacher and its statistics to the networks; the share `keep` stays.

    Returns:
      `extra` of the state.
    """
    extra, moved = state.extra, {}
    for name, tree in (("teacher", state.params), ("teacher_stats", state.stats)):
        old = getattr(extra, name)
        moved[name] = optim.ema(old, {net: tree[net] for net in old}, keep)
    return extra._replace(**moved)


def take_snapshot(teacher: records.Teacher | None, state, step):
    """Copy the networks to a teacher of snapshots, if step i32[] is its turn."""
    if teacher is None or teacher.follows != "snapshot":
        return state
    keep = jnp.where(step % teacher.snapshot_every == 0, 0.0, 1.0)
    return state.replace(extra=move_teacher(state, keep))


def average_teacher(teacher: records.Teacher | None, state):
    """Move a teacher that is an average of the networks."""
    if teacher is None or teacher.follows != "ema":
        return state
    return state.replace(extra=move_teacher(state, teacher.ema))


def loss_and_grads(
    networks: Networks,
    inputs: Inputs,
    params: core.PyTree,
    targets: dict,
    losses: Sequence[Callable],
    which: jax.Array | None = None,
):
    """Compute a loss of the networks' outputs, and its gradients by the parameters.

    Two losses are branches of a `cond`. On CPU the gradient of a convolution is slow
    inside a cond, and residuals of both branches, as large as the logits, would leave
    it. So each branch takes its gradient by the outputs, and one `vjp` of the networks
    stands outside.

    Args:
      networks: of `build_networks`.
      inputs: rows of the step.
      params: parameters of all networks that learn.
      targets: the other fields of `records.Features`.
      losses: functions of `Features`, (loss, metrics); one, or two to choose from.
      which: bool[], takes the first of two losses, else the second.

    Returns:
      (loss, metrics, `Features`, statistics after the pass), gradients.
    """
    run = functools.partial(forward, networks, inputs)
    outputs, params_vjp, stats = jax.vjp(run, params, has_aux=True)

    gradient = jax.value_and_grad(
        lambda loss, outputs: loss(records.Features(**outputs, **targets)),
        argnums=1,
        has_aux=True,
    )
    branches = [functools.partial(gradient, loss) for loss in losses]
    if which is None:
        (loss, metrics), output_grads = branches[0](outputs)
    else:
        (loss, metrics), output_grads = jax.lax.cond(which, *branches, outputs)
    (grads,) = params_vjp(output_grads)
    return (loss, metrics, records.Features(**outputs, **targets), stats), grads


def forward(networks: Networks, inputs: Inputs, params: core.PyTree):
    """Pass images through the networks that learn.

    Args:
      networks: of `build_networks`.
      inputs: rows of the step.
      params: parameters of all networks that learn.

    Returns:
      name -> output, fields of `records.Features`; the statistics after the pass.
    """
    images, views, stats = inputs.images, inputs.views, inputs.stats
    features, rows, after, patches = pass_copied(
        networks,
        params,
        stats,
        images,
        inputs.masks,
        train=True,
        groups=views,
        key=inputs.key,
    )
    o = p = replayed_z = local_z = None
    if networks.predictor.nets:
        o, new = networks.predictor(params, stats, rows, train=True, groups=views)
        o, after = o.reshape(-1, views, networks.dim), after | new
    if networks.distiller.nets:
        # Rows that are not aligned do not enter the statistics of g.
        read = rows[: inputs.distilled]
        queries = networks.base.distiller_input(read)
        p, new = networks.distiller(params, stats, queries, train=True, groups=views)
        p, after = p.reshape(-1, views, networks.dim), after | new
    if networks.student.nets:
        p, new = networks.student(params, stats, features, train=True, groups=views)
        p, after = p.reshape(-1, views, p.shape[-1]), after | new
    if inputs.local is not None:
        local_z, new = _pass_local(networks, params, after, inputs.local, inputs.key)
        after = after | new
    if inputs.replayed is not None:
        replayed_z, new = _pass_replayed(networks, params, after, inputs)
        after = after | new
    own = {name: params[name] for name in networks.own}
    distil = {name: params[f"distil_{name}"] for name in own if networks.distiller.nets}
    h = None
    if networks.features:
        h = features.reshape(-1, views, features.shape[-1])
    z = rows.reshape(-1, views, networks.dim)
    outputs = {"z": z, "o": o, "p": p, "replayed": replayed_z, "local": local_z, "h": h}
    outputs |= {"params": own, "distil_params": distil, "patches": patches}
    return outputs, after


def project_views(networks, params, stats, inputs: Inputs, *, train, patches=False):
    """Project the views of a step by a network that does not learn.

    Args:
      networks: of `build_networks`.
      params, stats: of encoder and projector, and maybe others.
      inputs: rows of the step.
      train: as in `chain.Chain`.
      patches: project masked patches, too; this network sees them.

    Returns:
      features of the encoder f32[B,V,H], projections f32[B,V,D], projections of the
      patches or None, and the statistics after the pass.
    """
    seen = None
    if patches and inputs.masks is not None:
        seen = inputs.masks._replace(hides=0 * inputs.masks.hides)
    h, z, after, patches = pass_copied(
        networks, params, stats, inputs.images, seen, train=train, groups=inputs.views
    )
    h, z = (x.reshape(-1, inputs.views, x.shape[-1]) for x in (h, z))
    return h, z, patches, after


def pass_copied(
    networks, params, stats, images, masks=None, *, train, groups, key=None
):
    """Pass images through encoder and projector.

    Args:
      networks: of `build_networks`.
      params, stats: of encoder and projector, and maybe others.
      images: f32[N,H,W,C].
      masks: patches to project, and which of them are hidden.
      train, groups, key: as in `chain.Chain`.

    Returns:
      Features of the encoder f32[N,H], projections f32[N,D], statistics after the pass,
      projections of the patches f32[N,M,D] or None.
    """
    encoder, projector = (
        chain.Chain({name: net}) for name, net in networks.copied.nets.items()
    )
    hidden = None if masks is None else _mark_hidden(masks)
    h, after = encoder(
        params, stats, images, train=train, groups=groups, key=key, hidden=hidden
    )
    patches = None
    if masks is not None:
        h, tokens = h
        chosen = jnp.take_along_axis(tokens, masks.places[..., None], axis=1)
        rows, _ = projector(
            params, stats, chosen.reshape(-1, chosen.shape[-1]), train=train
        )
        patches = rows.reshape(*masks.places.shape, networks.dim)
    z, more = projector(params, stats, h, train=train, groups=groups)
    return h, z, after | more, patches


def _mark_hidden(masks):
    """Mark the patches that are hidden, bool[N,P]."""
    places = jax.nn.one_hot(masks.places, masks.patches, dtype=bool, axis=-1)
    return places.any(axis=1) & (masks.hides > 0)[:, None]


def _pass_local(networks, params, stats, local, key):
    """Project local crops, f32[B,L,D]; return the moved statistics, too."""
    own = None if key is None else jax.random.fold_in(key, 2)
    crops, count = local.reshape(-1, *local.shape[2:]), local.shape[1]
    local_z, moved = networks.copied(
        params, stats, crops, train=True, groups=count, key=own
    )
    return local_z.reshape(-1, count, networks.dim), moved


def _pass_replayed(networks, params, stats, inputs):
    """Project replayed images, f32[R,D]; return the moved statistics, too."""
    own = None if inputs.key is None else jax.random.fold_in(inputs.key, 1)
    rows, moved = networks.copied(params, stats, inputs.replayed, train=True, key=own)
    # In the first step of a run nothing is stored, and the images are blank.
    some = jnp.any(inputs.stored_mask)
    return rows, {
        name: jax.tree.map(lambda a, b: jnp.where(some, a, b), new, stats[name])
        for name, new in moved.items()
    }
