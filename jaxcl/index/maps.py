"""Fit maps between the spaces of two encoders, from images that both have embedded.

A map of new queries to the old space keeps an old index usable: Vejendla,
"Drift-Adapter: A Practical Approach to Near Zero-Downtime Embedding Model Upgrades in
Vector Databases", EMNLP 2025 (arXiv 2509.23471). A map of stored vectors to the new
space brings the index itself forward without its images: Ramanujan et al.,
"Forward Compatible Training", CVPR 2022 (arXiv 2112.02805). One function fits both.
Only directions count: rows are scaled to length 1 before and after the map.

Departures: the affine map is a ridge regression in closed form, not trained; the MLP is
added to the best linear map; no side features are stored.
"""

import functools
import hashlib
import json
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from safetensors import numpy as tensors

from jaxcl import numerics
from jaxcl.errors import Refused
from jaxcl.index import drift
from jaxcl.run import encoder_folder

FILE = "adapter.safetensors"  # new queries -> the space of an old index
Map = dict[str, Any]  # names of arrays are those that `map_features` reads
Mapped = Literal["queries", "vectors"]  # what is mapped: queries, or a whole index


class FittedMap(NamedTuple):
    """A map with its recall on pairs that were not used to fit it."""

    kind: str  # a key of `KINDS`
    options: dict  # chosen "rank" (None: full) and "ridge" of its affine part
    recall: float  # share of the true neighbours that a search through the map finds
    arrays: Map


def map_features(arrays: Map, features: Any) -> Any:
    """Map embeddings f32[N, D] to the other space, f32[N, E] of length 1.

    With x a row of length 1: x M + c, or (x A) B + c, or x M + gelu(x A + b) B + c.
    NumPy maps an array of NumPy, JAX maps its own.

    Args:
      arrays: a choice of "matrix" M, "down" A, "offset" b, "up" B and "shift" c.
      features: embeddings by the first encoder.
    """
    xp = jnp if isinstance(features, jax.Array) else np
    product = _product if xp is jnp else np.matmul
    arrays = {name: xp.asarray(x) for name, x in arrays.items()}
    rows = _unit(xp, xp.asarray(features, np.float32))
    result = xp.zeros((), np.float32)
    if "matrix" in arrays:
        result = product(rows, arrays["matrix"])
    if "down" in arrays:
        hidden = product(rows, arrays["down"])
        if "offset" in arrays:
            hidden = _gelu(xp, hidden + arrays["offset"])
        result = result + product(hidden, arrays["up"])
    if "shift" in arrays:
        result = result + arrays["shift"]
    return _unit(xp, result)


def _product(a, b):
    return jnp.matmul(a, b, precision="highest")


def _unit(xp, rows):
    squares = xp.einsum("nd,nd->n", rows, rows)[:, None]
    return rows / xp.sqrt(xp.maximum(squares, 1e-24))


