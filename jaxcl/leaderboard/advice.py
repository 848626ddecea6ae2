"""Which method to take when: sentences, each with the interval that supports it.

The rules, which the page states, too. Of the methods that stay within a budget the
leader has the highest mean. It is above another where the 95 % interval of their paired
differences over seeds is above 0. Nothing is said of fewer than `LEAST` seeds.
Intervals are those of single comparisons: of twenty between equals one errs.
"""

from collections.abc import Sequence

from jaxcl.leaderboard import front, table
from jaxcl.report import numbers

LEAST = 3  # seeds


def sentences(problem: table.Problem, points: Sequence[front.Point]) -> list[str]:
    """What the points of a problem support, a sentence or two for each budget."""
    said, leaders = [], {}
    for multiple in problem.multiples:
        here = [p for p in points if p.multiple == multiple and enough(p)]
        methods = [p for p in here if p.competes and not p.over]
        if len(methods) < 2:
            continue
        leader = max(methods, key=lambda p: p.mean)
        leaders[multiple] = leader
        said.append(_leader(problem, leader, methods))
        said += _controls(leader, here)
    said += _budgets(points, leaders)
    return said


def enough(point: front.Point) -> bool:
    """Whether a point has the seeds that anything may be said of."""
    return len(point.accuracy) >= LEAST


def above(first: front.Point, second: front.Point) -> bool:
    """Whether the interval of `first` less `second` is above 0."""
    low = front.difference(first, second).low
    return low is not None and low > 0


def _leader(problem, leader, methods):
    """What the leader of a budget is above of, and what it is not."""
    others = [p for p in methods if p is not leader]
    beaten = [p for p in others if above(leader, p)]
    equal = [p for p in others if p not in beaten]
    budget = f"With {leader.multiple}x the budget"
    mean = f"**{leader.entry.title}** has the highest mean, {leader.mean:.1f} %"
    plain = [p for p in others if p.entry.name == problem.baseline]
    if plain and plain[0] in equal:
        apart = _points(front.difference(leader, plain[0]))
        return (
            f"{budget} nothing is shown to be above {plain[0].entry.title}: {mean}, "
            f"{apart} points more."
        )
    parts = [f"{budget} {mean}"]
    if plain:
        apart = _points(front.difference(leader, plain[0]))
        parts.append(f"{apart} points above {plain[0].entry.title}")
    count = f"it is shown to be above {len(beaten)} of {len(others)} others"
    parts.append(f"{count} and not above {_names(equal)}" if equal else count)
    sentence = "; ".join(parts) + "."
    least = min([leader, *equal], key=lambda p: p.state_bytes)
    if equal and least is not leader:
        sentence += (
            f" Of those not told apart {least.entry.title} carries the least along, "
            f"{least.state_bytes / 1e3:.0f} kB."
        )
    return sentence


def _controls(leader, here):
    """How far controls are above or below the leader, where the interval shows it."""
    for control in here:
        if not control.entry.control or control.failed or control.over:
            continue
        apart = front.difference(control, leader)
        why = f"{control.entry.title}, which {control.entry.control},"
        if above(control, leader):
            yield f"{why} is {_points(apart)} points above {leader.entry.title}."
        elif above(leader, control):
            apart = front.difference(leader, control)
            yield f"{why} is {_points(apart)} points below {leader.entry.title}."


def _budgets(points, leaders):
    """Whether the leader of a budget gains from the next one."""
    for multiple, leader in leaders.items():
        more = [
            p
            for p in points
            if p.entry.name == leader.entry.name
            and p.multiple > multiple
            and enough(p)
            and not p.failed
        ]
        for point in more[:1]:
            apart = front.difference(point, leader)
            words = f"{leader.entry.title} from {multiple}x to {point.multiple}x"
            if above(point, leader):
                yield f"{words} the budget gains {_points(apart)} points."
            elif above(leader, point):
                apart = front.difference(leader, point)
                yield f"{words} the budget loses {_points(apart)} points."
            else:
                yield f"{words} the budget gains nothing that the seeds show."


def _points(apart: numbers.Estimate) -> str:
    """A difference with its interval."""
    return f"{apart.mean:.1f} ({apart.low:.1f} to {apart.high:.1f})"


def _names(points) -> str:
    titles = [f"*{p.entry.title}*" for p in sorted(points, key=lambda p: -p.mean)]
    return ", ".join(titles)
