"""The section config.replay: how an online method stores and replays rows."""

from typing import Literal

from jaxcl import core, schema
from jaxcl.errors import Refused
from jaxcl.memory import policies


@schema.checked("config.replay")
@schema.debug(size=8)
def settings(
    num_classes: int,
    batch_size: int,
    *,
    per_class: schema.Count | None = None,
    capacity: schema.Count | None = None,
    policy: str = "reservoir",
    size: schema.Count | None = None,
    updates: schema.Count = 1,
    flops: schema.Positive | None = None,
    augment: Literal["none", "replay", "all"] = "none",
    sharded: bool = False,
    measure: tuple[Literal["drift", "gradients"], ...] = (),
    statistics: Literal["running", "memory"] = "running",
) -> core.Replay:
    """Check the options of config.replay, and return them as a record.

    Args:
      num_classes: number of classes of the whole stream.
      batch_size: number of incoming rows in a batch.
      per_class: slots of the memory per class of the whole stream; 20 if `capacity`
        is not set either. The policy decides which classes they hold.
      capacity: slots in total, in place of `per_class`.
      policy: rule that chooses the rows to keep, a name in
        `memory.policies.POLICIES`, or the module of a policy of your own.
      size: rows drawn for each update; None: as many as the batch has.
      updates: gradient steps on each incoming batch, each with a draw of its own; the
        memory is written once, after them.
      flops: FLOPs that a step may take for each incoming image; as many updates are
        made as fit, in place of `updates`.
      augment: rows that config.augment changes, "none", "replay" (the drawn ones) or
        "all".
      sharded: split the memory over the devices, see `memory.sharded`; capacity and
        size must be multiples of their number.
      measure: further values to log for each step, "drift" and "gradients", see
        `probe.py`.
      statistics: statistics of batch norm in evaluations, the "running" ones of
        training or those of the "memory", see `statistics.py`.

    Raises:
      Refused: naming field, value and range.
    """
    policies.look_up(policy)  # refuses a name that is none
    if per_class is not None and capacity is not None:
        raise Refused(
            f"config.replay.capacity={capacity}: set it or per_class={per_class}, "
            "the other to None"
        )
    if flops is not None and updates != 1:
        raise Refused(
            f"config.replay.updates={updates}: must be 1 with flops={flops:g}, which "
            "decide it; or set flops to None"
        )
    if capacity is None:
        capacity = (20 if per_class is None else per_class) * num_classes
        field = f"config.replay.per_class={per_class} x {num_classes} classes"
        schema.check_value(capacity, schema.Count, field)
    return core.Replay(
        capacity=capacity,
        policy=policy,
        size=size or batch_size,
        updates=updates,
        flops=flops,
        augment=augment,
        sharded=sharded,
        measure=tuple(measure),
        statistics=statistics,
    )
