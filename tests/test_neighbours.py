"""Pictures of nearest neighbours: who is near by brute force, and what is drawn."""

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from helpers import eval_toy
from jaxcl import plots
from jaxcl.evals import neighbours


def brute_force(features, query, k):
    """Rows by falling cosine, the query left out, one comparison at a time."""
    scores = {}
    for row, other in enumerate(features):
        lengths = np.linalg.norm(other) * np.linalg.norm(features[query])
        if row != query:
            dot = float(np.dot(other, features[query]))
            scores[row] = dot / lengths if lengths else 0.0
    rows = sorted(scores, key=lambda row: (-scores[row], row))[:k]
    return rows, [scores[row] for row in rows]


def test_the_nearest_are_those_of_brute_force():
    features = np.random.default_rng(0).normal(size=(23, 4))
    features[5] = 2 * features[3]  # as near as can be, and of another length
    features[7] = 0.0
    queries = np.array([3, 0, 22])
    rows, cosines = neighbours.find_nearest(features, queries, 6)
    for i, query in enumerate(queries):
        want, scores = brute_force(features, query, 6)
        assert rows[i].tolist() == want
        np.testing.assert_allclose(cosines[i], scores, rtol=1e-12)
    assert rows[0, 0] == 5 and cosines[0, 0] == pytest.approx(1)


class Drawn(Exception):
    """Carries what would be drawn."""


@pytest.fixture
def drawn(monkeypatch):
    """(parts, state, options) -> what `plots.neighbours` is given."""

    def keep(*arguments, **options):
        raise Drawn(*arguments, options["title"])

    monkeypatch.setattr(plots, "neighbours", keep)

    def run(parts, state, directory, **options):
        with pytest.raises(Drawn) as caught:
            neighbours.make(parts, directory=directory, **options)(state, 1)
        return caught.value.args

    return run


@pytest.mark.parametrize("streams", [False, True])
def test_images_stand_beside_their_own_neighbours(drawn, tmp_path, streams):
    data, state = eval_toy.dataset(streams=streams), eval_toy.state_of(1)
    parts = eval_toy.parts_of("joint", data)
    queries, found, cosines, path, title = drawn(
        parts, state, tmp_path / "a", queries=3, k=4, max_rows=20
    )
    images = eval_toy.dataset().test.images
    rows = np.linspace(0, len(images) - 1, 20).astype(int)
    view = (images[rows] / 255.0 - eval_toy.MEAN) / eval_toy.STD
    features = np.asarray(eval_toy.embed(state, jnp.asarray(view, jnp.float32)))
    for i, query in enumerate([0, 9, 19]):
        want, scores = brute_force(np.float64(features), query, 4)
        np.testing.assert_array_equal(queries[i], images[rows[query]])
        np.testing.assert_array_equal(found[i], images[rows[want]])
        np.testing.assert_allclose(cosines[i], scores, atol=1e-4)
    assert path == tmp_path / "a" / "neighbours_task2.png"
    assert title == "Nearest neighbours after task 2"


def test_without_evaluation_rows_train_rows_are_drawn_and_no_labels_read(
    drawn, tmp_path
):
    data = eval_toy.dataset()
    train = data.train._replace(label=np.full_like(data.train.label, -1))
    parts = eval_toy.parts_of("joint", data)
    bare = data._replace(train=train, test=None)
    parts = parts._replace(stream=parts.stream._replace(evaluation=None, dataset=bare))
    queries, *_ = drawn(parts, eval_toy.state_of(1), tmp_path, queries=2)
    np.testing.assert_array_equal(queries, train.images[[0, len(train.images) - 1]])


def test_few_images_are_each_others_neighbours(tmp_path):
    data = eval_toy.dataset()
    parts = eval_toy.parts_of("joint", data)
    parts = parts._replace(
        stream=parts.stream._replace(evaluation=eval_toy.split_of(1, 3))
    )
    result = neighbours.make(parts, directory=tmp_path)(eval_toy.state_of(1), 0)
    assert not result.rows and not result.warnings
    with Image.open(tmp_path / "neighbours_task1.png") as picture:
        width, height = picture.size  # three rows of three images
    assert 0.7 < width / height < 1.4
