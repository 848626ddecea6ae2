"""What a base hands to its losses: views, banks and temperatures, in float64."""

import numpy as np
import pytest

from jaxcl.methods import ssl_bases

RNG = np.random.default_rng(0)
B, K, D = 4, 7, 5


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


Z, K2, P, F = (RNG.normal(size=(B, 2, D)) for _ in range(4))
KEYS, FROZEN = (unit(RNG.normal(size=(2, K, D))) for _ in range(2))
FEATURES = ssl_bases.Features(Z, K2, P, F, KEYS, FROZEN, np.zeros(B, int))
OPTIONS = ssl_bases.Options(0.3, 0.5, 0.7, "code", True, True)


def cross_entropy(anchors, positives, negatives, tau):
    """MoCo's loss; the positive is in the denominator."""
    total = 0.0
    for a, p in zip(unit(anchors), unit(positives), strict=True):
        right = np.exp(a @ p / tau)
        total -= np.log(right / (right + np.exp(negatives @ a / tau).sum())) / B
    return total


def moco(_):
    # The query of a view meets the key and the bank of the other one.
    one = cross_entropy(Z[:, 0], K2[:, 1], KEYS[1], 0.3)
    return (one + cross_entropy(Z[:, 1], K2[:, 0], KEYS[0], 0.3)) / 2


def moco_pnr(_):
    total = 0.0
    for view, other in ((0, 1), (1, 0)):
        both = np.concatenate([KEYS[other], FROZEN[other]])
        total += cross_entropy(Z[:, view], K2[:, other], both, 0.3) / 2
        total += cross_entropy(P[:, view], F[:, view], both, 0.5) / 2
    return total


def rows(x):
    return unit(x.reshape(2 * B, D))


def simclr(_):
    s = rows(Z) @ rows(Z).T / 0.3
    return np.mean(
        [
            np.log(np.exp(np.delete(s[i], i)).sum()) - s[i, i ^ 1]  # i ^ 1: other view
            for i in range(2 * B)
        ]
    )


def simclr_pnr(_):
    z, p, f, tau, total = rows(Z), rows(P), rows(F), 0.5, 0.0
    for i in range(2 * B):
        for anchor, right in ((z[i], z[i ^ 1]), (p[i], f[i])):
            others = np.delete(np.concatenate([z, f]), [i, 2 * B + i], axis=0)
            total += np.log(np.exp(others @ anchor / tau).sum()) - anchor @ right / tau
    return total / (2 * B)


def cassle(base):
    s = rows(P) @ rows(F).T / 0.5
    both = [np.log(np.exp(t).sum(1)) - np.diag(t) for t in (s, s.T)]
    return base(None) + 0.7 * np.mean(both)


@pytest.mark.parametrize(
    "name, term, twin",
    [
        ("simclr", "loss", simclr),
        ("simclr", "cassle", lambda _: cassle(simclr)),
        ("simclr", "pnr", simclr_pnr),
        ("mocov2plus", "loss", moco),
        ("mocov2plus", "cassle", lambda _: cassle(moco)),
        ("mocov2plus", "pnr", moco_pnr),
    ],
)
def test_a_base_is_its_equation(name, term, twin):
    loss = getattr(ssl_bases.get(name), term)
    ours = loss(
        ssl_bases.Features(*map(np.float32, FEATURES[:6]), FEATURES.label), OPTIONS
    )
    np.testing.assert_allclose(ours, twin(None), rtol=2e-5)
