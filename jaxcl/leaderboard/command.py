"""All methods at equal budgets: `python -m jaxcl.leaderboard --data=data --seeds=3`.

Every entry of every problem of `table.PROBLEMS` gets the same FLOPs, see `budget`.
First a learning rate is chosen for it, on rows held out of the train part; then its
seeds are run, one after another since they share a program, at the smallest budget of
all entries before the next budget of any. A run has a directory of its own, whose name
follows its config: what is done is not done again, and what was stopped goes on. After
each run docs/leaderboard.json, the page made of it and its pictures are written anew.
Exit codes are those of `jaxcl.main`; a run that diverges is noted and ends no other.
"""

import argparse
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import ml_collections
from etils import epath

from jaxcl.config import build, command, files
from jaxcl.data import storage
from jaxcl.leaderboard import budget, page, table
from jaxcl.reproduce import command as reproduce
from jaxcl.reproduce import page as reproduce_page
from jaxcl.run import finish, job, lock, metrics_log, seeds, train
from jaxcl.run import results as results_lib

FAILED = "failed.json"
SEARCH_SEED = 1000  # no seed of a result


class Run(NamedTuple):
    """One run directory."""

    problem: table.Problem
    entry: table.Entry
    multiple: int  # of the problem's budget
    plan: budget.Plan
    rate: float | None  # None: the config's
    config: ml_collections.ConfigDict
    folder: epath.Path
    searches: bool = False  # it is there to choose a learning rate
    searched: bool = True  # its rate was chosen by a search, if there is one to choose

    @property
    def label(self) -> str:
        """What is printed of it."""
        names = f"{self.problem.name}/{self.entry.name} x{self.multiple}"
        rate = f" rate {self.rate:g}" if self.searches else ""
        return f"{names}{rate} seed {self.config.seed}"


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    given = _parsed(argv)
    if given.list:
        print(listed())
        return 0

    def make():
        for name in given.problems:
            problem = table.find(name)
            for entry in problem.entries:  # the data are asked for now
                configured(problem, entry, data=given.data)
        for name in given.only or ():
            if not any(name == e.name for p in given.problems for e in _entries(p)):
                raise ValueError(f"--only={name}: no problem has such an entry")
        _check_multiples(given)
        return Board(given)

    def work(board, stop):
        with lock.held(given.out):
            board.work(stop)

    return command.run(make, work)


def _entries(name):
    return table.find(name).entries


def _check_multiples(given):
    for problem in map(table.find, given.problems):
        if unknown := {*(given.multiples or ())} - {*problem.multiples}:
            allowed = ", ".join(map(str, problem.multiples))
            raise ValueError(
                f"--multiples={min(unknown)}: {problem.name} has {allowed}"
            )


def _parsed(argv):
    parser = argparse.ArgumentParser(
        prog="python -m jaxcl.leaderboard",
        description="Every method on small problems, at equal budgets of FLOPs.",
    )
    parser.add_argument("--list", action="store_true", help="name all, and run nothing")
    parser.add_argument(
        "--problems",
        nargs="+",
        default=[name for name, own in table.PROBLEMS.items() if own.data is None],
        metavar="NAME",
        help="which; by default those that read no files",
    )
    parser.add_argument("--only", nargs="+", metavar="ENTRY", help="which entries; all")
    parser.add_argument("--seeds", type=int, default=3, help="how many; 3")
    parser.add_argument(
        "--no-search",
        action="store_true",
        help="take the middle one of the learning rates, and say so on the page",
    )
    parser.add_argument(
        "--multiples", nargs="+", type=int, help="which budgets, as 1 4; all"
    )
    parser.add_argument(
        "--data", default="data", help="folder with a folder or .npz file of each set"
    )
    parser.add_argument(
        "--out", default="runs/leaderboard", help="folder for the run directories"
    )
    parser.add_argument(
        "--page",
        default="docs/leaderboard.md",
        help="the page to write; its .json beside it holds the results",
    )
    parser.add_argument(
        "--minutes", type=float, help="stop after so many; the same command goes on"
    )
    given = parser.parse_args(argv)
    if given.seeds < 1:
        parser.error(f"--seeds={given.seeds}: must be at least 1")
    if given.minutes is not None and given.minutes <= 0:
        parser.error(f"--minutes={given.minutes}: must be above 0")
    if not given.page.endswith(".md"):
        parser.error(f"--page={given.page}: must end in .md")
    return given


