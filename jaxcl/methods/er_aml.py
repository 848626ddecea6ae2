"""ER-AML: experience replay with a metric loss on the incoming rows.

Caccia et al., "Reducing Representation Drift in Online Continual Learning", 2021
(section 3.3): the incoming rows are pulled to rows of their class and pushed from
rows of other classes of their batch, while replayed rows have a cross-entropy over
all classes seen.

Departures:
- Means over rows where the paper's equations have sums, as in the released code.
- `form="code"` is the released code's first version: Euclidean distances, the first
  task with plain cross-entropy alone, replayed rows over all classes. Its test that a
  negative of another batch exists, whether used or not, is not reproduced.
- `loss="sup_con"` is the released code's later version; without its weight gamma.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import replay as losses
from jaxcl.methods import online


def make(
    parts: core.Parts,
    *,
    head="cosine",
    form="paper",
    loss="triplet",
    negatives="incoming",
    gamma=2.0,
    margin=0.2,
    temperature=0.2,
) -> core.Method:
    """A metric loss on incoming rows, cross-entropy on replayed ones.

    Args:
      head: "cosine" or "linear".
      form: "paper" or "code", see above.
      loss: "triplet" or "sup_con".
      negatives: "incoming" takes negatives of classes of the incoming batch, which is
        what keeps old representations still; "all" of any other class.
      gamma: weight of the triplet loss.
      margin: of the triplet loss.
      temperature: of "sup_con".
    """
    core.check_choice("config.method.form", form, online.FORMS)
    core.check_choice("config.method.loss", loss, ("triplet", "sup_con"))
    core.check_choice("config.method.negatives", negatives, ("incoming", "all"))
    net = online.network(parts, head)
    distance = "cosine" if form == "paper" else "euclidean"

    def metric(anchors, chosen, labels, picked):
        pair = chosen.features.reshape(len(labels), 2, -1)
        rows = anchors.features, pair[:, 0], pair[:, 1]
        if loss == "triplet":
            return gamma * losses.triplet(
                *rows, margin=margin, distance=distance, valid=picked.valid
            )
        return losses.aml_sup_con(
            *rows,
            labels,
            picked.negative_label,
            temperature=temperature,
            valid=picked.valid,
        )

    def update(state, incoming, key):
        k_draw, k_pick, k_augment = jax.random.split(key, 3)
        memory, seen = state.extra.memory, state.extra.seen
        replayed = online.draw(parts, memory, k_draw)
        picked = pick(
            k_pick, incoming.label, memory.items["label"], memory.filled, negatives
        )
        raw = jnp.concatenate([memory.items["image"], incoming.raw])[picked.rows]
        images = online.images_of(
            parts,
            k_augment,
            raw.reshape(-1, *raw.shape[2:]),
            parts.replay.augment != "none",
        )
        tasks = jnp.append(
            memory.items["task"], jnp.full(len(incoming.label), state.task)
        )
        tasks = jnp.where(picked.valid[:, None], tasks[picked.rows], -1).reshape(-1)

        def value_of(params):
            (new, old), stats = net.both(params, state.stats, incoming, replayed)
            chosen, after = net(params, stats, images, train=True, tasks=tasks)
            value = metric(new, chosen, incoming.label, picked)
            value += losses.cross_entropy(
                old.logits,
                replayed.label,
                example_mask=replayed.mask,
                class_mask=seen if form == "paper" else None,
            )
            if form == "code":
                plain = losses.cross_entropy(new.logits, incoming.label)
                value = jnp.where(state.task == 0, plain, value)
            return value, after

        return *online.descend(parts, state, value_of), {}

    return online.method(parts, net, update, limit=form == "paper")


class Picked(NamedTuple):
    """A positive and a negative for each anchor."""

    rows: jax.Array  # i32[B,2], into the memory's slots followed by the batch
    valid: jax.Array  # bool[B], the anchor has both
    negative_label: jax.Array  # i32[B]


def pick(key, labels, memory_labels, filled, negatives="incoming") -> Picked:
    """Uniform draws out of the memory and the batch, for each anchor by itself.

    The positive has the anchor's label and is not the anchor. The negative has
    another label: with "incoming" one that occurs in the batch, with "all" any. An
    anchor that lacks one stands in for it.

    Args:
      labels: i32[B] of the batch, the anchors.
      memory_labels: i32[capacity].
      filled: bool[capacity].
    """
    count, capacity = len(labels), len(memory_labels)
    pool = jnp.concatenate([memory_labels, labels])
    there = jnp.concatenate([filled, jnp.ones(count, bool)])
    own = capacity + jnp.arange(count)
    same = labels[:, None] == pool
    positive = same & there & (jnp.arange(capacity + count) != own[:, None])
    negative = ~same & there
    if negatives == "incoming":
        negative &= jnp.any(pool[:, None] == labels, axis=1)
    allowed = jnp.stack([positive, negative], axis=1)
    noise = jax.random.gumbel(key, allowed.shape, mode="high")
    drawn = jnp.argmax(jnp.where(allowed, noise, -jnp.inf), axis=2)
    some = jnp.any(allowed, axis=2)
    rows = jnp.where(some, drawn, own[:, None])
    return Picked(rows, jnp.all(some, axis=1), pool[rows[:, 1]])
