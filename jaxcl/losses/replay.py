"""Losses of replay methods: over incoming rows, replayed rows, or both.

ER, ER-ACE and ER-AML (Caccia et al., "Reducing Representation Drift in Online Continual
Learning", 2021, called P below), iCaRL (Rebuffi et al., CVPR 2017) and DER (Buzzega et
al., NeurIPS 2020). P writes sums over rows; its released code takes means, and so do
these functions. ER is the sum of two means: `cross_entropy` of the incoming and of the
replayed rows.

Masks are bool or f32 of zeros and ones; an `example_mask` may also hold weights of
rows, at least 0, for a weighted mean. A masked row or class has no effect on values and
gradients, even if it is nan. A mean over no rows is 0. All work in float32 at least
(bfloat16 is cast first).
"""

import chex
import jax
import jax.numpy as jnp

from jaxcl import core

# A large, finite value replaces an infinite loss, as in the released code.
_IMPOSSIBLE = 1e9


def _zero_masked_rows(x, mask):
    """Set rows outside the mask to zeros; nan times 0 would be nan."""
    if mask is None:
        return x
    chex.assert_shape(mask, x.shape[:1])
    return jnp.where(jnp.expand_dims(mask, range(1, x.ndim)).astype(bool), x, 0)


def cosine_logits(
    features: jax.Array, weights: jax.Array, *, scale: float = 10.0, eps: float = 1e-5
) -> jax.Array:
    """Compute the logits of the cosine head of ER-ACE and ER-AML (Eq. 2 and 4).

    z_c = scale * <f / (|f| + eps), w_c / (|w_c| + eps)>. P states neither scale nor
    eps; both are from its released code. A row of zeros gives zeros and no gradient.
    The formula's gradient there is 1 / eps, which would ruin the step.

    Args:
      features: f32[B, D].
      weights: f32[C, D], a row per class; no bias.
      scale: factor of the cosines, tau of P.
      eps: number added to the lengths.

    Returns:
      f32[B, C] in [-scale, scale].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import replay
      >>> features, weights = jnp.array([[3.0, 4.0]]), jnp.eye(2)
      >>> replay.cosine_logits(features, weights).round(2).tolist()
      [[6.0, 8.0]]
    """
    chex.assert_rank([features, weights], 2)
    chex.assert_equal_shape_suffix([features, weights], 1)

    def unit_rows(x):
        x = core.at_least_float32(x)
        squared = jnp.sum(x * x, axis=-1, keepdims=True)
        nonzero = squared > 0
        length = jnp.sqrt(jnp.where(nonzero, squared, 1))
        return x * jnp.where(nonzero, 1 / (length + eps), 0)

    return scale * core.dot(unit_rows(features), unit_rows(weights))


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    class_mask: jax.Array | None = None,
    example_mask: jax.Array | None = None,
) -> jax.Array:
    """Compute the mean cross-entropy over a subset of the classes (ER-ACE Eq. 4).

    The mean over rows of -z_y + log sum_{c in mask} exp z_c. Classes outside the mask
    have probability 0 and receive no gradient. A row without any class is left out, as
    rows outside `example_mask` are. A row whose label is not among its classes is a
    mistake of the caller: it counts 1e9, in place of infinity, without gradient.

    Args:
      logits: f32[B, C].
      labels: i32[B].
      class_mask: bool or f32, [C] for all rows or [B, C]; None for all classes.
      example_mask: bool or f32[B], None for all rows.

    Returns:
      f32[], in nats; 0 if no row is left.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import replay
      >>> logits, labels = jnp.zeros((2, 4)), jnp.array([0, 1])
      >>> classes = jnp.array([True, True, False, False])
      >>> round(float(replay.cross_entropy(logits, labels, class_mask=classes)), 3)
      0.693
    """
    chex.assert_rank([logits, labels], [2, 1])
    chex.assert_equal_shape_prefix([logits, labels], 1)
    logits = _zero_masked_rows(core.at_least_float32(logits), example_mask)
    is_label = labels[:, None] == jnp.arange(logits.shape[1])
    if class_mask is not None:
        chex.assert_shape(class_mask, logits.shape[-class_mask.ndim :])
        allowed = jnp.broadcast_to(class_mask.astype(bool), logits.shape)
        nonempty = jnp.any(allowed, axis=1)
        example_mask = nonempty if example_mask is None else example_mask * nonempty
        is_label, logits = is_label & allowed, jnp.where(allowed, logits, -jnp.inf)
    label = jnp.sum(jnp.where(is_label, logits, 0), axis=1)
    rows = jax.nn.logsumexp(logits, axis=1) - label
    rows = jnp.where(jnp.any(is_label, axis=1), rows, _IMPOSSIBLE)
    return core.masked_mean(rows, example_mask)


