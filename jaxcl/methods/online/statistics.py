"""Running statistics of batch norm that an evaluation computes from the memory.

Incoming rows are of new classes, replayed ones mostly of old classes, and each pass is
normalised by its own batch. The running statistics are a mixture of the two that fits
no test image, and predictions of the newest or of the oldest classes suffer. The rows
of the memory are of all classes.
"""

from collections.abc import Callable

import jax

from jaxcl import core
from jaxcl.errors import Refused

# The old running statistics keep a weight of 0.9^100.
_PASSES = 100
_DRAWS = 0x57A7  # keeps these draws apart from those of the next step


def use_memory_statistics(
    method: core.Method, replay: Callable, draw: Callable
) -> core.Method:
    """Make a method evaluate with the statistics of its memory; training is unchanged.

    Args:
      method: method; its own `eval_state` sees the new statistics.
      replay: `online.Network.pass_replayed`.
      draw: (memory, key) -> online.Rows without augmentation.

    Raises:
      Refused: the method has no memory.
    """
    if method.memory is None:
        raise Refused(
            "config.replay.statistics='memory': config.method.name stores no rows; "
            "must be 'running'"
        )

    @jax.jit
    def stats_of_memory(state):
        def update(stats, key):
            rows = draw(state.extra.memory, key)
            return replay(state.params, stats, rows)[1], None

        key = jax.random.fold_in(core.step_key(state), _DRAWS)
        return jax.lax.scan(update, state.stats, jax.random.split(key, _PASSES))[0]

    def eval_state(state):
        return method.eval_state(state.replace(stats=stats_of_memory(state)))

    return method._replace(eval_state=eval_state)
