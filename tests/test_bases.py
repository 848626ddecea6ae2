"""What bases and strategies hand to their losses, in float64 from the equations."""

import logging
import re

import jax
import numpy as np
import pytest

from helpers import interpreted, jaxprs, run_directories, toy, twins
from helpers import two_view_losses as losses
from jaxcl import schema
from jaxcl.data.sources import by_name
from jaxcl.losses import streaming
from jaxcl.memory import queue as queue_lib
from jaxcl.methods import two_view
from jaxcl.methods.two_view import bases, step, strategies
from jaxcl.methods.two_view.bases import dino
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
FEATURES = losses.Features(
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
    support=twins.unit(RNG.normal(size=(K, D))),
    index=np.array([2, 0, 4, 1]),
    patches=RNG.normal(size=(2 * B, 3, D)),
    slow_patches=RNG.normal(size=(2 * B, 3, D)),
    hides=np.array([1, 0, 1, 1, 0, 0, 1, 0]),
    patch_centre=RNG.normal(size=K),
    h=RNG.normal(size=(B, 2, D + 1)),
    frozen_h=RNG.normal(size=(B, 2, D + 1)),
    **LAYERS,
)
CODE = losses.Options(scale=0.2, off_diagonal=0.03)
PAPER = CODE._replace(form="paper")


def taken(function, options):
    """Those options that a function takes."""
    return {n: options[n] for n in schema.option_of(function) if n in options}


def value(base, strategy, options, features=FEATURES):
    """The loss of a task after the first."""
    given = options._asdict()
    spec = bases.make_base({"name": base} | taken(bases.find_make(base), given))
    make = strategies.find_make(strategy)
    plan = strategies.make_strategy({"name": strategy} | taken(make, given))
    rows = losses.for_library(base, features)
    return interpreted.jit(lambda: step.compute_loss(spec, plan, rows))()


def check(ours, twin):
    np.testing.assert_allclose(ours, twin, rtol=3e-5)


# What these add is no term of this loss.
UNCHANGED = {"finetune", "ewc", "l2_sp", "lump"}


@pytest.mark.parametrize("options", [CODE, PAPER], ids=lambda o: o.form)
@pytest.mark.parametrize("base", bases.BASES)
def test_a_base_is_its_equations(base, options):
    for strategy in ("finetune", "cassle", "pnr"):
        if strategy not in (bases.make_base(base).strategies or strategies.STRATEGIES):
            continue
        twin = losses.loss(base, strategy, FEATURES, options)
        check(value(base, strategy, options), twin)


@pytest.mark.parametrize("strategy", ["finetune", "cassle", "pnr"])
@pytest.mark.parametrize("base", ["simclr", "mocov2plus"])
def test_a_streaming_loss_has_no_logits_of_all_rows(base, strategy, monkeypatch):
    """Logits: of one view or of both, with rows of the batch or of the queue."""
    monkeypatch.setattr(streaming, "_TILE", 3)
    make, given = strategies.find_make(strategy), CODE._asdict()
    plan = strategies.make_strategy({"name": strategy} | taken(make, given))
    logits = {(n, m) for n in (B, 2 * B) for m in (B, 2 * B, K)}
    rows, found = losses.for_library(base, FEATURES), []
    for option in (False, True):
        spec = bases.make_base({"name": base, "streaming": option})
        program = jax.make_jaxpr(lambda spec=spec: step.compute_loss(spec, plan, rows))
        made = jaxprs.equations(program().jaxpr)
        shapes = {x.aval.shape[-2:] for eqn in made for x in eqn.outvars}
        found.append(shapes & logits)
    whole, tiles = found
    assert whole and not tiles


@pytest.mark.parametrize("local", [None, LOCAL], ids=["two", "local"])
@pytest.mark.parametrize("base", ["dino", "lejepa", "swav"])
def test_local_crops_are_further_views(base, local):
    """And DINO's targets may be balanced by Sinkhorn-Knopp."""
    features = FEATURES._replace(local=local)
    for options in (CODE, CODE._replace(balance="sinkhorn")):
        twin = losses.loss(base, "finetune", features, options)
        check(value(base, "finetune", options, features), twin)


