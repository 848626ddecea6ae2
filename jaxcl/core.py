"""The types that every method, evaluator and the training loop share."""

import difflib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcl.errors import Refused

# image u8[B,H,W,C] (or u8[B,V,H,W,C], V crops already cut), label i32[B],
# index i32[B]; axis 0 of every leaf is the example. In place of image there may be
# graph, a data.stream.graph_arrays.Graphs; then index is -1 where a slot is empty.
Batch = dict[str, jax.Array]
PyTree = Any


class TrainState(flax.struct.PyTreeNode):
    """All that changes while training, and therefore all that is saved.

    `key` never changes: a step's randomness is `step_key(state)`.
    """

    key: jax.Array  # threefry key of the run
    # i32[], batches trained on since the run began. On each the optimizer may step more
    # than once, see `Replay.updates`; its own count is in `opt_state`.
    step: jax.Array
    task: jax.Array  # i32[], number of the present task, from 0
    task_start: jax.Array  # i32[], value of `step` when the task began
    task_steps: jax.Array  # i32[], how many batches the task trains on
    params: PyTree  # f32, what the optimiser moves
    stats: PyTree  # f32, running statistics of batch norm
    opt_state: PyTree
    extra: PyTree  # the method's own NamedTuple


class Replay(NamedTuple):
    """How online methods store and replay the stream: config.replay."""

    capacity: int  # slots of the memory
    policy: str = "reservoir"  # see memory.policies.look_up
    size: int | None = None  # rows drawn per update; None: as many as come in
    updates: int = 1  # optimizer steps on each incoming batch, which is one `step`
    flops: float | None = None  # budget for each image, from which `updates` came
    augment: str = "none"  # which rows: "none", "replay" or "all"
    sharded: bool = False  # the memory is split over the devices
    measure: tuple[str, ...] = ()  # "drift", "gradients", see methods/online/probe.py
    statistics: str = "running"  # or "memory", see methods/online/statistics.py


class Teacher(NamedTuple):
    """A frozen encoder of another training: config.teacher."""

    # (weights, views f32[N,H,W,C] as `Parts.augment` makes them) -> f32[N, D]
    embed: Callable
    weights: PyTree  # params and stats, on the host
    width: int  # D
    channels: int  # of its images


class Parts(NamedTuple):
    """The parts that a config builds for every method."""

    encoder: Any  # flax.linen module: (images, *, train, groups) -> f32[B, D]
    augment: Callable  # (key, u8[B,H,W,C] or u8[B,V,H,W,C]) -> f32[B,V,H,W,C]
    tx: optax.GradientTransformationExtraArgs  # gives a direction, see optim.py
    lr: Callable  # (progress f32[] in [0, 1), task i32[]) -> learning rate f32[]
    num_classes: int
    schedule_with_peak: Callable | None = None  # peak -> `lr` with another peak
    # u8[B,H,W,C] -> f32[B,H,W,C], as in evaluation
    eval_transform: Callable | None = None
    replay: Replay | None = None  # for methods that replay, see methods/online/step.py
    num_tasks: int = 1  # of the stream
    batch_size: int = 0  # global
    train_rows: int = 0  # of the train split
    # The encoder has weights of an earlier training: it can teach in the first task.
    starts_pretrained: bool = False
    # (key, u8[B,H,W,C]) -> f32[B,L,h,w,C], local crops of the same images
    local: Callable | None = None
    teacher: Teacher | None = None  # for methods that learn from another encoder


