"""The evaluator that watches for collapse, against the equations in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import eval_toy
from jaxcl import core
from jaxcl.evals import collapse


class State(core.NamedTuple):
    params: dict
    step: np.ndarray


def state_of(weight, step):
    return State({"w": jnp.asarray(weight, jnp.float32)}, np.int32(step))


def weights(rank=eval_toy.DIM):
    shape = (eval_toy.SIZE**2 * 3, eval_toy.DIM)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=shape)
    weight[:, rank:] = 0
    return weight


def std_twin(x):
    rows = [row / np.sqrt((row**2).sum()) for row in x.astype(np.float64)]
    columns = np.array(rows).T
    spread = [np.sqrt(((c - c.mean()) ** 2).mean()) for c in columns]
    return np.mean(spread) * np.sqrt(len(columns))


def rankme_twin(x):
    """Singular values as roots of the eigenvalues of x^T x, in float64."""
    x = x.astype(np.float64)
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(x.T @ x), 0))
    p = values / values.sum() + 1e-7
    return np.exp(sum(-q * np.log(q) for q in p))


@pytest.mark.parametrize("shape", [(40, 6), (200, 16)])
def test_measures_are_the_equations(shape):
    rng = np.random.default_rng(1)
    for offset in (0.0, 3.0):
        x = (rng.normal(size=shape) * rng.uniform(0.1, 2, shape[1]) + offset).astype(
            np.float32
        )
        np.testing.assert_allclose(collapse.embedding_std(x), std_twin(x), rtol=1e-9)
        np.testing.assert_allclose(collapse.rankme(x), rankme_twin(x), rtol=1e-4)
    zeros = np.zeros(shape)
    assert collapse.rankme(zeros) == collapse.embedding_std(zeros) == 0


def test_it_measures_rows_evenly_spaced():
    parts, state = eval_toy.parts_of(), state_of(weights(), 0)
    x = eval_toy.embedded(state, parts.stream.evaluation.images)  # 31 rows
    for most, rows in ((4, [0, 10, 20, 30]), (2048, range(31))):
        found = collapse.make(parts, max_rows=most)(state, 0)
        assert found.rows == {} and found.warnings == ()
        want = std_twin(x[list(rows)]), rankme_twin(x[list(rows)])
        measured = found.scalars["embedding_std"], found.scalars["rankme"]
        np.testing.assert_allclose(measured, want, rtol=1e-4)


def said(result):
    return [words.split(":")[0] for words in result.warnings]


def test_it_warns_where_a_measure_falls():
    parts, whole, flat = eval_toy.parts_of(), weights(), weights(rank=1)
    evaluate = collapse.make(parts)
    first = evaluate(state_of(whole, 0), 0)
    assert first.warnings == evaluate(state_of(2 * whole, 5), 0).warnings == ()
    fallen = evaluate(state_of(flat, 9), 1)
    rank = first.scalars["rankme"]
    assert [w for w in said(fallen) if w.startswith("rankme")] == [
        f"rankme is 1, below 0.5 of the {rank:.3g} at first",
        f"rankme is 1, below 0.5 of the {rank:.3g} at the evaluation before",
    ]
    # Where the evaluation before is the first one it warns of it once.
    second = collapse.make(parts)
    assert second(state_of(whole, 0), 0).warnings == ()
    second = said(second(state_of(flat, 5), 0))
    assert second and all(words.endswith("at first") for words in second)
    # It stays where it is: only the first evaluation was better.
    still = said(evaluate(state_of(flat, 12), 1))
    assert still and all(words.endswith("at first") for words in still)
    assert evaluate(state_of(whole, 15), 1).warnings == ()
    # Another run begins, of which nothing is known.
    assert not any("below 0.5" in w for w in evaluate(state_of(flat, 3), 0).warnings)
    assert collapse.make(parts, share=0.0)(state_of(whole, 0), 0).warnings == ()


def test_it_warns_of_embeddings_that_are_one_or_not_finite():
    parts = eval_toy.parts_of()

    def same(state, images):
        return jnp.ones((len(images), 4)) + 1e-4 * eval_toy.embed(state, images)[:, :4]

    one = collapse.make(parts._replace(embed=same))(state_of(weights(), 0), 0)
    (words,) = one.warnings
    assert words == "embedding_std is below 0.01: all embeddings are nearly one"
    evaluate = collapse.make(parts)
    broken = evaluate(state_of(weights() * np.nan, 0), 0)
    assert broken.warnings == ("embeddings are not finite",)
    assert np.isnan([broken.scalars["rankme"], broken.scalars["embedding_std"]]).all()
    assert evaluate(state_of(weights(), 1), 0).warnings == ()
    # What was not finite is no reference.
    fallen = said(evaluate(state_of(weights(rank=1), 2), 0))
    assert fallen and all(words.endswith("at first") for words in fallen)
    # Where one fell, that is what is told, and by the same step another run begins.
    evaluate = collapse.make(parts._replace(embed=same))
    assert evaluate(state_of(1e5 * weights(), 0), 0).warnings == ()
    fallen = said(evaluate(state_of(weights(), 1), 0))
    assert fallen and all(words.endswith("at first") for words in fallen)
    assert "nearly one" in evaluate(state_of(weights(), 1), 0).warnings[0]
