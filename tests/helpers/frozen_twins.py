"""Rules on frozen features in float64 NumPy: scores f64[Q,C] of all rows so far.

A class without a row has -inf. Streaming LDA and the linear head go row by row and
batch by batch; all others take the rows at once.
"""

import numpy as np

from helpers import twins
from jaxcl.methods import ranpac


def known_only(scores, y, classes):
    return np.where(np.bincount(y, minlength=classes) > 0, scores, -np.inf)


def class_means(x, y, classes):
    member = np.eye(classes)[y]
    return member.T @ x / np.maximum(member.sum(0), 1)[:, None]


def ncm(x, y, q, state, classes):
    scores = twins.unit(q) @ twins.unit(class_means(x, y, classes)).T
    return known_only(scores, y, classes)


def ncm_euclidean(x, y, q, state, classes):
    gaps = q[:, None] - class_means(x, y, classes)
    return known_only(-(gaps**2).sum(-1), y, classes)


def slda(x, y, q, state, classes, shrinkage=1e-2):
    """Row by row, as Equations 1 to 5 have it."""
    dim = x.shape[1]
    means, counts = np.zeros((classes, dim)), np.zeros(classes)
    covariance = np.zeros((dim, dim))
    for t, (row, c) in enumerate(zip(x, y, strict=True)):
        gap = row - means[c]
        delta = t / (t + 1) * np.outer(gap, gap)
        covariance = (t * covariance + delta) / (t + 1)
        means[c] += gap / (counts[c] + 1)
        counts[c] += 1
    shrunk = (1 - shrinkage) * covariance + shrinkage * np.eye(dim)
    weights = means @ np.linalg.inv(shrunk)
    return known_only(q @ weights.T - (weights * means).sum(1) / 2, y, classes)


def _ridge_regression(hidden, y, ridge, classes):
    target = np.eye(classes)[y]
    inputs = hidden.T @ hidden + ridge * np.eye(hidden.shape[1])
    return np.linalg.solve(inputs, hidden.T @ target)


def ranpac_ridges(hidden, y, classes):
    """Return all ridges, those below float32's rounding raised, and their errors."""
    mask = (np.arange(len(y), dtype=np.uint32) * np.uint32(2654435761) >> 16) % 5 == 4
    ridges = np.maximum(ranpac.RIDGES, np.finfo(np.float32).eps * (hidden**2).sum())
    errors = []
    for ridge in ridges:
        weights = _ridge_regression(hidden[~mask], y[~mask], ridge, classes)
        errors.append(((hidden[mask] @ weights - np.eye(classes)[y[mask]]) ** 2).sum())
    return ridges, errors


def ranpac_scores(x, y, q, state, classes):
    """Ridge by the squared error on a fifth of the rows, then all rows."""
    projection = np.asarray(state.projection, np.float64)
    hidden, asked = (np.maximum(rows @ projection, 0) for rows in (x, q))
    ridges, errors = ranpac_ridges(hidden, y, classes)
    best = ridges[int(np.argmin(errors))]
    scores = asked @ _ridge_regression(hidden, y, best, classes)
    return known_only(scores, y, classes)


def acil(x, y, q, state, classes, ridge=0.1):
    projection = np.asarray(state.projection, np.float64)
    hidden, asked = (np.maximum(rows @ projection, 0) for rows in (x, q))
    scores = asked @ _ridge_regression(hidden, y, ridge, classes)
    return known_only(scores, y, classes)


def _shrunk(covariance, form, diagonal, off_diagonal):
    """Equation 8; the code's twice, without zeros in the mean."""
    eye = np.eye(len(covariance))
    for _ in range(2 if form == "code" else 1):
        off = covariance[eye == 0]
        off = off[off != 0].mean() if form == "code" else off.mean()
        covariance = covariance + diagonal * np.trace(covariance) / len(eye) * eye
        covariance = covariance + off_diagonal * off * (1 - eye)
    return covariance


def fecam(x, y, q, state, classes, shared=False, form="paper", factors=(1.0, 1.0)):
    """A class without a variance of its own has that of all others."""
    rows, asked = (np.sign(z) * np.sqrt(np.abs(z)) for z in (x, q))
    if form == "paper":
        rows = twins.unit(rows)
    means = class_means(rows, y, classes)
    gaps = rows - means[y]
    degrees = np.maximum(np.bincount(y, minlength=classes) - 1, 0)
    pooled = gaps.T @ gaps / max(degrees.sum(), 1)
    prototypes = means
    if form == "code":
        raw = class_means(x, y, classes)
        prototypes = twins.unit(np.sign(raw) * np.sqrt(np.abs(raw)))
    scores = np.full((len(q), classes), -np.inf)
    for c in np.unique(y):
        own = gaps[y == c]
        covariance = own.T @ own / max(degrees[c], 1)
        if shared or np.trace(covariance) < 1e-12:
            covariance = pooled
        if np.trace(covariance) < 1e-12:
            covariance = np.eye(len(pooled))
        else:
            covariance = _shrunk(covariance, form, *factors)
        deviation = np.sqrt(np.diag(covariance))
        inverse = np.linalg.inv(covariance / np.outer(deviation, deviation))
        apart = twins.unit(asked) - prototypes[c]
        scores[:, c] = -np.einsum("bi,ij,bj->b", apart, inverse, apart)
    return scores


def stored_knn(x, y, q, state, classes, k=5, temperature=0.07):
    """The memory holds all rows."""
    cosines = twins.unit(q) @ twins.unit(x).T
    scores = np.full((len(q), classes), -np.inf)
    for row, near in enumerate(np.argsort(-cosines, axis=1)[:, :k]):
        for i in near:
            vote = cosines[row, i] / temperature
            scores[row, y[i]] = np.logaddexp(scores[row, y[i]], vote)
    return scores


def descend(layer, x, y, seen, lr, classes):
    """One step down the mean cross-entropy over the classes met so far."""
    weights, biases = layer
    logits = np.where(seen, x @ weights + biases, -np.inf)
    wrong = np.exp(logits - logits.max(1, keepdims=True))
    wrong = wrong / wrong.sum(1, keepdims=True) - np.eye(classes)[y]
    return weights - lr * x.T @ wrong / len(x), biases - lr * wrong.mean(0)


def standard(met, rows):
    variance = met.var(0) + 1e-6 * met.var(0).mean()
    variance = np.where(variance > 0, variance, 1)
    return (rows - met.mean(0)) / np.sqrt(met.shape[1] * variance)


def linear_head(x, y, q, state, classes, batch=16, lr=2.0, steps=3):
    layer = np.zeros((x.shape[1], classes)), np.zeros(classes)
    seen = np.zeros(classes, bool)
    for start in range(0, len(y), batch):
        rows = slice(start, start + batch)
        seen[y[rows]] = True
        now = standard(x[: start + batch], x[rows])
        for _ in range(steps):
            layer = descend(layer, now, y[rows], seen, lr, classes)
    return known_only(standard(x, q) @ layer[0] + layer[1], y, classes)