class Method(NamedTuple):
    """A training method: pure functions over one TrainState.

    `begin_task`, `end_task`, `source` run on the host between steps;
    `source` may read only values that no step of the task changes, since a resumed task
    calls it again.
    """

    init: Callable  # (key, batch) -> TrainState
    step: Callable  # (state, batch) -> (state, metrics: dict of f32[])
    embed: Callable  # (state, normalised images f32[B,H,W,C]) -> f32[B, D]
    predict: Callable | None = None  # (state, images) -> logits f32[B, C]
    begin_task: Callable = lambda state, task: state
    end_task: Callable = lambda state, task: state
    source: Callable = lambda state, task: task.train
    eval_state: Callable = lambda state: state
    supervised: bool = False  # its steps read labels: every train row needs one
    replays: bool = False  # it reads `Parts.replay`, which is config.replay
    # state -> memory.buffer.Buffer of "image" u8, "label" i32, "task" i32 and others,
    # or of "index" i32, rows of the train split, and "label"
    memory: Callable | None = None
    # Its steps also want batch["labelled"] = {"image", "label", "index"}, as many rows
    # again, of the whole train split: of all classes, those of later tasks too.
    labelled: bool = False
    # Arrays that its steps read as batch["constants"]; none changes or is saved
    constants: PyTree = None
    # task -> P, how many batches its steps take side by side. With P > 1 leaves of a
    # batch are [P, B, ...]; an order gives P B rows a step, place P i + p for part p.
    batches_per_step: Callable = lambda task: 1
    # (state, key, batch) -> f32[], the loss that it would lower were all data at hand
    objective: Callable | None = None
    # state -> i32[K], rows of the train split that the present task replayed, -1: none
    replayed: Callable | None = None
    # (state, normalised images) -> f32[B, Z], what the loss compares, in eval mode
    project: Callable | None = None
    plotted_metrics: tuple[str, ...] = ()  # metrics of its steps, a picture each
    # (option, value) of its `make` where a task is trained alone, for FT_i
    single_task_options: tuple[tuple[str, Any], ...] = ()
    drops_branches: bool = False  # gives its encoder a key, for encoder.drop_path
    takes_local: bool = False  # reads `Parts.local`, config.augment.local
    takes_graphs: bool = False  # reads batch["graph"], too
    # What `embed` reads: the encoder; with a head on it; or a network that `eval_state`
    # fits at each evaluation and that is dropped
    embeds: Literal["encoder", "encoder and head", "fit"] = "encoder"


class EvalParts(NamedTuple):
    """The parts that a config builds for every evaluator.

    An evaluator is a module of jaxcl.evals with `make(parts, *, ...)`, which
    returns a function (state, number of the task just finished) -> Result, or an
    `Evaluator`. It reads the state through `embed`, `project`, `predict`, `memory`,
    `replayed` alone and never changes it.
    """

    embed: Callable  # (state, normalised images) -> f32[B, D], eval mode
    stream: Any  # data.stream.tasks.Stream
    num_classes: int
    size: int  # pixels of the (square) images that the encoder takes
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None  # shorter side before the centre crop; None: no crop
    seed: int
    mesh: Any  # jax.sharding.Mesh
    workers: int  # threads that decode images; 0: one for each core
    predict: Callable | None = None  # (state, normalised images) -> logits f32[B, C]
    memory: Callable | None = None  # the method's, see `Method.memory`
    replayed: Callable | None = None  # the method's, see `Method.replayed`
    project: Callable | None = None  # the method's, see `Method.project`
    objective: Callable | None = None  # the method's, see `Method.objective`


class Result(NamedTuple):
    """The measurements of one evaluator."""

    rows: dict[str, np.ndarray]  # name -> f64[T] per task, nan if not measured
    scalars: dict[str, float]
    warnings: tuple[str, ...] = ()  # why not to trust it, a sentence each
    # name of a row -> bool[M], whether the prediction of each evaluation row is right
    answers: dict[str, np.ndarray] | None = None


class Evaluator(NamedTuple):
    """An evaluator that runs once, or that draws what it logged."""

    evaluate: Callable  # (state, number of the task just finished) -> Result
    last_only: bool = False  # after the last task, unless its entry says otherwise
    # (rows of metrics.jsonl, folder): draws a picture of them when the run is over
    chart: Callable | None = None

    def __call__(self, state: TrainState, task: int) -> Result:
        """Measure the state."""
        return self.evaluate(state, task)


def new_state(key, params, stats, tx, extra) -> TrainState:
    """Make the state before the first step of the first task."""
    zero = jnp.zeros((), jnp.int32)
    # Each leaf its own buffer: a donated state must not hold an array twice.
    return TrainState(
        key=key,
        step=zero,
        task=zero + 0,
        task_start=zero + 0,
        task_steps=zero + 1,
        params=params,
        stats=stats,
        opt_state=tx.init(params),
        extra=extra,
    )


def step_key(state: TrainState) -> jax.Array:
    """Return the key of the present step; split it once, naming each use."""
    return jax.random.fold_in(state.key, state.step)


def progress(state: TrainState) -> jax.Array:
    """Return the share of the present task that is done, f32[] in [0, 1)."""
    return (state.step - state.task_start) / state.task_steps


