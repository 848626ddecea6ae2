"""Compare answers on labelled images with those of a reference encoder.

The reference is the encoder that a chain of updates began with, or one that the user
named since. RUN/updates/references/0001.npz holds its answers; the number is that of
the update that wrote the file. A newer reference has a file of its own.
"""

import hashlib
import json
from typing import NamedTuple

import numpy as np
from etils import epath

from jaxcl import storage
from jaxcl.data.images import array_files, listing
from jaxcl.data.stream import identity
from jaxcl.errors import Refused
from jaxcl.run import transfer, updates
from jaxcl.update import gate

FOLDER = "references"
FEWEST = 50  # images that decide, or that choose


class LabelledImages(NamedTuple):
    """The labelled images of --test, and how they are evaluated."""

    names: np.ndarray  # S[N], of the evaluation rows
    marks: np.ndarray  # u64[N], digests of the images; 0: unreadable
    classes: np.ndarray  # S[N], class names
    protocol: str  # digest of the evaluators and of the rows that they learn from


class Reference(NamedTuple):
    """The answers of the reference encoder."""

    run: str  # directory, which may be gone
    images: LabelledImages
    right: dict[str, np.ndarray]  # matrix -> bool[N]


class Comparison(NamedTuple):
    """A plan of how an update is compared with the reference."""

    number: int  # of the update
    images: LabelledImages
    reference: Reference | None  # None: `run` answers
    run: str  # directory of the reference
    rows: np.ndarray  # i64[n], rows of `images` that decide
    at: np.ndarray | None  # i64[n], the same images in `reference`; None: all rows
    choosing: np.ndarray  # bool[N], rows that choose among candidates, and only that
    share: gate.Share
    renewed: bool  # no image judged an earlier update
    change: float  # share of images whose answer usually changes
    remarks: tuple[str, ...]  # sentences for the user


def describe_images(data: identity.Identity, evaluators: dict) -> LabelledImages:
    """Describe the labelled images of a set.

    Args:
      data: identity of the set; its test rows are evaluated.
      evaluators: section of the config.
    """
    classes = np.append(data.class_names, b"")[data.label]
    test, train = data.rows("test"), data.rows("train")
    learnt = sorted(zip(data.marks[train].tolist(), classes[train], strict=True))
    text = json.dumps(evaluators, sort_keys=True, default=str) + repr(learnt)
    protocol = hashlib.sha256(text.encode()).hexdigest()
    return LabelledImages(data.names[test], data.marks[test], classes[test], protocol)


def match_images(
    first: LabelledImages, second: LabelledImages
) -> tuple[np.ndarray, np.ndarray]:
    """Find the images that two sets have in common, i64[n] rows of each.

    An image is the same if its bytes and its class are. Repeated images are matched in
    order.
    """
    places: dict = {}
    for row, key in enumerate(_list_keys(second)):
        places.setdefault(key, []).append(row)
    rows, other_rows = [], []
    for row, key in enumerate(_list_keys(first)):
        if places.get(key):
            rows.append(row)
            other_rows.append(places[key].pop(0))
    return np.array(rows, int), np.array(other_rows, int)


def _list_keys(images):
    """List what identifies each image; an unreadable one has its name."""
    columns = (images.names, images.marks, images.classes)
    for name, mark, kind in zip(*(x.tolist() for x in columns), strict=True):
        yield (mark or name, kind)


def find_choosing(images: LabelledImages) -> np.ndarray:
    """Mark a third of the images, which choose among candidates, bool[N].

    The bytes of an image decide, so it stays in its part in every update.
    """
    return np.array(
        [
            hashlib.blake2b(repr(key).encode()).digest()[0] % 3 == 0
            for key in _list_keys(images)
        ],
        bool,
    )


def find_file(run: str) -> epath.Path | None:
    """Find the file of the present reference; None without one."""
    folder = epath.Path(run) / updates.UPDATES / FOLDER
    entries = folder.iterdir() if folder.exists() else ()
    numbered = [path for path in entries if path.name.removesuffix(".npz").isdigit()]
    return max(numbered, key=lambda path: int(path.name[:-4]), default=None)


