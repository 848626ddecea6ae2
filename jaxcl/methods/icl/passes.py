"""Pass graphs or images through ICL's network, and compute its losses."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, numerics
from jaxcl.losses import incremental
from jaxcl.nets import chain, gcn, mlp


class Passes(NamedTuple):
    """One network, its views, its losses. A batch is of old or of new rows."""

    encoder: Any  # flax.linen module
    head: chain.Chain  # the network after it; of no nets without one
    judged: bool  # evaluators see the rows of the head, not those of the encoder
    augment: Callable
    temperature: float
    with_positive: bool
    keep: float
    anchors: str

    @property
    def graphs(self) -> bool:
        """Tell whether the inputs are graphs; the others are images."""
        return reads_graphs(self.encoder)

    @property
    def net(self) -> chain.Chain:
        """Return the encoder of images and its head."""
        return chain.Chain({"encoder": self.encoder, **self.head.nets})

    def init(self, key: jax.Array, batch: core.Batch):
        """Return parameters and statistics before the first step."""
        k_view, k_net, k_head = jax.random.split(key, 3)
        if not self.graphs:
            images = self.augment(k_view, batch["image"][:1])[0]
            return self.net.init(k_net, images)
        rows, encoder = self.encoder.init_with_output(k_net, batch["graph"])
        head = self.head.init(k_head, rows) if self.head.nets else ({}, {})
        params = {"encoder": encoder["params"]} | head[0]
        return params, {"encoder": encoder["batch_stats"]} | head[1]

    def network(
        self,
        params: core.PyTree,
        stats: core.PyTree,
        key: jax.Array,
        inputs: Any,
        *,
        train: bool,
        groups: int = 1,
    ):
        """Embed graphs or images, f32[B, D]; also return the statistics afterwards."""
        if not self.graphs:
            return self.net(params, stats, inputs, train=train, groups=groups)
        variables = {"params": params["encoder"], "batch_stats": stats["encoder"]}
        rows, updates = self.encoder.apply(
            variables, inputs, train=train, key=key, mutable=["batch_stats"]
        )
        after = stats | {"encoder": updates.get("batch_stats", stats["encoder"])}
        if self.head.nets:
            rows, head = self.head(params, stats, rows, train=train)
            after = after | head
        return rows, after

    def embed(self, params: core.PyTree, stats: core.PyTree, inputs: Any):
        """Return the features that evaluators read, f32[B, D]."""
        key = numerics.make_key(0)  # for dropout, which evaluation mode leaves out
        seen = self if self.judged else self._replace(head=chain.Chain({}))
        return seen.network(params, stats, key, inputs, train=False)[0]

    def pairs(
        self,
        params: core.PyTree,
        stats: core.PyTree,
        key: jax.Array,
        batch: core.Batch,
        *,
        train: bool = True,
    ):
        """Return anchors and positives f32[B, D], and the statistics afterwards."""
        if not self.graphs:
            rows, stats = self._pass_views(
                params, stats, key, self.augment(key, batch["image"]), train=train
            )
            return rows[0::2], rows[1::2], stats
        k_view, *k_drop = jax.random.split(key, 3)
        # Under vmap a program has the operations once, which compiles twice as fast.
        views = jax.vmap(self.augment, (0, None))(
            jax.random.split(k_view, 2 if self.anchors == "augmented" else 1),
            batch["graph"],
        )
        anchor, positive = (jax.tree.map(lambda x, i=i: x[i], views) for i in (0, -1))
        if self.anchors == "original":
            anchor = batch["graph"]
        rows, stats = self.network(params, stats, k_drop[0], anchor, train=train)
        other, stats = self.network(params, stats, k_drop[1], positive, train=train)
        return rows, other, stats

    def triples(
        self,
        params: core.PyTree,
        stats: core.PyTree,
        key: jax.Array,
        batch: core.Batch,
        other_batch: core.Batch,
    ):
        """Embed anchors and positives of `batch`, and negatives from `other_batch`."""
        k_batch, k_others = jax.random.split(key)
        if self.graphs:
            rows, positives, stats = self.pairs(params, stats, k_batch, batch)
            negatives, stats = self.network(
                params, stats, k_others, other_batch["graph"], train=True
            )
            return rows, positives, negatives, stats
        # With one pass of three views devices sum one gradient, with two passes two.
        two_views = self.augment(k_batch, batch["image"])
        other = self.augment(k_others, other_batch["image"])[:, :1]
        views = jnp.concatenate([two_views, other], axis=1)
        rows, stats = self._pass_views(params, stats, key, views, train=True)
        return rows[0::3], rows[1::3], rows[2::3], stats

    def _pass_views(self, params, stats, key, views, *, train):
        """Pass views [B, V, H, W, C], each normalised by itself: f32[B V, D]."""
        images = views.reshape((-1,) + views.shape[2:])
        groups = views.shape[1]
        return self.network(params, stats, key, images, train=train, groups=groups)

    def within(self, rows: jax.Array, positives: jax.Array, batch: core.Batch):
        """Compute NCE-I of a batch, whose other positives are the negatives.

        Returns:
          f32[]; the mask of these negatives, bool[B, B]; options for other losses of
          these anchors.
        """
        mask = batch["index"] >= 0
        size = len(rows)
        negatives = incremental.others(size) & mask
        options = dict(temperature=self.temperature, num_negatives=size - 1, mask=mask)
        value = incremental.nce_one(
            rows,
            positives,
            positives,
            negative_mask=negatives,
            with_positive=self.with_positive,
            **options,
        )
        return value, negatives, options

    def plain_loss(
        self, params: core.PyTree, stats: core.PyTree, key: jax.Array, batch: core.Batch
    ):
        """Compute NCE-I f32[] of a batch; also return (stats, anchors, positives)."""
        rows, positives, stats = self.pairs(params, stats, key, batch)
        return self.within(rows, positives, batch)[0], (stats, rows, positives)

    def incremental_losses(
        self,
        params: core.PyTree,
        stats: core.PyTree,
        key: jax.Array,
        batch: core.Batch,
        other_batch: core.Batch,
        growth: jax.Array,
    ):
        """Return two losses of `batch`, for old items and for new ones, as functions.

        Args:
          params, stats: parameters and statistics of the network.
          key: threefry key.
          batch: anchors.
          other_batch: rows of the other set, negatives.
          growth: growth of the task, f32[].

        Returns:
          () -> f32[] for old anchors; () -> f32[] for new ones; statistics.
        """
        rows, positives, negatives, stats = self.triples(
            params, stats, key, batch, other_batch
        )
        value, in_batch, options = self.within(rows, positives, batch)
        exists = other_batch["index"] >= 0

        def old_loss():
            change = incremental.nce_two(
                rows,
                positives,
                positives,
                negatives,
                growth=growth,
                old_mask=in_batch,
                new_mask=exists,
                **options,
            )
            return change + self.keep * value if self.keep else change

        def new_loss():
            return incremental.nce_one(
                rows,
                positives,
                negatives,
                more_negatives=positives,
                growth=growth,
                negative_mask=exists,
                more_mask=in_batch,
                **options,
            )

        return old_loss, new_loss, stats


def reads_graphs(encoder: Any) -> bool:
    """Tell whether an encoder reads graphs; the others read images."""
    return isinstance(encoder, gcn.GraphEncoder)


def build_head(output_dim: int, projector: int) -> chain.Chain:
    """Build the network after the encoder; for the options see `icl.make`."""
    if not (output_dim or projector):
        return chain.Chain({})
    widths = (projector, projector) if projector else (output_dim,)
    return chain.Chain({"head": mlp.MLP(widths, dtype=jnp.float32)})
