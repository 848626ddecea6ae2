"""Losses of two-view methods in float64 NumPy, from the papers' equations.

`x` is a `Features` of NumPy arrays, `o` an `Options`. No loss of the library is called.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy import special

from helpers import loss_twins as f64
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
    cosine: float = 1.0  # of the distillation of config.teacher
    smooth_l1: float = 0.0
    base_weight: float = 0.0


def of_library(x: records.Features) -> Features:
    """The library's features, as the twins have them."""
    names = set(Features._fields) & set(records.Features._fields)
    queue = x.state.rows if isinstance(x.state, queue_lib.Queue) else None
    return Features(
        **{name: getattr(x, name) for name in names},
        key_queue=queue,
        prototypes=x.params.get("prototypes"),
        distil_prototypes=x.params.get("distil_prototypes"),
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
        for name in ("", "slow_", "frozen_")
    }
    layers["params"]["distil_prototypes"] = single.distil_prototypes
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


def _views(*pairs):
    """The views of each [N,2,D], apart: [N,D] each."""
    return [rows[:, v] for rows in pairs for v in (0, 1)]


def moco(x, o):
    """The query of a view meets the key and the bank of the other one."""
    terms = [
        f64.info_nce(x.z[:, v], x.k[:, w], x.key_queue[w], temperature=o.temperature)
        for v, w in VIEWS
    ]
    return np.mean(terms)


def moco_pnr(x, o):
    """PNR, Eq. 2 + 3: both banks of the other view are negatives of both terms."""
    temperatures = {"temperature": o.temperature}
    temperatures |= {"distill_temperature": o.distill_temperature}
    rows = *_views(x.z, x.k, x.p, x.f), x.key_queue, x.frozen_queue
    return f64.pnr_moco(*rows, form=o.form, pn1=o.pn1, pn2=o.pn2, **temperatures)


def simclr(x, o):
    return f64.nt_xent(*_views(x.z), o.temperature)


def simclr_pnr(x, o):
    rows = _views(x.z, x.p, x.f)
    return f64.pnr_simclr(*rows, o.distill_temperature, pn1=o.pn1, pn2=o.pn2)


def supcon(x, o):
    labels = np.concatenate([x.label, x.label])
    return f64.sup_con(np.concatenate(_views(x.z)), labels, o.temperature)


def supcon_pnr(x, o):
    """With "other_classes" each sum over pseudo-negatives lacks the anchor's class."""
    others = {"pn1": o.pn1, "pn2": o.pn2, "others": o.pseudo_negatives != "all"}
    temperatures = {"tau": o.temperature, "tau_d": o.distill_temperature}
    rows = _views(x.z, x.p, x.f)
    return f64.pnr_supcon(*rows, labels=x.label, **others, **temperatures)


def contrastive_distil(x, o):
    return f64.cassle(*_views(x.p, x.f), o.distill_temperature, o.form)


def correlation(a, b, o):
    """Barlow Twins, Eq. 1, of standardised features."""
    return f64.barlow(a, b, o.scale, o.off_diagonal)


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
    apart = o.invariance * x.z.shape[-1] / _features(x, o)
    return f64.vicreg(*_views(x.z), apart, o.variance, o.covariance)


def vicreg_distil(x, o):
    return np.mean(squared(x.p, x.f)) / _features(x, o)


def simsiam(x, o):
    return -np.mean([cosine(x.o[:, v], x.z[:, w]) for v, w in VIEWS])


def cosine_distil(x, o):
    return 2 - 2 * cosine(x.p, x.f)


def _all_views(x):
    return x.z if x.local is None else np.concatenate([x.z, x.local], axis=1)


def lejepa(x, o):
    """Eq. 6: the mean view is that of the two global ones."""
    return f64.lejepa(_all_views(x), x.slices, o.normality, o.form)


def _balanced(logits):
    """Sinkhorn-Knopp, three times: prototypes to B / K, examples to 1."""
    q, (rows, count) = np.exp(logits - logits.max()), logits.shape
    for _ in range(3):
        q = q / q.sum(axis=0) * rows / count
        q = q / q.sum(axis=1, keepdims=True)
    return q


def _balanced_together(logits):
    """All rows of both views at once."""
    return _balanced(logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)


def _over(z, prototypes):
    return twins.unit(z) @ twins.unit(prototypes).T


def dino(x, o):
    tau, slow = float(x.target_temperature), _over(x.k, x.slow_prototypes)
    if o.balance == "sinkhorn":
        q = _balanced_together(slow / tau)
    else:
        q = special.softmax((slow - x.centre) / tau, axis=-1)
    total = f64.dino(_over(_all_views(x), x.prototypes), q, o.temperature)
    if o.ibot:
        total += o.ibot * ibot(x, o)
    if o.koleo:
        total += o.koleo * sum(f64.koleo(x.h[:, v]) for v in (0, 1))
    return total


def ibot(x, o):
    """Hidden patches have the targets of the network that sees them."""
    slow = _over(x.slow_patches, x.slow_prototypes)
    tau = float(x.target_temperature)
    if o.balance == "sinkhorn":
        q = _balanced_together(slow / tau)
    else:
        q = special.softmax((slow - x.patch_centre) / tau, axis=-1)
    return f64.ibot(_over(x.patches, x.prototypes), q, x.hides, o.temperature)


def dino_distil(x, o):
    layers = x.distil_prototypes, x.frozen_prototypes
    return f64.cassle_prototypes(*_views(x.p, x.f), *layers, o.distill_temperature)


def swav_targets(x, o):
    """The assignments of both views, which have no gradient."""
    views = (_over(x.z[:, v], x.prototypes) / o.target_temperature for v in (0, 1))
    return np.stack([_balanced(view) for view in views], axis=1)


def swav(x, o):
    targets = swav_targets(x, o) if x.targets is None else x.targets
    return f64.dino(_over(_all_views(x), x.prototypes), targets, o.temperature)


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
            total -= np.sum(wanted * special.log_softmax(logits))
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


def matched(x, o):
    """The distillation of config.teacher: rows of each view that have a feature."""
    total = 0.0
    for v in (0, 1):
        rows = np.isfinite(x.f[:, v]).all(axis=1)
        p, f = x.p[rows, v], x.f[rows, v]
        total += o.cosine * f64.teacher_cosine(p, f)
        total += o.smooth_l1 * f64.teacher_smooth_l1(p, f)
    return total / 2


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
    if strategy == "distil":
        return o.base_weight * alone(x, o) + matched(x, o)
    return alone(x, o) + o.weight * ADDED[strategy](base, x, o)
