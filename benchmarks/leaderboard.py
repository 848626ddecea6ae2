"""Compare methods at equal FLOPs: `python benchmarks/leaderboard.py --seeds=3`.

Each entry of a problem gets the same FLOPs of training. Short trial runs measure what
an epoch, an update on each incoming batch, or a pass over GDumb's memory costs; the
entry gets the largest number that the budget pays for, and at least 1. One run for each
learning rate, on rows held out of the train part, chooses the rate. Then the seeds run.

A finished run is read again, a stopped one goes on; delete a directory under --out to
run it anew. After each run docs/leaderboard.json is written, and at the end the tables
of docs/leaderboard.md. Exit codes are those of `jaxcl.main`.
"""

import argparse
import contextlib
import copy
import itertools
import math
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import reproduce
from etils import epath

from jaxcl import schema, storage
from jaxcl.config import build, command, files, recipe
from jaxcl.data import stream
from jaxcl.methods import gdumb
from jaxcl.methods.two_view import strategies
from jaxcl.report import numbers as numbers_lib
from jaxcl.run import finish, job, lock, metrics_log, result_file, seeds

FIELDS = {"epochs": "epochs", "updates": "replay.updates", "passes": "method.passes"}
SEARCH_SEED = 1000  # of no result


class Entry(NamedTuple):
    """A method on a problem."""

    changes: dict[str, Any] = {}  # path of an option -> value, after the problem's
    words: str = ""  # behind the colon of the config
    control: str = ""  # the advantage it has, or what it lacks; "": it competes
    spends: str | None = None  # a key of FIELDS; None: the problem's
    config: str | None = None  # file of configs/; None: the problem's
    rate: str = "optimizer.lr"  # the option that is searched
    rate_of: str | None = None  # the entry whose rate it takes; None: its own
    rates: tuple[float, ...] = ()  # to choose from; (): the problem's


class Problem(NamedTuple):
    """A config made small, a measure, and FLOPs to spend."""

    config: str  # file of configs/
    changes: dict[str, Any]
    entries: dict[str, Entry]
    budget: float  # FLOPs of training
    spends: str  # a key of FIELDS
    rates: tuple[float, ...]  # learning rates to choose from; (): the config's
    measure: str = "knn/accuracy"  # scalar of results.json, after the last task
    matrix: str | None = "knn/class_incremental"  # for forgetting
    multiples: tuple[int, ...] = (1, 4)  # of the budget
    data: str | None = None  # set in the folder of --data; None: reads no file
    grid: str = ""  # names the halves of an entry, "row x column"; "": one row each


_OFF = ("plots", "tensorboard", "progress", "plasticity", "duplicates")
_NEVER = ("save_every", "eval_every", "eval_epochs")
_QUIET = dict.fromkeys(_OFF, False) | dict.fromkeys(_NEVER, 0)
_KNN = {"evaluators": {"knn": {"k": 20}}}
_PREDICT = {"evaluators": {"predict": {"met_only": True}}}
_PIXELS = {"size": 8, "mean": (0.305,), "std": (0.376,)}
_JITTER = {"scale": (0.6, 1.0), "jitter": (0.2, 0.2, 0.0, 0.0)}
_ABSENT = dict.fromkeys(("grayscale", "blur", "solarize", "flip"), 0.0)
_DIGITS = _PIXELS | _JITTER | _ABSENT
_SEARCH = {"data.validation": 0.2, "scenario.evaluation": "validation"}
_JOINT = {"scenario": {"name": "joint"}}
_NET = {"encoder": {"name": "conv_net", "width": 8}}
_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
_ALL_DATA, _SHUFFLED = "all data at once", "a shuffled stream"


# Without the one that learns from another encoder
STRATEGIES = tuple(name for name in strategies.STRATEGIES if name != "distil")


