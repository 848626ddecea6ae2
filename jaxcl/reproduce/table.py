"""The published numbers that can be reproduced: one row for each.

A row names a config of configs/, what the config changes to, where the number stands,
and what differs from its source. A new reproduction is one row here.
"""

import math
from typing import NamedTuple

from jaxcl import core
from jaxcl.reproduce import verdict


class Row(NamedTuple):
    """A published number, and the command that measures it."""

    name: str
    what: str  # for people: method, benchmark
    config: str  # FILE or FILE:WORDS of configs/
    data: str  # name of the set, in the folder of --data
    measure: str  # a matrix of results.json, of which the mean over tasks; or a scalar
    published: verdict.Published
    source: str
    minutes: float  # of a run, on one core: roughly
    differs: str  # from the source, beyond what the config's head says
    overrides: tuple[str, ...] = ()  # as of jaxcl.main, without --config.
    note: str = ""  # on what came out


def _deviation(spread: float, runs: int) -> dict:
    """Fields of a value with the sample deviation over so many runs."""
    words = f"+- {spread:g}, {runs} runs"
    return {"error": spread / math.sqrt(runs), "spread": words}


_TASKS = "predict/class_incremental"  # mean over tasks, all classes to choose from
_ROWS_OF_TEST = "predict/accuracy"  # over all rows of the test split
_NINE_TENTHS = "Nine tenths of the train split were at hand. "


def _avalanche(name, what, config, value, where, minutes, **more) -> Row:
    """A row of continual-learning-baselines."""
    data = more.pop("data", "mnist")
    published = verdict.Published(value, tolerance=3.0, spread="one run")
    source = f"ContinualAI/continual-learning-baselines 4900462, {where}"
    differs = _NINE_TENTHS + more.pop("differs", "")
    return Row(
        name,
        what,
        config,
        data,
        _ROWS_OF_TEST,
        published,
        source,
        minutes,
        differs.strip(),
        **more,
    )


_TARGETS = "tests/target_results.csv"
_AVALANCHE = (
    _avalanche(
        "gdumb_split_mnist",
        "GDumb, Split MNIST, 4400 images",
        "baselines_mnist:gdumb",
        97.0,
        _TARGETS,
        3,
    ),
    _avalanche(
        "replay_split_mnist",
        "Online replay, Split MNIST, 1000 images",
        "baselines_mnist:replay",
        92.0,
        _TARGETS,
        1,
    ),
    _avalanche(
        "agem_permuted_mnist",
        "A-GEM, Permuted MNIST, 17 tasks",
        "baselines_mnist:agem",
        81.0,
        _TARGETS,
        15,
    ),
    _avalanche(
        "gem_permuted_mnist",
        "GEM, Permuted MNIST, 5 tasks",
        "baselines_mnist:gem",
        93.0,
        _TARGETS,
        15,
    ),
    _avalanche(
        "gem_permuted_mnist_17",
        "GEM, Permuted MNIST, 17 tasks",
        "baselines_mnist:gem",
        80.0,
        "README",
        150,
        overrides=("scenario.num_tasks=17", "replay.capacity=17000"),
    ),
    _avalanche(
        "er_ace_split_cifar100",
        "ER-ACE, Split CIFAR-100, 20 tasks, 10,000 images",
        "er_ace_cifar100:er_ace",
        24.0,
        _TARGETS,
        10,
        data="cifar100",
        overrides=(
            "method.head=linear",
            "data.validation=0.0",
            "augment.mean=(0.5071,0.4865,0.4409)",
            "augment.std=(0.2009,0.1984,0.2023)",
        ),
        differs="The source stores a whole task before it trains on it, so that images "
        "are replayed that have not come yet, and replays nothing in the first task; "
        "ours stores what has come.",
    ),
)

