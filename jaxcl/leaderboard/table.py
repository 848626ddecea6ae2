"""What is compared: a few small problems, and the methods that each of them tries.

A problem takes a config of configs/, makes it small, and says how much an entry may
compute, in FLOPs of training. An entry is a method in one of its forms: the words
behind the config's colon, and what it changes. A new entry is one line, a new problem
one `Problem`.
"""

import itertools
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from jaxcl import core
from jaxcl.methods import icl
from jaxcl.methods.two_view import strategies

Spends = Literal["epochs", "updates", "passes"]


class Entry(NamedTuple):
    """A method on a problem."""

    name: str
    title: str  # for people
    words: str = ""  # behind the colon of the config
    changes: dict[str, Any] = {}  # path of an option -> its value, after the problem's
    # What it is there to compare with, in words; such an entry is recommended to nobody
    # and is on no front. "": it is a method.
    control: str = ""
    spends: Spends | None = None  # None: as the problem says
    config: str | None = None  # file of configs/; None: the problem's
    rate: str = "optimizer.lr"  # the option that the search sets
    rate_of: str | None = None  # the entry whose search chooses; None: its own
    rates: tuple[float, ...] = ()  # to choose from; (): the problem's


class Problem(NamedTuple):
    """Data, a stream, a network and a judge; what an entry may spend."""

    name: str
    what: str  # for people: the head of its section
    says: str  # what is trained and what judges it, in sentences
    config: str  # file of configs/
    changes: dict[str, Any]
    entries: tuple[Entry, ...]
    measure: str  # scalar of results.json, after the last task
    matrix: str | None  # matrix of results.json that forgetting is read from
    budget: float  # FLOPs of training in all, of the smallest class
    spends: Spends
    baseline: str  # the entry that does nothing against forgetting
    minutes: float  # of a run of the smallest class on one core: roughly
    multiples: tuple[int, ...] = (1, 4)  # classes of budgets, in `budget`
    data: str | None = None  # name of the set in the folder of --data; None: no file
    rates: tuple[float, ...] = ()  # learning rates to choose from; (): the config's
    search: dict[str, Any] = {}  # how the data are cut for that


# A run is for its numbers alone.
_QUIET = {
    "plots": False,
    "tensorboard": False,
    "progress": False,
    "plasticity": False,
    "save_every": 0,
    "eval_every": 0,
    "eval_epochs": 0,
    "duplicates": False,
}
_KNN = {"evaluators": {"knn": {"k": 20}}}
_PREDICT = {"evaluators": {"predict": {"met_only": True}}}
_OF_DIGITS = {
    "augment": {
        "size": 8,
        "scale": (0.6, 1.0),
        "jitter": (0.2, 0.2, 0.0, 0.0),
        "grayscale": 0.0,
        "blur": 0.0,
        "solarize": 0.0,
        "flip": 0.0,
        "mean": (0.305,),
        "std": (0.376,),
    }
}
_VALIDATED = {"data.validation": 0.2, "scenario.evaluation": "validation"}
_JOINT = {"scenario": {"name": "joint"}}

_STRATEGIES = {
    "finetune": "fine-tuning",
    "cassle": "CaSSLe",
    "pnr": "PNR",
    "less_forget": "Less-Forget",
    "ewc": "EWC",
    "der": "DER",
    "lump": "LUMP",
}