def er_ace(
    incoming_logits: jax.Array,
    incoming_labels: jax.Array,
    replay_logits: jax.Array,
    replay_labels: jax.Array,
    seen: jax.Array,
    *,
    replay_mask: jax.Array | None = None,
    incoming_mask: jax.Array | None = None,
    form: str = "paper",
    task_of: jax.Array | None = None,
) -> jax.Array:
    """Compute ER-ACE: cross-entropy of incoming and replayed rows (Eq. 5).

    CE(incoming; C_in) + CE(replayed; C_re): the sum of two means, each over its own
    rows, so the weight of a row does not depend on the size of the other part.
      "paper": C_in is the classes of the incoming labels, C_re is `seen`. Logits of
        unseen classes are never trained, so predict among `seen` alone. For a batch of
        one class the incoming loss is 0.
      "code": C_in also has every unseen class and, by an off-by-one, the class seen
        last; C_re is all classes. The released code takes the largest seen index, so
        that its classes must come in the order of their index; `task_of` allows any
        order.

    Args:
      incoming_logits: f32[B, C]; cosine logits in P.
      incoming_labels: i32[B].
      replay_logits: f32[R, C].
      replay_labels: i32[R].
      seen: bool[C], classes so far, the incoming rows' included.
      replay_mask: bool or f32[R], rows that exist; None for all.
      incoming_mask: bool or f32[B]; the classes of masked rows do not compete.
      form: "paper" or "code".
      task_of: i32[C], for "code": the task in which each class came first. The class
        seen last is the largest index of the last task. None: the largest index.

    Returns:
      f32[], in nats.

    Raises:
      Refused: if `form` is neither.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import replay
      >>> logits, new, old = jnp.zeros((2, 4)), jnp.array([2, 3]), jnp.array([0, 1])
      >>> seen = jnp.ones(4, bool)  # the loss is log 2 + log 4
      >>> round(float(replay.er_ace(logits, new, logits, old, seen)), 3)
      2.079
    """
    core.check_choice("form", form, ("paper", "code"))
    chex.assert_equal_shape_suffix([incoming_logits, replay_logits], 1)
    chex.assert_shape(seen, incoming_logits.shape[1:])
    seen = seen.astype(bool)
    index = jnp.arange(seen.size)
    is_label = _zero_masked_rows(incoming_labels[:, None] == index, incoming_mask)
    incoming = jnp.any(is_label, axis=0)
    if form == "code":
        task_of = jnp.zeros_like(index) if task_of is None else task_of
        newest = seen & (task_of == jnp.max(jnp.where(seen, task_of, -1)))
        last = jnp.max(jnp.where(newest, index, -1))
        incoming, seen = incoming | ~seen | (index == last), None
    first = cross_entropy(
        incoming_logits,
        incoming_labels,
        class_mask=incoming,
        example_mask=incoming_mask,
    )
    return first + cross_entropy(
        replay_logits, replay_labels, class_mask=seen, example_mask=replay_mask
    )


def _cosine(a, b):
    return 1 - jnp.sum(a * b, axis=-1)


def _euclidean(a, b):
    squared = jnp.sum(jnp.square(a - b), axis=-1)
    # The root has an infinite slope at 0; equal rows get no gradient.
    root = jnp.sqrt(jnp.where(squared > 0, squared, 1))
    return jnp.where(squared > 0, root, 0)


_DISTANCES = {"cosine": _cosine, "euclidean": _euclidean}


def triplet(
    anchors: jax.Array,
    positives: jax.Array,
    negatives: jax.Array,
    *,
    margin: float = 0.2,
    distance: str = "cosine",
    valid: jax.Array | None = None,
) -> jax.Array:
    """Compute the mean triplet loss of ER-AML on L2-normalised rows (Eq. 1).

    The mean over valid rows of max(d(a, p) - d(a, n) + margin, 0). Gradients flow
    to all three.
      "cosine": d = 1 - cos, as in the paper.
      "euclidean": d = |a - b|, not squared, as in the released code (which adds 1e-6 to
        each component of the difference).

    Args:
      anchors: f32[B, D], features of incoming rows.
      positives: f32[B, D], row i has the class of anchor i.
      negatives: f32[B, D], row i has another class than anchor i.
      margin: alpha of P; 0.2 is its code's.
      distance: "cosine" or "euclidean".
      valid: bool or f32[B], anchors with both a positive and a negative; None for
        all.

    Returns:
      f32[], without its weight, P's gamma; 0 if no anchor is valid.

    Raises:
      Refused: if `distance` is neither.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import replay
      >>> anchors, near, far = jnp.array([[[1.0, 0.0]], [[1.0, 0.1]], [[0.0, 1.0]]])
      >>> round(float(replay.triplet(anchors, far, near)), 3)  # the wrong way round
      1.195
    """
    core.check_choice("distance", distance, tuple(_DISTANCES))
    chex.assert_rank(anchors, 2)
    chex.assert_equal_shape([anchors, positives, negatives])
    a, p, n = (
        core.l2_normalize(_zero_masked_rows(x, valid))
        for x in (anchors, positives, negatives)
    )
    measure = _DISTANCES[distance]
    rows = jax.nn.relu(measure(a, p) - measure(a, n) + margin)
    return core.masked_mean(rows, valid)


