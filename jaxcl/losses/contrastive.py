"""Contrastive losses over a batch of embeddings.

Rows are examples, and a batch is the global batch: under `jit` over a mesh the
compiler adds the collectives. Every loss L2-normalises its rows, works in float32 at
least (bfloat16 is cast first) and returns one scalar.

A positive that is in the denominator is taken from the same matrix of logits, and
subtracted row by row. So no rounding makes a loss negative at a low temperature, where
the difference of two means, or a cosine computed twice, is wrong by 1e-7 / temperature.

The argument `logsumexp` of a loss may be `streaming.logsumexp`, which needs no matrix
of logits. The positive is then added to the sum over all others, which keeps the bound,
too.
"""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.errors import Refused

# Logit of a row that does not exist. With -inf the gradient would be nan if none does.
_ABSENT = -1e30


def interleave(a: jax.Array, b: jax.Array) -> jax.Array:
    """Interleave two views [B, D] as [2B, D]: rows 2i and 2i + 1 are example i.

    Args:
      a: f32[B, D], view 1.
      b: f32[B, D], view 2.

    Returns:
      f32[2B, D].
    """
    # Concatenation would move rows between devices; this keeps each in place.
    return jnp.stack([a, b], axis=1).reshape(-1, a.shape[-1])


def logsumexp_of_others(logits: jax.Array) -> jax.Array:
    """Compute the logarithm of sum_{j != i} exp(logits[i, j]).

    Args:
      logits: f32[N, N].

    Returns:
      f32[N], -inf if N = 1.
    """
    itself = jnp.eye(logits.shape[0], dtype=bool)
    return jax.nn.logsumexp(jnp.where(itself, -jnp.inf, logits), axis=-1)


def pick_entries(logits: jax.Array, columns: jax.Array) -> jax.Array:
    """Pick one entry of each row, logits[i, columns[i]], exactly.

    Args:
      logits: f32[N, M].
      columns: i32[N].

    Returns:
      f32[N].
    """
    # A masked sum needs no gather, which would send rows between devices.
    chosen = columns[:, None] == jnp.arange(logits.shape[1])
    return jnp.sum(jnp.where(chosen, logits, 0), axis=1)


def partner_rows(count: int) -> jax.Array:
    """Return the row of the other view for each row of `interleave`, i32[count]."""
    return jnp.arange(count) ^ 1


def nt_xent(
    z1: jax.Array,
    z2: jax.Array,
    *,
    temperature: float = 0.2,
    logsumexp: Callable | None = None,
) -> jax.Array:
    """Compute NT-Xent, the loss of SimCLR (Chen et al., ICML 2020, Eq. 1).

    The mean over all 2B rows i of -s(i, pos) + log sum_{j != i} exp s(i, j),
    where s is the cosine over the temperature and pos the other view of the
    same example. The positive is in the denominator, the row itself is not.

    Args:
      z1: f32[B, D], embeddings of view 1; row i belongs with row i of `z2`.
      z2: f32[B, D], embeddings of view 2.
      temperature: divisor of the cosines.
      logsumexp: `streaming.logsumexp`; None: the matrix of logits is formed.

    Returns:
      f32[], in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import contrastive
      >>> z = jnp.eye(2)
      >>> round(float(contrastive.nt_xent(z, z, temperature=0.5)), 3)
      0.24
    """
    chex.assert_rank(z1, 2)
    chex.assert_equal_shape([z1, z2])
    z1, z2 = core.l2_normalize(z1), core.l2_normalize(z2)
    rows = interleave(z1, z2)
    if logsumexp is not None:
        positive = jnp.sum(rows * interleave(z2, z1), axis=-1) / temperature
        example = jnp.arange(len(rows)) // 2
        negative = logsumexp(rows / temperature, rows, groups=(example, example))
        return jnp.mean(jnp.logaddexp(negative, positive) - positive)
    logits = core.dot(rows, rows) / temperature
    positive = pick_entries(logits, partner_rows(len(rows)))
    return jnp.mean(logsumexp_of_others(logits) - positive)


