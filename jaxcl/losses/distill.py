"""Distil from the frozen network of the previous task.

CaSSLe (Fini et al., CVPR 2022), PNR (Cha et al., ICML 2024) and LUCIR's less-forget
constraint. Names follow the papers: `z` or `q` are the current projections of a view,
`p` is the predictor's output g(z), `f` the frozen network's projection of the same
image, `k` the momentum network's. No gradient reaches `f`, `k` and the queues. If paper
and released code differ, `form` or `distance` chooses; the published numbers come from
the code.
"""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import contrastive, noncontrastive

_FORMS = "code", "paper"
_ABSENT = -1e30  # logit of a row that is left out; with -inf a gradient might be nan


def cassle_contrastive(
    p1: jax.Array,
    p2: jax.Array,
    f1: jax.Array,
    f2: jax.Array,
    *,
    temperature: float = 0.2,
    form: str = "code",
    logsumexp: Callable | None = None,
) -> jax.Array:
    """Compute CaSSLe's contrastive distillation over the 2B rows of both views.

    With s the cosine over the temperature, row i of P belongs to row i of F, the
    same view of the same image:
      "code": half of mean_i [-s(P_i, F_i) + log sum_j exp s(P_i, F_j)] and half
        of the same with P and F swapped; all 2B columns are in the sum.
      "paper": mean_i [-s(P_i, F_i) + log sum_{j != i} exp s(P_i, F_j)], with the
        negatives N_2 of PNR Eq. 3.

    Args:
      p1, p2: f32[B, D], predictions of both views.
      f1, f2: f32[B, D], frozen features of both views; no gradient.
      temperature: divisor of the cosines.
      form: "code" or "paper".
      logsumexp: `streaming.logsumexp`; None: the matrix of logits is formed.

    Returns:
      f32[], in nats.

    Raises:
      Refused: if `form` is neither.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> p, f = jnp.eye(2), jnp.eye(2)  # the same in both views
      >>> round(float(distill.cassle_contrastive(p, p, f, f, temperature=0.5)), 3)
      0.82
    """
    core.check_choice("form", form, _FORMS)
    chex.assert_rank(p1, 2)
    chex.assert_equal_shape([p1, p2, f1, f2])
    p = core.l2_normalize(contrastive.interleave(p1, p2))
    f = core.l2_normalize(jax.lax.stop_gradient(contrastive.interleave(f1, f2)))
    if logsumexp is not None:
        return _cassle_streamed(p, f, temperature, form, logsumexp)
    logits = core.dot(p, f) / temperature
    positive = contrastive.pick_entries(logits, jnp.arange(len(p)))
    if form == "paper":
        return jnp.mean(contrastive.logsumexp_of_others(logits) - positive)
    forward = jax.nn.logsumexp(logits, axis=1) - positive
    backward = jax.nn.logsumexp(logits, axis=0) - positive
    return (jnp.mean(forward) + jnp.mean(backward)) / 2


def _cassle_streamed(p, f, temperature, form, logsumexp):
    """Compute `cassle_contrastive` of unit rows without a matrix of logits."""
    row = jnp.arange(len(p))
    positive = jnp.sum(p * f, axis=-1) / temperature
    others = functools.partial(logsumexp, groups=(row, row))
    forward = others(p / temperature, f)
    if form == "paper":
        return jnp.mean(forward - positive)
    backward = others(f / temperature, p)
    terms = (jnp.logaddexp(x, positive) - positive for x in (forward, backward))
    return sum(map(jnp.mean, terms)) / 2


def cassle_barlow(
    p1: jax.Array,
    p2: jax.Array,
    f1: jax.Array,
    f2: jax.Array,
    *,
    scale: float = 0.1,
    off_diagonal: float = 5e-3,
) -> jax.Array:
    """Compute CaSSLe with Barlow Twins, (barlow(p1, f1) + barlow(p2, f2)) / 2.

    Args:
      p1, p2: f32[B, D], predictions of both views.
      f1, f2: f32[B, D], frozen features of both views; no gradient.
      scale, off_diagonal: arguments of `noncontrastive.barlow_twins`.

    Returns:
      f32[], without a weight; CaSSLe's is 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> p, f = jnp.array([[1.0, 1.0], [-1.0, -1.0]]), jnp.eye(2)
      >>> round(float(distill.cassle_barlow(p, p, f, f)), 3)
      0.401
    """
    options = {"scale": scale, "off_diagonal": off_diagonal}
    first = noncontrastive.barlow_twins(p1, jax.lax.stop_gradient(f1), **options)
    second = noncontrastive.barlow_twins(p2, jax.lax.stop_gradient(f2), **options)
    return (first + second) / 2


