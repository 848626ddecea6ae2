"""Losses of two-view methods in float64 NumPy, from the papers' equations.

`x` is a `Features` of NumPy arrays, `o` an `Options`. No loss of the library is called.
"""

from typing import Any, NamedTuple

import numpy as np

from helpers import twins
from jaxcl.memory import queue as queue_lib
from jaxcl.methods.two_view import records
from jaxcl.methods.two_view.bases import dino as dino_base


class Features(NamedTuple):
    """What the twins read, by name; shapes as in `records.Features`."""

    z: Any
    label: Any = None
    o: Any = None
    p: Any = None
    k: Any = None
    f: Any = None
    key_queue: Any = None  # [2,K,D], MoCo's
    frozen_queue: Any = None
    replayed: Any = None
    stored: Any = None
    stored_mask: Any = None
    local: Any = None
    prototypes: Any = None  # [K,D], of the network that learns
    distil_prototypes: Any = None  # of the distillation
    slow_prototypes: Any = None  # of the slow network
    frozen_prototypes: Any = None  # of the teacher
    centre: Any = None  # [K], DINO's
    target_temperature: Any = None  # of DINO's targets
    slices: Any = None  # [S,D], LeJEPA's
    support: Any = None  # [K,D], NNCLR's
    index: Any = None  # [B], numbers of the images
    h: Any = None  # [B,2,H], of the encoder that learns
    frozen_h: Any = None  # of the teacher's
    patches: Any = None  # [N,M,D], of hidden patches
    slow_patches: Any = None  # of the same by the slow network
    hides: Any = None  # [N], whether a view hides them
    patch_centre: Any = None  # [K], of iBOT
    targets: Any = None  # [B,2,K], SwAV's, where they are held; None: those of z


class Options(NamedTuple):
    """What the twins read of config.method."""

    temperature: float = 0.3
    distill_temperature: float = 0.5
    weight: float = 0.7
    negative_weight: float = 0.4
    form: str = "code"
    pn1: bool = True
    pn2: bool = True
    pseudo_negatives: str = "all"
    scale: float = 0.1
    off_diagonal: float = 5e-3
    invariance: float = 3.0
    variance: float = 2.0
    covariance: float = 0.6
    balance: str = "centre"
    normality: float = 0.3
    target_temperature: float = 0.5  # SwAV's
    smoothing: float = 0.2
    ibot: float = 0.0
    koleo: float = 0.0


def of_library(x: records.Features) -> Features:
    """The library's features, as the twins have them."""
    names = set(Features._fields) & set(records.Features._fields)
    queue = x.state.rows if isinstance(x.state, queue_lib.Queue) else None
    return Features(
        **{name: getattr(x, name) for name in names},
        key_queue=queue,
        prototypes=x.params.get("prototypes"),
        distil_prototypes=x.distil_params.get("prototypes"),
        slow_prototypes=x.slow_params.get("prototypes"),
        frozen_prototypes=x.frozen_params.get("prototypes"),
    )


def for_library(base: str, x: Features) -> records.Features:
    """The twins' features, as a base of the library has them, in float32."""
    single = Features(
        *(np.float32(v) if getattr(v, "dtype", None) == np.float64 else v for v in x)
    )
    names = set(Features._fields) & set(records.Features._fields)
    layers = {
        f"{name}params": {"prototypes": getattr(single, f"{name}prototypes")}
        for name in ("", "distil_", "slow_", "frozen_")
    }
    centres = dino_base.Centres(single.centre, single.patch_centre)
    state = {"dino": centres, "mocov2plus": queue_lib.Queue(single.key_queue, 0)}
    state["nnclr"] = queue_lib.Queue(single.support[None], 0)
    prepared = {"dino": single.target_temperature, "lejepa": single.slices}
    return records.Features(
        **{name: getattr(single, name) for name in names},
        **layers,
        state=state.get(base),
        prepared=prepared.get(base),
    )


VIEWS = ((0, 1), (1, 0))  # a view and the other one


def cross_entropy(anchors, positives, negatives, tau, inside=True):
    """-s(a, p) + log(exp s(a, p) + sum_n exp s(a, n)), the mean over rows.

    Without `inside` the positive is not in the sum.
    """
    a, p = twins.unit(anchors), twins.unit(positives)
    right = np.sum(a * p, axis=1) / tau
    total = np.exp(a @ negatives.T / tau).sum(axis=1)
    return np.mean(np.log(total + inside * np.exp(right)) - right)


def moco(x, o):
    """The query of a view meets the key and the bank of the other one."""
    terms = [
        cross_entropy(x.z[:, v], x.k[:, w], x.key_queue[w], o.temperature)
        for v, w in VIEWS
    ]
    return np.mean(terms)


