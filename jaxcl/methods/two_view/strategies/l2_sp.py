"""L2-SP: the encoder's weights are pulled to their values at the start of the task.

Departures:
- The paper pulls to the pretrained weights. With several tasks each one pulls to the
  weights after the last, and the first task of a random start has no pull.
- The heads have the optimiser's weight decay, in place of the paper's beta.
- If a step would jump over the penalty's minimum, it ends at the minimum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.methods.two_view import records


class Anchor(NamedTuple):
    """The encoder that the penalty pulls to."""

    params: core.PyTree  # f32, of the encoder
    trained: jax.Array  # bool[], an earlier training made them


def make(*, alpha: schema.Weight = 0.1) -> records.Strategy:
    """Add alpha / 2 |w - start|^2: L2-SP (Li et al., ICML 2018, Eq. 2).

    Args:
      alpha: weight of the penalty on the encoder's weights; set the weight decay to 0.
    """

    def change_gradients(anchor, state, grads, lr):
        share = alpha / jnp.maximum(alpha * lr, 1.0)
        share = jnp.where(anchor.trained, share, 0.0)
        encoder_grads = jax.tree.map(
            lambda g, p, start: g + share * (p - start),
            grads["encoder"],
            state.params["encoder"],
            anchor.params,
        )
        return {**grads, "encoder": encoder_grads}, anchor

    return records.Strategy(
        init_state=lambda setup, key, params, image: Anchor(
            core.copy(params["encoder"]), jnp.array(setup.parts.starts_pretrained)
        ),
        change_gradients=change_gradients,
        end_task=lambda anchor, params: Anchor(
            core.copy(params["encoder"]), jnp.array(True)
        ),
    )
