"""Common parts of CCLIS and Co2L: rows of earlier tasks among the batches of later
ones.

The memory names rows of the train split. `source` mixes them into the batches of the
next task, so that a step sees one batch like any other. When a task ends, the rows to
keep are chosen again, class by class, from the memory and from the task. If a class
occurs in several tasks (domains, slices), its stored and its new rows compete equally,
so few rows of earlier tasks stay.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, sharding
from jaxcl.data import stream
from jaxcl.errors import Refused
from jaxcl.memory import buffer, selection
from jaxcl.nets import chain, layers, mlp, traits

_SELECT = 0xCC115  # keeps the selection's randomness apart from that of the next step


class Memory(NamedTuple):
    """A memory of rows of the train split; empty places come last."""

    row: jax.Array  # i32[K], -1 where there is none
    label: jax.Array  # i32[K]
    weight: jax.Array  # f32[K], probability that a draw of one row from the pool
    # of its class takes this one, by the last choice


class Extra(NamedTuple):
    """The state of a rehearsal method apart from the trained network."""

    memory: Memory  # what the present task replays; after its end, what the next will
    replayed: Memory  # what the task that was trained last replayed
    taught: jax.Array  # bool[C], classes of earlier tasks, which the teacher knows
    current: jax.Array  # bool[C], classes of the present task
    count: jax.Array  # i32[C], rows of each class in the present task
    teacher: core.PyTree  # f32, all parameters at the end of the last task
    teacher_stats: core.PyTree  # f32

    @property
    def seen(self) -> jax.Array:
        """Mark the classes seen so far, bool[C]."""
        return self.taught | self.current

    @property
    def old(self) -> jax.Array:
        """Mark classes of earlier tasks that are not in the present one, bool[C]."""
        return self.taught & ~self.current


class Network(NamedTuple):
    """An encoder, a projector and, optionally, a prototype for each class."""

    nets: chain.Chain
    num_classes: int
    dim: int  # of the projections
    prototypes: bool

    def init(self, key: jax.Array, images: jax.Array):
        """Make parameters and statistics; prototypes start as a PyTorch Linear."""
        k_nets, k_prototypes = jax.random.split(key)
        params, stats = self.nets.init(k_nets, images)
        if self.prototypes:
            params["prototypes"] = layers.torch_uniform(self.dim)(
                k_prototypes, (self.num_classes, self.dim)
            )
        return params, stats

    def __call__(
        self,
        params: core.PyTree,
        stats: core.PyTree,
        images: jax.Array,
        *,
        train: bool,
    ):
        """Return unit rows f32[N,D], and the statistics after this pass."""
        rows, stats = self.nets(params, stats, images, train=train)
        return core.l2_normalize(rows), stats


def build_network(
    parts: core.Parts, *, hidden_dim: int | None, output_dim: int, prototypes: bool
) -> Network:
    """Build the network of a method; a `hidden_dim` of None is the encoder's width."""
    hidden = hidden_dim or traits.read_traits(parts.encoder).num_features
    if hidden is None:
        raise Refused(
            "config.method.hidden_dim=None: this encoder does not say its "
            "`num_features`; must be a whole number"
        )
    projector = mlp.MLP((hidden, output_dim), dtype=parts.encoder.dtype)
    nets = chain.Chain({"encoder": parts.encoder, "projector": projector})
    return Network(nets, parts.num_classes, output_dim, prototypes)


def mix_rows(train: stream.Source, stored: np.ndarray) -> stream.Source:
    """Shuffle stored rows and rows of the task together.

    Args:
      train: the rows of the task.
      stored: i32[M], rows of the memory.
    """
    return train._replace(rows=np.concatenate([stored, train.rows]))


def stratified(
    train: stream.Source, stored: np.ndarray, *, share: float | None
) -> stream.Source:
    """Put an equal number of stored rows into every batch.

    An epoch is one pass over the task. Stored rows are repeated as often as the batches
    need, and shuffled each time.

    Args:
      train: the rows of the task.
      stored: i32[M], rows of the memory.
      share: share of stored rows in a batch; None: their share of all rows. A batch
        has at least one new row, and a batch of two or more at least one stored row.
        If a batch takes more stored rows than there are, some come twice in it.
    """
    order = functools.partial(_stratified, stored=len(stored), share=share)
    return mix_rows(train, stored)._replace(order=order)


