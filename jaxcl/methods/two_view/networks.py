"""The networks of two-view methods: what there is for each base, and their passes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.methods.two_view import bases, strategies
from jaxcl.nets import chain, heads

_PROTOTYPES = 0xD120  # keeps them apart from the networks that share their key


class Targets(NamedTuple):
    """What DINO's slow network asks for, and when."""

    temperature: float
    start: float  # temperature at the beginning of the first task
    warmup: float  # share of the first task in which it goes from one to the other
    centre_momentum: float
    held: float  # share of the first task in which prototypes stay


class Setup(NamedTuple):
    """What `make` fixes: everything but arrays."""

    parts: core.Parts
    base: bases.Base
    strategy: strategies.Strategy
    options: bases.Options
    copied: chain.Chain  # networks that the slow network and the teacher copy
    predictor: chain.Chain  # the base's own; of no nets where it has none
    distiller: chain.Chain  # the predictor g of the distillation
    dim: int  # of the projections
    queue_size: int
    prototypes: int  # 0: the base has none
    slices: int  # 0: the base reads none
    momentum: dict  # options of optim.momentum_schedule
    targets: Targets  # of DINO
    frozen_train: bool
    memory_size: int
    mix: float
    fisher_share: float


class Outputs(NamedTuple):
    """The outputs of the network that learns; fields as in `bases.Features`."""

    z: jax.Array
    o: jax.Array | None
    p: jax.Array | None
    replayed: jax.Array | None
    local: jax.Array | None
    prototypes: jax.Array | None
    distil_prototypes: jax.Array | None


def settled(base: bases.Base, strategy: Any, options: dict) -> dict:
    """The options, with the base's or the strategy's in place of each None.

    Args:
      base: has them as its papers do.
      strategy: of `strategies`, or a regulariser; has a `weight`, or None.
      options: of `make`.
    """
    of_base = ("temperature", "distill_temperature", "negative_weight")
    of_base += ("predictor_hidden_dim", "momentum_start", "momentum_end")
    of_shape = ("hidden_dim", "output_dim", "hidden_layers")
    standard = {name: getattr(base, name) for name in of_base}
    standard |= {name: getattr(base.projector, name) for name in of_shape}
    standard["weight"] = base.weight if strategy.weight is None else strategy.weight
    return {
        name: standard.get(name) if value is None else value
        for name, value in options.items()
    }


def build(parts: core.Parts, base: bases.Base, options: dict) -> dict:
    """The fields of `Setup` that are networks, and the width of the projections.

    Args:
      parts: what the config builds.
      base: has the projector's shape, and says whether there is a predictor.
      options: widths and layers, which are `settled`.
    """
    dtype = parts.encoder.dtype
    projector = heads.projector(
        base.projector,
        hidden_dim=options["hidden_dim"],
        output_dim=options["output_dim"],
        hidden_layers=options["hidden_layers"],
        dtype=dtype,
    )
    dim = projector.features[-1]
    predictor, distiller = (
        heads.predictor(hidden_dim=options[width], output_dim=dim, dtype=dtype)
        for width in ("predictor_hidden_dim", "distill_hidden_dim")
    )
    return {
        "copied": chain.Chain({"encoder": parts.encoder, "projector": projector}),
        "predictor": chain.Chain({"predictor": predictor} if base.predictor else {}),
        "distiller": chain.Chain({"distiller": distiller}),
        "dim": dim,
    }


def new_distiller(setup: Setup, key: jax.Array):
    """Parameters and statistics of a fresh g, and prototypes to compare it with."""
    params, stats = setup.distiller.init(key, jnp.zeros((2, setup.dim)))
    return params | new_prototypes(setup, key, "distil_prototypes"), stats


def new_prototypes(setup: Setup, key: jax.Array, name: str = "prototypes") -> dict:
    """An entry of the parameters; none for a base without prototypes."""
    if not setup.prototypes:
        return {}
    key = jax.random.fold_in(key, _PROTOTYPES)
    return {name: heads.prototypes(key, setup.prototypes, setup.dim)}