def listed() -> str:
    """All problems and their entries."""
    lines = []
    for problem in table.PROBLEMS.values():
        budgets = ", ".join(f"{m * problem.budget:.3g}" for m in problem.multiples)
        reads = f"reads {problem.data}" if problem.data else "reads no file"
        lines.append(
            f"{problem.name}: {problem.what}; {reads}; {budgets} FLOPs; about "
            f"{problem.minutes:g} minutes a run at 1x"
        )
        lines += [f"  {entry.name:28}{entry.title}" for entry in problem.entries]
    return "\n".join(lines)


def configured(
    problem: table.Problem, entry: table.Entry, *, data: str
) -> ml_collections.ConfigDict:
    """The config of an entry, before its rate and what its budget pays for.

    Raises:
      ValueError: there is no such config or set of data; the message says where it
        was looked for.
    """
    words = f":{entry.words}" if entry.words else ""
    path = f"configs/{entry.config or problem.config}.py"
    config = files.read([f"--config={path}{words}"])
    config = budget.changed(config, problem.changes)
    config = budget.changed(config, entry.changes)
    if problem.data:
        found = reproduce.found(data, problem.data, config.data.name)
        config = budget.changed(config, {f"data.{k}": v for k, v in found.items()})
    return config


def digest(config: ml_collections.ConfigDict) -> str:
    """Eight letters that follow a config, but for its seed and where its data lie."""
    raw = config.to_dict()
    raw.pop("seed", None)
    raw["data"] = {k: v for k, v in raw["data"].items() if k != "path"}
    exact = json.dumps(raw, sort_keys=True, default=str)
    return hashlib.sha256(exact.encode()).hexdigest()[:8]


class OutOfTime(Exception):
    """--minutes are over."""


