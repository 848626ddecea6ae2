"""SwAV: the projection of one view predicts the other's assignment to prototypes.

Its forms under CaSSLe and PNR are DINO's, see docs/methods.md; the rate of probes is
that of the paper's linear evaluation.

Departures:
- No queue of earlier features enlarges the batch of Sinkhorn-Knopp.
- The released code gives prototypes unit length after each step; here they are compared
  by their direction.
- The time with frozen prototypes is a share of the first task, not an epoch.
"""

import functools

import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.losses import noncontrastive
from jaxcl.methods.two_view import forms, records
from jaxcl.nets import mlp


@schema.debug(prototypes=16)
def make(
    *,
    temperature: schema.Temperature = 0.1,
    distill_temperature: schema.Temperature = 0.1,
    prototypes: schema.Count = 3000,
    target_temperature: schema.Temperature = 0.05,
    iterations: schema.Count = 3,
    prototypes_held: schema.Share = 0.01,
) -> records.Base:
    """Predict swapped assignments to prototypes: SwAV (Caron et al., NeurIPS 2020).

    Args:
      temperature: of the predictions.
      distill_temperature: of CaSSLe's term.
      prototypes: number of prototypes.
      target_temperature: epsilon, of the assignments.
      iterations: of Sinkhorn-Knopp, which uses all prototypes equally.
      prototypes_held: share of the first task in which prototypes are frozen.
    """

    def loss(x):
        logits = noncontrastive.prototype_cosines(
            forms.join_views(x), x.params["prototypes"]
        )
        targets = [
            noncontrastive.sinkhorn(
                view, temperature=target_temperature, iterations=iterations
            )
            for view in core.split_views(logits)
        ]
        # Eq. 2 is DINO's cross-entropy between different views, with these targets.
        swapped = jnp.stack(targets, axis=1)
        return noncontrastive.dino(logits, swapped, temperature=temperature)

    def distil(x):
        return forms.distil_prototypes(x, distill_temperature)

    return records.Base(
        loss,
        distil,
        distance="cosine",
        linear_lr=0.3,
        projector=mlp.ASSIGNED,
        reads=("local",),
        init_params=lambda key, dim: forms.init_prototypes(key, prototypes, dim),
        mask_gradients=functools.partial(forms.hold_prototypes, share=prototypes_held),
    )
