"""SS-IL: old classes and new classes have a softmax each.

Ahn et al., "SS-IL: Separated Softmax for Incremental Learning", ICCV 2021, one step at
a time, as in the released code of Caccia et al., "Reducing Representation Drift in
Online Continual Learning", 2021.

Departures:
- New classes are the ones that the present task has shown so far; both released codes
  know all classes of the task before its first row.
- Predictions are among the classes seen so far, as unseen ones are never trained; the
  code of Caccia et al. predicts among all.
- The loss is a sum of two means, over incoming and over replayed rows, where the
  authors' code takes the mean over all. config.replay.size sets the share of old rows
  in a batch, which the paper wants fixed.
- `form="paper"` distils on all rows, times the squared temperature, as the authors'
  own code does; `form="code"`, that of Caccia et al., on replayed rows alone, times 1.
"""

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.losses import replay as losses
from jaxcl.methods import online
from jaxcl.methods.online import distillation


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    form: online.Form = "paper",
    temperature: schema.Temperature = 2.0,
    distill: bool = True,
) -> core.Method:
    """Learn old and new classes by separate cross-entropies, and distil.

    Args:
      head: "linear" or "cosine".
      form: "paper" or "code", see above.
      temperature: temperature of the distillation.
      distill: distil from the last task's network, see
        `losses.replay.task_distillation`.
    """
    net = online.build_network(parts, head)
    weight = temperature**2 if form == "paper" else 1.0

    def update(state, incoming, key):
        task_of = state.extra.task_of
        past_tasks = online.past_tasks(state)
        replayed = online.draw_rows(parts, state.extra.memory, key, allowed=past_tasks)
        sides = incoming, replayed
        teacher_logits = None, None
        if distill:
            asked_rows = sides if form == "paper" else (replayed,)
            answers = distillation.ask_teacher(net, state.extra.teacher, *asked_rows)
            teacher_logits = (*teacher_logits, *answers)[-2:]
        old_tasks = jnp.where(task_of < state.task, task_of, -1)

        def loss(params):
            outputs, stats = net.pass_together(params, state.stats, *sides)
            value = 0.0
            for (_, logits), rows, teacher_rows in zip(
                outputs, sides, teacher_logits, strict=True
            ):
                value += losses.cross_entropy(
                    logits,
                    rows.label,
                    example_mask=rows.mask,
                    class_mask=rivals(task_of, rows.label, state.task),
                )
                if teacher_rows is not None:
                    value += weight * losses.task_distillation(
                        logits,
                        teacher_rows,
                        old_tasks,
                        temperature=temperature,
                        example_mask=rows.mask,
                    )
            return value, stats

        return *online.descend(parts, net, state, loss), {}

    return distillation.by_task(parts, net, update, distill=distill)


def rivals(task_of: jax.Array, label: jax.Array, task: jax.Array) -> jax.Array:
    """Mark the classes that each row competes over, bool[B,C].

    A row of an old class competes among the old classes so far, other rows among the
    new ones.
    """
    old = task_of < task
    return (task_of >= 0) & (old[label][:, None] == old)