def _two_view(base, chosen=STRATEGIES, rates=(), **options):
    """Return a base under some strategies, with its controls.

    PNR searches its rate itself; one search serves all others.
    """
    method = {f"method.{x}": value for x, value in {"base": base, **options}.items()}
    shared = Entry(method, rate_of=f"{base}-finetune", rates=rates)
    plain = method | {"method.strategy": "finetune"}
    frozen, joint = plain | {"first_tasks": 1}, plain | _JOINT
    return {
        **{
            f"{base}-{name}": shared._replace(
                changes=method | {"method.strategy": name},
                rate_of=None if name == "pnr" else shared.rate_of,
            )
            for name in chosen
        },
        f"{base}-frozen": shared._replace(changes=frozen, control="first domain only"),
        f"{base}-joint": shared._replace(changes=joint, control=_ALL_DATA),
    }


_FEW = ("finetune", "cassle", "pnr")
LOOKS = Problem(
    "quickstart_pnr",
    _QUIET | _KNN | {"schedule.warmup_epochs": 0},
    {
        **_two_view("mocov2plus"),
        **_two_view("simclr"),
        **_two_view("barlow_twins"),
        **_two_view("byol", _FEW, predictor_hidden_dim=64),
        **_two_view("simsiam", _FEW, predictor_hidden_dim=64),
        **_two_view("vicreg", _FEW, (0.003, 0.01, 0.03)),
        **_two_view("dino", _FEW, prototypes=256),
        **_two_view("lejepa", _FEW, slices=256),
    },
    budget=4.5e10,
    spends="epochs",
    rates=_RATES,
    multiples=(1,),
    grid="base x strategy",
)

_REPLAY = (
    *("finetune", "er", "er_task_free", "er_ace", "er_aml", "der", "derpp"),
    *("derpp_ace", "mir", "gss", "gcr", "agem", "gem", "icarl", "ss_il"),
)
_ONLINE = {
    **{name: Entry(words=name) for name in _REPLAY},
    # The memory is smaller than ASER's default asks for.
    "aser": Entry({"method.per_class": 4}, "aser"),
    "er_lwf": Entry({"method": {"name": "er_lwf"}}, "er"),
    "gdumb": Entry(words="gdumb", spends="passes", rate="method.lr"),
    "iid": Entry(words="iid", control=_SHUFFLED),
    "iidpp": Entry(words="iidpp", control=_SHUFFLED),
    # Its batches are as large as those of the stream.
    "joint": Entry({"batch_size": 10}, "iid_offline", _ALL_DATA, "epochs"),
}


def _online(augment, **changes) -> dict[str, Any]:
    """Return the changes of online problems: a perceptron, shifts instead of crops."""
    shifts = {"views": 1, "crop": False, "jitter": (0.0,) * 4}
    shifts |= {"grayscale": 0.0, "flip": 0.0}
    network = {"encoder": {"name": "mlp", "widths": (100, 100)}, "steps_per_call": 10}
    network |= {"augment": shifts | augment, "evaluate_untrained": False}
    return _QUIET | _PREDICT | network | changes


DIGITS_ONLINE = Problem(
    "er_ace_cifar10",
    _online(_PIXELS | {"pad": 1}, data={"name": "digits"}) | {"replay.per_class": 5},
    _ONLINE,
    budget=1e9,
    spends="updates",
    rates=_RATES,
    measure="predict/accuracy",
    matrix="predict/class_incremental",
)
SPLIT_MNIST = DIGITS_ONLINE._replace(
    changes=_online(
        {"size": 28, "pad": 2, "mean": (0.1307,), "std": (0.3081,)},
        data={"name": "arrays"},
    )
    | {"replay.per_class": 10, "scenario.per_class": 1000},
    budget=4e10,
    data="mnist",
)