def _two_view(
    base: str,
    title: str,
    chosen: Collection[str] = tuple(strategies.STRATEGIES),
    rates: tuple[float, ...] = (),
    **options: Any,
) -> list[Entry]:
    """A base under some strategies, and its controls; one search for all.

    Args:
      base: its name.
      title: for people.
      chosen: names of strategies, "finetune" among them.
      rates: learning rates to choose from; (): the problem's.
      options: of `two_view.make`, for this base alone.
    """
    method, tuned = {"method.base": base}, f"{base}-finetune"
    method |= {f"method.{name}": value for name, value in options.items()}
    entries = [
        Entry(
            f"{base}-{strategy}",
            f"{title}, {_STRATEGIES[strategy]}",
            changes=method | {"method.strategy": strategy},
            rate_of=tuned,
            rates=rates,
        )
        for strategy in chosen
    ]
    plain = method | {"method.strategy": "finetune"}
    frozen = Entry(
        f"{base}-frozen",
        f"{title}, frozen after the first look",
        changes=plain | {"first_tasks": 1},
        control="learns the first look alone, with all of the budget",
        rate_of=tuned,
        rates=rates,
    )
    joint = Entry(
        f"{base}-joint",
        f"{title}, all looks at once",
        changes=plain | _JOINT,
        control="needs all data at once",
        rate_of=tuned,
        rates=rates,
    )
    return [*entries, frozen, joint]


# Of the bases beside the first three: all strategies of all bases would take a day.
_FEW = ("finetune", "cassle", "pnr")
_SMALL_RATES = (0.003, 0.01, 0.03)  # VICReg's terms are weighted by 25

LOOKS = Problem(
    "looks",
    "Digits in three looks, without labels",
    "scikit-learn's digits as they are, inverted, and a quarter turned, one look "
    "after another (`configs/quickstart.py`); three convolutions of width 8 on 8 "
    "pixels. Judged by 20 nearest neighbours among the train rows of all looks.",
    "quickstart",
    _QUIET | _KNN | {"method.predictor_hidden_dim": 64, "schedule.warmup_epochs": 0},
    (
        *_two_view("mocov2plus", "MoCo v2+"),
        *_two_view("simclr", "SimCLR"),
        *_two_view("barlow_twins", "Barlow Twins"),
        *_two_view("byol", "BYOL", _FEW),
        *_two_view("simsiam", "SimSiam", _FEW),
        *_two_view("vicreg", "VICReg", _FEW, _SMALL_RATES),
        *_two_view("dino", "DINO", _FEW, prototypes=256),
        *_two_view("lejepa", "LeJEPA", _FEW, slices=256),
    ),
    measure="knn/accuracy",
    matrix="knn/class_incremental",
    budget=4.5e10,
    spends="epochs",
    baseline="mocov2plus-finetune",
    minutes=0.2,
    rates=(0.003, 0.01, 0.03, 0.1, 0.3),
    search=_VALIDATED,
)


def _online() -> tuple[Entry, ...]:
    """Every method that replays, and fine-tuning, with its controls."""
    methods = {
        "finetune": "fine-tuning",
        "er": "ER",
        "er_task_free": "ER, task-free",
        "er_ace": "ER-ACE",
        "er_aml": "ER-AML",
        "der": "DER",
        "derpp": "DER++, augmented",
        "derpp_ace": "DER++ACE, augmented",
        "mir": "MIR",
        "aser": "ASER",
        "gss": "GSS",
        "gcr": "GCR",
        "agem": "A-GEM",
        "gem": "GEM",
        "icarl": "iCaRL",
        "ss_il": "SS-IL",
    }
    # The memory is smaller than ASER's default asks for.
    own = {"aser": {"method.per_class": 4}}
    entries = [Entry(n, title, n, own.get(n, {})) for n, title in methods.items()]
    lwf = {"method": {"name": "er_lwf"}}
    entries.append(Entry("er_lwf", "ER with LwF", "er", lwf))
    entries.append(Entry("gdumb", "GDumb", "gdumb", {}, "", "passes", rate="method.lr"))
    shuffled, all_at_once = "sees the stream shuffled", "needs all data at once"
    entries += [
        Entry("iid", "iid, one pass", "iid", control=shuffled),
        Entry("iidpp", "iid++, one pass", "iidpp", control=shuffled),
        # In batches as large as those of the stream.
        Entry(
            *("joint", "joint, many passes", "iid_offline", {"batch_size": 10}),
            *(all_at_once, "epochs"),
        ),
    ]
    return tuple(entries)


