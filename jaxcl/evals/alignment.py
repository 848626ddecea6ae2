"""Measure how similar a method's stored rows are to held-out rows.

Caccia et al., "Reducing Representation Drift in Online Continual Learning", 2021,
section 4.8 and Fig. 8: for each stored row, the largest cosine between its features and
a held-out row's of its class, averaged over the stored rows of each task. A network
that has overfitted to its memory has a low alignment. The authors released no code for
it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, schema, sharding
from jaxcl.evals import embedding

_EXACT = jax.lax.Precision.HIGHEST


def nearest_cosines(
    stored: jax.Array, labels: jax.Array, test: jax.Array, test_labels: jax.Array
) -> jax.Array:
    """Find each stored row's largest cosine with held-out rows of its class.

    Args:
      stored: f32[B, D].
      labels: i32[B].
      test: f32[N, D], features of held-out rows.
      test_labels: i32[N].

    Returns:
      f32[B]; -inf if no held-out row has the class.
    """
    stored, test = embedding.unit_rows(stored), embedding.unit_rows(test)
    cosines = jnp.dot(stored, test.T, precision=_EXACT)
    same_class = labels[:, None] == test_labels
    return jnp.max(jnp.where(same_class, cosines, -jnp.inf), axis=1)


@schema.checked("config.evaluators.alignment")
def make(parts: core.EvalParts, *, batch_size: schema.Count = 256) -> Callable:
    """Build the evaluator of a memory's alignment with held-out rows.

    Held-out rows are the validation split if there is one, else the evaluation rows.

    Args:
      parts: core.EvalParts with `memory`.
      batch_size: stored rows at a time, rounded up to a multiple of the devices.

    Returns:
      evaluate(state, task) -> core.Result without rows. It measures the stored rows
      whose class has held-out rows. Scalars: "task_T", T from 1, the mean over the
      stored rows of a task, absent without any; "mean" over all.

    Raises:
      Refused: the method keeps no memory, or held-out rows or labels are missing.
    """
    need = "a method with a memory of images, and of the task of each"
    embedding.refuse_unless(parts.memory is not None, "alignment", need)
    examples = parts.stream.dataset.validation
    if examples is None:
        examples = parts.stream.evaluation
    embedding.check_labels(parts, "alignment", parts.stream.dataset.train, examples)
    embed = embedding.make_embedder(parts, examples)
    labels = sharding.replicate(examples.label, parts.mesh)
    program = _compile_measure(parts, batch_size)

    def evaluate(state, task: int) -> core.Result:
        cosines, tasks = sharding.copy_to_host(program(state, embed(state), labels))
        measured = cosines != -np.inf  # not finite for another reason: it is told
        cosines, tasks = cosines[measured].astype(np.float64), tasks[measured]
        scalars = {}
        for t in np.unique(tasks):
            scalars[f"task_{t + 1}"] = float(cosines[tasks == t].mean())
        if len(cosines):
            scalars["mean"] = float(cosines.mean())
        return core.Result({}, scalars)

    return evaluate


def _compile_measure(parts, batch_size):
    """Compile (state, features, labels) -> `nearest_cosines` f32[capacity], task
    i32[capacity].

    The cosine of an empty slot is -inf.
    """
    view = embedding.make_eval_view(parts)
    replicated = sharding.replicated(parts.mesh)

    def measure_cosines(state, test, test_labels):
        memory = parts.memory(state)
        need = "a memory of images and the task of each; the method's holds "
        need += ", ".join(sorted(memory.items))
        embedding.refuse_unless({"image", "task"} <= {*memory.items}, "alignment", need)
        size = embedding.padded_size(parts, min(batch_size, memory.capacity))
        steps = -(-memory.capacity // size)
        slots = jnp.arange(steps * size).reshape(steps, size) % memory.capacity

        def of_slots(slots):
            split = sharding.split_sharding(parts.mesh)
            slots = jax.lax.with_sharding_constraint(slots, split)
            images, labels = memory.items["image"][slots], memory.items["label"][slots]
            stored = parts.embed(state, view(images))
            cosines = nearest_cosines(stored, labels, test, test_labels)
            return jax.lax.with_sharding_constraint(cosines, replicated)

        cosines = jax.lax.map(of_slots, slots).reshape(-1)[: memory.capacity]
        return jnp.where(memory.filled, cosines, -jnp.inf), memory.items["task"]

    return jax.jit(measure_cosines, out_shardings=replicated)
