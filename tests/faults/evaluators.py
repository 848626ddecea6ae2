"""Faults of evaluators and of metrics."""

from faults import fault

FAULTS = [
    *fault.of(
        "evals/alignment.py",
        "test_alignment.py::test_a_memory_without_images_or_tasks_is_refused",
        (
            "eval: alignment is not told that a memory has no tasks",
            'if not {"image", "task"} <= set(memory.items):',
            'if not {"image"} <= set(memory.items):',
        ),
    ),
    *fault.of(
        "evals/knn.py",
        "test_evals.py::test_votes_weigh_by_distance",
        (
            "eval: knn's weights have no temperature",
            "weights = jnp.exp(scores / temperature)",
            "weights = jnp.exp(scores)",
        ),
        (
            "eval: a query's neighbours are of any domain",
            "known & (bank_task == own[:, None])",
            "known & (bank_task <= own[:, None])",
            "test_evals.py::test_neighbours_are_those_of_brute_force[domain-cosine]",
        ),
        (
            "eval: knn asks rows that it may not",
            "jax.lax.top_k(jnp.where(mask, scores, -jnp.inf), k)",
            "jax.lax.top_k(scores, k)",
        ),
    ),
    *fault.of(
        "evals/features.py",
        "test_evals.py::test_neighbours_are_those_of_brute_force[class-cosine]",
        (
            "eval: collapse reads the first rows of a sorted split",
            "np.linspace(0, len(rows) - 1, min(most, len(rows)))",
            "np.arange(min(most, len(rows)))",
            "test_collapse.py::test_it_measures_rows_evenly_spaced",
        ),
        (
            "eval: uniformity of a single row",
            "if len(rows) < least:",
            "if len(rows) < 1:",
            "test_uniformity.py::test_a_single_row_is_refused",
        ),
        (
            "eval: rows seen are those of earlier tasks",
            "(groups.train_task <= task)",
            "(groups.train_task < task)",
        ),
        (
            "eval: a task's classes are not told",
            "of_task = jnp.where(allowed[task], scores, -jnp.inf)",
            "of_task = scores",
            "test_evals.py::test_verdicts_are_those_of_brute_force",
        ),
        (
            "eval: a row of several tasks is of the last",
            "for t, task in reversed(list(enumerate(tasks))):",
            "for t, task in enumerate(tasks):",
            "test_online_head.py::test_predict_judges_the_rows_of_the_tasks_met",
        ),
        (
            "eval: tasks to come are judged",
            "np.arange(len(row)) <= task, row, np.nan",
            "np.arange(len(row)) <= task + 1, row, np.nan",
        ),
    ),
    *fault.of(
        "evals/linear.py",
        "test_evals.py::test_domain_probe_trains_on_its_domain_alone",
        (
            "eval: a domain's probe trains on all domains",
            "mine = mask & (groups.train_task == t)",
            "mine = mask",
        ),
        (
            "eval: the semi-supervised probe has all labels",
            "mask = share & probe.usable(state, task)",
            "mask = probe.usable(state, task)",
            "test_evals.py"
            "::test_semi_supervised_probe_trains_on_its_share_alone[all-features]",
        ),
    ),
    *fault.of(
        "evals/linear.py",
        "test_evals.py::test_the_cut_chooses_the_rate",
        (
            "eval: the rows that choose the rate are trained on, too",
            "rows = np.flatnonzero(mask & ~choice.cut)",
            "rows = np.flatnonzero(mask)",
        ),
        (
            "eval: the worst rate is chosen",
            "return max(accuracy, key=accuracy.get) if accuracy else None",
            "return min(accuracy, key=accuracy.get) if accuracy else None",
        ),
        (
            "eval: the chosen rate is not used",
            "lr = lr if best is None else best",
            "best = lr if best is None else best",
        ),
        (
            "eval: a fit that is not finite has class 0's accuracy",
            "if not (math.isfinite(loss) and sharding.fetch(probe.finite(scores))):",
            "if False:",
            "test_evals.py::test_a_fit_that_is_not_finite_has_no_accuracy[class]",
        ),
        (
            "eval: a domain's fit that is not finite has class 0's accuracy",
            "if not (math.isfinite(loss) and sharding.fetch(probe.finite(scores))):",
            "if number == 0 and not math.isfinite(loss):",
            "test_evals.py::test_a_fit_that_is_not_finite_has_no_accuracy[domain]",
        ),
        (
            "eval: a train loss above log C is not warned of",
            "elif loss > most:",
            "elif loss > 1e9:",
            "test_evals.py::test_a_train_loss_above_that_of_guessing_is_warned_of",
        ),
    ),
    *fault.of(
        "evals/head.py",
        "test_evals.py::test_probe_is_the_sgd_of_the_equations[features-16]",
        (
            "eval: the probe has no momentum",
            "momentum * v + g + weight_decay * p",
            "g + weight_decay * p",
        ),
        (
            "eval: the probe's rate falls an epoch late",
            "jnp.sum(milestones <= epoch)",
            "jnp.sum(milestones < epoch)",
        ),
        (
            "eval: the probe takes rows in order",
            "bits = jax.random.bits(key, rows.shape, jnp.uint32)",
            "bits = jnp.zeros(rows.shape, jnp.uint32)",
            "test_evals.py::test_epochs_of_a_probe_are_shuffled_anew",
        ),
    ),
    *fault.of(
        "evals/decay.py",
        "test_decay.py::test_measures_are_those_of_loops",
        (
            "decay: pairs of an image with itself overlap",
            "(cosines.sum() - np.trace(cosines)) / (count",
            "cosines.sum() / (count",
        ),
        (
            "decay: an image of several tasks is another beside itself",
            "np.concatenate(view[: task + 1])[once]",
            "np.concatenate(view[: task + 1])",
            "test_decay.py::test_an_image_of_several_tasks_counts_once",
        ),
        (
            "decay: opposite features overlap, too",
            "others is None else others).T, 0)",
            "others is None else others).T, -1)",
        ),
        (
            "decay: agreement of clusters is not corrected for chance",
            "return max((same - chance) / (1 - chance), 0.0)",
            "return same",
        ),
        (
            "decay: clusters that all fall into have a nan",
            "if chance >= 1:",
            "if chance > 2:",
            "test_decay.py::test_measures_at_known_points",
        ),
        (
            "decay: centres stay the rows that they began as",
            "centres = np.where(some, unit(sums), centres)",
            "centres = np.where(some, centres, centres)",
            "test_decay.py::test_centres_are_means_of_their_rows_and_find_groups",
        ),
        (
            "decay: tasks to come are met",
            "view[: task + 1]",
            "view[: task + 2]",
            "test_decay.py::test_the_evaluator_measures_tasks_apart_and_those_met[1]",
        ),
        (
            "decay: empty slots are stored images",
            "np.flatnonzero(filled)",
            "np.arange(len(filled))",
            "test_decay.py::test_the_evaluator_measures_tasks_apart_and_those_met[1]",
        ),
    ),
    *fault.of(
        "evals/collapse.py",
        "test_collapse.py::test_measures_at_points_known_by_hand",
        (
            "eval: the spread is not that of unit rows",
            "unit = x / np.maximum(length, 1e-12)",
            "unit = x",
        ),
        (
            "eval: RankMe squares the singular values",
            "p = values / values.sum() + _EPS",
            "p = values**2 / (values**2).sum() + _EPS",
        ),
        (
            "eval: collapse forgets the first evaluation",
            "references[when] = scalars",
            'references["at first"] = scalars',
            "test_collapse.py::test_it_warns_where_a_measure_falls",
        ),
        (
            "eval: collapse compares with the first evaluation alone",
            "references[when] = scalars",
            "references.setdefault(when, scalars)",
            "test_collapse.py::test_it_warns_where_a_measure_falls",
        ),
        (
            "eval: collapse compares a run with another",
            "if steps and step <= steps[-1]:",
            "if False:",
            "test_collapse.py::test_it_warns_where_a_measure_falls",
        ),
    ),
    *fault.of(
        "evals/predict.py",
        "test_evals.py::test_predictions_of_rows_of_no_task_count_only_if_asked",
        (
            "eval: predictions of all tasks are judged by default",
            "met_only: bool = True",
            "met_only: bool = False",
        ),
        (
            "eval: met_only is ignored",
            "(task if met_only else none)",
            "task",
        ),
        (
            "eval: a class that is left out makes a prediction void",
            "return jnp.isfinite(scores).any(axis=1).all() & ~wrong.any()",
            "return jnp.isfinite(scores).all()",
            "test_evals.py"
            "::test_a_class_at_minus_infinity_is_left_out_and_no_mistake[-inf]",
        ),
        (
            "eval: predictions of nan are judged",
            "return jnp.isfinite(scores).any(axis=1).all() & ~wrong.any()",
            "return jnp.isfinite(scores).any(axis=1).all()",
            "test_evals.py"
            "::test_a_class_at_minus_infinity_is_left_out_and_no_mistake[inf]",
        ),
        (
            "eval: rows of no task are never judged",
            "(task if met_only else none)",
            "(task if met_only else none - 1)",
        ),
        (
            "eval: met_only leaves out the task just finished",
            "unjudged = met_only & (np.arange(len(row)) > task)",
            "unjudged = met_only & (np.arange(len(row)) >= task)",
        ),
        (
            "eval: met_only shows tasks to come",
            "unjudged = met_only & (np.arange(len(row)) > task)",
            "unjudged = np.zeros(len(row), bool)",
        ),
    ),
    *fault.of(
        "evals/objective.py",
        "test_evals.py"
        "::test_the_objective_is_the_mean_over_batches_of_the_tasks_so_far",
        (
            "eval: the objective is that of the last task's rows",
            "for met in parts.stream.tasks[: task + 1]",
            "for met in parts.stream.tasks[task : task + 1]",
        ),
        (
            "eval: the objective has one key for all batches",
            "jax.random.fold_in(jax.random.wrap_key_data(seed), i)",
            "jax.random.fold_in(jax.random.wrap_key_data(seed), 0)",
        ),
    ),
    *fault.of(
        "report/convergence.py",
        "test_speedup.py::test_the_target_may_be_a_share_of_what_was_gained",
        (
            "eval: a gain may be below zero in a target",
            "max(gain(baseline, frozen), 0.0)",
            "gain(baseline, frozen)",
        ),
        (
            "eval: a tolerance is a share of the frozen encoder's loss",
            "return level(frozen) - level(baseline)",
            "return level(frozen)",
        ),
        (
            "eval: a constant encoder has the loss of one row less",
            'return math.log(judge.get("batch_size", default))',
            'return math.log(judge.get("batch_size", default) - 1)',
            "test_speedup.py::test_losses_steps_and_rates_of_each_row",
        ),
        (
            "eval: rows agree on an epoch whatever the seed",
            "shared.setdefault((seed, run.best",
            "shared.setdefault((0, run.best",
            "test_speedup.py::test_losses_steps_and_rates_of_each_row",
        ),
        (
            "eval: a difference is the other way round",
            "both[0] - both[1] for both",
            "both[1] - both[0] for both",
            "test_speedup.py::test_differences_are_seed_by_seed",
        ),
        (
            "eval: the last epochs are the first ones",
            "np.mean(values[-TAIL:])",
            "np.mean(values[:TAIL])",
            "test_speedup.py::test_differences_are_seed_by_seed",
        ),
    ),
    *fault.of(
        "metrics.py",
        "test_metrics.py",
        (
            "eval: forgetting never is negative",
            "(_best(matrix[:-1]) - matrix[-1])[:-1]",
            "(_best(matrix) - matrix[-1])[:-1]",
        ),
        (
            "eval: stability may be negative",
            "best = np.maximum(_best(matrix[:-1]), matrix[-1])",
            "best = _best(matrix[:-1])",
        ),
        (
            "eval: plasticity counts the diagonal",
            "gain[j, j + 1 :]",
            "gain[j, j:]",
        ),
        (
            "eval: the accuracy after a task counts tasks to come",
            "_mean(row[: t + 1])",
            "_mean(row)",
        ),
        (
            "eval: a class is compared with itself",
            "others = jnp.sum(means, axis=0) - means",
            "others = jnp.sum(means, axis=0)",
        ),
    ),
    *fault.of(
        "evals/logistic.py",
        "test_logistic.py::test_a_fit_is_where_the_slope_of_its_objective_is_zero",
        (
            "logistic: features keep their scale",
            "scale = np.where(scale > 0, scale, 1)",
            "scale = np.ones_like(scale)",
        ),
        (
            "logistic: the solver has as few digits as the features",
            "features = np.asarray(features, np.float64)",
            "features = np.asarray(features)",
        ),
        (
            "logistic: the smaller the penalty, the larger the weights",
            "C=penalty, max_iter",
            "C=1 / penalty, max_iter",
            "test_logistic.py::test_a_fit_is_where_the_slope_of_its_objective_is_zero",
        ),
        (
            "logistic: a class without train rows may be predicted",
            "np.full((len(rows), num_classes), -np.inf, np.float32)",
            "np.zeros((len(rows), num_classes), np.float32)",
            "test_logistic.py::test_a_fit_is_where_the_slope_of_its_objective_is_zero",
        ),
        slow=True,
    ),
]
