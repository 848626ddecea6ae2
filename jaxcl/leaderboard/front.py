"""Points of cost and accuracy: their means, differences, and the Pareto front."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxcl.leaderboard import table
from jaxcl.report import numbers
from jaxcl.run import seeds


class Point(NamedTuple):
    """An entry at one budget, with all seeds that were run."""

    entry: table.Entry
    multiple: int  # of the problem's budget
    amount: int  # of epochs, updates or passes
    rate: float | None  # learning rate; None: the config's
    searched: bool  # whether a search chose it
    accuracy: dict[int, float]  # seed -> percent
    forgetting: dict[int, float]  # seed -> percent, for the seeds that have it
    budget: float  # FLOPs of its class
    flops: float  # counted, a mean over seeds
    seconds: float  # of training, a mean over seeds
    state_bytes: int
    failed: int  # seeds that diverged
    over: bool  # it costs more than the budget

    @property
    def mean(self) -> float:
        """Mean accuracy in percent."""
        return sum(self.accuracy.values()) / len(self.accuracy)

    @property
    def price(self) -> float:
        """FLOPs it is ranked by: its budget, or its own FLOPs where it exceeds that."""
        return self.flops if self.over else self.budget

    @property
    def competes(self) -> bool:
        """Whether it is a method, no control, and no seed of it diverged."""
        return not self.entry.control and not self.failed and bool(self.accuracy)


def estimate(values: Sequence[float]) -> numbers.Estimate:
    """The mean and, of two values or more, its 95 % interval of Student's t."""
    return numbers.estimate(seeds.spread(values))


def difference(first: Point, second: Point) -> numbers.Estimate:
    """The `estimate` of `first` less `second`, over the seeds that both have."""
    common = sorted({*first.accuracy} & {*second.accuracy})
    return estimate([first.accuracy[s] - second.accuracy[s] for s in common])


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that compete and that no other of them dominates, cheapest first.

    One dominates another if it has no higher price and no lower mean, and is better in
    one of the two.
    """
    points = [point for point in points if point.competes]
    # Of points that cost the same the best comes first: what comes after a point is on
    # the front if it is better, or if it is the same.
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.price, -p.mean)):
        same = kept and (kept[-1].price, kept[-1].mean) == (point.price, point.mean)
        if not kept or point.mean > kept[-1].mean or same:
            kept.append(point)
    return kept