def _gelu(xp, x):
    return 0.5 * x * (1 + xp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def fit_orthogonal(source: Any, target: Any) -> Map:
    """Fit an orthogonal matrix, see `drift.find_rotation`."""
    return {"matrix": np.asarray(drift.find_rotation(target, source))}


def fit_affine(
    source: Any, target: Any, *, rank: int | None = None, ridge: float = 0.1
) -> Map:
    """Fit an affine map of a rank: reduced-rank regression (Izenman, 1975).

    Args:
      source: f32[N, D], embeddings by the encoder to map from.
      target: f32[N, E], embeddings of the same images by the other encoder.
      rank: largest rank of the matrix; None: any.
      ridge: weight of the map's squares, as a share of the mean variance of a feature.
    """
    return _AffineFit(source, target).solve(rank, ridge)


class _AffineFit:
    """The moments of some pairs, from which maps of any ridge and rank follow."""

    def __init__(self, source, target):
        x, y = (_unit(np, np.asarray(rows, np.float64)) for rows in (source, target))
        self.means = x.mean(axis=0), y.mean(axis=0)
        x, y = x - self.means[0], y - self.means[1]
        self.cross = x.T @ y
        self.values, self.vectors = np.linalg.eigh(x.T @ x)
        self.turned = self.vectors.T @ self.cross

    def solve(self, rank, ridge) -> Map:
        """Return the map of a rank and a ridge."""
        values = np.maximum(self.values, 0)
        damped = values + ridge * values.mean() + 1e-12
        matrix = self.vectors @ (self.turned / damped[:, None])
        if rank is None or rank >= min(matrix.shape):
            shift = self.means[1] - self.means[0] @ matrix
            return _to_float32({"matrix": matrix, "shift": shift})
        # The last columns are the directions in which the fitted rows vary most.
        axes = np.linalg.eigh(matrix.T @ self.cross)[1][:, -rank:]
        down, up = matrix @ axes, axes.T
        shift = self.means[1] - self.means[0] @ down @ up
        return _to_float32({"down": down, "up": up, "shift": shift})


def _to_float32(arrays) -> Map:
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}


_HIDDEN, _STEPS, _BATCH, _AXES = 256, 500, 256, 128


def fit_mlp(source: Any, target: Any, *, base: Map | None = None) -> Map:
    """Fit a residual layer to a linear map, by AdamW on the mean cosine.

    The layer has 256 hidden units. It reads the 128 main directions of the source and
    adds to those of the target, so that wide embeddings cost no more than narrow ones.

    Args:
      source: f32[N, D], embeddings by the encoder to map from.
      target: f32[N, E], embeddings of the same images by the other encoder.
      base: linear map of the same pairs; None: the orthogonal one.
    """
    base = fit_orthogonal(source, target) if base is None else base
    matrix = base["matrix"] if "matrix" in base else base["down"] @ base["up"]
    rows, wanted = drift.unit(source), drift.unit(target)
    linear = rows @ matrix + base.get("shift", 0)
    inputs, outputs = _main_axes(rows), _main_axes(wanted)
    # Enough to compute the cosine of linear + layer @ outputs.T with the target.
    columns = rows @ inputs, wanted @ outputs, linear @ outputs
    sums = np.einsum("nd,nd->n", linear, wanted), np.einsum("nd,nd->n", linear, linear)
    layer = _train_layer(*columns, *sums)
    layer = {name: np.asarray(x) for name, x in layer.items()}
    return {
        "matrix": matrix,
        "down": inputs @ layer["down"],
        "offset": layer["offset"],
        "up": layer["up"] @ outputs.T,
        "shift": layer["shift"] @ outputs.T + base.get("shift", 0),
    }


def _main_axes(rows) -> np.ndarray:
    """Return the directions in which rows vary most, f32[D, at most 128]."""
    if rows.shape[1] <= _AXES:
        return np.eye(rows.shape[1], dtype=np.float32)
    centred = rows - rows.mean(axis=0)
    return np.linalg.eigh(centred.T @ centred)[1][:, -_AXES:]


@jax.jit
def _train_layer(inputs, wanted, linear, dots, squares):
    """Train the layer; everything is given along the main axes of its two sides."""
    width, outputs, count = inputs.shape[1], wanted.shape[1], len(inputs)
    # Inputs have about length 1. Outputs of the layer start at 0, hidden units near 1.
    layer = {"down": jax.random.normal(numerics.make_key(0), (width, _HIDDEN))}
    layer |= {"offset": jnp.zeros(_HIDDEN), "up": jnp.zeros((_HIDDEN, outputs))}
    layer |= {"shift": jnp.zeros(outputs)}
    optimizer = optax.adamw(1e-3, weight_decay=1e-2)

    def loss(layer, batch):
        hidden = _gelu(jnp, _product(inputs[batch], layer["down"]) + layer["offset"])
        added = _product(hidden, layer["up"]) + layer["shift"]
        dot = dots[batch] + jnp.sum(added * wanted[batch], axis=1)
        norm = squares[batch] + jnp.sum(added * (added + 2 * linear[batch]), axis=1)
        return -jnp.mean(dot / jnp.sqrt(jnp.maximum(norm, 1e-12)))

    def step(number, carry):
        layer, state = carry
        key = jax.random.fold_in(numerics.make_key(1), number)
        batch = jax.random.randint(key, (min(_BATCH, count),), 0, count)
        gradient = jax.grad(loss)(layer, batch)
        updates, state = optimizer.update(gradient, state, layer)
        return optax.apply_updates(layer, updates), state

    carry = jax.lax.fori_loop(0, _STEPS, step, (layer, optimizer.init(layer)))
    return carry[0]


