"""What bases and strategies hand to their losses, in float64 from the equations."""

import contextlib
import logging
import re

import numpy as np
import pytest

from helpers import run_directories, toy, twins
from helpers import two_view_losses as losses
from jaxcl.data import sources
from jaxcl.methods.two_view import bases, strategies
from jaxcl.run import job

RNG = np.random.default_rng(0)
B, K, D, R = 4, 7, 5, 3
Z, OWN, P, K2, F = (RNG.normal(size=(B, 2, D)) for _ in range(5))
KEYS, FROZEN = (twins.unit(RNG.normal(size=(2, K, D))) for _ in range(2))
REPLAYED, STORED = (RNG.normal(size=(R, D)) for _ in range(2))
LABEL = np.array([0, 1, 0, 2])
MASK = np.array([True, False, True])
LOCAL = RNG.normal(size=(B, 3, D))
LAYERS = {
    f"{name}prototypes": RNG.normal(size=(K, D))
    for name in ("", "distil_", "slow_", "frozen_")
}
FEATURES = bases.Features(
    Z,
    LABEL,
    OWN,
    P,
    K2,
    F,
    KEYS,
    FROZEN,
    REPLAYED,
    STORED,
    MASK,
    LOCAL,
    centre=RNG.normal(size=K),
    target_temperature=np.array(0.4),
    slices=twins.unit(RNG.normal(size=(6, D))),
    **LAYERS,
)
CODE = bases.Options(
    temperature=0.3,
    distill_temperature=0.5,
    weight=0.7,
    negative_weight=0.4,
    form="code",
    pn1=True,
    pn2=True,
    scale=0.2,
    off_diagonal=0.03,
    invariance=3.0,
    variance=2.0,
    covariance=0.6,
    balance="centre",
    normality=0.3,
)
PAPER = CODE._replace(form="paper")


def value(base, strategy, options, features=FEATURES):
    single = [
        x if x is None or x.dtype != np.float64 else np.float32(x) for x in features
    ]
    loss = strategies.get(strategy).loss
    return loss(bases.get(base), bases.Features(*single), options)


def check(ours, twin):
    np.testing.assert_allclose(ours, twin, rtol=3e-5)


# What these add is no term of this loss.
UNCHANGED = {"finetune", "ewc", "lump"}


@pytest.mark.parametrize("options", [CODE, PAPER], ids=lambda o: o.form)
@pytest.mark.parametrize("base", bases.BASES)
def test_a_base_is_its_equations(base, options):
    for strategy in ("finetune", "cassle", "pnr"):
        twin = losses.loss(base, strategy, FEATURES, options)
        check(value(base, strategy, options), twin)


@pytest.mark.parametrize("local", [None, LOCAL], ids=["two", "local"])
@pytest.mark.parametrize("base", ["dino", "lejepa"])
def test_local_crops_are_further_views(base, local):
    """And DINO's targets may be balanced by Sinkhorn-Knopp."""
    features = FEATURES._replace(local=local)
    for options in (CODE, CODE._replace(balance="sinkhorn")):
        twin = losses.loss(base, "finetune", features, options)
        check(value(base, "finetune", options, features), twin)


@pytest.mark.parametrize("base", ["simclr", "byol"])
def test_a_strategy_is_its_equation(base):
    alone = losses.loss(base, "finetune", FEATURES, CODE)
    for strategy in strategies.STRATEGIES:
        twin = losses.loss(base, strategy, FEATURES, CODE)
        assert (abs(twin - alone) > 0.01) == (strategy not in UNCHANGED)
        check(value(base, strategy, CODE), twin)


@pytest.mark.parametrize(
    "base", [name for name, base in bases.BASES.items() if base.unbounded]
)
def test_without_pseudo_negatives_pnr_is_cassle(base):
    without = CODE._replace(pn2=False)
    check(value(base, "pnr", without), value(base, "cassle", CODE))


