"""Plan an update: its options, its config, and the images to compare."""

import dataclasses
import json
from typing import Annotated, Literal, NamedTuple

import ml_collections
import numpy as np
from etils import epath

from jaxcl import lookup, schema
from jaxcl.config import build, own_images, recipe, sections, transfer_config
from jaxcl.data import stream
from jaxcl.data.stream import identity
from jaxcl.errors import Refused
from jaxcl.nets import tuning
from jaxcl.run import updates
from jaxcl.update import gate, lineage, references

_WITH_BATCH_NORM = ("resnet", "conv_net")  # encoders
_Share = Annotated[float, schema.Range(above=0, most=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits whose violation rolls an update back; None means no limit."""

    # Most that an accuracy on --test may fall, from that of the reference
    accuracy_drop: Annotated[float, schema.Range(-1, 1)] | None = 0.02
    # 1 - probability that an encoder beyond `accuracy_drop` is ever taken for harmless,
    # over all updates
    confidence: Annotated[float, schema.Range(0.5, below=1)] = 0.95
    # Whether an update within `accuracy_drop`, maybe by chance, is accepted
    undecided: Literal["accept", "keep the old"] = "accept"
    accuracy: schema.Share | None = None  # least accuracy on --test
    # Worst verdict on the index that is allowed
    index: Literal["keep", "adapt", "upgrade", "refresh"] | None = None
    overlap: schema.Share | None = None  # least share of neighbours kept in a new index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The config of an update; sections are dicts of options."""

    data: dict | None = None  # options of --data's source; its `name` is guessed
    test: dict | None = None  # options of --test's source
    old: dict | None = None  # options of --old's source
    select: dict | None = None  # options of --select's source
    train: dict | None = None  # replace the run's options: epochs, batch_size, ...
    evaluators: dict | None = None  # of --test; None: nearest neighbours
    limits: dict | None = None  # see Limits
    # Share of the new weights in an average with the old ones; "auto": the largest of
    # 1, 0.75, 0.5 and 0.25 that keeps the limits on --select, or on a third of --test;
    # None: no average
    average: _Share | Literal["auto"] | None = None
    # Number of old images that are embedded before and after
    rows: Annotated[int, schema.Range(1, 2**20)] = 2048
    # Neighbours of each that are compared
    neighbours: Annotated[int, schema.Range(1, 1024)] = 10
    # Share of what a new index gives from which a cheaper way is good enough
    index: schema.Share = 0.9


class Plan(NamedTuple):
    """A checked update that is ready to run."""

    parent: str  # run directory that it continues
    workdir: epath.Path
    config: dict  # of the run that trains on the new images
    test: dict | None  # config of a transfer run on --test, without checkpoint
    old: dict | None  # the same, to embed old images
    # Rows i32[n] of old images, and the build.Embedder of `parent`
    sample: tuple | None
    options: Options
    limits: Limits
    asked: dict  # JSON; two updates with the same `asked` are the same
    run: str = ""  # directory of the run
    select: dict | None = None  # config of a transfer run on --select
    comparison: references.Comparison | None = None  # None without --test
    becomes_reference: bool = False  # if it is accepted


def default_options() -> ml_collections.ConfigDict:
    """Return the default config, which --config.SECTION.OPTION=VALUE overrides."""
    # A flag can set an option only in a section that exists.
    sections = ("augment", "optimizer", "schedule", "tuning")
    inner = {name: {} for name in ("base", "strategy", "regulariser")}
    return ml_collections.ConfigDict(
        {
            "data": {},
            "test": {},
            "old": {},
            "select": {},
            "train": {name: {} for name in sections}
            | {"method": recipe.Sections(inner, convert_dict=True)},
            "evaluators": {"knn": {}},
            # A flag cannot override None, but it can set an option that is absent.
            "limits": {k: v for k, v in vars(Limits()).items() if v is not None},
            **{k: v for k, v in vars(Options()).items() if v is not None},
        },
        convert_dict=True,
    )


def read_options(config: dict) -> tuple[Options, Limits]:
    """Check the config of an update.

    Raises:
      Refused: an option is wrong; the message names the field and what is allowed.
    """
    options = Options(**schema.options(Options, config, "config"))
    limits = Limits(**schema.options(Limits, options.limits or {}, "config.limits"))
    if options.rows <= 2 * options.neighbours:
        raise Refused(
            f"config.rows={options.rows}: must be above 2 config.neighbours = "
            f"{2 * options.neighbours}"
        )
    return options, limits


def _check_average(options: Options, limits: Limits, test) -> None:
    """Refuse to choose a share if nothing is measured or limited."""
    if options.average != "auto":
        return
    measured = limits.accuracy_drop is not None or limits.accuracy is not None
    if test is None or not measured:
        raise Refused(
            "config.average='auto': needs accuracies; must be a number without "
            "--test, labelled images, or without a limit (config.limits.accuracy_drop)"
        )


def make_plan(
    run: str,
    data: str | dict,
    config: dict,
    *,
    test: str | dict | None = None,
    old: str | dict | None = None,
    join: bool = False,
    again: bool = False,
    select: str | dict | None = None,
    reference: str | None = None,
    becomes_reference: bool = False,
) -> Plan:
    """Plan and check an update before anything is trained.

    Args:
      run: directory of a finished run, which may have updates.
      data: a path of the new images, or a section config.data, see
        `own_images.make_section`.
      config: options, a dict as `default_options`.
      test: a path of labelled images, to evaluate both encoders on.
      old: a path of images that are in the present index; None: the run's own.
      join: whether to train also on the run's data, for methods that read both.
      again: make another update even if the same one is done already.
      select: a path of labelled images that choose the average.
      reference: directory of the encoder that losses count from; None: see `reference`.
      becomes_reference: losses of later updates count from this one, if accepted.

    Raises:
      Refused: an option or an input is wrong; the message names it.
      OSError: data cannot be read.
    """
    options, limits = read_options(config)
    _check_average(options, limits, test)
    _check_reference(test, reference, becomes_reference, select, options)
    parent = updates.find_current(run)
    parent_config = lineage.read_run_config(parent)
    new_data = _make_section(data, options.data, parent_config, "data")
    if join:
        if "data" not in parent_config:
            raise Refused(f"--join: {parent} is an encoder without images")
        new_data = lineage.join_sections(parent_config["data"], new_data)
    new_set = own_images.read_images(new_data)
    test_config = _make_evaluation_config(test, options, limits, parent_config)
    chooser = _make_selection_config(select, options, parent_config)
    section = lineage.read_run_config(run).get("data")
    if old is not None:
        section = _make_section(old, options.old, parent_config, "old")
    try:
        if section is None:
            raise Refused(f"{run} is an encoder without images of its own")
        old_config = transfer_config.make_config(section, "none", parent_config)
        sample = _choose_old_images(old_config, parent, options)
    except (Refused, OSError) as error:
        if old is not None or (limits.index or limits.overlap) is not None:
            raise
        hint = "--old, or old= in a program, gives them"
        print(f"old embeddings are not compared: {error}; {hint}", flush=True)
        old_config = sample = None
    changes = options.train or {}
    train = lineage.make_next_config(parent, parent_config, new_data, changes)
    if "batch_size" not in changes:
        train = {**train, "batch_size": lineage.default_batch_size(run)}
        if not join:
            train = _shrink_batch(train, stream.count_rows(new_set.train))
    train = _keep_statistics(_shorten_warmup(train, changes))
    request = {"data": new_data, "train": options.train}
    request |= {"test": test_config, "old": old_config}
    labelled = None
    if test_config is not None:
        labelled = identity.identify(own_images.read_images(test_config["data"]))
    request["images"] = _hash_images(run, new_set, labelled)
    for name in ("rows", "neighbours", "index", "average"):
        request[name] = getattr(options, name)
    if chooser:
        request["select"] = chooser
    if reference or becomes_reference:
        request["reference"] = {"run": reference, "becomes": becomes_reference}
    defaults = vars(Limits())
    later = ("confidence", "undecided")  # options that older updates do not have
    request["limits"] = {
        k: v for k, v in vars(limits).items() if k not in later or v != defaults[k]
    }
    request = json.loads(json.dumps(request))
    workdir = lineage.choose_folder(run, None if again else request)
    comparison = None
    if labelled is not None and len(labelled.rows("test")):
        comparison = references.plan_comparison(
            run,
            workdir,
            parent,
            references.describe_images(labelled, test_config["evaluators"]),
            budget=1 - limits.confidence,
            on_trust=limits.undecided == "accept" or limits.accuracy_drop is None,
            chooses=options.average == "auto" and chooser is None,
            named=reference,
            by_bytes=bool(labelled.by_bytes),
        )
    return Plan(
        parent,
        workdir,
        train,
        test_config,
        old_config,
        sample,
        options,
        limits,
        request,
        str(run),
        chooser,
        comparison,
        becomes_reference,
    )


def _make_section(path, options, parent_config, name) -> dict:
    """Make the section config.NAME, whose images are all trained on or embedded."""
    return own_images.make_section(
        path,
        options=options,
        parent_config=parent_config,
        field=f"config.{name}",
        all_rows=True,
    )


def _check_reference(test, reference, becomes_reference, select, options) -> None:
    """Refuse options about a reference, or about a choice, that have no meaning."""
    if test is None and (reference is not None or becomes_reference):
        flag = "--accept-as-reference" if becomes_reference else "--reference"
        raise Refused(f"{flag}: nothing is compared without --test, labelled images")
    if reference is not None and not references.is_there(reference):
        raise Refused(
            "--reference",
            reference,
            "must be a run with checkpoints, or an encoder's folder",
        )
    if select is not None and options.average != "auto":
        raise Refused("--select", select, "nothing is chosen without --average=auto")


def _make_selection_config(select, options, parent_config) -> dict | None:
    """Make a transfer config that evaluates on `select`; None without it."""
    if select is None:
        return None
    section = own_images.make_section(
        select,
        options=options.select,
        parent_config=parent_config,
        field="config.select",
    )
    config = transfer_config.make_config(section, "test", parent_config)
    return config | {"evaluators": options.evaluators or {"knn": {}}}


def say_plan(work: Plan) -> list[str]:
    """Say what is compared, and how many images that takes, before training."""
    plan, limit = work.comparison, work.limits.accuracy_drop
    if plan is None:
        return []
    sentences = list(plan.remarks)
    if missing := _list_unlabelled(plan):
        sentences.append(
            f"No labelled image of {', '.join(missing)} judges: a loss there is unseen."
        )
    if limit is None or not 0 < limit < 1:
        return sentences
    total, error = len(plan.rows), plan.share.error
    needed = gate.count_images(limit, error, plan.change)
    seen = f"about {needed:,} labelled images show that a loss is below"
    seen = f"{seen} {100 * limit:.1f} points; {total:,} judge"
    if needed > total:
        least = gate.smallest_limit(total, error, plan.change)
        seen += f", so differences below {100 * least:.1f} points stay undecided"
    sentences.append(
        f"With {100 * plan.change:.0f} % of the answers changed, {seen} "
        f"(update {plan.number}, error {100 * error:.2g} %)."
    )
    return sentences


def _list_unlabelled(plan) -> list[str]:
    """List classes of the labelled images of which none decides."""
    classes, deciding = plan.images.classes, plan.images.classes[plan.rows]
    return [x.decode(errors="replace") for x in np.setdiff1d(classes, deciding)]


def _hash_images(run, new_set, test) -> dict:
    """Hash the new images and the test images; warn of images in both.

    Images are equal if their bytes are, see `identity`.
    """
    new = identity.identify(new_set)
    if test is None:
        return {"data": new.digest()}
    before = identity.read_identity(run)
    for trained, origin in ((new, "the new ones"), (before, "those of the run")):
        if trained is not None and (common := identity.common(test, trained)):
            count = f"{len(common):,} of {len(test.rows('test')):,}"
            print(
                f"config.test: {count} evaluation images are trained on, too, among "
                f"{origin}, such as {common[0]}: their accuracy flatters",
                flush=True,
            )
    return {"data": new.digest(), "test": test.digest()}


def say_nothing_new(work: Plan) -> str:
    """Write in one line that the update was done before."""
    return (
        f"nothing new: {work.workdir} is this update, of these images; nothing was "
        "trained. --again (again=True in a program) makes another"
    )


def _shrink_batch(config, rows) -> dict:
    """Shrink the batch if `rows` new images do not fill one."""
    if rows >= config["batch_size"]:
        return config
    batch, reason = own_images.batch_size(rows), f"there are {rows} new images"
    _tell_replaced("batch_size", batch, config["batch_size"], reason)
    return {**config, "batch_size": batch}


def _shorten_warmup(config, changes) -> dict:
    """Shorten the warmup if it is longer than the training."""
    epochs, section = changes.get("epochs"), config["schedule"]
    schedule = changes.get("schedule") or {}
    if not isinstance(epochs, int) or "warmup_epochs" in schedule:
        return config
    make = lookup.find_function(sections.SCHEDULES, section, "config.schedule")[0]
    before = {**schema.defaults(make), **section}.get("warmup_epochs", 0)
    if not 1 <= epochs <= before:
        return config
    warmup, reason = recipe.warmup_epochs(epochs), f"for config.train.epochs={epochs}"
    _tell_replaced("schedule.warmup_epochs", warmup, before, reason)
    return {**config, "schedule": {**section, "warmup_epochs": warmup}}


def _keep_statistics(config) -> dict:
    """Let batch norm keep its running statistics, unless the config says otherwise."""
    section = tuning.read_section(config.get("tuning"))
    if config["encoder"]["name"] not in _WITH_BATCH_NORM or "statistics" in section:
        return config
    reason = "with those of the new images the old ones are known less"
    _tell_replaced("tuning.statistics", "running", "batch", reason)
    return {**config, "tuning": section | {"statistics": "running"}}


def _tell_replaced(option, value, before, reason) -> None:
    print(f"config.train.{option}={value} in place of {before}: {reason}", flush=True)


def _make_evaluation_config(test, options, limits, parent_config) -> dict | None:
    """Make a transfer config that evaluates on `test`; None without it."""
    if test is None:
        if limits.accuracy is not None:
            raise Refused(
                "config.limits.accuracy",
                limits.accuracy,
                "needs labelled images: --test",
            )
        return None
    test_options = options.test or {}
    section = own_images.make_section(
        test, options=test_options, parent_config=parent_config, field="config.test"
    )
    config = transfer_config.make_config(section, "test", parent_config)
    return config | {"evaluators": options.evaluators or {"knn": {}}}


def _choose_old_images(old, run, options):
    """Choose the old images to compare.

    Returns:
      Their rows i32[n], the same each time, and what embeds them by the encoder of
      `run`.

    Raises:
      Refused: there are too few.
    """
    embedder = build.make_embedder(transfer_config.add_checkpoint(old, run))
    rows = np.random.default_rng(0).permutation(embedder.size)[: options.rows]
    rows = np.sort(rows)
    if len(rows) <= 2 * options.neighbours:
        raise Refused(
            f"config.neighbours={options.neighbours}: must be below half of the "
            f"{len(rows)} old images"
        )
    return rows, embedder
