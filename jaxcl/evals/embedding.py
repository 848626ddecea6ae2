"""Common parts of evaluators: embed rows, and find the task and class of a row."""

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, numerics, sharding
from jaxcl.data import stream
from jaxcl.data.augment import images as augment_images
from jaxcl.data.feed import graph_batches, prefetch
from jaxcl.data.images import crops
from jaxcl.data.stream import splits
from jaxcl.errors import Refused

# Features of the encoder, or the projections that the loss compares.
Features = Literal["embedding", "projection"]


# The warning of an evaluator that measured nothing for this reason.
NOT_FINITE = "features are not finite, so that there is no result"


@jax.jit
def _finite(arrays):
    return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()


def all_finite(*arrays: jax.Array) -> bool:
    """Tell whether all numbers of some arrays are finite, on host or device."""
    return bool(sharding.copy_to_host(_finite(arrays)))


def require(field: str, value: Any, is_valid: bool, allowed: str) -> None:
    """Raise an error about `config.evaluators.{field}` unless it is valid."""
    if not is_valid:
        raise Refused(f"config.evaluators.{field}", value, f"must be {allowed}")


def refuse_unless(
    condition: Any, name: str, need: str, advice: str = "take the evaluator out"
) -> None:
    """Refuse a method or data that lacks what `config.evaluators.{name}` needs."""
    if not condition:
        raise Refused(f"config.evaluators.{name}: needs {need}; {advice}")


def check_labels(
    parts: core.EvalParts, name: str, *needed: stream.Examples | None
) -> None:
    """Refuse a split that is missing, or that has rows without a label.

    Args:
      parts: the parts of every evaluator.
      name: the evaluator's name in the config.
      needed: splits to check; by default the train split and the evaluation rows.

    Raises:
      Refused: no evaluation rows, or rows without a label, naming the dataset.
    """
    dataset = parts.stream.dataset
    for examples in needed or (dataset.train, parts.stream.evaluation):
        advice = "set config.scenario.evaluation to 'test', or take the evaluator out"
        refuse_unless(examples is not None, name, "evaluation rows", advice)
        unknown, count = int((examples.label < 0).sum()), stream.count_rows(examples)
        kind = "train" if examples is dataset.train else "evaluation"
        need = f"a label for every row: {unknown} of {count} {kind} rows of "
        refuse_unless(not unknown, name, f"{need}{dataset.name} have none (-1)")


def select_features(parts: core.EvalParts, name: str, features: str) -> core.EvalParts:
    """Return EvalParts whose `embed` gives the `features` that an option names.

    Raises:
      Refused: a method without a projection.
    """
    if features == "embedding":
        return parts
    name, need = f"{name}.features={features!r}", "a method with a projection"
    refuse_unless(parts.project is not None, name, need, "choose 'embedding'")
    return parts._replace(embed=parts.project)


class TaskMembership(NamedTuple):
    """The task of each row, and the classes or domain of each task."""

    # "task_aware": tasks are disjoint classes. "domain_aware": each task is a domain.
    # None: tasks are neither classes nor domains (joint, data-incremental).
    aware: str | None
    train_task: np.ndarray  # i32[N], -1 where no task has the row
    test_task: np.ndarray  # i32[M]
    classes: np.ndarray  # bool[T, C], classes that occur in each task


