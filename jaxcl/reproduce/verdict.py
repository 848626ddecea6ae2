"""Whether a measured number agrees with a published one."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Published(NamedTuple):
    """A number that others published, in percent."""

    value: float
    error: float | None = None  # standard error of its mean; None: not known
    # The source itself passes whatever is at most this much below; None: it says none.
    tolerance: float | None = None
    spread: str = ""  # as it is printed: "+- 1.22, 5 runs"
    # False: the table it stands in could not be opened, so that the number is from
    # memory and judges nothing.
    read: bool = True


class Verdict(NamedTuple):
    """What comes of a comparison."""

    mean: float  # of ours, in percent
    deviation: float | None  # sample standard deviation over seeds; None: of one seed
    difference: float  # ours less theirs
    agrees: bool | None  # None: nothing to judge by
    words: str


def judge(values: Sequence[float], published: Published) -> Verdict:
    """Compare the values of several seeds with a published mean.

    They agree where the source's own test would pass (`tolerance`), else where the
    means differ by no more than two standard errors of their difference,
    2 sqrt(s^2 / n + e^2), with our sample deviation s over n seeds and the published
    standard error e. A source of one run without a spread has no e: it judges nothing.

    Args:
      values: in percent, one per seed.
      published: what they are compared with.

    Raises:
      ValueError: no values.
    """
    if not values:
        raise ValueError("values=[]: must be of one seed at least")
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else None
    agrees, words = _agreement(mean, deviation, len(values), published)
    return Verdict(mean, deviation, mean - published.value, agrees, words)


def _agreement(mean, deviation, count, published):
    """Whether the means agree, and why, in words."""
    apart = mean - published.value
    side = f"{abs(apart):.2f} {'above' if apart >= 0 else 'below'}"
    error = None
    if published.error is not None and deviation is not None:
        error = math.hypot(deviation / math.sqrt(count), published.error)
    if not published.read:
        apart_by = "" if error is None else f" (two standard errors: {2 * error:.2f})"
        return None, f"{side} what we recall{apart_by}, which judges nothing"
    if published.tolerance is not None:
        agrees = apart >= -published.tolerance
        verb = "passes" if agrees else "fails"
        return agrees, (
            f"{side}; {verb} the source's own test, which allows "
            f"{published.tolerance:g} below"
        )
    if error is None:
        lacks = "the source" if published.error is None else "one seed"
        return None, f"{side}; not judged, {lacks} has no spread"
    if abs(apart) <= 2 * error:
        return True, f"{side}; within two standard errors ({2 * error:.2f})"
    return False, f"{side}; more than two standard errors ({2 * error:.2f})"
