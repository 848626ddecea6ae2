"""Distillation from the frozen network of the previous task.

CaSSLe (Fini et al., CVPR 2022) and PNR (Cha et al., ICML 2024), contrastive
variants. Names follow the papers: `z` or `q` are the current projections of a
view, `p` the predictor's output g(z), `f` the frozen network's projection of
the same image, `k` the momentum network's. No gradient reaches `f`, `k` and the
queues. Where paper and released code differ, `form` chooses; "code" is the
default, since it is what the published numbers were made with.
"""

import chex
import jax
import jax.numpy as jnp

from jaxcl.losses import contrastive


def _check_form(form):
    if form not in ("code", "paper"):
        raise ValueError(f"form is {form!r}, allowed are 'code' and 'paper'")


def cassle_contrastive(p1, p2, f1, f2, *, temperature=0.2, form="code"):
    """Contrastive distillation, as CaSSLe has it, over the 2B rows of both views.

    With s the cosine over the temperature, row i of P belongs to row i of F, the
    same view of the same image:
      "code": half of mean_i [-s(P_i, F_i) + log sum_j exp s(P_i, F_j)] and half
        of the same with P and F swapped; all 2B columns are in the sum.
      "paper": mean_i [-s(P_i, F_i) + log sum_{j != i} exp s(P_i, F_j)], with the
        negatives N_2 of PNR Eq. 3.

    Args:
      p1, p2: f32[B, D], predictions of both views.
      f1, f2: f32[B, D], frozen features of both views; no gradient.
      temperature: divides the cosines.
      form: "code" or "paper".

    Returns:
      f32[], in nats.

    Raises:
      ValueError: if `form` is neither.
    """
    _check_form(form)
    chex.assert_rank(p1, 2)
    chex.assert_equal_shape([p1, p2, f1, f2])
    p = contrastive.l2_normalize(contrastive.interleave(p1, p2))
    f = _constant(contrastive.interleave(f1, f2))
    logits = contrastive.dot(p, f) / temperature
    positive = jnp.sum(p * f, axis=-1) / temperature
    if form == "paper":
        return jnp.mean(contrastive.logsumexp_of_others(logits) - positive)
    forward = jax.nn.logsumexp(logits, axis=1) - positive
    backward = jax.nn.logsumexp(logits, axis=0) - positive
    return (jnp.mean(forward) + jnp.mean(backward)) / 2


def pnr_simclr(z1, z2, p1, p2, f1, f2, *, temperature=0.2, pn1=True, pn2=True):
    """PNR with SimCLR, PNR Eq. 2 + 3; it replaces the base loss from task 2 on.

    Z, P, F are the 2B rows of both views and s the cosine over the temperature:
      L1 = mean_i [-s(Z_i, Z_pos)
                   + log(sum_{j != i} exp s(Z_i, Z_j) + exp s(Z_i, F_j))]
      L2 = mean_i [-s(P_i, F_i)
                   + log(sum_{j != i} exp s(P_i, F_j) + exp s(P_i, Z_j))]
    pos is the other view of the same image. The positive is in the denominator
    of L1 and not in that of L2, which can be negative. Paper and code agree.
    Z as a pseudo-negative in L2 does carry gradient.

    Args:
      z1, z2: f32[B, D], projections of both views.
      p1, p2: f32[B, D], predictions of both views.
      f1, f2: f32[B, D], frozen features of both views; no gradient.
      temperature: divides the cosines of both terms.
      pn1: whether L1 has its pseudo-negatives, F (the ablation of Table 7).
      pn2: whether L2 has its pseudo-negatives, Z (the ablation of Table 7).

    Returns:
      f32[], L1 + L2 in nats.
    """
    chex.assert_rank(z1, 2)
    chex.assert_equal_shape([z1, z2, p1, p2, f1, f2])
    z1, z2 = contrastive.l2_normalize(z1), contrastive.l2_normalize(z2)
    z = contrastive.interleave(z1, z2)
    p = contrastive.l2_normalize(contrastive.interleave(p1, p2))
    f = _constant(contrastive.interleave(f1, f2))

    def others(anchors, columns):
        logits = contrastive.dot(anchors, columns) / temperature
        return contrastive.logsumexp_of_others(logits)

    first = others(z, z)
    if pn1:
        first = jnp.logaddexp(first, others(z, f))
    second = others(p, f)
    if pn2:
        second = jnp.logaddexp(second, others(p, z))
    positive = jnp.mean(jnp.sum(z1 * z2, axis=-1)) + jnp.mean(jnp.sum(p * f, axis=-1))
    return jnp.mean(first) + jnp.mean(second) - positive / temperature


