"""Passes of ICL through the network, of graphs or of images, and its losses."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import incremental
from jaxcl.nets import chain, gcn, mlp


class Passes(NamedTuple):
    """Functions of one network; a part is a batch of old or of new rows."""

    init: Callable  # (key, batch) -> params, stats
    network: Callable  # (params, stats, key, inputs, *, train) -> f32[B, D], stats
    pairs: Callable  # (params, stats, key, part, *, train) -> anchors, positives, stats
    # (params, stats, key, part) -> f32[], (stats, anchors, positives)
    plain_loss: Callable
    # (params, stats, key, part, part of the other set, growth) -> the loss if anchors
    # are old, () -> f32[], that if they are new, and the statistics
    against: Callable


def make_passes(parts: core.Parts, *, temperature, keep, anchors, output_dim) -> Passes:
    """The passes of an encoder, see `icl.make` for the options."""
    graphs = isinstance(parts.encoder, gcn.GCN)
    head = {"head": mlp.MLP((output_dim,), dtype=jnp.float32)} if output_dim else {}
    nets = {"encoder": parts.encoder} | head

    def init(key, batch):
        k_view, k_net, k_head = jax.random.split(key, 3)
        if not graphs:
            images = parts.augment(k_view, batch["image"][:1])[0]
            return chain.init(nets, k_net, images)
        rows, found = parts.encoder.init_with_output(k_net, batch["graph"])
        more = chain.init(head, k_head, rows) if head else ({}, {})
        params = {"encoder": found["params"]} | more[0]
        return params, {"encoder": found["batch_stats"]} | more[1]

    def network(params, stats, key, inputs, *, train, groups=1):
        """Rows f32[B, D] of graphs or images, and the statistics after them."""
        if not graphs:
            return chain.apply(nets, params, stats, inputs, train=train, groups=groups)
        variables = {"params": params["encoder"], "batch_stats": stats["encoder"]}
        rows, moved = parts.encoder.apply(
            variables, inputs, train=train, key=key, mutable=["batch_stats"]
        )
        after = stats | {"encoder": moved.get("batch_stats", stats["encoder"])}
        if head:
            rows, more = chain.apply(head, params, stats, rows, train=train)
            after = after | more
        return rows, after

    def pairs(params, stats, key, part, *, train=True):
        """Anchors and positives f32[B, D], and the statistics."""
        k_view, *k_drop = jax.random.split(key, 3)
        if not graphs:
            views = parts.augment(k_view, part["image"])
            images = views.reshape((-1,) + views.shape[2:])
            apply = functools.partial(network, train=train, groups=2)
            rows, stats = apply(params, stats, k_drop[0], images)
            return rows[0::2], rows[1::2], stats
        # Mapped, a program has the operations once, which compiles twice as fast.
        views = jax.vmap(parts.augment, (0, None))(
            jax.random.split(k_view, 2 if anchors == "augmented" else 1), part["graph"]
        )
        anchor, positive = (jax.tree.map(lambda x, i=i: x[i], views) for i in (0, -1))
        if anchors == "original":
            anchor = part["graph"]
        rows, stats = network(params, stats, k_drop[0], anchor, train=train)
        other, stats = network(params, stats, k_drop[1], positive, train=train)
        return rows, other, stats

    def singles(params, stats, key, part):
        """Rows f32[B, D] that are negatives alone, and the statistics."""
        k_view, k_drop = jax.random.split(key)
        inputs = part["graph"] if graphs else parts.augment(k_view, part["image"])[:, 0]
        return network(params, stats, k_drop, inputs, train=True)

    def within(rows, positives, part):
        """NCE-I with a batch's own positives as negatives, their mask, and others."""
        mask = part["index"] >= 0
        size = len(rows)
        own = incremental.others(size) & mask
        given = dict(temperature=temperature, num_negatives=size - 1, mask=mask)
        value = incremental.nce_one(
            rows, positives, positives, negative_mask=own, **given
        )
        return value, own, given

    def plain_loss(params, stats, key, part):
        rows, positives, stats = pairs(params, stats, key, part)
        return within(rows, positives, part)[0], (stats, rows, positives)

    def against(params, stats, key, part, more, growth):
        """What both kinds of anchors need: rows, masks, and those of the other set."""
        k_part, k_more = jax.random.split(key)
        rows, positives, stats = pairs(params, stats, k_part, part)
        others, stats = singles(params, stats, k_more, more)
        value, own, given = within(rows, positives, part)
        there = more["index"] >= 0

        def old():
            change = incremental.nce_two(
                rows, positives, positives, others, growth=growth, old_mask=own,
                new_mask=there, **given,
            )  # fmt: skip
            return change + keep * value if keep else change

        def new():
            return incremental.nce_one(
                rows, positives, others, more_negatives=positives, growth=growth,
                negative_mask=there, more_mask=own, **given,
            )  # fmt: skip

        return old, new, stats

    return Passes(init, network, pairs, plain_loss, against)
