"""ER-ACE: experience replay with an asymmetric cross-entropy.

Caccia et al., "Reducing Representation Drift in Online Continual Learning", 2021
(section 3.4; published at ICLR 2022 as "New Insights on Reducing Abrupt
Representation Change in Online Continual Learning").

Departures:
- Means over rows where the paper's equations have sums, as in the released code.
- `form="code"` lets unseen classes, and the class seen last, compete with the incoming
  ones, and predicts among all. The released code takes the largest index for the class
  seen last; here classes may come in any order. Its first version also trained the
  first task without any mask or replay, which is not reproduced.
"""

from jaxcl import core, schema
from jaxcl.losses import replay as losses
from jaxcl.methods import online
from jaxcl.methods.online import distillation


@schema.checked("config.method")
def make(
    parts: core.Parts, *, head: online.Head = "cosine", form: online.Form = "paper"
) -> core.Method:
    """Mask the classes: the batch's for incoming rows, all seen for replayed ones.

    Args:
      head: "cosine" or "linear".
      form: "paper" or "code", see `losses.replay.er_ace`.
    """
    net = online.build_network(parts, head)

    def update(state, incoming, key):
        replayed = online.draw_rows(parts, state.extra.memory, key)

        def loss(params):
            (new, old), stats = net.pass_together(
                params, state.stats, incoming, replayed
            )
            value = losses.er_ace(
                new.logits,
                incoming.label,
                old.logits,
                replayed.label,
                state.extra.seen,
                replay_mask=replayed.mask,
                form=form,
                task_of=state.extra.task_of if form == "code" else None,
            )
            return value, stats

        return *online.descend(parts, net, state, loss), {}

    if form == "paper":
        return online.make_method(parts, net, update)
    return distillation.by_task(parts, net, update, distill=False, seen_only=False)