def aml_sup_con(
    anchors: jax.Array,
    positives: jax.Array,
    negatives: jax.Array,
    labels: jax.Array,
    negative_labels: jax.Array,
    *,
    temperature: float = 0.2,
    base_temperature: float = 0.07,
    valid: jax.Array | None = None,
) -> jax.Array:
    """Compute the loss of ER-AML's later released code, in place of the triplet loss.

    With Z the positives and negatives of all valid anchors, s the cosine over the
    temperature and P(i) the rows of Z that have the label of anchor i,
      temperature / base_temperature * mean over valid i, then over p in P(i), of
        -s(a_i, p) + log sum_{z in Z} exp s(a_i, z).

    Args:
      anchors: f32[B, D], features of incoming rows.
      positives: f32[B, D], row i has the class of anchor i.
      negatives: f32[B, D], row i has another class than anchor i.
      labels: i32[B], classes of anchors and positives.
      negative_labels: i32[B].
      temperature: divisor of the cosines.
      base_temperature: divisor of the temperature in the weight.
      valid: bool or f32[B], anchors with both a positive and a negative; the rows of
        others are not in Z. None for all.

    Returns:
      f32[], in nats; 0 if no anchor is valid.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import replay
      >>> anchors, near, far = jnp.array([[[1.0, 0.0]], [[1.0, 0.1]], [[0.0, 1.0]]])
      >>> labels, others = jnp.array([0]), jnp.array([1])
      >>> round(float(replay.aml_sup_con(anchors, near, far, labels, others)), 3)
      0.02
    """
    chex.assert_rank([anchors, labels], [2, 1])
    chex.assert_equal_shape([anchors, positives, negatives])
    chex.assert_equal_shape([labels, negative_labels])
    rows, pool = (
        core.l2_normalize(_zero_masked_rows(x, valid))
        for x in (anchors, jnp.stack([positives, negatives], 1))
    )
    logits = core.dot(rows, pool.reshape(-1, pool.shape[-1])) / temperature
    same_class = labels[:, None] == jnp.stack([labels, negative_labels], 1).reshape(-1)
    if valid is not None:
        inside = jnp.repeat(valid.astype(bool), 2)
        # Without a valid anchor Z is empty: keep its rows, since the mean is 0 anyway.
        logits = jnp.where(inside | ~jnp.any(inside), logits, -jnp.inf)
        same_class = same_class & inside
    pairs = jax.nn.logsumexp(logits, axis=1, keepdims=True) - logits
    rows = jnp.sum(jnp.where(same_class, pairs, 0), axis=1)
    rows = rows / jnp.maximum(jnp.sum(same_class, axis=1), 1)
    return temperature / base_temperature * core.masked_mean(rows, valid)


def der(
    logits: jax.Array,
    stored_logits: jax.Array,
    *,
    example_mask: jax.Array | None = None,
) -> jax.Array:
    """Compute dark experience replay (Buzzega et al., 2020), without its weight.

    The Euclidean form of its objective: the mean of (logits - stored_logits)^2 over the
    unmasked rows and all columns. (The paper sums over columns; its released code takes
    the mean.)

    Args:
      logits: f32[R, C], present logits of replayed examples, or projections if there
        are no classes.
      stored_logits: f32[R, C], logits when the examples were stored; no gradient.
      example_mask: bool or f32[R], None for all rows.

    Returns:
      f32[], 0 if every row is masked.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import replay
      >>> logits, stored = jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 2.0]])
      >>> round(float(replay.der(logits, stored)), 3)
      0.5
    """
    chex.assert_rank(logits, 2)
    chex.assert_equal_shape([logits, stored_logits])
    stored_logits = jax.lax.stop_gradient(stored_logits)
    logits, stored_logits = map(core.at_least_float32, (logits, stored_logits))
    squares = jnp.square(_zero_masked_rows(logits - stored_logits, example_mask))
    return core.masked_mean(jnp.mean(squares, axis=-1), example_mask)