def cassle_byol(
    p1: jax.Array, p2: jax.Array, f1: jax.Array, f2: jax.Array
) -> jax.Array:
    """Compute CaSSLe with BYOL, the mean over views and rows of 2 - 2 cos(p, f).

    PNR Eq. 7 writes |p - f|^2; in both released codes the rows have unit length.

    Args:
      p1, p2: f32[B, D], predictions of both views.
      f1, f2: f32[B, D], frozen features of both views; no gradient.

    Returns:
      f32[] in [0, 4], without a weight; CaSSLe's is 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> p, f = jnp.array([[2.0, 0.0]]), jnp.array([[0.0, 3.0]])
      >>> round(float(distill.cassle_byol(p, f, f, f)), 3)  # view 2 is as before
      1.0
    """
    return (noncontrastive.byol(p1, f1) + noncontrastive.byol(p2, f2)) / 2


def cassle_mse(p1: jax.Array, p2: jax.Array, f1: jax.Array, f2: jax.Array) -> jax.Array:
    """Compute CaSSLe with VICReg, the mean of (p - f)^2 over views, rows and features.

    PNR Eq. 11 writes a sum over the D features; both released codes divide by D.

    Args:
      p1, p2: f32[B, D], predictions of both views.
      f1, f2: f32[B, D], frozen features of both views; no gradient.

    Returns:
      f32[], without a weight; CaSSLe's is 25.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> p, f = jnp.array([[2.0, 0.0]]), jnp.array([[0.0, 0.0]])
      >>> round(float(distill.cassle_mse(p, f, f, f)), 3)  # view 2 is as before
      1.0
    """
    f1, f2 = jax.lax.stop_gradient((f1, f2))
    return (noncontrastive.mse(p1, f1) + noncontrastive.mse(p2, f2)) / 2


def cassle_prototypes(
    p1: jax.Array,
    p2: jax.Array,
    f1: jax.Array,
    f2: jax.Array,
    prototypes: jax.Array,
    frozen_prototypes: jax.Array,
    *,
    temperature: float = 0.1,
) -> jax.Array:
    """Compute CaSSLe's distillation over prototypes (Fini et al., CVPR 2022).

    The mean over views and rows of the cross-entropy between
      softmax(cos(f, frozen prototypes) / temperature) and
      softmax(cos(p, prototypes) / temperature),
    where the prototypes of the distillation are a layer of their own.

    Args:
      p1, p2: f32[B, D], predictions of both views.
      f1, f2: f32[B, D], frozen features of both views; no gradient.
      prototypes: f32[K, D], the layer of the distillation.
      frozen_prototypes: f32[K, D], the frozen network's; no gradient.
      temperature: divisor of the cosines of both.

    Returns:
      f32[], in nats, without a weight; CaSSLe's is 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> p, f, unit = jnp.ones((1, 2)), jnp.array([[1.0, 0.0]]), jnp.eye(2)
      >>> round(float(distill.cassle_prototypes(p, p, f, f, unit, unit)), 3)
      0.693
    """
    chex.assert_rank(p1, 2)
    chex.assert_equal_shape([p1, p2, f1, f2])
    chex.assert_equal_shape([prototypes, frozen_prototypes])
    p, f = contrastive.interleave(p1, p2), contrastive.interleave(f1, f2)
    learnt = noncontrastive.prototype_cosines(p, prototypes) / temperature
    frozen = noncontrastive.prototype_cosines(f, frozen_prototypes) / temperature
    targets = jax.nn.softmax(jax.lax.stop_gradient(frozen), axis=-1)
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(learnt, axis=-1), axis=-1))


_DISTANCES = {
    "cosine": lambda p, f: -noncontrastive.mean_cosine(p, f),
    "byol": noncontrastive.byol,
    "mse": noncontrastive.mse,
    "squared": lambda p, f: p.size * noncontrastive.mse(p, f),
    "squared_mean": lambda p, f: p.shape[-1] * noncontrastive.mse(p, f),
}


