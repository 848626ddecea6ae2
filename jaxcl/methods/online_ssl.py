"""Online continual self-supervised learning: one pass over a stream, without labels.

Each incoming batch is trained on `config.replay.updates` times, beside rows that are
drawn from a memory of earlier images; then its images, not augmented, enter the memory.
The method knows no labels and no boundaries between tasks. It composes a base of
`two_view/bases/`, a memory (config.replay) and a regulariser, which is a strategy of
`two_view/strategies/` or CLA-R:
- "none": the base's loss on replayed and incoming rows, L_SSL.
- "cla_r": CLA-R of Cignoni et al., "Continual Latent Alignment", arXiv 2507.10434.
  L_SSL plus weight * mean of -cos(a(z), s) over the views of replayed rows, where s is
  stored with the row and moves towards its z with every use, and a is a predictor.
- "cassle": the distillation of CaSSLe (Fini et al., CVPR 2022) towards a frozen network
  that follows the one that learns. With SimSiam and `rows="replay"` it is CLA-E, whose
  -cos(a(z), f) is half of our 2 - 2 cos(a(z), f): our weight is half of CLA's.
- "der": DER (Buzzega et al., NeurIPS 2020) on projections, as Madaan et al. (ICLR 2022)
  apply it. L_SSL plus weight * mean of (z - s)^2 over the views of replayed rows, where
  s is stored with the row once and for all. Like DER++, and unlike DER, replayed rows
  are in L_SSL, too.
- "lump": LUMP (Madaan et al., ICLR 2022). L_SSL is of mixtures of incoming with
  replayed rows alone, see `stored_examples.mix_examples`.
- "pnr": the terms of PNR (Cha et al., ICML 2024), with features of the same frozen
  network. This, and all that CLA does not name, is OURS and in no paper.

EWC is not among them: it needs the end of each task, which the method does not know.

Departures:
- CLA's released code draws and passes nothing for replay until the memory holds more
  than `size` rows. Here shapes are fixed: until then incoming rows are repeated in
  place of replayed ones, for the batch statistics alone, without a loss.
- The frozen network and the slow one of BYOL and MoCo normalise by their batch; CLA's
  text does not say what its EMA does. `frozen_bn="running"` takes averaged statistics.
- The momentum of the slow network is constant, since there is no end to count towards.
- The learning rate of all updates on a batch is that of the batch.
- Labels and numbers of tasks are stored with the images, for evaluators; no step reads
  them.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from jaxcl import core, lookup, schema
from jaxcl.errors import Refused
from jaxcl.memory import policies, sharded
from jaxcl.methods.online import probe
from jaxcl.methods.two_view import bases, networks, records, step, strategies

QUEUE_SIZE = 2048  # default of config.method.base.queue_size here
# What the memory can hold for its policy to read.
_STORED = ("feature", "used", "number", "loss", "draws", "score")


_TEACHER = {"distill_hidden_dim": 512, "frozen_bn": "batch", "teacher": "ema"}

cassle = schema.adapt(strategies.cassle.make, **_TEACHER)
pnr = schema.adapt(strategies.pnr.make, **_TEACHER)
# Their memory is that of config.replay.
der = schema.adapt(strategies.der.make, hidden=("memory_size",))
lump = schema.adapt(strategies.lump.make, hidden=("memory_size",))

REGULARISERS: dict[str, Callable[..., records.Strategy]] = {
    "none": strategies.finetune.make,
    "cassle": cassle,
    "pnr": pnr,
    "der": der,
    "lump": lump,
    **strategies.OF_STREAMS,
}


def find_make(name: str) -> Callable[..., records.Strategy]:
    """Find a regulariser, or raise Refused with the nearest names."""
    return lookup.find_entry(REGULARISERS, name, "config.method.regulariser")


def _trains_online(base: records.Base) -> bool:
    """Tell whether a base reads no labels, numbers of images or progress of a task."""
    return not (
        {"label", "index", "h"} & {*base.reads}
        or base.init_params
        or base.prepare
        or base.masks
    )


def list_bases() -> dict:
    """List the bases that can be trained online, by name, with their options here."""
    return {
        name: schema.adapt(
            make,
            # The slow network follows the option `momentum`.
            hidden=("momentum_start", "momentum_end", "streaming"),
            **{"queue_size": QUEUE_SIZE}
            if "queue_size" in schema.defaults(make)
            else {},
        )
        for name, make in bases.BASES.items()
        if _trains_online(make())
    }


BASES = list_bases()
Section = Annotated[Any, schema.Choice(BASES)]
RegulariserSection = Annotated[Any, schema.Choice(REGULARISERS)]


def _make_parts(base, regulariser) -> tuple[records.Base, records.Strategy]:
    """Make the records of a base and of a regulariser from their sections."""
    make, options = schema.Choice(BASES).find(base, "config.method.base")
    spec = make(**options)
    options = dict(regulariser)
    plan = find_make(options.pop("name"))(**options)
    return spec, plan


def _fill_from_base(options: dict, replay: core.Replay | None = None) -> dict:
    """Fill in the base's values for options that are None."""
    base, _ = _make_parts(options["base"], options["regulariser"])
    regulariser = dict(options["regulariser"])
    make = find_make(regulariser["name"])
    regulariser = schema.defaults(make) | regulariser
    regulariser |= networks.choose_sizes(base, regulariser)
    return networks.choose_sizes(base, options) | {"regulariser": regulariser}


