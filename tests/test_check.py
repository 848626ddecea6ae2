"""Is an update due? The two-sample test, and what `jaxcl check` advises."""

import json

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
    ],
)
def test_advice(changes, advice):
    assert check._advise(REPORT | changes)[0] == advice
    assert len({*check.EXIT_CODES.values()}) == 3


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
    # Other images, which the reference cannot answer.
    np.savez(
        copy / "other.npz",
        train_x=PIXELS[300:500],
        train_y=LABELS[300:500],
        test_x=PIXELS[700:900],
        test_y=LABELS[700:900],
    )
    with pytest.raises(Refused, match="config.test.*gone"):
        check.check(
            where, str(copy / "new.npz"), test=str(copy / "other.npz"), rows=200
        )


def test_what_a_check_refuses(copy):  # noqa: F811
    where = str(copy / "run")
    with pytest.raises(Refused, match="--rows=5"):
        check.check(where, str(copy / "new.npz"), rows=5)
    with pytest.raises(Refused, match=r"config\.data.*none\.npz"):
        check.check(where, str(copy / "none.npz"))
    assert cli.main(["check", where, "--data=none.npz"]) == 2
