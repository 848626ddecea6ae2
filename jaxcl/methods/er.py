"""Experience replay: cross-entropy of incoming and of replayed rows.

Chaudhry et al., "On Tiny Episodic Memories in Continual Learning", 2019, as the
baseline of Caccia et al., "Reducing Representation Drift in Online Continual
Learning", 2021.

Departures:
- The first draw meets an empty memory and replays nothing. Under
  `replay_from="past_tasks"` nothing is replayed during the whole first task.
"""

from typing import Literal

import jax

from jaxcl import core, schema
from jaxcl.methods import online

ReplayFrom = Literal["past_tasks", "all", "other_classes"]


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    replay_from: ReplayFrom = "past_tasks",
) -> core.Method:
    """The sum of two means: over incoming rows and over replayed ones.

    Args:
      head: "linear" or "cosine".
      replay_from: "past_tasks" leaves out examples of the present task (the paper's
        ER, which must know the tasks), "all" keeps them (its task-free ER), and
        "other_classes" leaves out classes of the incoming batch (task-free ER in the
        released code).
    """
    net = online.network(parts, head)

    def update(state, incoming, key):
        allowed = replayable(replay_from, state, incoming)
        replayed = online.draw(
            parts, state.extra.memory, key, log_weights=online.log_weights(allowed)
        )

        def loss(params):
            return online.cross_entropy(net, params, state.stats, incoming, replayed)

        return *online.descend(parts, net, state, loss), {}

    return online.method(parts, net, update, limit=False)


def replayable(
    replay_from: ReplayFrom, state: core.TrainState, incoming: online.Rows
) -> jax.Array:
    """Slots that may be replayed, bool[capacity]."""
    memory = state.extra.memory
    if replay_from == "past_tasks":
        return online.past_tasks(state)
    if replay_from == "all":
        return memory.filled
    label = memory.items["label"]
    return ~(label[:, None] == incoming.label).any(axis=1)