class Board:
    """The runs of one command, and what is known of them.

    Args:
      given: the options of the command.
    """

    def __init__(self, given: argparse.Namespace):
        self.given, self.out = given, epath.Path(given.out)
        self.problems = [table.find(name) for name in given.problems]
        self.json = given.page.removesuffix(".md") + ".json"
        self.numbers: dict = {}  # see `page.add`
        self.commit = reproduce_page.commit()
        self.compiled: tuple | None = None  # directory of a config, and its step
        self.stop = lambda: False  # whether a signal came
        self.until = None
        if given.minutes is not None:
            self.until = time.monotonic() + 60 * given.minutes

    def work(self, stop) -> None:
        """Run what is left, and write the page."""
        _cache_programs(self.out)
        self.stop = stop
        if os.path.exists(self.json):
            self.numbers = storage.read_object(self.json)
        try:
            for run in self.runs():
                self.do(run)
        except OutOfTime:
            print(
                f"--minutes={self.given.minutes:g} are over; the same command goes on"
            )
        self.write(self.given.problems)

    def runs(self) -> Iterator[Run]:
        """What there is to do, in order; what is done already comes, too."""
        for problem in self.problems:
            chosen = [e for e in problem.entries if self._wanted(e)]
            rates = {}
            for multiple in self.given.multiples or problem.multiples:
                for entry in chosen:
                    tuned = table.entry(problem, entry.rate_of or entry.name)
                    if tuned.name not in rates:
                        if table.rates(problem, tuned) and not self.given.no_search:
                            yield from self.search(problem, tuned)
                        rates[tuned.name] = self.best(problem, tuned)
                    for seed in range(self.given.seeds):
                        yield self.run(
                            problem, entry, multiple, seed, rates[tuned.name]
                        )

    def _wanted(self, entry):
        return not self.given.only or entry.name in self.given.only

    def search(self, problem: table.Problem, entry: table.Entry) -> list[Run]:
        """The runs that choose a learning rate, at the smallest budget."""
        least = min(problem.multiples)
        return [
            self.run(problem, entry, least, SEARCH_SEED, rate, searches=True)
            for rate in table.rates(problem, entry)
        ]

    def best(self, problem: table.Problem, entry: table.Entry) -> float | None:
        """The rate with the highest accuracy on held-out rows; the smaller of equals.

        None where every run diverged or none is to choose: the config's is taken.
        """
        rates = sorted(table.rates(problem, entry))
        if self.given.no_search and rates:
            return rates[len(rates) // 2]
        found = {run.rate: came_to(run) for run in self.search(problem, entry)}
        good = {rate: x for rate, x in sorted(found.items()) if x is not None}
        return max(good, key=good.get) if good else None

    def run(
        self,
        problem: table.Problem,
        entry: table.Entry,
        multiple: int,
        seed: int,
        rate: float | None,
        *,
        searches: bool = False,
    ) -> Run:
        """A run with its plan, which is counted if it is not known."""
        config = configured(problem, entry, data=self.given.data)
        # The rate does not change what a step costs, how the data are cut does.
        if searches:
            config = budget.changed(config, problem.search)
        spends = entry.spends or problem.spends
        plan = self.planned(spends, config, multiple * problem.budget)
        changes = {budget.FIELDS[spends]: plan.amount, "seed": seed}
        changes["name"] = f"{problem.name}_{entry.name}"
        if rate is not None:
            changes[entry.rate] = rate
        config = budget.changed(config, changes)
        kind = f"rate_{rate:g}" if searches else f"x{multiple}"
        folder = self.out / problem.name / entry.name / f"{kind}-{digest(config)}"
        folder /= seeds.folder(seed)
        return Run(
            problem=problem,
            entry=entry,
            multiple=multiple,
            plan=plan,
            rate=rate,
            config=config,
            folder=folder,
            searches=searches,
            searched=not self.given.no_search,
        )

    def planned(self, spends, config, flops) -> budget.Plan:
        """The plan of a config, from the file of those that were counted before."""
        path = self.out / f"plans_jax_{jax.__version__}.json"  # it is JAX that counts
        key = f"{digest(config)} {spends} {flops:.6g}"
        known = storage.read_object(path) if path.exists() else {}
        if key not in known:
            self.pause()
            known[key] = budget.plan(spends, config, flops)._asdict()
            path.parent.mkdir(parents=True, exist_ok=True)
            results_lib.write(path, known)
            jax.clear_caches()
        return budget.Plan(**known[key])

    def over(self) -> bool:
        """Whether --minutes are over."""
        return self.until is not None and time.monotonic() > self.until

    def pause(self) -> None:
        """Stop here if that was asked for.

        Raises:
          OutOfTime: --minutes are over.
          train.Interrupted: a signal came.
        """
        if self.stop():
            raise train.Interrupted("stopped between runs")
        if self.over():
            raise OutOfTime

    def do(self, run: Run) -> None:
        """Do a run, unless it is done, and add it to the page."""
        there = finished(run.folder)
        if not there:
            self.pause()
            began = time.monotonic()
            self._train(run)
            value, seconds = came_to(run), time.monotonic() - began
            said = "diverged" if value is None else f"{100 * value:.2f} %"
            print(f"{run.label}: {said}, {seconds:.0f} s", flush=True)
        if run.searches:
            return
        self.note(run, anew=not there)
        if not there:
            self.write([run.problem.name])

    def _train(self, run):
        """Train, and leave the results or why there are none."""
        run.folder.mkdir(parents=True, exist_ok=True)
        with open(run.folder / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            try:
                made = build.build(run.config, run.folder)
                step = self._step(run, made)
                finish.run(
                    made,
                    run.folder,
                    stop=lambda: self.stop() or self.over(),
                    step=step,
                )
            except metrics_log.Diverged as error:
                storage.write_json(run.folder / FAILED, {"why": str(error)})
            except train.Interrupted:
                if self.stop():
                    raise
                raise OutOfTime from None

    def _step(self, run, made):
        """The compiled step, which seeds that follow one another share."""
        own = run.folder.parent
        if self.compiled is None or self.compiled[0] != own:
            jax.clear_caches()  # a day's programs would fill the memory
            self.compiled = own, job.compile_step(made)
        return self.compiled[1]

    def note(self, run: Run, *, anew: bool) -> None:
        """Add a run that is done, just now or before, to the numbers of the page."""
        failed = came_to(run) is None
        results = None if failed else results_lib.read_results(run.folder)
        own = run.folder.parent.name
        page.add(self.numbers, run, own, results, self.commit, anew=anew)

    def write(self, problems: list[str]) -> None:
        """Write the numbers, the page, and the pictures of some problems."""
        results_lib.write(self.json, self.numbers)
        page.write(self.given.page, self.numbers, problems)


def came_to(run: Run) -> float | None:
    """The accuracy of a run that is done, in [0, 1]; None: it diverged."""
    if (run.folder / FAILED).exists():
        return None
    return page.accuracy(results_lib.read_results(run.folder), run.problem)


def finished(folder: epath.Path) -> bool:
    """Whether nothing is left to do in a run directory."""
    return (folder / FAILED).exists() or results_lib.complete(folder)


def _cache_programs(out: epath.Path) -> None:
    """Keep compiled programs on disk, for other seeds and for the next command."""
    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009
        jax.config.update("jax_compilation_cache_dir", str(out / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
