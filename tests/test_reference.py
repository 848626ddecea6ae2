"""What an update is compared with: the reference's answers, on which images."""

import json
import shutil
import types

import numpy as np
import pytest
from etils import epath

from jaxcl.data.stream import identity
from jaxcl.errors import Refused
from jaxcl.run import updates
from jaxcl.update import check, gate, lineage, references, verdict
from jaxcl.update import command as update_command
from jaxcl.update import plan as update_plan


def make_judge(rows, protocol="knn", classes=None):
    rows = np.asarray(rows)
    names = np.array([b"%d.png" % row for row in rows])
    kinds = (
        np.array([b"%d" % (row % 3) for row in rows]) if classes is None else classes
    )
    return references.LabelledImages(names, rows.astype(np.uint64) + 7, kinds, protocol)


def make_update(run, number, *, accepted=True, marks=range(200), split=2, **record):
    """Write what an earlier update leaves."""
    folder = run / "updates" / f"{number:04d}"
    (folder / "before").mkdir(parents=True)
    marks = np.array(marks, np.uint64) + 7
    zeros = np.zeros(len(marks), np.int32)
    split, names = np.full(len(marks), split, np.uint8), marks.astype("S")
    known = (names, marks, split, zeros, zeros, np.array([b"a"]), np.array(True))
    identity.write_identity(folder / "before", identity.Identity(*known))
    report = {"accepted": accepted, "asked": {}}
    if record:
        report["gate"] = {
            "renewed": False,
            "on_trust": True,
            "choosing": 0,
            "judge": f"{number:04d}/before",
            "matrices": {"knn": {"changed": 0.04}},
        } | record
    (folder / "update.json").write_text(json.dumps(report))
    return folder


def make_plan(run, judge, number=None, **options):
    options = {"budget": 0.05, "on_trust": True} | options
    numbers = [int(path.name) for path in updates.list_updates(run)]
    folder = run / "updates" / f"{number or max(numbers, default=0) + 1:04d}"
    parent = updates.find_current(str(run))
    return references.plan_comparison(str(run), folder, parent, judge, **options)


def write_reference(run, judge, number=1, where="gone"):
    right = {"knn": np.arange(len(judge.marks)) % 4 > 0}
    kept = references.Reference(where, judge, right)
    return references.write_reference(str(run), number, kept)


def test_the_same_images_are_found_again():
    rng = np.random.default_rng(0)
    for _ in range(20):
        first, second = (rng.integers(0, 12, 15) for _ in range(2))
        a, b = make_judge(first), make_judge(second)
        b = b._replace(names=b.names[::-1])  # a name does not matter
        rows, at = references.match_images(a, b)
        np.testing.assert_array_equal(first[rows], second[at])
        both = sum(min((first == x).sum(), (second == x).sum()) for x in range(12))
        assert len({*rows}) == len({*at}) == len(rows) == both
    twice = make_judge([4, 4])  # repeated images are matched in order
    np.testing.assert_array_equal(references.match_images(twice, twice), [[0, 1]] * 2)
    other = make_judge(first, classes=np.array([b"new"] * 15))  # corrected labels
    assert len(references.match_images(make_judge(first), other)[0]) == 0


def test_answers_are_kept_as_they_were(tmp_path):
    judge = make_judge(range(70))
    path = write_reference(tmp_path, judge)
    kept = references.read_reference(path)
    np.testing.assert_array_equal(kept.right["knn"], np.arange(70) % 4 > 0)
    assert all(map(np.array_equal, kept.images, judge)) and kept.run == "gone"
    write_reference(tmp_path, make_judge(range(3)))  # what is there stays
    assert len(references.read_reference(path).images.marks) == 70
    write_reference(tmp_path, judge, number=11)
    assert references.find_file(str(tmp_path)).name == "0011.npz"
    with open(path, "r+b") as file:
        file.truncate(100)
    with pytest.raises(Refused, match=r"0001\.npz.*--reference"):
        references.read_reference(path)


def test_a_new_chain_begins_with_its_run_and_an_old_one_with_its_parent(tmp_path):
    judge = make_judge(range(200))
    first = make_plan(tmp_path, judge)
    assert (first.run, first.reference, first.remarks) == (str(tmp_path), None, ())
    folder = make_update(tmp_path, 1)  # of before there were references
    old = make_plan(tmp_path, judge)
    assert old.run == str(folder) and str(folder) in " ".join(old.remarks)
    assert old.share == first.share and old.change == gate.USUAL_CHANGE
    named = make_plan(tmp_path, judge, named="elsewhere")
    assert (named.run, named.remarks) == ("elsewhere", ())


