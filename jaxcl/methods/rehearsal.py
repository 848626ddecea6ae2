"""What CCLIS and Co2L share: rows of earlier tasks among the batches of later ones.

The memory names rows of the train split; they are mixed into the batches of the next
task by `source`, so that a step sees one batch like any other. When a task ends the
rows to keep are chosen anew, of the memory and of the task, class by class: where a
class comes again (domains, slices of the data) its rows of both compete alike, so that
few of the earlier tasks stay.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, sharding
from jaxcl.data import stream
from jaxcl.memory import buffer, selection
from jaxcl.nets import chain, mlp

_SELECT = 0xCC115  # keeps the selection's randomness apart from that of the next step


class Memory(NamedTuple):
    """Rows of the train split, those that exist first."""

    row: jax.Array  # i32[K], -1 where there is none
    label: jax.Array  # i32[K]
    weight: jax.Array  # f32[K], chance of the row in a draw of one from its class's
    # pool; 0 where the draw is uniform and weights nothing


class Extra(NamedTuple):
    """What a rehearsing method keeps beside the network that learns."""

    memory: Memory  # what the present task replays; after its end, what the next will
    replayed: Memory  # what the task that was trained last replayed
    taught: jax.Array  # bool[C], classes of earlier tasks, which the teacher has met
    current: jax.Array  # bool[C], classes of the present task
    count: jax.Array  # i32[C], rows that the present task has of each
    teacher: core.PyTree  # f32, all parameters, as the last task left them
    teacher_stats: core.PyTree  # f32

    @property
    def seen(self) -> jax.Array:
        """Classes met so far, bool[C]."""
        return self.taught | self.current

    @property
    def old(self) -> jax.Array:
        """Classes of earlier tasks that the present one has not, bool[C]."""
        return self.taught & ~self.current


class Network(NamedTuple):
    """Encoder and projector, and perhaps a prototype for each class."""

    encoder: Any
    projector: Any
    num_classes: int
    prototypes: bool

    def init(self, key, images):
        """Parameters and running statistics; prototypes as PyTorch's linear layer."""
        k_nets, k_prototypes = jax.random.split(key)
        params, stats = chain.init(self._nets(), k_nets, images)
        if self.prototypes:
            shape = self.num_classes, self.projector.features[-1]
            bound = shape[1] ** -0.5
            params["prototypes"] = jax.random.uniform(
                k_prototypes, shape, minval=-bound, maxval=bound
            )
        return params, stats

    def _nets(self):
        return {"encoder": self.encoder, "projector": self.projector}

    def __call__(self, params, stats, images, *, train: bool):
        """Unit rows f32[N,D], and the statistics after this pass."""
        rows, stats = chain.apply(self._nets(), params, stats, images, train=train)
        return core.l2_normalize(rows), stats

    def embed(self, state, images):
        """Features of the encoder, in evaluation mode, f32[N,D]."""
        nets = {"encoder": self.encoder}
        return chain.apply(nets, state.params, state.stats, images, train=False)[0]


def network(parts, *, hidden_dim: int, output_dim: int, prototypes: bool) -> Network:
    """The network of a method, its widths checked."""
    for name, value in (("hidden_dim", hidden_dim), ("output_dim", output_dim)):
        if value < 1:
            raise ValueError(f"config.method.{name}={value}: must be at least 1")
    projector = mlp.MLP((hidden_dim, output_dim), dtype=parts.encoder.dtype)
    return Network(parts.encoder, projector, parts.num_classes, prototypes)


def together(train: stream.Source, stored) -> stream.Source:
    """Stored rows and those of the task, shuffled as one."""
    return train._replace(rows=np.concatenate([stored, train.rows]))


def stratified(train: stream.Source, stored, *, share: float | None) -> stream.Source:
    """The same number of stored rows in every batch.

    An epoch is one pass over the task; stored rows come pass after pass, each shuffled
    anew, as many as the batches need.

    Args:
      share: of a batch that is stored rows; None: theirs of all rows. At least one row
        of a batch is not a stored one and, of two or more, at least one is. Where a
        batch takes more than there are, some come twice in it.
    """
    order = functools.partial(_stratified, stored=len(stored), share=share)
    return together(train, stored)._replace(order=order)


