"""Passes of ICL through the network, of graphs or of images, and its losses."""

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
        if not self.graphs:
            rows, stats = self._interleaved(
                params, stats, key, self.augment(key, part["image"]), train=train
            )
            return rows[0::2], rows[1::2], stats
        k_view, *k_drop = jax.random.split(key, 3)
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

    def triples(self, params, stats, key, part, more):
        """Anchors, positives, rows that are negatives alone; and the statistics."""
        k_part, k_more = jax.random.split(key)
        if self.graphs:
            rows, positives, stats = self.pairs(params, stats, k_part, part)
            given = k_more, more["graph"]
            others, stats = self.network(params, stats, *given, train=True)
            return rows, positives, others, stats
        # One pass of three views: devices sum one gradient, not that of two passes.
        own = self.augment(k_part, part["image"])
        other = self.augment(k_more, more["image"])[:, :1]
        views = jnp.concatenate([own, other], axis=1)
        rows, stats = self._interleaved(params, stats, key, views, train=True)
        return rows[0::3], rows[1::3], rows[2::3], stats

    def _interleaved(self, params, stats, key, views, *, train):
        """Views [B, V, H, W, C] in one pass, view by view normalised: f32[B V, D]."""
        images = views.reshape((-1,) + views.shape[2:])
        groups = views.shape[1]
        return self.network(params, stats, key, images, train=train, groups=groups)

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
        rows, positives, others, stats = self.triples(params, stats, key, part, more)
        value, own, given = self.within(rows, positives, part)
        there = more["index"] >= 0

        def old():
            change = incremental.nce_two(
                rows,
                positives,
                positives,
                others,
                growth=growth,
                old_mask=own,
                new_mask=there,
                **given,
            )
            return change + self.keep * value if self.keep else change

        def new():
            return incremental.nce_one(
                rows,
                positives,
                others,
                more_negatives=positives,
                growth=growth,
                negative_mask=there,
                more_mask=own,
                **given,
            )

        return old, new, stats


def make_passes(parts: core.Parts, *, temperature, keep, anchors, output_dim) -> Passes:
    """The passes of an encoder, see `icl.make` for the options."""
    graphs = isinstance(parts.encoder, gcn.GCN)
    head = {"head": mlp.MLP((output_dim,), dtype=jnp.float32)} if output_dim else {}
    return Passes(
        parts.encoder, head, parts.augment, graphs, temperature, keep, anchors
    )
