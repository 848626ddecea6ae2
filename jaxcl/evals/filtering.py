"""Measure the classes that DUEL's policy keeps of a stream, with a fixed network.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024, Figs. 9(a) and 10: a memory of M rows is filled
from the stream (1M), and then offered rows until it has seen five times as many (5M).
For comparison, a second memory keeps the last M rows of the same stream. The authors
released no code.

Results go to metrics.jsonl, which a resumed run continues; `draw_last` reads them
there. `evals/memory.py` measures a memory while its method trains.

Departures: the paper does not say which network embeds the rows, or after how many
steps. Here it is the network at the time of the evaluation, in evaluation mode, on
images without augmentation. The memory starts empty and is not the method's own.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxcl import core, metrics, plots, schema, sharding
from jaxcl.evals import embedding
from jaxcl.memory import duel


@schema.checked("config.evaluators.filtering")
@schema.debug(size=32, batch_size=16)
def make(
    parts: core.EvalParts,
    *,
    size: schema.Count = 2048,
    times: schema.Count = 5,
    batch_size: schema.Count = 256,
    score: duel.Score = "affine",
    temperature: schema.Temperature = 0.5,
    features: embedding.Features | None = None,
    newcomer_competes: bool = False,
) -> core.Evaluator:
    """Build the evaluator that fills a memory by DUEL's policy.

    The memory is offered the first `times` x `size` rows of the present task's order,
    from several epochs if one has fewer.

    Args:
      parts: core.EvalParts, with `project` for features="projection".
      size: rows that the memory holds, M.
      times: number of rows offered in all, as a multiple of M.
      batch_size: rows that the policy is offered at a time. With the run's batch size
        they are the rows of the task's first steps, if the method trains on the stream
        alone.
      score: rule, "affine" or "exponential", see `memory.duel.similarity`.
      temperature: tau of the exponential score.
      features: unit rows that the policy compares: the "projection" (as the loss does)
        or the encoder's "embedding"; None: "projection" if the method has one.
      newcomer_competes: whether Algorithm 1 replaces Algorithm 4, see
        `memory.duel.select`.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars after i x `size` rows,
      i = 1, ..., `times`: "entropy_i" and "fifo_entropy_i", class entropies in nats of
      DUEL's memory and of the last `size` rows; "class_c_i", the share of class c in
      DUEL's memory. Besides "stream_entropy" and "stream_class_c", of all offered rows.

    Raises:
      Refused: an option out of its range; a method without a projection; rows
        without a label.
    """
    if features is None:
        features = "embedding" if parts.project is None else "projection"
    chosen = embedding.select_features(parts, "filtering", features)

    def embed_unit(state, images):
        return embedding.unit_rows(chosen.embed(state, images))

    reads = chosen._replace(embed=embed_unit)
    train = parts.stream.dataset.train  # no other split is read
    embedding.check_labels(parts, "filtering", train)
    # Placed once, and only when a task is evaluated.
    place = functools.cache(functools.partial(embedding.place_images, parts, train))
    count = size * times
    offered_in = functools.cache(
        functools.partial(_read_offered, reads, place, count, batch_size)
    )
    offer = _make_offer(
        parts, score=score, temperature=temperature, newcomer_competes=newcomer_competes
    )

    def evaluate(state, task: int) -> core.Result:
        labels, order, embed = offered_in(task)
        features = embed(state)
        stored = sharding.replicate(np.full(size, -1, np.int32), parts.mesh)
        scalars = _class_scalars(
            parts, "stream_entropy", "stream_class_{}", labels[order]
        )
        for i in range(times):
            offered = order[i * size : (i + 1) * size]
            for first in range(0, size, batch_size):
                batch = offered[first : first + batch_size]
                stored = offer(features, stored, sharding.replicate(batch, parts.mesh))
            stored_labels, n = labels[sharding.copy_to_host(stored)], i + 1
            names = f"entropy_{n}", f"class_{{}}_{n}"
            scalars |= _class_scalars(parts, *names, stored_labels)
            scalars[f"fifo_entropy_{n}"] = _class_entropy(parts, labels[offered])
        return core.Result({}, scalars)

    return core.Evaluator(evaluate, last_only=True, chart=draw_last)


def _read_offered(reads, place, count, batch_size, task):
    """Read the first `count` rows that a task draws.

    Returns:
      labels i32[n] of the distinct rows; i32[count], their order in the stream; and
      state -> f32[n, D], their features.
    """
    train = reads.stream.dataset.train
    drawn = reads.stream.tasks[task]
    rows = embedding.read_first_rows(reads, drawn, count, batch_size)
    distinct, order = np.unique(rows, return_inverse=True)
    embed = embedding.make_embedder(reads, train, rows=distinct, images=place())
    return train.label[distinct], order.astype(np.int32), embed


def _make_offer(parts, **policy) -> Callable:
    """Build (features f32[N, Z], stored i32[M], batch i32[B]) -> the new `stored`.

    Stored and offered rows are given as row numbers of `features`; -1: an empty slot.
    """

    def offer_batch(features, stored, batch):
        rows = features[stored], features[batch]
        keep = duel.select(*rows, filled=stored >= 0, **policy)
        return stored.at[duel.incoming_slots(keep, len(stored))].set(batch, mode="drop")

    return jax.jit(offer_batch, out_shardings=sharding.replicated(parts.mesh))


def _class_entropy(parts, labels) -> float:
    return float(metrics.class_entropy(jnp.asarray(labels), parts.num_classes))


def _class_scalars(parts, entropy, share, labels) -> dict[str, float]:
    """Return the entropy of labels, and the share of each class, as scalars."""
    shares = np.bincount(labels, minlength=parts.num_classes) / len(labels)
    by_class = {share.format(c): float(x) for c, x in enumerate(shares)}
    return {entropy: _class_entropy(parts, labels), **by_class}


def draw_last(rows: Sequence[dict], folder: epath.Path) -> None:
    """Draw the last evaluation: KEY_classes.png and KEY_entropy.png.

    Args:
      rows: rows of metrics.jsonl, see `log_file.read_rows`.
      folder: an existing folder, which gets the pictures.
    """
    pattern = r"(entropy|fifo_entropy|class)_(\d+)(?:_(\d+))?"
    for key, by_step in embedding.find_scalars(rows, pattern).items():
        measured = [x for x in by_step.values() if ("fifo_entropy", 1, None) in x]
        if not measured:  # of another evaluator
            continue
        last = measured[-1]
        times = sorted(i for kind, i, _ in last if kind == "fifo_entropy")
        classes = sorted(c for kind, c, i in last if (kind, i) == ("class", 1))
        shares = np.array([[last["class", c, i] for c in classes] for i in times])
        path = folder / f"{key.replace('/', '_')}_classes.png"
        plots.class_shares(times, shares, path, title=key, time="{}M")
        curves = {}
        for name, kind in (
            ("DUEL", "entropy"),
            ("first in, first out", "fifo_entropy"),
        ):
            curves[name] = times, [last[kind, i, None] for i in times]
        path = folder / f"{key.replace('/', '_')}_entropy.png"
        plots.per_step(
            curves,
            path,
            times[-1:],
            title=key,
            ylabel="class entropy (nats)",
            xlabel="rows offered, in sizes M of the memory",
        )
