"""Check whether an update is due: `jaxcl check RUN --data=NEW_IMAGES`.

Nothing is trained. A sample of the new images is embedded and compared with one of the
run's; with --test the accuracy now is compared with that of the reference. The result
is written to RUN/checks/0001 and so on: check.json, and the nine new images that differ
most in most_different.png. Embeddings of the run's sample are kept for the next check.

Exit codes: 0 wait, 4 update, 5 look at the data; 1 and 2 as in `jaxcl.main`.
"""

import argparse
import json
import time
from typing import NamedTuple

import numpy as np
from etils import epath
from PIL import Image

from jaxcl import plots, sharding, storage
from jaxcl.config import build, command, own_images, transfer_config
from jaxcl.data import stream
from jaxcl.data.images import array_files
from jaxcl.data.stream import identity
from jaxcl.errors import Refused
from jaxcl.evals import embedding
from jaxcl.run import result_file, terminal, transfer, updates
from jaxcl.update import gate, lineage, mmd, references, verdict

WAIT, UPDATE, LOOK = "wait", "update", "look at the data"
EXIT_CODES = {WAIT: 0, UPDATE: 4, LOOK: 5}
FOLDER, FILE, PICTURE = "checks", "check.json", "most_different.png"
_SAMPLE = "sample.npz"  # embeddings of the run's images
_SURE = 0.01  # p-value from which samples differ
_MANY = 0.5  # share of duplicates that is no news
_STRANGE = 0.9  # share of far images that may be broken
_SHOWN, _SIDE = 9, 96  # images in the picture, pixels of a side


class _Sample(NamedTuple):
    """Embedded images."""

    features: np.ndarray  # f32[n, D]
    remarks: list[str]


def check(
    run: str,
    data: str | dict,
    *,
    test: str | dict | None = None,
    rows: int = 1000,
    limit: float = 0.02,
    confidence: float = 0.95,
) -> dict:
    """Check whether an update of a run is due.

    Args:
      run: directory of a finished run, which may have updates.
      data: a path of the new images, or a section config.data.
      test: a path of labelled images, to compare the accuracy with the reference's.
      rows: most images of each sample.
      limit: most that the accuracy may have fallen.
      confidence: confidence of the verdict on the accuracy.

    Returns:
      The content of check.json.

    Raises:
      Refused: an input is wrong; the message names it.
      OSError: data cannot be read.
    """
    if not 20 <= rows <= 5000:
        raise Refused("--rows", rows, "must be from 20 to 5000")
    start, current = time.time(), updates.find_current(run)
    config = lineage.read_run_config(current)
    section = own_images.make_section(
        data, parent_config=config, field="config.data", all_rows=True
    )
    frozen = _restore(section, current, config)
    dataset = frozen.parts.stream.dataset
    chosen = _draw_rows(stream.count_rows(dataset.train), rows)
    new = _embed(frozen, dataset.train, chosen)
    old = _embed_run(run, current, config, rows)
    if not (np.isfinite(new).all() and np.isfinite(old.features).all()):
        raise Refused(f"{current}: {embedding.NOT_FINITE}")
    distance = mmd.compare_samples(old.features, new)
    report = {
        "run": str(run),
        "encoder": current,
        "images": {"new": len(new), "run": len(old.features)},
        "differ": distance.p_value <= _SURE,
        "p_value": distance.p_value,
        "mmd": float(np.sqrt(max(distance.squared_mmd, 0))),
        "far": distance.far,
        "duplicates": _count_duplicates(run, dataset),
        "remarks": old.remarks,
    }
    folder = _make_folder(run)
    order = np.argsort(-distance.witness, kind="stable")[:_SHOWN]
    _draw_images(dataset.train, chosen[order], folder / PICTURE)
    report["most_different"] = [_name_row(dataset.train, x) for x in chosen[order]]
    if test is not None:
        report["accuracy"] = _check_accuracy(
            run, current, test, config, folder, limit, confidence
        )
    report["advice"], report["why"] = _advise(report)
    report |= {"folder": str(folder), "seconds": time.time() - start}
    result_file.write_json(folder / FILE, report)
    return report


def _restore(section, run, encoder_config):
    config = transfer_config.make_config(section, "none", encoder_config)
    return build.restore_frozen(transfer_config.add_checkpoint(config, run))


def _draw_rows(size, most) -> np.ndarray:
    """Draw rows of a set, the same each time, i64[n]."""
    return np.sort(np.random.default_rng(0).permutation(size)[:most])


def _embed(frozen, examples, rows) -> np.ndarray:
    embed = embedding.make_embedder(frozen.parts, examples, rows=rows)
    return sharding.copy_to_host(embed(frozen.state))