@pytest.mark.parametrize("balance", ["centre", "sinkhorn"])
@pytest.mark.parametrize("weights", [{"ibot": 0.7}, {"koleo": 0.4}], ids=str)
def test_dino_has_the_terms_of_dinov2(weights, balance):
    options = CODE._replace(balance=balance, **weights)
    twin = losses.loss("dino", "finetune", FEATURES, options)
    alone = losses.loss("dino", "finetune", FEATURES, CODE._replace(balance=balance))
    assert abs(twin - alone) > 0.01
    check(value("dino", "finetune", options), twin)


@pytest.mark.parametrize("base", ["simclr", "byol"])
def test_a_strategy_is_its_equation(base):
    alone = losses.loss(base, "finetune", FEATURES, CODE)
    for strategy in strategies.STRATEGIES.keys() - {"distil"}:  # see test_distil.py
        twin = losses.loss(base, strategy, FEATURES, CODE)
        assert (abs(twin - alone) > 0.01) == (strategy not in UNCHANGED)
        check(value(base, strategy, CODE), twin)


@pytest.mark.parametrize(
    "base, expected",
    [
        ("simclr", (0.2, 1.0, None, None)),
        ("supcon", (0.1, 1.0, None, None)),
        ("mocov2plus", (0.2, 1.0, None, 0.999)),
        ("barlow_twins", (None, 1.0, 1.0, None)),
        ("byol", (None, 1.0, 1.0, 1.0)),
        ("vicreg", (None, 25.0, 23.0, None)),
        ("simsiam", (None, 1.0, 1.0, None)),
        ("dino", (0.1, 1.0, 1.0, 1.0)),
        ("lejepa", (None, 1.0, 0.92, None)),
        ("swav", (0.1, 1.0, 1.0, None)),
        ("nnclr", (0.1, 1.0, 1.0, None)),
        ("diet", (None, 1.0, None, None)),
    ],
)
def test_defaults_are_the_papers(base, expected):
    spec, options = bases.make_base(base), schema.defaults(bases.find_make(base))
    end = spec.momentum and spec.momentum[1]
    negative_weight = spec.negative_weight if spec.distance else None
    found = (options.get("temperature"), spec.weight, negative_weight, end)
    assert found == expected


def setup(tmp_path, **changes):
    """What `make` fixed, of the toy job."""
    return run_directories.untried(tmp_path, **changes).method.init.__wrapped__.args[0]


