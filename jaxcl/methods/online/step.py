"""Common parts of online continual methods: a network with one head, a memory, a step.

One pass over a stream in small batches (Caccia et al., "Reducing Representation Drift
in Online Continual Learning", 2021, called P). A method is a function `update`, one
gradient step on the incoming rows and on rows drawn from the memory. `make_method` adds
the rest: updates on a batch, the write to the memory after them, prediction.

Incoming and replayed rows are each normalised by their own batch statistics, as in P's
released code. On a CPU they are a pass each; elsewhere one, where they are as many.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcl import core, sharding
from jaxcl.errors import Refused
from jaxcl.losses import replay as losses
from jaxcl.memory import buffer, policies, sharded
from jaxcl.methods.online import probe, statistics
from jaxcl.methods.online.network import Head, Network, Rows

Form = Literal["paper", "code"]  # of a method, where the released code differs
# Which rows of the memory may be replayed, see `er.make`.
ReplayFrom = Literal["past_tasks", "all", "other_classes"]

# Drawn from a step's key for the labelled batch; no image has this position.
_LABELLED = 2**31 - 1


class Extra(NamedTuple):
    """The state of a method that replays. Methods may add fields after these."""

    memory: buffer.Buffer | None  # "image" u8, "label" i32, "task" i32, and more
    seen: jax.Array  # bool[C], classes met so far
    kept: core.PyTree = {}  # what the memory's policy counts


def _find_policy(parts: core.Parts, write) -> policies.Policy:
    """Find the memory's policy; refuse options that it or the method cannot use."""
    replay = parts.replay
    if write and replay.policy != "reservoir":
        raise Refused(
            f"config.replay.policy={replay.policy!r}: config.method.name stores by a "
            "rule of its own; leave it out ('reservoir')"
        )
    policy = sharded.find_policy(replay)
    if lacking := sorted({*policy.reads} - {"label", "task"}):
        raise Refused(
            f"config.replay.policy={replay.policy!r}: reads {', '.join(lacking)} of "
            "stored rows, of which config.method.name stores none"
        )
    least = policy.least(parts.num_classes, parts.num_tasks)
    if replay.capacity < least:
        raise Refused(
            f"config.replay.capacity={replay.capacity}: policy={replay.policy!r} needs "
            f"{least} or more"
        )
    if replay.sharded and write:
        raise Refused(
            "config.replay.sharded=True: the method writes its memory by a rule of its "
            "own, which needs it whole; must be False"
        )
    return policy


def build_network(parts: core.Parts, head: Head) -> Network:
    """Build the network of a method, with measures if the config asks for them."""
    if "gradients" in parts.replay.measure:
        return probe.Measured(parts.encoder, head, parts.num_classes, parts.num_tasks)
    return Network(parts.encoder, head, parts.num_classes)


def draw_rows(
    parts: core.Parts,
    memory: buffer.Buffer,
    key: jax.Array,
    *,
    size: int | None = None,
    allowed: jax.Array | None = None,
    augment: bool = True,
) -> Rows:
    """Draw rows of the memory without replacement; `augment_drawn` says what fills the
    shape.

    Args:
      parts: components that the config builds.
      memory: memory that is drawn from.
      key: threefry key.
      size: number of rows; None: config.replay.size.
      allowed: bool[capacity], slots that may be drawn; None: all that are filled.
      augment: False: images are never augmented, despite config.replay.augment.
    """
    k_draw, k_augment = jax.random.split(key)
    wanted: Any = size or parts.replay.size  # which the config has settled
    size = min(wanted, memory.capacity)
    weights = None if allowed is None else buffer.log_weights(allowed)
    drawn = sharded.sample(memory, k_draw, size, log_weights=weights)
    return augment_drawn(parts, k_augment, *drawn, augment=augment)


def augment_drawn(
    parts: core.Parts,
    key: jax.Array,
    items: dict,
    mask: jax.Array,
    slots: jax.Array,
    *,
    augment: bool = True,
) -> Rows:
    """Augment rows from the memory; those that exist come first.

    Rows that do not exist repeat those that do, so that batch statistics see no
    blank image. If none exists, all images are blank.
    """
    items = sharded.on_each_device(parts.replay, _repeat_existing, items, mask)
    items, mask, slots = sharding.shard_rows_in_jit((items, mask, slots))
    augmented = augment and parts.replay.augment != "none"
    images = prepare_images(parts, key, items["image"], augmented)
    return Rows(images, items["label"], mask, items["image"], items, slots)


