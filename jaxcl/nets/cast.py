"""Kernels in the type in which steps multiply them, made once for several passes.

Networks that compute in bfloat16 keep float32 kernels and cast them in every pass: two
kernels of a GPU for each layer and step. Here they are cast where they are moved, by
the program that moves them, and carried from step to step beside the state.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from jaxcl import core
from jaxcl.nets import chain


class Cast(NamedTuple):
    """Kernels of the networks of a state; None in place of all other leaves."""

    params: dict
    extra: dict  # name of a field -> its networks


def kernels(
    state: core.TrainState,
    before: Cast | None = None,
    *,
    nets: chain.Chain,
    moved: tuple[str, ...] = (),
    still: tuple[str, ...] = (),
) -> Cast:
    """What `core.Method.cast` gives.

    Args:
      state: has an entry for each net in `params` and in the fields named below.
      before: of the step before; its kernels of networks that stay are taken over.
      nets: all networks that the passes of a step go through.
      moved: fields of `extra` with networks that a step moves.
      still: fields of `extra` with networks that only the begin of a task moves.
    """

    def cast(networks):
        there = {name: net for name, net in nets.nets.items() if name in networks}
        return chain.Chain(there).cast(networks)

    extra = {name: cast(getattr(state.extra, name)) for name in moved}
    for name in still:
        fresh = before is None
        extra[name] = cast(getattr(state.extra, name)) if fresh else before.extra[name]
    return Cast(cast(state.params), extra)


def read(state: core.TrainState, cast: Cast | None) -> core.TrainState:
    """The state with these kernels, for passes; it is never kept. None: as it is."""
    if cast is None:
        return state
    extra = {
        name: _with(getattr(state.extra, name), own) for name, own in cast.extra.items()
    }
    return state.replace(
        params=_with(state.params, cast.params), extra=state.extra._replace(**extra)
    )


def _with(params: Mapping, kernels: Mapping) -> dict:
    def own(leaf, kernel):
        return leaf if kernel is None else kernel

    return dict(params) | {
        name: jax.tree.map(own, params[name], tree) for name, tree in kernels.items()
    }