def moco_pnr(x, o):
    """PNR, Eq. 2 + 3: both banks of the other view are negatives of both terms."""
    total, inside = 0.0, o.form == "code"
    for v, w in VIEWS:
        both = np.concatenate([x.key_queue[w], x.frozen_queue[w]])
        first = both if o.pn1 else x.key_queue[w]
        second = both if o.pn2 else x.frozen_queue[w]
        total += cross_entropy(x.z[:, v], x.k[:, w], first, o.temperature)
        total += cross_entropy(
            x.p[:, v], x.f[:, v], second, o.distill_temperature, inside
        )
    return total / 2


def _rows(views):
    """Unit rows of both views: 2i and 2i + 1 are of example i."""
    return twins.unit(views.reshape(-1, views.shape[-1]))


def _others(logits):
    """Logarithm of the sum over j != i of exp logits_ij."""
    return np.log(np.exp(logits).sum(axis=1) - np.exp(np.diag(logits)))


def _partner(count):
    """The other view of the same example."""
    return np.arange(count) ^ 1


def simclr(x, o):
    z = _rows(x.z)
    s, every = z @ z.T / o.temperature, np.arange(len(z))
    return np.mean(_others(s) - s[every, _partner(len(z))])


def _of_both(anchors, sets, tau):
    """Logarithm of the sum over sets and j != i of exp s(anchors_i, set_j)."""
    return np.logaddexp.reduce([_others(anchors @ rows.T / tau) for rows in sets])


def _kept_apart(x, o):
    """PNR's second term, Eq. 3: g(z) near its frozen feature, far from all others."""
    z, p, f = map(_rows, (x.z, x.p, x.f))
    tau = o.distill_temperature
    total = _of_both(p, (f, z) if o.pn2 else (f,), tau)
    return np.mean(total - np.sum(p * f, axis=1) / tau)


def simclr_pnr(x, o):
    z, f, tau = _rows(x.z), _rows(x.f), o.distill_temperature
    right = np.sum(z * z[_partner(len(z))], axis=1) / tau
    total = _of_both(z, (z, f) if o.pn1 else (z,), tau)
    return np.mean(total - right) + _kept_apart(x, o)


def _pull(x, tau):
    """Mean of s(i, p) over the positives p of each row: all others of its label."""
    z, labels = _rows(x.z), np.repeat(x.label, 2)
    alike = (labels[:, None] == labels) & ~np.eye(len(z), dtype=bool)
    return np.sum(alike * (z @ z.T), axis=1) / alike.sum(axis=1) / tau


def supcon(x, o):
    z, tau = _rows(x.z), o.temperature
    return np.mean(_others(z @ z.T / tau) - _pull(x, tau))


def supcon_pnr(x, o):
    """With "other_classes" each sum over pseudo-negatives lacks the anchor's class."""
    if o.pseudo_negatives == "all":
        z, f, tau = _rows(x.z), _rows(x.f), o.temperature
        total = _of_both(z, (z, f) if o.pn1 else (z,), tau)
        return np.mean(total - _pull(x, tau)) + _kept_apart(x, o)
    z, p, f, labels = *map(_rows, (x.z, x.p, x.f)), np.repeat(x.label, 2)
    apart = labels[:, None] != labels

    def total(anchors, rows, pseudo, wanted, tau):
        both = np.exp(_others(anchors @ rows.T / tau))
        return np.log(
            both + wanted * np.sum(apart * np.exp(anchors @ pseudo.T / tau), 1)
        )

    kept = total(p, f, z, o.pn2, o.distill_temperature)
    kept -= np.sum(p * f, axis=1) / o.distill_temperature
    first = total(z, z, f, o.pn1, o.temperature)
    return np.mean(first - _pull(x, o.temperature)) + np.mean(kept)


def contrastive_distil(x, o):
    s = _rows(x.p) @ _rows(x.f).T / o.distill_temperature
    if o.form == "paper":
        return np.mean(_others(s) - np.diag(s))
    return np.mean([np.log(np.exp(t).sum(axis=1)) - np.diag(t) for t in (s, s.T)])


def correlation(a, b, o):
    """Barlow Twins, Eq. 1, of standardised features."""
    a, b = ((x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5) for x in (a, b))
    c = a.T @ b / len(a)
    own = np.sum((np.diag(c) - 1) ** 2)
    return o.scale * (own + o.off_diagonal * (np.sum(c**2) - np.sum(np.diag(c) ** 2)))


def barlow(x, o):
    return correlation(x.z[:, 0], x.z[:, 1], o)


def barlow_distil(x, o):
    return np.mean([correlation(x.p[:, v], x.f[:, v], o) for v in (0, 1)])


def cosine(a, b):
    return np.mean(np.sum(twins.unit(a) * twins.unit(b), axis=-1))


