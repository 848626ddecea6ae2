"""Pin JAX's global flags that results depend on; read those of the process.

Another library, or a variable such as JAX_ENABLE_X64, may have set them. With 64-bit
types or another generator a run would be another run under the same config.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

GENERATOR = "threefry2x32"  # of all random keys
_PINNED = {
    "jax_enable_x64": (jax.enable_x64, False),
    "jax_default_prng_impl": (jax.default_prng_impl, GENERATOR),
    "jax_threefry_partitionable": (jax.threefry_partitionable, True),
    "jax_numpy_dtype_promotion": (jax.numpy_dtype_promotion, "standard"),
}
PRECISION = "jax_default_matmul_precision"  # a user may choose it; a run keeps it
# Flags of the process outside of `pinned`; None: this thread is outside.
_OUTSIDE = contextvars.ContextVar("outside", default=None)


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Enter a context in which JAX's flags have the values that results depend on.

    They change for this thread alone, and are restored at the end.
    """
    before = _OUTSIDE.set(process_flags())
    try:
        with contextlib.ExitStack() as stack:
            for make_context, value in _PINNED.values():
                stack.enter_context(make_context(value))
            yield
    finally:
        _OUTSIDE.reset(before)


def process_flags() -> dict:
    """Return JAX's flags as this process has them, by its start or set since."""
    outside = _OUTSIDE.get()
    if outside is not None:
        return outside
    return {name: getattr(jax.config, name) for name in (*_PINNED, PRECISION)}


def run_flags() -> dict:
    """Return the flags of a run: pinned ones, and the precision of the process."""
    values = {name: value for name, (_, value) in _PINNED.items()}
    return values | {PRECISION: process_flags()[PRECISION]}


def make_key(seed: int) -> jax.Array:
    """Make a random key, of the same generator in any process."""
    return jax.random.key(seed, impl=GENERATOR)
