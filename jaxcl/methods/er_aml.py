"""ER-AML: experience replay with a metric loss on the incoming rows.

Caccia et al., "Reducing Representation Drift in Online Continual Learning", 2021
(section 3.3): incoming rows are pulled towards rows of their class and pushed away
from rows of the other classes of their batch; replayed rows have a cross-entropy over
all classes seen.

Departures:
- Means over rows where the paper's equations have sums, as in the released code.
- `form="code"` is the released code's first version: Euclidean distances, the first
  task with plain cross-entropy alone, replayed rows over all classes. Its test for a
  negative from another batch is not reproduced.
- `loss="sup_con"` is the released code's later version; without its weight gamma.
- Incoming rows pass first, then positives and negatives, then replayed rows, as in the
  released code. In its later version the triplet loss passes positives and negatives
  before the incoming rows. The order affects the running statistics.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.losses import replay as losses
from jaxcl.methods import online


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "cosine",
    form: online.Form = "paper",
    loss: Literal["triplet", "sup_con"] = "triplet",
    negatives: Literal["incoming", "all"] = "incoming",
    gamma: schema.Weight = 2.0,
    margin: schema.Weight = 0.2,
    temperature: schema.Temperature = 0.2,
) -> core.Method:
    """Learn incoming rows by a metric loss, replayed ones by cross-entropy.

    Args:
      head: "cosine" or "linear".
      form: "paper" or "code", see above.
      loss: "triplet" or "sup_con".
      negatives: "incoming" takes negatives from the classes of the incoming batch,
        which does not push away old classes; "all" from any other class.
      gamma: weight of the triplet loss.
      margin: margin of the triplet loss.
      temperature: temperature of "sup_con".
    """
    net = online.build_network(parts, head)

    def metric(anchors, pairs, labels, picked):
        """Compute the metric loss; `pairs` are f32[2B,D], the rows of `picked`."""
        pairs = pairs.reshape(-1, 2, pairs.shape[1])
        near, far = pairs[:, 0], pairs[:, 1]
        if loss == "sup_con":
            return losses.aml_sup_con(
                anchors,
                near,
                far,
                labels,
                picked.negative_label,
                temperature=temperature,
                valid=picked.valid,
            )
        return gamma * losses.triplet(
            anchors,
            near,
            far,
            margin=margin,
            distance="cosine" if form == "paper" else "euclidean",
            valid=picked.valid,
        )

    def update(state, incoming, key):
        k_draw, k_pick, k_augment = jax.random.split(key, 3)
        memory, seen = state.extra.memory, state.extra.seen
        replayed = online.draw_rows(parts, memory, k_draw)
        picked = pick_pairs(
            k_pick, incoming.label, memory.items["label"], memory.filled, negatives
        )
        picked_rows = _rows_of(parts, k_augment, picked, memory, incoming, state.task)

        def value_of(params):
            # The order of the passes is that in which they move the running statistics.
            new, new_stats = net(params, state.stats, incoming.images, train=True)
            pairs, stats = net.pass_replayed(params, new_stats, picked_rows)
            old, stats = net.pass_replayed(params, stats, replayed)
            value = metric(new.features, pairs.features, incoming.label, picked)
            value += losses.cross_entropy(
                old.logits,
                replayed.label,
                example_mask=replayed.mask,
                class_mask=seen if form == "paper" else None,
            )
            if form == "code":
                plain = losses.cross_entropy(new.logits, incoming.label)
                value, stats = jax.tree.map(
                    functools.partial(jnp.where, state.task == 0),
                    (plain, new_stats),
                    (value, stats),
                )
            return value, stats

        return *online.descend(parts, net, state, value_of), {}

    return online.make_method(parts, net, update, seen_only=form == "paper")


def _rows_of(parts, key, picked, memory, incoming, task):
    """Read the 2B picked rows; anchors without both have masked rows."""
    count = len(incoming.label)
    raw = jnp.concatenate([memory.items["image"], incoming.raw])
    labels = jnp.append(memory.items["label"], incoming.label)
    tasks = jnp.append(memory.items["task"], jnp.full(count, task))
    raw, labels, tasks = (x[picked.rows.reshape(-1)] for x in (raw, labels, tasks))
    images = online.prepare_images(parts, key, raw, parts.replay.augment != "none")
    exists = jnp.repeat(picked.valid, 2)
    return online.Rows(images, labels, exists, raw, {"task": tasks})


class Picked(NamedTuple):
    """A positive and a negative for each anchor."""

    rows: jax.Array  # i32[B,2], into the memory's slots followed by the batch
    valid: jax.Array  # bool[B], the anchor has both
    negative_label: jax.Array  # i32[B]


def pick_pairs(
    key: jax.Array,
    labels: jax.Array,
    memory_labels: jax.Array,
    filled: jax.Array,
    negatives: str = "incoming",
) -> Picked:
    """Draw from memory and batch for each anchor, uniformly and independently.

    The positive has the anchor's label and is not the anchor. The negative has
    another label: with "incoming" one that occurs in the batch, with "all" any. If
    there is none, the anchor takes its place.

    Args:
      key: threefry key.
      labels: i32[B] of the batch, the anchors.
      memory_labels: i32[capacity].
      filled: bool[capacity].
      negatives: "incoming" or "all".
    """
    count, capacity = len(labels), len(memory_labels)
    pool = jnp.concatenate([memory_labels, labels])
    exists = jnp.concatenate([filled, jnp.ones(count, bool)])
    itself = capacity + jnp.arange(count)
    same_class = labels[:, None] == pool
    positive = same_class & exists & (jnp.arange(capacity + count) != itself[:, None])
    negative = ~same_class & exists
    if negatives == "incoming":
        negative &= jnp.any(pool[:, None] == labels, axis=1)
    allowed = jnp.stack([positive, negative], axis=1)
    noise = jax.random.gumbel(key, allowed.shape, mode="high")
    drawn = jnp.argmax(jnp.where(allowed, noise, -jnp.inf), axis=2)
    possible = jnp.any(allowed, axis=2)
    rows = jnp.where(possible, drawn, itself[:, None])
    return Picked(rows, jnp.all(possible, axis=1), pool[rows[:, 1]])
