"""examples/my_package: extensions in a user's own package do what they say."""

import functools
import importlib
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcl
import test_methods
from helpers import config_files, processes, toy, twins
from jaxcl import lookup
from jaxcl.config import build
from jaxcl.memory import buffer as buffer_lib
from jaxcl.methods.two_view import records, step
from jaxcl.methods.two_view.strategies import pnr
from jaxcl.run import train
from jaxcl.weights import export

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory):
    """Let Python find my_package, and a package whose modules are wrong."""
    folder = tmp_path_factory.mktemp("users") / "wrong"
    folder.mkdir()
    (folder / "broken.py").write_text("import a_library_that_is_not_there\n")
    (folder / "other.py").write_text("def make():\n    return 3\n")
    (folder / "net.py").write_text("def untyped(*, dtype):\n    return object()\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        patch.syspath_prepend(str(EXAMPLES))
        yield
    for name in [x for x in sys.modules if x.split(".")[0] in ("wrong", "my_package")]:
        del sys.modules[name]


def example(name):
    """Import a module of the package."""
    return importlib.import_module(f"my_package.{name}")


def config(word="", **changes):
    """The config of the examples, of one epoch."""
    made = config_files.load(EXAMPLES / "my_config.py").get_config(f"{word},debug")
    made.update({"log_every": 1, "save_every": 0, "devices": 1})
    made.update(
        dict.fromkeys(("plots", "plasticity", "tensorboard", "progress"), False)
    )
    with made.unlocked(), made.ignore_type():
        for name, value in changes.items():
            made[name] = value
    return made


# Whole runs


@pytest.mark.parametrize("word", ["", "method", "replay", "online"])
def test_two_tasks_train_and_are_judged(word, tmp_path):
    results = train.run_tasks(build.build(config(word), tmp_path), tmp_path)
    losses = [row["loss"] for row in processes.rows_of(tmp_path) if "loss" in row]
    assert len(losses) == 10 and np.isfinite(losses).all()
    assert len(results["task_names"]) == 2
    assert all(1 <= task["spread/ratio"] <= 32 for task in results["scalars"])


def test_an_encoder_of_ones_own_is_exported(tmp_path):
    work = build.build(config("replay", evaluators={}), tmp_path / "run")
    train.run_tasks(work, tmp_path / "run")
    export.export(str(tmp_path / "run"), str(tmp_path / "out"))
    images = work.stream.dataset.test.images
    assert jaxcl.load_encoder(tmp_path / "out").embed(images).shape == (80, 32)


SIZES = {"hidden_dim": 16, "output_dim": 8}
BASE, STRATEGY = "my_package.my_base", "my_package.my_strategy"
ROWS = {
    "base-strategy": test_methods.Row(
        {"method.base": BASE, "method.strategy": STRATEGY}
    ),
    "base-pnr": test_methods.Row({"method.base": BASE, "method.strategy": "pnr"}),
    "method": test_methods.Row({"method": {"name": "my_package.my_method", **SIZES}}),
    "policy": test_methods.Row(
        toy.ONLINE
        | {"method": {"name": "er"}, "replay.policy": "my_package.my_policy"},
        idle=test_methods.METHODS["er"].idle,
    ),
    "online": test_methods.Row(
        toy.ONLINE | {"method": {"name": "my_package.my_online"}},
        idle=test_methods.STORED | {"extra.seen": "only predictions read it"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_they_pass_the_table_of_methods(name, tmp_path, monkeypatch):
    monkeypatch.setitem(test_methods.METHODS, f"my {name}", ROWS[name])
    for column in test_methods.COLUMNS:
        (tmp_path / column.__name__).mkdir()
        column(f"my {name}", tmp_path / column.__name__)


# Each by itself


def log_mean_kernel(z, scale):
    pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if i != j]
    kernels = [np.exp(-scale * np.sum((z[i] - z[j]) ** 2)) for i, j in pairs]
    return np.log(np.mean(kernels))


def align_uniform(z1, z2, scale=2.0, weight=1.0):
    """The loss in float64, row by row."""
    z1, z2 = twins.unit(z1), twins.unit(z2)
    apart = (log_mean_kernel(z1, scale) + log_mean_kernel(z2, scale)) / 2
    return np.mean(np.sum((z1 - z2) ** 2, axis=1)) + weight * apart


@pytest.mark.parametrize("options", [{}, {"scale": 0.7, "weight": 3.0}])
def test_the_loss_is_its_equation(options):
    loss = functools.partial(example("my_loss").align_uniform, **options)
    twin = functools.partial(align_uniform, **options)
    twins.check(loss, twin, twins.draw([(5, 3)] * 2), moving=(0, 1))


def test_the_base_and_the_strategy_are_their_equations():
    z, p, f = np.random.default_rng(1).normal(size=(3, 6, 2, 4))
    features = records.Features(*map(jnp.asarray, (z, np.zeros(6))), p=p, f=f)
    plan = pnr.make(weight=0.5, negative_weight=0.25)
    base = example("my_base").make()
    strategy = example("my_strategy").make(weight=0.5)
    alone = align_uniform(z[:, 0], z[:, 1])
    near, far = (
        np.mean(2 - 2 * np.sum(twins.unit(p) * twins.unit(other), axis=-1))
        for other in (f, f[:, ::-1])
    )
    for got, want in (
        (base.loss(features), alone),
        (base.distil(features), near),
        (plan.loss(base, features), alone + 0.5 * near - 0.25 * far),
        (
            step.compute_loss(base, strategy, features),
            alone + 0.5 * np.mean((z - f) ** 2),
        ),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_margin_lowers_the_logit_of_the_own_class_alone():
    logits = np.random.default_rng(4).normal(size=(3, 4))
    label = jnp.array([2, 0, -1])
    wanted = logits.copy()
    wanted[0, 2] -= 1.5
    wanted[1, 0] -= 1.5
    got = example("my_online").subtract_margin(jnp.asarray(logits), label, 1.5)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("batches", [[10] * 6, [3, 25, 1, 31], [60]])
def test_the_policy_keeps_every_fourth_row(batches):
    policy, rng = example("my_policy").make(), np.random.default_rng(2)
    memory = buffer_lib.create({"row": jnp.zeros((), jnp.int32)}, 5)
    kept, twin, met = {}, {}, 0
    for size in batches:
        rows, mask = jnp.arange(met, met + size), rng.random(size) < 0.8
        slots, kept = policy.choose(memory, kept, None, {}, jnp.asarray(mask))
        memory = buffer_lib.write(memory, slots, {"row": rows}, jnp.asarray(mask))
        numbers = int(memory.seen) - mask.sum() + np.cumsum(mask) - 1
        for row, number in zip(rows[mask], numbers[mask], strict=True):
            if number % 4 == 0:
                twin[number // 4 % 5] = int(row)
        met += size
    stored = np.asarray(memory.items["row"])
    there = np.flatnonzero(memory.filled)
    assert {int(slot): int(stored[slot]) for slot in there} == twin


@pytest.mark.parametrize("rank", [1, 3])
def test_the_evaluator_counts_equal_directions_once_each(rank):
    x = np.zeros((6, 4))
    x[:3, :rank], x[3:, :rank] = np.eye(3, rank), -np.eye(3, rank)
    ratio = example("my_evaluator").participation_ratio
    assert ratio(x + 7) == pytest.approx(rank)
    x = np.random.default_rng(3).normal(size=(20, 5))
    values = np.linalg.eigvalsh(np.cov(x.T))
    assert ratio(x) == pytest.approx(values.sum() ** 2 / (values**2).sum())


def test_the_source_puts_each_class_in_its_place():
    blobs = example("my_source").blobs
    data = blobs(classes=3, per_class=20, size=16, validation=0.25)
    for part, count in ((data.train, 36), (data.validation, 12), (data.test, 12)):
        assert part.images.shape == (count, 16, 16, 1)
        brightest = part.images.reshape(count, -1).argmax(axis=1)
        row, column = np.unravel_index(brightest, (16, 16))
        angle = np.arctan2(column - 7.5, row - 7.5) / (2 * np.pi / 3)
        np.testing.assert_array_equal(np.round(angle) % 3, part.label)
    other = blobs(classes=3, per_class=20, size=16, seed=1)
    np.testing.assert_array_equal(other.test.images, data.test.images)


def test_the_optimizer_gives_signs_and_the_schedule_a_triangle():
    optimizer = example("my_optimizer")
    tx, params = optimizer.sign(momentum=0.5), jnp.zeros(3)
    state = tx.init(params)
    _, state = tx.update(jnp.array([4.0, -1.0, 0.0]), state, params)
    direction, _ = tx.update(jnp.array([-1.0, -1.0, 0.0]), state, params)
    np.testing.assert_array_equal(direction, [1, -1, 0])
    rate = optimizer.triangle(0.2)
    rates = [rate(x) for x in (0, 0.25, 0.5, 0.75)]
    np.testing.assert_allclose(rates, [0, 0.1, 0.2, 0.1], rtol=1e-6)


# What is wrong is said


def entry(**options):
    return {"evaluators": {"spread": {"name": "my_package.my_evaluator", **options}}}


TWO_VIEW = {"name": "two_view"}
METHOD = {"name": "my_package.my_method"}
SOURCE = "my_package.my_source.blobs"


@pytest.mark.parametrize(
    "changes, field, value",
    [
        ({"method": METHOD | {"wieght": 1.0}}, "config.method.wieght", "weight"),
        ({"method": {"name": "my_package.no"}}, "config.method.name", "my_package.no"),
        ({"method": {"name": "my_package.my_loss"}}, "config.method.name", "make"),
        ({"method": {"name": "online"}}, "config.method.name", "er_ace"),
        (
            {"method": TWO_VIEW | {"base": "my_package.my_loss"}},
            "config.method.base",
            "make",
        ),
        ({"method": TWO_VIEW | {"base": "wrong.other"}}, "config.method.base", "int"),
        (
            {"method": TWO_VIEW | {"strategy": "my_package.my_base"}},
            "config.method.strategy",
            "Base",
        ),
        (entry(row=1), "config.evaluators.spread.row", "max_rows"),
        (
            {"encoder": {"name": "my_package.my_encoder.round"}},
            "config.encoder.name",
            "round",
        ),
        (
            {"encoder": {"name": "wrong.net.untyped"}},
            "config.encoder.name",
            "untyped.*dtype",
        ),
        ({"data": {"name": SOURCE, "size": "many"}}, "config.data.size", "many"),
    ],
)
def test_field_and_value_are_named(changes, field, value, tmp_path):
    with pytest.raises(ValueError, match=rf"{re.escape(field)}\b.*{value}"):
        build.build(config(**changes), tmp_path)


def test_what_a_module_lacks_itself_is_no_wrong_name():
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        lookup.find_method("wrong.broken")


def test_looking_one_method_up_imports_no_other():
    code = """
import sys
from jaxcl import lookup
lookup.find_method("er"), lookup.find_module("jaxcl.evals", "knn", "config.evaluators")
print(*(x for x in sys.modules if x.startswith(("jaxcl.methods.", "jaxcl.evals."))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    there = set(done.stdout.split())
    assert {"jaxcl.methods.er", "jaxcl.evals.knn"} <= there, done.stderr
    assert not {"jaxcl.methods.gdumb", "jaxcl.methods.icl", "jaxcl.evals.svm"} & there