def _stratified(rng, rows, batch_size, *, stored, share):
    share = stored / len(rows) if share is None else share
    old = min(max(round(share * batch_size), 1), batch_size - 1)
    new = batch_size - old
    fresh = rng.permutation(rows[stored:])
    steps = len(fresh) // new
    passes = -(-steps * old // stored)
    again = [rng.permutation(rows[:stored]) for _ in range(passes)]
    parts = np.concatenate(again or [rows[:0]])[: steps * old], fresh[: steps * new]
    return np.hstack([part.reshape(steps, -1) for part in parts])


def teach(net: Network, state, images, *, train: bool):
    """The teacher's unit rows f32[N,D]; zeros in the first task, at no cost."""

    def rows():
        teacher = state.extra.teacher, state.extra.teacher_stats
        return net(*teacher, images, train=train)[0]

    absent = jnp.zeros((len(images), net.projector.features[-1]))
    return jax.lax.cond(state.task == 0, lambda: absent, rows)


def weights(extra: Extra, batch):
    """Chance of each row in a draw of one from its class's pool, f32[B].

    A stored row has the memory's; every row of the present task one over its class's.
    """
    same = batch["index"][:, None] == extra.memory.row
    stored = jnp.sum(jnp.where(same, extra.memory.weight, 0), axis=1)
    fresh = 1 / jnp.maximum(extra.count[batch["label"]], 1)
    return jnp.where(jnp.any(same, axis=1), stored, fresh)


def method(
    parts: core.Parts,
    net: Network,
    step: Callable,
    *,
    memory_size: int,
    mixed: Callable,
    score: Callable | None = None,
) -> core.Method:
    """A method from its step.

    Args:
      step: (state, batch) -> (state, metrics).
      memory_size: rows to keep.
      mixed: (stream.Source of the task, rows stored i32[M]) -> stream.Source, M >= 1.
      score: (state, key, images u8[N,H,W,C], label, mask) -> f32[N], the weights to
        choose by, that sum to 1 within each class; None: uniformly.

    Raises:
      ValueError: `memory_size` is below 1.
    """
    if memory_size < 1:
        raise ValueError(f"config.method.memory_size={memory_size}: must be at least 1")
    choose = jax.jit(functools.partial(_chosen, memory_size, score))

    def init(key, batch):
        k_state, k_net, k_augment = jax.random.split(key, 3)
        images = parts.augment(k_augment, batch["image"][:1])[:, 0]
        params, stats = net.init(k_net, images)
        blank = jnp.zeros((parts.num_classes,), bool)
        extra = Extra(
            _empty(memory_size),
            _empty(memory_size),
            blank,
            blank | False,
            jnp.zeros((parts.num_classes,), jnp.int32),
            core.copy(params),
            core.copy(stats),
        )
        return core.new_state(k_state, params, stats, parts.tx, extra)

    def begin_task(state, task):
        if score is not None:
            _images(task.train.examples)  # or there is an end without a memory
        label = task.train.examples.label[task.train.rows]
        count = np.bincount(label, minlength=parts.num_classes).astype(np.int32)
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

    def source(state, task):
        stored = sharding.fetch(state.extra.memory.row)
        stored = stored[stored >= 0]
        return mixed(task.train, stored) if len(stored) else task.train

    def end_task(state, task):
        stored = sharding.fetch(state.extra.memory.row)
        rows = np.concatenate([stored, task.train.rows]).astype(np.int32)
        label = np.where(rows < 0, 0, task.train.examples.label[rows])
        images = None
        if score is not None:
            images = _images(task.train.examples)[np.maximum(rows, 0)]
        memory = choose(state, images, rows, label)
        return state.replace(extra=state.extra._replace(memory=memory))

    return core.Method(
        init=init,
        step=step,
        embed=net.embed,
        begin_task=begin_task,
        end_task=end_task,
        source=source,
        supervised=True,
        replayed=lambda state: state.extra.replayed.row,
        memory=_stored,
    )


def _stored(state) -> buffer.Buffer:
    """The memory as evaluators read it."""
    held = state.extra.memory
    items, there = {"index": held.row, "label": held.label}, held.row >= 0
    return buffer.Buffer(items, there, jnp.sum(there, dtype=jnp.int32))


def _images(examples):
    if examples.images is None:
        raise ValueError(
            "config.method: scores all images of a task, which must fit in memory: "
            "give config.data a size, or take a smaller set"
        )
    return examples.images


def _empty(size: int) -> Memory:
    nothing = jnp.full((size,), -1, jnp.int32)
    return Memory(nothing, nothing + 0, jnp.zeros((size,)))


def _chosen(size, score, state, images, rows, label) -> Memory:
    """The memory for the next task, chosen among `rows`, at least `size`, -1: none.

    Those that stay come first, then those of the task, in the order that they have.
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
    drawn = selection.choose(k_draw, label, mask, quota, weights)
    if weights is None:
        weights = jnp.zeros(rows.shape)
    first = jnp.argsort(~drawn, stable=True)[:size]
    there = drawn[first]
    return Memory(
        jnp.where(there, rows[first], -1),
        jnp.where(there, label[first], -1),
        jnp.where(there, weights[first], 0),
    )