def test_the_reference_stays_when_the_parent_changes(tmp_path):
    judge = make_judge(range(200))
    make_update(tmp_path, 1, outcome=gate.ACCEPTED)
    write_reference(tmp_path, judge)
    shuffled = make_judge(np.random.default_rng(0).permutation(200))
    plan = make_plan(tmp_path, shuffled)
    assert plan.run == "gone" and plan.remarks == () and not plan.renewed
    twin = np.array([int(name[:-4]) % 4 > 0 for name in shuffled.names[plan.rows]])
    np.testing.assert_array_equal(plan.reference.right["knn"][plan.at], twin)
    assert plan.change == 0.04
    right = np.arange(200) % 3 > 0  # the parent is wrong wherever the new one is not
    found = references.compare_answers(
        plan, {"knn": ~right}, {"knn": right}, plan.reference.right, 0.02, 0.95
    )["matrices"]["knn"]
    pairs = gate.count_pairs(twin, right)
    assert found["reference"]["lost"] == pairs.lost
    assert found["parent"]["lost"] == (~right).sum()
    # The update that wrote the file, made again, does not compare with it.
    assert make_plan(tmp_path, judge, number=1).reference is None


def test_a_judge_that_changed(tmp_path):
    make_update(tmp_path, 1, outcome=gate.ACCEPTED)
    write_reference(tmp_path, make_judge(range(200)))
    plan = make_plan(tmp_path, make_judge(range(140, 260)))
    (said,) = plan.remarks
    assert "200.png" in said and "0.png" in said and "60 in common" in said
    np.testing.assert_array_equal(plan.rows, np.arange(60))
    np.testing.assert_array_equal(plan.at, np.arange(140, 200))
    with pytest.raises(Refused, match="49 are in common.*50.*--reference=gone"):
        make_plan(tmp_path, make_judge(range(151, 260)))
    # Neighbours that changed change all answers.
    with pytest.raises(Refused, match="config.test.*gone.*--reference=RUN"):
        make_plan(tmp_path, make_judge(range(200), protocol="other"))


def test_a_reference_that_is_there_answers_again(tmp_path, monkeypatch):
    make_update(tmp_path, 1, outcome=gate.ACCEPTED)
    write_reference(tmp_path, make_judge(range(200)))
    monkeypatch.setattr(references, "is_there", lambda run: run == "gone")
    plan = make_plan(tmp_path, make_judge(range(200), protocol="other"))
    assert (plan.run, plan.reference) == ("gone", None) and "gone" in plan.remarks[0]


def test_images_that_choose_do_not_judge(tmp_path):
    judge = make_judge(range(400))
    plan = make_plan(tmp_path, judge, chooses=True)
    assert 50 <= plan.choosing.sum() <= 200
    assert not plan.choosing[plan.rows].any()
    assert len(plan.rows) + plan.choosing.sum() == 400
    # An image is in the same part, whatever else is there.
    few = make_judge(range(399, 100, -1))
    np.testing.assert_array_equal(
        references.find_choosing(few)[::-1], plan.choosing[101:]
    )
    with pytest.raises(Refused, match="config.average='auto'.*50.*--select"):
        make_plan(tmp_path, make_judge(range(90)), chooses=True)
    assert len(make_plan(tmp_path, judge).rows) == 400
    # The encoder was chosen by them once: they never judge again.
    make_update(tmp_path, 1, outcome=gate.ACCEPTED, choosing=100)
    np.testing.assert_array_equal(make_plan(tmp_path, judge).rows, plan.rows)
    write_reference(tmp_path, make_judge(range(399, 49, -1)))  # some are new since
    again = make_plan(tmp_path, judge)
    np.testing.assert_array_equal(again.rows, plan.rows[plan.rows >= 50])
    np.testing.assert_array_equal(again.at, 399 - again.rows)


