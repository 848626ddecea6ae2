"""Is an update due? The two-sample test, and what `jaxcl check` advises."""

import json
import math
import types

import numpy as np
import pytest
from PIL import Image
from scipy import stats

import jaxcl
from jaxcl import cli
from jaxcl.errors import Refused
from jaxcl.update import check, gate, mmd, references
from test_update import LABELS, PIXELS, copy, run  # noqa: F401  fixtures


def brute_mmd(first, second):
    rows = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (first, second)]
    both = np.concatenate(rows)
    apart = [((a - b) ** 2).sum() for i, a in enumerate(both) for b in both[i + 1 :]]
    width = np.median(apart)

    def mean(a, b):
        return np.mean([[np.exp(-((x - y) ** 2).sum() / width) for y in b] for x in a])

    first, second = rows
    return mean(first, first) + mean(second, second) - 2 * mean(first, second)


def test_the_discrepancy_equals_its_definition():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(12, 5)), rng.normal(size=(9, 5)) + 1
    found = mmd.compare_samples(first, second, permutations=99)
    np.testing.assert_allclose(found.squared_mmd, brute_mmd(first, second), rtol=1e-9)
    assert found.p_value == 0.01 and found.witness.shape == (9,)
    again = mmd.compare_samples(3 * first, second, permutations=99)
    assert again.p_value == found.p_value  # directions alone count
    np.testing.assert_allclose(again.witness, found.witness)


def test_p_values_of_equal_distributions_are_uniform():
    rng = np.random.default_rng(0)
    values = [
        mmd.compare_samples(
            *(rng.normal(size=(n, 4)) for n in (30, 20)), permutations=99, seed=i
        ).p_value
        for i in range(150)
    ]
    assert stats.kstest(values, "uniform").pvalue > 0.01
    assert np.mean(np.array(values) <= 0.05) < 0.12


def test_odd_samples():
    rng = np.random.default_rng(0)
    same = np.ones((20, 3))
    assert mmd.compare_samples(same, same[:7]).p_value == 1
    one = mmd.compare_samples(rng.normal(size=(50, 3)), np.ones((1, 3)))
    assert 0 < one.p_value <= 1 and one.witness.shape == (1,)
    far = np.concatenate([rng.normal(size=(30, 3)) + 9, [[-9.0, 9, -9]]])
    found = mmd.compare_samples(rng.normal(size=(60, 3)) + 9, far)
    assert found.witness.argmax() == 30  # the odd one out is shown first


REPORT = {
    "differ": False,
    "far": 0.05,
    "duplicates": {"images": 100, "of_the_run": 0, "among_themselves": 0},
}


DUPLICATES = {"images": 100, "of_the_run": 30, "among_themselves": 0}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, check.WAIT),
        ({"differ": True}, check.UPDATE),
        ({"differ": True, "far": 0.95}, check.LOOK),
        ({"accuracy": {"alarm": True}}, check.LOOK),
        ({"differ": True, "accuracy": {"alarm": False}}, check.UPDATE),
        (
            {"duplicates": {"images": 100, "of_the_run": 40, "among_themselves": 11}},
            check.LOOK,
        ),
        ({"far": 0.9}, check.LOOK),
        ({"far": 0.899, "differ": True}, check.UPDATE),
        ({"duplicates": DUPLICATES | {"among_themselves": 20}}, check.WAIT),
    ],
)
def test_advice(changes, advice):
    assert check._advise(REPORT | changes)[0] == advice
    assert len({*check.EXIT_CODES.values()}) == 3


@pytest.mark.parametrize(
    ("before", "now", "limit", "alarm"),
    [
        ((80, 100), (50, 100), 0.02, True),
        ((80, 100), (50, 100), 0.31, False),
        ((4, 5), (3, 5), 0.02, False),
        ((50, 100), (80, 100), 0.02, False),
        ((80, 100), (80, 100), -0.1, False),
    ],
)
def test_accuracies_on_other_images_are_compared_by_chance(before, now, limit, alarm):
    """Fisher's exact test, one-sided, by counting."""
    (a, m), (b, n) = before, now
    ways = [
        math.comb(m, k) * math.comb(n, a + b - k)
        for k in range(m + 1)
        if 0 <= a + b - k <= n
    ]
    least = max(a + b - n, 0)
    p_value = sum(ways[a - least :]) / sum(ways)
    found = check._compare_images(np.arange(m) < a, np.arange(n) < b, limit, 0.95)
    assert found["accuracy_before"] == a / m
    assert found["p_value_before"] == pytest.approx(p_value)
    assert found["lower_than_before"] == alarm


