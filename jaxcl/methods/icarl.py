"""iCaRL: binary cross-entropy with distillation; nearest class means predict.

Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017,
one step at a time, as the baseline of Caccia et al., "Reducing Representation Drift
in Online Continual Learning", 2021.

Departures:
- The policy of config.replay fills the memory during the task, and the items of the
  memory are the exemplars. The paper chooses exemplars by herding when a task is over;
  a stream is read once, so only the memory is left by then.
- A step takes the incoming rows and config.replay.size rows of past tasks. Its loss is
  the sum of two means over rows of sums over classes; the paper trains on the union of
  the task and all exemplars.
- `form="code"` follows the intention of the later released code of Caccia et al.:
  labels alone on incoming rows, the teacher alone on replayed ones, both over all
  classes of the stream, and means of features that are not normalised.
"""

import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.losses import replay as losses
from jaxcl.methods import online
from jaxcl.methods.online import distillation, means


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    form: online.Form = "paper",
    distill_weight: schema.Weight = 1.0,
    mirror: bool = False,
) -> core.Method:
    """Teach old classes by the last task's network, new ones by labels.

    Args:
      head: "linear" or "cosine", for training; predictions do not use it.
      form: "paper": the targets of every row are the teacher's answers for old classes
        and the labels for new ones, over the classes seen so far; means are taken of
        unit features and scaled to unit length. "code": see above.
      distill_weight: weight of the terms with the teacher's targets.
      mirror: take the means over the items and their mirror images, as the released
        code of Rebuffi et al. does.
    """
    net, paper = online.build_network(parts, head), form == "paper"
    loss_of = _paper_terms if paper else _code_terms

    def update(state, incoming, key):
        extra, task_of = state.extra, state.extra.task_of
        old = (task_of >= 0) & (task_of < state.task)
        past_tasks = online.past_tasks(state)
        replayed = online.draw_rows(parts, extra.memory, key, allowed=past_tasks)
        rows = incoming, replayed
        teacher_rows = rows if paper else (replayed,)
        teacher_logits = distillation.ask_teacher(net, extra.teacher, *teacher_rows)

        def loss(params):
            outputs, stats = net.pass_together(params, state.stats, *rows)
            labels, teacher = loss_of(outputs, rows, teacher_logits, old, extra.seen)
            return labels + distill_weight * teacher, stats

        return *online.descend(parts, net, state, loss), {}

    nearest = means.Nearest(parts, net, unit=paper, mirror=mirror)
    return distillation.by_task(parts, net, update, **nearest.make_hooks())


def _binary_cross_entropy(outputs, rows, teacher_logits, old, classes):
    return losses.icarl(
        outputs.logits,
        rows.label,
        teacher_logits,
        old,
        class_mask=classes,
        example_mask=rows.mask,
        reduction="sum",
    )


def _paper_terms(outputs, rows, teacher_logits, old, seen):
    """Return the terms of labels (new classes) and teacher (old), of all rows."""
    sides = [*zip(outputs, rows, teacher_logits, strict=True)]
    labels = sum(_binary_cross_entropy(*x, old=old, classes=seen & ~old) for x in sides)
    return labels, sum(_binary_cross_entropy(*x, old=old, classes=old) for x in sides)


def _code_terms(outputs, rows, teacher_logits, old, seen):
    """Return the terms of labels (incoming rows) and of the teacher (replayed rows)."""
    (new, replay_logits), (incoming, replayed) = outputs, rows
    all_classes = jnp.ones_like(old)
    return (
        # No class is old, so the teacher's logits, here any, are not read.
        _binary_cross_entropy(new, incoming, new.logits, ~all_classes, all_classes),
        _binary_cross_entropy(
            replay_logits, replayed, teacher_logits[0], all_classes, all_classes
        ),
    )