def _online_ssl() -> dict[str, Entry]:
    """Return each memory with each regulariser, all at the rate of "none"."""
    bare = {"method.remembers": False}
    changes: dict[str, dict] = {"none": bare}
    for name in ("cassle", "pnr"):
        changes[name] = bare | {"method.regulariser": name, "method.rows": "all"}
    regularisers = ("none", "cla_r", "cassle", "pnr")
    policies = ("fifo", "reservoir", "min_redundancy", "duel")
    pairs = [*itertools.product(regularisers, policies), ("none", "gss")]
    for name, policy in [*pairs, ("der", "reservoir"), ("lump", "reservoir")]:
        own = {"method.regulariser": name, "replay.policy": policy}
        if name == "lump":  # it mixes as many rows as come in
            own["replay.size"] = 20
        changes[f"{name}-{policy}"] = own
    entries = {name: Entry(own, rate_of="none") for name, own in changes.items()}
    iid = Entry(bare | _JOINT, control=_SHUFFLED, rate_of="none")
    return {**entries, "iid": iid}


LOOKS_ONLINE = Problem(
    "online_ssl_small",
    _QUIET
    | _KNN
    | _NET
    | {
        "augment": _DIGITS,
        "data": {"name": "digits_in_looks"},
        "scenario": {"name": "domain"},
        "replay.capacity": 100,
        "method.base": "simclr",
        "method.regulariser": "none",
        "method.hidden_dim": 128,
        "method.output_dim": 64,
    },
    _online_ssl(),
    budget=3e10,
    spends="updates",
    rates=(0.03, 0.1, 0.3),
    multiples=(1,),
    grid="regulariser x memory",
)


def _rehearsal() -> dict[str, Entry]:
    """Return CCLIS, its variants, Co2L, ER, and SupCon under every strategy."""
    small = {"method.hidden_dim": 128, "method.output_dim": 64}
    small["method.memory_size"] = 50
    entries = {x: Entry(small, x) for x in ("cclis", "random", "no_prd", "co2l")}
    entries["er"] = Entry({"replay.capacity": 50}, "er")
    supcon = {"scenario": {"name": "class", "num_tasks": 5}, "augment.views": 2}
    supcon |= {"data": {"name": "digits"}, "method.base": "supcon"}
    shared = Entry(config="digits", rate_of="supcon-finetune")
    for name in STRATEGIES:
        own = supcon | {"method.strategy": name}
        entries[f"supcon-{name}"] = shared._replace(changes=own)
    joint = supcon | {"method.strategy": "finetune"} | _JOINT
    entries["supcon-joint"] = shared._replace(changes=joint, control=_ALL_DATA)
    return entries


REHEARSAL = Problem(
    "cclis_cifar10_small",
    _QUIET
    | _KNN
    | _NET
    | {f"augment.{name}": value for name, value in _DIGITS.items()}
    | {
        "data": {"name": "digits"},
        "augment.resize": None,
        "batch_size": 64,
        "schedule.warmup_epochs": 0,
        "evaluate_untrained": True,
    },
    _rehearsal(),
    budget=3e10,
    spends="epochs",
    rates=_RATES,
)

DUEL = Problem(
    "duel_cifar10_small",
    _QUIET
    | _KNN
    | _NET
    | {
        "augment": _DIGITS,
        "data": {"name": "digits"},
        "scenario.imbalance.epoch_steps": 22,
        "batch_size": 64,
        "method.memory_size": 256,
        "method.drawn": 64,
    },
    {
        **{x: Entry(words=x) for x in ("moco", "d_moco", "simclr", "d_simclr")},
        "moco-even": Entry(_JOINT, "moco", "even classes"),
        "simclr-even": Entry(_JOINT, "simclr", "even classes"),
    },
    budget=3e10,
    spends="epochs",
    rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    matrix=None,
)

