"""Losses of ICL: InfoNCE, and the change of InfoNCE that new data cause.

ICL (Ji et al., "Unbiased and Efficient Self-Supervised Incremental Contrastive
Learning", WSDM 2023, called P below). Let f = exp(cosine / temperature), f+ the f of an
anchor's positive, E_S the mean f over a set S of negatives, and K `num_negatives`:
  nce_one       -log[f+ / (f+ + K E_S)]                      (P, Eq. 1 and 2)
  change_ratio  r = (f+ + K E_new) / (f+ + K E_old)          (P, Eq. 6)
  nce_two       log(growth r + 1 - growth)                   (P, Eq. 7 and 8)
`growth` is P's alpha, new items over all items. P's Eq. 5 and 9 are sums, and Eq. 5
equals Eq. 6 only for sets of one size; these functions have Eq. 6 and means over
anchors. Sets may have any size: K weighs their mean, and a larger set counts no more.

The sum of NCE-I with old negatives and NCE-II is NCE-I with all negatives (P, Theorem
3). This is exact, for any K and temperature, if the sets are whole and `growth` is
  dN / (N + dN)      for N old and dN new items, an anchor's own positive among the N;
  dN / (N - 1 + dN)  if an old anchor's own item is left out;
  (dN - 1) / (N + dN - 1)  if a new anchor's own item is left out (`nce_one`).
It is not exact for drawn sets: the logarithm of a drawn mean is too low on average. In
the toy of tests/test_incremental.py the positive, a quarter of the old and half of the
new items have the cosine 0.5 and the others 0; growth is 0.3 and temperature 0.1. The
mean over all draws of M old and M new items, minus the loss over the whole sets:
                                       M = 2       7      31
  NCE-I + NCE-II, K = M              -0.0402 -0.0379 -0.0143
  NCE-I + NCE-II, K = 31             -0.3125 -0.0696 -0.0143  of 2.4173
  NCE-I of M drawn of all, K = 31    -0.7321 -0.1718 -0.0285  of 2.4173, retraining
  NCE-II alone, K = 31               +0.4974 +0.1660 +0.0249  of 0.2305
So "unbiased" is true of whole sets but not of a batch, for which NCE-II alone is too
high, by a tenth at M = 31. The bias shrinks like 1 / M; for K = M only once K E exceeds
f+.

Minimising NCE-II repels anchors from new negatives, but attracts them to old ones, and
to their positives only where E_new > E_old. Alone it favours that all old items are at
one point: far from the new ones it is log(1 - growth + growth / (K + 1)) there.

Gradients flow to all rows. Masks are bool or f32 of zeros and ones. A masked row has no
effect on values and gradients, even if it is nan. All work in float32 at least
(bfloat16 is cast first), with logarithms, so that low temperatures cause no overflow.
"""

import chex
import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.errors import Refused

# The logarithm of an empty mean: -inf would have no gradient.
_ABSENT = -1e30


def nce_one(
    anchors: jax.Array,
    positives: jax.Array,
    negatives: jax.Array,
    *,
    temperature: float = 0.1,
    num_negatives: int = 31,
    with_positive: bool = True,
    more_negatives: jax.Array | None = None,
    growth: float | jax.Array | None = None,
    mask: jax.Array | None = None,
    negative_mask: jax.Array | None = None,
    more_mask: jax.Array | None = None,
) -> jax.Array:
    """Compute NCE-I: InfoNCE with a mean over negatives (ICL Eq. 1 and 2).

    The mean over anchors of log(1 + K E / f+). With `more_negatives`, for anchors among
    the new items, E is
      with `growth`: (1 - growth) E_negatives + growth E_more, the mean over the grown
        set for any numbers of rows drawn from the two parts;
      without: the mean over the rows of both, as if concatenated. This is the released
        code if of K negatives floor((1 - growth) K) are old.
    If one of the two sets has no row, E is the mean over the other.

    Args:
      anchors: f32[B, D].
      positives: f32[B, D], row i belongs to anchor i.
      negatives: f32[M, D], shared by all anchors, or f32[B, M, D]. For the anchors' own
        batch give `positives`, with `others(B)` as `negative_mask`.
      temperature: divisor of the cosines, P's tau.
      num_negatives: K, factor of the mean; 31 is a batch of 32 less one.
      with_positive: the denominator has f+; without it an anchor's loss is
        log(K E / f+), the loss of GraphCL (You et al., NeurIPS 2020).
      more_negatives: f32[M', D] or f32[B, M', D], a second set: the new items;
        `negatives` are then the old ones.
      growth: number in [0, 1) or f32[], the share of `more_negatives` in the mean.
      mask: bool or f32[B], anchors that exist; None: all.
      negative_mask, more_mask: bool or f32, [M] or [B, M], rows that are negatives (of
        each anchor); None: all.

    Returns:
      f32[], in nats, the mean over the anchors that exist; 0 if none does. An anchor
      without any negative counts 0.

    Raises:
      Refused: a number is out of its range, or `growth` or `more_mask` is given
        without `more_negatives`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import incremental
      >>> anchors, negatives = jnp.eye(1, 2), jnp.array([[0.8, 0.6], [0.6, 0.8]])
      >>> round(float(incremental.nce_one(anchors, anchors, negatives)), 3)
      1.218
    """
    _check_numbers(temperature, num_negatives, growth)
    sets = [(negatives, negative_mask)]
    if more_negatives is not None:
        sets.append((more_negatives, more_mask))
    elif growth is not None or more_mask is not None:
        raise Refused(
            f"more_negatives=None: must be given with growth={growth}, "
            f"more_mask={'None' if more_mask is None else 'an array'}"
        )
    by_set = _log_odds(anchors, positives, sets, temperature, num_negatives, mask)
    odds = by_set[0][0] if more_negatives is None else _mixture(*by_set, growth=growth)
    if with_positive:
        return core.masked_mean(jax.nn.softplus(odds), mask)
    present = odds > _ABSENT / 2
    return core.masked_mean(jnp.where(present, odds, 0.0), mask)


