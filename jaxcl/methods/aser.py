"""ASER: replay and memory by adversarial Shapley values.

Shim et al., "Online Class-Incremental Continual Learning with Adversarial Shapley
Value", AAAI 2021, as a baseline of Caccia et al., "Reducing Representation Drift in
Online Continual Learning", 2021 (its ASER_mu).

Departures:
- `form="paper"` steps like the other methods here: incoming and replayed rows pass
  through the network separately, and each part has its own mean. `form="code"` is the
  released code: one pass of both and one mean over all rows, which is half that
  gradient.
- Released code also sends both parts through the network before its step, which only
  moves the running statistics; not reproduced.
- If all rows of the memory are candidates, they help no row, which counts 0; released
  code would rank nan.
- Equal values are in random order.
"""

from typing import Literal

from jaxcl import core, schema
from jaxcl.memory import shapley
from jaxcl.methods import online
from jaxcl.methods.online import shapley as shapley_lib


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    form: online.Form = "paper",
    variant: shapley.Variant = "mean",
    keep: Literal["shapley", "policy"] = "shapley",
    neighbours: schema.Count = 3,
    per_class: schema.Count = 9,
    minority: bool = True,
) -> core.Method:
    """Replay rows that confuse incoming ones and help the memory; keep those that help.

    Until the memory is full every row is stored and replay is random. Values come from
    features in evaluation mode, of images without augmentation.

    Args:
      head: "linear" or "cosine".
      form: "paper" or "code", see above.
      variant: "mean", "max_min" or "adversarial", see `shapley.aser_score`.
      keep: "shapley" stores by value, "policy" by config.replay.policy.
      neighbours: K of the Shapley values.
      per_class: candidates per class, and the same number of other rows to compute
        their help. Classes with fewer rows than both together are rarely replayed.
        Released code has 9 for CIFAR-10, 2 for CIFAR-100 and 3 for MiniImageNet.
      minority: when storing, help for incoming rows counts, too, if their class's share
        of the memory is below a number drawn from 0 to 1/C. So new classes are stored.

    Raises:
      ValueError: naming field, value and range.
    """
    core.check_choice("config.replay.sharded", parts.replay.sharded, (False,))
    if keep == "shapley":
        _check_sizes(parts.replay, parts.num_classes, per_class)
    net = online.build_network(parts, head)
    judge = shapley_lib.AserSelector(
        parts, net, variant, neighbours, per_class, minority
    )

    def update(state, incoming, key):
        rows = incoming, judge.retrieve(state, incoming, key)
        if form == "code":
            rows = (online.join_rows(*rows),)

        def loss(params):
            return online.cross_entropy(net, params, state.stats, *rows)

        return *online.descend(parts, net, state, loss), {}

    write = judge.write if keep == "shapley" else None
    return online.make_method(parts, net, update, write=write, limit=False)


def _check_sizes(replay: core.Replay, num_classes, per_class):
    most = (replay.capacity - 1) // num_classes
    if per_class > most:
        raise ValueError(
            f"config.method.per_class={per_class}: of {num_classes} classes they would "
            f"fill the memory, {replay.capacity} slots, and leave none to give up; "
            f"must be at most {most}, or config.method.keep='policy'"
        )
    if replay.policy != "reservoir":
        raise ValueError(
            f"config.replay.policy={replay.policy!r}: config.method.keep='shapley' "
            "asks no policy; leave it out or set keep to 'policy'"
        )