def test_the_budget_is_that_of_the_outcomes_so_far(tmp_path):
    judge, past = make_judge(range(200)), []
    outcomes = [gate.ACCEPTED, gate.ROLLED_BACK, gate.ON_TRUST]
    for number, outcome in enumerate(outcomes, 1):
        matrices = {"knn": {"changed": number / 50}}
        make_update(tmp_path, number, outcome=outcome, matrices=matrices)
        assert make_plan(tmp_path, judge).change == pytest.approx((number + 1) / 100)
        past.append(gate.PastUpdate(outcome, True))
        assert make_plan(tmp_path, judge).share == gate.share_budget(
            past, 0.05, on_trust=True
        )
    other = make_judge(range(500, 700))
    plan = make_plan(tmp_path, other)
    assert plan.renewed
    assert plan.share == gate.share_budget(past, 0.05, on_trust=True, renewed=True)
    for one_is_known in (range(1, 201), range(199, 399)):  # which is enough
        assert not make_plan(tmp_path, make_judge(one_is_known)).renewed
    assert make_plan(tmp_path, judge, number=2).share.error == pytest.approx(
        gate.share_budget(past[:1], 0.05, on_trust=True).error
    )


@pytest.mark.parametrize("undecided", ["accept", "keep the old"])
@pytest.mark.parametrize(
    ("lost", "gained", "word", "broken"),
    [
        (0, 0, gate.HARMLESS, 0),
        (15, 12, gate.UNDECIDED, 1),
        (10, 0, gate.UNDECIDED, 2),
        (40, 1, gate.HARMFUL, 2),
    ],
)
def test_three_words_and_what_becomes_of_them(
    tmp_path, undecided, lost, gained, word, broken
):
    """0: accepted; 1: accepted unless only what is proven is; 2: rolled back."""
    judge = make_judge(range(300))
    plan = make_plan(tmp_path, judge)
    first = np.arange(300) < 250
    now = first.copy()
    now[:lost], now[300 - gained :] = False, True
    parent = ~now
    found = references.compare_answers(
        plan, {"knn": parent}, {"knn": now}, {"knn": first}, 0.02, 0.95
    )
    found = json.loads(json.dumps(found))
    pairs = found["matrices"]["knn"]
    assert pairs["verdict"] == word
    kept = pairs["reference"]
    assert (kept["lost"], kept["gained"]) == (lost, gained)
    assert kept["low"] <= kept["loss"] == pytest.approx((lost - gained) / 300)
    assert kept["loss"] <= kept["high"] <= pairs["most"] + 1e-3
    assert (pairs["parent"]["lost"], pairs["parent"]["gained"]) == (
        (~now).sum(),
        now.sum(),
    )
    accuracy = {"before": parent.mean(), "after": now.mean(), "change": 0.9}
    report = {"accuracy": {"knn": accuracy}, "gate": found}
    limits = update_plan.Limits(undecided=undecided)
    rejected = bool(verdict.list_broken_accuracy(report, limits))
    assert rejected == (broken == 2 or (broken == 1 and undecided != "accept"))
    outcome = gate.ROLLED_BACK if rejected else gate.ON_TRUST
    found |= {"outcome": outcome, "left": plan.share.left[outcome]}
    report |= {"parent": "p", "run": "r", "index": "unknown", "drift": None}
    report |= {"broken": [], "accepted": not rejected}
    said = verdict.write_sentences(report)
    assert f"{lost + gained} of 300" in said and word.capitalize() in said


@pytest.mark.parametrize("total", [1, 300])
def test_how_many_images_it_takes_is_said_before(tmp_path, total):
    plan = make_plan(tmp_path, make_judge(range(total)))
    limits = update_plan.Limits()
    fields = dict.fromkeys(update_plan.Plan._fields)
    work = update_plan.Plan(**fields | {"limits": limits, "comparison": plan})
    (said,) = update_plan.say_plan(work)
    needed = gate.count_images(0.02, plan.share.error, plan.change)
    assert f"{needed:,}" in said and f"{total:,} judge" in said
    assert "undecided" in said
    assert update_plan.say_plan(work._replace(comparison=None)) == []


def test_sections_are_those_of_the_run_and_accepted_updates(tmp_path, monkeypatch):
    for number, accepted in ((1, True), (2, False), (3, True)):
        make_update(tmp_path, number, accepted=accepted)
    monkeypatch.setattr(
        lineage, "read_run_config", lambda folder: {"data": epath.Path(folder).name}
    )
    found = check._list_sections(str(tmp_path), "now")
    assert found == [tmp_path.name, "0001", "0003"]


