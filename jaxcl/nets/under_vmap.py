"""What `vmap` over several networks of one form makes of their layers.

JAX gives each network an axis of its own, which comes first. Libraries of convolutions,
and sums over rows, want the channels of all networks side by side, in the last axis.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp

Way = Literal["apart", "grouped"]
_WAY = contextvars.ContextVar[Way | None]("way", default=None)


@contextlib.contextmanager
def networks(how: Way) -> Iterator[None]:
    """Context that says what layers do when `vmap` gives them several networks.

    - "apart": a convolution for each network. A CPU computes groups slowly.
    - "grouped": a convolution with a group for each network. Its gradients have groups,
      too; JAX's own weight gradient has a window as large as the map. On a GPU batch
      norm sums over the channels of all networks at once.

    It is read while a program is traced. What is traced in it has no forward-mode
    derivative, and no second one.
    """
    before = _WAY.set(how)
    try:
        yield
    finally:
        _WAY.reset(before)


def way() -> Way | None:
    """What `networks` was given; None outside of it: layers are as JAX has them."""
    return _WAY.get()


def for_each(function: Callable, *, of: int) -> Callable:
    """A function that `vmap` calls for one network after another.

    Args:
      function: of arrays.
      of: the argument that tells networks apart. Where `vmap` does not map it, there is
        one network, and `vmap` does as with any other function.
    """

    def of_all(count, are_mapped, *arguments):
        pairs = [*zip(arguments, are_mapped, strict=True)]
        results = [
            single(*(x[i] if is_mapped else x for x, is_mapped in pairs))
            for i in range(count)
        ]
        return jax.tree.map(lambda *of_each: jnp.stack(of_each), *results)

    def of_one(axes):
        return for_each(jax.vmap(function, axes), of=of)

    single = _mapped(function, of_all, of_one, fits=lambda are_mapped: are_mapped[of])
    return single


def in_channels(function: Callable) -> Callable:
    """A function that `vmap` calls once, with the channels of all networks in a row.

    Args:
      function: of (number of networks, arrays ..), with the channels of one network
        after the other in the last axis of each array and of each result. Where `vmap`
        does not map all arrays, it does as with any other function.

    Returns: the function of the arrays of one network.
    """

    def of_all(count, are_mapped, *arguments):
        del are_mapped
        results = function(count, *map(_joined, arguments))
        return jax.tree.map(lambda x: _parted(x, count), results)

    def of_one(axes):
        def mapped(count, *arrays):
            return jax.vmap(functools.partial(function, count), axes)(*arrays)

        return in_channels(mapped)

    return _mapped(functools.partial(function, 1), of_all, of_one, fits=all)


def _mapped(function, of_all, of_one, *, fits):
    """`function`, for which `vmap` calls `of_all` where `fits(are_mapped)`.

    Else `vmap` is over something within a network, and calls of_one(axes), of which a
    further `vmap` may be over networks.
    """
    single = jax.custom_batching.custom_vmap(function)

    @single.def_vmap
    def mapped(count, are_mapped, *arguments):
        if fits(are_mapped):
            results = of_all(count, are_mapped, *arguments)
        else:
            axes = [0 if is_mapped else None for is_mapped in are_mapped]
            results = of_one(axes)(*arguments)
        return results, jax.tree.map(lambda _: True, results)

    return single


def _joined(x):
    """[S, .., C] -> [.., S * C]."""
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], -1)


def _parted(x, count):
    """[.., S * C] -> [S, .., C]."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], count, -1), -2, 0)