def _repeat_existing(items, mask):
    """Repeat rows that exist in place of those that do not."""
    count = jnp.maximum(jnp.sum(mask), 1)
    rows = jnp.arange(len(mask)) % count
    return jax.tree.map(lambda x: x[rows], items)


def prepare_images(
    parts: core.Parts, key: jax.Array, images: jax.Array, augmented: bool
) -> jax.Array:
    """Augment or only normalise images, u8[R,H,W,C] -> f32[R,H,W,C]."""
    if augmented:
        return parts.augment(key, images)[:, 0]
    return parts.eval_transform(images)


def past_tasks(state: core.TrainState) -> jax.Array:
    """Mark slots whose example came before the present task, bool[capacity]."""
    return state.extra.memory.items["task"] < state.task


def replayable(
    replay_from: ReplayFrom, state: core.TrainState, incoming: Rows
) -> jax.Array:
    """Mark slots that may be replayed, bool[capacity], empty ones included."""
    memory = state.extra.memory
    if replay_from == "past_tasks":
        return past_tasks(state)
    if replay_from == "all":
        return memory.filled
    label = memory.items["label"]
    return ~(label[:, None] == incoming.label).any(axis=1)


def join_rows(incoming: Rows, replayed: Rows) -> Rows:
    """Join incoming and replayed rows to one batch.

    While none can be replayed, incoming rows stand in for them in the batch statistics,
    masked, so that they do not count again.

    Args:
      incoming: B rows, which all exist.
      replayed: R rows, of which none or all images are blank, see `augment_drawn`.

    Returns:
      B + R rows, incoming ones first, without items and slots.
    """
    # A blank image would enter the batch statistics.
    repeated = incoming.images[jnp.arange(len(replayed.mask)) % len(incoming.label)]
    images = jnp.where(jnp.any(replayed.mask), replayed.images, repeated)
    return Rows(
        images=jnp.concatenate([incoming.images, images]),
        label=jnp.concatenate([incoming.label, replayed.label]),
        mask=jnp.concatenate([incoming.mask, replayed.mask]),
        raw=jnp.concatenate([incoming.raw, replayed.raw]),
    )


def stored_rows(state: core.TrainState, batch: core.Batch, **more: jax.Array) -> dict:
    """Return the rows of a batch as the memory stores them, name -> [B, ...].

    Args:
      state: has the number of the task.
      batch: the incoming rows.
      more: further items that the memory stores.
    """
    label = batch["label"]
    task = jnp.broadcast_to(state.task, label.shape)
    return {"image": batch["image"], "label": label, "task": task, **more}


def descend(parts: core.Parts, net: Network, state: core.TrainState, loss: Callable):
    """Take a step down `loss(params) -> (f32[], stats)`, passes of `net`.

    Returns:
      The new state and metrics.
    """
    (value, stats), grads, measured = net.gradient(state, loss)
    state, metrics = apply_grads(parts, state, value, stats, grads)
    return state, metrics | measured


def apply_grads(
    parts: core.Parts,
    state: core.TrainState,
    value: jax.Array,
    stats: core.PyTree,
    grads: core.PyTree,
):
    """Take one step down a gradient that the method has computed."""
    lr = core.rate(parts, state)
    state = core.apply_gradients(state, grads, parts.tx, lr)
    metrics = {"loss": value, "lr": lr, "grad_norm": optax.tree.norm(grads)}
    return state.replace(stats=stats), metrics


def make_method(
    parts: core.Parts,
    net: Network,
    update: Callable,
    *,
    items: Callable = lambda batch: {},
    extra: Callable = lambda base, params, stats: base,
    write: Callable | None = None,
    seen_only: bool = True,
    has_memory: bool = True,
    **hooks,
) -> core.Method:
    """Make a method from its gradient step.

    Args:
      parts: components that the config builds.
      net: the network.
      update: (state, incoming Rows, key) -> (state, metrics, {name: [B, ...]}); the
        last is stored, too, with image, label and task.
      items: (logits f32[C] of one example) -> {name: array}, the shapes of the above.
      extra: (Extra, params, stats) -> the method's own extra, which has the fields of
        Extra.
      write: (state, key, batch, last result of `update`) -> state, called after the
        updates; None: a write under config.replay.policy.
      seen_only: predict among the classes seen so far only; before any, among all.
      has_memory: whether to keep a memory.
      hooks: other fields of core.Method.
    """
    policy = _find_policy(parts, write) if has_memory else None
    if has_memory and write is None:
        write = functools.partial(write_batch, policy)
    online_method = core.Method(
        init=functools.partial(_init_state, parts, net, policy, items, extra),
        step=functools.partial(_step, parts, update, write if has_memory else None),
        embed=net.embed,
        predict=functools.partial(_predict, net, seen_only),
        memory=(lambda state: state.extra.memory) if has_memory else None,
        supervised=True,
        replays=True,
    )._replace(**hooks)
    if parts.replay.statistics == "memory":
        rows = functools.partial(draw_rows, parts, augment=False)
        online_method = statistics.use_memory_statistics(
            online_method, net.pass_replayed, rows
        )
    if parts.replay.measure:
        online_method = probe.add_measures(online_method, parts)
    return online_method