def copied(setup: Setup, tree: dict) -> dict:
    """The entries of a tree, one per network, that slow network and teacher copy."""
    names = (*setup.copied.nets, "prototypes")
    return {name: tree[name] for name in names if name in tree}


def unguided(setup: Setup, state: core.TrainState) -> jax.Array:
    """Whether there is no teacher yet, bool[].

    In the first task there is none, but for an encoder that was trained before: it
    teaches as it came, with the projector that the run begins with.
    """
    return (state.task == 0) & (not setup.parts.begun)


def two(rows: jax.Array) -> jax.Array:
    """f32[2B,D], where rows 2i and 2i + 1 are of one example -> f32[B,2,D]."""
    return rows.reshape(-1, 2, rows.shape[-1])


def forward(
    setup: Setup,
    params: core.PyTree,
    stats: core.PyTree,
    images: jax.Array,
    replayed: jax.Array | None,
    stored: jax.Array | None,
    key: jax.Array | None,
    local: jax.Array | None = None,
    slow: tuple[core.PyTree, core.PyTree] | None = None,
):
    """The passes of the network that learns and of the slow one.

    Args:
      setup: what `make` fixes.
      params: of all networks that learn.
      stats: their running statistics.
      images: f32[2B,H,W,C], rows 2i and 2i + 1 are of one example.
      replayed: f32[R,H,W,C] or None.
      stored: bool[R], the replayed rows that exist.
      key: of an encoder that drops branches; None: it drops none.
      local: f32[B,L,h,w,C], local crops, or None.
      slow: parameters and running statistics of the slow network, or None.

    Returns:
      Outputs of the network that learns; its statistics after the pass, projections
      f32[B,2,D] of the slow network and its statistics (None, {} without one).
    """
    passing = [(params, stats, images)]
    if slow is not None:
        passing.append((*slow, images))
    (rows, after), *of_slow = setup.copied.beside(*passing, groups=2, key=key)
    keys, slow_after = (two(of_slow[0][0]), of_slow[0][1]) if of_slow else (None, {})
    o = p = r = None
    if setup.predictor.nets:
        o, new = setup.predictor(params, stats, rows, train=True, groups=2)
        o, after = two(o), after | new
    if setup.strategy.distiller:
        queries = setup.base.distiller_input(rows)
        p, new = setup.distiller(params, stats, queries, train=True, groups=2)
        p, after = two(p), after | new
    near = None
    if local is not None:
        own = None if key is None else jax.random.fold_in(key, 2)
        crops, count = local.reshape(-1, *local.shape[2:]), local.shape[1]
        near, moved = setup.copied(
            params, after, crops, train=True, groups=count, key=own
        )
        near, after = near.reshape(-1, count, setup.dim), after | moved
    if replayed is not None:
        own = None if key is None else jax.random.fold_in(key, 1)
        r, moved = setup.copied(params, after, replayed, train=True, key=own)
        # In the first step of a run nothing is stored, and the images are blank.
        some = jnp.any(stored)
        after = after | {
            name: jax.tree.map(lambda a, b: jnp.where(some, a, b), new, after[name])
            for name, new in moved.items()
        }
    prototypes = (params.get(n) for n in ("prototypes", "distil_prototypes"))
    return Outputs(two(rows), o, p, r, near, *prototypes), (after, keys, slow_after)


def frozen_features(
    setup: Setup, state: core.TrainState, images: jax.Array
) -> jax.Array:
    """The teacher's projections f32[B,2,D]; zeros while there is none, at no cost."""

    def features():
        extra = state.extra
        rows, _ = setup.copied(
            extra.teacher,
            extra.teacher_stats,
            images,
            train=setup.frozen_train,
            groups=2,
        )
        return rows

    absent = jnp.zeros((len(images), setup.dim))
    return two(jax.lax.cond(unguided(setup, state), lambda: absent, features))
