"""What the evaluators share: embeddings of a split, and which task a row is of."""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, sharding
from jaxcl.augment import images as augment_images
from jaxcl.data import graph_batches, prefetch, stream


def require(field: str, value, good: bool, allowed: str) -> None:
    """Refuse an option of an evaluator: `config.evaluators.{field}`."""
    if not good:
        raise ValueError(f"config.evaluators.{field}={value!r}: must be {allowed}")


def check_labels(parts, name: str) -> None:
    """Refuse a stream that has nothing to judge by.

    Raises:
      ValueError: no evaluation split, or rows without a label, naming the dataset.
    """
    dataset = parts.stream.dataset
    if parts.stream.evaluation is None:
        raise ValueError(
            f"config.evaluators.{name}: needs evaluation rows, but the scenario has "
            f"none; set config.scenario.evaluation to 'test' or 'validation', or "
            "take the evaluator out"
        )
    for split, examples in (
        ("train", dataset.train),
        ("evaluation", parts.stream.evaluation),
    ):
        unknown = int((examples.label < 0).sum())
        if unknown:
            raise ValueError(
                f"config.evaluators.{name}: needs a label for every row, but "
                f"{unknown} of {stream.size(examples)} {split} rows of "
                f"{dataset.name} have none (-1); use a labelled dataset, or take "
                "the evaluator out"
            )


def reading(parts, name: str, features: str):
    """EvalParts whose `embed` gives "embedding" or "projection".

    Raises:
      ValueError: another name; a method without a projection.
    """
    field, choices = f"config.evaluators.{name}.features", ("embedding", "projection")
    core.check_choice(field, features, choices)
    if features == "embedding":
        return parts
    if parts.project is None:
        raise ValueError(
            f"{field}='projection': needs a method with a projection, as duel and "
            "two_view have; choose 'embedding'"
        )
    return parts._replace(embed=parts.project)


class Split(NamedTuple):
    """To which task each row belongs, and what a judge may be told of it."""

    # "task_aware": tasks are disjoint classes. "domain_aware": each is a domain.
    # None: a row's task tells nothing of its label (joint, data-incremental).
    aware: str | None
    train_task: np.ndarray  # i32[N], -1 where no task has the row
    test_task: np.ndarray  # i32[M]
    classes: np.ndarray  # bool[T, C], classes that occur in each task


def split(parts) -> Split:
    """Read off the tasks what kind of scenario they are.

    A train row is of the task that has its class where classes are disjoint, else
    of the first task that trains on it.
    """
    tasks = parts.stream.tasks
    classes = np.zeros((len(tasks), parts.num_classes), bool)
    for t, task in enumerate(tasks):
        classes[t, task.classes] = True
    domains = [task.domain for task in tasks]
    aware = None
    if len(tasks) > 1 and min(domains) >= 0 and len(set(domains)) == len(tasks):
        aware = "domain_aware"
    elif len(tasks) > 1 and classes.sum(axis=0).max() == 1:
        aware = "task_aware"
    train = parts.stream.dataset.train
    train_task = np.full(stream.size(train), -1, np.int32)
    test_task = np.full(stream.size(parts.stream.evaluation), -1, np.int32)
    for t, task in reversed(list(enumerate(tasks))):
        by_class = aware == "task_aware"
        rows = classes[t][train.label] if by_class else task.train.rows
        train_task[rows] = t
        test_task[task.test] = t
    return Split(aware, train_task, test_task, classes)


def train_mask(groups: Split, train_on: str, task: int) -> np.ndarray:
    """Which train rows a probe may use after `task`: all, or of tasks met, bool[N]."""
    if train_on == "all":
        return np.ones(len(groups.train_task), bool)
    return (groups.train_task >= 0) & (groups.train_task <= task)


def stratified(examples: stream.Examples, *, fraction: float, seed: int) -> np.ndarray:
    """A share of the rows of every class, bool[N].

    Of a class (of each domain, where there are several) with n rows
    max(1, round(fraction n)) are taken, a half rounded to even. They come first in an
    order of its rows that `seed`, the class and the domain alone decide, so that the
    rows of a smaller fraction are among those of a larger one.
    """
    label, domain = examples.label, examples.domain
    chosen = np.zeros(len(label), bool)
    order = np.lexsort((domain, label))
    edges = (np.diff(label[order]) != 0) | (np.diff(domain[order]) != 0)
    for rows in np.split(order, np.flatnonzero(edges) + 1):
        rng = np.random.default_rng([seed, int(label[rows[0]]), int(domain[rows[0]])])
        count = max(1, round(fraction * len(rows)))
        chosen[rng.permutation(rows)[:count]] = True
    return chosen


def per_task(parts, correct: np.ndarray) -> np.ndarray:
    """Share of right answers on each task's test rows, f64[T], nan without rows.

    Args:
      correct: bool[M], one entry per evaluation row.
    """
    tests = [task.test for task in parts.stream.tasks]
    return np.array([correct[r].mean() if len(r) else np.nan for r in tests])


def verdicts(parts, groups: Split, examples: stream.Examples, *, rows=None):
    """Which of the predicted classes are right, judged on the device.

    Args:
      rows: i32[n], which rows of the split; by default all.

    Returns:
      scores f32[n, C], on the device -> dict of bool[n]: "class_incremental", over
      all classes; where tasks are disjoint classes also "task_aware", over those of
      the row's task, all classes for a row of no task.
    """
    rows = slice(None) if rows is None else rows
    allowed = np.concatenate([groups.classes, np.ones((1, parts.num_classes), bool)])
    given = sharding.replicate(
        (examples.label[rows], allowed, groups.test_task[rows]), parts.mesh
    )

    def judge(scores, labels, allowed, task):
        right = {"class_incremental": scores.argmax(axis=1) == labels}
        if groups.aware == "task_aware":
            told = jnp.where(allowed[task], scores, -jnp.inf)
            right["task_aware"] = told.argmax(axis=1) == labels
        return right

    program = jax.jit(judge, out_shardings=sharding.replicated(parts.mesh))
    return lambda scores: sharding.fetch(program(scores, *given))