_ICL = ("icl", "no_lrl", "no_meta", "no_both", "finetune", "replay", "distill")
ICL_MUTAG = Problem(
    "icl_proteins",
    _QUIET | {"evaluators": {"svm": {"last_only": True}}, "patience": 0},
    {
        **{name: Entry(words=name) for name in (*_ICL, "continue")},
        "retrain": Entry(words="retrain", control="trains again on all"),
        "frozen": Entry(words="frozen", control="learns nothing new"),
        "random": Entry(words="random", control="an untrained network"),
    },
    budget=1e10,
    spends="epochs",
    rates=(),
    measure="svm/all",
    matrix=None,
    data="mutag",
)

PROBLEMS = {
    "looks": LOOKS,
    "digits_online": DIGITS_ONLINE,
    "looks_online": LOOKS_ONLINE,
    "rehearsal": REHEARSAL,
    "duel": DUEL,
    "split_mnist": SPLIT_MNIST,
    "icl_mutag": ICL_MUTAG,
}


def plan(costs: dict, budget: float) -> dict[str, int]:
    """Spend a budget: the largest amount within it, at least 1.

    Args:
      costs: FLOPs of a run, "fixed" and "each" for an epoch, update or pass.
      budget: FLOPs.
    """
    amount = max(1, math.floor((budget - costs["fixed"]) / costs["each"]))
    flops = costs["fixed"] + amount * costs["each"]
    return {"amount": amount, "flops": flops, "state_bytes": costs["state_bytes"]}


def changed(config, changes: dict[str, Any]):
    """Return a copy of a config with changes, see `recipe.change`."""
    config = copy.deepcopy(config)
    recipe.change(config, changes)
    return config


def make_config(problem: Problem, entry: Entry, data: str):
    """Build the config of an entry, without its rate and amount."""
    words = f":{entry.words}" if entry.words else ""
    config = files.read_config([f"--config={entry.config or problem.config}{words}"])
    config = changed(config, problem.changes | entry.changes)
    if problem.data:
        found = reproduce.find_data(data, problem.data, config.data.name)
        config = changed(config, {f"data.{k}": v for k, v in found.items()})
    return config


def state_bytes(made: job.Job) -> int:
    """Count the bytes of a state, with images that its memory holds by row number."""
    state, batch = job.shapes(made.method, made.data)
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    if made.method.replayed is not None:
        rows = jax.eval_shape(made.method.memory, state).filled.size
        image = batch["image"]
        total += rows * math.prod(image.shape[1:]) * image.dtype.itemsize
    return int(total)


