"""Evaluate frozen features by a linear probe.

Sources: the offline linear evaluation of CaSSLe (Fini et al., CVPR 2022) and PNR
(Cha et al., ICML 2024): SGD, learning rate not scaled by the batch, times 0.1
after epochs 60 and 80, random resized crops and flips, encoder in evaluation mode.

The layer starts as PyTorch's nn.Linear, uniform in +-1/sqrt(D), and weight decay also
acts on its bias, as in PyTorch's SGD. An epoch drops its incomplete last batch; a set
smaller than a batch is one batch, masked (in memory) or with repeated rows (streaming).
Order, augmentation and start depend on (seed, task, epoch) alone.

`PRESETS` names the protocols: this one, "cassle"; "cclis", the class-balanced probe of
Co2L (Cha et al., ICCV 2021) and CCLIS (Li et al., AAAI 2024), class- and
task-incremental; "duel", of DUEL (Choi et al., AAAI 2024, appendix E), which names no
augmentation of the probe's images, and "duel_longtail", its probe on ImageNet-LT.

Departures: after each task one layer learns from every class ("all", as the released
code does; the papers' text says the classes seen so far: train_on="seen"). `lrs`
chooses the learning rate on a cut of the train rows, which no paper here does. For a
semi-supervised probe `fraction` draws other rows than the split released for PNR's
Table 6, but as many. Workers crop images that stream with NumPy's random numbers, so an
augmented probe of the same set in memory sees other crops in another order. The
accuracy is measured after the last epoch (the released code of CCLIS and Co2L also
reports the best epoch on the test set, and keeps the incomplete last batch). Their blur
at 64 pixels has 7 taps; `images.make` has as many as its widest sigma needs.
"""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, schema, sharding
from jaxcl.data import stream
from jaxcl.data.augment import images as augment_images
from jaxcl.data.images import crops
from jaxcl.data.stream import splits
from jaxcl.evals import embedding, head
from jaxcl.nets import linear_head

_RATIO = (3 / 4, 4 / 3)
_CUT = 4  # keeps the draw of the cut apart from those of `splits` and `imbalance`


_DUEL = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 1e-6, "augment": False}
# Preset -> its settings; milestones as shares of the epochs.
PRESETS: dict[str, dict[str, Any]] = {
    "cassle": {"milestones": (0.6, 0.8)},
    "cclis": {
        "train_on": "visible",
        "balanced": True,
        "milestones": (0.6, 0.75, 0.9),
        "factor": 0.2,
        "scale": (0.2, 1.0),
        "jitter_probability": 0.8,
        "grayscale": 0.2,
    },
    "duel": _DUEL | {"milestones": ()},
    "duel_longtail": _DUEL
    | {"milestones": tuple(tenth / 10 for tenth in range(1, 10)), "factor": 0.5},
}


def _embed_augmented(parts, settings):
    """Make (state, images u8[B,h,w,C] or u8[B,1,S,S,C], key) -> features f32[B, D]."""
    replicated, normalize = sharding.replicated(parts.mesh), settings.normalize_features
    names = ("jitter", "flip", "jitter_probability", "grayscale", "blur")
    view = augment_images.make(
        size=parts.size,
        views=1,
        scale=tuple(settings.scale),
        ratio=_RATIO,
        interpolation="bilinear",
        mean=parts.mean,
        std=parts.std,
        **{name: getattr(settings, name) for name in names},
    )

    def embed(state, images, key):
        features = parts.embed(state, view(key, images)[:, 0])
        features = jax.lax.with_sharding_constraint(features, replicated)
        return embedding.unit_rows(features) if normalize else features

    return embed


def _embed_plain(parts, examples, normalize, rows=None):
    """Make state -> f32[n, D], the features of rows of a split, not augmented."""
    embed = embedding.make_embedder(parts, examples, rows=rows)
    unit = jax.jit(embedding.unit_rows)
    return lambda state: unit(embed(state)) if normalize else embed(state)


