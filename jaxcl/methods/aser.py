"""ASER: replay and memory by adversarial Shapley values.

Shim et al., "Online Class-Incremental Continual Learning with Adversarial Shapley
Value", AAAI 2021, as a baseline of Caccia et al., "Reducing Representation Drift in
Online Continual Learning", 2021 (its ASER_mu).

Departures:
- `form="paper"` steps like the other methods here: incoming and replayed rows pass
  through the network separately, and each part has its own mean. `form="code"` is the
  released code: one pass of both and one mean over all rows, which is half that
  gradient.
- Released code also sends both parts through the network before its step, which only
  moves the running statistics; not reproduced.
- If all rows of the memory are candidates, they help no row, which counts 0; released
  code would rank nan.
- Equal values are in random order.
"""

import itertools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema, sharding
from jaxcl.errors import Refused
from jaxcl.memory import buffer, shapley
from jaxcl.methods import online


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    form: online.Form = "paper",
    variant: shapley.Variant = "mean",
    keep: Literal["shapley", "policy"] = "shapley",
    neighbours: schema.Count = 3,
    per_class: schema.Count = 9,
    minority: bool = True,
) -> core.Method:
    """Replay rows that confuse incoming ones and help the memory; keep those that help.

    Until the memory is full every row is stored and replay is random. Values come from
    features in evaluation mode, of images without augmentation.

    Args:
      head: "linear" or "cosine".
      form: "paper" or "code", see above.
      variant: "mean", "max_min" or "adversarial", see `shapley.aser_score`.
      keep: "shapley" stores by value, "policy" by config.replay.policy.
      neighbours: K of the Shapley values.
      per_class: candidates per class, and the same number of other rows to compute
        their help. Classes with fewer rows than both together are rarely replayed.
        Released code has 9 for CIFAR-10, 2 for CIFAR-100 and 3 for MiniImageNet.
      minority: when storing, help for incoming rows counts, too, if their class's share
        of the memory is below a number drawn from 0 to 1/C. So new classes are stored.

    Raises:
      Refused: naming field, value and range.
    """
    core.check_choice("config.replay.sharded", parts.replay.sharded, (False,))
    if keep == "shapley":
        _check_sizes(parts.replay, parts.num_classes, per_class)
    net = online.build_network(parts, head)
    selector = Selector(parts, net, variant, neighbours, per_class, minority)

    def update(state, incoming, key):
        rows = incoming, selector.retrieve(state, incoming, key)
        if form == "code":
            rows = (online.join_rows(*rows),)

        def loss(params):
            return online.cross_entropy(net, params, state.stats, *rows)

        return *online.descend(parts, net, state, loss), {}

    write = selector.write if keep == "shapley" else None
    return online.make_method(parts, net, update, write=write, seen_only=False)


def _check_sizes(replay: core.Replay, num_classes, per_class):
    most = (replay.capacity - 1) // num_classes
    if per_class > most:
        raise Refused(
            f"config.method.per_class={per_class}: of {num_classes} classes they would "
            f"fill the memory, {replay.capacity} slots, and leave none to give up; "
            f"must be at most {most}, or config.method.keep='policy'"
        )
    if replay.policy != "reservoir":
        raise Refused(
            f"config.replay.policy={replay.policy!r}: config.method.keep='shapley' "
            "asks no policy; leave it out or set keep to 'policy'"
        )


