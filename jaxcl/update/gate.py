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
# Outcomes: proven harmless or harmful, accepted on trust, rolled back though unproven
ACCEPTED, REJECTED, ON_TRUST, ROLLED_BACK = OUTCOMES = (
    "harmless",
    "harmful",
    "undecided",
    "rolled back",
)
# Shares of the part that a proven outcome has: the error "harmless", and the
# continuation after "harmful"
_HARMLESS, _HARMFUL = 0.75, 0.25
_FALSE_ALARM = 0.01  # share of the error for calling a harmless update harmful
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
    """Count the images that two encoders answer alike, or only one answers right."""
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
      loss: loss of the hypothesis, in (-1, 1).
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


def decide(pairs: Pairs, limit: float, error: float, alarm: float = 0.025) -> str:
    """Decide whether a loss is within a limit.

    Args:
      pairs: the counts.
      limit: most that may be lost, a share.
      error: probability of `HARMLESS` though the true loss is above the limit.
      alarm: probability of `HARMFUL` though the true loss is within the limit.

    Returns:
      `HARMLESS`, `HARMFUL` or `UNDECIDED`.
    """
    if not -1 < limit < 1:
        return HARMLESS if limit >= 1 else HARMFUL
    if pairs.loss < limit and loss_p_value(pairs, limit, error) <= error:
        return HARMLESS
    swapped = Pairs(pairs.total, pairs.gained, pairs.lost)
    if pairs.loss > limit and loss_p_value(swapped, -limit, alarm) <= alarm:
        return HARMFUL
    return UNDECIDED


class PastUpdate(NamedTuple):
    """The outcome of an earlier update, which decides what budget is left."""

    outcome: str  # one of `OUTCOMES`
    on_trust: bool  # whether an undecided update could be accepted
    renewed: bool = False  # whether it shares no labelled image with those before


class Share(NamedTuple):
    """The part of the error budget that one update may use."""

    error: float  # probability that it may use to call a harmful encoder harmless
    alarm: float  # and a harmless one harmful
    left: dict[str, float]  # budget after each outcome


def _predict(past, on_trust) -> tuple[float, dict[str, float]]:
    """Predict from earlier outcomes whether the next is proven; and the others."""
    counts = {outcome: 0 for outcome in OUTCOMES}
    for update in past:
        counts[update.outcome] += 1
    proven = counts[ACCEPTED] + counts[REJECTED]
    chance = (proven + 1) / (len(past) + 1.5)
    others = {ROLLED_BACK: counts[ROLLED_BACK] + 0.5}
    if on_trust:
        others[ON_TRUST] = counts[ON_TRUST] + 0.5
    total = sum(others.values())
    return chance, {x: (1 - chance) * n / total for x, n in others.items()}


def share_budget(
    past: Sequence[PastUpdate],
    budget: float,
    *,
    on_trust: bool = False,
    renewed: bool = False,
) -> Share:
    """Compute the errors that the next update may use.

    A history of outcomes has a part of the budget, and its continuations share it. The
    next encoder is harmful or harmless; nobody knows which. If it is harmful, the part
    is shared by the error "harmless", and by the continuations after "harmful" and
    after unproven outcomes. If it is harmless, by the error "harmful", and by the
    continuations after "harmless" and after unproven outcomes. So the errors of all
    histories sum to the budget at most, however outcomes choose what is trained next,
    as long as nothing else about the labelled images does. The shares follow a
    prediction of the outcome from those before.

    An update with labelled images of its own gets its part back if it is harmless.

    Args:
      past: earlier updates, the first one first.
      budget: error budget of all updates.
      on_trust: whether this update may be accepted though it is undecided.
      renewed: whether its labelled images have none in common with earlier updates.
    """
    start = here = budget  # when the labelled images were new; now
    single = 0  # updates since then
    renewal = budget  # what is left if the labelled images are new again
    for number, update in enumerate(past):
        if update.renewed and single:
            start = here = renewal
            single = 0
        chance, others = _predict(past[:number], update.on_trust)
        renewal = _renew(start, chance, update.outcome) if single == 0 else None
        here *= _split(chance, others)[update.outcome]
        renewal = here if renewal is None else renewal
        single += 1
    if renewed and single:
        start = here = renewal
        single = 0
    chance, others = _predict(past, on_trust)
    left = {x: here * share for x, share in _split(chance, others).items()}
    return Share(here * chance * _HARMLESS, here * chance * _FALSE_ALARM, left)


def _split(chance, others) -> dict[str, float]:
    """Return the part of each continuation."""
    proven = {ACCEPTED: chance * (1 - _FALSE_ALARM), REJECTED: chance * _HARMFUL}
    return proven | others


def _renew(start, chance, outcome) -> float:
    """Return what is left after a single update on its own labelled images."""
    used = chance * _FALSE_ALARM if outcome == ACCEPTED else chance * _HARMLESS
    return start * (1 - used)


def count_images(limit: float, error: float, change: float) -> int:
    """Count the images that show a harmless update to be harmless, four times in five.

    Args:
      limit: most that may be lost.
      error: error of the update.
      change: share of images whose answer changes.
    """
    return int(np.ceil(change * (_deviations(error) / limit) ** 2))


def smallest_limit(total: int, error: float, change: float) -> float:
    """Compute the limit for which `count_images` gives `total`."""
    return float(_deviations(error) * np.sqrt(change / total))


def _deviations(error) -> float:
    from scipy import special

    return float(special.ndtri(1 - error) + special.ndtri(0.8))