def change_ratio(
    anchors: jax.Array,
    positives: jax.Array,
    old_negatives: jax.Array,
    new_negatives: jax.Array,
    *,
    temperature: float = 0.1,
    num_negatives: int = 31,
    log: bool = False,
    mask: jax.Array | None = None,
    old_mask: jax.Array | None = None,
    new_mask: jax.Array | None = None,
) -> jax.Array:
    """Compute how new negatives change each anchor's denominator (ICL Eq. 6).

    r = (f+ + K E_new) / (f+ + K E_old), where f+ is exp(cosine / temperature) of anchor
    and positive. E_old and E_new are its means over the old and the new negatives; r is
    1 if they are equal.

    Args:
      anchors: f32[B, D].
      positives: f32[B, D], row i belongs to anchor i.
      old_negatives, new_negatives: f32[M, D], shared by all anchors, or f32[B, M, D];
        M may differ.
      temperature: divisor of the cosines, P's tau.
      num_negatives: K, factor of the means.
      log: return log r, which is finite even if r is not: r may reach
        exp(2 / temperature), beyond float32 for temperatures below 0.023.
      mask: bool or f32[B], anchors that exist; None: all.
      old_mask, new_mask: bool or f32, [M] or [B, M], rows that are negatives (of each
        anchor); None: all.

    Returns:
      f32[B]; 1 for anchors that do not exist or have no negative in one of the sets,
      since nothing is known of their change.

    Raises:
      Refused: a number is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import incremental
      >>> anchors = jnp.array([[1.0, 0.0]])
      >>> old, new = jnp.array([[0.6, 0.8]]), jnp.array([[0.8, 0.6]])
      >>> round(float(incremental.change_ratio(anchors, anchors, old, new)[0]), 3)
      3.314
    """
    _check_numbers(temperature, num_negatives)
    sets = (old_negatives, old_mask), (new_negatives, new_mask)
    (old, old_count), (new, new_count) = _log_odds(
        anchors, positives, sets, temperature, num_negatives, mask
    )
    ratio = jax.nn.softplus(new) - jax.nn.softplus(old)
    ratio = jnp.where((old_count > 0) & (new_count > 0), ratio, 0.0)
    return ratio if log else jnp.exp(ratio)


def nce_two(
    anchors: jax.Array,
    positives: jax.Array,
    old_negatives: jax.Array,
    new_negatives: jax.Array,
    *,
    growth: float | jax.Array,
    temperature: float = 0.1,
    num_negatives: int = 31,
    mask: jax.Array | None = None,
    old_mask: jax.Array | None = None,
    new_mask: jax.Array | None = None,
) -> jax.Array:
    """Compute NCE-II: the change that new items make to an old anchor's loss.

    The mean over anchors of log(growth r + 1 - growth), with r the `change_ratio` (P,
    Eq. 7-8). It is 0 if nothing is new or nothing changes, and negative, but above
    log(1 - growth), if new items are less similar to the anchor than old ones.

    Args:
      anchors: f32[B, D], old items.
      positives: f32[B, D], row i belongs to anchor i.
      old_negatives, new_negatives: f32[M, D], shared by all anchors, or f32[B, M, D];
        M may differ. For the anchors' own batch give `positives`, with `others(B)` as
        `old_mask`.
      growth: number in [0, 1) or f32[], P's alpha: new items over all items.
      temperature: divisor of the cosines, P's tau.
      num_negatives: K, factor of the means.
      mask: bool or f32[B], anchors that exist; None: all.
      old_mask, new_mask: bool or f32, [M] or [B, M], rows that are negatives (of each
        anchor); None: all.

    Returns:
      f32[], in nats, the mean over the anchors that exist; 0 if none does. An anchor
      without a negative in one of the sets counts 0.

    Raises:
      Refused: a number is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import incremental
      >>> anchors = jnp.array([[1.0, 0.0]])
      >>> old, new = jnp.array([[0.6, 0.8]]), jnp.array([[0.8, 0.6]])
      >>> round(float(incremental.nce_two(anchors, anchors, old, new, growth=0.2)), 3)
      0.38
    """
    _check_numbers(temperature, num_negatives, growth)
    ratio = change_ratio(
        anchors,
        positives,
        old_negatives,
        new_negatives,
        temperature=temperature,
        num_negatives=num_negatives,
        log=True,
        mask=mask,
        old_mask=old_mask,
        new_mask=new_mask,
    )
    growth = jnp.asarray(growth, ratio.dtype)
    rows = jnp.logaddexp(jnp.log(growth) + ratio, jnp.log1p(-growth))
    # Without a change the two logarithms need not cancel to the last digit.
    rows = jnp.where(ratio == 0, growth * ratio, rows)
    return core.masked_mean(rows, mask)