def assign_tasks(parts: core.EvalParts) -> TaskMembership:
    """Find the kind of the scenario from its tasks, and sort the rows by task.

    If tasks are disjoint classes, a train row belongs to the task of its class;
    otherwise to the first task that trains on it.
    """
    tasks = parts.stream.tasks
    classes = np.zeros((len(tasks), parts.num_classes), bool)
    for t, task in enumerate(tasks):
        classes[t, task.classes] = True
    domains = [task.domain for task in tasks]
    aware = None
    places = np.concatenate([task.test for task in tasks])
    is_disjoint = len(np.unique(places)) == len(places)  # no row is of several tasks
    if len(tasks) > 1 and min(domains) >= 0 and len(set(domains)) == len(tasks):
        aware = "domain_aware" if is_disjoint else None
    elif len(tasks) > 1 and classes.sum(axis=0).max() == 1:
        aware = "task_aware"
    train = parts.stream.dataset.train
    train_task = np.full(stream.count_rows(train), -1, np.int32)
    test_task = np.full(stream.count_rows(parts.stream.evaluation), -1, np.int32)
    for t, task in reversed(list(enumerate(tasks))):
        by_class = aware == "task_aware"
        rows = classes[t][train.label] if by_class else task.train.rows
        train_task[rows] = t
        test_task[task.test] = t
    return TaskMembership(aware, train_task, test_task, classes)


def check_learnable(tasks: stream.Stream) -> None:
    """Refuse evaluation images of classes that no train image has; for probes.

    A probe learns only the classes of the train images.
    """
    unseen = splits.unknown_classes(tasks.dataset, tasks.evaluation)
    if unseen is not None and unseen[0] == stream.count_rows(tasks.evaluation):
        raise Refused(f"config.data: {unseen[1]}: nothing could be measured")


def train_mask(groups: TaskMembership, train_on: str, task: int) -> np.ndarray:
    """Mark the train rows that a probe may use after `task`, bool[N]."""
    if train_on == "all":
        return np.ones(len(groups.train_task), bool)
    return (groups.train_task >= 0) & (groups.train_task <= task)


def draw_stratified(
    examples: stream.Examples, *, fraction: float, seed: int
) -> np.ndarray:
    """Draw a share of the rows of every class and domain, bool[N].

    It takes max(1, round(fraction n)) of n rows; a half is rounded to even. They are
    the first rows of an order that depends on `seed`, the class and the domain alone,
    so a larger fraction contains all rows of a smaller one.
    """
    chosen = np.zeros(len(examples.label), bool)
    for label, domain, rows in splits.group_rows(examples):
        rng = np.random.default_rng([seed, label, domain])
        count = max(1, round(fraction * len(rows)))
        chosen[rng.permutation(rows)[:count]] = True
    return chosen


def average_per_task(parts: core.EvalParts, correct: np.ndarray) -> np.ndarray:
    """Average the correctness over each task's test rows, f64[T]; nan without rows.

    Args:
      correct: bool[M], one entry per evaluation row.
    """
    tests = [task.test for task in parts.stream.tasks]
    return np.array([correct[r].mean() if len(r) else np.nan for r in tests])


def average_rows(parts: core.EvalParts, right: Mapping) -> dict[str, np.ndarray]:
    """Average each array of correct predictions by task, see `average_per_task`."""
    return {name: average_per_task(parts, row) for name, row in right.items()}


def make_grader(
    parts: core.EvalParts,
    groups: TaskMembership,
    examples: stream.Examples,
    *,
    rows: np.ndarray | None = None,
) -> Callable:
    """Make the function that marks correct predictions on the device.

    Args:
      rows: i32[n], rows of the split; by default all.

    Returns:
      scores f32[n, C], on the device -> dict of bool[n]. "class_incremental": the
      prediction is among all classes. "task_aware", where tasks are disjoint classes:
      it is among the classes of the row's task; a row of no task has all classes.
    """
    rows = slice(None) if rows is None else rows
    # Row -1, for rows of no task, allows every class.
    allowed = np.concatenate([groups.classes, np.ones((1, parts.num_classes), bool)])
    truth = examples.label[rows], allowed, groups.test_task[rows]
    truth = sharding.replicate(truth, parts.mesh)

    def grade_rows(scores, labels, allowed, task):
        right = {"class_incremental": scores.argmax(axis=1) == labels}
        if groups.aware == "task_aware":
            of_task = jnp.where(allowed[task], scores, -jnp.inf)
            right["task_aware"] = of_task.argmax(axis=1) == labels
        return right

    program = jax.jit(grade_rows, out_shardings=sharding.replicated(parts.mesh))
    return lambda scores: sharding.copy_to_host(program(scores, *truth))


