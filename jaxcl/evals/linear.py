"""Linear probe: how well one linear layer on frozen features tells the classes.

Sources: the offline linear evaluation of CaSSLe (Fini et al., CVPR 2022) and PNR
(Cha et al., ICML 2024): SGD, learning rate not scaled by the batch, times 0.1
after epochs 60 and 80, random resized crops and flips, encoder in evaluation mode.

The layer starts as PyTorch's nn.Linear, uniform in +-1/sqrt(D), and weight decay
also acts on its bias, as PyTorch's SGD. An epoch drops its incomplete last batch;
a set smaller than a batch is one batch, masked (in memory) or with rows repeated
(streaming). Order, augmentation and start are a function of (seed, task, epoch).

Departures: one layer learns from every class at each task ("all", as the released
code does; the papers' text says the classes seen so far: train_on="seen").
`fraction` draws the rows of a semi-supervised probe from numbers of its own: the
released split of PNR's Table 6 is another draw of the same size.
Images that stream are cropped by the workers from NumPy's random numbers, so that
an augmented probe of the same set in memory sees other crops and another order.
"""

import time
from collections.abc import Callable

import jax
import numpy as np

from jaxcl import augment as augment_lib
from jaxcl import core, sharding
from jaxcl.data import prefetch
from jaxcl.evals import features as features_lib
from jaxcl.evals import head as head_lib

_RATIO = (3 / 4, 4 / 3)


def _augmented(parts, scale, flip, normalize):
    """(state, images u8[B,h,w,C] or u8[B,1,S,S,C], key) -> features f32[B, D]."""
    whole = sharding.replicated(parts.mesh)
    view = augment_lib.make(
        size=parts.size, views=1, scale=scale, ratio=_RATIO, interpolation="bilinear",
        jitter_probability=0.0, grayscale=0.0, flip=flip,
        mean=parts.mean, std=parts.std,
    )  # fmt: skip

    def embed(state, images, key):
        found = parts.embed(state, view(key, images)[:, 0])
        found = jax.lax.with_sharding_constraint(found, whole)
        return features_lib.unit(found) if normalize else found

    return embed


def _fitting(parts, sgd, use_augment, scale, flip, normalize):
    """How a probe reads the train split.

    Returns:
      fit, see `head_lib.resident_fit`, and (state, D) -> the `data` it wants.
    """
    dataset = parts.stream.dataset
    labels = sharding.replicate(dataset.train.label, parts.mesh)
    if not use_augment:
        embed = _plain(parts, dataset.train, normalize)

        def look_up(state, features, at, key):
            return features[at]

        return head_lib.resident_fit(
            sgd, parts, labels, look_up
        ), lambda state, _: embed(state)
    embed = _augmented(parts, scale, flip, normalize)
    if dataset.train.images is None:
        crop = prefetch.Crop(
            size=parts.size, scale=scale, ratio=_RATIO, interpolation="bilinear",
            decoder=dataset.decoder or "auto",
        )  # fmt: skip
        return head_lib.streamed_fit(sgd, parts, crop, embed), lambda state, dim: dim
    images = features_lib.place(parts, dataset.train)
    rows = features_lib.constraint(parts, sgd.batch_size)

    def read(state, images, at, key):
        at = jax.lax.with_sharding_constraint(at, rows)
        return embed(state, images[at], key)

    return head_lib.resident_fit(sgd, parts, labels, read), lambda state, _: images


def _plain(parts, examples, normalize):
    """State -> f32[n, D], features of a split without augmentation."""
    embed = features_lib.make(parts, examples)
    unit = jax.jit(features_lib.unit)
    return lambda state: unit(embed(state)) if normalize else embed(state)


def _evaluate(
    parts, train_on, share, embed_test, data_of, fit, judge, groups
) -> Callable:
    """The evaluator, of its compiled parts; `share` bool[N], rows with a label."""
    logits = jax.jit(head_lib.logits)

    def evaluate(state, task: int) -> core.Result:
        began = time.monotonic()
        held = embed_test(state)
        data = data_of(state, held.shape[1])
        mask = share & features_lib.train_mask(groups, train_on, task)
        head, loss = fit(state, data, np.flatnonzero(mask), task, 0)
        right = judge(logits(head, held))
        rows = {name: features_lib.per_task(parts, row) for name, row in right.items()}
        if "task_aware" in rows:
            told = features_lib.blank_unseen(rows["task_aware"], train_on, task)
            rows["task_aware"] = told
        elif groups.aware == "domain_aware":
            rows["domain_aware"] = np.full(len(parts.stream.tasks), np.nan)
            for t in range(task + 1 if train_on == "seen" else len(groups.classes)):
                mine = np.flatnonzero(share & (groups.train_task == t))
                head, _ = fit(state, data, mine, task, t + 1)
                own = judge(logits(head, held))["class_incremental"]
                rows["domain_aware"][t] = features_lib.per_task(parts, own)[t]
        scalars = {
            "accuracy": float(right["class_incremental"].mean()),
            "train_loss": float(sharding.fetch(loss)),
            "seconds": time.monotonic() - began,
        }
        return core.Result(rows, scalars)

    return evaluate