def _make_fit(parts, settings) -> tuple[Callable, Callable]:
    """Fit a probe to features, or to new views in each epoch.

    Returns:
      `fit`, see `head.make_resident_fit`, and the function (state, D) -> its argument
      `data`.
    """
    train, unit = parts.stream.dataset.train, settings.normalize_features
    labels = sharding.replicate(train.label, parts.mesh)
    resident = functools.partial(head.make_resident_fit, settings, parts, labels)
    if not settings.augment:
        embed_train = _embed_plain(parts, train, unit)
        fit = resident(lambda state, features, places, key: features[places])
        return fit, lambda state, _: embed_train(state)
    embed = _embed_augmented(parts, settings)
    if train.images is None:
        crop = crops.RandomCrop(
            size=parts.size,
            scale=tuple(settings.scale),
            ratio=_RATIO,
            interpolation="bilinear",
            decoder=parts.stream.dataset.decoder or "auto",
        )
        fit = head.make_streamed_fit(settings, parts, crop, embed)
        return fit, lambda state, dim: dim
    images = embedding.place_images(parts, train)
    even = settings.batch_size % parts.mesh.size == 0
    rows = (sharding.split_sharding if even else sharding.replicated)(parts.mesh)

    def read_features(state, images, places, key):
        places = jax.lax.with_sharding_constraint(places, rows)
        return embed(state, images[places], key)

    return resident(read_features), lambda state, _: images


def _usable_rows(parts, train_on, groups) -> Callable:
    """Make (state, task) -> bool[N], the train rows that a probe may use."""
    if train_on != "visible":
        return lambda state, task: embedding.train_mask(groups, train_on, task)
    replicated = sharding.replicated(parts.mesh)
    replayed = jax.jit(parts.replayed, out_shardings=replicated)

    def visible(state, task):
        mask = np.zeros(len(groups.train_task), bool)
        mask[parts.stream.tasks[task].train.rows] = True
        rows = sharding.copy_to_host(replayed(state))
        mask[rows[rows >= 0]] = True
        return mask

    return visible


def _make_trial(parts, settings, cut, groups) -> Callable:
    """Make the function that fits a probe to some train rows, and evaluates it.

    Args:
      cut: bool[N], train rows that choose the learning rate; none: it is fixed.

    Returns:
      (train_head, test_features, of_cut, mask bool[N]) -> name -> f64[M], 1 where the
      prediction is right, nan without one; the loss; the learning rate; warnings.
      `train_head` is (rows, learning rate) -> head and loss. `test_features` and
      `of_cut` are features of the evaluation rows and of the rows `cut`, or None.
    """
    grade = embedding.make_grader(parts, groups, parts.stream.evaluation)
    cut_labels = parts.stream.dataset.train.label[cut]
    of_chance = math.log(parts.num_classes)

    @jax.jit
    def score(probe, features):
        scores = linear_head.score_features(probe, features)
        return scores, jnp.isfinite(scores).all()

    def find_best_lr(train_head, of_cut, mask) -> float | None:
        """Choose the rate whose head is best on the cut, or the first.

        None if the cut has none of these rows, or if no fit is finite.
        """
        accuracy, in_mask, rows = {}, mask[cut], np.flatnonzero(mask & ~cut)
        for lr in settings.lrs if in_mask.any() else ():
            probe, _ = train_head(rows, lr)
            scores, finite = sharding.copy_to_host(score(probe, of_cut))
            if finite:
                guesses = scores[in_mask].argmax(axis=1)
                accuracy[lr] = (guesses == cut_labels[in_mask]).mean()
        return max(accuracy, key=accuracy.get) if accuracy else None

    def run_trial(train_head, test_features, of_cut, mask):
        lr, warnings = settings.lr, []
        if settings.lrs:
            best = find_best_lr(train_head, of_cut, mask)
            if best is None:
                lrs = settings.lrs
                warnings.append(f"none of lrs={lrs} could be evaluated: lr={lr}")
            else:
                lr = best
        probe, loss = train_head(np.flatnonzero(mask), lr)
        scores, finite = score(probe, test_features)
        loss = float(sharding.copy_to_host(loss))
        right = {name: row.astype(float) for name, row in grade(scores).items()}
        if not (math.isfinite(loss) and sharding.copy_to_host(finite)):
            # Scores of nan would predict class 0 for every row.
            right = {name: row + np.nan for name, row in right.items()}
            warnings.append(
                f"the fit with lr={lr} is not finite, so that it has no accuracy"
            )
        elif loss > of_chance:
            warnings.append(
                f"the fit with lr={lr} ends at a loss of {loss:.3g}, above the "
                f"{of_chance:.3g} of a head that knows nothing: take a lower lr, or "
                "let lrs choose one"
            )
        return right, loss, lr, warnings

    return run_trial