def pseudo_negative(
    p1: jax.Array, p2: jax.Array, f1: jax.Array, f2: jax.Array, *, distance: str
) -> jax.Array:
    """Compute the distance of p to the OTHER view's frozen feature; PNR subtracts it.

    PNR without negatives is base + w * cassle - weight * this, where this is
    (d(p1, f2) + d(p2, f1)) / 2 (PNR Eq. 5, 8, 12), with d(p, f) one of
      "cosine": -mean_i cos, in the released code with Barlow Twins.
      "byol": mean_i (2 - 2 cos), in the code with BYOL.
      "mse": mean over all B * D elements of (p - f)^2, in the code with VICReg.
      "squared": sum_i |p_i - f_i|^2, Eq. 5 and 8 as they are written.
      "squared_mean": mean_i |p_i - f_i|^2, Eq. 12 as it is written.
    The first two are bounded, so they can be subtracted with any weight. The others
    are not. Together with `w * cassle_mse` the loss stays bounded below if weight < w
    ("mse"), w / D ("squared_mean") or w / (B D) ("squared"). Together with Barlow Twins
    or `cassle_byol`, which ignore the length of p, the loss has no bound for any
    weight: "squared" is for study, not for training.

    Args:
      p1, p2: f32[B, D], predictions of both views.
      f1, f2: f32[B, D], frozen features of both views; no gradient.
      distance: one of the five above.

    Returns:
      f32[], without its weight, the paper's lambda.

    Raises:
      Refused: if `distance` is none of them.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> p, f = jnp.array([[2.0, 0.0]]), jnp.array([[0.0, 0.0]])
      >>> round(float(distill.pseudo_negative(p, p, f, p, distance="mse")), 3)
      1.0
    """
    core.check_choice("distance", distance, tuple(_DISTANCES))
    chex.assert_rank(p1, 2)
    chex.assert_equal_shape([p1, p2, f1, f2])
    f1, f2 = jax.lax.stop_gradient((f1, f2))
    measure = _DISTANCES[distance]
    return (measure(p1, f2) + measure(p2, f1)) / 2


def less_forget(
    z1: jax.Array, z2: jax.Array, f1: jax.Array, f2: jax.Array
) -> jax.Array:
    """Compute LUCIR's less-forget constraint (Hou et al., CVPR 2019, Sec. 3.3).

    The mean over views and rows of 1 - cos(z, f). The present network gives z and the
    frozen one f, for the same view of the same image; there is no predictor.

    Args:
      z1, z2: f32[B, D], features of both views.
      f1, f2: f32[B, D], features of the frozen network; no gradient.

    Returns:
      f32[] in [0, 2], without a weight.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> z, f = jnp.array([[2.0, 0.0]]), jnp.array([[0.0, 3.0]])
      >>> round(float(distill.less_forget(z, f, f, f)), 3)  # view 2 is as before
      0.5
    """
    f1, f2 = jax.lax.stop_gradient((f1, f2))
    first = noncontrastive.mean_cosine(z1, f1)
    return 1 - (first + noncontrastive.mean_cosine(z2, f2)) / 2


def relative_squared(h: jax.Array, frozen: jax.Array) -> jax.Array:
    """Compute the squared distance to frozen features over their squared length.

    sum |h_i - frozen_i|^2 / sum |frozen_i|^2, sums over all rows: feature distillation
    (Jung et al., AAAI 2018, Eq. 4), scaled so that the length of features does not
    matter.

    Args:
      h: f32[..., D], features.
      frozen: f32[..., D], the frozen network's features of these images; no gradient.

    Returns:
      f32[]; 1 where all features are 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> h, frozen = jnp.array([[3.0, 0.0]]), jnp.array([[2.0, 0.0]])
      >>> float(distill.relative_squared(h, frozen))
      0.25
    """
    chex.assert_equal_shape([h, frozen])
    frozen = jax.lax.stop_gradient(core.at_least_float32(frozen))
    squared = jnp.sum(jnp.square(core.at_least_float32(h) - frozen))
    return squared / jnp.maximum(jnp.sum(jnp.square(frozen)), 1e-12)