class Board:
    """The runs of one command.

    Args:
      options: of the command.
      stop: () -> whether a signal came.
    """

    def __init__(self, options: argparse.Namespace, stop):
        self.options, self.stop = options, stop
        self.out = epath.Path(options.out)
        self.path = epath.Path(options.page).with_suffix(".json")
        self.numbers = storage.read_object(self.path) if self.path.exists() else {}
        self.about = reproduce.about()

    def run(self) -> None:
        """Run all entries, the smallest budget first."""
        for name in self.options.problems:
            problem = PROBLEMS[name]
            for multiple in self.options.multiples or problem.multiples:
                for own in problem.entries:
                    if own in (self.options.only or problem.entries):
                        self.run_entry(name, own, multiple)
        reproduce.write_page(self.options.page, page(self.numbers))

    def run_entry(self, name: str, own: str, multiple: int) -> None:
        """Run the seeds of an entry at one budget, and write their numbers."""
        problem, entry = PROBLEMS[name], PROBLEMS[name].entries[own]
        rate = self.choose_rate(name, entry.rate_of or own)
        config, spends = self.planned(name, own, multiple)
        if rate is not None:
            config = changed(config, {entry.rate: rate})
        head = {"rate": rate, "plan": spends}
        of_entry = self.numbers.setdefault(name, {}).setdefault(own, {})
        same = of_entry.get(f"x{multiple}", {})
        found = same["seeds"] if same and {k: same[k] for k in head} == head else {}
        step = None
        for seed in range(self.options.seeds):
            folder = self.out / name / own / f"x{multiple}" / seeds.folder(seed)
            step = self.train(changed(config, {"seed": seed}), folder, step)
            found[str(seed)] = measured(problem, entry, spends, folder)
            print(f"{name} {own} x{multiple} {seed}: {found[str(seed)]}", flush=True)
            of_entry[f"x{multiple}"] = head | {"seeds": found} | self.about
            result_file.write_json(self.path, self.numbers)

    def choose_rate(self, name: str, own: str) -> float | None:
        """Return the best learning rate on held-out rows at the smallest budget.

        Equal rates give the smaller one. None: the problem has none to choose from, or
        all diverged.
        """
        problem, entry = PROBLEMS[name], PROBLEMS[name].entries[own]
        config, spends = self.planned(name, own, 1)
        config, scores = changed(config, _SEARCH | {"seed": SEARCH_SEED}), {}
        for rate in sorted(entry.rates or problem.rates):
            folder = self.out / name / own / f"rate_{rate:g}"
            self.train(changed(config, {entry.rate: rate}), folder)
            score = measured(problem, entry, spends, folder)
            if "failed" not in score:
                scores[rate] = score["accuracy"]
        return max(scores, key=lambda rate: scores[rate]) if scores else None

    def planned(self, name: str, own: str, multiple: int) -> tuple:
        """Return the config of an entry that spends a budget, and its `plan`."""
        problem, entry = PROBLEMS[name], PROBLEMS[name].entries[own]
        config = make_config(problem, entry, self.options.data)
        costs = self.costs(problem, entry, config, self.out / name / own)
        spends = plan(costs, multiple * problem.budget)
        field = FIELDS[entry.spends or problem.spends]
        return changed(config, {field: spends["amount"]}), spends

    def costs(self, problem, entry, config, folder) -> dict:
        """Measure the costs of `plan` by short runs, or read them from costs.json."""
        path = folder / "costs.json"
        if path.exists():
            return storage.read_object(path)
        spends = entry.spends or problem.spends
        blind = {"evaluators": {}, "evaluate_untrained": False}
        if rates := entry.rates or problem.rates:
            blind[entry.rate] = min(rates)

        def spent(name, changes):
            self.train(changed(config, blind | changes), folder / name)
            return result_file.read_results(folder / name)["cost"]["total"]

        made = build.plan_job(config)
        one = spent("one", {FIELDS[spends]: 1})["flops"]
        fixed, each = 0, one
        if spends == "updates":
            each = spent("two", {FIELDS[spends]: 2})["flops"] - one
            fixed = one - each
        elif spends == "passes":
            fixed, each = one, fit_pass(config, made, spent)
        costs = {"fixed": fixed, "each": each, "state_bytes": state_bytes(made)}
        result_file.write_json(path, costs)
        return costs

    def train(self, config, folder, step=None):
        """Train or resume a run and return its compiled step; a finished one stays."""
        if (folder / "failed.json").exists() or result_file.complete(folder):
            return step
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            made = build.build(config, folder)
            step = step or job.compile_step(made)
            try:
                finish.run_job(made, folder, stop=self.stop, step=step)
            except metrics_log.Diverged as error:
                storage.write_json(folder / "failed.json", {"why": str(error)})
        return step


def fit_pass(config, made: job.Job, spent) -> int:
    """Count the FLOPs of one pass of GDumb over its full memory.

    A batch of the fit costs what a step of fine-tuning the same network costs.

    Args:
      config: GDumb's.
      made: its job.
      spent: (name, changes) -> "total" of the cost of a run.
    """
    options = schema.defaults(gdumb.make) | config.method.to_dict()
    size = options["batch_size"]
    changes = {"method": {"name": "finetune", "head": options["head"]}}
    changes |= {"batch_size": size, "replay.policy": "reservoir", "optimizer.lr": 0.01}
    fit = spent("fit", changes)
    memory = jax.eval_shape(made.method.memory, job.shapes(made.method, made.data)[0])
    stored = min(memory.filled.size, stream.count_rows(made.stream.dataset.train))
    return math.ceil(stored / size) * fit["flops"] // fit["steps"]