# Accuracies from memory: the paper's tables could not be opened. Mean, deviation.
_DER = {
    ("er", "split"): ((80.43, 1.89), (86.12, 1.89), (93.40, 1.29)),
    ("der", "split"): ((84.55, 1.64), (90.54, 1.18), (94.90, 0.57)),
    ("derpp", "split"): ((85.61, 1.40), (91.00, 1.49), (95.30, 1.20)),
    ("er", "permuted"): ((72.37, 0.87), (80.60, 0.86), (89.90, 0.13)),
    ("der", "permuted"): ((81.74, 1.07), (87.29, 0.46), (91.66, 0.11)),
    ("derpp", "permuted"): ((83.58, 0.59), (88.21, 0.39), (92.26, 0.17)),
    ("er", "rotated"): ((85.01, 1.90), (88.91, 1.44), (93.45, 0.56)),
    ("der", "rotated"): ((90.04, 2.61), (92.24, 1.12), (94.14, 0.31)),
    ("derpp", "rotated"): ((90.43, 1.87), (92.77, 1.05), (94.65, 0.33)),
}
_MEMORIES = (200, 500, 5120)
_METHODS = {"er": "ER", "der": "DER", "derpp": "DER++"}


def _der() -> tuple[Row, ...]:
    """The rows of the DER paper on MNIST."""
    rows = []
    for (method, stream), cells in _DER.items():
        for memory, (mean, deviation) in zip(_MEMORIES, cells, strict=True):
            rows.append(
                Row(
                    f"{method}_{stream}_mnist_{memory}",
                    f"{_METHODS[method]}, {stream.capitalize()} MNIST, {memory} images",
                    f"der_mnist:{method},{stream},{memory}",
                    "mnist",
                    _TASKS,
                    verdict.Published(mean, **_deviation(deviation, 10), read=False),
                    "Buzzega et al., NeurIPS 2020, tables of MNIST; settings: "
                    "aimagelab/mammoth, tag neurips2020, utils/best_args.py",
                    1 if stream == "split" else 5,
                    _NINE_TENTHS.strip(),
                )
            )
    return tuple(rows)


# Table 2 of the paper; its code prints two standard errors of the mean behind "+-".
_CACCIA: dict[str, tuple[str, dict]] = {
    "er": ("ER", {20: (26.7, 0.3), 100: (41.5, 0.6)}),
    "er_ace": ("ER-ACE", {20: (43.7, 0.3), 100: (50.9, 0.4)}),
    "er_aml": ("ER-AML", {20: (40.1, 0.4), 100: (49.8, 0.5)}),
    "mir": ("MIR", {20: (29.8, None), 100: (47.6, None)}),
}


def _caccia() -> tuple[Row, ...]:
    """The rows of the ER-ACE paper on Split CIFAR-10."""
    rows = []
    for method, (title, cells) in _CACCIA.items():
        for memory, (mean, spread) in cells.items():
            given = {"spread": "no spread"}
            if spread is not None:
                given = {"error": spread / 2, "spread": f"+- {spread:g}, 20 runs"}
            rows.append(
                Row(
                    f"{method}_split_cifar10_{memory}",
                    f"{title}, Split CIFAR-10, {memory} images a class",
                    f"er_ace_cifar10:{method}",
                    "cifar10",
                    _ROWS_OF_TEST,
                    verdict.Published(mean, **given),
                    "Caccia et al., arXiv 2104.05025, Table 2",
                    20 if method in ("er_aml", "mir") else 10,
                    _NINE_TENTHS + "The paper prints no learning rates, and does not "
                    "say what stands behind +-: two standard errors, as its code.",
                    (f"replay.per_class={memory}",),
                )
            )
    return tuple(rows)


# Of the best learning rate of each cell, mean and deviation of three runs.
_SEARCHED = {
    "er_task_free": ("ER task-free", {20: (24.6, 2.0), 100: (40.0, 2.1)}, ()),
    "er_ace": (
        "ER-ACE as released",
        {20: (44.7, 1.5), 100: (53.7, 0.3)},
        ("method.form=code",),
    ),
    "er_aml": (
        "ER-AML, supervised contrastive",
        {20: (45.7, 0.8), 100: (52.5, 1.7)},
        ("method.loss=sup_con", "method.temperature=0.2", "optimizer.lr=0.1"),
    ),
    "mir": ("MIR", {20: (28.2, 3.8), 100: (45.7, 0.3)}, ()),
    "icarl": ("iCaRL", {20: (41.9, 3.6), 100: (46.0, 0.4)}, ()),
    "agem": ("A-GEM", {20: (18.7, 0.2), 100: (18.6, 0.2)}, ()),
}
_SEARCHED_RATES = {("er_ace", 20): "0.01"}  # where they are not those of the config