def blank_unseen(row: np.ndarray, train_on: str, task: int) -> np.ndarray:
    """Set later tasks to nan unless train_on="all": no probe trained on them."""
    if train_on != "all":
        row = np.where(np.arange(len(row)) <= task, row, np.nan)
    return row


def place_images(parts: core.EvalParts, examples: stream.Examples) -> jax.Array | None:
    """Put the images of a set in memory on every device; None if the set streams."""
    if examples.images is None:
        return None
    return sharding.replicate(examples.images, parts.mesh)


def find_scalars(rows: Sequence[dict], pattern: str) -> dict[str, dict]:
    """Find scalars in rows of metrics.jsonl whose names match a pattern.

    Args:
      pattern: regular expression for the name after the entry's key, with groups.

    Returns:
      Nested dicts: key of the evaluator's entry -> step -> the pattern's groups (digits
      as int) -> value.
    """
    scalars: dict[str, dict] = {}
    for row in rows:
        for name, value in row.get("eval", {}).items():
            key, _, scalar = name.rpartition("/")
            if match := re.fullmatch(pattern, scalar):
                groups = (int(x) if x and x.isdigit() else x for x in match.groups())
                at_step = scalars.setdefault(key, {}).setdefault(row["step"], {})
                at_step[tuple(groups)] = value
    return scalars


def unit_rows(features: jax.Array) -> jax.Array:
    """Scale rows to length 1, f32[n, D]; zero rows stay zero."""
    length = jnp.linalg.norm(features, axis=-1, keepdims=True)
    return features / jnp.maximum(length, 1e-12)