def rate(parts: Parts, state: TrainState) -> jax.Array:
    """Return the learning rate of the present step, f32[]."""
    return parts.lr(progress(state), state.task)


def apply_gradients(state: TrainState, grads, tx, lr, shares=None) -> TrainState:
    """Move `params` by `-lr * direction` and add 1 to `step`.

    Args:
      state: the state before.
      grads: pytree like `params`.
      tx: `Parts.tx`, which turns them into a direction.
      lr: f32[], learning rate.
      shares: name of an entry of `params` -> factor of its learning rate.
    """
    direction, opt_state = tx.update(grads, state.opt_state, state.params, lr=lr)
    for name, share in (shares or {}).items():
        scaled = jax.tree.map(lambda d, share=share: share * d, direction[name])
        direction = direction | {name: scaled}
    params = jax.tree.map(lambda p, d: p - lr * d, state.params, direction)
    return state.replace(params=params, opt_state=opt_state, step=state.step + 1)


def descend(parts: Parts, state: TrainState, loss, shares=None):
    """Take one step down a loss.

    Args:
      loss: params -> (f32[], anything).
      shares: factors of the learning rate, as in `apply_gradients`.

    Returns:
      the state with new parameters, the loss's second output, and the metrics {"loss",
      "lr", "grad_norm"}.
    """
    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    lr = rate(parts, state)
    metrics = {"loss": value, "lr": lr, "grad_norm": optax.tree.norm(grads)}
    return apply_gradients(state, grads, parts.tx, lr, shares), aux, metrics


def copy(tree: PyTree) -> PyTree:
    """Copy the arrays into new buffers, so that both trees can be donated."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Return the array, cast to float32 if its numbers are narrower."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def l2_normalize(x, *, eps=1e-12):
    """Return rows of unit length, x / max(|x|, eps).

    A row of zeros stays zero and receives a zero gradient, where x / |x| would
    give nan and x / eps a gradient of 1e12.

    Args:
      x: f32[..., D]; bfloat16 is cast to float32.
      eps: smallest length that is divided by.

    Returns:
      f32[..., D].
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    squared = jnp.sum(x * x, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.maximum(squared, eps**2))
    return x * jnp.where(squared > 0, inverse, 0.0)


def split_views(*arrays: jax.Array) -> list[jax.Array]:
    """Split arrays f32[B,2,D] by view: the first one's views, then the second one's."""
    return [x[:, view] for x in arrays for view in (0, 1)]


def masked_mean(rows: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Compute the mean over the rows that exist.

    Args:
      rows: f32[N], finite.
      mask: bool or f32[N] of zeros and ones, or weights of any size, at least 0; None
        for all.

    Returns:
      f32[], 0 if the mask is empty.
    """
    if mask is None:
        return jnp.mean(rows)
    chex.assert_equal_shape([rows, mask])
    mask = mask.astype(rows.dtype)
    total = jnp.sum(mask)
    return jnp.sum(rows * mask) / jnp.where(total > 0, total, 1)


def dot(a, b):
    """Return the inner products of the rows of `a` and `b`.

    Args:
      a: f32[..., N, D].
      b: f32[..., M, D].

    Returns:
      f32[..., N, M].
    """
    # One bfloat16 pass, a TPU's default, is too coarse to be divided by a
    # temperature; HIGH is three passes there and TF32 on a GPU.
    return jnp.einsum(
        "...nd,...md->...nm",
        a,
        b,
        precision=jax.lax.Precision.HIGH,
        preferred_element_type=a.dtype,
    )


def check_images(images: jax.Array) -> None:
    """Refuse images that are not of four axes."""
    if images.ndim != 4:
        raise Refused(
            "images.shape", images.shape, "must be [B, H, W, C], with C = 1 for gray"
        )


def check_views(views: jax.Array, count: int, method: str) -> None:
    """Refuse views [B,V,...] with a number V that the method does not take."""
    if views.shape[1] != count:
        raise Refused(f"config.augment.views={views.shape[1]}: {method} takes {count}")


def check_choice(field: str, value, allowed) -> None:
    """Refuse a value that is not one of `allowed`, naming the nearest of them."""
    if value in allowed:
        return
    names = [] if value is None else [str(a) for a in allowed]
    matches = difflib.get_close_matches(str(value), names, n=2)
    hint = f"; did you mean {' or '.join(matches)}?" if matches else ""
    raise Refused(field, value, f"allowed are {', '.join(map(str, allowed))}{hint}")
