"""Measure how compact classes are and how far apart they lie in feature space.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024, Eqs. 8 and 9, Table 2, and by class Figs. 9(b)
and 9(c). The authors released no code.

Departures: by default f(x) is the encoder's feature, as for every evaluator. The paper
does not say whether it measures features or projections. Its similarities are negative,
which is impossible for a ResNet's features, whose entries are not: so its Table 2 must
be compared with `features="projection"`. Both are taken in evaluation mode.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from etils import epath

from jaxcl import core, metrics, plots, schema, sharding
from jaxcl.evals import embedding


@schema.checked("config.evaluators.spread")
def make(
    parts: core.EvalParts,
    *,
    split: Literal["evaluation", "train"] = "evaluation",
    features: embedding.Features = "embedding",
) -> core.Evaluator:
    """Build the evaluator of intra-class variance and inter-class similarity.

    Args:
      parts: core.EvalParts, with `project` for features="projection".
      split: name, "evaluation" or "train"; all rows are measured, whatever their task.
      features: the encoder's "embedding", or the "projection", which the loss compares.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars:
      "intra_class_variance", see `metrics.intra_class_variance`;
      "inter_class_similarity", see `metrics.inter_class_similarity`; "intra_0",
      "intra_1", ... and "inter_0", ..., the same for each class that occurs, whose
      means over the classes are the first two.

    Raises:
      Refused: no such split or features; a method without a projection; no labels.
    """
    parts = embedding.select_features(parts, "spread", features)
    train = parts.stream.dataset.train
    examples = train if split == "train" else parts.stream.evaluation
    embedding.check_labels(parts, "spread", *([train] if split == "train" else []))
    embed = embedding.make_embedder(parts, examples)
    labels = sharding.replicate(examples.label, parts.mesh)
    present = np.unique(examples.label)
    measures = {
        "intra_class_variance": metrics.intra_class_variance,
        "inter_class_similarity": metrics.inter_class_similarity,
        "intra": metrics.intra_class_variances,
        "inter": metrics.inter_class_similarities,
    }

    def measure(features, labels):
        rows = features, labels, parts.num_classes
        return {name: function(*rows) for name, function in measures.items()}

    program = jax.jit(measure, out_shardings=sharding.replicated(parts.mesh))

    def evaluate(state, task: int) -> core.Result:
        scalars = sharding.copy_to_host(program(embed(state), labels))
        for name in ("intra", "inter"):
            of_class = scalars.pop(name)
            scalars |= {f"{name}_{c}": of_class[c] for c in present}
        return core.Result({}, {name: float(x) for name, x in scalars.items()})

    return core.Evaluator(evaluate, chart=draw_last)


def draw_last(rows: Sequence[dict], folder: epath.Path) -> None:
    """Draw each class at the last evaluation: KEY_by_class.png.

    Args:
      rows: rows of metrics.jsonl, see `log_file.read_rows`.
      folder: an existing folder, which gets the pictures.
    """
    for key, by_step in embedding.find_scalars(rows, r"(intra|inter)_(\d+)").items():
        last = {name: x for values in by_step.values() for name, x in values.items()}
        classes = range(1 + max(label for _, label in last))
        measures = [
            np.array([last.get((kind, c)) for c in classes], np.float64)  # None: nan
            for kind in ("intra", "inter")
        ]
        path = folder / f"{key.replace('/', '_')}_by_class.png"
        plots.class_spread({key: measures}, path, title=key)
