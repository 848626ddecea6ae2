"""Faults of evaluators: which rows they read, what they measure, what they report."""

import jax.numpy as jnp
import numpy as np

from faults import fault
from faults.fault import always, gives, instead, takes


def _itself_among_neighbours(nearest):
    """Shift the list of neighbours by one: the query comes first."""

    def wrong(features, queries, k):
        rows, similarities = nearest(features, queries, k)
        rows = np.concatenate([np.asarray(queries)[:, None], rows[:, :-1]], axis=1)
        return rows, similarities

    return wrong


def _with_pairs_of_itself(value, of):
    """Count each row's pair with itself, whose term is 1."""
    count = len(of["embeddings"])
    pairs = count * (count - 1) / 2
    return jnp.log((jnp.exp(value) * pairs + count) / (pairs + count))


_brute = "test_evals.py::test_neighbours_are_those_of_brute_force"
_measures = "test_collapse.py::test_measures_are_the_equations"

FAULTS = [
    *fault.of(
        "evals.knn.count_votes",
        "test_evals.py::test_votes_weigh_by_distance",
        ("evaluators: kNN has no temperature", takes(temperature=always(1.0))),
        ("evaluators: kNN asks rows that it may not", takes(mask=jnp.ones_like)),
        (
            "evaluators: kNN's distances are always cosines",
            takes(distance=always("cosine")),
            f"{_brute}[class-euclidean]",
        ),
    ),
    *fault.of(
        "evals.embedding.train_mask",
        "test_evals.py::test_probe_of_seen_tasks_knows_only_their_classes",
        ("evaluators: probes train on tasks to come", takes(train_on=always("all"))),
    ),
    *fault.of(
        "evals.embedding.blank_unseen",
        f"{_brute}[class-cosine]",
        ("evaluators: tasks to come have accuracies", takes(train_on=always("all"))),
    ),
    *fault.of(
        "evals.embedding.draw_stratified",
        "test_evals.py::test_a_share_of_the_labels_is_stratified_nested_and_seeded",
        ("evaluators: a share of labels ignores the seed", takes(seed=always(0))),
    ),
    *fault.of(
        "evals.embedding.pick_evenly",
        "test_collapse.py::test_it_measures_rows_evenly_spaced",
        (
            "evaluators: the first rows of a sorted split are read",
            instead(lambda rows, most: rows[:most]),
        ),
    ),
    *fault.of(
        "evals.embedding._share_pass",
        "test_evals.py::test_evaluators_of_one_state_share_their_passes_over_a_split",
        (
            "evaluators: each embeds the split anew",
            instead(lambda parts, examples, rows, run: run),
        ),
    ),
    *fault.of(
        "evals.head.epoch_order",
        "test_evals.py::test_epochs_of_a_probe_are_shuffled_anew",
        (
            "evaluators: a probe takes rows in order",
            instead(lambda key, rows, count: rows),
        ),
    ),
    *fault.of(
        "optim.sgd",
        "test_evals.py::test_probe_is_the_sgd_of_the_equations[features-16]",
        ("evaluators: a probe has no momentum", takes(momentum=always(0.0))),
    ),
    *fault.of(
        "evals.linear.make_evaluator",
        "test_evals.py::test_semi_supervised_probe_trains_on_its_share_alone"
        "[all-features]",
        (
            "evaluators: the semi-supervised probe has all labels",
            takes(settings=lambda settings: settings._replace(fraction=1.0)),
        ),
    ),
    *fault.of(
        "evals.predict.make",
        "test_online_head.py::test_predict_judges_the_rows_of_the_tasks_met[class-False]",
        ("evaluators: met_only is ignored", takes(met_only=always(False))),
    ),
    *fault.of(
        "evals.collapse.embedding_std",
        _measures,
        (
            "evaluators: the spread is not that of unit rows",
            gives(lambda value, of: value * np.linalg.norm(of["embeddings"][0])),
        ),
    ),
    *fault.of(
        "evals.collapse.rankme",
        _measures,
        ("evaluators: RankMe is the entropy", gives(lambda rank: np.log(rank))),
    ),
    *fault.of(
        "evals.uniformity.alignment",
        "test_uniformity.py::test_they_are_their_twins",
        ("evaluators: alignment is no square", gives(jnp.sqrt)),
    ),
    *fault.of(
        "evals.uniformity.uniformity",
        "test_uniformity.py::test_they_are_their_twins",
        ("evaluators: rows are pairs of themselves", gives(_with_pairs_of_itself)),
    ),
    *fault.of(
        "evals.neighbours.find_nearest",
        "test_neighbours.py::test_the_nearest_are_those_of_brute_force",
        ("evaluators: an image is its own neighbour", _itself_among_neighbours),
    ),
]