def _check_settings(parts, settings: head.ProbeSettings):
    """Refuse options that do not fit each other or the data."""
    if settings.train_on == "visible":
        need = "a method that says which rows it replayed, as cclis and co2l do"
        named = "linear.train_on='visible'"
        embedding.refuse_unless(parts.replayed, named, need, "choose 'seen' or 'all'")
    if settings.augment and parts.stream.dataset.train.images is None:
        allowed = "False for images that stream and are drawn class by class"
        embedding.require("linear.augment", True, not settings.balanced, allowed)
        size, devices = settings.batch_size, parts.mesh.size
        allowed = f"a multiple of the {devices} devices for images that stream"
        embedding.require("linear.batch_size", size, size % devices == 0, allowed)
    low, high = settings.scale
    allowed = "(low, high) with low <= high"
    embedding.require("linear.scale", settings.scale, low <= high, allowed)
    embedding.check_labels(parts, "linear")


@schema.checked("config.evaluators.linear")
@schema.debug(epochs=3, augment=False)
def make(
    parts: core.EvalParts,
    *,
    preset: Literal["cassle", "cclis", "duel", "duel_longtail"] = "cassle",
    epochs: schema.Count = 100,
    batch_size: schema.Count = 256,
    lr: schema.Positive | None = None,
    lrs: Annotated[tuple[schema.Positive, ...], schema.Entries(0, once=True)] = (),
    momentum: schema.Momentum = 0.9,
    train_on: Literal["all", "seen", "visible"] | None = None,
    augment: bool | None = None,
    scale: augment_images.Scale | None = None,
    blur: schema.Share | None = None,
    normalize_features: bool = False,
    fraction: Annotated[float, schema.Range(above=0, most=1)] = 1.0,
) -> Callable:
    """Build the evaluator by a linear probe on frozen features.

    Args:
      parts: the parts of every evaluator.
      preset: a protocol, see `PRESETS`: optimizer, decay, schedule, draw of the rows,
        augmentation, and the values of the options that are None.
      epochs, batch_size: length and batch size of the probe's training. The rate falls
        after the preset's shares of the epochs.
      lr: learning rate; None: 1e-3 for "duel" and "duel_longtail", else 0.1.
      lrs: rates to choose from, in place of `lr`. Each rate is fitted to the train rows
        outside a cut of a tenth; the rate with the best accuracy on the cut is then
        fitted to all train rows. Evaluation rows choose nothing. (): `lr` is fixed.
      momentum: SGD's momentum.
      train_on: rows to train on: "all" train rows after every task, rows of the tasks
        "seen", or the "visible" ones: the present task's rows and those that it
        replayed, each once. None: "visible" for "cclis", else "all".
      augment: whether every epoch draws new random resized crops, flips and the
        preset's colours; False embeds each train image once, without augmentation.
        None: False for "duel" and "duel_longtail", else True.
      scale: least and most share of the area in a crop; None: from 0.2 for "cclis",
        else from 0.08, to 1.
      blur: probability of a blur, see `images.make`; None: 0.
      normalize_features: whether features are scaled to length 1.
      fraction: share of the train rows that have labels (1.0: all), see
        `embedding.draw_stratified`; the probe trains on these alone. They do not depend
        on the run's seed or the task, and a larger share contains a smaller one.

    Returns:
      The evaluator that `make_evaluator` builds from these settings.

    Raises:
      Refused: an option out of its range; no evaluation split; no labels; "visible" for
        a method that does not say which rows it replayed.
    """
    embedding.check_learnable(parts.stream)
    options: dict[str, Any] = {"lr": lr, "train_on": train_on, "augment": augment}
    options |= {"scale": scale, "blur": blur}
    chosen = PRESETS[preset] | {k: v for k, v in options.items() if v is not None}
    shares = chosen["milestones"]
    chosen |= {"milestones": tuple(round(share * epochs) for share in shares)}
    settings = head.ProbeSettings(
        epochs=epochs,
        batch_size=batch_size,
        lrs=tuple(lrs),
        momentum=momentum,
        normalize_features=normalize_features,
        fraction=fraction,
        **chosen,
    )
    return make_evaluator(parts, settings)