def test_sentences_have_the_numbers_of_a_check():
    report = REPORT | {"images": {"new": 1234, "run": 321}, "remarks": ["A remark."]}
    report |= {"p_value": 0.0321, "mmd": 0.4567, "folder": "checks/7"}
    report |= {"advice": check.WAIT, "why": "of this"}
    report["duplicates"] = {"images": 99, "of_the_run": 12, "among_themselves": 5}
    report["duplicates"]["compared"] = True
    pairs = {"before": 0.9, "after": 0.8, "loss": 0.1, "low": 0.05, "high": 0.15}
    pairs |= {"lost": 30, "gained": 10, "images": 200, "confidence": 0.95}
    accuracy = pairs | {"matrix": "knn/x", "verdict": "harmful", "remarks": ["So."]}
    for more in ({}, {"accuracy": accuracy | {"accuracy_before": 0.77}}):
        text = check.write_sentences(report | more)
        words = ["A remark.", "do not differ", "p = 0.032", "0.457", "1,234", "321"]
        words += ["5 % of them", "12 of 99", "5 repeat", "checks/7", check.WAIT]
        words += ["of this"]
        told = ["knn/x", "90.0 -> 80.0", "-10.0 points", "40 of 200", "harmful", "77.0"]
        told += ["-15.0 to -5.0", "So."]
        assert all(word in text for word in words), text
        assert [word in text for word in told] == [bool(more)] * len(told)
    report |= {"differ": True, "advice": check.LOOK}
    report["duplicates"]["compared"] = False
    other = check.write_sentences(report)
    assert "do not differ" not in other and "not known" in other
    assert "not known" not in text and check.LOOK in other


def test_a_check_of_new_images(copy, capsys):  # noqa: F811
    """Those of the same kind, and inverted ones; nothing is trained."""
    where = str(copy / "run")
    digits = check.own_images.read_images({"name": "digits"})
    check.identity.write_identity(where, check.identity.identify(digits))
    np.savez(copy / "inverted.npz", train_x=255 - PIXELS[300:400])
    pairs = {
        "train_x": np.concatenate([PIXELS[:30], 255 - PIXELS[:1], 255 - PIXELS[:1]])
    }
    np.savez(copy / "few.npz", **pairs)
    both = np.concatenate([digits.train.images, digits.test.images])
    rows = np.random.default_rng(0).permutation(len(both))[:250]
    np.savez(copy / "new.npz", train_x=both[rows])
    argv = [where, "--rows=200", f"--test={copy / 'test.npz'}", "--json"]
    assert (
        cli.main(["check", *argv, f"--data={copy / 'new.npz'}"])
        == check.EXIT_CODES["look at the data"]
    )
    first = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert not first["differ"] and first["p_value"] > 0.01
    assert first["duplicates"]["of_the_run"] > 150  # digits that the run learned
    accuracy = first["accuracy"]
    assert accuracy["reference"] == where and not accuracy["alarm"]
    assert accuracy["lost"] == accuracy["gained"] == 0 and accuracy["images"] == 200
    assert not (copy / "run" / "updates").exists()
    kept = copy / "run" / "checks" / "sample.npz"
    before = kept.stat().st_mtime_ns
    found = jaxcl.Result(where).check(255 - PIXELS[300:400], rows=200)
    assert found.advice in (check.UPDATE, check.LOOK) and found.report["differ"]
    assert found.folder.endswith("checks/0002") and kept.stat().st_mtime_ns == before
    assert found.advice in str(found)
    with Image.open(f"{found.folder}/{check.PICTURE}") as picture:
        assert picture.size == (3 * 96, 3 * 96)
    few = check.check(where, str(copy / "few.npz"), rows=200)
    assert few["duplicates"]["among_themselves"] == 1
    assert len(few["most_different"]) == 9

    # A reference that was better than the encoder is now: an alarm.
    known = references.read_answers(copy / "run" / "checks" / "0001" / "now")
    kept = references.Reference(
        "gone",
        references.describe_images(
            check.identity.identify(
                check.own_images.read_images(
                    {"name": "npz", "path": str(copy / "test.npz")}
                )
            ),
            {"knn": {}},
        ),
        {name: np.ones(200, bool) for name in known},
    )
    references.write_reference(where, 1, kept)
    worse = check.check(
        where, str(copy / "inverted.npz"), test=str(copy / "test.npz"), rows=200
    )
    assert worse["accuracy"]["verdict"] == gate.HARMFUL and worse["accuracy"]["alarm"]
    assert worse["advice"] == check.LOOK


