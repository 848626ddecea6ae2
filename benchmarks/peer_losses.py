"""Losses of the peer in plain PyTorch, by base and strategy.

The released forms, with the pseudo-negatives of both terms: what the configs of PNR
train with. Rows of both views are concatenated, as the published code has them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from jaxcl import schema
from jaxcl.methods import two_view

STRATEGIES = ("finetune", "cassle", "pnr")


class Features(NamedTuple):
    """What a loss reads: a list of two views f32[B,D] each, None where not made."""

    z: list  # projections
    o: list | None = None  # BYOL's own predictor of z
    p: list | None = None  # the distillation predictor g of z
    k: list | None = None  # of the slow network
    f: list | None = None  # of the teacher
    queues: tuple = ()  # unit rows f32[2,K,D]: of keys, then of the teacher


class Base(NamedTuple):
    """One base: losses are (Features, options) -> f32[], as `bases.Base`."""

    loss: Callable
    distil: Callable
    pnr: Callable
    momentum: bool = False  # has a slow network
    unit_given: bool = False  # g is given unit rows


def options(method: dict) -> dict:
    """Options of a config's `method`, with those of its base and strategy, flat."""
    given = {name: value for name, value in method.items() if name != "name"}
    given = schema.options(two_view.make, given, "config.method")
    chosen = schema.defaults(two_view.make) | given
    chosen |= schema.fill_dependent(two_view.make, chosen)
    for key, rule in schema.choices(two_view.make).items():
        make, inner = rule.find(chosen[key], f"config.method.{key}")
        chosen |= schema.defaults(make) | inner | {key: chosen[key]["name"]}
    return chosen


def total(features: Features, options: dict) -> torch.Tensor:
    """The loss of a task after the first, f32[]."""
    base = BASES[options["base"]]
    if options["strategy"] == "pnr":
        return base.pnr(features, options)
    loss = base.loss(features, options)
    if options["strategy"] == "cassle":
        loss = loss + options["weight"] * base.distil(features, options)
    return loss


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of unit length."""
    return functional.normalize(x, dim=-1)


def _cosine(a, b):
    return (unit(a) * unit(b)).sum(1).mean()


def _both_views(pair, a, b):
    """Mean over the views of a function of two f32[B,D]."""
    return (pair(a[0], b[0]) + pair(a[1], b[1])) / 2


def _others(a, b, temperature):
    """Logarithm of the sum over all columns but a row's own."""
    logits = a @ b.T / temperature
    own = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    return logits.masked_fill(own, -math.inf).logsumexp(1)


def _contrastive_distil(features, options):
    p, f = unit(torch.cat(features.p)), unit(torch.cat(features.f))
    logits = p @ f.T / options["distill_temperature"]
    target = torch.arange(len(p), device=p.device)
    there = functional.cross_entropy(logits, target)
    return (there + functional.cross_entropy(logits.T, target)) / 2


def _simclr(features, options):
    temperature, z = options["temperature"], unit(torch.cat(features.z))
    positive = _cosine(*features.z) / temperature
    return _others(z, z, temperature).mean() - positive


def _simclr_pnr(features, options):
    temperature = options["distill_temperature"]
    same = _cosine(*features.z)
    z, p, f = (unit(torch.cat(x)) for x in (features.z, features.p, features.f))
    first = torch.logaddexp(_others(z, z, temperature), _others(z, f, temperature))
    second = torch.logaddexp(_others(p, f, temperature), _others(p, z, temperature))
    positive = same + (p * f).sum(1).mean()
    return first.mean() + second.mean() - positive / temperature


def _info_nce(anchors, positives, queues, temperature):
    anchors, positives = unit(anchors), unit(positives)
    positive = (anchors * positives).sum(1, keepdim=True)
    logits = torch.cat([positive, *(anchors @ q.T for q in queues)], 1) / temperature
    target = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return functional.cross_entropy(logits, target)


def _moco(features, options):
    z, k, temperature = features.z, features.k, options["temperature"]
    bank1, bank2 = features.queues[0]
    first = _info_nce(z[0], k[1], [bank2], temperature)
    return (first + _info_nce(z[1], k[0], [bank1], temperature)) / 2


def _moco_pnr(features, options):
    z, p, k, f = features.z, features.p, features.k, features.f
    tau, tau_d = options["temperature"], options["distill_temperature"]
    banks = [[queue[v] for queue in features.queues] for v in (0, 1)]
    first = [_info_nce(z[v], k[1 - v], banks[1 - v], tau) for v in (0, 1)]
    second = [_info_nce(p[v], f[v], banks[1 - v], tau_d) for v in (0, 1)]
    return sum(first + second) / 2


def _correlation(a, b, options):
    """Barlow Twins of two f32[B,D]."""

    def standard(x):
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()

    product = standard(a).T @ standard(b) / len(a)
    own = torch.eye(len(product), device=product.device)
    weight = own + options["off_diagonal"] * (1 - own)
    return options["scale"] * (weight * (product - own).square()).sum()


def _barlow(features, options):
    return _correlation(*features.z, options)


def _barlow_distil(features, options):
    def pair(p, f):
        return _correlation(p, f, options)

    return _both_views(pair, features.p, features.f)


def _regression(a, b):
    return 2 - 2 * _cosine(a, b)


def _byol(features, options):
    (o1, o2), (k1, k2) = features.o, features.k
    return _regression(o1, k2) + _regression(o2, k1)


def _byol_distil(features, options):
    return _both_views(_regression, features.p, features.f)


def _vicreg(features, options):
    z1, z2 = features.z
    loss = options["invariance"] * functional.mse_loss(z1, z2)
    for z in (z1, z2):
        z = z - z.mean(0)
        spread = (z.var(0) + 1e-4).sqrt()
        loss = loss + options["variance"] * functional.relu(1 - spread).mean()
        product = z.T @ z / (len(z) - 1)
        others = product - torch.diag(product.diagonal())
        redundancy = others.square().sum() / z.shape[1]
        loss = loss + options["covariance"] * redundancy
    return loss


def _vicreg_distil(features, options):
    return _both_views(functional.mse_loss, features.p, features.f)


def _apart(loss, distil, distance):
    """PNR without negatives: away from the teacher's feature of the other view."""

    def pnr(features, options):
        near = loss(features, options) + options["weight"] * distil(features, options)
        far = _both_views(distance, features.p, features.f[::-1])
        return near - options["negative_weight"] * far

    return pnr


BASES = {
    "simclr": Base(_simclr, _contrastive_distil, _simclr_pnr),
    "mocov2plus": Base(
        _moco, _contrastive_distil, _moco_pnr, momentum=True, unit_given=True
    ),
    "barlow_twins": Base(
        _barlow,
        _barlow_distil,
        _apart(_barlow, _barlow_distil, lambda p, f: -_cosine(p, f)),
    ),
    "byol": Base(
        _byol, _byol_distil, _apart(_byol, _byol_distil, _regression), momentum=True
    ),
    "vicreg": Base(
        _vicreg, _vicreg_distil, _apart(_vicreg, _vicreg_distil, functional.mse_loss)
    ),
}