def _check(parts, sgd, train_on, use_augment, scale, flip):
    numbers = "config.evaluators.linear."
    core.check_choice(numbers + "train_on", train_on, ("all", "seen"))
    whole = "a whole number >= 1"
    for name, good, allowed in (
        ("epochs", isinstance(sgd.epochs, int) and sgd.epochs >= 1, whole),
        ("batch_size", isinstance(sgd.batch_size, int) and sgd.batch_size >= 1, whole),
        ("lr", sgd.lr > 0, "> 0"),
        ("momentum", 0 <= sgd.momentum < 1, "in [0, 1)"),
        ("weight_decay", sgd.weight_decay >= 0, ">= 0"),
        ("milestones", all(m > 0 for m in sgd.milestones), "epochs >= 1"),
        ("factor", sgd.factor > 0, "> 0"),
    ):
        features_lib.require(f"linear.{name}", getattr(sgd, name), good, allowed)
    good = len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1
    features_lib.require(
        "linear.scale", scale, good, "(low, high), 0 < low <= high <= 1"
    )
    features_lib.require("linear.flip", flip, 0 <= flip <= 1, "in [0, 1]")
    if use_augment and parts.stream.dataset.train.images is None:
        share = sgd.batch_size % parts.mesh.size == 0
        allowed = f"a multiple of the {parts.mesh.size} devices for images that stream"
        features_lib.require("linear.batch_size", sgd.batch_size, share, allowed)


def _check_fraction(fraction, seed):
    good = 0 < fraction <= 1
    features_lib.require("linear.fraction", fraction, good, "above 0 and at most 1")
    good = isinstance(seed, int) and seed >= 0
    features_lib.require("linear.fraction_seed", seed, good, "a whole number >= 0")


def make(
    parts,
    *,
    epochs=100,
    batch_size=256,
    lr=0.1,
    momentum=0.9,
    weight_decay=0.0,
    milestones=(60, 80),
    factor=0.1,
    train_on="all",
    augment=True,
    scale=(0.08, 1.0),
    flip=0.5,
    normalize_features=False,
    fraction=1.0,
    fraction_seed=0,
) -> Callable:
    """Linear evaluation after a task.

    Args:
      parts: core.EvalParts.
      lr, momentum, weight_decay: of SGD; lr is times `factor` from each of the
        `milestones` (epochs, from 0) on.
      train_on: "all" train rows after every task, or those of the tasks "seen".
      augment: random resized crops (`scale`, share of the area) and flips (with
        probability `flip`) anew each epoch; False embeds each train image once.
      normalize_features: to length 1.
      fraction: the share of the train rows that has labels (1.0: all), see
        `features.stratified`; the probe trains on these alone. It does not depend
        on the run's seed or the task, and a smaller share is within a larger one.
      fraction_seed: of the draw.

    Returns:
      evaluate(state, task) -> core.Result. Rows (accuracy per task, nan without
      test rows): "class_incremental", over all classes ("data" and "joint": every
      task has all test rows, so that each column is the same number); where tasks
      are disjoint classes also "task_aware", the same head over the task's classes;
      where tasks are domains also "domain_aware", a probe of its own per domain,
      nan for domains to come under "seen". Scalars: "accuracy" on all evaluation
      rows, "train_loss" of the last epoch, "seconds".

    Raises:
      ValueError: an option out of its range; no evaluation split; no labels.
    """
    scale, flip = tuple(scale), float(flip)
    sgd = head_lib.Sgd(
        epochs, batch_size, lr, momentum, weight_decay, tuple(milestones), factor
    )
    _check(parts, sgd, train_on, augment, scale, flip)
    _check_fraction(fraction, fraction_seed)
    features_lib.check_labels(parts, "linear")
    groups = features_lib.split(parts)
    embed_test = _plain(parts, parts.stream.evaluation, normalize_features)
    judge = features_lib.verdicts(parts, groups, parts.stream.evaluation)
    fit, data_of = _fitting(parts, sgd, augment, scale, flip, normalize_features)
    share = features_lib.stratified(
        parts.stream.dataset.train, fraction=fraction, seed=fraction_seed
    )
    return _evaluate(parts, train_on, share, embed_test, data_of, fit, judge, groups)