@pytest.mark.parametrize(
    "base, expected",
    [
        ("simclr", (0.2, 1.0, 1.0, None)),
        ("supcon", (0.1, 1.0, 1.0, None)),
        ("mocov2plus", (0.2, 1.0, 1.0, 0.999)),
        ("barlow_twins", (0.2, 1.0, 1.0, None)),
        ("byol", (0.2, 1.0, 1.0, 1.0)),
        ("vicreg", (0.2, 25.0, 23.0, None)),
        ("simsiam", (0.2, 1.0, 1.0, None)),
        ("dino", (0.1, 1.0, 1.0, 1.0)),
        ("lejepa", (0.2, 1.0, 0.92, None)),
    ],
)
def test_defaults_are_the_papers(base, expected):
    """And a value from the config takes their place, 0 too."""
    spec = bases.get(base)
    found = (spec.temperature, spec.weight, spec.negative_weight)
    assert found == expected[:3]
    if spec.momentum:
        assert spec.momentum_end == expected[3]


def setup(tmp_path, **changes):
    """What `make` fixed, of the toy job."""
    return run_directories.untried(tmp_path, **changes).method.init.args[0]


def test_config_values_replace_defaults(tmp_path):
    one = {"method.base": "vicreg", "method.strategy": "pnr"}
    made = setup(tmp_path / "a", **one)
    assert (made.options.weight, made.options.negative_weight) == (25.0, 23.0)
    made = setup(tmp_path / "b", **one, method__weight=0.0, method__negative_weight=0.0)
    assert (made.options.weight, made.options.negative_weight) == (0.0, 0.0)
    made = setup(tmp_path / "c", method__strategy="ewc")
    assert made.options.weight == 0.01
    made = setup(tmp_path / "d", method__base="byol", method__momentum_end=0.5)
    assert made.momentum == {"start": 0.99, "end": 0.5}
    made = setup(tmp_path / "f", method__base="dino", method__target_warmup=0.5)
    assert made.momentum == {"start": 0.996, "end": 1.0}
    assert made.options.distill_temperature == 0.1
    assert (made.prototypes, made.slices, made.targets.warmup) == (12, 0, 0.5)
    made = setup(tmp_path / "e", method__base="barlow_twins", method__hidden_layers=0)
    assert made.copied.nets["projector"].features == (8,)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"method.base": "byoll"}, "config.method.base='byoll'"),
        ({"method.strategy": "casle"}, "config.method.strategy='casle'"),
        ({"method.memory_size": 0}, "config.method.memory_size=0"),
        ({"method.mix": 0.0}, "config.method.mix=0.0"),
        ({"method.fisher_share": 1.5}, "config.method.fisher_share=1.5"),
        ({"method.temperature": 0.0}, "config.method.temperature=0.0"),
        ({"method.weight": float("nan")}, "config.method.weight=nan"),
        ({"method.momentum_end": 2.0}, "config.method.momentum_end=2.0"),
        ({"method.output_dim": 0}, "config.method.output_dim=0"),
        ({"method.hidden_layers": -1}, "config.method.hidden_layers=-1"),
        ({"method.prototypes": 0}, "config.method.prototypes=0"),
        ({"method.balance": "center"}, "config.method.balance='center'"),
        ({"method.normality": 1.5}, "config.method.normality=1.5"),
        ({"method.slices": 0}, "config.method.slices=0"),
        (
            {"augment.local": {"views": 2, "size": 4}},
            "config.augment.local",
        ),
        (
            {
                "augment.local": {"views": 2, "size": 4},
                "method.base": "dino",
                "method.strategy": "lump",
            },
            "config.augment.local",
        ),
        (
            {
                "augment.local": {"views": 2, "size": 4},
                "method": {"name": "duel"},
            },
            "config.augment.local",
        ),
        (
            {"augment.local": {"size": 4}, "method.base": "dino"},
            "config.augment.local.views",
        ),
    ],
)
def test_wrong_options_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        toy.job(tmp_path, **change)


def test_supervised_bases_refuse_rows_without_labels(tmp_path, monkeypatch):

    whole = sources.SOURCES["digits"]

    def unlabelled():
        data = whole()
        label = data.train.label.copy()
        label[3] = -1
        return data._replace(train=data.train._replace(label=label))

    monkeypatch.setitem(sources.SOURCES, "digits", unlabelled)
    with pytest.raises(ValueError, match="label.* 1 of"):
        toy.job(tmp_path, method__base="supcon", scenario={"name": "joint"})


PAPERS = {"method.form": "paper"}