def info_nce(
    anchors: jax.Array,
    positives: jax.Array,
    negatives: jax.Array | None = None,
    *,
    temperature: float = 0.2,
    positive_in_denominator: bool = True,
    unit_negatives: bool = False,
    negative_mask: jax.Array | None = None,
    examples: jax.Array | None = None,
    logsumexp: Callable | None = None,
) -> jax.Array:
    """Compute InfoNCE against shared negatives (van den Oord 2018; MoCo, Eq. 1).

    The mean over rows of -s(a, p) + log(e exp s(a, p) + sum_k exp s(a, n_k)),
    with s the cosine over the temperature, and e 1 or 0. Gradients flow to all
    inputs: the caller stops them for keys and queues.

    Args:
      anchors: f32[N, D].
      positives: f32[N, D], row i belongs to anchor i.
      negatives: f32[K, D], shared by all anchors; None: only rows of the batch are
        negatives.
      temperature: divisor of the cosines.
      positive_in_denominator: False gives the decoupled form (e = 0), which
        can be negative.
      unit_negatives: the negatives have unit length already, as in a queue, and are not
        normalised again, which takes time for a large queue.
      negative_mask: bool[K], rows of `negatives` that exist; None: all.
      examples: i32[N], the example that each row is a view of; the positives of other
        examples are negatives too. None: they are not.
      logsumexp: `streaming.logsumexp`; None: the matrix of logits is formed.

    Returns:
      f32[], in nats. An anchor without any negative counts 0.

    Raises:
      Refused: neither `negatives` nor `examples` is given.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import contrastive
      >>> anchors, queue = jnp.eye(1, 2), jnp.array([[0.0, 1.0], [-1.0, 0.0]])
      >>> loss = contrastive.info_nce(anchors, anchors, queue, temperature=0.5)
      >>> round(float(loss), 3)
      0.143
    """
    chex.assert_rank([anchors, positives], 2)
    chex.assert_equal_shape([anchors, positives])
    if negatives is None and examples is None:
        raise Refused("negatives=None, examples=None: one of them must be given")
    anchors, positives = core.l2_normalize(anchors), core.l2_normalize(positives)
    positive = jnp.sum(anchors * positives, axis=-1) / temperature

    def sum_over(rows, exists=None, groups=None):
        """Compute log-sum-exps over rows that exist and are of other groups, f32[N]."""
        if logsumexp is not None:
            scaled = anchors / temperature
            return logsumexp(scaled, rows, exists=exists, groups=groups)
        logits = core.dot(anchors, rows) / temperature
        if groups is not None:
            exists = groups[0][:, None] != groups[1]
        if exists is not None:
            logits = jnp.where(exists, logits, _ABSENT)
        return jax.nn.logsumexp(logits, axis=-1)

    totals = []
    if negatives is not None:
        chex.assert_rank(negatives, 2)
        negatives = negatives if unit_negatives else core.l2_normalize(negatives)
        totals.append(sum_over(negatives, exists=negative_mask))
    if examples is not None:
        totals.append(sum_over(positives, groups=(examples, examples)))
    denominator = functools.reduce(jnp.logaddexp, totals)
    lonely = denominator < _ABSENT / 2
    if positive_in_denominator:
        denominator = jnp.logaddexp(positive, denominator)
    return jnp.mean(jnp.where(lonely, 0.0, denominator - positive))


def nnclr(
    z1: jax.Array,
    z2: jax.Array,
    o1: jax.Array,
    o2: jax.Array,
    support: jax.Array,
    *,
    temperature: float = 0.1,
) -> jax.Array:
    """Compute NNCLR: neighbours are anchors (Dwibedi et al., ICCV 2021, Eq. 2 and 3).

    With n(z) the row of the support set that is nearest to z, and s the cosine over the
    temperature, half of
      mean_i [-s(n(z1_i), o2_i) + log sum_k exp s(n(z1_i), o2_k)]
    and half of the same with the views swapped. No gradient reaches z and the support.

    Args:
      z1, z2: f32[B, D], projections of both views.
      o1, o2: f32[B, D], the predictor's outputs for both views.
      support: f32[K, D], unit rows.
      temperature: divisor of the cosines.

    Returns:
      f32[], in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import contrastive
      >>> z, support = jnp.eye(2), jnp.eye(2)
      >>> loss = contrastive.nnclr(z, z, z, z, support, temperature=1.0)
      >>> round(float(loss), 3)
      0.313
    """
    chex.assert_rank([z1, support], 2)
    chex.assert_equal_shape([z1, z2, o1, o2])
    support = jax.lax.stop_gradient(support)
    examples = jnp.arange(len(z1))

    def match_neighbours(z, o):
        nearest = jnp.argmax(core.dot(core.l2_normalize(z), support), axis=1)
        return info_nce(support[nearest], o, temperature=temperature, examples=examples)

    return (match_neighbours(z1, o2) + match_neighbours(z2, o1)) / 2


def diet(logits: jax.Array, index: jax.Array, *, smoothing: float = 0.3) -> jax.Array:
    """Compute DIET: each image is a class of its own (Balestriero, 2023, Eq. 1).

    With p = softmax(logits), the mean over rows and views of
      -(1 - smoothing) log p_index - smoothing mean_k log p_k.

    Args:
      logits: f32[B, V, N], for each of V views a logit for each of N images.
      index: i32[B], the number of each row's image.
      smoothing: share of each label spread evenly, PyTorch's `label_smoothing`.

    Returns:
      f32[], in nats; log N where all logits are equal.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import contrastive
      >>> loss = contrastive.diet(jnp.zeros((1, 1, 2)), jnp.array([1]))
      >>> round(float(loss), 3)
      0.693
    """
    chex.assert_rank([logits, index], [3, 1])
    chex.assert_equal_shape_prefix([logits, index], 1)
    logs = jax.nn.log_softmax(core.at_least_float32(logits), axis=-1)
    targets = jnp.take_along_axis(logs, index[:, None, None], axis=-1)
    return -(1 - smoothing) * jnp.mean(targets) - smoothing * jnp.mean(logs)