@pytest.mark.parametrize(
    ("common", "protocol"), [(49, "knn"), (50, "knn"), (60, "other")]
)
def test_a_check_compares_answers_on_the_images_of_the_reference(
    tmp_path, monkeypatch, common, protocol
):
    """From 50 in common on; else the reference answers and is compared."""
    judge, old = (
        make_judge(range(100), protocol),
        make_judge([*range(99 - common, 99)][::-1] + [200, 201]),
    )
    right = np.arange(100) % 3 > 0
    was = np.array([int(name[:-4]) % 5 > 0 for name in old.names])
    write_reference(tmp_path, old)
    for module, name, value in (
        (check.own_images, "make_section", {}),
        (check.own_images, "read_images", None),
        (check.transfer_config, "make_config", {"data": {}}),
        (check.build, "build", None),
        (check.transfer_config, "add_checkpoint", {}),
        (check.transfer, "run_transfer", None),
        (check.identity, "identify", None),
        (references, "describe_images", judge),
        (references, "is_there", True),
        (references, "read_reference", references.Reference("gone", old, {"knn": was})),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *given, value=value, **options: value)
    again = np.arange(100) % 2 > 0  # what the reference answers now
    monkeypatch.setattr(
        references,
        "read_answers",
        lambda folder: {"knn": right if folder.name == "now" else again},
    )
    asked = []
    decide = lambda *given: asked.append(given) or gate.UNDECIDED  # noqa: E731
    monkeypatch.setattr(gate, "decide", decide)
    found = check._check_accuracy(str(tmp_path), "now", "", {}, tmp_path, 0.02, 0.95)
    if common == 50:
        rows = range(49, 99)
        first, now = (np.array([x % n > 0 for x in rows]) for n in (5, 3))
        assert found["images"] == 50 and "accuracy_before" not in found
        pairs = gate.count_pairs(first, now)
        assert (found["lost"], found["gained"]) == (pairs.lost, pairs.gained)
        assert found["loss"] == pytest.approx(pairs.loss)
        assert found["alarm"] == (pairs.loss > 0.02)
        assert asked == [(pairs, 0.02, *[pytest.approx(0.025)] * 2)]
        monkeypatch.setattr(references, "find_file", lambda run: None)
        found = check._check_accuracy(str(tmp_path), "now", "", {}, tmp_path, 0, 0.95)
    else:
        assert found["images"] == 100 and found["accuracy_before"] == was.mean()
    pairs = gate.count_pairs(again, right)  # what the reference, or the run, says now
    assert (found["lost"], found["gained"]) == (pairs.lost, pairs.gained)
    if common != 50:
        monkeypatch.setattr(references, "is_there", lambda run: False)
        with pytest.raises(Refused, match="config.test.*gone"):
            check._check_accuracy(str(tmp_path), "now", "", {}, tmp_path, 0.02, 0.95)


def test_images_that_cannot_be_read_are_known_by_their_names():
    judge = make_judge([1, 2, 3])._replace(marks=np.uint64([8, 0, 0]))
    other = judge._replace(names=np.array([b"x", b"3.png", b"2.png"]))
    rows, at = references.match_images(
        judge, other._replace(classes=judge.classes[[0, 2, 1]])
    )
    np.testing.assert_array_equal((rows, at), [[0, 1, 2], [0, 2, 1]])
    share = references.find_choosing(make_judge(range(3000))).mean()
    assert 0.3 < share < 0.37  # a third


@pytest.mark.parametrize("count", [49, 50])
def test_fifty_images_in_common_decide(tmp_path, count):
    make_update(tmp_path, 1, outcome=gate.ACCEPTED, matrices={"a": {"changed": 0.001}})
    write_reference(tmp_path, make_judge(range(200)))
    judge = make_judge(range(200 - count, 300))
    if count == 50:
        found = make_plan(tmp_path, judge)
        assert len(found.rows) == 50 and found.change == 1 / 50  # one image at least
    else:
        with pytest.raises(Refused, match=" 49 are in common"):
            make_plan(tmp_path, judge)


def test_matrices_share_the_error_of_an_alarm(tmp_path, monkeypatch):
    """One of three has no answers before; without an error nothing is decided."""
    plan = make_plan(tmp_path, make_judge(range(40)))
    right, asked = np.arange(40) % 2 > 0, []
    monkeypatch.setattr(
        gate, "decide", lambda *given: asked.append(given[1:]) or "word"
    )
    after = {"a": right, "b": ~right, "c": right}
    before = {"a": right, "b": right}
    found = references.compare_answers(plan, before, after, after | before, 0.1, 0.95)
    assert asked == [(0.1, plan.share.error, plan.share.alarm / 3)] * 2
    assert {name: one["changed"] for name, one in found["matrices"].items()} == {
        "a": 0,
        "b": 1,
    }
    most = gate.bound_loss(gate.Pairs(40, 20, 20), plan.share.error)
    assert found["matrices"]["b"]["most"] == most
    for limit, share in ((None, plan.share), (0.1, plan.share._replace(error=0.0))):
        silent = plan._replace(share=share)
        found = references.compare_answers(silent, before, after, after, limit, 0.95)
        assert all("verdict" not in one for one in found["matrices"].values())


