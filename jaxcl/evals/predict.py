"""The method's own predictions, e.g. those of a head that is trained beside it.

Source: the accuracy that the released code of PNR (Cha et al., ICML 2024) and CaSSLe
(Fini et al., CVPR 2022) logs on CIFAR-100, of a linear head that learns all classes
while the network learns those of the present task.
"""

import time
from collections.abc import Callable

import numpy as np

from jaxcl import core
from jaxcl.evals import features as features_lib


def make(parts, *, met_only=True) -> Callable:
    """Accuracy of a method's own predictions after a task.

    Args:
      parts: core.EvalParts, with `predict`.
      met_only: judge no rows but those of the tasks met, up to the one that the
        evaluation is told: of the untrained network, those of task 0. The classes
        to choose from stay the same.

    Returns:
      evaluate(state, task) -> core.Result. Rows (accuracy per task, nan without
      test rows and where these are not judged): "class_incremental", over all
      classes; where tasks are disjoint classes also "task_aware", over the classes
      of the row's task. Scalars: "accuracy" on all rows judged, "seconds".

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
    # Sorted by the first task that has it, with those of none last, so that the rows
    # to judge come first and every task runs the same programs.
    none = len(parts.stream.tasks)
    first = np.where(groups.test_task < 0, none, groups.test_task)
    order = np.argsort(first, kind="stable")
    reads = parts._replace(embed=parts.predict)
    scores_of = features_lib.make(reads, examples, rows=order)
    judge = features_lib.verdicts(parts, groups, examples, rows=order)

    def evaluate(state, task: int) -> core.Result:
        began = time.monotonic()
        count = int((first <= (task if met_only else none)).sum())
        right, rows = judge(scores_of(state, first=count)), {}
        for name, found in right.items():
            row = features_lib.per_task(parts, found[np.argsort(order)])
            unjudged = met_only & (np.arange(len(row)) > task)
            rows[name] = np.where(unjudged, np.nan, row)
        judged = right["class_incremental"][:count]
        scalars = {
            "accuracy": float(judged.mean()) if count else np.nan,
            "seconds": time.monotonic() - began,
        }
        return core.Result(rows, scalars)

    return evaluate