def _embed_run(run, current, config, rows) -> _Sample:
    """Embed a sample of the images that the run and its accepted updates learned from.

    Of a set with a test split these rows are taken, since an encoder embeds images that
    it was trained on a little differently.
    """
    sections = _list_sections(run, current)
    inputs = json.dumps([sections, rows], sort_keys=True, default=str)
    place = epath.Path(run) / FOLDER / _SAMPLE
    source = json.dumps(_describe_weights(current), sort_keys=True, default=str)
    if place.exists():
        arrays = array_files.read_npz(str(place))
        if (str(arrays["known"]), str(arrays["source"])) == (inputs, source):
            return _Sample(arrays["features"], [str(x) for x in arrays["remarks"]])
    splits, remarks = [], []
    for section in sections:
        try:
            frozen = _restore(section, current, config)
        except (Refused, OSError) as error:
            remarks.append(f"Images of the run are left out: {error}.")
            continue
        data = frozen.parts.stream.dataset
        splits.append((frozen, data.train if data.test is None else data.test))
    if not splits:
        raise Refused(
            f"{run}: none of its images can be read, so that new ones cannot be "
            "compared. " + " ".join(remarks)
        )
    sizes = np.array([stream.count_rows(examples) for _, examples in splits])
    shares = np.maximum(np.floor(rows * sizes / sizes.sum()).astype(int), 1)
    embedded = [
        _embed(frozen, examples, _draw_rows(stream.count_rows(examples), share))
        for (frozen, examples), share in zip(splits, shares, strict=True)
    ]
    sample = np.concatenate(embedded)
    if len(sample) < 2:
        raise Refused(f"{run}: has {len(sample)} image, must be 2 or more to compare")
    place.parent.mkdir(parents=True, exist_ok=True)
    with storage.replacing(place) as file:
        np.savez_compressed(
            file,
            features=sample,
            known=np.array(inputs),
            source=np.array(source),
            remarks=np.array(remarks, dtype=str),
        )
    return _Sample(sample, remarks)


def _list_sections(run, current) -> list[dict]:
    """List config.data of a run and of its accepted updates up to the present one."""
    folders = [str(run)]
    for path in updates.list_updates(run):
        if (updates.read_report(path) or {}).get("accepted"):
            folders.append(str(path))
    configs = [lineage.read_run_config(folder) for folder in folders]
    sections = [config["data"] for config in configs if config.get("data")]
    if not sections:
        raise Refused(f"{run} is an encoder without images of its own to compare with")
    return sections


def _describe_weights(current) -> dict:
    """Describe the weights of an encoder, to tell whether they have changed."""
    config = transfer.config_of(current)
    if "files" in config:
        return config["files"]
    try:
        place = transfer.find_checkpoints(current)
        return {"path": str(place.folder), "numbers": list(place.numbers)}
    except Refused:
        return {"path": str(current)}


def _count_duplicates(run, dataset) -> dict:
    """Count new images that repeat one of the run or its updates, or each other."""
    new = identity.identify(dataset)
    marks, repeats, is_compared = new.marks[new.marks > 0], 0, False
    for folder in (run, *updates.list_updates(run)):
        before = identity.read_identity(folder)
        if before is not None and before.by_bytes and new.by_bytes:
            is_compared = True
            is_again = np.isin(marks, before.marks[before.marks > 0])
            repeats += int(is_again.sum())
            marks = marks[~is_again]
    count = len(new.marks)
    repeated = int(len(marks) - len(np.unique(marks)))
    return {
        "images": count,
        "of_the_run": repeats,
        "among_themselves": repeated,
        "compared": is_compared,  # whether the bytes of the run's images are known
    }


def _make_folder(run) -> epath.Path:
    """Make the directory of the next check."""
    root = epath.Path(run) / FOLDER
    root.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) for path in root.iterdir() if path.name.isdigit()]
    folder = root / f"{max(numbers, default=0) + 1:04d}"
    folder.mkdir()
    return folder


