"""iCaRL: binary cross-entropy with distillation, and the nearest class mean.

Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017,
one step at a time, as the baseline of Caccia et al., "Reducing Representation Drift
in Online Continual Learning", 2021.

Departures:
- The memory is filled while the task goes by, by the policy of config.replay, and its
  items are the exemplars. The paper chooses them by herding when a task is over; of a
  stream that is read once only what the memory holds is left to choose from then.
- A step takes the incoming rows and as many of past tasks as config.replay.size says,
  the sum of two means over rows and of sums over classes; the paper trains on the
  union of the task and all exemplars.
- `form="code"` is what the later released code of Caccia et al. means to do: labels
  alone on incoming rows, the teacher alone on replayed ones, both over all classes of
  the stream, and features as they are for the means.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import replay as losses
from jaxcl.methods import online
from jaxcl.methods.online import means as means_lib
from jaxcl.methods.online import teacher as teacher_lib


class Extra(NamedTuple):
    """What iCaRL keeps."""

    memory: Any
    seen: jax.Array
    kept: core.PyTree
    teacher: teacher_lib.Teacher
    old: jax.Array  # bool[C], classes met before the present task
    means: means_lib.Means | None = None  # of a state that is evaluated


def make(
    parts: core.Parts, *, head="linear", form="paper", distill_weight=1.0, mirror=False
) -> core.Method:
    """Old classes answer as the last task's network does, new ones by labels.

    Args:
      head: "linear" or "cosine", of the training; predictions do not use it.
      form: "paper": on every row targets are the teacher's answers for old classes
        and the labels for new ones, over the classes seen so far; means are those of
        unit features, made unit again. "code": see above.
      distill_weight: of the terms whose targets are the teacher's.
      mirror: take the means over the items and their mirror images, as the released
        code of Rebuffi et al. does.
    """
    core.check_choice("config.method.form", form, online.FORMS)
    if not 0 <= distill_weight < math.inf:
        raise ValueError(
            f"config.method.distill_weight={distill_weight}: must be at least 0"
        )
    net, paper = online.network(parts, head), form == "paper"
    loss_of = _of_paper if paper else _of_code

    def update(state, incoming, key):
        extra = state.extra
        allowed = online.log_weights(online.past_tasks(state))
        replayed = online.draw(parts, extra.memory, key, log_weights=allowed)
        rows = incoming, replayed
        asked = rows if paper else rows[1:]
        told = teacher_lib.logits(net, extra.teacher, *asked)

        def loss(params):
            outputs, stats = net.both(params, state.stats, *rows)
            labels, teacher = loss_of(outputs, rows, told, extra)
            return labels + distill_weight * teacher, stats

        return *online.descend(parts, state, loss), {}

    def init(key, batch):
        state = method.init(key, batch)
        old = jnp.zeros(parts.num_classes, bool)
        extra = Extra(*state.extra, teacher_lib.create(state), old)
        return state.replace(extra=extra)

    nearest = means_lib.Nearest(parts, net, unit=paper, mirror=mirror)
    method = online.method(
        parts, net, update, begin_task=_begin_task, **nearest.hooks()
    )
    return method._replace(init=init)


def _begin_task(state, task):
    if task.index > 0:
        old = core.copy(state.extra.seen)
        state = state.replace(extra=state.extra._replace(old=old))
    return teacher_lib.begin_task(state, task)


def _bce(outputs, rows, told, old, classes):
    return losses.icarl(
        outputs.logits,
        rows.label,
        told,
        old,
        class_mask=classes,
        example_mask=rows.mask,
        reduction="sum",
    )


def _of_paper(outputs, rows, told, extra):
    """Terms of labels and of the teacher: new classes and old ones, of every row."""
    new = extra.seen & ~extra.old
    terms = [
        (_bce(*each, extra.old, new), _bce(*each, extra.old, extra.old))
        for each in zip(outputs, rows, told, strict=True)
    ]
    return tuple(map(sum, zip(*terms, strict=True)))


def _of_code(outputs, rows, told, extra):
    """Terms of labels and of the teacher: incoming rows and replayed ones."""
    (new, old), (incoming, replayed), every = outputs, rows, jnp.ones_like(extra.old)
    return (
        _bce(new, incoming, new.logits, ~every, every),  # no class is old: no teacher
        _bce(old, replayed, *told, every, every),
    )
