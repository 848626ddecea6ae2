"""Map new embeddings to the space of old ones, so that an old index stays usable.

Vejendla, "Drift-Adapter: A Practical Approach to Near Zero-Downtime Embedding Model
Upgrades in Vector Databases", EMNLP 2025 (arXiv 2509.23471): an orthogonal matrix, a
low-rank affine map or a residual MLP, fitted to embeddings of the same images before
and after. Only directions count: rows are scaled to length 1 before and after the map.

Departures: the affine map is a ridge regression of reduced rank in closed form, not
trained; the MLP is added to the orthogonal map; outputs are not scaled one by one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from safetensors import numpy as tensors

from jaxcl import core, numerics
from jaxcl.errors import Refused
from jaxcl.run import folder
from jaxcl.update import drift

FILE = "adapter.safetensors"
Adapter = dict[str, jax.Array]  # names of arrays are those that `map_features` reads


class FittedAdapter(NamedTuple):
    """An adapter with its recall."""

    kind: str  # a key of `KINDS`
    recall: float  # share of the old neighbours that adapted queries find
    adapter: Adapter


def map_features(adapter: Adapter, features: jax.Array) -> jax.Array:
    """Map new embeddings f32[N, D] to the old space, f32[N, E] of length 1.

    With x a row of length 1: x R, or (x A) B + c, or x R + gelu(x A + b) B + c.

    Args:
      adapter: of "rotation" R, "down" A, "offset" b, "up" B and "shift" c.
      features: of the new encoder.
    """
    rows = core.l2_normalize(jnp.asarray(features))
    found = jnp.zeros(())
    if "rotation" in adapter:
        found = _product(rows, adapter["rotation"])
    if "down" in adapter:
        hidden = _product(rows, adapter["down"])
        if "offset" in adapter:
            hidden = jax.nn.gelu(hidden + adapter["offset"])
        found = found + _product(hidden, adapter["up"]) + adapter["shift"]
    return core.l2_normalize(found)


def _product(a, b):
    return jnp.matmul(a, b, precision="highest")


def fit_orthogonal(before: jax.Array, after: jax.Array) -> Adapter:
    """Fit an orthogonal matrix, see `drift.find_rotation`."""
    return {"rotation": drift.find_rotation(before, after)}


def fit_affine(
    before: jax.Array, after: jax.Array, *, rank: int = 64, ridge: float = 1e-3
) -> Adapter:
    """Fit an affine map of a rank: reduced-rank regression (Izenman, 1975).

    Args:
      before: f32[N, E], old embeddings.
      after: f32[N, D], new embeddings of the same images.
      rank: at most this; E is enough for any affine map.
      ridge: weight of the map's squares, as a share of the mean variance of a feature.
    """
    x, y = (core.l2_normalize(jnp.asarray(rows)) for rows in (after, before))
    means = x.mean(axis=0), y.mean(axis=0)
    x, y = x - means[0], y - means[1]
    inner, cross = _product(x.T, x), _product(x.T, y)
    inner += (ridge * jnp.trace(inner) / len(inner) + 1e-12) * jnp.eye(len(inner))
    full = jax.scipy.linalg.solve(inner, cross, assume_a="pos")
    # The last columns are the directions in which the fitted rows vary most.
    kept = jnp.linalg.eigh(_product(full.T, cross))[1][:, -rank:]
    down, up = _product(full, kept), kept.T
    shift = means[1] - _product(_product(means[0], down), up)
    return {"down": down, "up": up, "shift": shift}


_HIDDEN, _STEPS = 256, 500


@jax.jit
def fit_mlp(before: jax.Array, after: jax.Array) -> Adapter:
    """Fit the orthogonal map and a residual layer, by AdamW on the mean cosine.

    The layer has 256 hidden units. All rows take part in each of 500 steps.

    Args:
      before: f32[N, E], old embeddings.
      after: f32[N, D], new embeddings of the same images.
    """
    fixed = fit_orthogonal(before, after)
    wanted = core.l2_normalize(jnp.asarray(before))
    inputs, outputs = after.shape[1], before.shape[1]
    down = jax.random.normal(numerics.make_key(0), (inputs, _HIDDEN))
    # Inputs have length 1. Outputs of the layer start at 0, hidden units near 1.
    begin = {"down": down, "offset": jnp.zeros(_HIDDEN)}
    begin |= {"up": jnp.zeros((_HIDDEN, outputs)), "shift": jnp.zeros(outputs)}
    optimizer = optax.adamw(1e-3, weight_decay=1e-2)

    def loss(layer):
        return -jnp.mean(jnp.sum(map_features(fixed | layer, after) * wanted, axis=1))

    def step(_, carried):
        layer, state = carried
        updates, state = optimizer.update(jax.grad(loss)(layer), state, layer)
        return optax.apply_updates(layer, updates), state

    carried = jax.lax.fori_loop(0, _STEPS, step, (begin, optimizer.init(begin)))
    return fixed | carried[0]


# The simplest first.
KINDS = {"orthogonal": fit_orthogonal, "affine": fit_affine, "mlp": fit_mlp}


def fit_adapters(
    before: jax.Array, after: jax.Array, *, k: int = 10
) -> list[FittedAdapter]:
    """Fit every kind of adapter to the even rows, and evaluate it on the odd rows.

    Args:
      before: f32[N, E], old embeddings: the index.
      after: f32[N, D], new embeddings of the same images, N > 2 k.
      k: how many neighbours a search returns.

    Returns:
      One of each kind, the best first. Its recall is the share of the k neighbours of
      an old query in the old index that the adapted new query finds there, too.
    """
    before, after = jnp.asarray(before), jnp.asarray(after)
    odd = jnp.arange(len(before))[1::2]
    wanted = drift.find_neighbours(before[1::2], before, k, odd)
    found = []
    for kind, make in KINDS.items():
        adapter = make(before[::2], after[::2])
        mine = drift.find_neighbours(map_features(adapter, after[1::2]), before, k, odd)
        recall = float(drift.mean_overlap(mine, wanted))
        found.append(FittedAdapter(kind, recall, adapter))
    return sorted(found, key=lambda one: -one.recall)


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
    arrays = folder.read_tensors(path.read_bytes(), path)
    return np.asarray(map_features(check_adapter(arrays, path), features))


def pack_adapter(adapter: Adapter) -> bytes:
    """Serialise an adapter as the bytes of a file."""
    return tensors.save({name: np.asarray(x) for name, x in adapter.items()})


def check_adapter(arrays: dict[str, Any], where: Any) -> Adapter:
    """Check the arrays of an adapter's file.

    Raises:
      Refused: they are not those of an adapter.
    """
    kinds = ({"rotation"}, {"down", "up", "shift"})
    kinds += ({"rotation", "down", "offset", "up", "shift"},)
    if {*arrays} not in kinds:
        raise Refused(f"{where}: holds {sorted(arrays)}, which is no adapter")
    return {name: jnp.asarray(x) for name, x in arrays.items()}