_SHIFTED = {  # an image, or a shift of it where a method augments
    "views": 1,
    "crop": False,
    "jitter": (0.0, 0.0, 0.0, 0.0),
    "grayscale": 0.0,
    "flip": 0.0,
}
_SMALL_STEPS = {"steps_per_call": 10}  # without convolutions a loop is fast on CPU

DIGITS_ONLINE = Problem(
    "digits_online",
    "Digits, two classes at a time, in one labelled pass",
    "scikit-learn's digits in 5 tasks of 2 classes, batches of 10, each of which "
    "comes once (`configs/er_ace_cifar10.py` with another network): a perceptron of "
    "two layers of 100; a memory of 50 images. Judged by the method's own predictions "
    "among all classes.",
    "er_ace_cifar10",
    _QUIET
    | _PREDICT
    | _SMALL_STEPS
    | {
        "data": {"name": "digits"},
        "augment": _SHIFTED | {"size": 8, "pad": 1, "mean": (0.305,), "std": (0.376,)},
        "encoder": {"name": "mlp", "widths": (100, 100)},
        "replay.per_class": 5,
        "evaluate_untrained": False,
    },
    _online(),
    measure="predict/accuracy",
    matrix="predict/class_incremental",
    budget=1e9,
    spends="updates",
    baseline="finetune",
    minutes=0.1,
    rates=(0.003, 0.01, 0.03, 0.1, 0.3),
    search=_VALIDATED,
)

SPLIT_MNIST = Problem(
    "split_mnist",
    "Split MNIST, in one labelled pass",
    "1000 images of each digit of MNIST in 5 tasks of 2 classes, batches of 10, each "
    "of which comes once (`configs/er_ace_cifar10.py` with another network): a "
    "perceptron of two layers of 100; a memory of 100 images. Judged by the method's "
    "own predictions among all classes, on the whole test part.",
    "er_ace_cifar10",
    DIGITS_ONLINE.changes
    | {
        "data": {"name": "arrays"},
        "augment": _SHIFTED
        | {"size": 28, "pad": 2, "mean": (0.1307,), "std": (0.3081,)},
        "replay.per_class": 10,
        "scenario.per_class": 1000,
    },
    _online(),
    measure="predict/accuracy",
    matrix="predict/class_incremental",
    budget=4e10,
    spends="updates",
    baseline="finetune",
    minutes=0.15,
    data="mnist",
    rates=(0.003, 0.01, 0.03, 0.1, 0.3),
    search=_VALIDATED,
)


def _online_ssl() -> tuple[Entry, ...]:
    """Memory x regulariser, in one pass without labels."""
    policies = {"fifo": "last images", "reservoir": "all alike"}
    policies |= {"min_redundancy": "least alike", "duel": "least duplicated"}
    regularisers = {"none": "replay", "cla_r": "CLA-R", "cassle": "CaSSLe"}
    regularisers |= {"pnr": "PNR"}
    bare = {"method.remembers": False}
    entries = [Entry("none", "no memory", changes=bare)]
    for way in ("cassle", "pnr"):
        changes = bare | {"method.regulariser": way, "method.rows": "all"}
        entries.append(Entry(way, f"{regularisers[way]}, no memory", changes=changes))
    for way, policy in itertools.product(regularisers, policies):
        changes = {"method.regulariser": way, "replay.policy": policy}
        title = f"{regularisers[way]}, memory of {policies[policy]}"
        entries.append(Entry(f"{way}-{policy}", title, changes=changes))
    # One of each of the others; LUMP mixes as many rows as come in.
    gss = {"replay.policy": "gss"}
    entries.append(Entry("none-gss", "replay, memory by gradients", changes=gss))
    uniform = {"replay.policy": "reservoir"}
    changes = uniform | {"method.regulariser": "der"}
    entries.append(Entry("der-reservoir", "DER, memory of all alike", changes=changes))
    changes = uniform | {"method.regulariser": "lump", "replay.size": 20}
    title = "LUMP, memory of all alike"
    entries.append(Entry("lump-reservoir", title, changes=changes))
    entries = [entry._replace(rate_of="none") for entry in entries]
    joint = bare | _JOINT
    words = "sees the stream shuffled"
    return *entries, Entry("iid", "iid", changes=joint, control=words, rate_of="none")


