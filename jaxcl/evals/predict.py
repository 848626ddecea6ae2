"""The method's own predictions, e.g. those of a head that is trained beside it.

Source: the accuracy that the released code of PNR (Cha et al., ICML 2024) and CaSSLe
(Fini et al., CVPR 2022) logs on CIFAR-100, of a linear head that learns all classes
while the network learns those of the present task.
"""

import time
from collections.abc import Callable

import numpy as np

from jaxcl import core, sharding
from jaxcl.evals import features as features_lib


def make(parts) -> Callable:
    """Accuracy of a method's own predictions after a task.

    Args:
      parts: core.EvalParts, with `predict`.

    Returns:
      evaluate(state, task) -> core.Result. Rows (accuracy per task, nan without
      test rows): "class_incremental", over all classes; where tasks are disjoint
      classes also "task_aware", over the classes of the row's task. Scalars:
      "accuracy" on all evaluation rows, "seconds".

    Raises:
      ValueError: the method predicts nothing; no evaluation split; no labels.
    """
    if parts.predict is None:
        raise ValueError(
            "config.evaluators.predict: needs a method that predicts classes, as "
            "two_view does with config.method.online_head=True; set it, or take the "
            "evaluator out (of an encoder judged by config.checkpoint there are none)"
        )
    features_lib.check_labels(parts, "predict")
    groups, examples = features_lib.split(parts), parts.stream.evaluation
    scores_of = features_lib.make(parts._replace(embed=parts.predict), examples)
    # A row of no task may be any class.
    allowed = np.concatenate([groups.classes, np.ones((1, parts.num_classes), bool)])

    def evaluate(state, task: int) -> core.Result:
        began = time.monotonic()
        scores = sharding.fetch(scores_of(state))
        right = scores.argmax(axis=1) == examples.label
        rows = {"class_incremental": features_lib.per_task(parts, right)}
        if groups.aware == "task_aware":
            told = np.where(allowed[groups.test_task], scores, -np.inf)
            told = told.argmax(axis=1) == examples.label
            rows["task_aware"] = features_lib.per_task(parts, told)
        scalars = {
            "accuracy": float(right.mean()),
            "seconds": time.monotonic() - began,
        }
        return core.Result(rows, scalars)

    return evaluate
