"""Prediction by the nearest class mean of the memory's items.

Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017,
Algorithm 1. The extra of a method that predicts in this way has a field `means`. It is
None while training; `eval_state` fills it, so that an evaluation computes it once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, sharding
from jaxcl.memory import sharded

_CHUNK = 256  # images that are embedded at a time


class ClassMeans(NamedTuple):
    """The mean feature of each class's items."""

    rows: jax.Array  # f32[C,D], zeros where there is no item
    exist: jax.Array  # bool[C], the memory holds an item of the class


class Nearest(NamedTuple):
    """A classifier by the nearest class mean of the memory, without augmentation."""

    parts: core.Parts
    net: Any  # online.Network
    unit: bool  # L2-normalise features and means
    mirror: bool  # average over the items and their mirror images

    def _scaled(self, rows):
        return core.l2_normalize(rows) if self.unit else rows

    def embed_images(
        self, params: core.PyTree, stats: core.PyTree, images: jax.Array
    ) -> jax.Array:
        """Embed images f32[B,H,W,C] as f32[B,D]."""
        outputs, _ = self.net(params, stats, images, train=False)
        return self._scaled(outputs.features)

    def compute_means(self, state: core.TrainState) -> ClassMeans:
        """Compute the class means of the memory, chunk by chunk."""
        memory, replay = state.extra.memory, self.parts.replay
        # `on_each_device` gives a device only its own slice, so each gets a copy.
        network = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (sharded.count_shards(replay), *x.shape)),
            (state.params, state.stats),
        )
        total, counts = sharded.on_each_device(
            replay, self._sum_features, network, memory.items, memory.filled
        )
        total, counts = total.sum(axis=0), counts.sum(axis=0)
        rows = self._scaled(total / jnp.maximum(counts, 1)[:, None])
        return ClassMeans(rows, counts > 0)

    def _sum_features(self, network, items, filled):
        """Sum and count each class's features, f32[1,C,D] and i32[1,C]."""
        params, stats = jax.tree.map(lambda x: x[0], network)
        classes, capacity = jnp.arange(self.parts.num_classes), len(filled)
        size = min(_CHUNK, capacity)
        # If the memory is split over the devices, so are its rows.
        is_split = self.parts.replay.sharded

        def add_chunk(sums, start):
            total, counts = sums
            number = start + jnp.arange(size)
            slots = number % capacity  # the last chunk may go beyond the memory
            images = items["image"][slots]
            images = images if is_split else sharding.shard_rows_in_jit(images)
            images = self.parts.eval_transform(images)
            rows = self.embed_images(params, stats, images)
            if self.mirror:
                mirrored = self.embed_images(params, stats, images[:, :, ::-1])
                rows = (rows + mirrored) / 2
            exists = filled[slots] & (number < capacity)
            of_class = (items["label"][slots][:, None] == classes) & exists[:, None]
            total += jnp.einsum("rc,rd->cd", of_class, rows, precision="highest")
            return (total, counts + jnp.sum(of_class, axis=0)), None

        blank = jnp.zeros_like(params["head"]["weight"]), jnp.zeros_like(classes)
        (total, counts), _ = jax.lax.scan(
            add_chunk, blank, jnp.arange(0, capacity, size)
        )
        return total[None], counts[None]

    def predict(self, state: core.TrainState, images: jax.Array) -> jax.Array:
        """Return minus the squared distance to each class's mean; -inf without one."""
        means = state.extra.means
        if means is None:
            means = self.compute_means(state)
        rows = self.embed_images(state.params, state.stats, images)
        gaps = rows[:, None] - means.rows
        return jnp.where(means.exist, -jnp.sum(gaps * gaps, axis=2), -jnp.inf)

    def make_hooks(self) -> dict:
        """Return `predict` and `eval_state` of core.Method."""
        compiled = jax.jit(self.compute_means)

        def eval_state(state):
            return state.replace(extra=state.extra._replace(means=compiled(state)))

        return {"predict": self.predict, "eval_state": eval_state}