def pnr_simclr(
    z1: jax.Array,
    z2: jax.Array,
    p1: jax.Array,
    p2: jax.Array,
    f1: jax.Array,
    f2: jax.Array,
    *,
    temperature: float = 0.2,
    pn1: bool = True,
    pn2: bool = True,
    logsumexp: Callable | None = None,
) -> jax.Array:
    """Compute PNR with SimCLR (PNR Eq. 2 + 3), the loss from task 2 on.

    Z, P, F are the 2B rows of both views and s the cosine over the temperature:
      L1 = mean_i [-s(Z_i, Z_pos)
                   + log(sum_{j != i} exp s(Z_i, Z_j) + exp s(Z_i, F_j))]
      L2 = mean_i [-s(P_i, F_i)
                   + log(sum_{j != i} exp s(P_i, F_j) + exp s(P_i, Z_j))]
    pos is the other view of the same image. The positive is in the denominator of L1
    but not in L2's, so L2 can be negative. Paper and code agree. Gradients flow
    to Z also where it is a pseudo-negative in L2.

    Args:
      z1, z2: f32[B, D], projections of both views.
      p1, p2: f32[B, D], predictions of both views.
      f1, f2: f32[B, D], frozen features of both views; no gradient.
      temperature: divisor of the cosines of both terms.
      pn1: whether L1 has its pseudo-negatives, F (the ablation of Table 7).
      pn2: whether L2 has its pseudo-negatives, Z (the ablation of Table 7).
      logsumexp: `streaming.logsumexp`; None: the matrix of logits is formed.

    Returns:
      f32[], L1 + L2 in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> z, p, f = jnp.eye(2), jnp.eye(2), jnp.eye(2)  # the same in both views
      >>> round(float(distill.pnr_simclr(z, z, p, p, f, f, temperature=0.5)), 3)
      1.865
    """
    chex.assert_rank(z1, 2)
    chex.assert_equal_shape([z1, z2, p1, p2, f1, f2])
    z1, z2 = core.l2_normalize(z1), core.l2_normalize(z2)
    z = contrastive.interleave(z1, z2)
    p = core.l2_normalize(contrastive.interleave(p1, p2))
    f = core.l2_normalize(jax.lax.stop_gradient(contrastive.interleave(f1, f2)))

    others = functools.partial(_logsumexp_of_others, logsumexp=logsumexp)
    first = others(z, (z, f) if pn1 else (z,), temperature)
    second = others(p, (f, z) if pn2 else (f,), temperature)
    if logsumexp is None:
        # The compiler computes this product and that in the denominator once.
        logits = core.dot(z, z) / temperature
        positive = contrastive.pick_entries(logits, contrastive.partner_rows(len(z)))
    else:
        positive = jnp.sum(z * contrastive.interleave(z2, z1), axis=-1) / temperature
    distilled = jnp.sum(p * f, axis=-1) / temperature
    return jnp.mean(first - positive) + jnp.mean(second - distilled)