def padded_size(parts: core.EvalParts, batch_size: int) -> int:
    """Round a batch size up to a multiple of the devices."""
    return -(-batch_size // parts.mesh.size) * parts.mesh.size


def make_eval_view(parts: core.EvalParts, *, resize: bool = True) -> Callable:
    """Make the map from u8[B,H,W,C] to normalised f32[B,S,S,C], without augmentation.

    Args:
      resize: whether to resize; False: `make_eval_crop` has cut the images already.
    """
    return augment_images.make_eval(
        size=parts.size,
        resize=parts.resize if resize else None,
        mean=parts.mean,
        std=parts.std,
    )


def make_eval_crop(parts: core.EvalParts) -> crops.CenterCrop:
    """Make the crop that workers cut out of an image that streams."""
    return crops.CenterCrop(
        size=parts.size,
        resize=parts.size if parts.resize is None else parts.resize,
        decoder=parts.stream.dataset.decoder or "auto",
    )


def make_embedder(
    parts: core.EvalParts,
    examples: stream.Examples,
    *,
    rows: np.ndarray | None = None,
    batch_size: int = 256,
    images: jax.Array | None = None,
) -> Callable:
    """Make a function that embeds rows of a split in evaluation mode.

    Args:
      rows: i32[n], rows to embed; by default all.
      batch_size: rows at a time, rounded up to a multiple of the devices.
      images: images on the device, from `place_images`, if the caller has them already.

    Returns:
      embed(state, first=n) -> f32[n, D], whole on every device. Only batches with some
      of the first `first` rows are embedded, one at least; later batches are zeros, and
      no later row of a set that streams is read. Every `first` runs the same program.
      Within `share_passes`, evaluators that embed all rows of a split share one pass.
    """
    size = stream.count_rows(examples)
    rows = np.arange(size) if rows is None else np.asarray(rows)
    batch_size = padded_size(parts, min(batch_size, len(rows)))
    read, batches = _make_reader(parts, examples, rows, batch_size, images)
    steps, replicated = -(-len(rows) // batch_size), sharding.replicated(parts.mesh)
    blank = None  # shape and type of all features, known after the first batch

    def embed(state, batch):
        features = parts.embed(state, read(batch))
        return jax.lax.with_sharding_constraint(features, replicated)

    def write_features(state, batch, features, start):
        batch = embed(state, batch)
        return jax.lax.dynamic_update_slice_in_dim(features, batch, start, axis=0)

    program = jax.jit(write_features, donate_argnums=2, out_shardings=replicated)

    def run_pass(state, first=None):
        nonlocal blank
        count = len(rows) if first is None else max(first, 1)
        features = None
        with contextlib.closing(batches(count)) as placed:
            for i, batch in enumerate(placed):
                if blank is None:
                    blank = jax.eval_shape(embed, state, batch)
                if features is None:
                    shape = steps * batch_size, *blank.shape[1:]
                    features = jnp.zeros(shape, blank.dtype, device=replicated)
                features = program(state, batch, features, np.int32(i * batch_size))
                # Wait, or images pile up on a device that is slower than the workers.
                if examples.streams and i % 4 == 3:
                    jax.block_until_ready(features)
        return features[: len(rows)]

    return _share_pass(parts, examples, rows, run_pass)


def embed_batches(
    parts: core.EvalParts,
    examples: stream.Examples,
    state: core.TrainState,
    *,
    first: int = 0,
    batch_size: int = 256,
) -> Iterator[np.ndarray]:
    """Yield the features of a split from row `first` on, on the host: f32[b, D].

    Args:
      batch_size: rows of a batch, a multiple of the devices; the last has fewer.
    """
    rows = np.arange(first, stream.count_rows(examples))
    read, placed = _make_reader(parts, examples, rows, batch_size, None)
    embed = jax.jit(
        lambda state, x: parts.embed(state, read(x)),
        out_shardings=sharding.replicated(parts.mesh),
    )
    with contextlib.closing(placed(len(rows))) as batches:
        for i, batch in enumerate(batches):
            left = len(rows) - i * batch_size
            yield np.asarray(embed(state, batch), np.float32)[:left]


def _make_reader(
    parts, examples, rows, batch_size, images
) -> tuple[Callable, Callable]:
    """Return two functions: batch -> the encoder's inputs, and count -> batches."""
    mesh = parts.mesh

    def first_of(batches, count):
        return (batch for batch in batches[: -(-count // batch_size)])

    if examples.graphs is not None:  # every device keeps all batches
        all_batches = graph_batches.evaluation_batches(examples, rows, batch_size)
        graphs = [sharding.replicate(batch["graph"], mesh) for batch in all_batches]
        return lambda batch: batch, functools.partial(first_of, graphs)
    if examples.images is None:
        view, crop = make_eval_view(parts, resize=False), make_eval_crop(parts)

        def streamed(count):
            wanted, workers = rows[:count], parts.workers
            share = {"process_index": jax.process_index()}
            share["process_count"] = jax.process_count()
            batches = prefetch.evaluation_batches(
                examples, wanted, batch_size, crop=crop, workers=workers, **share
            )
            return prefetch.run_ahead(
                batches, lambda x: sharding.shard_rows(x["image"], mesh)
            )

        return view, streamed
    view = make_eval_view(parts)
    images = place_images(parts, examples) if images is None else images
    padded = np.resize(rows, (-(-len(rows) // batch_size), batch_size)).astype(np.int32)

    def resident(batch):
        images, rows = batch
        rows = jax.lax.with_sharding_constraint(rows, sharding.split_sharding(mesh))
        return view(images[rows])

    return resident, functools.partial(first_of, [(images, block) for block in padded])


_MOST_SHARED = 2**30  # bytes of features that stay on the devices while others measure
_passes: contextvars.ContextVar[dict | None] = contextvars.ContextVar(
    "_passes", default=None
)


@contextlib.contextmanager
def share_passes() -> Iterator[None]:
    """Let the evaluators in this context share their passes over a split."""
    token = _passes.set({})
    try:
        yield
    finally:
        _passes.reset(token)


def _share_pass(parts, examples, rows, run) -> Callable:
    """Take features from a pass over all rows, if another evaluator has made one."""
    is_full = np.array_equal(rows, np.arange(stream.count_rows(examples)))
    key = id(parts.embed), id(examples)  # `run` keeps both alive

    def embed(state, first=None):
        passes = _passes.get()
        if passes is None or first is not None:
            return run(state, first)
        if passes.get("state") is not state:
            passes.clear()
            passes["state"] = state
        if key in passes:
            return passes[key] if is_full else passes[key][rows]
        features = run(state)
        if is_full and features.nbytes <= _MOST_SHARED:
            passes[key] = features
        return features

    return embed


def read_first_rows(
    parts: core.EvalParts, task: stream.Task, count: int, batch_size: int
) -> np.ndarray:
    """Return the first train rows that a run draws for a task, i32[count]."""
    size = min(batch_size, len(task.train.rows))
    # `count` epochs are always enough; only those in use are computed.
    plan = stream.schedule(
        task.train, seed=parts.seed, task=task.index, epochs=count, batch_size=size
    )
    return np.concatenate([plan[step] for step in range(-(-count // size))])[:count]


def pick_evenly(rows: np.ndarray, most: int) -> np.ndarray:
    """Pick at most `most` of the rows, evenly spaced."""
    return rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)]


def sample_rows(
    parts: core.EvalParts, name: str, max_rows: int, *, least: int = 1
) -> tuple[stream.Examples, np.ndarray]:
    """Choose rows of the evaluation split, or of the train split without one.

    Args:
      name: the evaluator's name in the config.
      max_rows: most rows to choose, evenly spaced.
      least: fewest rows that the evaluator needs.

    Returns:
      The split, and i64[n], at most `max_rows` of its rows.

    Raises:
      Refused: the split has fewer than `least` rows.
    """
    examples = parts.stream.evaluation
    if examples is None:
        examples = parts.stream.dataset.train
    rows = pick_evenly(np.arange(stream.count_rows(examples)), max_rows)
    refuse_unless(
        len(rows) >= least, name, f"{least} rows or more, there are {len(rows)}"
    )
    return examples, rows


def read_images(
    parts: core.EvalParts, examples: stream.Examples, rows: np.ndarray
) -> np.ndarray:
    """Read the images of a few rows, u8[n,H,W,C]; crop those that stream."""
    if examples.images is not None:
        return examples.images[rows]
    batches = prefetch.evaluation_batches(
        examples,
        rows,
        min(len(rows), 64),
        crop=make_eval_crop(parts),
        workers=parts.workers,
    )
    return np.concatenate([batch["image"] for batch in batches])[: len(rows)]


def make_views_embedder(
    parts: core.EvalParts, augment: Callable, count: int, *, batch_size: int = 128
) -> Callable:
    """Make a function that embeds several views of images in evaluation mode.

    The draws depend on the seed and on an image's place alone.

    Args:
      augment: (key, u8[B,H,W,C]) -> f32[B,count,S,S,C], see `augment.images.make`.
      count: number of views.
      batch_size: rows at a time, rounded up to a multiple of the devices.

    Returns:
      (state, images u8[n,H,W,C]) -> embeddings f32[n, D] of each view, on the host.
    """
    batch_size = padded_size(parts, batch_size)
    rows = sharding.split_sharding(parts.mesh)

    def embed(state, images, start):
        images = jax.lax.with_sharding_constraint(images, rows)
        views = augment(
            jax.random.fold_in(numerics.make_key(parts.seed), start), images
        )
        return [parts.embed(state, views[:, view]) for view in range(count)]

    program = jax.jit(embed, out_shardings=sharding.replicated(parts.mesh))

    def run_pass(state, images):
        batches = []
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            batch = np.resize(batch, (batch_size, *images.shape[1:]))
            placed = sharding.replicate((batch, np.int32(start)), parts.mesh)
            batches.append(sharding.copy_to_host(program(state, *placed)))
        views = zip(*batches, strict=True)
        return [np.concatenate(view)[: len(images)] for view in views]

    return run_pass