def squared(a, b):
    return np.sum((a - b) ** 2, axis=-1)


def byol(x, o):
    total = sum(2 - 2 * cosine(x.o[:, v], x.k[:, w]) for v, w in VIEWS)
    return total / 2 if o.form == "paper" else total


def byol_distil(x, o):
    if o.form == "paper":
        return np.mean(squared(x.p, x.f))
    return 2 - 2 * cosine(x.p, x.f)


def _features(x, o):
    """What a sum over the features is divided by: the released code's are means."""
    return 1 if o.form == "paper" else x.z.shape[-1]


def vicreg(x, o):
    total = o.invariance * np.mean(squared(x.z[:, 0], x.z[:, 1])) / _features(x, o)
    for v in (0, 1):
        view = x.z[:, v]
        spread = np.sqrt(view.var(axis=0, ddof=1) + 1e-4)
        c = np.cov(view.T)
        off = (np.sum(c**2) - np.sum(np.diag(c) ** 2)) / len(c)
        total += o.variance * np.mean(np.maximum(1 - spread, 0)) + o.covariance * off
    return total


def vicreg_distil(x, o):
    return np.mean(squared(x.p, x.f)) / _features(x, o)


def simsiam(x, o):
    return -np.mean([cosine(x.o[:, v], x.z[:, w]) for v, w in VIEWS])


def cosine_distil(x, o):
    return 2 - 2 * cosine(x.p, x.f)


def _all_views(x):
    return x.z if x.local is None else np.concatenate([x.z, x.local], axis=1)


def normal(column, form):
    """Epps-Pulley of numbers, by trapezoids over all of the range."""
    t = np.linspace(-3, 3, 33) if form == "code" else np.linspace(-5, 5, 17)
    gap = np.exp(1j * t[:, None] * column).mean(axis=1) - np.exp(-(t**2) / 2)
    height = np.abs(gap) ** 2 * np.exp(-(t**2) / 2)
    return len(column) * np.sum((height[1:] + height[:-1]) / 2) * (t[1] - t[0])


def lejepa(x, o):
    """Eq. 6: the mean view is that of the two global ones."""
    views = _all_views(x)
    apart = np.mean(squared(views, x.z.mean(axis=1, keepdims=True))) / _features(x, o)
    spread = [
        normal(views[:, v] @ a, o.form) for v in range(views.shape[1]) for a in x.slices
    ]
    return o.normality * np.mean(spread) + (1 - o.normality) * apart


def _softmax(logits):
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _balanced(logits):
    """Sinkhorn-Knopp, three times: prototypes to B / K, examples to 1."""
    q, (rows, count) = np.exp(logits - logits.max()), logits.shape
    for _ in range(3):
        q = q / q.sum(axis=0) * rows / count
        q = q / q.sum(axis=1, keepdims=True)
    return q


def _over(z, prototypes):
    return twins.unit(z) @ twins.unit(prototypes).T


def dino(x, o):
    views = _all_views(x)
    tau, slow = float(x.target_temperature), _over(x.k, x.slow_prototypes)
    terms = []
    for g in (0, 1):
        if o.balance == "sinkhorn":
            q = _balanced(slow[:, g] / tau)
        else:
            q = _softmax((slow[:, g] - x.centre) / tau)
        for v in range(views.shape[1]):
            if v != g:
                p = _softmax(_over(views[:, v], x.prototypes) / o.temperature)
                terms.append(-np.mean(np.sum(q * np.log(p), axis=1)))
    total = np.mean(terms)
    if o.ibot:
        total += o.ibot * ibot(x, o)
    if o.koleo:
        total += o.koleo * sum(koleo(x.h[:, v]) for v in (0, 1))
    return total


def ibot(x, o):
    """Hidden patches have the targets of the network that sees them."""
    slow = _over(x.slow_patches, x.slow_prototypes)
    tau = float(x.target_temperature)
    if o.balance == "sinkhorn":
        q = _balanced(slow.reshape(-1, slow.shape[-1]) / tau).reshape(slow.shape)
    else:
        q = _softmax((slow - x.patch_centre) / tau)
    p = _softmax(_over(x.patches, x.prototypes) / o.temperature)
    hidden = np.asarray(x.hides) > 0
    return -np.mean(np.sum(q * np.log(p), axis=-1)[hidden])


def koleo(h):
    unit = twins.unit(h)
    apart = np.linalg.norm(unit[:, None] - unit, axis=-1) + 9 * np.eye(len(h))
    return -np.mean(np.log(apart.min(axis=1)))


def dino_distil(x, o):
    q = _softmax(_over(x.f, x.frozen_prototypes) / o.distill_temperature)
    p = _softmax(_over(x.p, x.distil_prototypes) / o.distill_temperature)
    return -np.mean(np.sum(q * np.log(p), axis=-1))


