"""Faults of the losses; the tests are their float64 twins."""

import functools

import jax
import jax.numpy as jnp

from faults import fault
from faults.fault import gives, instead, swaps, takes


def _twin(module, case):
    return f"test_{module}.py::test_values_and_gradients_equal_the_equation[{case}]"


_losses = functools.partial(_twin, "losses")
_noncontrastive = functools.partial(_twin, "noncontrastive")
_prototype = functools.partial(_twin, "prototype")
_replay = functools.partial(_twin, "replay_losses")
_incremental = functools.partial(_twin, "incremental")


def _next_row(x):
    return jnp.roll(x, 1, axis=0)


def _reversed(x):
    return x[::-1]


def _no_mask(_):
    return None


def _leaks(name):
    """Give an argument a gradient that it must not have; the value stays."""

    def change(value, arguments):
        mean = jnp.mean(arguments[name])
        return value + mean - jax.lax.stop_gradient(mean)

    return gives(change)


_contrastive = [
    *fault.of(
        "losses.contrastive.nt_xent",
        _losses("nt_xent"),
        ("loss: nt_xent has another example for positive", takes(z2=_next_row)),
        (
            "loss: nt_xent is multiplied by its temperature",
            takes(temperature=lambda t: 1 / t),
        ),
    ),
    *fault.of(
        "losses.contrastive.logsumexp_of_others",
        _losses("nt_xent"),
        (
            "loss: a row is its own negative",
            instead(lambda logits: jax.nn.logsumexp(logits, axis=-1)),
        ),
    ),
    *fault.of(
        "core.masked_mean",
        _replay("er_ace_masked"),
        (
            "loss: a mean over masked rows divides by all rows",
            instead(
                lambda rows, mask=None: jnp.mean(rows if mask is None else rows * mask)
            ),
        ),
    ),
    *fault.of(
        "losses.contrastive.info_nce",
        _losses("info_nce_masked"),
        (
            "loss: info_nce has negatives that do not exist",
            takes(negative_mask=_no_mask),
        ),
        (
            "loss: info_nce leaves its positive out of the denominator",
            takes(positive_in_denominator=lambda _: False),
            _losses("info_nce"),
        ),
    ),
    *fault.of(
        "losses.contrastive.m_hml",
        _losses("m_hml_masked"),
        ("loss: m_hml averages over empty slots", takes(mask=_no_mask)),
        ("loss: m_hml drops its weight", takes(weight=lambda _: 1.0), _losses("m_hml")),
    ),
    *fault.of(
        "losses.contrastive.sup_con",
        _losses("sup_con_masked"),
        ("loss: sup_con takes every row for an anchor", takes(anchor_mask=_no_mask)),
        (
            "loss: sup_con has one positive for each anchor",
            takes(labels=lambda labels: jnp.arange(len(labels)) // 2),
            _losses("sup_con"),
        ),
    ),
]

_without_negatives = [
    *fault.of(
        "losses.noncontrastive.barlow_twins",
        _noncontrastive("barlow"),
        ("loss: barlow_twins drops its scale", takes(scale=lambda _: 1.0)),
        (
            "loss: barlow_twins weighs the diagonal, too",
            gives(lambda value, of: value * of["off_diagonal"]),
        ),
    ),
    *fault.of(
        "losses.noncontrastive.byol",
        _noncontrastive("byol"),
        ("loss: byol sends a gradient to its targets", _leaks("targets")),
    ),
    *fault.of(
        "losses.noncontrastive.simsiam",
        _noncontrastive("simsiam"),
        ("loss: simsiam compares a prediction with its own view", swaps("z1", "z2")),
    ),
    *fault.of(
        "losses.noncontrastive.vicreg",
        _noncontrastive("vicreg"),
        ("loss: vicreg swaps variance and covariance", swaps("variance", "covariance")),
    ),
    *fault.of(
        "losses.noncontrastive.lejepa",
        _noncontrastive("lejepa"),
        ("loss: lejepa swaps the weights of its terms", takes(weight=lambda w: 1 - w)),
    ),
    *fault.of(
        "losses.noncontrastive.dino",
        _noncontrastive("dino"),
        (
            "loss: dino compares a view with itself",
            takes(targets=lambda targets: targets[:, ::-1]),
        ),
    ),
    *fault.of(
        "losses.noncontrastive.sinkhorn",
        "test_bases.py::test_local_crops_are_further_views[swav-two]",
        ("loss: sinkhorn stops one turn early", takes(iterations=lambda n: n - 1)),
    ),
]

_of_distillation = [
    *fault.of(
        "losses.teacher.smooth_l1",
        _losses("smooth_l1"),
        ("loss: smooth L1 turns at 1", takes(beta=lambda beta: beta / 2)),
    ),
    *fault.of(
        "losses.teacher.rkd_distance",
        _losses("rkd_distance_masked"),
        ("loss: rows without a feature count", takes(mask=_no_mask)),
    ),
    *fault.of(
        "losses.distill.cassle_contrastive",
        _losses("cassle"),
        ("loss: cassle swaps the frozen views", swaps("f1", "f2")),
    ),
    *fault.of(
        "losses.distill.cassle_barlow",
        _noncontrastive("cassle_barlow"),
        ("loss: cassle's barlow swaps the frozen views", swaps("f1", "f2")),
    ),
    *fault.of(
        "losses.distill.pseudo_negative",
        _noncontrastive("pseudo_negative_byol"),
        ("loss: a pseudo-negative is of its own view", swaps("f1", "f2")),
    ),
    *fault.of(
        "losses.noncontrastive.ibot",
        _noncontrastive("ibot"),
        ("loss: ibot counts views that hide nothing", takes(hides=lambda x: 0 * x + 1)),
    ),
    *fault.of(
        "losses.distill.pnr_simclr",
        _losses("pnr_simclr_False_True"),
        ("loss: pnr_simclr swaps its two terms' pseudo-negatives", swaps("pn1", "pn2")),
        (
            "loss: pnr_simclr distils to the current features",
            swaps("p1", "z1"),
            _losses("pnr_simclr_True_True"),
        ),
    ),
    *fault.of(
        "losses.distill.pnr_moco",
        _losses("pnr_moco"),
        ("loss: pnr_moco meets the bank of the other view", takes(key_queue=_reversed)),
        (
            "loss: pnr_moco swaps its temperatures",
            swaps("temperature", "distill_temperature"),
        ),
        ("loss: pnr_moco sends a gradient to its queues", _leaks("key_queue")),
    ),
]

_of_prototypes = [
    *fault.of(
        "losses.prototype.sample_nce",
        _prototype("nce_default"),
        (
            "loss: sample_nce multiplies by the chance of a row",
            takes(weights=lambda weights: 1 / weights),
        ),
        (
            "loss: sample_nce weighs candidates of new classes",
            takes(old_classes=lambda old: ~old.astype(bool)),
        ),
    ),
    *fault.of(
        "losses.prototype.prd",
        _prototype("prd_default"),
        (
            "loss: prd swaps the temperatures of both networks",
            swaps("temperature", "teacher_temperature"),
        ),
        ("loss: prd compares with all classes", takes(class_mask=jnp.ones_like)),
    ),
    *fault.of(
        "losses.prototype.ird",
        _prototype("ird_masked"),
        ("loss: ird relates rows that do not exist", takes(example_mask=_no_mask)),
    ),
]

_of_replay = [
    *fault.of(
        "losses.replay.er_ace",
        _replay("er_ace_default"),
        (
            "loss: er_ace has unseen classes for replayed rows",
            takes(seen=jnp.ones_like),
        ),
        ("loss: er_ace averages both parts", gives(lambda value: value / 2)),
    ),
    *fault.of(
        "losses.replay.triplet",
        _replay("triplet_default"),
        ("loss: triplet pushes positives away", swaps("positives", "negatives")),
    ),
    *fault.of(
        "losses.replay.der",
        _replay("der_default"),
        (
            "loss: der sums over classes",
            gives(lambda value, of: value * of["logits"].shape[1]),
        ),
        ("loss: der sends a gradient to stored logits", _leaks("stored_logits")),
    ),
    *fault.of(
        "losses.replay.icarl",
        _replay("icarl_default"),
        (
            "loss: icarl has labels for old classes, its teacher for new ones",
            takes(old_classes=lambda old: ~old.astype(bool)),
        ),
    ),
    *fault.of(
        "losses.replay.task_distillation",
        _replay("tasks_default"),
        ("loss: tasks are distilled as one", takes(tasks=jnp.zeros_like)),
    ),
]

_of_increments = [
    *fault.of(
        "losses.incremental.nce_one",
        _incremental("one"),
        ("loss: nce_one averages over negatives", takes(num_negatives=lambda _: 1)),
        (
            "loss: nce_one always has the positive below",
            takes(with_positive=lambda _: True),
            _incremental("one_without_positive"),
        ),
    ),
    *fault.of(
        "losses.incremental.change_ratio",
        _incremental("ratio"),
        ("loss: change_ratio is upside down", swaps("old_negatives", "new_negatives")),
    ),
    *fault.of(
        "losses.incremental.nce_two",
        _incremental("two"),
        (
            "loss: nce_two swaps the shares of old and new",
            takes(growth=lambda growth: 1 - growth),
        ),
    ),
]

FAULTS = [
    *_contrastive,
    *_without_negatives,
    *_of_distillation,
    *_of_prototypes,
    *_of_replay,
    *_of_increments,
]