def test_an_image_counts_as_a_duplicate_once(monkeypatch):
    """Of the first run or update that has it, or else among the new ones."""
    known = {"run": [1, 8], "one": [1, 2, 0], "two": [1]}

    def marked(numbers):
        return types.SimpleNamespace(marks=np.uint64(numbers), by_bytes=True)

    monkeypatch.setattr(check.updates, "list_updates", lambda _: ["one", "two"])
    identity = types.SimpleNamespace(
        identify=lambda dataset: marked([1, 1, 2, 3, 0, 4, 4]),
        read_identity=lambda folder: marked(known[folder]),
    )
    monkeypatch.setattr(check, "identity", identity)
    found = check._count_duplicates("run", None)
    assert (found["images"], found["of_the_run"], found["among_themselves"]) == (
        7,
        3,
        1,
    )


def test_what_a_check_refuses(copy, monkeypatch):  # noqa: F811
    where = str(copy / "run")
    with pytest.raises(Refused, match="--rows=5"):
        check.check(where, str(copy / "new.npz"), rows=5)
    with pytest.raises(Refused, match=r"config\.data.*none\.npz"):
        check.check(where, str(copy / "none.npz"))
    assert cli.main(["check", where, "--data=none.npz"]) == 2
    asked = {"test": "t", "rows": 30, "limit": 0.1, "confidence": 0.9}
    told = []
    monkeypatch.setattr(
        check, "check", lambda *_, **named: told.append(named) or {"advice": "update"}
    )
    words = [f"--{name}={value}" for name, value in asked.items()]
    assert cli.main(["check", where, "--data=x", "--json", *words]) == 4
    assert told == [asked]


def test_witnesses_and_far_images_are_those_of_a_loop():
    rng, shares = np.random.default_rng(0), set()
    for shift in np.linspace(0, 2, 9):
        first, second = (
            rng.normal(size=(24, 3)),
            rng.normal(size=(9, 3)) + [shift, 0, 0],
        )
        second = np.concatenate([second, first[:1]])
        found = mmd.compare_samples(first, second, permutations=1)
        first, second = (
            x / np.linalg.norm(x, axis=1, keepdims=True) for x in (first, second)
        )
        both = np.concatenate([first, second])
        apart = [math.dist(a, b) for i, a in enumerate(both) for b in both[i + 1 :]]
        width = np.median([x**2 for x in apart if x > 1e-6])

        def near(x, rows, width=width):
            return np.mean([math.exp(-(math.dist(x, y) ** 2) / width) for y in rows])

        sums = [[near(x, rows) for x in second] for rows in (second, first)]
        np.testing.assert_allclose(found.witness, np.subtract(*sums))
        nearest = [
            min(math.dist(x, y) for j, y in enumerate(first) if j != i)
            for i, x in enumerate(first)
        ]
        usual = np.quantile(np.square(nearest), 0.95) ** 0.5
        far = [min(math.dist(x, y) for y in first) > usual for x in second]
        assert found.far == np.mean(far)
        shares.add(found.far)
    assert len(shares) > 2