def test_config_values_replace_defaults(tmp_path):
    """A value from the config takes the place of the base's, 0 too."""

    def filled(**options):
        strategy = {"name": "pnr"} | options
        sections = {"base": {"name": "vicreg"}, "strategy": strategy}
        found = schema.fill_dependent(two_view.make, {"output_dim": None} | sections)
        return found["output_dim"], *(found["strategy"][name] for name in weights)

    weights = ("weight", "negative_weight")
    assert filled() == filled(**dict.fromkeys(weights)) == (2048, 25.0, 23.0)
    assert filled(**dict.fromkeys(weights, 0.0)) == (2048, 0.0, 0.0)
    made = setup(tmp_path / "d", method__base="byol", method__momentum_end=0.5)
    assert made.base.momentum == (0.99, 0.5)
    made = setup(tmp_path / "f", method__base="dino")
    assert made.base.momentum == (0.996, 1.0)
    assert made.base_params == ("prototypes",)
    params = made.base.init_params(jax.random.key(0), 8)
    assert params["prototypes"].shape == (12, 8)
    made = setup(tmp_path / "e", method__base="barlow_twins", method__hidden_layers=0)
    assert made.copied.nets["projector"].features == (8,)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"method.strategy": "casle"}, "config.method.strategy='casle'"),
        ({"method.base": "dino", "method.ibot": 1.0}, "config.method.base.ibot"),
        ({"method.base": "diet", "method.rows": 99}, "config.method.base.rows=99"),
        (
            {"method.base": "diet", "method.strategy": "lump"},
            "config.method.strategy='lump'",
        ),
        (
            {"method.base": "simclr", "augment.views": 1},
            "config.augment.views=1",
        ),
        # Options of another base or strategy: the message says which has them.
        ({"method.slices": 8}, "config.method.slices=8: .*lejepa"),
        ({"method.base": "byol", "method.queue_size": 8}, "queue_size=8: .*mocov2plus"),
        ({"method.pn1": False}, "config.method.pn1=False: .*pnr"),
        (
            {"method.strategy": "pnr", "method.memory_size": 8},
            "config.method.memory_size=8: .*der.*lump",
        ),
        ({"method.base": "no_such_package.base"}, "config.method.base='no_such_pack"),
        ({"augment.local": {"views": 2, "size": 4}}, "config.augment.local"),
        (
            {
                "augment.local": {"views": 2, "size": 4},
                "method.base": "dino",
                "method.strategy": "lump",
            },
            "config.augment.local",
        ),
        (
            {"augment.local": {"views": 2, "size": 4}, "method": {"name": "duel"}},
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


OWN_BASE = """
from jaxcl import core
from jaxcl.methods.two_view import records

def make(*, factor: float = 2.0) -> records.Base:
    "Twice the squared distance of the views."
    def loss(x):
        z1, z2 = core.split_views(x.z)
        return factor * ((z1 - z2) ** 2).mean()
    return records.Base(loss)
"""
OWN_STRATEGY = """
from jaxcl import schema
from jaxcl.methods.two_view import records

def make(*, pull: schema.Weight = 1.0) -> records.Strategy:
    "The base and the distance to the teacher."
    def term(base, x):
        return ((x.z - x.f) ** 2).mean()
    return records.Strategy(term, pull, teacher=records.Teacher("running"))
"""


def test_a_package_may_bring_a_base_and_a_strategy(tmp_path, monkeypatch):
    """With options of their own, which are checked; forms that it lacks are refused."""
    package = tmp_path / "brought"
    package.mkdir()
    for name, text in {"base": OWN_BASE, "strategy": OWN_STRATEGY}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"method.base": "brought.base", "method.strategy": "brought.strategy"}
    work = run_directories.untried(tmp_path / "a", **own, method__factor=3.0)
    state, _ = job.shapes(work.method, work.data)
    assert set(state.extra.teacher) == {"encoder", "projector"}
    with pytest.raises(ValueError, match=r"config\.method\.strategy\.pull=-1"):
        toy.job(tmp_path / "b", **own, method__pull=-1.0)
    with pytest.raises(ValueError, match=r"config\.method\.pull"):
        toy.job(tmp_path / "c", method__pull=1.0)
    for strategy in ("cassle", "pnr"):
        with pytest.raises(ValueError, match=f"strategy='{strategy}'.*brought.base"):
            toy.job(
                tmp_path / "d", method__base="brought.base", method__strategy=strategy
            )


@pytest.mark.parametrize(
    "given, name",
    [
        (
            {"base": "dino", "balance": "sinkhorn", "centre_momentum": 0.5},
            "base.centre_mom",
        ),
        ({"base": "dino", "centre_momentum": 0.5}, None),
        ({"base": "simclr", "head_lr": 0.5}, "head_lr"),
        ({"base": "simclr", "head_lr": 0.5, "online_head": True}, None),
        ({"base": "simclr", "strategy": "pnr", "weight": 3.0}, "strategy.weight=3.0"),
        ({"base": "byol", "strategy": "pnr", "weight": 3.0}, None),
    ],
)
def test_options_that_change_nothing_are_told(given, name, tmp_path, caplog):
    changes = {f"method.{option}": value for option, value in given.items()}
    run_directories.untried(tmp_path, **changes)
    messages = [x.getMessage() for x in caplog.records if x.levelname == "WARNING"]
    told = [message for message in messages if message.startswith("config.method.")]
    assert len(told) == (name is not None)
    assert name is None or f"config.method.{name}" in told[0]


