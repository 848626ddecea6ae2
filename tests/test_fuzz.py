"""Configs at random, always the same few; tests/attack makes many more."""

import functools
import pathlib
import tempfile

import hypothesis
import pytest
from sklearn import datasets

from attack import configs
from jaxcl.config import build


@pytest.mark.parametrize("name, count", [("two_view", 20), ("online", 20)])
def test_a_config_is_built_or_refused_by_a_field(name, count, monkeypatch):
    """Without tracing the step, which takes longest and has tests of its own."""
    monkeypatch.setattr(build.job, "checked", lambda method, *_: method)
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