def pnr_supcon(
    z1: jax.Array,
    z2: jax.Array,
    p1: jax.Array,
    p2: jax.Array,
    f1: jax.Array,
    f2: jax.Array,
    labels: jax.Array,
    *,
    temperature: float = 0.1,
    distill_temperature: float = 0.2,
    pn1: bool = True,
    pn2: bool = True,
    other_classes: bool = False,
) -> jax.Array:
    """Compute PNR with supervised contrastive learning, our reading of PNR B.5.

    The paper says only that Eq. 2 and 3 use the labels, and the released code does not
    contain this loss. Here Z, P, F are the 2B rows of both views, s and s_d the cosine
    over `temperature` and over `distill_temperature`, and
      L1 = mean_i [-mean_{j != i, label_j = label_i} s(Z_i, Z_j)
                   + log(sum_{k != i} exp s(Z_i, Z_k) + exp s(Z_i, F_k))]
      L2 = mean_i [-s_d(P_i, F_i)
                   + log(sum_{k != i} exp s_d(P_i, F_k) + exp s_d(P_i, Z_k))].
    So L1 has SupCon's positives, which always include the other view; L2 keeps its
    single positive; a row of the same label is a pseudo-negative like any other, unless
    `other_classes` leaves it out of F_k in L1 and of Z_k in L2. If all labels differ
    and the temperatures are equal, it is `pnr_simclr`; with `other_classes` it then
    lacks the other view's row as a pseudo-negative.

    Args:
      z1, z2: f32[B, D], projections of both views.
      p1, p2: f32[B, D], predictions of both views.
      f1, f2: f32[B, D], frozen features of both views; no gradient.
      labels: i32[B].
      temperature, distill_temperature: divisors of the cosines of L1 and of L2.
      pn1: whether L1 has its pseudo-negatives, F.
      pn2: whether L2 has its pseudo-negatives, Z.
      other_classes: rows of the anchor's class are no pseudo-negatives.

    Returns:
      f32[], L1 + L2 in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> z, labels = jnp.eye(2), jnp.array([0, 1])
      >>> p, f = z, z  # and the same in both views
      >>> round(float(distill.pnr_supcon(z, z, p, p, f, f, labels, temperature=0.5)), 3)
      1.639
    """
    chex.assert_rank([z1, labels], [2, 1])
    chex.assert_equal_shape([z1, z2, p1, p2, f1, f2])
    chex.assert_equal_shape_prefix([z1, labels], 1)
    z = core.l2_normalize(contrastive.interleave(z1, z2))
    p = core.l2_normalize(contrastive.interleave(p1, p2))
    f = core.l2_normalize(jax.lax.stop_gradient(contrastive.interleave(f1, f2)))
    labels = jnp.stack([labels, labels], axis=1).reshape(-1)
    same_class = labels[:, None] == labels
    itself = jnp.eye(labels.size, dtype=bool)
    positive = same_class & ~itself
    left_out = same_class if other_classes else itself

    def compare(anchors, rows, pseudo, scale):
        """Log-sum-exp over other rows, and over pseudo-negatives unless None."""
        total = _logsumexp_of_others(anchors, (rows,), scale)
        if pseudo is None:
            return total
        logits = jnp.where(left_out, _ABSENT, core.dot(anchors, pseudo) / scale)
        return jnp.logaddexp(total, jax.nn.logsumexp(logits, axis=-1))

    # The compiler computes this product and that in the denominator once.
    logits = core.dot(z, z) / temperature
    first = compare(z, z, f if pn1 else None, temperature)
    second = compare(p, f, z if pn2 else None, distill_temperature)
    pairs = jnp.where(positive, first[:, None] - logits, 0.0)
    attraction = jnp.sum(pairs, axis=1) / jnp.sum(positive, axis=1)
    distilled = jnp.sum(p * f, axis=-1) / distill_temperature
    return jnp.mean(attraction) + jnp.mean(second - distilled)


