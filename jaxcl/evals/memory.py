"""Which classes a method's memory holds, and how that shifts over time.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024: the class entropy of Table 2 and Fig. 9(a), the
class frequencies of Fig. 10. No code of it was released.

What each evaluation finds goes to metrics.jsonl, which a resumed run continues, and
`draw` reads it there.

Departures: the figures go from a memory filled once to one that was offered five times
as many rows, as those of `evals/filtering.py` do; here the time is the step of each
evaluation.
"""

import re
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, metrics, plots, sharding

# Rows of a batch of the stream. The shares hardly depend on it, but an order may give
# a number of steps, whatever the batch.
_BATCH = 16
_CLASS = re.compile(r"(.+)/class_(\d+)")


class History(NamedTuple):
    """What one evaluator measured over a run."""

    steps: np.ndarray  # i64[n], with labelled rows in the memory
    shares: np.ndarray  # f64[n, C], of each class
    entropy: np.ndarray  # f64[n], nats
    stream: np.ndarray  # f64[n], entropy of the task's stream; nan: no labels


def make(parts) -> Callable:
    """Class entropy and class shares of a method's memory.

    Rows labelled outside [0, C), such as -1, count as stored and are left out of both.

    Args:
      parts: core.EvalParts, with `memory`.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars: "rows", how many are
      stored; "unlabelled", how many of these are left out. Of the others "entropy" in
      nats, 0 to log C, and "class_0", "class_1", ..., the share of each class: absent
      where there are none. "stream_entropy", that of the rows of the task's first
      epoch as its order draws them, absent where none has a label; "seconds".

    Raises:
      ValueError: the method keeps no memory.
    """
    if parts.memory is None:
        raise ValueError(
            "config.evaluators.memory: needs a method with a memory of rows, as duel, "
            "er and cclis have; take the evaluator out"
        )
    program = _program(parts)
    streams = {}  # task -> entropy, which no step changes

    def evaluate(state, task: int) -> core.Result:
        began = time.monotonic()
        labels, filled, entropy = sharding.fetch(program(state))
        known = labels[labels >= 0]
        rows = int(filled.sum())
        scalars = {"rows": float(rows), "unlabelled": float(rows - len(known))}
        if len(known):
            counts = np.bincount(known, minlength=parts.num_classes)
            shares = enumerate(counts / len(known))
            scalars["entropy"] = float(entropy)
            scalars |= {f"class_{c}": float(share) for c, share in shares}
        if task not in streams:
            streams[task] = _of_stream(parts, task)
        if streams[task] is not None:
            scalars["stream_entropy"] = streams[task]
        scalars["seconds"] = time.monotonic() - began
        return core.Result({}, scalars)

    return evaluate


def _program(parts):
    """State -> labels i32[capacity], -1: none that counts; bool[capacity]; f32[]."""

    def read(state):
        memory = parts.memory(state)
        label = memory.items["label"]
        counts = memory.filled & (label >= 0) & (label < parts.num_classes)
        labels = jnp.where(counts, label, -1)
        return labels, memory.filled, metrics.class_entropy(labels, parts.num_classes)

    return jax.jit(read, out_shardings=sharding.replicated(parts.mesh))


def _of_stream(parts, task) -> float | None:
    """Entropy of what the first epoch of a task draws, None without labels."""
    one = parts.stream.tasks[task]
    rng = np.random.default_rng([parts.seed, one.index, 0])
    rows = np.asarray(one.train.rows, np.int32)
    drawn = one.train.order(rng, rows, min(_BATCH, len(rows)))
    labels = one.train.examples.label[np.asarray(drawn).reshape(-1)]
    if not (labels >= 0).any():
        return None
    return float(metrics.class_entropy(jnp.asarray(labels), parts.num_classes))


def histories(rows) -> dict[str, History]:
    """What the evaluators of this module left in the rows of metrics.jsonl.

    Returns:
      key of the evaluator's entry -> what it measured where there was anything.
    """
    found = {}
    for row in rows:
        for name, share in row.get("eval", {}).items():
            match = _CLASS.fullmatch(name)
            if match:
                one = found.setdefault(match[1], {}).setdefault(row["step"], {})
                one[int(match[2])] = share
    said = {row["step"]: row["eval"] for row in rows if "eval" in row}
    made = {}
    for key, times in found.items():
        steps = sorted(times)

        def scalar(name, key=key, steps=steps):
            return np.array([said[s].get(f"{key}/{name}") for s in steps], np.float64)

        shares = np.array([[times[s][c] for c in sorted(times[s])] for s in steps])
        entropies = scalar("entropy"), scalar("stream_entropy")
        made[key] = History(np.array(steps), shares, *entropies)
    return made


def draw(rows, folder) -> None:
    """Pictures of what a run measured: KEY_classes.png and KEY_entropy.png.

    Args:
      rows: of metrics.jsonl, see `record.read_rows`.
      folder: where the pictures go; epath.Path, there already.
    """
    ends = {row["task"]: row["step"] for row in rows}  # the last row of each task
    for key, found in histories(rows).items():
        path = folder / f"{key.replace('/', '_')}_classes.png"
        plots.class_shares(found.steps, found.shares, path, title=key)
        curves = {"memory": (found.steps, found.entropy)}
        if np.isfinite(found.stream).any():
            curves["stream"] = found.steps, found.stream
        path = folder / f"{key.replace('/', '_')}_entropy.png"
        label = "class entropy (nats)"
        plots.per_step(curves, path, list(ends.values()), title=key, ylabel=label)
