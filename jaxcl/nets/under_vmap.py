"""Give each network a layer of its own where `vmap` maps a step over several networks.

JAX makes one grouped convolution of the convolutions of all networks, which a CPU
computes slowly.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

_APART = contextvars.ContextVar("apart", default=False)


@contextlib.contextmanager
def networks_apart(apart: bool = True) -> Iterator[None]:
    """Enter a context in which `vmap` makes a convolution for each network.

    It is read while a program is traced. What is traced in it has no forward-mode
    derivative, and no second one.

    Args:
      apart: False leaves layers as JAX has them.
    """
    before = _APART.set(apart)
    try:
        yield
    finally:
        _APART.reset(before)


def are_apart() -> bool:
    """Tell whether a program is traced within `networks_apart`."""
    return _APART.get()


def for_each(function: Callable, *, of: int) -> Callable:
    """Make a function that `vmap` calls for one network after another.

    Args:
      function: of arrays.
      of: the argument that tells networks apart. Where `vmap` does not map it, there is
        one network, and `vmap` does as with any other function.
    """
    single = jax.custom_batching.custom_vmap(function)

    @single.def_vmap
    def mapped(count, are_mapped, *arguments):
        if are_mapped[of]:
            pairs = [*zip(arguments, are_mapped, strict=True)]
            of_each = [
                single(*(x[i] if is_mapped else x for x, is_mapped in pairs))
                for i in range(count)
            ]
            results = jax.tree.map(lambda *x: jnp.stack(x), *of_each)
        else:  # within a network; a further `vmap` may be over networks
            axes = [0 if is_mapped else None for is_mapped in are_mapped]
            results = for_each(jax.vmap(function, axes), of=of)(*arguments)
        return results, jax.tree.map(lambda _: True, results)

    return single
