"""Measure the classes that a method's memory holds over time.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024: the class entropy of Table 2 and Fig. 9(a), the
class frequencies of Fig. 10. The authors released no code.

Results go to metrics.jsonl, which a resumed run continues; `draw_last` reads them
there.

Departures: the paper's figures count time in rows offered, from one memory size to five
(`evals/filtering.py` draws them so); here time is the step of each evaluation.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxcl import core, metrics, plots, sharding
from jaxcl.evals import embedding

# Rows of a batch when the stream's entropy is measured. An order may fix the number of
# steps of an epoch, so this decides how many rows are drawn, not how their classes mix.
_BATCH = 16


def make(parts: core.EvalParts) -> core.Evaluator:
    """Build the evaluator of the classes in a method's memory.

    Stored rows with a label outside [0, C), such as -1, are counted but left out of
    entropy and shares.

    Args:
      parts: core.EvalParts with `memory`.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars: "rows", the number of
      stored rows; "unlabelled", how many of them are left out; "entropy" of the others
      in nats, 0 to log C, and "class_0", "class_1", ..., the share of each class, both
      absent without labelled rows; "stream_entropy", the entropy of the rows of the
      task's first epoch, absent if none has a label.

    Raises:
      Refused: the method keeps no memory.
    """
    need = "a method with a memory of rows, as duel, er and cclis have"
    embedding.refuse_unless(parts.memory, "memory", need)
    streams = {}  # task -> entropy, measured once since no step changes it

    def read_labels(state):
        memory = parts.memory(state)
        label = memory.items["label"]
        counts = memory.filled & (label >= 0) & (label < parts.num_classes)
        labels = jnp.where(counts, label, -1)  # -1: left out
        return labels, memory.filled, metrics.class_entropy(labels, parts.num_classes)

    program = jax.jit(read_labels, out_shardings=sharding.replicated(parts.mesh))

    def evaluate(state, task: int) -> core.Result:
        labels, filled, entropy = sharding.copy_to_host(program(state))
        present = labels[labels >= 0]
        rows = int(filled.sum())
        scalars = {"rows": float(rows), "unlabelled": float(rows - len(present))}
        if len(present):
            shares = np.bincount(present, minlength=parts.num_classes) / len(present)
            scalars["entropy"] = float(entropy)
            scalars |= {f"class_{c}": float(share) for c, share in enumerate(shares)}
        if task not in streams:
            streams[task] = _stream_entropy(parts, task)
        if streams[task] is not None:
            scalars["stream_entropy"] = streams[task]
        return core.Result({}, scalars)

    return core.Evaluator(evaluate, chart=draw_last)


def _stream_entropy(parts, task) -> float | None:
    """Return the entropy of a task's first epoch; None without labels."""
    task = parts.stream.tasks[task]
    rng = np.random.default_rng([parts.seed, task.index, 0])
    rows = np.asarray(task.train.rows, np.int32)
    drawn = task.train.order(rng, rows, min(_BATCH, len(rows)))
    labels = task.train.examples.label[np.asarray(drawn).reshape(-1)]
    if not (labels >= 0).any():
        return None
    return float(metrics.class_entropy(jnp.asarray(labels), parts.num_classes))


def draw_last(rows: Sequence[dict], folder: epath.Path) -> None:
    """Draw a memory's classes and entropy: KEY_classes.png and KEY_entropy.png.

    Args:
      rows: rows of metrics.jsonl, see `log_file.read_rows`.
      folder: an existing folder, which gets the pictures.
    """
    ends = {row["task"]: row["step"] for row in rows}  # last step of each task
    pattern = r"(class|entropy|stream_entropy)_?(\d*)"
    for key, by_step in embedding.find_scalars(rows, pattern).items():
        # Without labelled rows in the memory an evaluation has no classes.
        points = {step: x for step, x in sorted(by_step.items()) if ("class", 0) in x}
        if not points:
            continue
        steps, first = np.array([*points]), next(iter(points.values()))
        classes = sorted(name for name in first if name[0] == "class")
        shares = [[x[name] for name in classes] for x in points.values()]
        path = folder / f"{key.replace('/', '_')}_classes.png"
        plots.class_shares(steps, shares, path, title=key)
        curves = {}
        for name, kind in (("memory", "entropy"), ("stream", "stream_entropy")):
            values = np.array([x.get((kind, "")) for x in points.values()], float)
            if np.isfinite(values).any():
                curves[name] = steps, values
        path = folder / f"{key.replace('/', '_')}_entropy.png"
        label = "class entropy (nats)"
        plots.per_step(curves, path, list(ends.values()), title=key, ylabel=label)
