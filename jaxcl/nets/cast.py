"""Weights in the type in which steps multiply them, carried from step to step.

A network that computes in bfloat16 keeps float32 kernels and casts them in every pass.
On a GPU each cast is launched by itself. Cast after the step that moved them, they are
written by the launch that moves them, and the next step finds them ready.
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
    stats: dict  # the same -> running statistics, of folded networks


def kernels(
    state: core.TrainState,
    before: Cast | None = None,
    *,
    nets: chain.Chain,
    moved: tuple[str, ...] = (),
    still: tuple[str, ...] = (),
    fold: bool = False,
) -> Cast:
    """Cast the kernels of a state, for `core.Method.cast`.

    Args:
      state: `params` and the fields of `extra` below have entries of some of the nets.
      before: what was cast before the last step; what stays is taken over from it.
      nets: all networks that the passes of a step go through.
      moved: fields of `extra` with networks that a step moves.
      still: fields of `extra` with networks that stay through a task.
      fold: the networks that stay pass in evaluation mode alone, and so their batch
        norms are `Chain.folded`. The statistics of field "x" are in field "x_stats".
    """

    def of(networks):
        there = {name: net for name, net in nets.nets.items() if name in networks}
        return chain.Chain(there)

    def cast(networks):
        return of(networks).cast(networks)

    extra = {name: cast(getattr(state.extra, name)) for name in moved}
    if before is not None:
        taken = {name: before.extra[name] for name in still}
        return Cast(cast(state.params), extra | taken, before.stats)
    stats = {}
    for name in still:
        networks = getattr(state.extra, name)
        if fold:
            own = getattr(state.extra, f"{name}_stats")
            extra[name], stats[name] = of(networks).folded(networks, own)
        else:
            extra[name] = cast(networks)
    return Cast(cast(state.params), extra, stats)


def read(state: core.TrainState, cast: Cast | None) -> core.TrainState:
    """Put cast kernels into a state, for passes to read; None leaves it as it is."""
    if cast is None:
        return state
    extra = {
        name: with_kernels(getattr(state.extra, name), own)
        for name, own in cast.extra.items()
    }
    extra |= {
        f"{name}_stats": dict(getattr(state.extra, f"{name}_stats")) | own
        for name, own in cast.stats.items()
    }
    return state.replace(
        params=with_kernels(state.params, cast.params),
        extra=state.extra._replace(**extra),
    )


def with_kernels(params: Mapping, kernels: Mapping) -> dict:
    """Parameters with cast kernels, of `Chain.cast` or `folded`, in their place."""

    def own(leaf, kernel):
        return leaf if kernel is None else kernel

    return dict(params) | {
        name: jax.tree.map(own, params[name], tree) for name, tree in kernels.items()
    }
