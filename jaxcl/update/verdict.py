"""Decide whether an update is kept, and what to do with an index."""

from jaxcl.index import ways
from jaxcl.run import terminal
from jaxcl.update import gate, plan

BEFORE, AFTER = "before", "after"


def decide_index(drift: dict | None, measured: dict | None, least: float) -> str:
    """Decide what to do with an index of the old embeddings.

    Args:
      drift: result of `drift.measure_drift`; None: not measured.
      measured: result of `ways.measure_ways`.
      least: share of the quality of a new index from which a way is good enough.

    Returns:
      "unknown": not measured. Else the first of `ways.VERDICTS` that is good enough by
      `ways.list_usable`. Without labels the old neighbours may be found in place of the
      new ones: "keep" in the index as it is, "adapt" through the best adapter.
    """
    if drift is None:
        return "unknown"
    verdicts = {ways.verdict_of(way) for way in ways.list_usable(measured, least)}
    if "precision" not in measured["all"]:
        shares = drift["index_overlap"], max(drift["adapters"].values())
        pairs = zip(ways.VERDICTS, shares, strict=False)
        verdicts |= {verdict for verdict, share in pairs if share >= least}
    return min(verdicts, key=ways.VERDICTS.index)


def compare_accuracies(
    before: dict[str, float], after: dict[str, float]
) -> dict[str, dict]:
    """Join the accuracies before and after, by name."""
    return {
        name: {BEFORE: value, AFTER: after[name], "change": after[name] - value}
        for name, value in before.items()
    }


def list_broken_accuracy(report: dict, limits: plan.Limits) -> list[str]:
    """List the limits on accuracy that an update breaks, each as a sentence."""
    broken, limit = [], limits.accuracy_drop
    matrices = report.get("gate", {}).get("matrices", {})
    for name, accuracy in report["accuracy"].items():
        drop, value, reference = -accuracy["change"], accuracy[AFTER], ""
        if name in matrices:
            drop = matrices[name]["reference"]["loss"]
            reference = " from the reference"
            unproven = matrices[name].get("verdict") == gate.UNDECIDED
            if unproven and drop <= limit and limits.undecided != "accept":
                broken.append(f"{name} is undecided: too few images show its loss")
        if limit is not None and drop > limit:
            broken.append(
                f"{name} lost {100 * drop:.1f} points{reference}, allowed "
                f"{100 * limit:g}"
            )
        if limits.accuracy is not None and value < limits.accuracy:
            least = 100 * limits.accuracy
            broken.append(f"{name} is {100 * value:.1f} %, must be {least:g} %")
    return broken


def list_broken(report: dict, limits: plan.Limits) -> list[str]:
    """List all limits that an update breaks, each as a sentence."""
    broken = list_broken_accuracy(report, limits)
    if limits.index is not None:
        verdict = report["index"]
        order = ways.VERDICTS
        allowed = order[: order.index(limits.index) + 1]
        if verdict not in allowed:
            broken.append(f"index: {verdict}, allowed {' or '.join(allowed)}")
    if limits.overlap is not None:
        share = report["drift"]["overlap"]
        if share < limits.overlap:
            least = 100 * limits.overlap
            broken.append(f"overlap is {100 * share:.1f} %, must be {least:g} %")
    return broken


_INDEX = {
    "keep": "keep your index: new queries find their old neighbours in it",
    "adapt": "keep your index; load the encoder by load_encoder(FOLDER, into='old')",
    "upgrade": "upgrade: jaxcl index upgrade maps the stored vectors, without images",
    "refresh": "upgrade, then embed a part again: jaxcl index upgrade, plan, refresh",
    "rebuild": "rebuild your index: embed its images again with the new encoder",
    "unknown": "unknown, since no old images were compared; --old gives them",
}


def _say_recall(drift) -> str:
    in_old_index, anew = (100 * drift[name] for name in ("index_overlap", "overlap"))
    adapted = sorted(drift["adapters"].items(), key=lambda pair: -pair[1])
    by_kind = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in adapted)
    return (
        f"A new query still finds {in_old_index:.0f} % of its old neighbours in your "
        f"index.\nThrough an adapter: {by_kind}; with the index rebuilt: {anew:.0f} %. "
        "Other neighbours are no worse ones."
    )


def say_ways(measured: dict) -> list[str]:
    """Say what each way to go on with the index gives, and what to do until then."""
    measure = "precision" if "precision" in measured["all"] else "neighbours"
    what = "of the query's class" if measure == "precision" else "found"
    percent = {way: 100 * values[measure][0] for way, values in measured.items()}
    half = max(100 * (x[measure][0] - x[measure][1]) for x in measured.values())
    names = {"old": "old encoder and index", "leave": "index as it is"}
    names |= {"back": "queries mapped back", "forward": "vectors mapped forward"}
    shown = [f"{name} {percent[x]:.0f}" for x, name in names.items() if x in percent]
    again = " / ".join(f"{percent[way]:.0f}" for way in ways.SHARES)
    shown += [f"then 10 / 25 / 50 % embedded again {again}"]
    if measure == "precision":
        shown.append(f"all {percent['all']:.0f}")
    kind = "Nearest images" if measure == "precision" else "A new index's neighbours"
    lines = [f"{kind} {what}, in percent ± {half:.0f}: {', '.join(shown)}."]
    value = {way: values[measure][0] for way, values in measured.items()}
    if measure == "precision" and value["old"] > value["all"]:
        lines.append(
            "On the images in the index the old encoder is better than the new one."
        )
    if value["forward"] > max(value[x] for x in ("leave", "back") if x in value):
        lines.append(
            "Until the images are embedded again, the best index is that of "
            "jaxcl index upgrade."
        )
    else:
        lines.append("Mapping the stored vectors does not help here.")
    return lines


