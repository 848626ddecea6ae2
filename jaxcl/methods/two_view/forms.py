"""Parts of losses and parameters that several bases share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import distill
from jaxcl.methods.two_view import records
from jaxcl.nets import layers

_PROTOTYPES = 0xD120  # keeps them apart from the networks that share their key


def join_views(x: records.Features) -> jax.Array:
    """Join the projections of both views and of the local crops: f32[B,2+L,D]."""
    return x.z if x.local is None else jnp.concatenate([x.z, x.local], axis=1)


def distil_contrast(
    temperature: float, form: records.Form, logsumexp: Callable | None = None
) -> Callable:
    """Make CaSSLe's term of contrastive bases, see `distill.cassle_contrastive`."""
    options = dict(temperature=temperature, form=form, logsumexp=logsumexp)
    return lambda x: distill.cassle_contrastive(*core.split_views(x.p, x.f), **options)


def distil_cosine(x: records.Features) -> jax.Array:
    """Compute CaSSLe's term of BYOL, 2 - 2 cos(g(z), f)."""
    return distill.cassle_byol(*core.split_views(x.p, x.f))


def distil_squared(x: records.Features) -> jax.Array:
    """Average over rows and views |g(z) - f|^2, f32[]."""
    return x.p.shape[-1] * distill.cassle_mse(*core.split_views(x.p, x.f))


def distil_mean_squared(x: records.Features) -> jax.Array:
    """Average over all elements (g(z) - f)^2, f32[]."""
    return distill.cassle_mse(*core.split_views(x.p, x.f))


def distil_prototypes(x: records.Features, temperature: float) -> jax.Array:
    """Compute CaSSLe's term of prototypes: teacher and g(z) agree, each on its own."""
    return distill.cassle_prototypes(
        *core.split_views(x.p, x.f),
        x.params["distil_prototypes"],
        x.frozen_params["prototypes"],
        temperature=temperature,
    )


def init_prototypes(key: jax.Array, count: int, dim: int) -> dict[str, jax.Array]:
    """Make the parameters {"prototypes": f32[count, dim]}, as a PyTorch Linear."""
    key = jax.random.fold_in(key, _PROTOTYPES)
    return {"prototypes": layers.torch_uniform(dim)(key, (count, dim))}


def hold_prototypes(
    task: jax.Array, progress: jax.Array, grads: dict, share: float
) -> dict:
    """Zero the prototypes' gradients in the first `share` of the first task."""
    frozen = (task == 0) & (progress < share)
    return {"prototypes": jnp.where(frozen, 0.0, grads["prototypes"])}
