"""The networks of two-view methods: which there are, and their passes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.methods.two_view import bases, strategies
from jaxcl.nets import chain


class Setup(NamedTuple):
    """What `make` fixes: everything but arrays."""

    parts: core.Parts
    base: bases.Base
    strategy: strategies.Strategy
    options: bases.Options
    copied: dict  # nets that are copied to a slow network and a teacher
    predictor: dict  # BYOL's own; {} without one
    distiller: dict  # g
    dim: int  # of the projections
    queue_size: int
    momentum: dict  # options of optim.momentum_schedule
    frozen_train: bool
    memory_size: int
    mix: float
    fisher_share: float


class Outputs(NamedTuple):
    """What the losses read of the network that learns; fields as in Features."""

    z: jax.Array
    o: jax.Array | None
    p: jax.Array | None
    replayed: jax.Array | None


def new_distiller(setup, key):
    """Parameters and statistics of a fresh g."""
    return chain.init(setup.distiller, key, jnp.zeros((2, setup.dim)))


def copied(setup, tree):
    """What a slow network or a teacher copies of a tree with an entry per net."""
    return {name: tree[name] for name in setup.copied}


def two(rows):
    """f32[2B,D], rows 2i and 2i + 1 of one example -> f32[B,2,D]."""
    return rows.reshape(-1, 2, rows.shape[-1])


def forward(setup, params, stats, images, replayed, stored):
    """What the losses read of the network that learns, and its statistics.

    Args:
      images: f32[2B,H,W,C], rows 2i and 2i + 1 of one example.
      replayed: f32[R,H,W,C] or None.
      stored: bool[R], which of these exist.
    """
    apply = functools.partial(chain.apply, train=True)
    rows, after = apply(setup.copied, params, stats, images, groups=2)
    o = p = r = None
    if setup.predictor:
        o, more = apply(setup.predictor, params, stats, rows, groups=2)
        o, after = two(o), after | more
    if setup.strategy.distiller:
        given = setup.base.distiller_input(rows)
        p, more = apply(setup.distiller, params, stats, given, groups=2)
        p, after = two(p), after | more
    if replayed is not None:
        r, more = apply(setup.copied, params, after, replayed)
        # In the first step of a run nothing is stored, and the images are blank.
        met = jnp.any(stored)
        after = after | {
            name: jax.tree.map(lambda a, b: jnp.where(met, a, b), new, after[name])
            for name, new in more.items()
        }
    return Outputs(two(rows), o, p, r), after


def frozen_features(setup, state, images):
    """The teacher's f32[B,2,D]; zeros in the first task, at no cost."""

    def features():
        extra = state.extra
        rows, _ = chain.apply(
            setup.copied,
            extra.teacher,
            extra.teacher_stats,
            images,
            train=setup.frozen_train,
            groups=2,
        )
        return rows

    absent = jnp.zeros((len(images), setup.dim))
    return two(jax.lax.cond(state.task == 0, lambda: absent, features))