@pytest.mark.parametrize("p_value", [0.01, 0.0101])
def test_new_images_differ_from_a_p_value_of_a_hundredth_on(
    tmp_path, monkeypatch, p_value
):
    """The images that differ most, of a sample of 20 of 50, are drawn and named."""
    rows = types.SimpleNamespace(label=np.zeros(50), reader=None)
    data = types.SimpleNamespace(train=rows)
    stream = types.SimpleNamespace(dataset=data)
    frozen = types.SimpleNamespace(parts=types.SimpleNamespace(stream=stream))
    witness, drawn = np.random.default_rng(1).random(20), []
    old = types.SimpleNamespace(features=np.zeros((7, 2)), remarks=["a remark"])
    told = {"images": 50, "of_the_run": 0, "among_themselves": 0}
    for module, name, value in (
        (check.updates, "find_current", "now"),
        (check.lineage, "read_run_config", {}),
        (check.own_images, "make_section", {}),
        (check, "_restore", frozen),
        (check, "_embed", np.zeros((20, 2))),
        (check, "_embed_run", old),
        (check, "_count_duplicates", told),
        (mmd, "compare_samples", mmd.Difference(0.25, p_value, witness, 0.2)),
    ):
        monkeypatch.setattr(module, name, lambda *given, value=value, **options: value)
    monkeypatch.setattr(check, "_draw_images", lambda *given: drawn.append(given))
    (tmp_path / "checks" / "0007").mkdir(parents=True)
    found = check.check(str(tmp_path), "new", rows=20)
    assert found["differ"] == (p_value == 0.01) and found["mmd"] == 0.5
    assert found["images"] == {"new": 20, "run": 7} and found["remarks"] == ["a remark"]
    chosen = np.sort(np.random.default_rng(0).permutation(50)[:20])
    ((_, shown, path),) = drawn
    np.testing.assert_array_equal(shown, chosen[np.argsort(-witness)[:9]])
    assert found["most_different"] == [f"row {row}" for row in shown]
    assert path.parent.name == "0008" and (path.parent / "check.json").exists()
    for wrong in (19, 5001):
        with pytest.raises(Refused, match=f"--rows={wrong}"):
            check.check(str(tmp_path), "new", rows=wrong)
    old.features[3, 1] = np.nan
    with pytest.raises(Refused, match=check.embedding.NOT_FINITE):
        check.check(str(tmp_path), "new", rows=20)


def test_a_run_s_sets_are_its_own_and_those_of_accepted_updates(monkeypatch):
    reports = {"1": {"accepted": True}, "2": {"accepted": False}, "3": None}
    monkeypatch.setattr(check.updates, "list_updates", lambda _: [*reports])
    monkeypatch.setattr(check.updates, "read_report", reports.get)
    monkeypatch.setattr(check.lineage, "read_run_config", lambda x: {"data": x})
    assert check._list_sections("0", None) == ["0", "1"]


def test_a_run_s_sample_has_a_part_of_each_set_and_is_embedded_once(
    tmp_path, monkeypatch
):
    """Of 1, 10 and 989 rows; of test rows, if a set has some."""
    weights, calls = {"number": 1}, []

    def restore(section, current, config):
        if section == "gone":
            raise Refused("gone: is not there")
        rows = types.SimpleNamespace(label=np.zeros(section), name=section)
        other = rows if section == 10 else None
        train = (
            rows
            if other is None
            else types.SimpleNamespace(label=np.zeros(3), name="train")
        )
        data = types.SimpleNamespace(train=train, test=other)
        return types.SimpleNamespace(
            parts=types.SimpleNamespace(stream=types.SimpleNamespace(dataset=data))
        )

    def embed(frozen, examples, rows):
        calls.append(rows)
        return np.stack([np.full(len(rows), examples.name), rows], axis=1)

    monkeypatch.setattr(check, "_list_sections", lambda *given: [1, "gone", 10, 989])
    monkeypatch.setattr(check, "_describe_weights", lambda current: weights)
    monkeypatch.setattr(check, "_restore", restore)
    monkeypatch.setattr(check, "_embed", embed)
    found = check._embed_run(tmp_path, "run", {}, 200)
    sets, rows = found.features.T
    assert [(sets == size).sum() for size in (1, 10, 989)] == [1, 2, 197]
    drawn = np.sort(np.random.default_rng(0).permutation(989)[:197])
    np.testing.assert_array_equal(rows[sets == 989], drawn)
    (remark,) = found.remarks
    assert "gone" in remark
    again = check._embed_run(tmp_path, "run", {}, 200)
    np.testing.assert_array_equal(again.features, found.features)
    assert again.remarks == found.remarks and len(calls) == 3
    check._embed_run(tmp_path, "run", {}, 100)
    weights["number"] = 2
    check._embed_run(tmp_path, "run", {}, 100)
    assert len(calls) == 9
