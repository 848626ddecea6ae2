"""ER with LwF: replay, and distillation of old classes from the last task's network.

The row "ER + LwF" of the survey of Soutif-Cormerais et al., "A Comprehensive Empirical
Evaluation on Online Continual Learning", ICCV-W 2023, by its released code. The
distillation is that of Li and Hoiem, "Learning without Forgetting", ECCV 2016. Incoming
and replayed rows pass as one batch, and the loss is a mean over all of them,
  CE(z; classes so far) + weight * KL(q || p),
where q and p are the softmax over old classes of the teacher's logits and of z, both
divided by the temperature. The teacher is the network at the start of the present task.

Departures:
- A class competes from its first row on. The released code adds all classes of a task
  as the task begins.
- `form="paper"` distils the classes of earlier tasks, from a teacher in evaluation
  mode. `form="code"` follows the released code, which takes the classes of the task
  that begins in place of the one that ended. So the first task's classes are never
  distilled. The present task's are, towards a head that has not been trained on them.
  Its teacher normalises by the statistics of the batch.
"""

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
    replay_from: online.ReplayFrom = "all",
    form: online.Form = "paper",
    weight: schema.Weight = 1.0,
    temperature: schema.Temperature = 2.0,
) -> core.Method:
    """Replay jointly, with a distillation of old classes on all rows.

    Args:
      head: "linear" or "cosine".
      replay_from: rows that may be replayed, as for `er`.
      form: "paper" or "code", see above.
      weight: weight of the distillation, the survey's alpha.
      temperature: temperature of the distillation; the term is not multiplied by its
        square.
    """
    net, paper = online.build_network(parts, head), form == "paper"

    def update(state, incoming, key):
        extra, task_of = state.extra, state.extra.task_of
        allowed = online.replayable(replay_from, state, incoming)
        replayed = online.draw_rows(parts, extra.memory, key, allowed=allowed)
        rows = online.join_rows(incoming, replayed)
        (answers,) = distillation.ask_teacher(net, extra.teacher, rows, train=not paper)
        is_old = task_of < state.task if paper else task_of > 0
        # The classes that are held are one group.
        group = jnp.where(is_old & (task_of >= 0), 0, -1)

        def loss(params):
            out, stats = net(params, state.stats, rows.images, train=True)
            value = losses.cross_entropy(
                out.logits, rows.label, class_mask=extra.seen, example_mask=rows.mask
            )
            value += weight * losses.task_distillation(
                out.logits,
                answers,
                group,
                temperature=temperature,
                example_mask=rows.mask,
            )
            return value, stats

        return *online.descend(parts, net, state, loss), {}

    return distillation.by_task(parts, net, update)