class Selector(NamedTuple):
    """Chooses the rows that are replayed and kept; see `make` for the options."""

    parts: core.Parts
    net: online.Network
    variant: str
    neighbours: int
    per_class: int
    minority: bool

    def balanced(self, key: jax.Array, memory: buffer.Buffer, allowed: jax.Array):
        """Draw a class-balanced sample: slots, mask, and the slots still allowed."""
        slots, mask = shapley.draw_balanced(
            key,
            memory.items["label"],
            allowed,
            num_classes=self.parts.num_classes,
            per_class=self.per_class,
        )
        return slots, mask, allowed.at[slots].set(False, mode="drop")

    def features(self, state: core.TrainState, *images: jax.Array) -> list[jax.Array]:
        """Embed several arrays of images u8[R,H,W,C] in one pass, f32[R,D] each."""
        rows = sharding.shard_rows_in_jit(jnp.concatenate(images))
        rows = self.parts.eval_transform(rows)
        outputs, _ = self.net(state.params, state.stats, rows, train=False)
        ends = list(itertools.accumulate(map(len, images)))
        return jnp.split(outputs.features, ends[:-1])

    def retrieve(
        self, state: core.TrainState, incoming: online.Rows, key: jax.Array
    ) -> online.Rows:
        """Choose rows to replay: the best of a draw, or random ones at first."""
        k_random, k_pool, k_helped, k_ties, k_augment = jax.random.split(key, 5)
        memory = state.extra.memory
        pool, pool_mask, rest = self.balanced(k_pool, memory, memory.filled)
        helped, helped_mask, _ = self.balanced(k_helped, memory, rest)
        candidates, helped_items = read_slots(memory, pool), read_slots(memory, helped)
        candidate_rows, other_rows, incoming_rows = self.features(
            state, candidates["image"], helped_items["image"], incoming.raw
        )

        def values(rows, labels):
            return shapley.shapley_values(
                candidate_rows,
                candidates["label"],
                rows,
                labels,
                neighbours=self.neighbours,
                mask=pool_mask,
            )

        scores = shapley.aser_score(
            values(incoming_rows, incoming.label),
            values(other_rows, helped_items["label"]),
            helped_mask,
            variant=self.variant,
        )
        size = min(self.parts.replay.size, memory.capacity)
        best = shapley.rank_rows(k_ties, scores, pool_mask)[:size]
        missing = (0, size - len(best))
        slots = jnp.pad(pool[best], missing, constant_values=memory.capacity)
        mask = jnp.pad(pool_mask[best], missing)
        _, drawn_mask, drawn = buffer.sample(memory, k_random, size)
        full = jnp.all(memory.filled)
        slots = jnp.where(full, slots, drawn)
        mask = jnp.where(full, mask, drawn_mask)
        return online.augment_drawn(
            self.parts, k_augment, read_slots(memory, slots), mask, slots
        )

    def write(
        self, state: core.TrainState, key: jax.Array, batch: core.Batch, stored: dict
    ) -> core.TrainState:
        """Write incoming rows, with the items `stored`, into the memory."""
        memory, items = state.extra.memory, online.stored_rows(state, batch, **stored)
        slots = self.places(state, key, items)
        memory = buffer.write(memory, slots, items)
        return state.replace(extra=state.extra._replace(memory=memory))

    def places(self, state: core.TrainState, key: jax.Array, items: dict) -> jax.Array:
        """Choose slots for incoming rows, i32[B]; capacity: the row is not stored."""
        k_helped, k_pool, k_share, k_ties = jax.random.split(key, 4)
        memory, label = state.extra.memory, items["label"]
        turn = jnp.arange(len(label))
        fits = turn < memory.capacity - memory.seen
        helped, helped_mask, rest = self.balanced(k_helped, memory, memory.filled)
        size = min(len(helped), memory.capacity)
        _, pool_mask, pool = buffer.sample(
            memory, k_pool, size, log_weights=buffer.log_weights(rest)
        )
        candidates, helped_items = read_slots(memory, pool), read_slots(memory, helped)
        candidate_rows, other_rows, new_rows = self.features(
            state, candidates["image"], helped_items["image"], items["image"]
        )
        mask = jnp.concatenate([pool_mask, ~fits])
        values = shapley.shapley_values(
            jnp.concatenate([candidate_rows, new_rows]),
            jnp.concatenate([candidates["label"], label]),
            jnp.concatenate([other_rows, new_rows]),
            jnp.concatenate([helped_items["label"], label]),
            neighbours=self.neighbours,
            mask=mask,
        )
        rare = self.mark_rare(k_share, memory, label) & ~fits & self.minority
        row_mask = jnp.concatenate([helped_mask, rare])[:, None]
        scores = jnp.sum(jnp.where(row_mask, values, 0), axis=0)
        replaced = shapley.replace_slots(k_ties, scores, mask, pool, memory.capacity)
        return jnp.where(fits, memory.seen + turn, replaced)

    def mark_rare(
        self, key: jax.Array, memory: buffer.Buffer, labels: jax.Array
    ) -> jax.Array:
        """Mark rows whose class has less of the memory than u ~ U(0, 1/C), bool[B]."""
        classes = self.parts.num_classes
        counts = jnp.zeros(classes).at[memory.items["label"]].add(memory.filled)
        bound = jax.random.uniform(key) * memory.capacity / classes
        return counts[labels] < bound


def read_slots(memory: buffer.Buffer, slots: jax.Array) -> dict:
    """Read the items in these slots; zeros where the slot is the capacity."""
    return jax.tree.map(
        lambda x: x.at[slots].get(mode="fill", fill_value=0), memory.items
    )
