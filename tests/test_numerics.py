"""JAX's global flags: a run, and an export, do not depend on those of the process."""

import ast
import contextlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcl
from helpers import run_directories, toy
from jaxcl import numerics
from jaxcl.config import build, run_config
from jaxcl.run import job as job_lib
from jaxcl.run import train
from jaxcl.weights import export

SOURCES = sorted(pathlib.Path(jaxcl.__file__).parent.rglob("*.py"))
FLAGS = [
    ("jax_enable_x64", True),
    ("jax_default_prng_impl", "rbg"),
    ("jax_threefry_partitionable", False),
    ("jax_numpy_dtype_promotion", "strict"),
]
X64_AND_RBG = FLAGS[:2]


@contextlib.contextmanager
def flags(*pairs):
    """Set flags for the whole process, as variables of its environment do."""
    before = [(name, getattr(jax.config, name)) for name, _ in pairs]
    for name, value in pairs:
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before:
            jax.config.update(name, value)


@pytest.mark.parametrize("pair", FLAGS, ids=[name for name, _ in FLAGS])
def test_pinned_flags_are_those_of_a_new_process_and_come_back(pair):
    def draw():
        key = numerics.make_key(3)
        return jax.random.normal(key, (4,)), jnp.arange(3) / jnp.float32(2)

    plain = draw()
    with flags(pair):
        with numerics.pinned():
            toy.check_same_bits(draw(), plain)
            assert numerics.process_flags()[pair[0]] == pair[1]
        assert getattr(jax.config, pair[0]) == pair[1]


STEPS = {
    "two_view": {"method.base": "mocov2plus", "method.strategy": "pnr"},
    "er": toy.ONLINE | {"method": {"name": "er"}, "encoder": {"name": "mlp"}},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_run_is_the_same_under_any_flags(tmp_path, name):
    """Built, begun and trained; the state and each row have the same bits."""
    ends = []
    changes = STEPS[name] | {"tasks": 1, "evaluators": {"knn": {"k": 5}}}
    for folder, pairs in (("plain", ()), ("flags", X64_AND_RBG)):
        with flags(*pairs):
            work = toy.job(tmp_path / folder, **changes)
            train.run_tasks(work, tmp_path / folder)
            ends.append(toy.saved(work, tmp_path / folder).state)
    toy.check_same_bits(*ends)
    rows, others = (toy.untimed_rows(tmp_path / x) for x in ("plain", "flags"))
    assert rows == others
    one, two = (
        json.loads((tmp_path / x / "resolved.json").read_text())
        for x in ("plain", "flags")
    )
    assert one == two and one["jax"]["jax_default_prng_impl"] == "threefry2x32"


def test_a_step_alone_is_the_same_under_any_flags(tmp_path):
    """The functions of a job, called by somebody's own loop."""
    ends = []
    for folder, pairs in (("plain", ()), ("flags", X64_AND_RBG)):
        with flags(*pairs):
            work = toy.job(tmp_path / folder, **STEPS["er"], tasks=1)
            state = job_lib.initial_state(work)
            ends.append(job_lib.compile_step(work)(state, *toy.first_call(work)))
    toy.check_same_bits(*ends)


def test_another_matmul_precision_is_refused_at_resume(tmp_path):
    """It is the user's to choose, and a run keeps it."""
    with run_directories.untraced():
        toy.job(tmp_path)
        name = "jax_default_matmul_precision"
        with flags((name, "highest")):
            with pytest.raises(run_config.Differs) as told:
                toy.job(tmp_path)
            assert name.upper() in str(told.value) and "highest" in str(told.value)
            toy.job(tmp_path / "new")
        text = (tmp_path / "new" / "resolved.json").read_text()
        assert json.loads(text)["jax"][name] == "highest"
        toy.job(tmp_path)


@pytest.mark.parametrize("pair", X64_AND_RBG, ids=[name for name, _ in X64_AND_RBG])
def test_an_export_is_loaded_under_any_flags(tmp_path, pair):
    run_directories.run_of(tmp_path / "run")
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), np.uint8)

    export.export(str(tmp_path / "run"), str(tmp_path / "plain"))
    plain = jaxcl.load_encoder(tmp_path / "plain").embed(images)
    with flags(pair):
        encoder = jaxcl.load_encoder(tmp_path / "plain", check=True)
        assert encoder.check() == 0.0
        np.testing.assert_array_equal(encoder.embed(images), plain)
        export.export(str(tmp_path / "run"), str(tmp_path / "flags"))
    cards = [
        json.loads((tmp_path / x / "card.json").read_text()) for x in ("plain", "flags")
    ]
    for name in ("encoder", "num_features", "files", "check"):
        assert cards[0][name] == cards[1][name]


def test_every_key_names_its_generator():
    """jax.random.key and PRNGKey take that of the process."""
    for path in SOURCES:
        if path.name == "numerics.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name, words = ast.unparse(node.func), {x.arg for x in node.keywords}
                assert name not in ("jax.random.key", "jax.random.PRNGKey"), path
                assert name != "jax.random.wrap_key_data" or "impl" in words, path


def test_build_leaves_the_flags_of_the_process_alone(tmp_path):
    with flags(*X64_AND_RBG), run_directories.untraced():
        build.build(toy.config(), tmp_path)
        assert [getattr(jax.config, name) for name, _ in X64_AND_RBG] == [True, "rbg"]