def m_hml(
    anchors: jax.Array,
    positives: jax.Array,
    memory: jax.Array,
    *,
    weight: float = 1.0,
    temperature: float = 0.5,
    mask: jax.Array | None = None,
    logsumexp: Callable | None = None,
) -> jax.Array:
    """Compute memory-integrated Hebbian metric learning, DUEL's loss.

    weight * I_h - I_d (Choi et al., "DUEL", AAAI 2024, Eq. 5) with the duplication
    probability q = exp((cosine - 1) / temperature). I_h is the mean of -log q of the
    positives, I_d the mean over anchors of -log of the mean q over the memory. With
    weight 1 it is `info_nce` without the positive in the denominator, minus log K.

    Args:
      anchors: f32[N, D].
      positives: f32[N, D], row i belongs to anchor i.
      memory: f32[K, D].
      weight: lambda, 1 / (number of classes * probability of the rarest) in theory.
      temperature: tau of q.
      mask: bool[K], rows of the memory that exist; None: all.
      logsumexp: `streaming.logsumexp`; None: the matrix of logits is formed.

    Returns:
      f32[], in nats; I_d is 0 while the memory is empty.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import contrastive
      >>> anchors, memory = jnp.eye(1, 2), jnp.array([[0.0, 1.0], [-1.0, 0.0]])
      >>> round(float(contrastive.m_hml(anchors, anchors, memory)), 3)
      -2.566
    """
    chex.assert_rank([anchors, positives, memory], 2)
    chex.assert_equal_shape([anchors, positives])
    anchors, positives = core.l2_normalize(anchors), core.l2_normalize(positives)
    # Rounding may bring the cosine of equal rows above 1.
    hebbian = jnp.maximum(1 - jnp.sum(anchors * positives, axis=-1), 0) / temperature
    memory, count = core.l2_normalize(memory), len(memory)
    if mask is not None:
        count = jnp.sum(mask)
    if logsumexp is None:
        logits = (core.dot(anchors, memory) - 1) / temperature
        if mask is not None:
            logits = jnp.where(mask, logits, _ABSENT)
        total = jax.nn.logsumexp(logits, axis=-1)
    else:
        total = logsumexp(anchors / temperature, memory, exists=mask) - 1 / temperature
    log_mean_q = total - jnp.log(count)
    log_mean_q = jnp.where(count > 0, log_mean_q, 0.0)
    return weight * jnp.mean(hebbian) + jnp.mean(log_mean_q)


def sup_con(
    z: jax.Array,
    labels: jax.Array,
    *,
    temperature: float = 0.1,
    anchor_mask: jax.Array | None = None,
    example_mask: jax.Array | None = None,
) -> jax.Array:
    """Compute the supervised contrastive loss (Khosla et al., 2020, Eq. 2, L_out).

    For row i, the mean over its positives p (all other rows of its label) of
    -s(i, p) + log sum_{j != i} exp s(i, j). A row without positives counts 0.
    With `anchor_mask` only the chosen rows are anchors; all rows remain positives and
    negatives (the asymmetric loss of Co2L, ICCV 2021).

    Args:
      z: f32[N, D], every row a view.
      labels: i32[N].
      temperature: divisor of the cosines.
      anchor_mask: bool or f32[N], None for all rows. The mean is over all
        rows that exist; a masked one counts 0.
      example_mask: bool or f32[N], rows that exist; None for all. The others are
        neither anchors nor positives nor negatives, even if they are nan.

    Returns:
      f32[], in nats; 0 if no row exists.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import contrastive
      >>> z = jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
      >>> labels = jnp.array([0, 0, 1])
      >>> round(float(contrastive.sup_con(z, labels, temperature=0.5)), 3)
      0.304
    """
    chex.assert_rank([z, labels], [2, 1])
    chex.assert_equal_shape_prefix([z, labels], 1)
    if example_mask is not None:
        chex.assert_equal_shape([example_mask, labels])
        exists = example_mask.astype(bool)
        z = jnp.where(exists[:, None], z, 0)
    rows = core.l2_normalize(z)
    logits = core.dot(rows, rows) / temperature
    itself = jnp.eye(rows.shape[0], dtype=bool)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    if example_mask is not None:
        positive = positive & exists
        logits = jnp.where(exists, logits, -jnp.inf)
    count = jnp.sum(positive, axis=-1)
    pairs = logsumexp_of_others(logits)[:, None] - logits
    total = jnp.sum(jnp.where(positive, pairs, 0.0), axis=-1)
    loss = jnp.where(count > 0, total / jnp.maximum(count, 1), 0.0)
    if anchor_mask is not None:
        chex.assert_equal_shape([anchor_mask, labels])
        loss = loss * anchor_mask
    return core.masked_mean(loss, example_mask)
