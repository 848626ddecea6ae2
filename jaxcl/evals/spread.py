"""How compact the classes are in feature space, and how far apart.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024, Eqs. 8 and 9, Table 2, and by class Figs. 9(b)
and 9(c). The authors released no code.

Departures: by default f(x) is the encoder's feature, as for every evaluator. The paper
does not say whether it measures features or projections. Its similarities are negative,
which is impossible for a ResNet's features, whose entries are not: so its Table 2 must
be compared with `features="projection"`. Both are taken in evaluation mode.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np
from etils import epath

from jaxcl import core, metrics, schema, sharding
from jaxcl.evals import features as features_lib
from jaxcl.evals import plots

_CLASS = re.compile(r"(.+)/(intra|inter)_(\d+)")


@schema.checked("config.evaluators.spread")
def make(
    parts: core.EvalParts,
    *,
    split: Literal["evaluation", "train"] = "evaluation",
    features: features_lib.Features = "embedding",
) -> Callable:
    """Intra-class variance and inter-class similarity of a split.

    Args:
      parts: with `project` for features="projection".
      split: "evaluation" or "train"; all its rows are measured, whatever their task.
      features: "embedding" of the encoder, or "projection", which the loss compares.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars:
      "intra_class_variance", see `metrics.intra_class_variance`;
      "inter_class_similarity", see `metrics.inter_class_similarity`; "intra_0",
      "intra_1", ... and "inter_0", ..., the same for each class that occurs, whose
      means over the classes are the first two; "seconds".

    Raises:
      ValueError: no such split or features; a method without a projection; no labels.
    """
    parts = features_lib.reading(parts, "spread", features)
    examples = parts.stream.evaluation
    if split == "train":  # no other split is read
        examples = parts.stream.dataset.train
        parts = features_lib.judged_on(parts, examples)
    features_lib.check_labels(parts, "spread")
    embed = features_lib.make(parts, examples)
    labels = sharding.replicate(examples.label, parts.mesh)
    present = np.unique(examples.label)
    program = _program(parts)

    def evaluate(state, task: int) -> core.Result:
        began = time.monotonic()
        measured = sharding.fetch(program(embed(state), labels))
        scalars = {
            name: float(measured[name])
            for name in ("intra_class_variance", "inter_class_similarity")
        }
        for name in ("intra", "inter"):
            scalars |= {f"{name}_{c}": float(measured[name][c]) for c in present}
        scalars["seconds"] = time.monotonic() - began
        return core.Result({}, scalars)

    return evaluate


def _program(parts):
    """(features, labels) -> the measures, over all classes and by class."""
    measures = {
        "intra_class_variance": metrics.intra_class_variance,
        "inter_class_similarity": metrics.inter_class_similarity,
        "intra": metrics.intra_class_variances,
        "inter": metrics.inter_class_similarities,
    }

    def run(features, labels):
        return {
            name: measure(features, labels, parts.num_classes)
            for name, measure in measures.items()
        }

    return jax.jit(run, out_shardings=sharding.replicated(parts.mesh))


def by_class(rows: Sequence[dict]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The last results of this module's evaluators, read from rows of metrics.jsonl.

    Returns:
      key of the evaluator's entry in the config -> (variances f64[C], similarities
      f64[C]), nan for a class that does not occur.
    """
    last = {}  # key -> (kind, class) -> value
    for row in rows:
        for name, value in row.get("eval", {}).items():
            match = _CLASS.fullmatch(name)
            if match:
                last.setdefault(match[1], {})[match[2], int(match[3])] = value
    measures = {}
    for key, values in last.items():
        size = 1 + max(label for _, label in values)
        measures[key] = tuple(
            np.array([values.get((kind, c)) for c in range(size)], np.float64)
            for kind in ("intra", "inter")
        )
    return measures


def draw(rows: Sequence[dict], folder: epath.Path) -> None:
    """Draw each class at the last evaluation: KEY_by_class.png.

    Args:
      rows: of metrics.jsonl, see `rows.read`.
      folder: an existing folder, which gets the pictures.
    """
    for key, measures in by_class(rows).items():
        path = folder / f"{key.replace('/', '_')}_by_class.png"
        plots.class_spread({key: measures}, path, title=key)