@schema.checked("config.method", fill=_fill_from_base)
@schema.debug(hidden_dim=16, output_dim=8)
def make(
    parts: core.Parts,
    *,
    base: Section = "simsiam",
    regulariser: RegulariserSection = "none",
    rows: Literal["replay", "all"] = "replay",
    remembers: bool = True,
    momentum: schema.Share = 0.99,
    hidden_dim: schema.Width | None = None,
    output_dim: schema.Width | None = None,
    hidden_layers: schema.Layers | None = None,
) -> core.Method:
    """Make one base with a memory and one regulariser; both are sections.

    Args:
      parts: what the config builds.
      base: name of the self-supervised loss, in `list_bases()` or a module of your own;
        or a section with this name and options. Bases that read labels, prototypes or
        random slices are refused.
      regulariser: name in `REGULARISERS`, see the head of `step.py`; or a
        section.
      rows: rows that are aligned, "replay" or "all".
      remembers: keep a memory and replay from it; without one `rows` must be "all".
      momentum: of the slow network of BYOL and MoCo, after each update.
      hidden_dim, output_dim, hidden_layers: of the projector; None: the base's.

    Raises:
      Refused: naming the field, the value and what is allowed.
    """
    spec, plan = _make_parts(base, regulariser)
    if not _trains_online(spec):
        raise Refused(
            f"config.method.base={base['name']!r}: reads labels, numbers of images, or "
            "the progress of a task, which online_ssl does not know; must be one of "
            f"{', '.join(BASES)}"
        )
    if plan.check is not None:
        plan.check(base["name"], spec)
    _check_options(parts, regulariser["name"], plan, rows, remembers)
    size = parts.replay.size if remembers else 0
    shape = spec.projector._replace(
        hidden_dim=hidden_dim, output_dim=output_dim, hidden_layers=hidden_layers
    )
    if spec.momentum is not None:  # there is no end to count towards
        spec = spec._replace(momentum=(momentum, momentum))
    stores = plan.stored_momentum is not None
    if stores or plan.mix:  # their memory is that of the stream
        plan = plan._replace(read=records.Strategy().read, init_state=None, store=None)
    setup = networks.make_setup(
        parts,
        spec,
        plan,
        shape,
        online=True,
        policy=sharded.find_policy(parts.replay) if remembers else None,
        size=size,
        beside=0 if plan.mix else size,
        every_row=rows == "all",
    )
    method = step.make_method(
        setup,
        replays=True,
        memory=(lambda state: state.extra.memory) if remembers else None,
    )
    return probe.add_measures(method, parts) if parts.replay.measure else method


def _check_options(parts, regulariser, plan, rows, remembers) -> None:
    """Refuse what the method cannot do, before anything compiles."""
    if plan.teacher is not None and plan.teacher.follows == "task":
        raise Refused(
            "config.method.regulariser.teacher='task': online_ssl knows no tasks; must "
            "be 'ema' or 'snapshot'"
        )
    if parts.batch_size == 1:
        raise Refused(
            "config.batch_size=1: online_ssl compares rows of a batch; must be at "
            "least 2"
        )
    stores = plan.stored_momentum is not None
    if not remembers:
        if stores or plan.mix or (plan.term and rows == "replay"):
            raise Refused(
                f"config.method.remembers=False: regulariser={regulariser!r} with "
                f"rows={rows!r} reads replayed rows; must be True, or rows='all' with "
                "regulariser 'cassle' or 'pnr'"
            )
        return
    if stores and rows == "all":
        raise Refused(
            f"config.method.rows='all': regulariser {regulariser!r} aligns rows with "
            "what the memory stores of them; must be 'replay'"
        )
    _check_replay(parts.replay)
    if plan.mix:
        _check_mixtures(parts)


def _check_mixtures(parts: core.Parts) -> None:
    """Refuse a memory that "lump" cannot mix with, or that reads single rows."""
    replay = parts.replay
    if 0 < parts.batch_size < replay.size:  # 0: whoever asks does not know it yet
        raise Refused(
            f"config.replay.size={replay.size}: regulariser 'lump' mixes each incoming "
            "row with one replayed row; must be at most config.batch_size="
            f"{parts.batch_size}"
        )
    if reads := policies.look_up(replay.policy).reads:
        blank = [name for name, policy in policies.POLICIES.items() if not policy.reads]
        raise Refused(
            f"config.replay.policy={replay.policy!r}: reads {', '.join(reads)} of "
            "single rows, and regulariser 'lump' passes mixtures alone; allowed are "
            f"{', '.join(blank)}"
        )


def _check_replay(replay: core.Replay) -> None:
    """Refuse a memory that reads labels, or is too small to be replayed from."""
    if lacking := sorted({*policies.look_up(replay.policy).reads} - {*_STORED}):
        names = [n for n, x in policies.POLICIES.items() if {*x.reads} <= {*_STORED}]
        raise Refused(
            f"config.replay.policy={replay.policy!r}: reads {', '.join(lacking)}, "
            f"which online_ssl has none of; allowed are {', '.join(names)}"
        )
    if replay.capacity <= replay.size:
        raise Refused(
            f"config.replay.capacity={replay.capacity}: must be above config.replay."
            f"size={replay.size}; rows are replayed once more of them are stored"
        )
    allowed = {
        "augment": ("none", "all"),
        "measure": ((), ("drift",)),
        "statistics": ("running",),
    }
    for name, values in allowed.items():
        if (value := getattr(replay, name)) not in values:
            raise Refused(
                f"config.replay.{name}={value!r}: online_ssl augments all rows and has "
                "no head of classes; leave it out ('drift' may be measured)"
            )
