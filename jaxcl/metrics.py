"""Numbers that summarise a run.

`matrix` is f64[T, T]: `matrix[i, j]` is the accuracy on task j after task i, nan
where it was not measured. The functions of it run on the host in float64 and
return nan where a cell they need is missing, and where there is no task to
average over (T = 1 for all but the average accuracy). Units are those of the
matrix. The others are jax functions of features, labels or logits.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core
from jaxcl.errors import Refused


def _square(matrix):
    matrix = np.asarray(matrix, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise Refused(f"matrix has shape {matrix.shape}, allowed is [T, T], T >= 1")
    return matrix


def _mean(values):
    """Compute the mean, nan without a warning if there is nothing to average."""
    return float(np.mean(values)) if len(values) else float("nan")


def _best_cells(values):
    """Compute the best measured cell of each column, nan where there is none."""
    best = np.max(np.where(np.isnan(values), -np.inf, values), axis=0)
    return np.where(np.isneginf(best), np.nan, best)


def average_accuracy(matrix) -> float:
    """Compute A_T, the mean of the last row (PNR, section 5.1).

    Args:
      matrix: f64[T, T]. For an unfinished run pass the rows and columns of the finished
        tasks, or take `average_accuracy_per_task`.

    Returns:
      float.

    Raises:
      Refused: if `matrix` is not square.
    """
    return _mean(_square(matrix)[-1])


def average_accuracy_per_task(matrix) -> np.ndarray:
    """Compute A_t after every task: the mean of row t over the tasks so far.

    Args:
      matrix: f64[T, T].

    Returns:
      f64[T].

    Raises:
      Refused: if `matrix` is not square.
    """
    matrix = _square(matrix)
    return np.array([_mean(row[: t + 1]) for t, row in enumerate(matrix)])


def forgetting(matrix) -> float:
    """Compute mean over tasks j < T of the best earlier row minus the last row.

    The forgetting measure of Chaudhry et al. (ECCV 2018); lower is better and
    negative if a task improved. Cells that were not measured are passed over
    in the earlier rows, not in the last.

    Args:
      matrix: f64[T, T].

    Returns:
      float, nan if T = 1.

    Raises:
      Refused: if `matrix` is not square.
    """
    matrix = _square(matrix)
    if len(matrix) == 1:
        return float("nan")
    return _mean((_best_cells(matrix[:-1]) - matrix[-1])[:-1])


def stability(matrix) -> float:
    """Compute S = 1/(T-1) sum_{j<T} max_t (matrix[t, j] - matrix[T, j]) (PNR B.1).

    Unlike `forgetting`, the maximum is over all rows, so it is never negative. Lower
    is better. Missing cells are skipped, except in the last row.

    Args:
      matrix: f64[T, T].

    Returns:
      float, nan if T = 1 or where a task has no earlier cell.

    Raises:
      Refused: if `matrix` is not square.
    """
    matrix = _square(matrix)
    if len(matrix) == 1:
        return float("nan")
    best = np.maximum(_best_cells(matrix[:-1]), matrix[-1])
    return _mean((best - matrix[-1])[:-1])


def plasticity(matrix, finetune) -> float:
    """Compute P = 1/(T-1) sum_{j<T} 1/(T-j) sum_{i>j} (matrix[j, i] - FT_i).

    How well the encoder after task j does on the tasks still to come, against a
    model trained on that task alone. Higher is better. Needs every cell above
    the diagonal.

    Args:
      matrix: f64[T, T].
      finetune: f64[T], accuracy on task i of a model trained on task i alone;
        entry 0 is not used.

    Returns:
      float, nan if T = 1.

    Raises:
      Refused: if `matrix` is not square or `finetune` not of its length.
    """
    matrix = _square(matrix)
    finetune = np.asarray(finetune, np.float64)
    if finetune.shape != matrix.shape[:1]:
        raise Refused(
            f"finetune has shape {finetune.shape}, allowed is {matrix.shape[:1]}"
        )
    gain = matrix - finetune
    return _mean([_mean(gain[j, j + 1 :]) for j in range(len(matrix) - 1)])


def accuracy(logits, labels, mask=None):
    """Compute the share of rows whose largest logit is the label's.

    Args:
      logits: f32[B, C]; the first of equal ones wins.
      labels: i32[B].
      mask: bool or f32[B], rows that count; None for all.

    Returns:
      f32[] in [0, 1], 0 if no row counts.
    """
    chex.assert_rank([logits, labels], [2, 1])
    mask = jnp.ones(labels.shape) if mask is None else jnp.asarray(mask, jnp.float32)
    chex.assert_equal_shape_prefix([logits, labels, mask], 1)
    correct = (jnp.argmax(logits, axis=-1) == labels) * mask
    return jnp.sum(correct) / jnp.maximum(jnp.sum(mask), 1.0)


def _class_means(features, labels, num_classes):
    """Compute unit rows, their membership, class sizes and normalised class means.

    A label outside [0, num_classes) belongs to no class.
    """
    chex.assert_rank([features, labels], [2, 1])
    chex.assert_equal_shape_prefix([features, labels], 1)
    rows = core.l2_normalize(features)
    member = jax.nn.one_hot(labels, num_classes, dtype=rows.dtype)
    # The direction of the sum is that of the mean; an absent class gives zeros.
    # Full precision, since the variance is a small difference of large numbers.
    total = jnp.matmul(member.T, rows, precision=jax.lax.Precision.HIGHEST)
    return rows, member, jnp.sum(member, axis=0), core.l2_normalize(total)


def _over_classes(values, labels, num_classes):
    """Compute the mean of f32[C] over the classes that occur, 0 if there is none."""
    present = jnp.any(labels[:, None] == jnp.arange(num_classes), axis=0)
    return jnp.sum(values) / jnp.maximum(jnp.sum(present), 1)


def intra_class_variances(features, labels, num_classes):
    """Compute E_{x in c} [(r_c . f(x) - 1)^2] of each class c.

    Args:
      features: f32[N, D]; rows are L2-normalised here.
      labels: i32[N]; rows labelled outside [0, C), such as -1, are left out.
      num_classes: C, a Python int.

    Returns:
      f32[C], 0 for a class that does not occur.

    Source: DUEL (Choi et al., AAAI 2024), Fig. 9.
    """
    rows, member, count, means = _class_means(features, labels, num_classes)
    class_means = means[jnp.clip(labels, 0, num_classes - 1)]
    # 1 - r . f = |r - f|^2 / 2 for unit rows; the product would round near 1.
    gap = jnp.sum(jnp.square(rows - class_means), axis=-1) / 2
    zeros = sum(1 - jnp.any(x, axis=-1) for x in (rows, class_means))  # have length 0
    total = jnp.sum(member * jnp.square(gap + zeros / 2)[:, None], axis=0)
    return total / jnp.maximum(count, 1.0)


def intra_class_variance(features, labels, num_classes):
    """Compute the mean over classes c of E_{x in c} [(r_c . f(x) - 1)^2] (DUEL Eq. 8).

    f(x) is the unit feature and r_c the normalised mean of class c's. Every
    class that occurs weighs the same; lower means tighter classes.

    Args:
      features: f32[N, D]; rows are L2-normalised here.
      labels: i32[N]; rows labelled outside [0, C), such as -1, are left out.
      num_classes: C, a Python int.

    Returns:
      f32[], 0 if no class occurs.
    """
    variances = intra_class_variances(features, labels, num_classes)
    return _over_classes(variances, labels, num_classes)


def inter_class_similarities(features, labels, num_classes):
    """Compute the mean over c' != c of r_c . r_c', of each class c.

    Args:
      features: f32[N, D]; rows are L2-normalised here.
      labels: i32[N]; rows labelled outside [0, C), such as -1, are left out.
      num_classes: C, a Python int.

    Returns:
      f32[C] in [-1, 1], 0 for a class that does not occur or is the only one.

    Source: DUEL (Choi et al., AAAI 2024), Fig. 9.
    """
    _, _, count, means = _class_means(features, labels, num_classes)
    # r_c with the sum of the others; C x C products are saved.
    other_sum = jnp.sum(means, axis=0) - means
    return jnp.sum(means * other_sum, axis=1) / jnp.maximum(jnp.sum(count > 0) - 1, 1)


def inter_class_similarity(features, labels, num_classes):
    """Compute the mean over ordered pairs c != c' of r_c . r_c' (DUEL Eq. 9).

    r_c is the normalised mean of the unit features of class c. Only classes
    that occur are paired; lower means classes further apart.

    Args:
      features: f32[N, D]; rows are L2-normalised here.
      labels: i32[N]; rows labelled outside [0, C), such as -1, are left out.
      num_classes: C, a Python int.

    Returns:
      f32[] in [-1, 1], 0 if fewer than two classes occur.
    """
    similarities = inter_class_similarities(features, labels, num_classes)
    return _over_classes(similarities, labels, num_classes)


def class_entropy(labels, num_classes):
    """Compute the entropy of the class shares, -sum_c p_c log p_c (DUEL Table 2).

    Args:
      labels: i32[N]; those outside [0, C), such as -1 for an empty slot of a
        memory, are left out.
      num_classes: C, a Python int.

    Returns:
      f32[] in nats, in [0, log C]; 0 if no label counts.
    """
    chex.assert_rank(labels, 1)
    count = jnp.sum(jax.nn.one_hot(labels, num_classes), axis=0)
    share = count / jnp.maximum(jnp.sum(count), 1.0)
    return jnp.sum(jax.scipy.special.entr(share))
