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

    def change_gradients(fisher, state, grads, lr):
        penalty = importance.gradient(fisher, state.params, weight=weight, lr=lr)
        last = state.step + 1 == state.task_start + state.task_steps
        late = last | (core.progress(state) >= 1 - fisher_share)
        fisher = importance.observe(fisher, grads, late)
        return jax.tree.map(jnp.add, grads, penalty), fisher

    return records.Strategy(
        init_state=lambda setup, key, params, image: importance.create(params),
        change_gradients=change_gradients,
        end_task=importance.consolidate,
    )