def _stratified(rng, rows, batch_size, *, stored, share):
    share = stored / len(rows) if share is None else share
    num_old = min(max(round(share * batch_size), 1), batch_size - 1)
    num_new = batch_size - num_old
    new = rng.permutation(rows[stored:])
    steps = len(new) // num_new
    passes = -(-steps * num_old // stored)
    old = [rng.permutation(rows[:stored]) for _ in range(passes)]
    old = np.concatenate(old or [rows[:0]])
    groups = old[: steps * num_old], new[: steps * num_new]
    return np.hstack([part.reshape(steps, -1) for part in groups])


def teacher_rows(
    net: Network, state: core.TrainState, images: jax.Array, *, train: bool
) -> jax.Array:
    """Return the teacher's unit rows f32[N,D]; zeros in the first task, at no cost."""

    def project_rows():
        teacher = state.extra.teacher, state.extra.teacher_stats
        return net(*teacher, images, train=train)[0]

    absent = jnp.zeros((len(images), net.dim))
    return jax.lax.cond(state.task == 0, lambda: absent, project_rows)


def weights(extra: Extra, batch: core.Batch) -> jax.Array:
    """Return each row's probability in a draw from its class's pool, f32[B].

    For a stored row it is in the memory. The rows of the present task are drawn
    uniformly: 1 / (rows of the class).
    """
    matches = batch["index"][:, None] == extra.memory.row
    stored = jnp.sum(jnp.where(matches, extra.memory.weight, 0), axis=1)
    fresh = 1 / jnp.maximum(extra.count[batch["label"]], 1)
    return jnp.where(jnp.any(matches, axis=1), stored, fresh)


def make_method(
    parts: core.Parts,
    net: Network,
    step: Callable,
    *,
    memory_size: int,
    mix_sources: Callable,
    score: Callable | None = None,
) -> core.Method:
    """Make a method from its step.

    Args:
      parts: components that the config builds.
      net: the network that `step` trains.
      step: (state, batch) -> (state, metrics).
      memory_size: rows to keep.
      mix_sources: (stream.Source of the task, stored rows i32[M]) -> stream.Source,
        M >= 1.
      score: (state, key, images u8[N,H,W,C], label, mask) -> f32[N], the weights of
        the choice, which sum to 1 within each class; None: the choice is uniform.
    """
    scored = score is not None
    choose = jax.jit(functools.partial(_choose_memory, memory_size, score))
    return core.Method(
        init=functools.partial(_init_state, parts, net, memory_size),
        step=step,
        embed=net.nets.embed,
        begin_task=functools.partial(_begin_task, parts.num_classes, scored),
        end_task=functools.partial(_end_task, choose, scored),
        source=functools.partial(_source, mix_sources),
        supervised=True,
        replayed=lambda state: state.extra.replayed.row,
        memory=_stored_rows,
    )


def _init_state(parts, net, memory_size, key, batch):
    k_state, k_net, k_augment = jax.random.split(key, 3)
    images = parts.augment(k_augment, batch["image"][:1])[:, 0]
    params, stats = net.init(k_net, images)
    extra = Extra(
        memory=_empty_memory(memory_size),
        replayed=_empty_memory(memory_size),
        taught=jnp.zeros((parts.num_classes,), bool),
        current=jnp.zeros((parts.num_classes,), bool),
        count=jnp.zeros((parts.num_classes,), jnp.int32),
        teacher=core.copy(params),
        teacher_stats=core.copy(stats),
    )
    return core.new_state(k_state, params, stats, parts.tx, extra)


def _begin_task(num_classes, scored, state, task):
    if scored:
        _images(task.train.examples)  # fail now, not when the task is over
    label = task.train.examples.label[task.train.rows]
    count = np.bincount(label, minlength=num_classes).astype(np.int32)
    extra = state.extra._replace(
        replayed=core.copy(state.extra.memory),
        current=jnp.asarray(count > 0),
        count=jnp.asarray(count),
        taught=core.copy(state.extra.seen),
    )
    if task.index > 0:
        extra = extra._replace(
            teacher=core.copy(state.params), teacher_stats=core.copy(state.stats)
        )
    return state.replace(extra=extra)


def _source(mix_sources, state, task):
    stored = sharding.copy_to_host(state.extra.memory.row)
    stored = stored[stored >= 0]
    return mix_sources(task.train, stored) if len(stored) else task.train


def _end_task(choose, scored, state, task):
    stored = sharding.copy_to_host(state.extra.memory.row)
    rows = np.concatenate([stored, task.train.rows]).astype(np.int32)
    label = np.where(rows < 0, 0, task.train.examples.label[rows])
    images = None
    if scored:
        images = _images(task.train.examples)[np.maximum(rows, 0)]
    memory = choose(state, images, rows, label)
    return state.replace(extra=state.extra._replace(memory=memory))


def _stored_rows(state) -> buffer.Buffer:
    """Return the memory as evaluators read it."""
    memory = state.extra.memory
    items, filled = {"index": memory.row, "label": memory.label}, memory.row >= 0
    return buffer.Buffer(items, filled, jnp.sum(filled, dtype=jnp.int32))


def _images(examples):
    if examples.images is None:
        raise Refused(
            "config.method: scores all images of a task, which must fit in memory: "
            "give config.data a size, or take a smaller set"
        )
    return examples.images


def _empty_memory(size: int) -> Memory:
    absent = jnp.full((size,), -1, jnp.int32)
    return Memory(absent, absent + 0, jnp.zeros((size,)))


def _choose_memory(size, score, state, images, rows, label) -> Memory:
    """Choose the memory for the next task among `rows`.

    Stored rows that stay come first, then rows of the task; both keep their order.

    Args:
      rows: i32[N], rows of the train split, -1: none; N is at least `size`.
    """
    k_score, k_quota, k_draw = jax.random.split(
        jax.random.fold_in(core.step_key(state), _SELECT), 3
    )
    extra, mask = state.extra, rows >= 0
    weights = None
    if score is not None:
        weights = score(state, k_score, images, label, mask)
    classes = len(extra.seen)
    member = (label == jnp.arange(classes)[:, None]) & mask
    count = jnp.sum(member, axis=1)
    quota = selection.quotas(
        k_quota, count, extra.old, extra.current, size, state.task + 1
    )
    chosen = selection.choose(k_draw, label, mask, quota, weights)
    if weights is None:
        weights = selection.within_class(jnp.ones(rows.shape), label, mask, classes)
    place = jnp.argsort(~chosen, stable=True)[:size]
    filled = chosen[place]
    return Memory(
        jnp.where(filled, rows[place], -1),
        jnp.where(filled, label[place], -1),
        jnp.where(filled, weights[place], 0),
    )
