"""SS-IL: a softmax of its own for old and for new classes.

Ahn et al., "SS-IL: Separated Softmax for Incremental Learning", ICCV 2021, one step at
a time, as in the released code of Caccia et al., "Reducing Representation Drift in
Online Continual Learning", 2021.

Departures:
- New classes are those first met in the present task, so far; both released codes are
  told of all classes of the task before their first row.
- Predictions are among the classes seen so far, as unseen ones are never trained; the
  code of Caccia et al. predicts among all.
- The sum of two means, over incoming and over replayed rows, where the authors' code
  takes the mean over all. Batches of a fixed share of old rows, which the paper asks
  for, are what config.replay.size gives.
- `form="paper"` distils on all rows, times the squared temperature, as the authors'
  own code does; `form="code"`, that of Caccia et al., on replayed rows alone, times 1.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import replay as losses
from jaxcl.methods import online
from jaxcl.methods.online import teacher as teacher_lib


class Extra(NamedTuple):
    """What SS-IL keeps."""

    memory: Any
    seen: jax.Array
    kept: core.PyTree
    teacher: teacher_lib.Teacher | None  # None where nothing is distilled
    task_of: jax.Array  # i32[C], task in which the class was met first; -1: not yet


def make(
    parts: core.Parts,
    *,
    head="linear",
    form="paper",
    temperature=2.0,
    distill=True,
) -> core.Method:
    """Each row competes over the classes of its side, old tasks' classes are held.

    Args:
      head: "linear" or "cosine".
      form: "paper" or "code", see above.
      temperature: of the distillation.
      distill: hold the answers of the last task's network, see
        `losses.replay.task_distillation`.
    """
    core.check_choice("config.method.form", form, online.FORMS)
    if not 0 < temperature < math.inf:
        raise ValueError(f"config.method.temperature={temperature}: must be above 0")
    net = online.network(parts, head)
    weight = temperature**2 if form == "paper" else 1.0

    def update(state, incoming, key):
        task_of = met(state.extra.task_of, incoming.label, state.task)
        state = state.replace(extra=state.extra._replace(task_of=task_of))
        replayed = online.draw(
            parts,
            state.extra.memory,
            key,
            log_weights=online.log_weights(online.past_tasks(state)),
        )
        rows = incoming, replayed
        held = rows if form == "paper" else rows[1:]
        told = None, None
        if distill:
            said = teacher_lib.logits(net, state.extra.teacher, *held)
            told = (*told, *said)[-2:]
        old_tasks = jnp.where(task_of < state.task, task_of, -1)

        def loss(params):
            outputs, stats = net.both(params, state.stats, *rows)
            value = 0.0
            for (_, logits), each, said in zip(outputs, rows, told, strict=True):
                value += losses.cross_entropy(
                    logits,
                    each.label,
                    example_mask=each.mask,
                    class_mask=rivals(task_of, each.label, state.task),
                )
                if said is not None:
                    value += weight * losses.task_distillation(
                        logits,
                        said,
                        old_tasks,
                        temperature=temperature,
                        example_mask=each.mask,
                    )
            return value, stats

        return *online.descend(parts, state, loss), {}

    def init(key, batch):
        state = method.init(key, batch)
        task_of = jnp.full(parts.num_classes, -1, jnp.int32)
        teacher = teacher_lib.create(state) if distill else None
        return state.replace(extra=Extra(*state.extra, teacher, task_of))

    hooks = {"begin_task": teacher_lib.begin_task} if distill else {}
    method = online.method(parts, net, update, **hooks)
    return method._replace(init=init)


def met(task_of, label, task):
    """`task_of` after rows of these labels in that task, i32[C]."""
    present = jnp.zeros(task_of.shape, bool).at[label].set(True)
    return jnp.where(present & (task_of < 0), task, task_of)


def rivals(task_of, label, task):
    """Classes a row competes over: met, and old or new as its own is, bool[B,C]."""
    old = task_of < task
    return (task_of >= 0) & (old[label][:, None] == old)
