"""EWC: parameters that matter to earlier tasks are held in place.

Departures:
- The base loss takes the place of the negative log-likelihood.
- The Fisher information is estimated during the last part of a task's training
  (`fisher_share`), not in a separate pass after it. Squares are those of the gradient
  of a batch's mean loss, not of single examples.
- The Fisher information of a task is divided by its mean over all parameters, so
  `weight` is not the paper's lambda, see `importance.consolidate`.
- If a step would jump over the penalty's minimum, it ends at the minimum.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.memory import importance
from jaxcl.methods.two_view import records


def make(
    *,
    weight: schema.Weight = 0.01,
    fisher_share: Annotated[float, schema.Range(above=0, most=1)] = 0.1,
) -> records.Strategy:
    """Penalise moved parameters: EWC (Kirkpatrick et al., PNAS 2017).

    Args:
      weight: of the penalty.
      fisher_share: last share of a task in which squared gradients are summed.
    """

    def change_gradients(state, update):
        at = update.state
        penalty = importance.gradient(state, at.params, weight=weight, lr=update.lr)
        last = at.step + 1 == at.task_start + at.task_steps
        late = last | (core.progress(at) >= 1 - fisher_share)
        state = importance.observe(state, update.grads, late)
        return jax.tree.map(jnp.add, update.grads, penalty), state

    return records.Strategy(
        init_state=lambda example: importance.create(example.params),
        change_gradients=change_gradients,
        end_task=importance.consolidate,
    )