def swav_targets(x, o):
    """The assignments of both views, which have no gradient."""
    views = (_over(x.z[:, v], x.prototypes) / o.target_temperature for v in (0, 1))
    return np.stack([_balanced(view) for view in views], axis=1)


def swav(x, o):
    views = _all_views(x)
    targets = swav_targets(x, o) if x.targets is None else x.targets
    terms = []
    for g in (0, 1):
        for v in range(views.shape[1]):
            if v != g:
                p = _softmax(_over(views[:, v], x.prototypes) / o.temperature)
                terms.append(-np.mean(np.sum(targets[:, g] * np.log(p), axis=1)))
    return np.mean(terms)


def nnclr(x, o):
    terms = []
    for v, w in VIEWS:
        near = [x.support[np.argmax(x.support @ row)] for row in twins.unit(x.z[:, v])]
        s = np.stack(near) @ twins.unit(x.o[:, w]).T / o.temperature
        terms.append(np.mean(np.log(np.exp(s).sum(axis=1)) - np.diag(s)))
    return np.mean(terms)


def diet(x, o):
    total = 0.0
    for row, index in zip(x.z, x.index, strict=True):
        for logits in row:
            wanted = np.full(len(logits), o.smoothing / len(logits))
            wanted[index] += 1 - o.smoothing
            total -= np.sum(wanted * np.log(_softmax(logits)))
    return total / (len(x.z) * x.z.shape[1])


def _swapped(x):
    """The frozen feature of the other view."""
    return x.f[:, ::-1]


def apart_barlow(x, o):
    if o.form == "paper":  # Eq. 5: a sum over the batch, the mean of both view orders
        return np.sum(squared(x.p, _swapped(x))) / 2
    return -cosine(x.p, _swapped(x))


def apart_byol(x, o):
    if o.form == "paper":
        return np.mean(squared(x.p, _swapped(x)))
    return 2 - 2 * cosine(x.p, _swapped(x))


def apart_vicreg(x, o):
    return np.mean(squared(x.p, _swapped(x))) / _features(x, o)


def apart_cosine(x, o):
    return -cosine(x.p, _swapped(x))


def _without_negatives(loss, distil, apart):
    """PNR, Eq. 4 + 5: CaSSLe's loss less lambda times a distance."""

    def pnr(x, o):
        cassle = loss(x, o) + o.weight * distil(x, o)
        return cassle - o.negative_weight * apart(x, o) * o.pn2

    return pnr


# base -> its loss, its distillation, PNR's whole loss
BASES = {
    "simclr": (simclr, contrastive_distil, simclr_pnr),
    "mocov2plus": (moco, contrastive_distil, moco_pnr),
    "supcon": (supcon, contrastive_distil, supcon_pnr),
    "diet": (diet, None, None),
} | {
    base: (loss, distil, _without_negatives(loss, distil, apart))
    for base, loss, distil, apart in (
        ("barlow_twins", barlow, barlow_distil, apart_barlow),
        ("simsiam", simsiam, cosine_distil, apart_cosine),
        ("dino", dino, dino_distil, apart_cosine),
        ("lejepa", lejepa, vicreg_distil, apart_vicreg),
        ("swav", swav, dino_distil, apart_cosine),
        ("nnclr", nnclr, contrastive_distil, apart_cosine),
        ("byol", byol, byol_distil, apart_byol),
        ("vicreg", vicreg, vicreg_distil, apart_vicreg),
    )
}


def held(x):
    """DER: the mean squared distance of replayed rows to what was stored."""
    rows = (x.replayed - x.stored)[x.stored_mask]
    return np.mean(rows**2) if len(rows) else 0.0


# strategy -> what it adds to the base's loss, times the weight; PNR has its own, and
# the penalties of EWC and L2-SP are no terms of the loss
ADDED = {
    "finetune": lambda base, x, o: 0.0,
    "cassle": lambda base, x, o: BASES[base][1](x, o),
    "less_forget": lambda base, x, o: 1 - cosine(x.z, x.f),
    "lwf_features": lambda base, x, o: (
        np.sum((x.h - x.frozen_h) ** 2) / np.sum(x.frozen_h**2)
    ),
    "l2_sp": lambda base, x, o: 0.0,
    "ewc": lambda base, x, o: 0.0,
    "der": lambda base, x, o: held(x),
    "lump": lambda base, x, o: 0.0,
}


def loss(base, strategy, x, o):
    """What a task after the first is trained with, without penalties on weights."""
    alone, _, pnr = BASES[base]
    if strategy == "pnr":
        return pnr(x, o)
    return alone(x, o) + o.weight * ADDED[strategy](base, x, o)
