"""Prototypes, the parameters that bases such as DINO and SwAV have of their own."""

import jax
import jax.numpy as jnp

from jaxcl.losses import distill
from jaxcl.methods.two_view import forms, records
from jaxcl.nets import heads

_STREAM = 0xD120  # keeps them apart from the networks that share their key


def init(key: jax.Array, count: int, dim: int) -> dict[str, jax.Array]:
    """Make the parameters {"prototypes": f32[count, dim]}."""
    key = jax.random.fold_in(key, _STREAM)
    return {"prototypes": heads.prototypes(key, count, dim)}


def hold(moment: records.Moment, grads: dict, share: float) -> dict:
    """Zero the prototypes' gradients in the first `share` of the first task."""
    held = (moment.task == 0) & (moment.progress < share)
    return {"prototypes": jnp.where(held, 0.0, grads["prototypes"])}


def distil(x: records.Features, temperature: float) -> jax.Array:
    """Compute CaSSLe's term: teacher and g(z) agree on prototypes, each on its own."""
    return distill.cassle_prototypes(
        *forms.split_distilled(x),
        x.distil_params["prototypes"],
        x.frozen_params["prototypes"],
        temperature=temperature,
    )
