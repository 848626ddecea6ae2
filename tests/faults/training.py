"""Faults of what every step shares: the state, optimisers, schedules, metrics."""

import jax
import jax.numpy as jnp
import numpy as np

from faults import fault
from faults.fault import gives, instead, swaps, takes
from jaxcl import metrics


def _no(_):
    return False


def _whole(place):
    return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())


def _later(numbers):
    return tuple(number + 1 for number in numbers)


_state = [
    *fault.of(
        "core.progress",
        "test_core.py::test_progress_is_the_share_of_the_task_that_is_done",
        ("core: progress is that of the run", instead(lambda s: s.step / s.task_steps)),
    ),
    *fault.of(
        "core.step_key",
        "test_core.py::test_every_step_of_every_task_has_a_key_of_its_own",
        (
            "core: keys repeat in every task",
            instead(lambda s: jax.random.fold_in(s.key, s.step - s.task_start)),
        ),
    ),
    *fault.of(
        "core.rate",
        "test_core.py::test_each_task_has_its_rates_and_later_ones_the_last",
        (
            "core: every task has the rates of the first",
            takes(state=lambda s: s.replace(task=0 * s.task)),
        ),
    ),
    *fault.of(
        "core.apply_gradients",
        "test_core.py::test_shares_scale_the_entries_that_they_name",
        ("core: shares of the rate are ignored", takes(shares=lambda _: None)),
        ("core: parameters go up the gradient", takes(lr=lambda lr: -lr)),
        (
            "core: steps are not counted",
            gives(lambda after, of: after.replace(step=of["state"].step)),
        ),
    ),
    *fault.of(
        "core.new_state",
        "test_core.py::test_a_new_state_holds_no_array_twice",
        (
            "core: numbers of a state share a buffer",
            gives(lambda s: s.replace(task=s.step)),
        ),
    ),
    *fault.of(
        "core.copy",
        "test_core.py::test_a_copy_has_buffers_of_its_own",
        ("core: a copy is no copy", instead(lambda tree: tree)),
    ),
    *fault.of(
        "core.l2_normalize",
        "test_losses.py::test_l2_normalize_divides_by_length_or_eps",
        (
            "core: a row of zeros becomes nan",
            instead(lambda x, eps=0: x / jnp.linalg.norm(x, axis=-1, keepdims=True)),
        ),
    ),
]

_optimisers = [
    *fault.of(
        "optim.sgd",
        "test_optim.py::test_sgd_is_torchs",
        ("optim: nesterov is ignored", takes(nesterov=_no)),
        ("optim: sgd decays biases", takes(exclude_1d=_no)),
        ("optim: sgd has no momentum", takes(momentum=lambda _: 0.0)),
    ),
    *fault.of(
        "optim.lars",
        "test_optim.py::test_lars_follows_the_released_code",
        ("optim: lars never clips", takes(clip=_no)),
        ("optim: lars scales biases", takes(exclude_1d=_no)),
    ),
    *fault.of(
        "optim.adam",
        "test_optim.py::test_adam_and_adamw",
        ("optim: adam's decay is always decoupled", takes(decoupled=lambda _: True)),
    ),
    *fault.of(
        "optim.by_leaf",
        "test_vit.py::test_shares_of_leaves",
        ("optim: a leaf's share is ignored", takes(share=lambda _: lambda path: 1.0)),
    ),
]

