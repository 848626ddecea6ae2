"""Weighted k-nearest neighbours on frozen features.

Sources: Wu et al. (CVPR 2018), cosine similarity with weights exp(similarity /
temperature); and the online kNN of CaSSLe's code (Fini et al., CVPR 2022), with weights
1 / (Euclidean distance + 1e-5). Neighbours are exact; on equal votes the class with the
smaller number wins.

Departure: 20 rows vote by default; Wu et al. have 200.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, schema, sharding
from jaxcl.data import stream
from jaxcl.evals import embedding

_EXACT = jax.lax.Precision.HIGHEST  # TF32 would swap neighbours


def count_votes(
    queries: jax.Array,
    bank: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    *,
    num_classes: int,
    k: int = 20,
    temperature: float = 0.07,
    distance: str = "cosine",
) -> jax.Array:
    """Sum the weights of the k nearest rows of a bank for each class.

    Args:
      queries: f32[B, D].
      bank: f32[N, D], N >= k.
      labels: i32[N].
      mask: bool[B, N] or bool[N], bank rows that may vote (for each query); if they
        are fewer than k, all of them vote.
      num_classes: C.
      k: number of rows that vote.
      temperature: divisor of the cosines, which are then the logarithms of the weights.
      distance: rule, "cosine", or "euclidean" with weights 1 / distance.

    Returns:
      f32[B, num_classes].
    """
    if distance == "cosine":
        queries, bank = embedding.unit_rows(queries), embedding.unit_rows(bank)
        scores = jnp.dot(queries, bank.T, precision=_EXACT)
    else:
        # |q|^2 is left out, since it is the same for all neighbours of a query.
        scores = 2.0 * jnp.dot(queries, bank.T, precision=_EXACT)
        scores = scores - jnp.sum(bank**2, axis=1)
    scores, nearest = jax.lax.top_k(jnp.where(mask, scores, -jnp.inf), k)
    if distance == "cosine":
        weights = jnp.exp(scores / temperature)
    else:
        # Distances do not come from the scores: |q|^2 + |b|^2 - 2 q.b of near rows
        # loses all digits.
        gap = jnp.linalg.norm(queries[:, None] - bank[nearest], axis=-1)
        weights = jnp.where(jnp.isfinite(scores), 1.0 / (gap + 1e-5), 0.0)
    # Not a scatter, whose order of summation varies from run to run on GPUs.
    chosen = jax.nn.one_hot(labels[nearest], num_classes)
    return jnp.einsum("bk,bkc->bc", weights, chosen, precision=_EXACT)


def _make_grader(parts, groups, batch_size, options, *, others: bool) -> Callable:
    """Build (test features, bank, bank mask) -> whether each guess is right.

    The result is bool[1, M], or bool[2, M] where tasks are classes or domains: with
    neighbours from the whole bank, and from the row's own task. With `others` the bank
    is the test features, and no row is a neighbour of itself.
    """
    stream_, mesh = parts.stream, parts.mesh
    count = stream.count_rows(stream_.evaluation)
    batch_size = embedding.padded_size(parts, min(batch_size, count))
    steps = -(-count // batch_size)

    def in_batches(values):
        return np.resize(values, steps * batch_size).reshape(steps, batch_size)

    examples = stream_.evaluation if others else stream_.dataset.train
    bank_task = groups.test_task if others else groups.train_task
    itself = np.arange(count) if others else np.full(count, -1)
    arrays = (
        examples.label,
        bank_task,
        in_batches(groups.test_task),
        in_batches(itself.astype(np.int32)),
    )
    labels, bank_task, test_task, itself = sharding.replicate(arrays, mesh)
    truth = stream_.evaluation.label
    replicated, split_rows = sharding.replicated(mesh), sharding.split_sharding(mesh)

    def grade_queries(features, bank, mask, labels, bank_task, test_task, itself):
        # Centring keeps distances but reduces rounding errors, large far from 0.
        if options["distance"] == "euclidean":
            features, bank = features - bank.mean(axis=0), bank - bank.mean(axis=0)
        padded = jnp.pad(features, ((0, steps * batch_size - count), (0, 0)))

        def classify(queries, tasks, itself):
            rows = queries, tasks, itself
            queries, tasks, itself = jax.lax.with_sharding_constraint(rows, split_rows)
            guesses = []
            usable = mask & (jnp.arange(count) != itself[:, None]) if others else mask
            masks = [usable, usable & (bank_task == tasks[:, None])]
            for allowed in masks if groups.aware else masks[:1]:
                weights = count_votes(queries, bank, labels, allowed, **options)
                # Without a neighbour the guess is -1, which is never right.
                guess = jnp.where(weights.max(axis=1) > 0, weights.argmax(axis=1), -1)
                guesses.append(jax.lax.with_sharding_constraint(guess, replicated))
            return jnp.stack(guesses, axis=1)

        blocks = padded.reshape(steps, batch_size, -1)
        blocks = blocks, test_task, itself
        guesses = jax.lax.map(lambda block: classify(*block), blocks)
        return guesses.reshape(steps * batch_size, -1)[:count]

    program = jax.jit(grade_queries, out_shardings=replicated)

    def grade_all(features, bank, mask):
        guesses = program(features, bank, mask, labels, bank_task, test_task, itself)
        return sharding.copy_to_host(guesses).T == truth

    return grade_all


@schema.checked("config.evaluators.knn")
def make(
    parts: core.EvalParts,
    *,
    k: schema.Count = 20,
    # exp(1 / temperature) must be finite in f32.
    temperature: Annotated[float, schema.Range(above=0.012)] = 0.07,
    distance: Literal["cosine", "euclidean"] = "cosine",
    train_on: Literal["all", "seen", "labelled", "evaluation"] = "all",
    batch_size: schema.Count = 256,
) -> Callable:
    """Build the evaluator by weighted k-nearest neighbours.

    Args:
      parts: the parts of every evaluator.
      k: number of neighbours that vote.
      temperature: temperature of the cosine weights.
      distance: rule, "cosine" or "euclidean".
      train_on: rows that vote: "all" train rows, rows of the tasks "seen" so far, the
        "labelled" ones, or the other rows of the "evaluation" split, for which no train
        labels are needed.
      batch_size: test rows at a time; memory grows with batch_size x train rows.

    Returns:
      evaluate(state, task) -> core.Result. Rows (accuracy per task, nan without test
      rows): "class_incremental", with neighbours from all train rows; "task_aware" if
      tasks are disjoint classes, "domain_aware" if they are domains, with neighbours
      from the test row's own task, nan for later tasks under "seen". Scalars:
      "accuracy" on all evaluation rows.

    Raises:
      Refused: an option out of its range; no evaluation split; no labels.
    """
    others, dataset = train_on == "evaluation", parts.stream.dataset
    if not others:
        embedding.check_learnable(parts.stream)
    judged_alone = train_on in ("labelled", "evaluation")
    judged = (parts.stream.evaluation,)
    embedding.check_labels(parts, "knn", *(judged if judged_alone else ()))
    bank = parts.stream.evaluation if others else dataset.train
    votes_at_all = np.ones(stream.count_rows(bank), bool)
    if train_on == "labelled":
        votes_at_all = bank.label >= 0
    most = int(votes_at_all.sum()) - others
    allowed = f"from 1 to the {most} rows of train_on={train_on!r}"
    embedding.require("knn.k", k, k <= most, allowed)
    groups = embedding.assign_tasks(parts)
    embed_test = embedding.make_embedder(parts, parts.stream.evaluation)
    embed_bank = embed_test if others else embedding.make_embedder(parts, bank)
    options = {
        "num_classes": parts.num_classes,
        "k": k,
        "temperature": temperature,
        "distance": distance,
    }
    grade = _make_grader(parts, groups, batch_size, options, others=others)

    def evaluate(state, task: int) -> core.Result:
        mask = votes_at_all
        if not judged_alone:
            mask = embedding.train_mask(groups, train_on, task)
        features = embed_test(state)
        bank = features if others else embed_bank(state)
        answers = grade(features, bank, mask)
        right, warnings = answers.astype(float), ()
        if not embedding.all_finite(features, bank):
            right, warnings = right + np.nan, (embedding.NOT_FINITE,)
        rows = {"class_incremental": embedding.average_per_task(parts, right[0])}
        if groups.aware:
            aware = embedding.average_per_task(parts, right[1])
            if train_on == "seen":
                aware = embedding.blank_unseen(aware, train_on, task)
            rows[groups.aware] = aware
        scalars = {"accuracy": float(right[0].mean())}
        right_rows = None if warnings else {"class_incremental": answers[0]}
        return core.Result(rows, scalars, warnings, right_rows)

    return evaluate