def make_evaluator(parts: core.EvalParts, settings: head.ProbeSettings) -> Callable:
    """Build the evaluator of a probe's settings.

    Returns:
      evaluate(state, task) -> core.Result. Rows (accuracy per task, nan without test
      rows): "class_incremental", over all classes (under "data" and "joint" every task
      has all test rows, so all columns are the same number); if tasks are disjoint
      classes also "task_aware", the same head over the task's classes; if tasks are
      domains also "domain_aware", a separate probe for each domain, nan for a domain
      without usable train rows. A fit that is not finite has nan everywhere. Scalars:
      "accuracy" on all evaluation rows, "train_loss" of the last epoch, with `lrs` the
      "lr" that was chosen. It warns of a fit that is not finite, and of a
      train loss above log C.
    """
    _check_settings(parts, settings)
    unit, seed = settings.normalize_features, settings.fraction_seed
    train, groups = parts.stream.dataset.train, embedding.assign_tasks(parts)
    labelled = embedding.draw_stratified(train, fraction=settings.fraction, seed=seed)
    cut = np.zeros(len(labelled), bool)
    if settings.lrs:
        places = np.flatnonzero(labelled)
        rows = stream.Examples(train.label[places], train.domain[places])
        cut[places] = splits.draw_mask(rows, settings.held_out, [seed, _CUT])
        allowed = "() where every class has one labelled row"
        embedding.require("linear.lrs", settings.lrs, cut.any(), allowed)
    fit, data_of = _make_fit(parts, settings)
    run_trial = _make_trial(parts, settings, cut, groups)
    usable = _usable_rows(parts, settings.train_on, groups)
    embed_test = _embed_plain(parts, parts.stream.evaluation, unit)
    embed_cut = None
    if cut.any():
        embed_cut = _embed_plain(parts, train, unit, np.flatnonzero(cut))

    def evaluate(state, task: int) -> core.Result:
        features, of_cut = embed_test(state), embed_cut and embed_cut(state)
        data = data_of(state, features.shape[1])

        def fit_to(mask, number):
            def train_head(rows, lr):
                return fit(state, data, rows, task, number, lr)

            return run_trial(train_head, features, of_cut, mask)

        mask = labelled & usable(state, task)
        right, loss, lr, warnings = fit_to(mask, 0)
        rows = embedding.average_rows(parts, right)
        if "task_aware" in rows:
            rows["task_aware"] = embedding.blank_unseen(
                rows["task_aware"], settings.train_on, task
            )
        elif groups.aware == "domain_aware":  # a probe of its own for each domain
            rows["domain_aware"] = np.full(len(parts.stream.tasks), np.nan)
            for t in np.unique(groups.train_task[mask & (groups.train_task >= 0)]):
                alone, _, _, messages = fit_to(mask & (groups.train_task == t), t + 1)
                row = embedding.average_per_task(parts, alone["class_incremental"])
                rows["domain_aware"][t] = row[t]
                name = parts.stream.tasks[t].name
                warnings += [f"domain {name}: {words}" for words in messages]
        marks = right["class_incremental"]
        scalars = {"accuracy": float(marks.mean()), "train_loss": loss}
        scalars |= {"lr": lr} if settings.lrs else {}
        answers = None
        if not np.isnan(marks).any():
            answers = {"class_incremental": marks.astype(bool)}
        return core.Result(rows, scalars, tuple(warnings), answers)

    return evaluate
