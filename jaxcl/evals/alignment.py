"""How near held-out rows come to the rows that a method stored.

Caccia et al., "Reducing Representation Drift in Online Continual Learning", 2021,
section 4.8 and Fig. 8: of each stored row the largest cosine between its features and
those of a held-out row of its class, averaged over the stored rows of each task. A
network that has overfitted to its memory has a low one. No code of it was released.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, sharding
from jaxcl.evals import features as features_lib

_EXACT = jax.lax.Precision.HIGHEST


def nearest(stored, labels, held, held_labels):
    """Largest cosine of each stored row with a held-out row of its class.

    Args:
      stored: f32[B, D].
      labels: i32[B].
      held: f32[N, D].
      held_labels: i32[N].

    Returns:
      f32[B]; -inf where no held-out row has the class.
    """
    stored, held = features_lib.unit(stored), features_lib.unit(held)
    cosines = jnp.dot(stored, held.T, precision=_EXACT)
    same = labels[:, None] == held_labels
    return jnp.max(jnp.where(same, cosines, -jnp.inf), axis=1)


def make(parts, *, batch_size=256) -> Callable:
    """Alignment of a method's memory with held-out rows.

    These are the validation split where the data have one, else the evaluation rows.

    Args:
      parts: core.EvalParts, with `memory`.
      batch_size: stored rows at a time; rounded up to a multiple of the devices.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars: "task_T", T from 1,
      for each task of which the memory holds rows whose class has held-out ones;
      "mean" over all such rows; "seconds".

    Raises:
      ValueError: the method keeps no memory; no held-out split; no labels.
    """
    whole = isinstance(batch_size, int) and batch_size >= 1
    features_lib.require("alignment.batch_size", batch_size, whole, "at least 1")
    if parts.memory is None:
        raise ValueError(
            "config.evaluators.alignment: needs a method with a memory of images, as "
            "er and er_ace have; take the evaluator out"
        )
    examples = parts.stream.dataset.validation
    if examples is None:
        examples = parts.stream.evaluation
    features_lib.check_labels(features_lib.judged_on(parts, examples), "alignment")
    embed = features_lib.make(parts, examples)
    labels = sharding.replicate(examples.label, parts.mesh)
    program = _program(parts, batch_size)

    def evaluate(state, task: int) -> core.Result:
        began = time.monotonic()
        found = program(state, embed(state), labels)
        cosines, tasks = sharding.fetch(found)
        measured = np.isfinite(cosines)
        cosines, tasks = cosines[measured].astype(np.float64), tasks[measured]
        scalars = {
            f"task_{t + 1}": float(cosines[tasks == t].mean()) for t in np.unique(tasks)
        }
        if len(cosines):
            scalars["mean"] = float(cosines.mean())
        scalars["seconds"] = time.monotonic() - began
        return core.Result({}, scalars)

    return evaluate


def _program(parts, batch_size):
    """(state, features, labels) -> f32 and i32[capacity]: `nearest`, and the task.

    -inf also where a slot holds no row.
    """
    view = features_lib.eval_view(parts)
    everywhere = sharding.replicated(parts.mesh)

    def run(state, held, held_labels):
        memory = parts.memory(state)
        if "image" not in memory.items:
            raise ValueError(
                "config.evaluators.alignment: needs a memory of images, as er and "
                "er_ace have; this method's names rows; take the evaluator out"
            )
        size = features_lib.padded_size(parts, min(batch_size, memory.capacity))
        steps = -(-memory.capacity // size)
        slots = jnp.arange(steps * size).reshape(steps, size) % memory.capacity

        def of_slots(at):
            at = jax.lax.with_sharding_constraint(at, sharding.split(parts.mesh))
            images, labels = memory.items["image"][at], memory.items["label"][at]
            stored = parts.embed(state, view(images))
            found = nearest(stored, labels, held, held_labels)
            return jax.lax.with_sharding_constraint(found, everywhere)

        cosines = jax.lax.map(of_slots, slots).reshape(-1)[: memory.capacity]
        return jnp.where(memory.filled, cosines, -jnp.inf), memory.items["task"]

    return jax.jit(run, out_shardings=everywhere)