# The simplest first.
KINDS = ("orthogonal", "affine", "mlp")
RIDGES = (1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


def fit(source: Any, target: Any, kind: str, options: dict) -> Map:
    """Fit a map of a kind and of options that `fit_all` chose, to any pairs."""
    if kind == "orthogonal":
        return fit_orthogonal(source, target)
    linear = fit_orthogonal if options["ridge"] is None else fit_affine
    base = linear(source, target, **(options if options["ridge"] is not None else {}))
    return base if kind == "affine" else fit_mlp(source, target, base=base)


def fit_all(
    source: Any, target: Any, *, mapped: Mapped, k: int = 10
) -> list[FittedMap]:
    """Fit a map of every kind; choose its ridge and rank by recall on held-out pairs.

    Each candidate is fitted to three quarters of the pairs, and searched with on the
    others. `fit` fits the chosen one to all pairs.

    Args:
      source: f32[N, D], embeddings by the encoder to map from.
      target: f32[N, E], embeddings of the same images by the other encoder.
      mapped: "queries": mapped rows search among the target's rows; "vectors": the
        target's rows search among mapped rows.
      k: number of neighbours that a search returns.

    Returns:
      One map of each kind, the best first, of equal ones the simplest.

    Raises:
      Refused: there are too few pairs to fit and to choose.
    """
    source, target = check_pairs(source, target)
    test = np.arange(len(source)) % 4 == 3
    k = min(k, test.sum() - 1)
    pairs = source[~test], target[~test]

    def recall(arrays):
        return float(np.mean(measure_recall(arrays, source, target, test, mapped, k)))

    turn = fit_orthogonal(*pairs)
    trials = [
        FittedMap("orthogonal", {"rank": None, "ridge": None}, recall(turn), turn)
    ]
    moments = _AffineFit(*pairs)

    def affine(rank, ridge):
        arrays, options = moments.solve(rank, ridge), {"rank": rank, "ridge": ridge}
        return FittedMap("affine", options, recall(arrays), arrays)

    by_ridge = [affine(None, ridge) for ridge in RIDGES]
    best = max(by_ridge, key=_by_recall)
    width = min(source.shape[1], target.shape[1])
    ranks = sorted({min(64, width), width // 4, width // 2} - {0, width})
    ridge = best.options["ridge"]
    trials.append(max([best, *(affine(x, ridge) for x in ranks)], key=_by_recall))
    base = max(trials, key=_by_recall)
    layer = fit_mlp(*pairs, base=base.arrays)
    trials.append(FittedMap("mlp", base.options, recall(layer), layer))
    return sorted(trials, key=_by_recall, reverse=True)


def _by_recall(trial: FittedMap) -> float:
    return trial.recall


LEAST = 16  # pairs; of these 12 fit a map and 4 choose it


def check_pairs(source: Any, target: Any) -> tuple[np.ndarray, np.ndarray]:
    """Check the pairs of a fit; return them as f32.

    Raises:
      Refused: rows do not belong together, are too few, or not finite.
    """
    source, target = (np.asarray(rows, np.float32) for rows in (source, target))
    if len(source) != len(target):
        raise Refused(
            "pairs", f"{len(source)} and {len(target)} rows", "must be of equal images"
        )
    if len(source) < LEAST:
        raise Refused(
            "pairs",
            len(source),
            f"must be at least {LEAST}",
            "embed more images by both encoders (--old, config.rows)",
        )
    is_bad = ~(np.isfinite(source).all(axis=1) & np.isfinite(target).all(axis=1))
    if is_bad.any():
        rows = np.flatnonzero(is_bad)[:3].tolist()
        raise Refused(f"pairs: rows {rows} have numbers that are not finite")
    return source, target


def measure_recall(
    arrays: Map | None,
    source: np.ndarray,
    target: np.ndarray,
    test: np.ndarray,
    mapped: Mapped,
    k: int,
) -> np.ndarray:
    """Measure the share of true neighbours that each held-out query finds, f32[Q].

    Mapped queries search among all target rows. Mapped vectors are those of the
    held-out rows alone, since a map lies nearer to the rows that it was fitted to.

    Args:
      arrays: map; None: rows are searched as they are.
      source, target: f32[N, D] and f32[N, E], pairs.
      test: bool[N], rows that the map was not fitted to.
      mapped: side that is mapped, see `fit_all`.
      k: number of neighbours.
    """
    queries = target[test]
    places = np.flatnonzero(test) if mapped == "queries" else np.arange(len(queries))
    index = target if mapped == "queries" else queries
    through = source[test] if arrays is None else map_features(arrays, source[test])
    search = functools.partial(drift.find_neighbours, k=k, skip=places)
    wanted = search(queries, index)
    found = search(through, index) if mapped == "queries" else search(queries, through)
    return share_found(found, wanted)


def share_found(found: Any, wanted: Any) -> np.ndarray:
    """Compute the share of each query's wanted neighbours that were found, f32[Q]."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    matches = found[:, :, None] == wanted[:, None, :]
    return matches.any(axis=1).mean(axis=1, dtype=np.float32)


def map_to_index(run: str, features: np.ndarray) -> np.ndarray:
    """Map features of a run's encoder into the space of the index in use.

    Args:
      run: a run directory, or the folder of an encoder. If it has an adapter's file,
        the index is still that of the encoder before.
      features: f32[N, D].
    """
    path = epath.Path(run) / FILE
    if not path.exists():
        return features
    return map_features(read_map(path)[0], np.asarray(features))


def pack_map(arrays: Map, card: dict | None = None) -> bytes:
    """Serialise a map as a safetensors file, with a card in its metadata."""
    data = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    text = {"card": json.dumps(card or {}, sort_keys=True)}
    return tensors.save(data, metadata=text)


def read_map(path: Any) -> tuple[Map, dict]:
    """Read a map and its card, which is {} if the file was written without one.

    Raises:
      Refused: the file is no map.
      OSError: it cannot be read.
    """
    data = epath.Path(path).read_bytes()
    arrays = check_map(encoder_folder.read_tensors(data, path), path)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return arrays, json.loads(header.get("__metadata__", {}).get("card", "{}"))


def map_id(arrays: Map) -> str:
    """Return a short name of a map, from its bytes."""
    return hashlib.sha256(pack_map(arrays)).hexdigest()[:12]


_FORMS = (
    {"matrix"},
    {"matrix", "shift"},
    {"down", "up", "shift"},
    {"matrix", "down", "offset", "up", "shift"},
)


def check_map(arrays: dict[str, Any], origin: Any) -> Map:
    """Check the arrays of a map's file.

    Raises:
      Refused: they are not those of a map.
    """
    if "rotation" in arrays:  # the name before November 2026
        arrays = {"matrix" if k == "rotation" else k: x for k, x in arrays.items()}
    if {*arrays} not in _FORMS:
        raise Refused(f"{origin}: holds {sorted(arrays)}, which is no map")
    return arrays