def others(size: int, count: int | None = None) -> jax.Array:
    """Mark the rows of a batch that are negatives of each row.

    The negatives of row i are all other rows, or the first `count` rows of the batch,
    where row `count` takes the place of row i, as in ICL's released code.

    Args:
      size: rows of the batch.
      count: negatives of each row; None: size - 1.

    Returns:
      bool[size, size], True at [i, j] if row j is a negative of row i.

    Raises:
      Refused: the batch has fewer than `count` other rows.

    Example:
      >>> from jaxcl.losses import incremental
      >>> incremental.others(3).astype(int).tolist()
      [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    """
    count = size - 1 if count is None else count
    if not 0 <= count < size:
        raise Refused(f"count={count}: must be in [0, {size}), the size of the batch")
    row = jnp.arange(size)[:, None]
    column = jnp.arange(size)[None, :]
    return (column < count + (row < count)) & (row != column)


def _check_numbers(temperature=1.0, num_negatives=1, growth=None):
    """Refuse Python numbers out of range; arrays may be unknown on the host."""
    for field, value in [
        ("temperature", temperature),
        ("num_negatives", num_negatives),
    ]:
        if isinstance(value, int | float) and not value > 0:
            raise Refused(field, value, "must be above 0")
    if isinstance(growth, int | float) and not 0 <= growth < 1:
        raise Refused("growth", growth, "must be in [0, 1), new items over all items")


def _log_odds(anchors, positives, sets, temperature, num_negatives, mask):
    """Return log(K E / f+), f32[B], and the number of rows, for each set.

    Args:
      sets: pairs of negatives and their mask, or None.
    """
    chex.assert_rank([anchors, positives], 2)
    chex.assert_equal_shape([anchors, positives])
    real = jnp.ones(len(anchors), bool)
    if mask is not None:
        chex.assert_shape(mask, (len(anchors),))
        real = mask.astype(bool)
    anchors, positives = (_unit_rows(x, real) for x in (anchors, positives))
    positive = jnp.sum(anchors * positives, axis=-1)
    by_set = []
    for rows, exists in sets:
        cosines, exists = _cosines(anchors, rows, exists, real)
        logits = jnp.where(exists, cosines / temperature, _ABSENT)
        count = jnp.sum(exists, axis=-1).astype(logits.dtype)
        mean = jax.nn.logsumexp(logits, axis=-1) - jnp.log(jnp.maximum(count, 1))
        weight = jnp.log(jnp.asarray(num_negatives, mean.dtype))
        odds = weight + mean - positive / temperature
        by_set.append((jnp.where(count > 0, odds, _ABSENT), count))
    return by_set


def _cosines(anchors, rows, exists, real):
    """Return cosines f32[B, M] of anchors and negatives, and which of them exist.

    Args:
      anchors: f32[B, D], unit rows.
      rows: f32[M, D] or f32[B, M, D].
      exists: bool or f32, [M] or [B, M], or None.
      real: bool[B], anchors that exist.
    """
    chex.assert_rank(rows, {2, 3})
    shape = len(anchors), rows.shape[-2]
    shared = rows.ndim == 2
    chex.assert_shape(rows, (*(shape[1:] if shared else shape), anchors.shape[-1]))
    if exists is None:
        exists = jnp.ones(shape, bool)
    else:
        chex.assert_shape(exists, shape[2 - exists.ndim :])
        exists = jnp.broadcast_to(exists.astype(bool), shape)
    exists = exists & real[:, None]
    if shared:
        rows = _unit_rows(rows, jnp.any(exists, axis=0))
        return core.dot(anchors, rows), exists
    rows = _unit_rows(rows, exists)
    return core.dot(anchors[:, None], rows)[:, 0], exists


def _unit_rows(rows, exists):
    """Scale rows to length 1; rows that do not exist become zeros."""
    return core.l2_normalize(jnp.where(exists[..., None], rows, 0))


def _mixture(first, second, growth):
    """Return the logarithm of (1 - growth) exp(first odds) + growth exp(second odds).

    Args:
      first, second: odds f32[B] and number of rows f32[B].
      growth: None: all rows have the same weight.
    """
    (odds, count), (more_odds, more_count) = first, second
    if growth is None:
        share = more_count / jnp.maximum(count + more_count, 1)
    else:
        share = jnp.where(count > 0, jnp.asarray(growth, odds.dtype), 1.0)
        share = jnp.where(more_count > 0, share, 0.0)
    return jnp.logaddexp(jnp.log1p(-share) + odds, jnp.log(share) + more_odds)
