"""Experience replay: cross-entropy of incoming and of replayed rows.

Chaudhry et al., "On Tiny Episodic Memories in Continual Learning", 2019, as the
baseline of Caccia et al., "Reducing Representation Drift in Online Continual
Learning", 2021.

Departures:
- The first draw meets an empty memory and replays nothing. Under
  `replay_from="past_tasks"` nothing is replayed during the whole first task.
- `passes="joint"` is the ER of mammoth (Buzzega et al., NeurIPS 2020), of Avalanche and
  of the survey of Soutif-Cormerais et al., ICCV-W 2023.
"""

from typing import Literal

from jaxcl import core, schema
from jaxcl.methods import online


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    replay_from: online.ReplayFrom = "past_tasks",
    passes: Literal["separate", "joint"] = "separate",
    unseen: Literal["compete", "absent"] = "compete",
) -> core.Method:
    """Learn incoming and replayed rows by cross-entropy.

    Args:
      head: "linear" or "cosine".
      replay_from: "past_tasks" leaves out examples of the present task (the paper's
        ER, which must know the tasks), "all" keeps them (its task-free ER), and
        "other_classes" leaves out classes of the incoming batch (task-free ER in the
        released code).
      passes: "separate" passes incoming and replayed rows one after the other, and adds
        the means over each; "joint" passes them as one batch, with common statistics,
        and takes one mean over all: with equally many replayed and incoming rows and no
          batch norm, half the gradient.
      unseen: "compete": classes not seen yet take part in training and prediction;
        "absent": they do not, as with a head that grows.
    """
    net = online.build_network(parts, head)

    def update(state, incoming, key):
        allowed = online.replayable(replay_from, state, incoming)
        replayed = online.draw_rows(parts, state.extra.memory, key, allowed=allowed)
        seen = state.extra.seen if unseen == "absent" else None
        rows = incoming, replayed
        if passes == "joint":
            rows = (online.join_rows(*rows),)

        def loss(params):
            return online.cross_entropy(
                net, params, state.stats, *rows, class_mask=seen
            )

        return *online.descend(parts, net, state, loss), {}

    return online.make_method(parts, net, update, seen_only=unseen == "absent")
