"""Numbers of the runs as JSON, and the page and the pictures that are made of them."""

import datetime
import os
import pathlib
import platform
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from jaxcl import plots
from jaxcl.data import storage
from jaxcl.leaderboard import advice, front, table
from jaxcl.run import results as results_lib
from jaxcl.run import seeds

_HEAD = """# Leaderboard

Every method on a few small problems, at equal budgets: what it reaches beside what it
costs, and which to take. The page is made of `docs/leaderboard.json`, which has the
numbers of every seed.

```
python -m jaxcl.leaderboard --seeds=3
python -m jaxcl.leaderboard --problems split_mnist icl_mutag --data=data
python -m jaxcl.leaderboard --problems looks --only mocov2plus-pnr --minutes=30
```

The first runs the problems that read no file and writes this page; `--list` names all
problems and entries. The second looks for MNIST and MUTAG in a folder. The third runs
one entry, and stops by itself; the same command goes on where it was stopped.

These problems are small enough for anybody to run. What is best on them need not be
best on images of a hundred times as many pixels: take the page for how to compare, and
for what a budget changes, before you take its order for that of your own problem.
"""
_HOW = """## How it is compared

- **Budget.** A class has FLOPs of training in all, the same for each entry. Before a
  run its steps and the FLOPs of each are counted, as `results.json` counts them; the
  entry gets the largest number of epochs that the budget pays for, the same in every
  task. On a stream that comes once it is the number of updates on each incoming batch
  instead. For GDumb, which trains when it is judged, it is the number of passes over
  its memory; its last fit counts as that many steps of fine-tuning. Epochs and updates
  are whole, so that little or much of a budget may be left: the tables say how much
  was spent. An entry that exceeds the budget with a single one is **over**, and what
  is said under "Which to take" is not of it.
- **Not counted** are evaluations and what happens between tasks, such as iCaRL's means
  or the rows that CCLIS chooses.
- **Learning rates** are chosen from the few that each section names, at the smallest
  budget, by one run each on rows held out of the train part, with a seed that no result
  has; the strategies of a base share the rate that its fine-tuning prefers. A `*` says
  that it is the least or the largest of them, so that a better one may lie outside.
  With `--no-search` the middle one is taken for all: then the table says "not
  searched", and a method may be low for its rate alone. Nothing else was tuned: all
  other options are those of the configs.
- **Carried along** is what a run keeps from step to step: parameters, optimiser, copies
  of the network, memory. Controls that need old data keep these besides, and so do ICL
  and its rivals that read old graphs.
- **Accuracy** is of all test rows after the last task; +- is the standard error over
  seeds, and behind it stands their number. Seconds are of training alone, without
  compiling, whatever else the machine did; of GDumb, which trains whenever it is
  judged, they are of all its evaluations, too.
- **On the front** is a method if no other has at least its accuracy with the same
  budget or a smaller one, by the means. What is left of a budget is no merit, so the
  budget counts; what is over its budget counts with its own FLOPs. Controls are on no
  front.
- **Which to take** is said where the 95 % interval (Student's t) of differences paired
  by seed excludes 0, for 3 seeds or more. Each interval is of one comparison alone: of
  twenty comparisons of equals, one is wrong.
"""


def accuracy(results: Mapping, problem: table.Problem) -> float | None:
    """What a problem measures of a run, in [0, 1]; None: its outputs are not finite."""
    return results["scalars"][results_lib.finished(results) - 1][problem.measure]