def measured(problem, entry, spends: dict, folder: epath.Path) -> dict[str, Any]:
    """Read the numbers of a run, in percent, FLOPs and seconds of training."""
    if (folder / "failed.json").exists():
        return {"failed": True}
    results = result_file.read_results(folder)
    accuracy = results["scalars"][result_file.count_finished(results) - 1][
        problem.measure
    ]
    if accuracy is None:
        return {"failed": True}
    total = results["cost"]["total"]
    own = {"flops": total["flops"], "seconds": total["train_seconds"]}
    if entry.spends == "passes":  # GDumb trains when it is evaluated
        own["flops"] = spends["flops"]
        own["seconds"] += total["evaluation_seconds"]
    own["accuracy"] = 100 * accuracy
    if problem.matrix is not None and len(results["task_names"]) > 1:
        lost = result_file.summary(results)[problem.matrix]["forgetting"]
        if lost is not None:
            own["forgetting"] = 100 * lost
    name = problem.measure.partition("/")[0] + "/class_incremental"
    if before := (results.get("untrained") or {}).get(name):
        own["untrained"] = 100 * float(np.nanmean(np.array(before, float)))
    return {key: round(value, 4) for key, value in own.items()}


def page(numbers: dict) -> list[str]:
    """Return a section with the table of each problem that has numbers."""
    lines = []
    for name, problem in PROBLEMS.items():
        if name in numbers:
            lines += [f"## {name}", "", *_untrained(numbers[name])]
            lines += (grid if problem.grid else table)(problem, numbers[name])
    return lines


def _untrained(entries: dict) -> list[str]:
    """Return a line with the mean accuracy of untrained networks, if known."""
    records = [record for own in entries.values() for record in own.values()]
    runs = itertools.chain(*(record["seeds"].values() for record in records))
    found = [own["untrained"] for own in runs if "untrained" in own]
    return [f"Before training: {np.mean(found):.1f} %.", ""] if found else []


def table(problem: Problem, entries: dict) -> list[str]:
    """Return one row for each entry, the best at the smallest budget first."""
    measured = [
        x for x in problem.multiples if any(f"x{x}" in e for e in entries.values())
    ]
    budgets = [multiple * problem.budget for multiple in measured]
    rows, controls = [], {}
    for name, entry in problem.entries.items():
        records = [entries.get(name, {}).get(f"x{x}") for x in measured]
        if not any(records):
            continue
        good = [_finished(record) for record in records]
        means = [np.mean([x["accuracy"] for x in own]) if own else -1.0 for own in good]
        rates = entry.rates or problem.rates
        title = f"*{name}*" if entry.control else name
        title += _extreme(records, rates) + _over(records, budgets)
        cells = [title, *_cells(records, good)]
        rows.append(([-mean for mean in means], f"| {' | '.join(cells)} |"))
        if entry.control:
            controls[name.rpartition("-")[2]] = entry.control
    accuracies = [f"{budget / 1e9:.3g} GFLOP" for budget in budgets]
    head = ["entry", *accuracies, "forgetting", "kB"]
    told = "; ".join(f"*{name}*: {control}" for name, control in controls.items())
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(line for _, line in sorted(rows)),
        "",
        *([f"{told}.", ""] if told else []),
    ]


