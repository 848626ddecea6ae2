"""Configs and sets at random, a few of each; tests/attack makes many more.

What is drawn is always the same here.
"""

import functools
import pathlib
import tempfile

import hypothesis
import numpy as np
import pytest
from sklearn import datasets

from attack import configs, kind, sets, weights
from jaxcl.config import build


@pytest.mark.parametrize("name, count", [("two_view", 20), ("online", 20)])
def test_a_config_is_built_or_refused_by_a_field(name, count, monkeypatch):
    """Without tracing the step, which takes longest and has tests of its own."""
    monkeypatch.setattr(build.job, "trace_step", lambda work: work)
    digits = functools.cache(datasets.load_digits)
    monkeypatch.setattr(datasets, "load_digits", digits)
    found = []

    @hypothesis.settings(
        derandomize=True,
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.given(configs.drawn_from(name))
    def one(drawn):
        with tempfile.TemporaryDirectory() as folder:
            found.append(configs.outcome(*drawn, pathlib.Path(folder) / "run"))

    one()
    assert {*found} == {"built", "refused"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


QUICK = [name for name in sets.SETS if name not in ("array_record", "tfrecord")]


@pytest.mark.parametrize("name", QUICK)
def test_a_damaged_set_is_read_or_refused_by_name(name, shared, tmp_path):
    whole = kind.Place(tmp_path, shared).once(f"set {name}", sets.SETS[name][0])
    assert sets.outcome(name, whole) == "read"
    found = set()
    for number in range(4):
        place = kind.Place(tmp_path / str(number), shared)
        place.folder.mkdir()
        found.add(sets.attack(name, np.random.default_rng([1, number]), place))
    assert found <= {"read", "rows refused", "refused"} and found != {"read"}


def test_a_set_that_is_refused_without_a_name_is_found(shared, tmp_path, monkeypatch):
    def load(*_, **options):
        raise ValueError("list index out of range")

    monkeypatch.setattr(sets.sources, "load", load)
    with pytest.raises(kind.Broken, match="list index"):
        sets.outcome("npz", tmp_path)


QUICK_WEIGHTS = "timm transformers_dinov3 torchvision".split()


@pytest.mark.parametrize("family", QUICK_WEIGHTS)
def test_renamed_weights_are_imported_alike_or_refused_by_name(family, tmp_path):
    found = set()
    for number in range(4):
        place = kind.Place(tmp_path / str(number), tmp_path)
        place.folder.mkdir()
        found.add(weights.attack(family, np.random.default_rng([2, number]), place))
    assert "same features" in found


def test_weights_that_are_imported_otherwise_are_found(tmp_path, monkeypatch):
    """A control: the same features of another network are not enough."""
    other = weights.reference("timm")
    monkeypatch.setattr(weights, "imported", lambda *_, **__: (other[0], {}, {}))
    with pytest.raises(kind.Broken, match="another network"):
        for number in range(9):
            place = kind.Place(tmp_path, tmp_path)
            weights.attack("timm", np.random.default_rng([2, number]), place)
