"""Forms of a loss under CaSSLe and PNR that several bases share."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcl.losses import distill, streaming
from jaxcl.methods.two_view import records


def split_views(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split f32[B,2,D] by view."""
    return x[:, 0], x[:, 1]


def join_views(x: records.Features) -> jax.Array:
    """Projections of both views and, after them, of the local crops: f32[B,2+L,D]."""
    return x.z if x.local is None else jnp.concatenate([x.z, x.local], axis=1)


def split_distilled(x: records.Features) -> tuple[jax.Array, ...]:
    """Outputs of g for both views, then the teacher's features."""
    return (*split_views(x.p), *split_views(x.f))


def choose_logsumexp(x: records.Features, streams: bool) -> Callable | None:
    """The log-sum-exp that makes no matrix of logits, if a base asks for it."""
    if not streams:
        return None
    return functools.partial(streaming.logsumexp, on_each=x.on_each)


def distil_contrast(
    temperature: float, form: records.Form, streams: bool = False
) -> Callable:
    """Make CaSSLe's term of contrastive bases.

    Args:
      temperature: of its cosines.
      form: see `distill.cassle_contrastive`.
      streams: see `choose_logsumexp`.
    """

    def distil(x):
        return distill.cassle_contrastive(
            *split_distilled(x),
            temperature=temperature,
            form=form,
            logsumexp=choose_logsumexp(x, streams),
        )

    return distil


def distil_cosine(x: records.Features) -> jax.Array:
    """CaSSLe's term of BYOL, 2 - 2 cos(g(z), f)."""
    return distill.cassle_byol(*split_distilled(x))


def distil_squared(x: records.Features) -> jax.Array:
    """Mean over rows and views of |g(z) - f|^2, f32[]."""
    return x.p.shape[-1] * distill.cassle_mse(*split_distilled(x))


def distil_mean_squared(x: records.Features) -> jax.Array:
    """Mean over all elements of (g(z) - f)^2, f32[]."""
    return distill.cassle_mse(*split_distilled(x))


def subtract_distance(loss: Callable, distil: Callable, distance: str) -> Callable:
    """Make PNR's loss of a base without negatives (Cha et al., ICML 2024, Eq. 4 + 5).

    It is CaSSLe's loss minus lambda times the distance to the OTHER view's frozen
    feature.

    Args:
      loss, distil: of the base.
      distance: see `distill.pseudo_negative`.
    """

    def pnr(x, terms):
        total = loss(x) + terms.weight * distil(x)
        if not terms.pn2:
            return total
        apart = distill.pseudo_negative(*split_distilled(x), distance=distance)
        return total - terms.negative_weight * apart

    return pnr


def outweighs(terms: records.PnrTerms) -> bool:
    """Whether a distance is subtracted as often as it is added, or more."""
    return terms.negative_weight >= terms.weight


def never_unbounded(terms: records.PnrTerms) -> bool:
    """A cosine is bounded, whatever its weight."""
    return False
