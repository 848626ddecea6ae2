"""Which rows ASER replays and keeps: `memory.shapley` on a network's features."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.memory import buffer, shapley
from jaxcl.methods import online


class Judge(NamedTuple):
    """What ASER replays and keeps."""

    parts: core.Parts
    net: online.Network
    variant: str
    neighbours: int
    per_class: int
    minority: bool

    def balanced(self, key, memory, allowed):
        """Slots of a class-balanced draw, its mask, and what else is allowed."""
        slots, mask = shapley.balanced(
            key,
            memory.items["label"],
            allowed,
            num_classes=self.parts.num_classes,
            per_class=self.per_class,
        )
        return slots, mask, allowed.at[slots].set(False, mode="drop")

    def features(self, state, *images):
        """f32[R,D] of each of the parts, u8[R,H,W,C]."""
        rows = self.parts.split(jnp.concatenate(images))
        rows = self.parts.plain(rows)
        found = self.net(state.params, state.stats, rows, train=False)[0].features
        ends = list(itertools.accumulate(map(len, images)))
        return jnp.split(found, ends[:-1])

    def retrieve(self, state, incoming, key) -> online.Rows:
        """Rows to replay."""
        k_random, k_pool, k_helped, k_ties, k_augment = jax.random.split(key, 5)
        memory = state.extra.memory
        pool, pool_mask, rest = self.balanced(k_pool, memory, memory.filled)
        helped, helped_mask, _ = self.balanced(k_helped, memory, rest)
        candidates, others = at(memory, pool), at(memory, helped)
        mine, theirs, new = self.features(
            state, candidates["image"], others["image"], incoming.raw
        )

        def values(rows, labels):
            return shapley.values(
                mine,
                candidates["label"],
                rows,
                labels,
                neighbours=self.neighbours,
                mask=pool_mask,
            )

        scores = shapley.score(
            values(new, incoming.label),
            values(theirs, others["label"]),
            helped_mask,
            variant=self.variant,
        )
        size = min(self.parts.replay.size, memory.capacity)
        best = shapley.ranked(k_ties, scores, pool_mask)[:size]
        short = (0, size - len(best))
        slots = jnp.pad(pool[best], short, constant_values=memory.capacity)
        mask = jnp.pad(pool_mask[best], short)
        _, drawn_mask, drawn = buffer.sample(memory, k_random, size)
        full = jnp.all(memory.filled)
        slots = jnp.where(full, slots, drawn)
        mask = jnp.where(full, mask, drawn_mask)
        return online.taken(self.parts, k_augment, at(memory, slots), mask, slots)

    def write(self, state, key, batch, more):
        """The state with incoming rows stored."""
        memory, label = state.extra.memory, batch["label"]
        task = jnp.broadcast_to(state.task, label.shape)
        items = {"image": batch["image"], "label": label, "task": task, **more}
        slots = self.places(state, key, items)
        memory = buffer.write(memory, slots, items)
        return state.replace(extra=state.extra._replace(memory=memory))

    def places(self, state, key, items):
        """Slots of incoming rows, i32[B]; the capacity: not stored."""
        k_helped, k_pool, k_share, k_ties = jax.random.split(key, 4)
        memory, label = state.extra.memory, items["label"]
        turn = jnp.arange(len(label))
        fits = turn < memory.capacity - memory.seen
        helped, helped_mask, rest = self.balanced(k_helped, memory, memory.filled)
        size = min(len(helped), memory.capacity)
        _, pool_mask, pool = buffer.sample(
            memory, k_pool, size, log_weights=online.log_weights(rest)
        )
        candidates, others = at(memory, pool), at(memory, helped)
        mine, theirs, new = self.features(
            state, candidates["image"], others["image"], items["image"]
        )
        mask = jnp.concatenate([pool_mask, ~fits])
        values = shapley.values(
            jnp.concatenate([mine, new]),
            jnp.concatenate([candidates["label"], label]),
            jnp.concatenate([theirs, new]),
            jnp.concatenate([others["label"], label]),
            neighbours=self.neighbours,
            mask=mask,
        )
        rare = self.rare(k_share, memory, label) & ~fits & self.minority
        counted = jnp.concatenate([helped_mask, rare])[:, None]
        scores = jnp.sum(jnp.where(counted, values, 0), axis=0)
        better = shapley.replace(k_ties, scores, mask, pool, memory.capacity)
        return jnp.where(fits, memory.seen + turn, better)

    def rare(self, key, memory, labels):
        """Whose share of the memory is below u, uniform in 0 to 1/C: bool[B]."""
        classes = self.parts.num_classes
        counts = jnp.zeros(classes).at[memory.items["label"]].add(memory.filled)
        bound = jax.random.uniform(key) * memory.capacity / classes
        return counts[labels] < bound


def at(memory: buffer.Buffer, slots):
    """What the memory holds there; zeros at its capacity."""
    return jax.tree.map(
        lambda x: x.at[slots].get(mode="fill", fill_value=0), memory.items
    )