def test_classes_without_a_judging_image_are_named(tmp_path):
    plan = make_plan(tmp_path, make_judge(range(9)))
    work = types.SimpleNamespace(
        comparison=plan._replace(rows=np.array([0, 1, 3, 4])),
        limits=update_plan.Limits(),
    )
    assert update_plan._list_unlabelled(work.comparison) == ["2"]
    assert " 2 " in update_plan.say_plan(work)[0]


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_an_update_becomes_the_reference_if_it_is_accepted(
    tmp_path, monkeypatch, known, accepted
):
    judge, old, new = make_judge(range(4)), np.arange(4) > 1, np.arange(4) > 0
    plan = make_plan(tmp_path, judge)
    if known:
        plan = plan._replace(reference=references.Reference("gone", judge, {"a": old}))
    work = types.SimpleNamespace(
        comparison=plan, workdir=tmp_path / "updates" / "0001", becomes_reference=True,
        limits=update_plan.Limits(), run=str(tmp_path),
    )  # fmt: skip
    monkeypatch.setattr(references, "read_answers", lambda folder: {folder.name: new})
    report = {
        "accepted": accepted,
        "gate": {"matrices": {"a": {"verdict": gate.HARMLESS}}},
    }
    update_command._close_comparison(work, report, {"a": old})
    path = references.find_file(str(tmp_path))
    if not accepted and known:
        assert path is None
        return
    kept = references.read_reference(path)
    ((name, right),) = kept.right.items()
    run, want = (
        (str(work.workdir), ("after", new)) if accepted else (plan.run, ("a", old))
    )
    assert (kept.run, name) == (run, want[0])
    np.testing.assert_array_equal(right, want[1])


@pytest.mark.parametrize("split", [0, 2])
def test_labelled_images_are_new_if_none_has_judged(tmp_path, split):
    """Those that neighbours learned from have not; an unreadable one is unknown."""
    make_update(tmp_path, 1, outcome=gate.ACCEPTED, marks=[5, 2**64 - 7], split=split)
    judge = make_judge(range(60))
    assert make_plan(tmp_path, judge).renewed == (split == 0)
    judge = make_judge(range(10, 70))
    judge.marks[0] = 0
    assert make_plan(tmp_path, judge).renewed


@pytest.mark.parametrize("lost", ["gone", "damaged", "by_time", "present"])
def test_where_earlier_images_are_unknown_none_counts_as_new(tmp_path, lost):
    make_update(tmp_path, 1, outcome=gate.ACCEPTED)
    make_update(tmp_path, 2, outcome=gate.ACCEPTED)
    folder = tmp_path / "updates/0001/before"
    if lost == "gone":
        shutil.rmtree(folder)
    elif lost == "damaged":
        (folder / identity.FILE).write_bytes(b"PK")
    elif lost == "by_time":
        known = identity.read_identity(folder)
        (folder / identity.FILE).unlink()
        identity.write_identity(folder, known._replace(by_bytes=np.array(False)))
    new, used = make_judge(range(500, 560)), make_judge(range(150, 560))
    plan = make_plan(tmp_path, new, by_bytes=lost != "present")
    past = [gate.PastUpdate(gate.ACCEPTED, True)] * 2
    assert not plan.renewed and plan.share == gate.share_budget(
        past, 0.05, on_trust=True
    )
    assert len(plan.remarks) == len(make_plan(tmp_path, used).remarks) + 1


def test_neighbours_of_another_class_are_another_protocol():
    rows, split = np.arange(6), np.repeat(np.uint8([0, 2]), 3)
    names, marks = rows.astype("S"), rows.astype(np.uint64)

    def described(*label):
        kinds = np.array(label, np.int32), rows * 0, np.array([b"a", b"b"])
        data = identity.Identity(names, marks, split, *kinds, np.array(True))
        return references.describe_images(data, {"knn": {}})

    first, judged = described(0, 0, 0, 0, 0, 0), described(0, 0, 0, 1, 0, 0)
    assert first.protocol == judged.protocol != described(1, 0, 0, 0, 0, 0).protocol
    assert judged.classes.tolist() == [b"b", b"a", b"a"]