LOOKS_ONLINE = Problem(
    "looks_online",
    "Digits in three looks, in one pass without labels",
    "The stream of `looks` once, in batches of 20 with 44 rows of a memory of 100 "
    "beside them (`configs/online_ssl_small.py` with SimCLR's loss); three "
    "convolutions of width 8 on 8 pixels. Judged by 20 nearest neighbours among the "
    "train rows of all looks.",
    "online_ssl_small",
    _QUIET
    | _KNN
    | _OF_DIGITS
    | {
        "data": {"name": "digits_in_looks"},
        "scenario": {"name": "domain"},
        "encoder": {"name": "conv_net", "width": 8},
        "replay.capacity": 100,
        "method.base": "simclr",
        "method.regulariser": "none",
        "method.weight": None,
        "method.hidden_dim": 128,
        "method.output_dim": 64,
    },
    _online_ssl(),
    measure="knn/accuracy",
    matrix="knn/class_incremental",
    budget=3e10,
    spends="updates",
    baseline="none",
    minutes=0.3,
    rates=(0.03, 0.1, 0.3),
    search=_VALIDATED,
)


def _rehearsal() -> tuple[Entry, ...]:
    """CCLIS, its variants, Co2L, ER, and SupCon under every strategy."""
    titles = {"cclis": "CCLIS", "random": "CCLIS, memory drawn uniformly"}
    titles |= {"no_prd": "CCLIS without PRD", "co2l": "Co2L", "er": "ER"}
    small = {"method.memory_size": 50, "method.hidden_dim": 128}
    small |= {"method.output_dim": 64}
    entries = [
        Entry(name, title, name, small if name != "er" else {"replay.capacity": 50})
        for name, title in titles.items()
    ]
    for strategy, title in _STRATEGIES.items():
        changes = {"scenario": {"name": "class", "num_tasks": 5}}
        changes |= {"method.base": "supcon", "method.strategy": strategy}
        changes |= {"data": {"name": "digits"}, "augment.views": 2}
        entry = Entry(
            f"supcon-{strategy}",
            f"SupCon, {title}",
            changes=changes,
            config="digits",
            rate_of="supcon-finetune",
        )
        entries.append(entry)
        if strategy == "finetune":
            joint = entry._replace(
                name="supcon-joint",
                title="SupCon, all classes at once",
                changes=changes | _JOINT,
                control="needs all data at once",
            )
    return *entries, joint


REHEARSAL = Problem(
    "rehearsal",
    "Digits, two classes at a time, with labels and many epochs",
    "scikit-learn's digits in 5 tasks of 2 classes, batches of 64 "
    "(`configs/cclis_cifar10_small.py` and `configs/digits.py`); three convolutions "
    "of width 8 on 8 pixels; a memory of 50 images for those that have one. Judged by "
    "20 nearest neighbours among all train rows.",
    "cclis_cifar10_small",
    _QUIET
    | _KNN
    | {f"augment.{name}": value for name, value in _OF_DIGITS["augment"].items()}
    | {
        "data": {"name": "digits"},
        "augment.resize": None,
        "encoder": {"name": "conv_net", "width": 8},
        "batch_size": 64,
        "schedule.warmup_epochs": 0,
        "evaluate_untrained": True,
    },
    _rehearsal(),
    measure="knn/accuracy",
    matrix="knn/class_incremental",
    budget=3e10,
    spends="epochs",
    baseline="supcon-finetune",
    minutes=0.2,
    rates=(0.003, 0.01, 0.03, 0.1, 0.3),
    search=_VALIDATED,
)