def _searched() -> tuple[Row, ...]:
    """The rows of the search that the released code of the ER-ACE paper holds."""
    rows = []
    for method, (title, cells, changes) in _SEARCHED.items():
        for memory, (mean, deviation) in cells.items():
            rate = _SEARCHED_RATES.get((method, memory))
            rows.append(
                Row(
                    f"searched_{method}_split_cifar10_{memory}",
                    f"{title}, Split CIFAR-10, {memory} images a class, search",
                    f"er_ace_cifar10:{method}",
                    "cifar10",
                    _ROWS_OF_TEST,
                    verdict.Published(mean, **_deviation(deviation, 3)),
                    "pclucas14/AML 7c92936, hp_result_final.csv",
                    20 if method in ("er_aml", "mir") else 10,
                    "The source judges on the tenth of the train images that it holds "
                    "out, and prints the best of three learning rates there; ours "
                    "judges on the test split. Both train on 45,000 images.",
                    (f"replay.per_class={memory}", "data.validation=0.0", *changes)
                    + ((f"optimizer.lr={rate}",) if rate else ()),
                )
            )
    return tuple(rows)


def _survey(method, title, published, minutes, differs="") -> Row:
    return Row(
        f"survey_{method}_split_cifar100",
        f"{title}, Split CIFAR-100, 20 tasks, 2000 images",
        f"survey_cifar100:{method}",
        "cifar100",
        _ROWS_OF_TEST,
        published,
        "AlbinSou/ocl_survey 5fcaa39"
        + (", logs of its five runs" if published.read else "; Table 2 of its paper"),
        minutes,
        f"{_NINE_TENTHS}Train images went through JPEG. {differs}".strip(),
    )


_SURVEY = (
    _survey("er", "ER", verdict.Published(28.15, **_deviation(1.22, 5)), 35),
    _survey(
        "er_lwf",
        "ER + LwF",
        verdict.Published(30.4, **_deviation(0.8, 5), read=False),
        45,
        "Its teacher holds the classes of the second to the present task, as the "
        "source's code does; there all of a task's classes compete from its first "
        "batch on, here each does from its first row on.",
    ),
    _survey(
        "er_ace",
        "ER-ACE",
        verdict.Published(29.9, **_deviation(0.6, 5), read=False),
        35,
    ),
    _survey(
        "derpp", "DER++", verdict.Published(29.3, **_deviation(0.9, 5), read=False), 45
    ),
    _survey(
        "mir", "MIR", verdict.Published(29.4, **_deviation(1.9, 5), read=False), 150
    ),
)


def _graphcl(name, word, data, mean, deviation, minutes, note="") -> Row:
    return Row(
        f"graphcl_{word}",
        f"GraphCL with GIN, {name}",
        f"graphcl:{word}",
        data,
        "svm/all",
        verdict.Published(mean, **_deviation(deviation, 5)),
        "You et al., NeurIPS 2020, as later works print it (README of GraphMAE)",
        minutes,
        "Judged after epoch 20, as the source's authors say. Their folds are drawn "
        "anew in every run; ours are drawn by the seed.",
        note=note,
    )


_GRAPHCL = (
    _graphcl(
        "MUTAG",
        "mutag",
        "mutag",
        86.80,
        1.34,
        1,
        "The same network before its first step has 84.43 +- 2.44 over "
        "seeds 0 to 4: little of the number is learnt.",
    ),
    _graphcl(
        "PROTEINS",
        "proteins",
        "proteins",
        74.39,
        0.45,
        5,
        "The same network before its first step has 74.16 +- 0.45 over "
        "seeds 0 to 4: that the number agrees says nothing of learning.",
    ),
    _graphcl("REDDIT-BINARY", "reddit", "reddit_binary", 89.53, 0.84, 30),
)

_ALL = (*_AVALANCHE, *_der(), *_caccia(), *_searched(), *_SURVEY, *_GRAPHCL)
ROWS = {row.name: row for row in _ALL}


def find(name: str) -> Row:
    """The row of a name.

    Raises:
      ValueError: there is none; the message has the nearest names.
    """
    core.check_choice("NAME", name, tuple(ROWS))
    return ROWS[name]
