"""The section config.replay: what an online method keeps and how it replays it."""

from jaxcl import core
from jaxcl.memory import policies
from jaxcl.methods.online import probe
from jaxcl.methods.online import statistics as statistics_lib

AUGMENTED = ("none", "replay", "all")


def settings(
    num_classes: int,
    batch_size: int,
    *,
    per_class: int | None = None,
    capacity: int | None = None,
    policy="reservoir",
    size: int | None = None,
    updates=1,
    augment="none",
    sharded=False,
    measure: tuple[str, ...] = (),
    statistics="running",
) -> core.Replay:
    """The section config.replay.

    Args:
      num_classes: of the whole stream.
      batch_size: of incoming rows.
      per_class: slots of the memory per class of the whole stream; 20 if `capacity`
        is not set either. Which classes they hold is up to the policy.
      capacity: slots in total, in place of `per_class`.
      policy: which incoming rows the memory keeps, a name in
        `memory.policies.POLICIES`.
      size: rows drawn for each update; None: as many as come in.
      updates: gradient steps on each incoming batch, each with a draw of its own; the
        memory is written once, after them.
      augment: rows under config.augment, "none", "replay" (the drawn ones) or "all".
      sharded: split the memory over the devices, see `memory.sharded`, where one
        cannot hold it; capacity and size must be multiples of their number.
      measure: what else to log of each step, "drift" and "gradients": `online_probe`.
      statistics: of batch norm, that evaluations see: the "running" ones of training
        or those of the "memory", see `online_statistics`.

    Raises:
      ValueError: naming the field, the value and what is allowed.
    """
    core.check_choice("config.replay.policy", policy, tuple(policies.POLICIES))
    core.check_choice("config.replay.augment", augment, AUGMENTED)
    core.check_choice("config.replay.statistics", statistics, statistics_lib.SOURCES)
    for name in measure:
        core.check_choice("config.replay.measure", name, probe.MEASURES)
    if per_class is not None and capacity is not None:
        raise ValueError(
            f"config.replay.capacity={capacity}: set it or per_class={per_class}, "
            "the other to None"
        )
    for name, value in (
        ("per_class", per_class),
        ("capacity", capacity),
        ("size", size),
        ("updates", updates),
    ):
        if value is not None and value < 1:
            raise ValueError(f"config.replay.{name}={value}: must be at least 1")
    if capacity is None:
        capacity = (20 if per_class is None else per_class) * num_classes
    size, measure = size or batch_size, tuple(measure)
    return core.Replay(
        capacity, policy, size, updates, augment, sharded, measure, statistics
    )
