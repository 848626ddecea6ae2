"""What DUEL's policy keeps of a stream, against a plain loop; projections."""

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import duel_twin, eval_toy
from jaxcl import sharding
from jaxcl.data import stream
from jaxcl.evals import filtering, spread

CLASSES = eval_toy.CLASSES


def projected(state, images):
    """Other directions than those of `embed`, and longer."""
    return 3 * jnp.tanh(eval_toy.embed(state, images))[:, :3]


def twin(features, label, rows, size, batch_size, q, competes=False):
    """The scalars in float64, by the plain loop; `rows`: all that is offered."""
    x = features / np.linalg.norm(features, axis=1, keepdims=True)
    held, found = np.zeros(0, int), {}

    def measure(entropy_name, share_name, of):
        counts = np.bincount(label[of], minlength=CLASSES)
        shares = {share_name.format(c): n / len(of) for c, n in enumerate(counts)}
        found.update({entropy_name: eval_toy.entropy(counts)} | shares)

    measure("stream_entropy", "stream_class_{}", rows)
    for i in range(len(rows) // size):
        offered = rows[i * size : (i + 1) * size]
        for row in offered:
            slots = np.resize(held, size) if len(held) else np.zeros(size, int)
            both = x[slots], x[[row]]
            filled = np.arange(size) < len(held)
            keep = duel_twin.loop(*both, q, filled=filled, competes=competes)
            held = np.concatenate([slots, [row]])[keep]
        assert len(held) == size
        measure(f"entropy_{i + 1}", f"class_{{}}_{i + 1}", held)
        counts = np.bincount(label[offered], minlength=CLASSES)
        found[f"fifo_entropy_{i + 1}"] = eval_toy.entropy(counts)
    return found


def offered(parts, task, count, batch_size):
    """The task's first rows, epoch after epoch, as a run of seed 3 draws them."""
    rows, drawn, epoch = parts.stream.tasks[task].train.rows, [], 0
    while sum(map(len, drawn)) < count:
        rng = np.random.default_rng([3, task, epoch])
        drawn.append(stream.epoch_order(rng, rows, batch_size).reshape(-1))
        epoch += 1
    assert epoch > 1
    return np.concatenate(drawn)[:count]


@pytest.mark.parametrize(
    "options, streams, devices",
    [
        ({}, False, 1),
        ({"score": "exponential", "temperature": 0.3}, True, 1),
        ({"newcomer_competes": True, "features": "embedding"}, False, 2),
    ],
)
def test_scalars_are_those_of_the_plain_loop(options, streams, devices):
    data, state = eval_toy.dataset(), eval_toy.state_of(0)
    parts = eval_toy.parts_of(
        "data", eval_toy.dataset(streams=streams), devices, 2, project=projected
    )
    evaluate = filtering.make(parts, size=8, times=4, batch_size=5, **options)
    images = data.train.images
    features = eval_toy.embedded(state, images)
    if "features" not in options:
        features = 3 * np.tanh(features)[:, :3]
    q = duel_twin.SCORES[options.get("score", "affine")]
    competes = options.get("newcomer_competes", False)
    state = sharding.replicate(state, parts.mesh)
    for task in (1, 0):
        result = evaluate(state, task)
        scalars = dict(result.scalars)
        assert result.rows == {}
        rows = offered(parts, task, 32, 5)
        want = twin(features, data.train.label, rows, 8, 5, q, competes)
        assert scalars == {n: pytest.approx(x, rel=1e-5) for n, x in want.items()}
        assert len(scalars) == 2 * 4 + 4 * CLASSES + 1 + CLASSES
        assert scalars["entropy_1"] == scalars["fifo_entropy_1"]
        pairs = [(f"entropy_{i}", f"fifo_entropy_{i}") for i in (2, 3, 4)]
        assert any(scalars[a] != scalars[b] for a, b in pairs)


def test_spread_is_of_the_features_asked_for():
    parts, state = eval_toy.parts_of("joint"), eval_toy.state_of(0)
    with pytest.raises(ValueError, match=r"spread\.features='projection'"):
        spread.make(parts, features="projection")
    with pytest.raises(ValueError, match=r"spread\.features='x'"):
        spread.make(parts, features="x")
    parts = parts._replace(project=projected)
    examples = eval_toy.dataset().test
    x = eval_toy.embedded(state, examples.images)
    for features, rows in (("embedding", x), ("projection", np.tanh(x)[:, :3])):
        twins = eval_toy.spread_twins(rows, examples.label)
        found = spread.make(parts, features=features)(state, 0).scalars
        for c, pair in twins.items():
            got = found[f"intra_{c}"], found[f"inter_{c}"]
            np.testing.assert_allclose(got, pair, rtol=1e-4)
        default = features == "embedding"
        assert (spread.make(parts)(state, 0).scalars["inter_0"] == got[1]) <= default
