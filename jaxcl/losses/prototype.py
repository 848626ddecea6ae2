"""Losses of CCLIS and Co2L: samples against prototypes; distillation of relations.

CCLIS (Li et al., "Contrastive Continual Learning with Importance Sampling and
Prototype-Instance Relation Distillation", AAAI 2024, called P below) and the
distillation of Co2L (Cha et al., ICCV 2021), whose contrastive loss is
`contrastive.sup_con`. The papers write sums over rows; their released codes take
means, and so do these functions.

Masks are bool or f32 of zeros and ones. A masked row has no effect on values and
gradients, even if it is nan. A mean over no rows is 0. All work in float32 at least
(bfloat16 is cast first).
"""

from typing import Literal, get_args

import chex
import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.memory import selection

Scope = Literal["old", "all_negatives", "all", "none"]

# A large, finite value replaces an infinite loss.
_IMPOSSIBLE = 1e9


def sample_nce(
    z: jax.Array,
    labels: jax.Array,
    prototypes: jax.Array,
    weights: jax.Array,
    old_classes: jax.Array,
    *,
    temperature: float = 0.5,
    scope: str = "old",
    example_mask: jax.Array | None = None,
) -> jax.Array:
    """Compute Sample-NCE of CCLIS: prototypes are anchors, rows candidates (Eq. 8-10).

    The mean over rows j, with s_ij = c_i . z_j / temperature, anchor i = y_j and n_m
    rows of class m, of
      -s_ij + log sum_k w_ik exp s_ik.
    Classes that are absent from the batch do not count.
      "old": w_ik = 1 / (n_m g_k) if classes i and m = y_k are old and differ, else 1.
        The few stored rows of class m then weigh as much as their pool.
      "all_negatives": w_ik = 1 / (n_m g_k) wherever m is not i. The released code
        does this if tasks do not have two classes each (CIFAR-100, Tiny-ImageNet).
      "all": w_ik = 1 / (n_m g_k) everywhere, the anchor's own class included. The
        denominator then estimates the sum over whole pools, P's Eq. 6, at one scale.
      "none": w_ik = 1.
    "old", the form of P and its code, mixes two scales in a mini-batch: stored rows
    count for their whole pool, rows of the present task only for themselves. Old
    classes then outweigh the present ones by pool size over batch size.

    Args:
      z: f32[B, D], unit rows, incoming and replayed ones alike.
      labels: i32[B]; a row of no class counts 1e9.
      prototypes: f32[C, D], taken as they are.
      weights: f32[B], g_k, the probability in (0, 1] that one draw from the pool of the
        row's class takes this row; no gradient. Only "all_negatives" and "all" read it
        for incoming rows, where it is 1 / N in a class of N.
      old_classes: bool or f32[C], classes of earlier tasks.
      temperature: divisor of the products, P's tau.
      scope: the candidates that are weighted, one of the above.
      example_mask: bool or f32[B], rows that exist; None for all.

    Returns:
      f32[], in nats; 0 if no row is left. Classes without a row are not anchors.

    Raises:
      Refused: if `scope` is none of them.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import prototype
      >>> z, labels, prototypes = jnp.eye(2), jnp.array([0, 1]), jnp.eye(2)
      >>> chance, old = jnp.array([0.1, 0.1]), jnp.array([True, True])
      >>> round(float(prototype.sample_nce(z, labels, prototypes, chance, old)), 3)
      0.856
    """
    core.check_choice("scope", scope, get_args(Scope))
    chex.assert_rank([z, prototypes], 2)
    classes, rows = len(prototypes), len(z)
    chex.assert_shape([labels, weights], (rows,))
    chex.assert_shape(old_classes, (classes,))
    exists = _exists(example_mask, rows)
    similarity = _products(prototypes, z, exists) / temperature
    members = (labels == jnp.arange(classes)[:, None]) & exists
    candidates = similarity
    if scope != "none":
        weighted = jnp.ones_like(members) if scope == "all" else ~members
        if scope == "old":
            old = old_classes.astype(bool)[:, None]
            weighted = weighted & old & jnp.any(members & old, axis=0)
        importance = _log_importance(weights, members)
        candidates = similarity + jnp.where(weighted, importance, 0)
    candidates = jnp.where(exists, candidates, -jnp.inf)
    total = jax.nn.logsumexp(candidates, axis=1, keepdims=True)
    loss = jnp.sum(jnp.where(members, total - similarity, 0), axis=0)
    loss = jnp.where(jnp.any(members, axis=0), loss, _IMPOSSIBLE)
    return core.masked_mean(loss, example_mask)