def blank_unseen(row: np.ndarray, train_on: str, task: int) -> np.ndarray:
    """Nan for later tasks unless train_on="all": nothing was learnt of them."""
    if train_on != "all":
        row = np.where(np.arange(len(row)) <= task, row, np.nan)
    return row


def place(parts, examples: stream.Examples):
    """The images of a set in memory on every device, None for one that streams."""
    if examples.images is None:
        return None
    return sharding.replicate(examples.images, parts.mesh)


def unit(features):
    """Rows of length 1, f32[n, D]; zero rows stay zero."""
    length = jnp.linalg.norm(features, axis=-1, keepdims=True)
    return features / jnp.maximum(length, 1e-12)


def constraint(parts, batch_size: int):
    """The sharding of a batch: its rows split, or whole where they do not divide."""
    if batch_size % parts.mesh.size:
        return sharding.replicated(parts.mesh)
    return sharding.split(parts.mesh)


def make(parts, examples: stream.Examples, *, rows=None, batch_size=256, images=None):
    """Embeddings of a split, in evaluation mode, without augmentation.

    A set in memory is embedded by one program that loops over batches; one that
    streams is decoded by workers and embedded batch by batch.

    Args:
      rows: i32[n], which rows; by default all.
      batch_size: rounded up to a multiple of the devices.
      images: `place(parts, examples)`, where the caller holds it already.

    Returns:
      embed(state, first=n) -> f32[n, D] on the device, whole on each. Batches
      without any of the first `first` rows are left out, as zeros; all values share
      one program.
    """
    rows = np.arange(stream.size(examples)) if rows is None else np.asarray(rows)
    count, devices = len(rows), parts.mesh.size
    batch_size = -(-min(batch_size, count) // devices) * devices
    if examples.graphs is not None:
        return _of_graphs(parts, examples, rows, batch_size)
    if examples.images is None:
        return _streamed(parts, examples, rows, batch_size)
    images = place(parts, examples) if images is None else images
    steps = -(-count // batch_size)
    padded = np.resize(rows, steps * batch_size).astype(np.int32)
    padded = sharding.replicate(padded.reshape(steps, batch_size), parts.mesh)
    view = _eval_view(parts, parts.resize)
    whole, split_rows = sharding.replicated(parts.mesh), sharding.split(parts.mesh)

    def embed_all(state, images, padded, wanted):
        def embed(at):
            at = jax.lax.with_sharding_constraint(at, split_rows)
            features = parts.embed(state, view(images[at]))
            return jax.lax.with_sharding_constraint(features, whole)

        one = jax.eval_shape(embed, padded[0])
        features = jax.lax.fori_loop(
            0,
            wanted,
            lambda i, found: jax.lax.dynamic_update_index_in_dim(
                found, embed(padded[i]), i, axis=0
            ),
            jnp.zeros((steps, *one.shape), one.dtype),
        )
        return features.reshape(steps * batch_size, -1)[:count]

    program = jax.jit(embed_all, out_shardings=whole)

    def run(state, first=None):
        wanted = steps if first is None else -(-first // batch_size)
        return program(state, images, padded, np.int32(wanted))

    return run


def _eval_view(parts, resize):
    return augment_images.make_eval(
        size=parts.size, resize=resize, mean=parts.mean, std=parts.std
    )


def _of_graphs(parts, examples, rows, batch_size):
    """`make` for graphs, whose batches stay on the devices, each of which has all."""
    batches = graph_batches.evaluation_batches(examples, rows, batch_size)
    placed = [sharding.replicate(batch["graph"], parts.mesh) for batch in batches]
    embed = jax.jit(parts.embed, out_shardings=sharding.replicated(parts.mesh))

    def embed_all(state, first=None):
        wanted = len(placed) if first is None else -(-first // batch_size)
        found = [embed(state, graphs) for graphs in placed[: max(wanted, 1)]]
        found = jnp.concatenate(found)[: len(rows)]
        return jnp.pad(found, ((0, len(rows) - len(found)), (0, 0)))

    return embed_all


def _streamed(parts, examples, rows, batch_size):
    """`make` for sets that are read row by row."""
    crop = prefetch.CenterCrop(
        size=parts.size,
        resize=parts.size if parts.resize is None else parts.resize,
        decoder=parts.stream.dataset.decoder or "auto",
    )
    view, whole = _eval_view(parts, None), sharding.replicated(parts.mesh)
    embed = jax.jit(
        lambda state, images: parts.embed(state, view(images)), out_shardings=whole
    )

    def embed_all(state, first=None):
        # One row at least, for the shape of the rest.
        mine = rows if first is None else rows[: max(first, 1)]
        batches = prefetch.evaluation_batches(
            examples,
            mine,
            batch_size,
            crop=crop,
            workers=parts.workers,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        placed = prefetch.ahead(
            batches, lambda batch: sharding.shard(batch["image"], parts.mesh)
        )
        found = []
        with contextlib.closing(placed):
            for images in placed:
                found.append(embed(state, images))
                # Or images pile up on a device that is slower than the workers.
                jax.block_until_ready(found[-2:-1])
        found = np.concatenate(sharding.fetch(found))[: len(mine)]
        if len(mine) < len(rows):
            found = np.pad(found, ((0, len(rows) - len(mine)), (0, 0)))
        return sharding.replicate(found, parts.mesh)

    return embed_all
