"""Which classes DUEL's policy keeps of a stream while the network stands still.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024, Figs. 9(a) and 10: a memory of M rows that is
filled from the stream (1M), and then offered rows until it has seen five times as many
(5M). Beside it a memory that keeps the last M rows sees the same. No code of it was
released.

What an evaluation finds goes to metrics.jsonl, which a resumed run continues, and
`draw` reads it there. What a memory holds while a method trains: `evals/memory.py`.

Departures: the paper does not say which network embeds the rows, or after how many
steps. Here it is the one that learns, in evaluation mode, when it is evaluated, on
images without augmentation; and the memory is a new one, whatever the method keeps.
"""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, metrics, plots, sharding
from jaxcl.data import stream
from jaxcl.evals import features as features_lib
from jaxcl.memory import duel

LAST_ONLY = True  # unless the entry of the config says otherwise, see run/evaluation.py


class Course(NamedTuple):
    """What one evaluation found, after 1, 2, ... times as many rows as are stored."""

    shares: np.ndarray  # f64[n, C], of each class in the memory
    entropy: np.ndarray  # f64[n], of these shares, nats
    fifo: np.ndarray  # f64[n], of a memory that keeps the last rows


def make(
    parts: core.EvalParts,
    *,
    size: int = 2048,
    times: int = 5,
    batch_size: int = 256,
    score: str = "affine",
    temperature: float = 0.5,
    features: str | None = None,
    newcomer_competes: bool = False,
) -> Callable:
    """Class entropy and class shares of a memory that a fixed network filters.

    The rows are the first `times` x `size` that the present task's order draws, of
    several epochs where one has fewer.

    Args:
      parts: core.EvalParts, with `project` for features="projection".
      size: rows that the memory holds, M.
      times: how many times as many are offered in all.
      batch_size: rows that the stream draws and the policy is offered at a time. With
        that of the run they are those of its first steps of the task, for a method
        that trains on the stream alone.
      score: "affine" or "exponential", see `memory.duel.similarity`.
      temperature: tau of the exponential score.
      features: "projection" (what the loss compares) or "embedding" (of the encoder),
        which the policy compares as unit rows; None: "projection" where the method has
        one.
      newcomer_competes: Algorithm 1 in place of Algorithm 4, see `memory.duel.select`.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars, for i = 1, ...,
      `times`: "entropy_i" and "fifo_entropy_i", class entropies in nats of DUEL's
      memory and of the last `size` rows once i x `size` rows were offered, "class_c_i",
      the share of class c in DUEL's; "stream_entropy" and "stream_class_c", of all rows
      offered; "seconds".

    Raises:
      ValueError: an option out of its range; a method without a projection; rows
        without a label.
    """
    _check(size, times, batch_size, score, temperature)
    if features is None:
        features = "embedding" if parts.project is None else "projection"
    reads = _unit(features_lib.reading(parts, "filtering", features))
    train = parts.stream.dataset.train  # no other split is read
    features_lib.check_labels(features_lib.judged_on(parts, train), "filtering")
    # Placed once, and only when a task is evaluated.
    place = functools.cache(functools.partial(features_lib.place, parts, train))
    offered_in = functools.cache(
        functools.partial(_offered, reads, place, size * times, batch_size)
    )
    offer = _offer(
        parts, score=score, temperature=temperature, newcomer_competes=newcomer_competes
    )

    def evaluate(state, task: int) -> core.Result:
        began = time.monotonic()
        labels, order, embed = offered_in(task)
        features, held = embed(state), _empty(parts, size)
        scalars = _measured(parts, "stream_entropy", "stream_class_{}", labels[order])
        for i in range(times):
            offered = order[i * size : (i + 1) * size]
            for first in range(0, size, batch_size):
                batch = offered[first : first + batch_size]
                held = offer(features, held, sharding.replicate(batch, parts.mesh))
            kept, n = labels[sharding.fetch(held)], i + 1
            scalars |= _measured(parts, f"entropy_{n}", f"class_{{}}_{n}", kept)
            scalars[f"fifo_entropy_{n}"] = _entropy(parts, labels[offered])
        scalars["seconds"] = time.monotonic() - began
        return core.Result({}, scalars)

    return evaluate