def prd(
    z: jax.Array,
    teacher_z: jax.Array,
    prototypes: jax.Array,
    teacher_prototypes: jax.Array,
    class_mask: jax.Array,
    *,
    temperature: float = 0.2,
    teacher_temperature: float = 0.1,
    example_mask: jax.Array | None = None,
) -> jax.Array:
    """Compute prototype-instance relation distillation, PRD, of CCLIS (Eq. 13-14).

    The mean over rows j of -sum_i q_ij log p_ij, where q and p are the softmax over the
    chosen classes i of the teacher's c_i . z_j / teacher_temperature and of the present
    c_i . z_j / temperature. P chooses all classes so far. Its released code chooses the
    classes that the teacher was trained on; the teacher's other prototypes are random.

    Args:
      z: f32[B, D], unit rows.
      teacher_z: f32[B, D], unit rows of the same images; no gradient.
      prototypes: f32[C, D], taken as they are.
      teacher_prototypes: f32[C, D], taken as they are; no gradient.
      class_mask: bool or f32[C], classes of the softmax.
      temperature: P's kappa of the present network.
      teacher_temperature: P's kappa of the teacher; 0.01 is its code's default.
      example_mask: bool or f32[B], rows that exist; None for all.

    Returns:
      f32[], in nats, without its weight, P's lambda; 0 if no class or no row is left.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import prototype
      >>> z, prototypes = jnp.eye(2), jnp.eye(2)
      >>> teacher_z, classes = jnp.eye(2)[::-1], jnp.array([True, True])
      >>> round(float(prototype.prd(z, teacher_z, prototypes, prototypes, classes)), 3)
      5.006
    """
    chex.assert_rank([z, prototypes], 2)
    chex.assert_equal_shape([z, teacher_z])
    chex.assert_equal_shape([prototypes, teacher_prototypes])
    chex.assert_shape(class_mask, (len(prototypes),))
    exists, classes = _exists(example_mask, len(z)), class_mask.astype(bool)
    teacher = jax.lax.stop_gradient((teacher_prototypes, teacher_z))
    logits = _products(prototypes, z, exists).T / temperature
    teacher_logits = _products(*teacher, exists).T / teacher_temperature
    rows = _relation(logits, teacher_logits, classes)
    return core.masked_mean(rows, example_mask)


def ird(
    z: jax.Array,
    teacher_z: jax.Array,
    *,
    temperature: float = 0.2,
    teacher_temperature: float = 0.01,
    example_mask: jax.Array | None = None,
) -> jax.Array:
    """Compute instance-wise relation distillation, IRD, of Co2L (Sec. 4.2).

    The mean over rows i of -sum_{k != i} q_ik log p_ik, where q and p are the softmax
    over k != i of cos(f_i, f_k) / teacher_temperature and of cos(z_i, z_k) /
    temperature; f are the teacher's rows.

    Args:
      z: f32[N, D], every row a view.
      teacher_z: f32[N, D], rows of the same images from the network after the last
        task; no gradient.
      temperature: divisor of the cosines, kappa of Co2L.
      teacher_temperature: divisor of the teacher's cosines, kappa*.
      example_mask: bool or f32[N], rows that exist; None for all. The others are
        neither anchors nor candidates.

    Returns:
      f32[], in nats, without a weight; 0 if fewer than two rows are left.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import prototype
      >>> z = jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
      >>> teacher_z = jnp.eye(3, 2)
      >>> round(float(prototype.ird(z, teacher_z, teacher_temperature=0.2)), 3)
      1.429
    """
    chex.assert_rank(z, 2)
    chex.assert_equal_shape([z, teacher_z])
    exists = _exists(example_mask, len(z))
    logits, teacher_logits = (
        core.l2_normalize(jnp.where(exists[:, None], x, 0))
        for x in (z, jax.lax.stop_gradient(teacher_z))
    )
    rows = _relation(
        core.dot(logits, logits) / temperature,
        core.dot(teacher_logits, teacher_logits) / teacher_temperature,
        ~jnp.eye(len(z), dtype=bool) & exists,
    )
    return core.masked_mean(rows, example_mask)


