"""An optimizer and a schedule: the sign of a moving average, and a triangle.

Use them with --config.optimizer.name=my_package.my_optimizer.sign and
--config.schedule.name=my_package.my_optimizer.triangle.
"""

import jax
import jax.numpy as jnp
import optax

from jaxcl import schema


@schema.checked("config.optimizer")
def sign(*, momentum: schema.Momentum = 0.9) -> optax.GradientTransformation:
    """Make a direction: the sign of a moving average of the gradients.

    An optimizer of jaxcl is a direction d without a learning rate; the step is
    params - lr * d.

    Args:
      momentum: share of the old average.
    """

    def signs(updates, params=None):
        return jax.tree.map(jnp.sign, updates)

    return optax.chain(optax.ema(momentum, debias=False), optax.stateless(signs))


def triangle(base: float):
    """Make a schedule: up to `base` in half of a task, down to 0 in the rest."""
    return lambda progress: base * (1 - jnp.abs(2 * progress - 1))
