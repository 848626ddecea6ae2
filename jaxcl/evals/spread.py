"""How tight the classes lie in feature space, and how far apart.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024, Eqs. 8 and 9, Table 2, and by class Figs. 9(b)
and 9(c). No code of it was released.

Departures: by default f(x) is the encoder's feature, as for every evaluator. The paper
does not say whether it measures that or the projection; its similarities are below 0,
which those of features without negative entries, as a ResNet's, cannot be, so that it
must be `features="projection"` that its Table 2 compares with. Both are those of the
network in evaluation mode.
"""

import re
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxcl import core, metrics, plots, sharding
from jaxcl.evals import features as features_lib

_CLASS = re.compile(r"(.+)/(intra|inter)_(\d+)")


def make(parts, *, split="evaluation", features="embedding") -> Callable:
    """Intra-class variance and inter-class similarity of a split.

    Args:
      parts: core.EvalParts, with `project` for features="projection".
      split: "evaluation" or "train", all rows of it, whatever their task.
      features: "embedding", of the encoder, or "projection", what the loss compares.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars:
      "intra_class_variance", `metrics.intra_class_variance`; "inter_class_similarity",
      `metrics.inter_class_similarity`; of each class that occurs "intra_0", "intra_1",
      ... and "inter_0", ..., whose means over the classes these two are; "seconds".

    Raises:
      ValueError: no such split or features; a method without a projection; no labels.
    """
    core.check_choice("config.evaluators.spread.split", split, ("evaluation", "train"))
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
        found = sharding.fetch(program(embed(state), labels))
        scalars = {
            name: float(found[name])
            for name in ("intra_class_variance", "inter_class_similarity")
        }
        for name in ("intra", "inter"):
            scalars |= {f"{name}_{c}": float(found[name][c]) for c in present}
        scalars["seconds"] = time.monotonic() - began
        return core.Result({}, scalars)

    return evaluate


def _program(parts):
    """(features, labels) -> the measures, whole and by class."""
    measures = {
        "intra_class_variance": metrics.intra_class_variance,
        "inter_class_similarity": metrics.inter_class_similarity,
        "intra": metrics.intra_class_variances,
        "inter": metrics.inter_class_similarities,
    }

    def run(features, labels):
        given = features, labels, parts.num_classes
        return {name: measure(*given) for name, measure in measures.items()}

    return jax.jit(run, out_shardings=sharding.replicated(parts.mesh))


def by_class(rows) -> dict[str, tuple]:
    """What the evaluators of this module last left in the rows of metrics.jsonl.

    Returns:
      key of the evaluator's entry -> (variances f64[C], similarities f64[C]), nan for
      a class that does not occur.
    """
    found = {}
    for row in rows:
        for name, value in row.get("eval", {}).items():
            match = _CLASS.fullmatch(name)
            if match:
                found.setdefault(match[1], {})[match[2], int(match[3])] = value
    made = {}
    for key, values in found.items():
        size = 1 + max(label for _, label in values)
        made[key] = tuple(
            np.array([values.get((kind, c)) for c in range(size)], np.float64)
            for kind in ("intra", "inter")
        )
    return made


def draw(rows, folder) -> None:
    """A picture of each class at the last evaluation: KEY_by_class.png.

    Args:
      rows: of metrics.jsonl, see `record.read_rows`.
      folder: where the pictures go; epath.Path, there already.
    """
    for key, found in by_class(rows).items():
        path = folder / f"{key.replace('/', '_')}_by_class.png"
        plots.class_spread({key: found}, path, title=key)