_EVEN = {"scenario": {"name": "joint"}}
DUEL = Problem(
    "duel",
    "Digits, one class half of the stream, without labels",
    "scikit-learn's digits, of which zeros are half of what comes, in batches of 64 "
    "(`configs/duel_cifar10_small.py`); three convolutions of width 8 on 8 pixels; a "
    "memory of 256. Judged by 20 nearest neighbours among all train rows, which are "
    "balanced.",
    "duel_cifar10_small",
    _QUIET
    | _KNN
    | _OF_DIGITS
    | {
        "data": {"name": "digits"},
        "scenario.imbalance.epoch_steps": 22,
        "encoder": {"name": "conv_net", "width": 8},
        "batch_size": 64,
        "method.memory_size": 256,
        "method.drawn": 64,
    },
    (
        Entry("moco", "MoCo", "moco"),
        Entry("d_moco", "D-MoCo", "d_moco"),
        Entry("simclr", "SimCLR", "simclr"),
        Entry("d_simclr", "D-SimCLR", "d_simclr"),
        Entry("moco-even", "MoCo, even classes", "moco", _EVEN, "has even classes"),
        Entry(
            "simclr-even", "SimCLR, even classes", "simclr", _EVEN, "has even classes"
        ),
    ),
    measure="knn/accuracy",
    matrix=None,
    budget=3e10,
    spends="epochs",
    baseline="moco",
    minutes=0.2,
    rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    search=_VALIDATED,
)


def _icl() -> tuple[Entry, ...]:
    """ICL, its variants, and what its paper compares it with."""
    titles = {"icl": "ICL", "no_lrl": "ICL, fixed rate", "no_meta": "ICL, no meta step"}
    titles |= {"no_both": "ICL, neither", "finetune": "fine-tuning", "replay": "replay"}
    titles |= {"distill": "distillation", "continue": "going on with all"}
    controls = {"retrain": "trains anew on all", "frozen": "learns nothing new"}
    controls |= {"random": "learns nothing at all after its start"}
    chosen = {**titles, "retrain": "retraining", "frozen": "frozen", "random": "random"}
    return tuple(
        Entry(name, title, name, control=controls.get(name, ""))
        for name, title in chosen.items()
        if name in icl.VARIANTS
    )


ICL_MUTAG = Problem(
    "icl_mutag",
    "MUTAG: half of the graphs, then the other half, without labels",
    "188 graphs of MUTAG (`configs/icl_proteins.py`); a graph convolutional network "
    "of two layers of 32. Judged by a support vector machine on all graphs, over 10 "
    "folds.",
    "icl_proteins",
    _QUIET | {"evaluators": {"svm": {"last_only": True}}, "patience": 0},
    _icl(),
    measure="svm/all",
    matrix=None,
    budget=1e10,
    spends="epochs",
    baseline="finetune",
    minutes=0.2,
    data="mutag",
)

PROBLEMS = {
    problem.name: problem
    for problem in (
        LOOKS,
        DIGITS_ONLINE,
        LOOKS_ONLINE,
        REHEARSAL,
        DUEL,
        SPLIT_MNIST,
        ICL_MUTAG,
    )
}


def find(name: str) -> Problem:
    """The problem of a name.

    Raises:
      ValueError: there is none; the message has the nearest names.
    """
    core.check_choice("--problems", name, tuple(PROBLEMS))
    return PROBLEMS[name]


def entry(problem: Problem, name: str) -> Entry:
    """The entry of a problem.

    Raises:
      ValueError: there is none; the message has the nearest names.
    """
    named = {entry.name: entry for entry in problem.entries}
    core.check_choice(f"the entry of {problem.name}", name, tuple(named))
    return named[name]


def rates(problem: Problem, entry: Entry) -> tuple[float, ...]:
    """Learning rates that the search of an entry chooses from."""
    return entry.rates or problem.rates