@pytest.mark.parametrize(
    "base, changes, warns",
    [
        ("simclr", PAPERS, False),
        ("barlow_twins", {}, False),
        ("barlow_twins", PAPERS, True),
        ("barlow_twins", PAPERS | {"method.negative_weight": 0.01}, True),
        ("barlow_twins", PAPERS | {"method.negative_weight": 0.0}, False),
        ("barlow_twins", PAPERS | {"method.pn2": False}, False),
        ("byol", {"method.negative_weight": 2.0}, False),
        ("byol", PAPERS, True),
        ("byol", PAPERS | {"method.negative_weight": 0.9}, False),
        ("vicreg", {}, False),
        ("vicreg", {"method.weight": 1.0}, True),
        ("vicreg", PAPERS | {"method.negative_weight": 25.0}, True),
        ("dino", PAPERS | {"method.negative_weight": 25.0}, False),
        ("lejepa", {}, False),
        ("lejepa", {"method.negative_weight": 1.0}, True),
    ],
)
def test_what_has_no_bound_is_warned_about(tmp_path, caplog, base, changes, warns):
    with caplog.at_level(logging.WARNING):
        toy.job(tmp_path, method__base=base, method__strategy="pnr", **changes)
    assert ("has no bound" in caplog.text) == warns


@pytest.mark.parametrize(
    "base, changes, warns",
    [
        ("byol", {}, False),
        ("byol", {"method.negative_weight": 1000.0}, True),  # was -3411, in silence
        ("byol", {"method.negative_weight": 1000.0, "method.pn2": False}, False),
        ("byol", {"method.negative_weight": 3.0, "method.weight": 3.0}, False),
        ("barlow_twins", {"method.negative_weight": 1.5}, True),
        ("vicreg", {"method.weight": 1.0}, False),  # of which the bound is said
        ("mocov2plus", {"method.negative_weight": 1000.0}, False),  # it has no use
    ],
)
def test_a_distance_that_rules_the_loss_is_warned_about(
    tmp_path, caplog, base, changes, warns
):
    with caplog.at_level(logging.WARNING):
        toy.job(tmp_path, method__base=base, method__strategy="pnr", **changes)
    assert ("it pays to leave them" in caplog.text) == warns


@pytest.mark.parametrize(
    "base, strategy, queues",
    [
        ("mocov2plus", "pnr", {"key_queue", "frozen_queue"}),
        ("mocov2plus", "cassle", {"key_queue"}),
        ("byol", "pnr", set()),
        ("simsiam", "pnr", set()),
        ("dino", "pnr", set()),
    ],
)
def test_only_what_a_loss_reads_is_kept(tmp_path, base, strategy, queues):
    """And a predictor and prototypes are those bases' alone that have one."""
    changes = {"method.base": base, "method.strategy": strategy}
    state = job.initial_state(toy.job(tmp_path, **changes))
    kept = state.extra._asdict()
    assert {n for n, x in kept.items() if n.endswith("queue") and x is not None} == (
        queues
    )
    networks, copied = {"encoder", "projector", "distiller"}, {"encoder", "projector"}
    if base in ("byol", "simsiam"):
        networks |= {"predictor"}
    if base == "dino":
        networks |= {"prototypes", "distil_prototypes"}
        copied |= {"prototypes"}
    assert set(state.params) == networks
    assert set(kept["teacher"]) == copied
    assert set(kept["momentum"]) == (copied if bases.get(base).momentum else set())
    assert (kept["centre"] is not None) == (base == "dino")


def test_replayed_rows_are_spread_over_the_devices(tmp_path):
    """24 replayed rows on 8 devices: each convolves 3 of them, not all."""
    work = toy.job(tmp_path, devices=8, method__base="simclr", method__strategy="der")
    step, resident = job.compile_step(work), job.resident(work)
    task = work.stream.tasks[0]
    state = job.initial_state(work)
    feed = job.feed(work, task.train, 0, 0)
    with contextlib.closing(feed):
        _, batches, number = next(feed)
        program = step.lower(state, resident, batches, number).compile().as_text()
    rows = {int(n) for n in re.findall(r"f32\[(\d+),8,8,4\]\S* convolution\(", program)}
    assert 3 in rows and 24 not in rows, rows
