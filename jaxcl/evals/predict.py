"""Measure the accuracy of a method's own predictions.

Source: the accuracy that the released code of PNR (Cha et al., ICML 2024) and CaSSLe
(Fini et al., CVPR 2022) logs on CIFAR-100 for a linear head, which learns all classes
while the network learns the present task's.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, schema, sharding
from jaxcl.evals import embedding


@schema.checked("config.evaluators.predict")
def make(parts: core.EvalParts, *, met_only: bool = True) -> Callable:
    """Build the evaluator of a method's own predictions after a task.

    Args:
      parts: core.EvalParts with `predict`.
      met_only: whether to evaluate only rows of the tasks so far, up to the present one
        (task 0 before training). The classes to choose from stay the same.

    Returns:
      evaluate(state, task) -> core.Result. Rows (accuracy per task, nan without
      evaluated test rows): "class_incremental", over all classes; if tasks are disjoint
      classes also "task_aware", over the classes of the row's task. Scalars: "accuracy"
      on all evaluated rows.

    Raises:
      Refused: the method predicts nothing, or the evaluation split or labels are
        missing.
    """
    need = "a method that predicts classes, or one with config.method.online_head=True"
    need += "; the encoder of config.checkpoint does not"
    embedding.refuse_unless(parts.predict, "predict", need)
    embedding.check_labels(parts, "predict")
    groups, examples = embedding.assign_tasks(parts), parts.stream.evaluation
    # Rows are sorted by their first task, rows of no task last: then the rows to judge
    # come first, and every task runs the same programs.
    none = len(parts.stream.tasks)
    first = np.where(groups.test_task < 0, none, groups.test_task)
    order = np.argsort(first, kind="stable")
    reads = parts._replace(embed=parts.predict)
    scores_of = embedding.make_embedder(reads, examples, rows=order)
    grade = embedding.make_grader(parts, groups, examples, rows=order)

    def evaluate(state, task: int) -> core.Result:
        count = int((first <= (task if met_only else none)).sum())
        scores, rows, warnings = scores_of(state, first=count), {}, ()
        right = {name: row.astype(float) for name, row in grade(scores).items()}
        if not sharding.copy_to_host(_has_choice(scores)):
            # Scores of nan would predict class 0 for every row.
            right = {name: row + np.nan for name, row in right.items()}
            warnings = ("predictions are not finite, so that there is no accuracy",)
        for name, correct in right.items():
            row = embedding.average_per_task(parts, correct[np.argsort(order)])
            unjudged = met_only & (np.arange(len(row)) > task)
            rows[name] = np.where(unjudged, np.nan, row)
        hits = right["class_incremental"][:count]
        accuracy = float(hits.mean()) if count else np.nan
        return core.Result(rows, {"accuracy": accuracy}, warnings)

    return evaluate


@jax.jit
def _has_choice(scores):
    """Tell whether every row f[C] of scores chooses a class; -inf leaves one out."""
    is_invalid = jnp.isnan(scores) | jnp.isposinf(scores)
    return jnp.isfinite(scores).any(axis=1).all() & ~is_invalid.any()