def cross_entropy(
    net: Network,
    params: core.PyTree,
    stats: core.PyTree,
    *row_groups: Rows,
    class_mask: jax.Array | None = None,
):
    """Sum the mean cross-entropies of groups of rows.

    Args:
      net: the network.
      params, stats: parameters and statistics of the network.
      row_groups: groups of rows; of several, the first are the incoming ones, which all
        exist.
      class_mask: bool[C], classes that compete; None: all.

    Returns:
      f32[], where a group without rows counts 0, and the statistics after the passes.
    """
    if len(row_groups) > 1:
        outputs, stats = net.pass_together(params, stats, *row_groups)
    else:
        out, stats = net.pass_replayed(params, stats, *row_groups)
        outputs = (out,)
    value = 0.0
    for out, rows in zip(outputs, row_groups, strict=True):
        value += losses.cross_entropy(
            out.logits, rows.label, class_mask=class_mask, example_mask=rows.mask
        )
    return value, stats


def _init_state(parts, net, policy, items, extra, key, batch):
    """Make the state before the first step; without a policy there is no memory."""
    k_state, k_net = jax.random.split(key)
    params, stats = net.init(k_net, parts.eval_transform(batch["image"][:1]))
    classes, memory, policy_state = parts.num_classes, None, {}
    if policy is not None:
        scalar = jnp.zeros((), jnp.int32)
        example = {"image": batch["image"][0], "label": scalar, "task": scalar}
        example |= items(jnp.zeros((classes,)))
        memory = sharded.create(example, parts.replay)
        policy_state = policy.start(classes, parts.num_tasks)
    base = Extra(memory, jnp.zeros((classes,), bool), policy_state)
    return core.new_state(k_state, params, stats, parts.tx, extra(base, params, stats))


def _step(parts, update, write, state, batch):
    """Take all updates on a batch, then write it to the memory."""
    k_write, *keys = jax.random.split(core.step_key(state), 1 + parts.replay.updates)
    seen, step = state.extra.seen.at[batch["label"]].set(True), state.step
    state = state.replace(extra=state.extra._replace(seen=seen))
    for key in keys:  # in Python: gradients in a loop of XLA's are slow on CPU
        k_incoming, k_update = jax.random.split(key)
        incoming = _read_incoming(parts, k_incoming, batch)
        # All updates have the progress of the batch, and so its learning rate.
        state, metrics, stored = update(state.replace(step=step), incoming, k_update)
    if write is not None:
        state = write(state, k_write, batch, stored)
    return state, metrics


def _read_incoming(parts, key, batch) -> Rows:
    """Augment a batch and, if it has one, its labelled part."""
    labelled, images, label = None, batch["image"], batch["label"]
    if "labelled" in batch:
        k_labelled = jax.random.fold_in(key, _LABELLED)
        labelled = _read_incoming(parts, k_labelled, batch["labelled"])
    augmented = prepare_images(parts, key, images, parts.replay.augment == "all")
    exist = jnp.ones(len(label), bool)
    return Rows(augmented, label, exist, images, labelled=labelled)


def write_batch(
    policy: policies.Policy,
    state: core.TrainState,
    key: jax.Array,
    batch: core.Batch,
    stored: dict,
) -> core.TrainState:
    """Write a batch, with the items `stored`, to the slots that the policy chooses."""
    extra, items = state.extra, stored_rows(state, batch, **stored)
    read = jax.tree.leaves(state.params)[0]  # depends on all that was read of it
    memory, counts = sharded.store_rows(
        policy, extra.memory, extra.kept, key, items, after=read
    )
    return state.replace(extra=extra._replace(memory=memory, kept=counts))


def _predict(net, seen_only, state, images):
    """Return logits; only those of the classes seen, if `seen_only`."""
    logits = net(state.params, state.stats, images, train=False)[0].logits
    if not seen_only:
        return logits
    seen = state.extra.seen  # none before the first step: then all compete
    return jnp.where(seen | ~seen.any(), logits, -jnp.inf)
