"""Two-view self-supervised learning under a continual strategy: `make` and its checks.

`step.py` has the step; `records.py` has the fields of bases and strategies, each of
which names its papers and its departures.

Papers: Cha, Cho, Moon, "Regularizing with Pseudo-Negatives for Continual
Self-Supervised Learning", ICML 2024 (PNR); Fini et al., "Self-Supervised
Models are Continual Learners", CVPR 2022 (CaSSLe).

Departures:
- Negatives and batch statistics span the global batch; the released code
  takes them per device.
- The frozen network is in eval mode by default (`frozen_bn="running"`); the
  released code flips between both modes by accident.
- The momentum of the slow network follows the progress within the task at
  every step; the released code skips the first step and lags by one.
- `form="paper"` takes the papers' equations where the released code, the
  default, differs from them.
"""

import functools

import jax.numpy as jnp
from absl import logging

from jaxcl import core, lookup, schema
from jaxcl.errors import Refused
from jaxcl.methods.two_view import bases, head, networks, records, step, strategies
from jaxcl.nets import mlp, tuning, vit

_FEW = 16  # images of a batch, below which contrast teaches little


def _fill_from_base(options: dict, replay: core.Replay | None = None) -> dict:
    """Fill in the base's values for options that are None."""
    base, strategy = bases.make_base(options["base"]), dict(options["strategy"])
    make = strategies.find_make(strategy["name"])
    strategy = schema.defaults(make) | strategy
    filled = networks.choose_sizes(base, options)
    return filled | {"strategy": strategy | networks.choose_sizes(base, strategy)}


@schema.checked("config.method", fill=_fill_from_base)
@schema.debug(hidden_dim=16, output_dim=8)
def make(
    parts: core.Parts,
    *,
    base: bases.BaseSection = "mocov2plus",
    strategy: strategies.StrategySection = "finetune",
    hidden_dim: schema.Width | None = None,
    output_dim: schema.Width | None = None,
    hidden_layers: schema.Layers | None = None,
    head_steps: schema.Natural = 0,
    online_head: bool = False,
    head_lr: schema.Positive = 0.1,
    head_form: head.Form = "apart",
) -> core.Method:
    """Make a method from a base and a strategy.

    Args:
      parts: components that the config builds.
      base: name in `bases.BASES`, or of a module of your own, "mypackage.mybase"; or a
        section with this name and options of its `make`.
      strategy: name in `strategies.STRATEGIES`, or of a module of your own; or a
        section.
      hidden_dim: width of the projector's hidden layers; None: the base's.
      output_dim: width of the projector's output; None: the base's.
      hidden_layers: number of the projector's hidden layers; None: the base's.
      head_steps: number of first steps of the run in which only the projector, the
        predictors and the prototypes train, for an encoder that comes without them.
      online_head: train a linear head on labels of all classes, see `head.py`.
      head_lr: learning rate of that head.
      head_form: "apart", or "released", whose rows also move the network's statistics.

    Raises:
      Refused: naming the field, the value and what is allowed.
    """
    spec, plan = bases.make_base(base), strategies.make_strategy(strategy)
    names = lookup.name_of(base), lookup.name_of(strategy)
    if plan.check is not None:
        plan.check(names[0], spec)
    shape = spec.projector._replace(
        hidden_dim=hidden_dim, output_dim=output_dim, hidden_layers=hidden_layers
    )
    student = None
    if plan.student is not None:
        student = _shape_student(parts, plan.student)
        if plan.student.alone:  # there is no base, and the head is the projector
            spec = records.Base(lambda x: jnp.zeros(()), one_row=True)
            shape, student = student, None
    _check_data(parts, names[0], spec, names[1], plan)
    if "index" in spec.reads:
        shape = shape._replace(output_dim=_count_rows(parts, shape.output_dim))
    _warn_unread(spec, online_head, {"head_lr": head_lr, "head_form": head_form})
    setup = networks.make_setup(
        parts, spec, plan, shape, student=student, head_steps=head_steps
    )
    method = step.make_method(
        setup,
        begin_task=functools.partial(networks.begin_task, setup),
        end_task=functools.partial(networks.end_task, setup),
        supervised="label" in spec.reads,
        # A teacher of another training is none of earlier tasks.
        single_task_options=() if plan.student else (("strategy", "finetune"),),
        takes_local=True,
        constants=parts.teacher.weights if plan.student else None,
    )
    if not online_head:
        return method
    return head.add(method, parts, lr=head_lr, form=head_form)


def _shape_student(parts, head: records.StudentHead) -> mlp.ProjectorShape:
    """Shape the head that matches the features of config.teacher."""
    if parts.teacher is None:
        raise Refused(
            "config.teacher=None: the strategy matches the features of an encoder that "
            "jaxcl export or jaxcl import wrote: --config.teacher=FOLDER"
        )
    width = parts.teacher.width
    return mlp.ProjectorShape(head.hidden_layers, True, head.hidden_dim, width)


def _warn_unread(spec, online_head, of_head) -> None:
    """Warn of options that are set and change nothing."""
    standard = schema.defaults(make)
    unread = [name for name, value in of_head.items() if value != standard[name]]
    of_base = [f"base.{name}" for name in spec.unread]
    for name in (*of_base, *(() if online_head else unread)):
        logging.warning("config.method.%s has no effect with the other options", name)


def _check_data(parts, base, spec, strategy, plan):
    """Refuse batches and crops that the base or the strategy cannot read.

    Warn of batches with too few rows to compare.
    """
    net = tuning.bare_module(parts.encoder)
    if spec.masks and not (isinstance(net, vit.ViT) and net.features != "both"):
        raise Refused(
            "config.method.base.ibot: hides patches of a Vision Transformer; must be "
            "0, or config.encoder.name 'vit' with features 'class' or 'mean', and "
            "config.accumulate 1"
        )
    if spec.strategies is not None:
        core.check_choice("config.method.strategy", strategy, spec.strategies)
    if parts.batch_size == 1 and not spec.one_row:
        raise Refused(
            f"config.batch_size=1: base {base!r} compares rows of a batch; must be at "
            "least 2"
        )
    if 1 < parts.batch_size < _FEW and not spec.one_row:
        logging.warning(
            "config.batch_size=%d: base %r compares the images of a batch, and fewer "
            "than %d teach it little: take fewer tasks, more images, or begin with a "
            "pretrained encoder (config.start=FOLDER)",
            parts.batch_size,
            base,
            _FEW,
        )
    if parts.local is None:
        return
    if "local" not in spec.reads:
        takes = ", ".join(n for n in bases.BASES if "local" in bases.make_base(n).reads)
        raise Refused(
            f"config.augment.local: base {base!r} takes no local crops; "
            f"leave the section out, or set config.method.base to one of {takes}"
        )
    if plan.mix is not None:
        raise Refused(
            f"config.augment.local: strategy {strategy!r} reads two views alone; "
            "leave the section out"
        )


def _count_rows(parts, choice: int) -> int:
    """Choose the number of rows of a head that classifies each image by its number."""
    if choice and choice < parts.train_rows:
        raise Refused(
            f"config.method.base.rows={choice}: each of the {parts.train_rows} train "
            f"images has a row; must be at least {parts.train_rows}"
        )
    return choice or max(parts.train_rows, 1)