def _check(size, times, batch_size, score, temperature):
    """Refuse options out of their range."""
    counts = {"size": size, "times": times, "batch_size": batch_size}
    for name, value in counts.items():
        whole = isinstance(value, int) and value >= 1
        features_lib.require(f"filtering.{name}", value, whole, "a whole number >= 1")
    core.check_choice("config.evaluators.filtering.score", score, duel.SCORES)
    warm = temperature > 0
    features_lib.require("filtering.temperature", temperature, warm, "above 0")


def _offered(reads, place, count, batch_size, task):
    """The first `count` rows that a task draws.

    Returns:
      labels i32[n] of the distinct rows; i32[count], which of them come, in order; and
      state -> f32[n, D], their features.
    """
    train = reads.stream.dataset.train
    rows = _rows(reads, reads.stream.tasks[task], count, batch_size)
    distinct, order = np.unique(rows, return_inverse=True)
    embed = features_lib.make(reads, train, rows=distinct, images=place())
    return train.label[distinct], order.astype(np.int32), embed


def _unit(parts):
    """EvalParts whose `embed` gives unit rows."""
    return parts._replace(
        embed=lambda state, images: features_lib.unit(parts.embed(state, images))
    )


def _rows(parts, task, count, batch_size) -> np.ndarray:
    """The first train rows that a task draws, i32[count], as a run of the seed does."""
    size = min(batch_size, len(task.train.rows))
    # As many epochs as rows are enough; only those in use are drawn.
    plan = stream.schedule(
        task.train, seed=parts.seed, task=task.index, epochs=count, batch_size=size
    )
    return np.concatenate([plan[step] for step in range(-(-count // size))])[:count]


def _empty(parts, size):
    return sharding.replicate(np.full(size, -1, np.int32), parts.mesh)


def _offer(parts, **policy) -> Callable:
    """(features f32[N, Z], held i32[M], batch i32[B]) -> held after a batch.

    Stored and offered rows are numbers of features; -1: nothing is held.
    """

    def run(features, held, batch):
        keep = duel.select(features[held], features[batch], filled=held >= 0, **policy)
        return held.at[duel.slots(keep, len(held))].set(batch, mode="drop")

    return jax.jit(run, out_shardings=sharding.replicated(parts.mesh))


def _entropy(parts, labels) -> float:
    return float(metrics.class_entropy(jnp.asarray(labels), parts.num_classes))


def _measured(parts, entropy, share, labels) -> dict[str, float]:
    """Entropy and shares of labels, under a name and a name with room for the class."""
    shares = np.bincount(labels, minlength=parts.num_classes) / len(labels)
    by_class = {share.format(c): float(x) for c, x in enumerate(shares)}
    return {entropy: _entropy(parts, labels), **by_class}


def courses(rows) -> dict[str, Course]:
    """What the evaluators of this module last left in the rows of metrics.jsonl.

    Returns:
      key of the evaluator's entry -> what it found.
    """
    made = {}
    for said in (row.get("eval", {}) for row in rows):
        for name in said:
            key, _, what = name.rpartition("/")
            if what == "fifo_entropy_1":
                made[key] = _course(said, key)
    return made


def _course(said, key) -> Course:
    most = range(1 + len(said))
    times = [i for i in most if f"{key}/fifo_entropy_{i}" in said]
    classes = [c for c in most if f"{key}/class_{c}_1" in said]
    return Course(
        np.array([[said[f"{key}/class_{c}_{i}"] for c in classes] for i in times]),
        np.array([said[f"{key}/entropy_{i}"] for i in times]),
        np.array([said[f"{key}/fifo_entropy_{i}"] for i in times]),
    )


def draw(rows, folder) -> None:
    """Pictures of the last evaluation: KEY_classes.png and KEY_entropy.png.

    Args:
      rows: of metrics.jsonl, see `record.read_rows`.
      folder: where the pictures go; epath.Path, there already.
    """
    for key, found in courses(rows).items():
        times = np.arange(1, 1 + len(found.shares))
        path = folder / f"{key.replace('/', '_')}_classes.png"
        plots.class_shares(times, found.shares, path, title=key, time="{}M")
        curves = {
            "DUEL": (times, found.entropy),
            "first in, first out": (times, found.fifo),
        }
        path = folder / f"{key.replace('/', '_')}_entropy.png"
        plots.per_step(
            curves,
            path,
            times[-1:],
            title=key,
            ylabel="class entropy (nats)",
            xlabel="rows offered, in sizes M of the memory",
        )