def grid(problem: Problem, entries: dict) -> list[str]:
    """Return a row for each first half of the names, a column for each second half.

    A cell has the accuracy and, after a semicolon, forgetting.
    """
    cells: dict[tuple[str, str], str] = {}
    for name, entry in problem.entries.items():
        if record := entries.get(name, {}).get(f"x{problem.multiples[0]}"):
            first, _, second = name.partition("-")
            mark = _extreme([record], entry.rates or problem.rates)
            cells[first, second or "none"] = _grid_cell(record) + mark
    columns = list(dict.fromkeys(second for _, second in cells))
    lines = [
        f"| {problem.grid} | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in dict.fromkeys(first for first, _ in cells):
        own = [cells.get((row, column), "") for column in columns]
        lines.append(f"| {row} | {' | '.join(own)} |")
    budget = f"{problem.multiples[0] * problem.budget / 1e9:.3g} GFLOP"
    return [f"With {budget}, accuracy; forgetting:", "", *lines, ""]


def _grid_cell(record: dict) -> str:
    good = _finished(record)
    lost = [x["forgetting"] for x in good if "forgetting" in x]
    diverged = len(record["seeds"]) - len(good)
    parts = [interval([x["accuracy"] for x in good])]
    parts += [f"{np.mean(lost):.1f}"] if lost else []
    return "; ".join(parts + ([f"{diverged} diverged"] if diverged else []))


def _finished(record: dict | None) -> list[dict]:
    seeds_of = record["seeds"].values() if record else ()
    return [own for own in seeds_of if "failed" not in own]


def _over(records, budgets) -> str:
    spent = [record and record["plan"]["flops"] for record in records]
    exceeds = any(x and x > most for x, most in zip(spent, budgets, strict=True))
    return ", **over**" if exceeds else ""


def _extreme(records, rates) -> str:
    rate = next(record["rate"] for record in records if record)
    return " °" if rates and rate in (min(rates), max(rates)) else ""


def _cells(records, good) -> list[str]:
    """Return the cells after the name; all but accuracy are of the first budget."""
    accuracies = []
    for record, own in zip(records, good, strict=True):
        lost = len(record["seeds"]) - len(own) if record else 0
        note = f", {lost} diverged" if lost else ""
        accuracies.append(interval([x["accuracy"] for x in own]) + note)
    record = next(record for record in records if record)
    return [
        *accuracies,
        interval([x["forgetting"] for x in good[0] if "forgetting" in x]),
        f"{record['plan']['state_bytes'] / 1e3:.0f}",
    ]


def interval(values: list[float]) -> str:
    """Write the mean and half of its 95 % interval over seeds (Student's t)."""
    if not values:
        return ""
    found = numbers_lib.estimate_mean(values)
    half = "" if found.low is None else f" ± {found.mean - found.low:.1f}"
    return f"{found.mean:.1f}{half}"


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    free = [name for name, problem in PROBLEMS.items() if problem.data is None]
    add = parser.add_argument
    add("--problems", nargs="+", default=free, choices=[*PROBLEMS], metavar="NAME")
    add("--only", nargs="+", metavar="ENTRY", help="entries; all")
    add("--seeds", type=int, default=3, help="how many; 3")
    add("--multiples", nargs="+", type=int, help="of the budget; those of the problem")
    add("--data", default="data", help="folder of the data sets")
    add("--out", default="runs/leaderboard", help="run directories")
    add("--page", default=str(reproduce.ROOT / "docs" / "leaderboard.md"))
    options = parser.parse_args(argv)
    known = {entry for name in options.problems for entry in PROBLEMS[name].entries}
    if unknown := {*(options.only or ())} - known:
        parser.error(f"--only={min(unknown)}: must be of {', '.join(sorted(known))}")
    if options.seeds < 1:
        parser.error(f"--seeds={options.seeds}: must be at least 1")

    def make():
        for name in options.problems:  # missing data are found now
            make_config(PROBLEMS[name], Entry(), options.data)
        return options

    def work(options, stop):
        jax.config.update("jax_compilation_cache_dir", f"{options.out}/programs")
        with lock.hold_lock(options.out):
            Board(options, stop).run()

    return command.run_until_signal(make, work)


if __name__ == "__main__":
    sys.exit(main())