def measured(results: Mapping, run) -> dict:
    """The numbers of one seed, in percent, FLOPs and seconds."""
    total, matrix = results["cost"]["total"], run.problem.matrix
    seconds = total["train_seconds"]
    if run.plan.beside:  # it trains when it is judged
        seconds += total["evaluation_seconds"]
    own: dict = {
        "accuracy": round(100 * accuracy(results, run.problem), 4),
        "flops": total["flops"] + run.plan.beside,
        "seconds": round(seconds, 2),
    }
    if matrix is not None and len(results["task_names"]) > 1:
        lost = results_lib.summary(results)[matrix]["forgetting"]
        if lost is not None:
            own["forgetting"] = round(100 * lost, 4)
    name = run.problem.measure.partition("/")[0] + "/class_incremental"
    before = (results.get("untrained") or {}).get(name)
    if before is not None:
        own["untrained"] = round(100 * float(np.nanmean(np.array(before, float))), 4)
    return own


def add(
    numbers: dict,
    run,
    own: str,
    results: Mapping | None,
    commit: str,
    *,
    anew: bool = False,
) -> None:
    """Add a run to the numbers, in place of runs of another config.

    Args:
      numbers: problem -> entry -> "x" and the multiple -> record; changed in place.
      run: a `command.Run` that is done.
      own: name of its directory, which follows its config.
      results: of results.json; None: it diverged.
      commit: of the code.
      anew: it was trained just now, and replaces what is known of its seed.
    """
    of_entry = numbers.setdefault(run.problem.name, {}).setdefault(run.entry.name, {})
    record = of_entry.get(f"x{run.multiple}", {})
    if record.get("run") != own:
        plan = {"amount": run.plan.amount, "flops": run.plan.flops}
        plan["state_bytes"] = run.plan.state_bytes
        record = {"run": own, "rate": run.rate, "searched": run.searched}
        record |= {"plan": plan, "seeds": {}}
    record["searched"] |= run.searched  # a search may end at the rate that was taken
    seed = str(run.config.seed)
    if anew or seed not in record["seeds"]:
        failed = results is None
        record["seeds"][seed] = {"failed": True} if failed else measured(results, run)
        record |= {"commit": commit, "jax": jax.__version__}
        record["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        if not failed:
            cost = results["cost"]
            record["device"] = f"{cost['num_devices']} x {cost['device']}"
        record["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    of_entry[f"x{run.multiple}"] = record


def points(problem: table.Problem, numbers: Mapping) -> list[front.Point]:
    """The points of a problem, in the order of its entries and multiples."""
    found = []
    for entry in problem.entries:
        for multiple in problem.multiples:
            record = numbers.get(entry.name, {}).get(f"x{multiple}")
            if record is not None:
                found.append(_point(problem, entry, multiple, record))
    return found


def _point(problem, entry, multiple, record):
    good = {int(s): x for s, x in record["seeds"].items() if "failed" not in x}
    plan = record["plan"]

    def mean(name, otherwise):
        values = [x[name] for x in good.values()]
        return sum(values) / len(values) if values else otherwise

    return front.Point(
        entry=entry,
        multiple=multiple,
        amount=plan["amount"],
        rate=record["rate"],
        searched=record["searched"],
        accuracy={s: x["accuracy"] for s, x in good.items()},
        forgetting={s: x["forgetting"] for s, x in good.items() if "forgetting" in x},
        budget=multiple * problem.budget,
        flops=mean("flops", plan["flops"]),
        seconds=mean("seconds", 0.0),
        state_bytes=plan["state_bytes"],
        failed=len(record["seeds"]) - len(good),
        over=plan["flops"] > multiple * problem.budget,
    )


def untrained(numbers: Mapping) -> float | None:
    """Mean accuracy in percent before any training, over the seeds that were judged.

    Args:
      numbers: of a problem, entry -> "x1" -> record.
    """
    by_seed = {
        seed: own["untrained"]
        for of_entry in numbers.values()
        for record in of_entry.values()
        for seed, own in record["seeds"].items()
        if "untrained" in own
    }
    return sum(by_seed.values()) / len(by_seed) if by_seed else None


def write(
    path: str | os.PathLike, numbers: Mapping, problems: Iterable[str] | None = None
) -> None:
    """Write the page, and the pictures of some problems, of all by default."""
    with storage.replacing(path) as file:
        file.write(written(numbers).encode())
    folder = pathlib.Path(path).parent / "images"
    folder.mkdir(exist_ok=True)
    for name in numbers if problems is None else problems:
        if name in table.PROBLEMS and name in numbers:
            draw(table.PROBLEMS[name], numbers[name], folder / _picture(name))


def _picture(name):
    return f"leaderboard_{name}.png"


def draw(problem: table.Problem, numbers: Mapping, path: pathlib.Path) -> None:
    """Draw accuracies with their intervals, beside the FLOPs that were spent.

    Nothing is drawn if every run diverged.
    """
    found = [p for p in points(problem, numbers) if p.accuracy]
    if not found:
        return
    leading = {p.entry.name for p in front.pareto(found)}
    methods = {}
    for entry in problem.entries:
        own = [p for p in found if p.entry.name == entry.name]
        spans = [front.estimate(p.accuracy.values()) for p in own]
        halves = [np.nan if s.high is None else s.high - s.mean for s in spans]
        kind = "control" if entry.control else "other"
        kind = "front" if entry.name in leading else kind
        costs, means = [p.flops for p in own], [p.mean for p in own]
        if own:
            budgets = [p.budget for p in own]
            methods[entry.title] = plots.Costs(budgets, costs, means, halves, kind)
    floor = untrained(numbers)
    plots.cost_and_accuracy(methods, path, title=problem.what, floor=floor)


def written(numbers: Mapping) -> str:
    """The page.

    Args:
      numbers: see `add`; what the table does not have is left out.
    """
    there = [p for p in table.PROBLEMS.values() if numbers.get(p.name)]
    lines = [_HEAD, "## Which to take", ""]
    for problem in there:
        lines += [f"**[{problem.what}](#{_anchor(problem)}).**", ""]
        found = points(problem, numbers[problem.name])
        lines += [f"- {sentence}" for sentence in _advice(problem, found)] + [""]
    for problem in there:
        lines += _section(problem, numbers[problem.name])
    lines += [_HOW, *_missing(numbers)]
    return "\n".join(lines).rstrip() + "\n"


def _advice(problem, found):
    """What may be said of a problem, with what limits it."""
    said = advice.sentences(problem, found)
    if not said:
        return [f"Nothing yet: no two methods have {advice.LEAST} seeds at a budget."]
    blind = [p.entry.title for p in found if p.rate is not None and not p.searched]
    if blind:
        titles = "; ".join(dict.fromkeys(blind))
        said.append(f"Maybe low for want of a search of learning rates: {titles}.")
    return said


def _anchor(problem):
    kept = "".join(c for c in problem.what if c.isalnum() or c in " -_")
    return kept.strip().lower().replace(" ", "-")


def _missing(numbers):
    """What of the table has not been run."""
    lines = []
    for problem in table.PROBLEMS.values():
        own = numbers.get(problem.name, {})
        lacking = {
            multiple: [
                entry.title
                for entry in problem.entries
                if f"x{multiple}" not in own.get(entry.name, {})
            ]
            for multiple in problem.multiples
        }
        for multiple, titles in lacking.items():
            if len(titles) == len(problem.entries):
                lines.append(f"- `{problem.name}` at {multiple}x: all of it.")
            elif titles:
                what = "; ".join(titles)
                lines.append(f"- `{problem.name}` at {multiple}x: {what}.")
    words = f"All of it, with three seeds, takes about {_hours(3):.0f} hours of a core."
    return ["## Not run yet", "", words, "", *(lines or ["Everything was run."]), ""]


def _hours(count: int) -> float:
    """About how long everything takes on a core, searches included."""
    minutes = 0.0
    for problem in table.PROBLEMS.values():
        tuned = {
            entry.rate_of or entry.name: len(table.rates(problem, entry))
            for entry in problem.entries
        }
        runs = count * sum(problem.multiples) * len(problem.entries)
        minutes += problem.minutes * (runs + sum(tuned.values()))
    return minutes / 60


def _section(problem, numbers):
    """The table of a problem, its picture, and how it was run."""
    found = points(problem, numbers)
    best = front.pareto(found)
    budgets = " and ".join(f"{_giga(m * problem.budget)}" for m in problem.multiples)
    says = [problem.says, f"Budgets: {budgets} GFLOP."]
    if problem.rates:
        chosen = ", ".join(f"{rate:g}" for rate in problem.rates)
        others = {e.rates: e.rate_of or e.name for e in problem.entries if e.rates}
        for rates, name in others.items():
            own = ", ".join(f"{rate:g}" for rate in rates)
            title = table.entry(problem, name).title.partition(",")[0]
            chosen += f"; of {title} {own}"
        says.append(f"Learning rates to choose from: {chosen}.")
    floor = untrained(numbers)
    if floor is not None:
        says.append(f"The network before any training has {floor:.1f} %.")
    lines = [f"## {problem.what}", "", " ".join(says), ""]
    if any(p.accuracy for p in found):
        lines += [f"![Accuracy against cost](images/{_picture(problem.name)})", ""]
    data = " --data=data" if problem.data else ""
    lines += ["```", f"python -m jaxcl.leaderboard --problems {problem.name}{data}"]
    lines += ["```", ""]
    for multiple in problem.multiples:
        here = [p for p in found if p.multiple == multiple]
        if here:
            lines += _table(problem, multiple, here, best)
    return [*lines, *_hardware(numbers), ""]


def _table(problem, multiple, here, best):
    """The table of one budget, the best first."""
    whole = multiple * problem.budget
    head = f"| at {multiple}x: {_giga(whole)} GFLOP | accuracy | forgetting | spent | "
    head += "GFLOP | carried along, kB | s | rate | front |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    here = sorted(here, key=lambda p: -p.mean if p.accuracy else 0.0)
    for point in here:
        spends = point.entry.spends or problem.spends
        name = point.entry.title
        if point.entry.control:
            name = f"*{name}* (control: {point.entry.control})"
        cells = [
            name,
            _percent(point.accuracy.values(), point.failed),
            _percent(point.forgetting.values(), 0) if point.forgetting else "",
            f"{point.amount} {spends}, {100 * point.flops / whole:.0f} %"
            + (", **over**" if point.over else ""),
            _giga(point.flops),
            f"{point.state_bytes / 1e3:.0f}",
            f"{point.seconds:.1f}",
            _rate(problem, point),
            "yes" if point in best else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _percent(values, failed):
    """Mean and standard error of percents, and how many seeds they are of."""
    spread = seeds.spread(values)
    if spread["mean"] is None:
        return f"diverged ({failed})"
    error = "" if spread["error"] is None else f" +- {spread['error']:.1f}"
    lost = f", {failed} diverged" if failed else ""
    return f"{spread['mean']:.1f}{error} ({spread['seeds']}{lost})"


def _giga(flops):
    return f"{flops / 1e9:.3g}"


def _rate(problem, point):
    """The learning rate, with a mark of how it was chosen."""
    rate = point.rate
    if rate is None:
        return "the config's"
    if not point.searched:
        return f"{rate:g} (not searched)"
    rates = table.rates(problem, point.entry)
    edge = rate in (min(rates), max(rates))
    return f"{rate:g}{'*' if edge else ''}"


def _hardware(numbers):
    """Where, when and with what the numbers of a problem were made."""
    records = [r for of_entry in numbers.values() for r in of_entry.values()]

    def of(name):
        return ", ".join(sorted({r[name] for r in records if name in r}))

    dates = sorted(record["date"] for record in records)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    where = of("machine")
    if devices := of("device"):  # a run that diverged tells none
        where = f"{devices}, {where}"
    return [f"Run {when} on {where}, JAX {of('jax')}, commit {of('commit')}."]
