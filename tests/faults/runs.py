"""Faults of data, augmentation, networks, runs, checkpoints, seeds and devices."""

import jax
import jax.numpy as jnp
import numpy as np

from faults import fault
from faults.fault import always, gives, instead, takes


def _of_tasks(change):
    """Change each task of a stream; `change` gets the task and the stream."""
    return gives(
        lambda made: made._replace(
            tasks=tuple(change(task, made) for task in made.tasks)
        )
    )


def _all_test_rows(task, made):
    return task._replace(test=np.arange(len(made.evaluation.label), dtype=np.int32))


def _one_view(augment):
    def wrong(key, images):
        views = augment(key, images)
        return jnp.stack([views[:, 0]] * views.shape[1], axis=1)

    return wrong


def _without_places(tree):
    """Sum the words of each leaf, wherever they stand."""
    leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    leaves = [
        jax.random.key_data(x).ravel()
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
        for x in leaves
    ]
    return jnp.stack([jnp.sum(x.astype(jnp.uint32)) for x in leaves])


def _rows_of_the_first(shard):
    """Give every device the rows of the first one."""

    def wrong(batch, mesh, axis=0):
        def repeated(x):
            first = np.split(np.asarray(x), mesh.size, axis)[0]
            return np.concatenate([first] * mesh.size, axis)

        return shard(jax.tree.map(repeated, batch), mesh, axis)

    return wrong


_partition = "test_stream.py::test_class_scenario_partitions_by_label"
_schedule = "test_stream.py::test_schedule_is_random_access_over_seeded_epochs"
_data = [
    *fault.of(
        "data.stream.schedule",
        _schedule,
        ("data: every seed has the same order", takes(seed=always(0))),
    ),
    *fault.of(
        "data.stream.tasks.epochs_of_tasks",
        "test_stream.py::test_first_tasks_may_have_epochs_of_their_own",
        ("data: every task has the epochs of the first", gives(lambda by: by[:1])),
    ),
    *fault.of(
        "data.stream.released_permutation",
        "test_stream.py::test_released_permutation_of_other_seeds",
        ("data: the released order is that of seed 5", takes(seed=always(5))),
    ),
    *fault.of(
        "data.stream.scenarios.make",
        _partition,
        ("data: a task is judged on all classes", _of_tasks(_all_test_rows)),
        (
            "data: a task has no earlier rows",
            _of_tasks(lambda task, _: task._replace(earlier=task.earlier[:0])),
            "test_stream.py::test_earlier_rows_are_those_of_the_tasks_before",
        ),
    ),
    *fault.of(
        "data.stream.splits.split_validation",
        "test_sources.py::test_validation_is_stratified_seeded_and_apart_from_test",
        (
            "data: validation rows stay in the train split",
            gives(lambda parts, of: (of["train"], parts[1])),
        ),
    ),
    *fault.of(
        "data.stream.imbalance.probabilities",
        "test_imbalance.py::test_probabilities_are_the_papers",
        ("data: no class dominates", gives(lambda p: np.full_like(p, 1 / len(p)))),
    ),
    *fault.of(
        "data.stream.one_pass.weights",
        "test_one_pass.py::test_weights_are_those_of_the_schedule",
        ("data: a blurry stream is twice as blurry", takes(width=lambda w: 2 * w)),
    ),
    *fault.of(
        "data.stream.one_pass.recurring",
        "test_one_pass.py::test_recurrence_at_its_ends",
        ("data: no class comes back", takes(recurrence=always(0.0))),
    ),
    *fault.of(
        "data.stream.looks.rotate_pixels",
        "test_looks.py::test_turned_pixels_are_pillows",
        ("data: images turn to the right", takes(angle=lambda angle: -angle)),
    ),
]

_images = "test_augment.py::test_gray_solarize_flip_normalize"
_augmentation = [
    *fault.of(
        "data.augment.images.make",
        "test_augment.py::test_keys_are_folded_from_position_then_view",
        ("augment: all views are one", gives(_one_view)),
    ),
    *fault.of(
        "data.augment.images.solarize",
        _images,
        ("augment: solarising inverts the dark pixels", gives(lambda x: 1 - x)),
    ),
    *fault.of(
        "data.augment.images.horizontal_flip",
        _images,
        ("augment: images are mirrored up and down", instead(lambda x: x[::-1])),
    ),
    *fault.of(
        "data.augment.images._to_gray",
        _images,
        ("augment: grey is a mean", instead(lambda planes: sum(planes) / len(planes))),
    ),
    *fault.of(
        "data.augment.images.random_resized_crop",
        "test_augment.py::test_random_resized_crop_is_pillows_crop_then_resize",
        (
            "augment: crops are whole images",
            takes(scale=always((1.0, 1.0)), ratio=always((1.0, 1.0))),
        ),
    ),
]

_networks = [
    *fault.of(
        "nets.positions.rotate",
        "test_vit.py::test_equals_the_definition_in_float64[rotary]",
        ("nets: pairs turn the other way", takes(turns=lambda turns: -turns)),
    ),
    *fault.of(
        "update.plan._keep_statistics",
        "test_update.py::test_an_update_keeps_the_statistics_of_old_images",
        (
            "update: new images' statistics take the old ones' place",
            always(lambda config: config),
        ),
    ),
    *fault.of(
        "update.lineage._is_same",
        "test_update.py::test_an_update_of_a_run_may_change_its_statistics_alone",
        ("update: any option of a run's section may change", gives(always(True))),
    ),
    *fault.of(
        "nets.tuning.layer_of",
        "test_tuning.py::test_layers_count_from_the_images",
        ("nets: layers count from one", gives(lambda layer: layer + 1)),
    ),
]

_whole = "test_methods.py::test_resumes_bitwise_finite_one_compile[mocov2plus-pnr-mlp]"
_checkpoints = [
    *fault.of(
        "run.job.feed_batches",
        _whole,
        ("run: a resumed task begins with its first batch", takes(start=always(0))),
    ),
    *fault.of(
        "run.job.begin_task",
        "test_core.py::test_a_task_begins_where_the_run_stands",
        (
            "run: a task's start is not noted",
            gives(lambda begun, of: begun.replace(task_start=of["state"].task_start)),
        ),
    ),
    *fault.of(
        "run.checkpoint.checksum",
        "test_checkpoint.py::test_checksum_sees_one_bit_and_a_swap",
        ("run: a checksum does not see a swap", instead(_without_places)),
    ),
    *fault.of(
        "run.checkpoint.newest",
        "test_checkpoint.py::test_damaged_newest_falls_back_and_says_so[flip]",
        ("run: the oldest checkpoint is restored", takes(numbers=lambda n: [*n][::-1])),
    ),
    *fault.of(
        "run.metrics_log.check_state",
        "test_stops.py::test_a_state_with_a_number_that_is_none_is_not_used[saved]",
        ("run: a state that is not finite is saved", instead(lambda state, step: None)),
    ),
    *fault.of(
        "run.seeds.mean_and_error",
        "test_seeds.py::test_spread",
        (
            "run: errors of means are deviations",
            gives(
                lambda found: (
                    found
                    | {
                        "error": found["error"]
                        and found["error"] * found["seeds"] ** 0.5
                    }
                )
            ),
        ),
    ),
]

_devices = [
    *fault.of(
        "sharding.shard_rows",
        "test_methods.py::test_one_and_eight_devices_agree[er-mlp]",
        ("devices: every device has the rows of the first", _rows_of_the_first),
    )
]

FAULTS = [*_data, *_augmentation, *_networks, *_checkpoints, *_devices]