def test_supervised_bases_refuse_rows_without_labels(tmp_path, monkeypatch):
    monkeypatch.setitem(by_name.SOURCES, "digits", toy.unlabelled)
    with pytest.raises(ValueError, match="label.* 1 of"):
        toy.job(tmp_path, method__base="supcon", scenario={"name": "joint"})


PAPERS = {"method.form": "paper"}
NO_BOUND, RULES = "has no bound", "it pays to leave them"


@pytest.mark.parametrize(
    "base, changes, said",
    [
        ("barlow_twins", PAPERS, NO_BOUND),
        ("barlow_twins", PAPERS | {"method.negative_weight": 0.0}, None),
        ("barlow_twins", PAPERS | {"method.pn2": False}, None),
        ("barlow_twins", {"method.negative_weight": 1.5}, RULES),
        ("byol", {}, None),
        ("byol", PAPERS, NO_BOUND),
        ("byol", PAPERS | {"method.negative_weight": 0.9}, None),
        ("byol", {"method.negative_weight": 1000.0}, RULES),  # was -3411, in silence
        ("vicreg", {}, None),
        ("vicreg", {"method.weight": 1.0}, NO_BOUND),
        ("mocov2plus", {"method.negative_weight": 1000.0}, None),  # it has no use
    ],
)
def test_a_distance_that_rules_the_loss_is_warned_about(
    tmp_path, caplog, base, changes, said
):
    """Of one that has no bound the bound alone is said."""
    with caplog.at_level(logging.WARNING):
        run_directories.untried(
            tmp_path, method__base=base, method__strategy="pnr", **changes
        )
    for words in (NO_BOUND, RULES):
        assert (words in caplog.text) == (words == said)


@pytest.mark.parametrize(
    "base, strategy, queues",
    [
        ("mocov2plus", "pnr", {"key_queue", "frozen_queue"}),
        ("mocov2plus", "cassle", {"key_queue"}),
        ("byol", "pnr", set()),
        ("simsiam", "pnr", set()),
        ("dino", "pnr", set()),
        ("nnclr", "pnr", {"key_queue"}),
    ],
)
def test_only_what_a_loss_reads_is_kept(tmp_path, base, strategy, queues):
    """And a predictor and prototypes are those bases' alone that have one."""
    changes = {"method.base": base, "method.strategy": strategy}
    state = job.initial_state(toy.job(tmp_path, **changes))
    kept = state.extra._asdict()
    held = {"key_queue": kept["base"], "frozen_queue": kept["strategy"]}
    queue = queue_lib.Queue
    assert {n for n, x in held.items() if isinstance(x, queue)} == queues
    networks, copied = {"encoder", "projector", "distiller"}, {"encoder", "projector"}
    if base in ("byol", "simsiam", "nnclr"):
        networks |= {"predictor"}
    if base == "dino":
        networks |= {"prototypes", "distil_prototypes"}
        copied |= {"prototypes"}
    assert set(state.params) == networks
    assert set(kept["teacher"]) == copied
    assert set(kept["momentum"]) == (
        copied if bases.make_base(base).momentum else set()
    )
    assert isinstance(kept["base"], dino.Centres) == (base == "dino")


def test_replayed_rows_are_spread_over_the_devices(tmp_path):
    """24 replayed rows on 8 devices: each convolves 3 of them, not all."""
    work = toy.job(tmp_path, devices=8, method__base="simclr", method__strategy="der")
    given = job.initial_state(work), *toy.first_call(work)
    program = job.compile_step(work).lower(*given).compile().as_text()
    rows = {int(n) for n in re.findall(r"f32\[(\d+),8,8,4\]\S* convolution\(", program)}
    assert 3 in rows and 24 not in rows, rows


@pytest.mark.parametrize(
    "base", [name for name in bases.BASES if bases.make_base(name).distance]
)
def test_without_pseudo_negatives_pnr_is_cassle(base):
    without = CODE._replace(pn2=False)
    check(value(base, "pnr", without), value(base, "cassle", CODE))