def proposal(
    z: jax.Array,
    labels: jax.Array,
    prototypes: jax.Array,
    seen: jax.Array,
    *,
    temperature: float = 0.5,
    example_mask: jax.Array | None = None,
    leftover: bool = False,
) -> jax.Array:
    """Compute each row's probability in a draw from its class (CCLIS Eq. 11-12).

    `selection.proposal`, averaged over views and divided by the sum over the class.

    Args:
      z: f32[N, D], unit rows, or f32[R, N, D], R views of each.
      labels: i32[N].
      prototypes: f32[C, D], taken as they are.
      seen: bool[C], classes so far.
      temperature: P's tau.
      example_mask: bool or f32[N], rows that exist; None for all.
      leftover: add a term that the released code adds by mistake: the last view's share
        for the prototype of its own class, over R.

    Returns:
      f32[N], sums to 1 within each class; 0 where masked. No gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import prototype
      >>> z = jnp.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
      >>> labels = jnp.array([0, 0, 1])
      >>> prototypes, seen = jnp.eye(2), jnp.array([True, True])
      >>> chances = prototype.proposal(z, labels, prototypes, seen)
      >>> print(*(round(float(chance), 3) for chance in chances))
      0.168 0.832 1.0
    """
    views = z if z.ndim == 3 else z[None]
    chex.assert_rank([views, prototypes], [3, 2])
    exists = _exists(example_mask, views.shape[1])

    def add_view(total, view):
        similarity = _products(prototypes, view, exists) / temperature
        g = selection.proposal(similarity, labels, seen, exists)
        return total + g / len(views), None

    total, _ = jax.lax.scan(add_view, jnp.zeros(exists.shape), views)
    if leftover:
        similarity = _products(prototypes, views[-1], exists) / temperature
        total += selection.own_class_term(similarity, labels, seen, exists) / len(views)
    total = jax.lax.stop_gradient(total)
    return selection.within_class(total, labels, exists, len(prototypes))


def _products(prototypes, z, exists):
    """Return c_i . z_j, f32[C,B]; 0 for rows that do not exist."""
    z = core.at_least_float32(jnp.where(exists[:, None], z, 0))
    return core.dot(prototypes.astype(z.dtype), z)


def _exists(mask, rows):
    """Return the mask as bool[B], all True for None."""
    if mask is None:
        return jnp.ones(rows, bool)
    chex.assert_shape(mask, (rows,))
    return mask.astype(bool)


def _log_importance(weights, members):
    """Return log(1 / (n g)), f32[B]; n counts the rows of the row's class.

    Args:
      weights: f32[B], g; no gradient.
      members: bool[C, B], rows that exist and are of each class.
    """
    count = jnp.sum(members, axis=1, keepdims=True)
    count = jnp.maximum(jnp.sum(jnp.where(members, count, 0), axis=0), 1)
    weights = core.at_least_float32(jax.lax.stop_gradient(weights))
    # A row of weight 0 cannot have been drawn; it outweighs all others, finitely.
    weights = jnp.maximum(weights, jnp.finfo(jnp.float32).tiny)
    return -jnp.log(weights) - jnp.log(count.astype(weights.dtype))


def _relation(logits, teacher_logits, allowed):
    """Return the cross-entropy of two softmaxes over the allowed columns, f32[B].

    Args:
      logits: f32[B, K], logits.
      teacher_logits: f32[B, K], logits of the teacher.
      allowed: bool[K] or [B, K]; a row without any counts 0.
    """
    allowed = jnp.broadcast_to(allowed, logits.shape)
    nonempty = jnp.any(allowed, axis=1, keepdims=True)
    # A softmax over nothing has the gradient nan, even if it is multiplied by 0.
    inside = allowed | ~nonempty
    target = jax.nn.softmax(jnp.where(inside, teacher_logits, -jnp.inf), axis=1)
    total = jax.nn.logsumexp(jnp.where(inside, logits, -jnp.inf), axis=1, keepdims=True)
    return jnp.sum(jnp.where(allowed, target * (total - logits), 0), axis=1)