def say_pairs(pairs: dict, images: int, confidence: float) -> str:
    """Say two accuracies, their difference with its interval, and what changed."""
    before, after, loss, low, high = (
        100 * pairs[x] for x in (BEFORE, AFTER, "loss", "low", "high")
    )
    changed, percent = pairs["lost"] + pairs["gained"], 100 * confidence
    return (
        f"{before:.1f} -> {after:.1f} %, {-loss + 0.0:+.1f} points "
        f"({percent:g} %: {-high:.1f} to {-low:.1f}); "
        f"{changed:,} of {images:,} images changed"
    )


def say_comparison(name: str, comparison: dict, parent: str) -> list[str]:
    """Say what an encoder lost against its parent and against the reference.

    Args:
      name: name of the matrix.
      comparison: "gate" of update.json.
      parent: directory of the parent.
    """
    matrix, images = comparison["matrices"][name], comparison["images"]
    limit = comparison["limit"]
    to_parent, to_reference = (
        say_pairs(matrix[x], images, comparison["confidence"])
        for x in ("parent", "reference")
    )
    lines = [f"Accuracy on labelled images ({name}): {to_parent}."]
    if comparison["reference"] != parent:
        lines.append(
            f"Against the reference {comparison['reference']}: {to_reference}."
        )
    if "verdict" in matrix:
        most = 100 * matrix["most"]
        bound = f"the loss is at most {most:.1f} points"
        if most < 0:
            bound = f"the gain is at least {-most:.1f} points"
        verdict = matrix["verdict"].capitalize()
        lines.append(f"{verdict}: {bound}; allowed loss {100 * limit:.1f} points.")
    return lines


def _say_budget(comparison) -> list[str]:
    """Say which error the update used, and what an undecided one is worth."""
    words = {x.get("verdict") for x in comparison["matrices"].values()}
    if words == {None}:
        return []
    budget = 1 - comparison["confidence"]
    error, life, left = (
        100 * x for x in (comparison["error"], budget, comparison["left"])
    )
    lines = [
        f"Update {comparison['number']}: error {error:.2g} % of {life:.2g} %, left "
        f"{left:.2g} %."
    ]
    if gate.UNDECIDED in words and comparison["outcome"] == gate.ON_TRUST:
        lines.append(
            "Undecided was accepted: the observed loss is within the limit, the true "
            'one may not be. limits.undecided="keep the old" accepts what is proven.'
        )
    return lines


def write_sentences(report: dict) -> str:
    """Write sentences about an update and the next steps."""
    lines = []
    limit = report.get("asked", {}).get("limits", {}).get("accuracy_drop")
    allowed = "no limit"
    if limit is not None:
        allowed = f"allowed fall {100 * limit:.1f} points; no answers of single images "
        allowed += "are known, so the observed change decides"
    comparison = report.get("gate", {"matrices": {}})
    for name, accuracy in report["accuracy"].items():
        if name in comparison["matrices"]:
            lines += say_comparison(name, comparison, report["parent"])
            continue
        before, after, change = (100 * accuracy[x] for x in (BEFORE, AFTER, "change"))
        lines.append(
            f"Accuracy on labelled images ({name}): {before:.1f} % before, "
            f"{after:.1f} % after, {change:+.1f} points; {allowed}."
        )
    if comparison["matrices"]:
        lines += _say_budget(comparison)
    if not report["accuracy"]:
        lines.append("No labelled images were given, so no accuracy was measured.")
    if "average" in report:
        share = 100 * report["average"]["share"]
        lines.append(
            f"The encoder is an average: {share:.0f} % of the new weights, "
            f"{100 - share:.0f} % of the old."
        )
    if report["drift"]:
        lines.append(_say_recall(report["drift"]))
        lines += say_ways(report["ways"]) if "ways" in report else []
    advice = _INDEX[report["index"]] if report["accepted"] else "stays as it is"
    lines.append(f"Search index: {advice}.")
    broken = (f"Limit broken: {sentence}." for sentence in report["broken"])
    lines += [terminal.style_text(line, "bad") for line in broken]
    if report["accepted"]:
        headline = terminal.style_text("Accepted.", "good")
        lines.append(f"{headline} The encoder is in {report['run']}")
    else:
        lines.append(
            "To try, in this order, with --again: half of --config.train.optimizer.lr, "
            "--average=0.5, --config.train.method.strategy=lwf_features. Each try "
            "spends some of the error budget (docs/weekly.md)."
        )
        headline = terminal.style_text("Rolled back.", "bad")
        lines.append(f"{headline} The encoder is still that of {report['parent']}")
    return "\n".join(lines)