def icarl(
    logits: jax.Array,
    labels: jax.Array,
    teacher_logits: jax.Array,
    old_classes: jax.Array,
    *,
    class_mask: jax.Array | None = None,
    example_mask: jax.Array | None = None,
    reduction: str = "mean",
) -> jax.Array:
    """Compute iCaRL's binary cross-entropy (Rebuffi et al., CVPR 2017, Algorithm 3).

    Over rows i and classes c, with sigma the logistic function,
      -t_ic log sigma(z_ic) - (1 - t_ic) log(1 - sigma(z_ic)),
      t_ic = sigma(teacher_ic) if c is an old class, else 1[c = label_i].
    So the label of a row of an old class is not used. "mean" is the mean over rows and
    classes, as in the released code; "sum" is the sum over classes, then the mean over
    rows (the paper sums both). If no class is old, it is the plain loss of the labels;
    if all are, distillation alone. The code of the ER-ACE paper adds these two, each
    with "sum".

    Args:
      logits: f32[B, C], new and replayed rows alike.
      labels: i32[B].
      teacher_logits: f32[B, C], from the network after the last task; no gradient.
      old_classes: bool[C], classes of earlier tasks.
      class_mask: bool or f32[C], classes that count (in the paper those seen so far, in
        its code all); None for all.
      example_mask: bool or f32[B], None for all rows.
      reduction: "mean" or "sum", over the classes that count.

    Returns:
      f32[], in nats; 0 if no row or no class is left.

    Raises:
      Refused: if `reduction` is neither.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import replay
      >>> logits, labels = jnp.array([[2.0, 0.0]]), jnp.array([1])
      >>> teacher, old = jnp.array([[2.0, 0.0]]), jnp.array([True, False])
      >>> round(float(replay.icarl(logits, labels, teacher, old)), 3)
      0.529
    """
    core.check_choice("reduction", reduction, ("mean", "sum"))
    chex.assert_rank([logits, labels], [2, 1])
    chex.assert_equal_shape([logits, teacher_logits])
    chex.assert_equal_shape_prefix([logits, labels], 1)
    chex.assert_shape(old_classes, logits.shape[1:])
    z = _zero_masked_rows(core.at_least_float32(logits), example_mask)
    teacher = jax.nn.sigmoid(
        core.at_least_float32(jax.lax.stop_gradient(teacher_logits))
    )
    is_label = labels[:, None] == jnp.arange(z.shape[1])
    target = jnp.where(old_classes.astype(bool), teacher, is_label)
    target = _zero_masked_rows(target, example_mask)
    classes = jnp.ones_like(old_classes) if class_mask is None else class_mask
    chex.assert_shape(classes, old_classes.shape)
    classes = classes.astype(bool)
    z, target = jnp.where(classes, z, 0), jnp.where(classes, target, 0)
    # log(1 + e^z) - t z equals the formula and does not overflow.
    columns = jnp.where(classes, jax.nn.softplus(z) - target * z, 0)
    rows = jnp.sum(columns, axis=1)
    if reduction == "mean":
        rows = rows / jnp.maximum(jnp.sum(classes), 1)
    return core.masked_mean(rows, example_mask)


def task_distillation(
    logits: jax.Array,
    teacher_logits: jax.Array,
    tasks: jax.Array,
    *,
    temperature: float = 2.0,
    example_mask: jax.Array | None = None,
) -> jax.Array:
    """Compute SS-IL's task-wise distillation (Ahn et al., 2021), without its weight.

    The mean over rows of sum_t KL(q_t || p_t), where q_t and p_t are the softmax of
    teacher_logits / temperature and of logits / temperature over the classes of task
    t alone.

    Args:
      logits: f32[B, C].
      teacher_logits: f32[B, C], from the network after the last task; no gradient.
      tasks: i32[C], task of each class; below 0: the class is left out.
      temperature: divisor of the logits.
      example_mask: bool or f32[B], None for all rows.

    Returns:
      f32[], in nats; 0 if no row or no class is left.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import replay
      >>> logits, teacher = jnp.zeros((1, 4)), jnp.array([[2.0, 0.0, 5.0, 5.0]])
      >>> tasks = jnp.array([0, 0, 1, 1])
      >>> round(float(replay.task_distillation(logits, teacher, tasks)), 3)
      0.111
    """
    chex.assert_rank(logits, 2)
    chex.assert_equal_shape([logits, teacher_logits])
    chex.assert_shape(tasks, logits.shape[1:])
    # Classes without a task form one with zero logits.
    same_task = tasks[:, None] == tasks

    def log_softmax(z):
        z = _zero_masked_rows(core.at_least_float32(z), example_mask)
        z = jnp.where(tasks >= 0, z, 0) / temperature
        rivals = jnp.where(same_task, z[:, None, :], -jnp.inf)
        return z - jax.nn.logsumexp(rivals, axis=2)

    log_p = log_softmax(logits)
    teacher_log_p = log_softmax(jax.lax.stop_gradient(teacher_logits))
    rows = jnp.sum(jnp.exp(teacher_log_p) * (teacher_log_p - log_p), axis=1)
    return core.masked_mean(rows, example_mask)