_schedules = [
    *fault.of(
        "optim.warmup_cosine",
        "test_optim.py::test_warmup_cosine_steps_once_an_epoch",
        (
            "optim: the warm-up lasts an epoch more",
            takes(warmup_epochs=lambda n: n + 1),
        ),
        ("optim: the cosine ends at 0", takes(end=lambda _: 0.0)),
        (
            "optim: a warm-up begins at 0.003, whatever the peak",
            takes(start=lambda x: 0.003 if x is None else x),
            "test_optim.py::test_a_warm_up_rises_from_below_any_peak",
        ),
    ),
    *fault.of(
        "optim.step_decay",
        "test_optim.py::test_step_decay_and_constant",
        ("optim: milestones come an epoch late", takes(milestones=_later)),
    ),
    *fault.of(
        "optim.ramped_cosine",
        "test_optim.py::test_ramped_cosine",
        ("optim: the ramp starts at 0", takes(start=lambda _: 0.0)),
    ),
    *fault.of(
        "optim.by_task",
        "test_core.py::test_each_task_has_its_rates_and_later_ones_the_last",
        (
            "optim: a task has the schedule of the next",
            takes(schedules=lambda all_of: [*all_of[1:], all_of[-1]]),
        ),
    ),
    *fault.of(
        "optim.momentum_schedule",
        "test_optim.py::test_momentum_schedule",
        ("optim: the momentum falls over a task", swaps("start", "end")),
    ),
    *fault.of(
        "optim.ema",
        "test_optim.py::test_ema_of_trees",
        ("optim: the slow network is nearly the fast one", swaps("old", "new")),
    ),
]


def _with_the_diagonal(plasticity):
    """Average over tasks i >= j in place of i > j."""

    def wrong(matrix, finetune):
        gain = np.asarray(matrix) - np.asarray(finetune)
        rows = [np.mean(gain[j, j:]) for j in range(len(gain) - 1)]
        return float(np.mean(rows))

    return wrong


_matrix = "test_metrics.py::test_matrix_metrics_equal_the_double_loops"
_geometry = (
    "test_metrics.py"
    "::test_class_geometry_equals_the_loops_with_absent_classes_and_unlabelled_rows"
)
_metrics = [
    *fault.of(
        "metrics.average_accuracy",
        _matrix,
        (
            "metrics: the final accuracy is that of the last task",
            instead(lambda matrix: float(np.asarray(matrix)[-1, -1])),
        ),
    ),
    *fault.of(
        "metrics.average_accuracy_per_task",
        "test_metrics.py",
        (
            "metrics: the accuracy after a task counts tasks to come",
            instead(lambda matrix: np.mean(np.asarray(matrix), axis=1)),
        ),
    ),
    *fault.of(
        "metrics.forgetting",
        _matrix,
        ("metrics: forgetting is never negative", gives(lambda x: np.maximum(x, 0.0))),
    ),
    *fault.of(
        "metrics.stability",
        _matrix,
        ("metrics: stability may be negative", instead(metrics.forgetting)),
    ),
    *fault.of(
        "metrics.plasticity",
        "test_metrics.py"
        "::test_plasticity_equals_the_double_loop_and_needs_the_upper_triangle",
        ("metrics: plasticity counts the diagonal", _with_the_diagonal),
    ),
    *fault.of(
        "metrics.accuracy",
        "test_metrics.py::test_accuracy_counts_unmasked_rows",
        ("metrics: rows that do not exist are judged", takes(mask=lambda _: None)),
    ),
    *fault.of(
        "metrics.inter_class_similarities",
        _geometry,
        (
            "metrics: a class is compared with itself",
            gives(lambda s: (s * (jnp.sum(jnp.isfinite(s)) - 1) + 1) / len(s)),
        ),
    ),
    *fault.of(
        "metrics.class_entropy",
        "test_metrics.py::test_class_entropy_is_in_nats_over_valid_labels",
        ("metrics: entropies are in bits", gives(lambda x: x / np.log(2))),
    ),
]

_machines = [
    *fault.of(
        "nets.pieces.PiecewiseEncoder",
        "test_pieces.py::test_pieces_pass_in_turn_and_rows_keep_their_order",
        ("pieces: a batch passes whole", takes(count=lambda _: 1)),
    ),
    *fault.of(
        "sharding.placement",
        "test_mesh.py::test_weights_are_split_by_name_and_the_rest_is_whole",
        (
            "mesh: every device has all weights",
            gives(lambda places: jax.tree.map(_whole, places)),
        ),
    ),
]

FAULTS = [*_state, *_optimisers, *_schedules, *_metrics, *_machines]