def pnr_moco(
    q1,
    q2,
    k1,
    k2,
    p1,
    p2,
    f1,
    f2,
    key_queue,
    frozen_queue,
    *,
    temperature=0.2,
    distill_temperature=0.2,
    form="code",
    pn1=True,
    pn2=True,
    unit_queues=False,
):
    """PNR with MoCo v2+, PNR Eq. 2 + 3; it replaces the base loss from task 2 on.

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
      temperature, distill_temperature: divide the cosines of L1 and of L2.
      form: "code" or "paper"; ValueError if neither.
      pn1: whether L1 has its pseudo-negatives, `frozen_queue` (Table 7).
      pn2: whether L2 has its pseudo-negatives, `key_queue` (Table 7).
      unit_queues: their rows have unit length already, and stay as they are.

    Returns:
      f32[], L1 + L2 in nats.
    """
    _check_form(form)
    chex.assert_shape([q1, q2, k1, k2, p1, p2, f1, f2], q1.shape)
    chex.assert_shape([key_queue, frozen_queue], (2, None, q1.shape[-1]))
    # [2, B, D] by the bank that is met: view 2 comes first, to meet bank 0.
    q = contrastive.l2_normalize(jnp.stack([q2, q1])) / temperature
    p = contrastive.l2_normalize(jnp.stack([p2, p1])) / distill_temperature
    q_positive = jnp.sum(q * _constant(jnp.stack([k1, k2])), axis=-1)
    p_positive = jnp.sum(p * _constant(jnp.stack([f2, f1])), axis=-1)
    if not unit_queues:
        key_queue, frozen_queue = map(
            contrastive.l2_normalize, (key_queue, frozen_queue)
        )
    q_keys, p_keys = _queue_logsumexp(q, p if pn2 else None, key_queue)
    p_frozen, q_frozen = _queue_logsumexp(p, q if pn1 else None, frozen_queue)
    first = jnp.logaddexp(q_positive, q_keys)
    if pn1:
        first = jnp.logaddexp(first, q_frozen)
    second = jnp.logaddexp(p_positive, p_frozen) if form == "code" else p_frozen
    if pn2:
        second = jnp.logaddexp(second, p_keys)
    return jnp.mean(first - q_positive) + jnp.mean(second - p_positive)


def _constant(x):
    """Unit rows that carry no gradient."""
    return contrastive.l2_normalize(jax.lax.stop_gradient(x))


def _queue_logsumexp(a, b, queue):
    """Logarithms of sum_n exp(row . n), for `a` and, unless it is None, `b`.

    Args:
      a: f32[2, B, D], anchors over their temperature, by bank.
      b: f32[2, B, D] or None.
      queue: f32[2, K, D], unit rows; no gradient.

    Returns:
      Two f32[2, B]; the second is None if `b` is.
    """
    queue = jax.lax.stop_gradient(queue)
    if b is None:
        return jax.nn.logsumexp(contrastive.dot(a, queue), axis=-1), None
    # One product reads the queue once for both; K is large, so that counts.
    rows = jnp.stack([a, b], axis=2)
    logits = contrastive.dot(rows.reshape(2, -1, rows.shape[-1]), queue)
    result = jax.nn.logsumexp(logits, axis=-1).reshape(rows.shape[:3])
    return result[..., 0], result[..., 1]