def pnr_moco(
    q1: jax.Array,
    q2: jax.Array,
    k1: jax.Array,
    k2: jax.Array,
    p1: jax.Array,
    p2: jax.Array,
    f1: jax.Array,
    f2: jax.Array,
    key_queue: jax.Array,
    frozen_queue: jax.Array,
    *,
    temperature: float = 0.2,
    distill_temperature: float = 0.2,
    form: str = "code",
    pn1: bool = True,
    pn2: bool = True,
    unit_queues: bool = False,
    logsumexp: Callable | None = None,
) -> jax.Array:
    """Compute PNR with MoCo v2+ (PNR Eq. 2 + 3), the loss from task 2 on.

    The mean over both views of, for view 1 and cosines s over the temperature,
      L1 = mean_i [-s(q1_i, k2_i) + log(exp s(q1_i, k2_i) + sum_n exp s(q1_i, n))]
      L2 = mean_i [-s(p1_i, f1_i) + log(exp s(p1_i, f1_i) + sum_n exp s(p1_i, n))]
    n runs over `key_queue[1]` and `frozen_queue[1]`: the banks of the OTHER view.
    "paper" leaves the positive out of the denominator of L2, as Eq. 3 does.

    Args:
      q1, q2: f32[B, D], queries of both views.
      k1, k2: f32[B, D], momentum keys; no gradient.
      p1, p2: f32[B, D], predictions.
      f1, f2: f32[B, D], frozen features; no gradient.
      key_queue: f32[2, K, D], earlier keys, [0] from view 1; no gradient.
      frozen_queue: f32[2, K', D], earlier frozen features; no gradient.
      temperature, distill_temperature: divisors of the cosines of L1 and of L2.
      form: "code" or "paper"; Refused if neither.
      pn1: whether L1 has its pseudo-negatives, `frozen_queue` (Table 7).
      pn2: whether L2 has its pseudo-negatives, `key_queue` (Table 7).
      unit_queues: rows of the queues have unit length already; they are not normalised.
      logsumexp: `streaming.logsumexp`; None: the matrix of logits is formed.

    Returns:
      f32[], L1 + L2 in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import distill
      >>> q, k, p, f = (jnp.eye(2),) * 4  # the same in both views
      >>> keys, frozen = -jnp.ones((2, 3, 2)), jnp.ones((2, 3, 2))
      >>> round(float(distill.pnr_moco(q, q, k, k, p, p, f, f, keys, frozen)), 3)
      1.054
    """
    core.check_choice("form", form, _FORMS)
    chex.assert_shape([q1, q2, k1, k2, p1, p2, f1, f2], q1.shape)
    chex.assert_shape([key_queue, frozen_queue], (2, None, q1.shape[-1]))
    # [2, B, D] in the order of the banks to compare with: view 2 with bank 0.
    q = core.l2_normalize(jnp.stack([q2, q1])) / temperature
    p = core.l2_normalize(jnp.stack([p2, p1])) / distill_temperature
    k, f = jax.lax.stop_gradient((jnp.stack([k1, k2]), jnp.stack([f2, f1])))
    q_positive = jnp.sum(q * core.l2_normalize(k), axis=-1)
    p_positive = jnp.sum(p * core.l2_normalize(f), axis=-1)
    if not unit_queues:
        key_queue, frozen_queue = map(core.l2_normalize, (key_queue, frozen_queue))
    meet = functools.partial(_queue_logsumexp, logsumexp=logsumexp)
    q_keys, p_keys = meet(q, p if pn2 else None, key_queue)
    p_frozen, q_frozen = meet(p, q if pn1 else None, frozen_queue)
    first = jnp.logaddexp(q_positive, q_keys)
    if pn1:
        first = jnp.logaddexp(first, q_frozen)
    second = jnp.logaddexp(p_positive, p_frozen) if form == "code" else p_frozen
    if pn2:
        second = jnp.logaddexp(second, p_keys)
    return jnp.mean(first - q_positive) + jnp.mean(second - p_positive)


def _logsumexp_of_others(anchors, sets, temperature, logsumexp=None):
    """Return log sum exp s(anchors_i, set_j) over sets and j != i, f32[N].

    Args:
      anchors: f32[N, D], unit rows.
      sets: one or more f32[N, D] of unit rows; row i of each is left out for
        anchor i.
      temperature: divisor of the cosines.
      logsumexp: `streaming.logsumexp`; None: the matrix of logits is formed.
    """
    row = jnp.arange(len(anchors))

    def sum_others(rows):
        if logsumexp is not None:
            return logsumexp(anchors / temperature, rows, groups=(row, row))
        logits = core.dot(anchors, rows) / temperature
        return contrastive.logsumexp_of_others(logits)

    return functools.reduce(jnp.logaddexp, map(sum_others, sets))


def _queue_logsumexp(a, b, queue, logsumexp=None):
    """Return logarithms of sum_n exp(row . n), for `a` and, unless it is None, `b`.

    Args:
      a: f32[2, B, D], anchors over their temperature, by bank.
      b: f32[2, B, D] or None.
      queue: f32[2, K, D], unit rows; no gradient.
      logsumexp: `streaming.logsumexp`; None: the matrix of logits is formed.

    Returns:
      Two f32[2, B]; the second is None if `b` is.
    """
    queue = jax.lax.stop_gradient(queue)
    # One product for both reads the large queue only once.
    rows = a if b is None else jnp.stack([a, b], axis=2).reshape(2, -1, a.shape[-1])
    if logsumexp is None:
        totals = jax.nn.logsumexp(core.dot(rows, queue), axis=-1)
    else:
        totals = jnp.stack([logsumexp(*pair) for pair in zip(rows, queue, strict=True)])
    if b is None:
        return totals, None
    totals = totals.reshape(*a.shape[:2], 2)
    return totals[..., 0], totals[..., 1]
