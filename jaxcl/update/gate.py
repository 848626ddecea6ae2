"""Decide from pairs of answers whether an encoder lost accuracy, within a budget.

Each labelled image gives a pair: the reference is right or wrong, and so is the new
encoder. The loss is P(only the reference is right) - P(only the new encoder is right).

Sources:
- Tango, "Equivalence test and confidence interval for the difference in proportions for
  the paired-sample design", Statistics in Medicine 17, 1998: the score statistic.
- Berger and Boos, "P values maximized over a confidence set for the nuisance
  parameter", JASA 89, 1994: the exact p-value, see `loss_p_value`.
- Krichevsky and Trofimov, "The performance of universal encoding", IEEE Transactions on
  Information Theory 27, 1981: the predictor of outcomes, see `share_budget`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

HARMLESS, UNDECIDED, HARMFUL = "better or harmless", "undecided", "harmful"
ACCEPTED, ON_TRUST, ROLLED_BACK = "harmless", "undecided", "rolled back"  # outcomes
_PRIOR = {ACCEPTED: 1.0, ON_TRUST: 0.5, ROLLED_BACK: 0.5}
_POINTS = 32  # of the nuisance parameter at which the p-value is computed
_NUISANCE = 0.1  # share of an error that pays for leaving out other points
USUAL_CHANGE = 0.1  # share of images whose answer changes, if none is known


class Pairs(NamedTuple):
    """Counts of pairs of answers."""

    total: int
    lost: int  # only the reference is right
    gained: int  # only the new encoder is right

    @property
    def loss(self) -> float:
        """The observed loss of accuracy, a share; below 0: a gain."""
        return (self.lost - self.gained) / self.total


def count_pairs(before: np.ndarray, after: np.ndarray) -> Pairs:
    """Count pairs of answers, bool[N] each, of N > 0 images."""
    before, after = np.asarray(before, bool), np.asarray(after, bool)
    lost, gained = int((before & ~after).sum()), int((~before & after).sum())
    return Pairs(len(before), lost, gained)


def score(lost: np.ndarray, gained: np.ndarray, total: int, loss: float) -> np.ndarray:
    """Compute Tango's score statistic of a true loss: below 0 if less was lost.

    Args:
      lost, gained: counts of pairs.
      total: number of all pairs.
      loss: the true loss under the hypothesis, in (-1, 1).
    """
    linear = -lost - gained + (2 * total - lost + gained) * loss
    constant = -gained * loss * (1 - loss)
    root = np.sqrt(np.maximum(linear**2 - 8 * total * constant, 0))
    rate = (root - linear) / (4 * total)  # most likely share of gained pairs
    variance = np.maximum(total * (2 * rate + loss * (1 - loss)), 1e-12)
    return (lost - gained - total * loss) / np.sqrt(variance)


def _largest_lost(changed, total, loss, most) -> np.ndarray:
    """Find how many of `changed` pairs may be lost with a score of at most `most`.

    The score rises with the lost pairs. Returns -1 where no number will do.
    """
    low, high = np.full(len(changed), -1), changed.copy()
    while (low < high).any():
        middle = (low + high + 1) // 2
        fits = score(middle, changed - middle, total, loss) <= most
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return low


def loss_p_value(pairs: Pairs, loss: float, error: float) -> float:
    """Compute a p-value of the hypothesis that the true loss is `loss` or more.

    The probability of a score as low as the observed one is exact for each share of
    changed pairs. The p-value is its maximum over a confidence set of that share
    (Clopper-Pearson), plus the probability that the set misses the share.

    Args:
      pairs: the counts.
      loss: of the hypothesis, in (-1, 1).
      error: probability at which a test rejects; a tenth of it pays for the set.

    Returns:
      The p-value. A test that rejects when it is at most `error` errs no more often.
    """
    from scipy import special

    total, missed = pairs.total, _NUISANCE * error
    changed = pairs.lost + pairs.gained
    least, most = 0.0, 1.0
    if changed:
        least = special.betaincinv(changed, total - changed + 1, missed / 2)
    if changed < total:
        most = special.betaincinv(changed + 1, total - changed, 1 - missed / 2)
    least = max(least, abs(loss))
    if least > most:
        return missed
    shares = np.linspace(least, most, _POINTS)[:, None]
    # Counts of changed pairs beyond 9 deviations add less than 1e-17.
    spread = 9 * np.sqrt(total * np.array([least * (1 - least), most * (1 - most)]) + 9)
    ends = total * np.array([least, most]) + spread * [-1, 1]
    low, high = np.clip(ends, 0, total).astype(int)
    counts = np.arange(low, high + 1)
    bound = score(np.array(pairs.lost), np.array(pairs.gained), total, loss) + 1e-9
    largest = _largest_lost(counts, total, loss, bound)
    log_count = special.gammaln(total + 1) - special.gammaln(counts + 1)
    log_count -= special.gammaln(total - counts + 1)
    log_share = special.xlogy(counts, shares) + special.xlog1py(total - counts, -shares)
    lost_share = np.clip((1 + loss / np.maximum(shares, 1e-300)) / 2, 0, 1)
    below = special.bdtr(np.maximum(largest, 0), counts, lost_share)
    weights = np.exp(log_count + log_share) * (largest >= 0)
    return float((weights * below).sum(axis=1).max() + missed)


def bound_loss(pairs: Pairs, error: float) -> float:
    """Compute an upper bound of the true loss that is too low with `error` at most.

    It inverts `loss_p_value`, to a thousandth of a point.
    """
    low, high = pairs.loss, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        rejected = loss_p_value(pairs, middle, error) <= error
        low, high = (low, middle) if rejected else (middle, high)
    return high


def interval(pairs: Pairs, confidence: float = 0.95) -> tuple[float, float]:
    """Compute an interval of the true loss, each end with half of the error."""
    error = (1 - confidence) / 2
    swapped = Pairs(pairs.total, pairs.gained, pairs.lost)
    return -bound_loss(swapped, error), bound_loss(pairs, error)


def decide(pairs: Pairs, limit: float, error: float, confidence: float = 0.95) -> str:
    """Decide whether a loss is within a limit.

    Args:
      pairs: the counts.
      limit: most that may be lost, a share.
      error: probability of `HARMLESS` though the true loss is above the limit.
      confidence: of the interval whose lower end tells `HARMFUL`.

    Returns:
      `HARMLESS`, `HARMFUL` or `UNDECIDED`.
    """
    if not -1 < limit < 1:
        return HARMLESS if limit >= 1 else HARMFUL
    if pairs.loss < limit and loss_p_value(pairs, limit, error) <= error:
        return HARMLESS
    lower, swapped = (1 - confidence) / 2, Pairs(pairs.total, pairs.gained, pairs.lost)
    if pairs.loss > limit and loss_p_value(swapped, -limit, lower) <= lower:
        return HARMFUL
    return UNDECIDED


class PastUpdate(NamedTuple):
    """One update, as the budget sees it."""

    outcome: str  # ACCEPTED, ON_TRUST or ROLLED_BACK
    on_trust: bool  # whether an undecided update could be accepted
    renewed: bool = False  # whether it shares no labelled image with those before


class Share(NamedTuple):
    """The error of one update."""

    error: float  # probability that it may use
    left: dict[str, float]  # budget after each outcome


def _predict(counts, on_trust) -> dict[str, float]:
    """Predict the outcome of an update from the counts of earlier ones."""
    weights = {x: counts[x] + prior for x, prior in _PRIOR.items()}
    if not on_trust:
        del weights[ON_TRUST]
    return {x: weight / sum(weights.values()) for x, weight in weights.items()}


def share_budget(
    past: Sequence[PastUpdate],
    budget: float,
    *,
    on_trust: bool = False,
    renewed: bool = False,
) -> Share:
    """Compute the error that the next update may use.

    It is the budget times the probability, by a predictor, of all outcomes so far and
    then of "harmless". Each way to a first wrong acceptance is a word of outcomes. No
    such word begins another one, so the probabilities of all of them sum to 1 at most
    (Kraft), and their errors to the budget. This holds however the outcomes choose what
    is trained next, as long as nothing else about the labelled images does.

    An update with labelled images of its own gets its share back if it is harmless.

    Args:
      past: earlier updates, the first one first.
      budget: for all updates.
      on_trust: whether this update may be accepted though it is undecided.
      renewed: whether its labelled images have none in common with earlier updates.
    """
    counts = dict.fromkeys(_PRIOR, 0)
    start, words = budget, []  # budget when the labelled images were new; since then
    for update in (*past, PastUpdate("", on_trust, renewed)):
        if update.renewed and words:
            start, words = _settle(start, words), []
        chances = _predict(counts, update.on_trust)
        if update.outcome:
            words.append((update.outcome, chances))
            counts[update.outcome] += 1
    inside = start * np.prod([chance[outcome] for outcome, chance in words])
    left = {x: _settle(start, [*words, (x, chances)]) for x in chances}
    return Share(float(inside * chances[ACCEPTED]), left)


def _settle(start, words) -> float:
    """Compute the budget that is left after updates on the same labelled images."""
    if len(words) == 1:
        ((outcome, chances),) = words
        return start if outcome == ACCEPTED else start * (1 - chances[ACCEPTED])
    return float(start * np.prod([chances[outcome] for outcome, chances in words]))


def count_images(limit: float, error: float, change: float) -> int:
    """Count the images that show a harmless update to be harmless, four times in five.

    Args:
      limit: most that may be lost.
      error: of the update.
      change: share of images whose answer changes.
    """
    return int(np.ceil(change * (_deviations(error) / limit) ** 2))


def smallest_limit(total: int, error: float, change: float) -> float:
    """Compute the limit for which `count_images` gives `total`."""
    return float(_deviations(error) * np.sqrt(change / total))


def _deviations(error) -> float:
    from scipy import special

    return float(special.ndtri(1 - error) + special.ndtri(0.8))
