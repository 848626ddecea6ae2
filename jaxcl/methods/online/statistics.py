"""Running statistics of batch norm that an evaluation takes anew from the memory.

Incoming rows are of new classes, replayed ones mostly of old, and each pass is
normalised by its own batch. The running statistics mix the two in a share that no
test image comes from, and the newest or the oldest classes are read badly for it. Rows
of the memory are of all classes alike.
"""

from collections.abc import Callable

import jax

from jaxcl import core

SOURCES = ("running", "memory")
# Of what the running statistics were, 0.9^100 is left.
_PASSES = 100
_DRAWS = 0x57A7  # keeps these draws apart from those of the next step


def add(method: core.Method, replay: Callable, draw: Callable) -> core.Method:
    """The method, judged with the statistics of its memory; training is as it was.

    Args:
      method: its own `eval_state` sees the new statistics.
      replay: `online.Network.replay`.
      draw: (memory, key) -> online.Rows, not augmented.

    Raises:
      ValueError: the method has no memory.
    """
    if method.memory is None:
        raise ValueError(
            "config.replay.statistics='memory': config.method.name stores no rows; "
            "must be 'running'"
        )

    @jax.jit
    def anew(state):
        def one(stats, key):
            rows = draw(state.extra.memory, key)
            return replay(state.params, stats, rows)[1], None

        key = jax.random.fold_in(core.step_key(state), _DRAWS)
        return jax.lax.scan(one, state.stats, jax.random.split(key, _PASSES))[0]

    def eval_state(state):
        return method.eval_state(state.replace(stats=anew(state)))

    return method._replace(eval_state=eval_state)