def read_reference(path: epath.PathLike) -> Reference:
    """Read the answers of a reference.

    Raises:
      Refused: the file is damaged.
    """
    try:
        arrays = array_files.read_npz(str(path))
        metadata = json.loads(str(arrays.pop("about")))
        names, marks, classes = (arrays[x] for x in ("names", "marks", "classes"))
        images = LabelledImages(names, marks, classes, metadata["protocol"])
        right = dict(zip(metadata["matrices"], arrays["right"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"{path} is damaged: {error}; remove it, and name a reference: --reference="
        ) from error
    return Reference(metadata["run"], images, right)


def write_reference(run: str, number: int, reference: Reference) -> str:
    """Write the answers of a reference, unless its file is there; return the path."""
    path = epath.Path(run) / updates.UPDATES / FOLDER / f"{number:04d}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        images, names = reference.images, list(reference.right)
        metadata = {
            "run": reference.run,
            "matrices": names,
            "protocol": images.protocol,
        }
        right = [reference.right[name] for name in names]
        with storage.replacing(path) as file:
            np.savez_compressed(
                file,
                names=images.names,
                marks=images.marks,
                classes=images.classes,
                right=np.array(right, bool).reshape(len(names), len(images.marks)),
                about=np.array(json.dumps(metadata)),
            )
    return str(path)


def read_answers(folder: epath.PathLike) -> dict[str, np.ndarray]:
    """Read the answers that an evaluation left in its folder; {} without any."""
    path = epath.Path(folder) / transfer.ANSWERS
    if not path.exists():
        return {}
    return array_files.read_npz(str(path))


def is_there(run: str) -> bool:
    """Tell whether the encoder of a run, or of an encoder's folder, can be read."""
    try:
        config = transfer.config_of(run)
        return "card" in config or bool(config) and _has_weights(run)
    except (Refused, OSError):
        return False


def _has_weights(run) -> bool:
    from jaxcl.run import encoder_folder

    return encoder_folder.exists_at(run) or bool(transfer.find_checkpoints(run).numbers)


def list_past(run: str, before: epath.PathLike) -> list[dict]:
    """List the reports of the updates that were compared with a reference.

    Args:
      run: directory of the run.
      before: directory of the next update; later ones do not count.
    """
    number = int(epath.Path(before).name)
    earlier = [path for path in updates.list_updates(run) if int(path.name) < number]
    reports = (updates.read_report(path) or {} for path in earlier)
    return [report["gate"] for report in reports if "gate" in report]


def plan_comparison(
    run: str,
    workdir: epath.PathLike,
    parent: str,
    images: LabelledImages,
    *,
    budget: float,
    on_trust: bool,
    chooses: bool = False,
    named: str | None = None,
    by_bytes: bool = True,
) -> Comparison:
    """Plan how an update is compared with the reference of its chain.

    Args:
      run: directory of the run.
      workdir: directory of the update.
      parent: directory that the update continues.
      images: the labelled images.
      budget: error over all updates.
      on_trust: whether an undecided update may be accepted.
      chooses: whether a part of the images chooses among candidates.
      named: directory of a new reference; None: the present one.
      by_bytes: whether `images.marks` digest the bytes of the images.

    Raises:
      Refused: too few images are those that the reference answered, or are left.
    """
    past, remarks = list_past(run, workdir), []
    path = None if named else find_file(run)
    if path is not None and int(path.name[:-4]) >= int(epath.Path(workdir).name):
        path = None  # of the update that is repeated here
    reference = None if path is None else read_reference(path)
    rows, places = np.arange(len(images.marks)), None
    if reference is None:
        reference_run = named or parent
        if not named and updates.list_updates(run) and parent != str(run) and not past:
            remarks.append(
                f"This chain has no reference yet: it is the parent, {parent}."
            )
    else:
        reference_run = reference.run
        reference, rows, places, changes = _match_reference(reference, images)
        remarks += changes
    choosing = np.zeros(len(images.marks), bool)
    if chooses or any(update.get("choosing") for update in past):
        choosing = find_choosing(images)
        keep = ~choosing[rows]
        rows, places = rows[keep], None if places is None else places[keep]
        text = f"{choosing.sum():,} labelled images choose, {len(rows):,} others judge."
        if chooses and min(choosing.sum(), len(rows)) < FEWEST:
            raise Refused(
                f"config.average='auto': {text[:-1]}; must be {FEWEST} of each. Give "
                "--select=IMAGES, others that choose, or a number as --average"
            )
        remarks.append(text)
    if len(rows) == 0:
        raise Refused(f"config.test: no image is left to judge; see {updates.UPDATES}")
    renewed, unknown = _is_renewed(run, past, images, by_bytes)
    remarks += unknown
    history = [
        gate.PastUpdate(update["outcome"], update["on_trust"], update["renewed"])
        for update in past
    ]
    share = gate.share_budget(history, budget, on_trust=on_trust, renewed=renewed)
    changes = [x["changed"] for update in past for x in update["matrices"].values()]
    expected_change = float(np.mean(changes)) if changes else gate.USUAL_CHANGE
    number = int(epath.Path(workdir).name)
    return Comparison(
        number,
        images,
        reference,
        reference_run,
        rows,
        places,
        choosing,
        share,
        renewed,
        max(expected_change, 1 / len(rows)),
        tuple(remarks),
    )


def _match_reference(reference, images):
    """Find the images that the reference answered; None where it has to answer again.

    Returns:
      The reference or None, rows of the labelled images, the same images in the
      reference, and remarks.
    """
    all_rows = np.arange(len(images.marks))
    if reference.images.protocol != images.protocol:
        what = "the evaluators, or the images that they learn from, have changed since"
        if not is_there(reference.run):
            raise Refused(
                f"config.test: {what} the reference {reference.run} answered, and that "
                "encoder is gone; --reference=RUN names another, such as the parent"
            )
        remark = f"The reference {reference.run} answers again: {what}."
        return None, all_rows, None, [remark]
    rows, places = match_images(images, reference.images)
    if len(rows) == len(images.marks) == len(reference.images.marks):
        return reference, rows, places, []
    new = np.setdiff1d(all_rows, rows)
    removed = np.setdiff1d(np.arange(len(reference.images.marks)), places)
    changes = [
        f"{listing.say_names([x.decode(errors='replace') for x in names[index]])} {how}"
        for names, index, how in (
            (images.names, new, "new"),
            (reference.images.names, removed, "gone"),
        )
        if len(index)
    ]
    text = f"the labelled images have changed since the reference: {'; '.join(changes)}"
    if len(rows) < FEWEST:
        raise Refused(
            f"config.test: {text}; {len(rows)} are in common, must be {FEWEST}. "
            f"--reference={reference.run} lets that encoder answer the new ones; "
            "another may be named, such as the parent"
        )
    remark = f"{text[0].upper()}{text[1:]}. The {len(rows):,} in common decide."
    return reference, rows, places, [remark]


def _is_renewed(run, past, images, by_bytes) -> tuple[bool, list[str]]:
    """Return whether no labelled image judged an earlier update, and remarks.

    False where the earlier images are unknown: the error budget is not given back.
    """
    unknown = []
    for update in past:
        path = epath.Path(run) / updates.UPDATES / update["judge"]
        try:
            data = identity.read_identity(path)
        except (Refused, OSError):
            data = None
        if data is not None:
            used = data.marks[data.rows("test")]
            if np.isin(images.marks, used[used > 0]).any():
                return False, []
        if data is None or not (by_bytes and data.by_bytes):
            unknown.append(update["judge"])
    if not unknown:
        return bool(past), []
    return False, [
        f"The labelled images do not count as new: the bytes of those of {unknown[0]} "
        "are not known."
    ]


def compare_answers(
    plan: Comparison,
    before: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
    reference: dict[str, np.ndarray],
    limit: float | None,
    confidence: float,
) -> dict:
    """Compare the answers of an update with those of its parent and the reference.

    Args:
      plan: plan of the comparison.
      before, after: matrix -> bool[N], answers of the parent and of the new encoder.
      reference: the same of the reference, on its own rows where `plan.at` says so.
      limit: most that may be lost against the reference; None: no limit.
      confidence: over all updates, and of intervals.

    Returns:
      The record of the comparison, as JSON, without the outcome.
    """
    matrices = {}
    for name in after:
        if name not in before or name not in reference:
            continue
        places = plan.rows if plan.at is None else plan.at
        first, last = reference[name][places], after[name][plan.rows]
        pairs = gate.count_pairs(first, last)
        matrices[name] = {
            "reference": describe_pairs(first, last, confidence),
            "parent": describe_pairs(before[name][plan.rows], last, confidence),
            "changed": (pairs.lost + pairs.gained) / pairs.total,
        }
        if limit is not None and plan.share.error > 0:
            alarm = plan.share.alarm / len(after)  # of each of several matrices
            word = gate.decide(pairs, limit, plan.share.error, alarm)
            most = gate.bound_loss(pairs, plan.share.error)
            matrices[name] |= {"verdict": word, "most": most}
    return {
        "number": plan.number,
        "reference": plan.run,
        "images": len(plan.rows),
        "choosing": int(plan.choosing.sum()),
        "limit": limit,
        "confidence": confidence,
        "error": plan.share.error,
        "renewed": plan.renewed,
        "remarks": list(plan.remarks),
        "matrices": matrices,
    }


def describe_pairs(first: np.ndarray, last: np.ndarray, confidence: float) -> dict:
    """Describe the pairs of answers of two encoders, as JSON."""
    pairs = gate.count_pairs(first, last)
    low, high = gate.interval(pairs, confidence)
    counts = {"lost": pairs.lost, "gained": pairs.gained}
    accuracy = {"before": float(first.mean()), "after": float(last.mean())}
    return counts | accuracy | {"loss": pairs.loss, "low": low, "high": high}