def _draw_images(examples, rows, path) -> None:
    """Draw images side by side into a PNG file."""
    across = int(np.ceil(np.sqrt(len(rows))))
    sheet = Image.new("RGB", (across * _SIDE, -(-len(rows) // across) * _SIDE))
    for place, row in enumerate(rows):
        pixels = np.asarray(examples.read(row))
        if pixels.dtype != np.uint8:
            return  # features
        image = Image.fromarray(plots.to_rgb(pixels)).resize((_SIDE, _SIDE))
        sheet.paste(image, (place % across * _SIDE, place // across * _SIDE))
    with storage.replacing(path) as file:
        sheet.save(file, format="PNG")


def _name_row(examples, row) -> str:
    return f"row {row}" if examples.reader is None else examples.reader.name(row)


def _check_accuracy(run, current, test, run_config, folder, limit, confidence) -> dict:
    """Compare the accuracy now with that of the reference."""
    section = own_images.make_section(
        test, parent_config=run_config, field="config.test"
    )
    config = transfer_config.make_config(section, "test", run_config)
    config |= {"evaluators": {"knn": {}}}
    data = identity.identify(own_images.read_images(config["data"]))
    images = references.describe_images(data, config["evaluators"])

    def answer(encoder, name):
        place = folder / name
        work = build.build(transfer_config.add_checkpoint(config, encoder), place)
        transfer.run_transfer(work, place)
        answers = references.read_answers(place)
        if not answers:
            raise Refused(f"config.test: nothing could be measured; see {place}")
        return answers

    result = answer(current, "now")
    ((name, right),) = result.items()
    path, remarks = references.find_file(run), []
    rows, first, where, old = np.arange(len(right)), None, str(run), None
    if path is not None:
        reference = references.read_reference(path)
        where, old = reference.run, reference.right.get(name)
        rows, places = references.match_images(images, reference.images)
        is_same = reference.images.protocol == images.protocol
        if is_same and len(rows) >= references.FEWEST:
            first = None if old is None else old[places]
            old = None
            if len(rows) < len(right):
                remarks.append(f"{len(rows)} images of the reference decide.")
    if first is None:
        rows = np.arange(len(right))
        if not references.is_there(where):
            raise Refused(
                f"config.test: the reference {where} answered other images, and that "
                "encoder is gone; give the images that it answered"
            )
        first = right if where == current else answer(where, "reference")[name]
    record = {"matrix": name, "reference": where, "images": len(rows), "limit": limit}
    record |= references.describe_pairs(first, right[rows], confidence)
    pairs = gate.count_pairs(first, right[rows])
    record["verdict"] = gate.decide(pairs, limit, *2 * [(1 - confidence) / 2])
    record["alarm"] = record["verdict"] == gate.HARMFUL or pairs.loss > limit
    if old is not None:
        record |= _compare_images(old, right, limit, confidence)
        record["alarm"] |= record["lower_than_before"]
    return record | {"confidence": confidence, "remarks": remarks}


def _compare_images(old, new, limit, confidence) -> dict:
    """Compare accuracies on the reference's images and on others, by Fisher's test."""
    from scipy import stats

    table = [[old.sum(), (~old).sum()], [new.sum(), (~new).sum()]]
    p_value = float(stats.fisher_exact(table, alternative="greater").pvalue)
    lower = old.mean() - new.mean() > limit and p_value <= 1 - confidence
    return {
        "accuracy_before": float(old.mean()),
        "lower_than_before": bool(lower),
        "p_value_before": p_value,
    }


def _advise(report) -> tuple[str, str]:
    """Return the advice, and why."""
    if report.get("accuracy", {}).get("alarm"):
        return LOOK, "the accuracy has fallen"
    twice = report["duplicates"]
    if twice["of_the_run"] + twice["among_themselves"] > _MANY * twice["images"]:
        return LOOK, "more than half of the new images are repeated"
    if report["far"] >= _STRANGE:
        return LOOK, "almost none of the new images resembles those of the run"
    if report["differ"]:
        return UPDATE, "the new images differ from those of the run"
    return WAIT, "no difference is seen"


def write_sentences(report: dict) -> str:
    """Write sentences about a check."""
    counts, twice = report["images"], report["duplicates"]
    differ = "differ" if report["differ"] else "do not differ visibly"
    lines = [
        *report["remarks"],
        f"The new images {differ} from those of the run (p = {report['p_value']:.3f}, "
        f"MMD {report['mmd']:.3f}, {counts['new']:,} and {counts['run']:,} images); "
        f"{100 * report['far']:.0f} % of them are far from all of the run's (5 % are "
        "usual).",
        f"Duplicates: {twice['of_the_run']:,} of {twice['images']:,} new images are in "
        f"the run, {twice['among_themselves']:,} repeat another new one.",
    ]
    if not twice["compared"]:
        lines[-1] += " The run's own images are not known byte by byte."
    if accuracy := report.get("accuracy"):
        pairs = verdict.say_pairs(accuracy, accuracy["images"], accuracy["confidence"])
        lines += accuracy["remarks"]
        lines.append(
            f"Accuracy ({accuracy['matrix']}) from the reference to now: {pairs}; "
            f"{accuracy['verdict']}."
        )
        if "accuracy_before" in accuracy:
            lines.append(
                f"On its own images the reference had "
                f"{100 * accuracy['accuracy_before']:.1f} %."
            )
    lines.append(f"The images that differ most: {report['folder']}/{PICTURE}")
    style = {WAIT: "good", UPDATE: "good", LOOK: "bad"}[report["advice"]]
    advice = terminal.style_text(f"Advice: {report['advice']}.", style)
    lines.append(f"{advice} Reason: {report['why']}.")
    return "\n".join(lines)


def add_options(parser) -> None:
    """Add the options of `jaxcl check`."""
    parser.description = __doc__
    add = parser.add_argument
    add("run", metavar="RUN", help="a finished run")
    add("--data", required=True, help="path of the new images")
    add("--test", help="path of labelled images")
    add("--rows", type=int, default=1000, help="most images of each sample")
    add("--limit", type=float, default=0.02, help="most that the accuracy may fall")
    add("--confidence", type=float, default=0.95, help="of the verdict on accuracy")
    add("--json", action="store_true", help="print check.json in place of sentences")


def main(options: argparse.Namespace) -> int:
    """Run `jaxcl check`; return the exit code."""

    def make():
        return check(
            options.run,
            options.data,
            test=options.test,
            rows=options.rows,
            limit=options.limit,
            confidence=options.confidence,
        )

    def say(report, stop):
        text = json.dumps(report, indent=1) if options.json else write_sentences(report)
        print(text, flush=True)
        return EXIT_CODES[report["advice"]]

    return command.run_until_signal(make, say)
