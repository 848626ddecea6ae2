"""t-SNE pictures (van der Maaten and Hinton, JMLR 2008): test rows, a memory, a stream.

"memory" is Figure 3 of CCLIS (Li et al., AAAI 2024): which rows a memory holds, and
where they are in the clusters of the train rows. The paper compares two methods, each
with its own t-SNE. Here both panels show one t-SNE, and the second marks random train
rows instead of the stored ones.

"filter" is Figure 5 of DUEL (Choi et al., 2024): representations of all rows, of a
batch and of the memory, for an imbalanced stream. Here the first panel has equally many
rows of each class, all three show one t-SNE, and the present network embeds the
memory's rows, whatever features the method stored.
"""

import os
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

import jax
import numpy as np
from etils import epath

from jaxcl import core, schema, sharding
from jaxcl.data import stream
from jaxcl.evals import features as features_lib
from jaxcl.evals import plots

_FEWEST = 5  # points of a picture
_RANDOM = 0x7A4D  # keeps the draw of random rows apart from the choice of pale ones


def choose(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` drawn rows, each class in proportion to its size (within one row).

    Returns:
      i64[min(count, n)], increasing.
    """
    noise = np.random.default_rng(seed).random(len(labels))
    by_class = np.lexsort((noise, labels))
    count = min(count, len(labels))
    # Every (n / count)-th row of the list, which is sorted by class.
    steps = ((np.arange(count) + 0.5) * len(labels) / count).astype(np.int64)
    return np.sort(by_class[steps])


def balanced(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` drawn rows, evenly over the classes as far as they have rows.

    Returns:
      i64[min(count, n)], increasing.
    """
    noise = np.random.default_rng(seed).random(len(labels))
    by_class = np.lexsort((noise, labels))
    sorted_ = labels[by_class]
    # One row of every class comes before a second row of any class.
    turn = np.arange(len(labels)) - np.searchsorted(sorted_, sorted_)
    chosen = np.lexsort((noise[by_class], turn))[:count]
    return np.sort(by_class[chosen])


def as_many(
    labels: np.ndarray, stored: np.ndarray, seed: int | Sequence[int]
) -> np.ndarray:
    """Draw as many rows of each class as are stored, without replacement.

    Args:
      labels: i32[n], of the rows to draw from.
      stored: i32[m], labels of the stored rows.
      seed: for `numpy.random.default_rng`.

    Returns:
      bool[n]; a class with too few rows has all of them.
    """
    noise = np.random.default_rng(seed).random(len(labels))
    chosen = np.zeros(len(labels), bool)
    for label, count in zip(*np.unique(stored, return_counts=True), strict=True):
        mine = np.flatnonzero(labels == label)
        chosen[mine[np.argsort(noise[mine])[:count]]] = True
    return chosen


@schema.checked("config.evaluators.tsne")
def make(
    parts: core.EvalParts,
    *,
    directory: str | os.PathLike,
    show: Literal["test", "memory", "filter"] = "test",
    max_points: Annotated[int, schema.Range(least=_FEWEST)] = 1000,
    perplexity: schema.Positive = 30.0,
    batch_size: schema.Count = 256,
) -> Callable:
    """Draw a t-SNE after a task; t is the number of the task, from 1.

    Args:
      parts: with `memory` for show="memory" and "filter".
      directory: the folder for the pictures; process 0 makes it if it is missing.
      show: "test", in `tsne_task{t}.png`: rows of the evaluation split.
        "memory", in `memory_tsne_task{t}.png`: train rows of the tasks met, pale. The
        left panel marks the stored rows; the right one marks as many train rows of each
        class, drawn at random among the pale ones.
        "filter", in `filter_tsne_task{t}.png`: equally many evaluation rows of each
        class (train rows without an evaluation split), pale. The left panel marks all
        of them, the middle one the task's first batch, the right one the stored rows;
        the last two titles have the batch's largest class and its share.
        No picture is drawn of an empty memory, or of fewer than 5 points.
      max_points: rows to embed beside the stored ones, each class in proportion, drawn
        by the run's seed; under "test" the same for all tasks. A class with a share s
        of the n train rows has at least floor(s max_points) pale rows, or all if n is
        smaller; if more are stored, the right panel marks all its pale rows.
      perplexity: at most (points - 1) / 3, to which it is lowered.
      batch_size: rows of the batch of "filter". With the batch size of the run, a
        method that trains on the stream alone gets the same rows in the first step of
        the task.

    Returns:
      evaluate(state, task) -> core.Result, which is empty.

    Raises:
      ValueError: an option out of its range; no labels; "test": no evaluation split,
        or fewer than 5 rows in it; "memory" and "filter": a method without a memory.
    """
    kinds = {"test": _test, "memory": _memory, "filter": _filter}
    picture_of = kinds[show](parts, max_points, batch_size)
    prefix = "" if show == "test" else f"{show}_"

    def evaluate(state, task: int) -> core.Result:
        picture = picture_of(state, task)
        if picture is None or len(picture.features) < _FEWEST:
            return core.Result({}, {})
        if not np.isfinite(picture.features).all():
            return core.Result({}, {}, (features_lib.NOT_FINITE,))
        if jax.process_index() == 0:
            folder = epath.Path(directory)
            folder.mkdir(parents=True, exist_ok=True)
            points = project(picture.features, perplexity=perplexity, seed=parts.seed)
            draw = plots.scatter if picture.panels is None else plots.marked
            draw(
                points,
                picture.labels,
                *(picture.panels or ()),
                folder / f"{prefix}tsne_task{task + 1}.png",
                title=picture.title.format(task + 1),
                class_names=parts.stream.dataset.class_names,
            )
        return core.Result({}, {})

    return core.Evaluator(evaluate, last_only=True)


class _Picture(NamedTuple):
    """What a picture shows."""

    features: np.ndarray  # f32[n, D]
    labels: np.ndarray  # i32[n]
    title: str = "t-SNE after task {}"
    # Which points are pale, bool[n], and title of a panel -> those it marks, bool[n].
    panels: tuple[np.ndarray, dict[str, np.ndarray]] | None = None


def _test(parts, max_points, _) -> Callable:
    """Return (state, task) -> the picture of the evaluation split."""
    examples, name = parts.stream.evaluation, parts.stream.dataset.name
    features_lib.check_labels(parts, "tsne", examples)  # no other is drawn
    what = f"at least {_FEWEST} evaluation rows; {name} has {stream.size(examples)}"
    features_lib.need(stream.size(examples) >= _FEWEST, "tsne", what)
    chosen = choose(examples.label, max_points, parts.seed)
    embed = features_lib.make(parts, examples, rows=chosen)
    return lambda state, _: _Picture(
        sharding.fetch(embed(state)), examples.label[chosen]
    )


def _memory(parts, max_points, _) -> Callable:
    """Return (state, task) -> the picture of the memory among the train rows."""
    tasks, train = parts.stream.tasks, parts.stream.dataset.train
    features_lib.check_labels(parts, "tsne", train)  # no other split is read
    embed, stored_rows = features_lib.of_images(parts), _stored(parts, "memory")

    def picture(state, task):
        images, stored = stored_rows(state)
        met = np.unique(np.concatenate([t.train.rows for t in tasks[: task + 1]]))
        rows = met[choose(train.label[met], max_points, parts.seed)]
        if len(stored) == 0:
            return None
        of_rows = embed(state, features_lib.images_of(parts, train, rows))
        labels, none = train.label[rows], np.zeros(len(stored), bool)
        drawn = as_many(labels, stored, [parts.seed, task, _RANDOM])
        pale = np.concatenate([np.ones(len(rows), bool), none])
        marks = {"stored rows": ~pale}
        marks["as many at random"] = np.concatenate([drawn, none])
        return _Picture(
            np.concatenate([of_rows, embed(state, images)]),
            np.concatenate([labels, stored]),
            "t-SNE of train rows (pale) after task {}",
            (pale, marks),
        )

    return picture


def _filter(parts, max_points, batch_size) -> Callable:
    """Return (state, task) -> the picture of all rows, a batch's, and the memory's."""
    embed, stored_rows = features_lib.of_images(parts), _stored(parts, "filter")
    dataset, examples = parts.stream.dataset, parts.stream.evaluation
    examples = dataset.train if examples is None else examples
    features_lib.check_labels(parts, "tsne", dataset.train, examples)
    chosen = balanced(examples.label, max_points, parts.seed)
    embed_data = features_lib.make(parts, examples, rows=chosen)

    def picture(state, task):
        images, stored = stored_rows(state)
        drawn_from = parts.stream.tasks[task]
        size = min(batch_size, len(drawn_from.train.rows))
        batch = features_lib.first_rows(parts, drawn_from, size, size)
        if len(stored) == 0:
            return None
        of_batch = embed(state, features_lib.images_of(parts, dataset.train, batch))
        features = [sharding.fetch(embed_data(state)), of_batch, embed(state, images)]
        labels = [examples.label[chosen], dataset.train.label[batch], stored]
        panel = np.repeat(np.arange(3), [len(x) for x in labels])
        titles = enumerate(_filter_titles(dataset.class_names, labels))
        marks = {title: panel == i for i, title in titles}
        features, labels = np.concatenate(features), np.concatenate(labels)
        return _Picture(features, labels, panels=(panel == 0, marks))

    return picture


def _filter_titles(class_names, labels) -> list[str]:
    """Titles of the panels of "filter", for the labels of the rows in each."""
    _, batch, memory = labels
    largest = np.bincount(batch).argmax()
    titles = ["as many rows of each class"]
    for name, shown in (("a batch", batch), ("the memory", memory)):
        share = (shown == largest).mean()
        titles.append(f"{name}: {100 * share:.0f} % {class_names[largest]}")
    return titles


def _stored(parts, show) -> Callable:
    """Return state -> stored images u8[m,H,W,C] and labels i32[m], on the host.

    A memory without "image" holds rows of the train split in "index".
    """
    what = "a method with a memory of rows, as cclis, duel and er have"
    features_lib.need(parts.memory, f"tsne.show={show!r}", what, "choose 'test'")
    train = parts.stream.dataset.train
    read = features_lib.stored(parts, "image", "index", "label")

    def run(state):
        kept = read(state)
        if "image" not in kept and len(kept["label"]):
            kept["image"] = features_lib.images_of(parts, train, kept["index"])
        return kept.get("image"), kept["label"]

    return run


def project(features: np.ndarray, *, perplexity: float, seed: int) -> np.ndarray:
    """Project finite features f32[n, D] to f32[n, 2]."""
    from sklearn import manifold  # takes a second, and few runs need it

    perplexity = min(perplexity, (len(features) - 1) / 3)
    # Features that have all collapsed to one point have no principal components.
    differ = features.shape[1] > 1 and np.ptp(features, axis=0).any()
    init = "pca" if differ else "random"
    tsne = manifold.TSNE(perplexity=perplexity, init=init, random_state=seed)
    return tsne.fit_transform(features)
