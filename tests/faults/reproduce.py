"""Faults of reproductions: the command, streams in looks, the perceptron, joint ER."""

from faults import fault

_LOOK = "test_looks.py::test_a_look_is_a_task_of_all_images_changed_alike"
_AGREE = "test_reproduce.py::test_means_agree_within_two_standard_errors"
_DROPOUT = "test_nets.py::test_dropout_draws_anew_in_every_pass_of_training_alone"
_START = "test_nets.py::test_perceptron_and_the_head_behind_it_start_as_asked"

FAULTS = [
    *fault.of(
        "reproduce/verdict.py",
        _AGREE,
        (
            "reproduce: our spread is that of one seed",
            "math.hypot(deviation / math.sqrt(count), published.error)",
            "math.hypot(deviation, published.error)",
        ),
        (
            "reproduce: errors are added",
            "math.hypot(deviation / math.sqrt(count), published.error)",
            "deviation / math.sqrt(count) + published.error",
        ),
        (
            "reproduce: numbers below always agree",
            "if abs(apart) <= 2 * error:",
            "if apart <= 2 * error:",
        ),
        (
            "reproduce: the tolerance is on both sides",
            "agrees = apart >= -published.tolerance",
            "agrees = abs(apart) <= published.tolerance",
            "test_reproduce.py::test_a_source_that_tests_itself_is_asked_its_test",
        ),
        (
            "reproduce: a number from memory judges",
            "if not published.read:",
            "if published.read is None:",
            "test_reproduce.py::test_what_cannot_be_judged_is_not",
        ),
    ),
    *fault.of(
        "reproduce/table.py",
        "test_reproduce.py::test_spreads_become_standard_errors_of_means",
        (
            "reproduce: a deviation is taken for the error of a mean",
            '{"error": spread / math.sqrt(runs), "spread": words}',
            '{"error": spread, "spread": words}',
        ),
        (
            "reproduce: two standard errors are taken for one",
            '"error": spread / 2',
            '"error": spread',
        ),
    ),
    *fault.of(
        "reproduce/page.py",
        "test_reproduce.py::test_measured_is_the_last_mean_over_tasks_or_a_scalar",
        (
            "reproduce: the first scalar is measured",
            'value = results["scalars"][-1].get(measure)',
            'value = results["scalars"][0].get(measure)',
            "test_reproduce.py::test_a_row_runs_whole_and_again",
        ),
        (
            "reproduce: a run that is not over is measured",
            'if results["scalars"][-1] is None:',
            'if results["scalars"][0] is None:',
        ),
    ),
    *fault.of(
        "reproduce/command.py",
        "test_reproduce.py::test_overrides_reach_the_config",
        (
            "reproduce: overrides are lost",
            'argv += [f"--config.{override}" for override in row.overrides]',
            "argv += []",
        ),
    ),
    *fault.of(
        "data/looks.py",
        _LOOK,
        (
            "looks: all have one order",
            "np.random.default_rng([seed, number])",
            "np.random.default_rng([seed, 0])",
        ),
        (
            "looks: what was outside is not black",
            "images[look][:, source < 0] = 0",
            "images[look][:, source < -1] = 0",
        ),
        (
            "looks: images turn to the right",
            "math.sin(math.radians(angle))",
            "-math.sin(math.radians(angle))",
        ),
        (
            "looks: domains are those of the rows",
            "np.repeat(np.arange(len(sources), dtype=np.int32), count)",
            "np.tile(np.arange(len(sources), dtype=np.int32), count)",
        ),
        (
            "looks: pixels turn about a corner",
            "np.mgrid[:side, :side] + (1 - side) / 2",
            "np.mgrid[:side, :side] - side / 2",
            "test_looks.py::test_turned_pixels_are_pillows",
        ),
    ),
    *fault.of(
        "config/sections.py",
        "test_looks.py::test_looks_follow_the_run_unless_they_have_a_seed",
        (
            "looks: all seeds have the same",
            'drawn = ("growth", "permuted", "rotated",',
            'drawn = ("growth",',
        ),
    ),
    *fault.of(
        "nets/mlp.py",
        _DROPOUT,
        (
            "mlp: dropout draws the same in every pass",
            "kept.value = jax.random.key_data(keys[0])",
            "kept.value = kept.value",
        ),
        (
            "mlp: dropout does not scale what it keeps",
            "x / (1 - self.dropout), 0)",
            "x, 0)",
        ),
        (
            "mlp: dropout keeps what it should drop",
            "jax.random.bernoulli(keys[i], 1 - self.dropout, x.shape)",
            "jax.random.bernoulli(keys[i], self.dropout, x.shape)",
        ),
    ),
    *fault.of(
        "nets/initial.py",
        _START,
        (
            "initial: Glorot's bound is that of the fan in",
            "torch_uniform((fan_in + fan_out) / 6)",
            "torch_uniform(fan_in / 3)",
        ),
    ),
    *fault.of(
        "methods/online/network.py",
        _START,
        (
            "network: the head starts as PyTorch's, whatever the encoder says",
            'getattr(self.encoder, "start", "torch")',
            '"torch"',
        ),
    ),
    *fault.of(
        "methods/er.py",
        "test_online.py::test_joint_er_is_one_mean_over_one_pass",
        (
            "er: absent classes compete in the joint pass",
            "class_mask=class_mask, example_mask=rows.mask",
            "example_mask=rows.mask",
        ),
        (
            "er: absent classes may be predicted",
            'limit=unseen == "absent"',
            "limit=False",
        ),
    ),
    *fault.of(
        "methods/online/step.py",
        "test_online.py::test_absent_classes_take_no_part_in_separate_passes",
        (
            "step: absent classes compete in separate passes",
            "out.logits, rows.label, class_mask=class_mask, example_mask=rows.mask",
            "out.logits, rows.label, example_mask=rows.mask",
        ),
        (
            "er: rows that do not exist count in the joint mean",
            "mask=jnp.concatenate([incoming.mask, replayed.mask]),",
            "mask=jnp.ones(len(incoming.mask) + len(replayed.mask), bool),",
            "test_online.py::test_joint_er_is_fine_tuning_while_the_memory_is_empty",
        ),
        (
            "er: blank images enter the joint statistics",
            "jnp.where(jnp.any(replayed.mask), replayed.images, repeated)",
            "replayed.images",
            "test_online.py::test_joint_er_is_fine_tuning_while_the_memory_is_empty",
        ),
    ),
    *fault.of(
        "methods/gdumb.py",
        "test_gdumb.py::test_the_fit_is_the_equation[False-constant]",
        (
            "gdumb: a constant rate begins with a tenth",
            'constant = recipe.schedule == "constant"',
            "constant = False",
        ),
        slow=True,
    ),
    *fault.of(
        "methods/gdumb.py",
        "test_gdumb.py::test_updates_that_would_train_nothing_are_refused",
        (
            "gdumb: updates that train nothing are taken",
            "replay.updates, (1,))",
            "replay.updates, (1, 3))",
        ),
    ),
    *fault.of(
        "reproduce/page.py",
        "test_reproduce.py"
        "::test_a_probe_stands_beside_the_accuracy_that_is_published_with_it",
        (
            "reproduce: what stands beside is the accuracy again",
            "own = {other.measure: values(other.measure) for",
            "own = {other.measure: values(row.measure) for",
        ),
        (
            "reproduce: what stands beside is judged by the row's number",
            "*_compared(values, other.published)]",
            "*_compared(values, row.published)]",
        ),
        slow=True,
    ),
    *fault.of(
        "reproduce/page.py",
        "test_reproduce.py::test_the_commit_says_whether_its_folder_was_changed",
        (
            "reproduce: changed code goes by its commit",
            'git("status", "--porcelain", ".")',
            'git("status", "--porcelain", "jaxcl")',
        ),
        slow=True,
    ),
]
