"""Losses of `torch_two_view.py` in plain PyTorch, by base and strategy.

The released forms, with the pseudo-negatives of both terms: what the configs of PNR
train with. Rows of both views are concatenated, as the published code has them.
"""

import math
from typing import NamedTuple

import torch
from torch.nn import functional

from jaxcl import schema
from jaxcl.methods import two_view


class Features(NamedTuple):
    """What a loss reads: a list of two views f32[B,D] each, None where not made."""

    z: list  # projections
    p: list | None = None  # the distillation predictor g of z
    k: list | None = None  # of the slow network
    f: list | None = None  # of the teacher
    queues: tuple = ()  # unit rows f32[2,K,D]: of keys, then of the teacher


def options(method: dict) -> dict:
    """Return the options of config.method, of its base and its strategy, flat."""
    given = {name: value for name, value in method.items() if name != "name"}
    given = schema.options(two_view.make, given, "config.method")
    chosen = schema.defaults(two_view.make) | given
    chosen |= schema.fill_dependent(two_view.make, chosen)
    for key, rule in schema.choices(two_view.make).items():
        make, inner = rule.find(chosen[key], f"config.method.{key}")
        chosen |= schema.defaults(make) | inner | {key: chosen[key]["name"]}
    return chosen


def unit(x: torch.Tensor) -> torch.Tensor:
    """Scale rows to unit length."""
    return functional.normalize(x, dim=-1)


def _cosine(a, b):
    return (unit(a) * unit(b)).sum(1).mean()


def _others(a, b, temperature):
    """Logarithm of the sum over all columns but a row's own."""
    logits = a @ b.T / temperature
    own = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    return logits.masked_fill(own, -math.inf).logsumexp(1)


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


# (base, strategy) -> (Features, options) -> loss f32[] of a task after the first
LOSSES = {
    ("simclr", "finetune"): _simclr,
    ("simclr", "pnr"): _simclr_pnr,
    ("mocov2plus", "finetune"): _moco,
    ("mocov2plus", "pnr"): _moco_pnr,
}
