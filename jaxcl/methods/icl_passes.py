"""Passes of ICL through the network, of graphs or of images, and its losses."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import incremental
from jaxcl.nets import chain, gcn, mlp


class Passes(NamedTuple):
    """One network, its views and its losses; a part is a batch of old or new rows."""

    encoder: Any  # flax.linen module
    head: dict  # what follows it, a network of chain.py or nothing
    augment: Callable
    graphs: bool
    temperature: float
    keep: float
    anchors: str

    @property
    def nets(self):
        """The encoder and its head, as `chain` takes them."""
        return {"encoder": self.encoder} | self.head

    def init(self, key, batch):
        """Parameters and statistics before the first step."""
        k_view, k_net, k_head = jax.random.split(key, 3)
        if not self.graphs:
            images = self.augment(k_view, batch["image"][:1])[0]
            return chain.init(self.nets, k_net, images)
        rows, found = self.encoder.init_with_output(k_net, batch["graph"])
        more = chain.init(self.head, k_head, rows) if self.head else ({}, {})
        params = {"encoder": found["params"]} | more[0]
        return params, {"encoder": found["batch_stats"]} | more[1]

    def network(self, params, stats, key, inputs, *, train, groups=1):
        """Rows f32[B, D] of graphs or images, and the statistics after them."""
        if not self.graphs:
            return chain.apply(
                self.nets, params, stats, inputs, train=train, groups=groups
            )
        variables = {"params": params["encoder"], "batch_stats": stats["encoder"]}
        rows, moved = self.encoder.apply(
            variables, inputs, train=train, key=key, mutable=["batch_stats"]
        )
        after = stats | {"encoder": moved.get("batch_stats", stats["encoder"])}
        if self.head:
            rows, more = chain.apply(self.head, params, stats, rows, train=train)
            after = after | more
        return rows, after

    def pairs(self, params, stats, key, part, *, train=True):
        """Anchors and positives f32[B, D], and the statistics."""
        k_view, *k_drop = jax.random.split(key, 3)
        if not self.graphs:
            views = self.augment(k_view, part["image"])
            images = views.reshape((-1,) + views.shape[2:])
            apply = functools.partial(self.network, train=train, groups=2)
            rows, stats = apply(params, stats, k_drop[0], images)
            return rows[0::2], rows[1::2], stats
        # Mapped, a program has the operations once, which compiles twice as fast.
        views = jax.vmap(self.augment, (0, None))(
            jax.random.split(k_view, 2 if self.anchors == "augmented" else 1),
            part["graph"],
        )
        anchor, positive = (jax.tree.map(lambda x, i=i: x[i], views) for i in (0, -1))
        if self.anchors == "original":
            anchor = part["graph"]
        rows, stats = self.network(params, stats, k_drop[0], anchor, train=train)
        other, stats = self.network(params, stats, k_drop[1], positive, train=train)
        return rows, other, stats

    def singles(self, params, stats, key, part):
        """Rows f32[B, D] that are negatives alone, and the statistics."""
        k_view, k_drop = jax.random.split(key)
        if self.graphs:
            return self.network(params, stats, k_drop, part["graph"], train=True)
        images = self.augment(k_view, part["image"])[:, 0]
        return self.network(params, stats, k_drop, images, train=True)

    def within(self, rows, positives, part):
        """NCE-I with a batch's own positives as negatives, their mask, and others."""
        mask = part["index"] >= 0
        size = len(rows)
        own = incremental.others(size) & mask
        given = dict(temperature=self.temperature, num_negatives=size - 1, mask=mask)
        value = incremental.nce_one(
            rows, positives, positives, negative_mask=own, **given
        )
        return value, own, given

    def plain_loss(self, params, stats, key, part):
        """NCE-I f32[] within a batch; the statistics, anchors and positives."""
        rows, positives, stats = self.pairs(params, stats, key, part)
        return self.within(rows, positives, part)[0], (stats, rows, positives)

    def against(self, params, stats, key, part, more, growth):
        """Losses of a part, if it is of old items and if of new, and the statistics.

        Args:
          part, more: rows of the two sets, the anchors' first.
          growth: of the task, f32[].

        Returns:
          () -> f32[] for old anchors; () -> f32[] for new ones; statistics.
        """
        k_part, k_more = jax.random.split(key)
        rows, positives, stats = self.pairs(params, stats, k_part, part)
        others, stats = self.singles(params, stats, k_more, more)
        value, own, given = self.within(rows, positives, part)
        there = more["index"] >= 0

        def old():
            change = incremental.nce_two(
                rows, positives, positives, others, growth=growth, old_mask=own,
                new_mask=there, **given,
            )  # fmt: skip
            return change + self.keep * value if self.keep else change

        def new():
            return incremental.nce_one(
                rows, positives, others, more_negatives=positives, growth=growth,
                negative_mask=there, more_mask=own, **given,
            )  # fmt: skip

        return old, new, stats


def make_passes(parts: core.Parts, *, temperature, keep, anchors, output_dim) -> Passes:
    """The passes of an encoder, see `icl.make` for the options."""
    graphs = isinstance(parts.encoder, gcn.GCN)
    head = {"head": mlp.MLP((output_dim,), dtype=jnp.float32)} if output_dim else {}
    return Passes(
        parts.encoder, head, parts.augment, graphs, temperature, keep, anchors
    )
