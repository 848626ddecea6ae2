"""The list of faults, and what mutate.py says of faults in a tree of its own."""

import pathlib
import re
import subprocess

import pytest

import faults
import mutate
from faults import fault as fault_lib

CODE = """def double(x):
    return 2 * x


def count(x):
    n = 0
    while n < x:
        n += 1
    return n
"""
TESTS = """import code_under_test as code
import pytest


def test_double():
    assert code.double(3) == 6


def test_four():
    assert code.double(2) == 4


def test_count():
    assert code.count(3) == 3


@pytest.mark.slow
def test_slow():
    assert code.double(-1) == -2
"""


def test_every_fault_still_applies_and_its_tests_are_there():
    assert mutate.problems(faults.FAULTS) == []
    assert len(faults.FAULTS) >= 60


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A repository of one module; what git does not know is in it, or ignored."""
    root = tmp_path_factory.mktemp("tree")
    (root / "tests").mkdir()
    (root / "code_under_test.py").write_text(CODE)
    (root / "tests" / "test_code.py").write_text(TESTS)
    (root / "tests" / "slow.txt").write_text("test_code.py::test_slow\n")
    (root / "pytest.ini").write_text(
        "[pytest]\nmarkers = slow\naddopts = -m 'not slow'"
    )
    (root / ".gitignore").write_text("secret\n")
    (root / "secret").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "code_under_test.py"], cwd=root, check=True)
    return root


def fault(name, old, new, *tests, **options):
    tests = tests or ("test_code.py::test_double",)
    return fault_lib.Fault(name, "code_under_test.py", old, new, tests, **options)


GOOD = fault("code: good", "2 * x", "3 * x")


def judged(tree, *asked, **options):
    """Whether all were caught, and the words and notes of each line."""
    said = []
    caught = mutate.run(asked, root=tree, say=said.append, **options)
    return caught, said


def test_what_is_said_of_faults(tree):
    asked = [
        GOOD,
        fault("code: lucky", "2 * x", "x * x", "test_code.py::test_four"),
        fault("code: no name", "2 * x", "two * x"),
        fault("code: no import", "def double", "import nothing\n\n\ndef double"),
        fault(
            "code: slow", "2 * x", "abs(2 * x)", "test_code.py::test_slow", slow=True
        ),
    ]
    caught, said = judged(tree, *asked, jobs=2)
    assert not caught
    assert [line.split()[0] for line in said[:5] if line] == [
        "caught",
        "survived",
        "broken",
        "broken",
        "caught",
    ]
    assert said[0].endswith("code: good  test_code.py::test_double  assert")
    assert "code_under_test.py: test_code.py::test_four" in said[1]
    assert "name 'two' is not defined" in said[2] and "nothing" in said[3]
    assert said[5:] == ["2 broken, 2 caught, 1 survived"]
    assert (tree / "code_under_test.py").read_text() == CODE


def test_a_fault_may_hang_where_that_is_what_it_does(tree):
    endless = fault("code: endless", "n += 1", "n += 0", "test_code.py::test_count")
    caught, said = judged(tree, endless, timeout=3)
    assert not caught and said[0].startswith("timed out") and said[1] == "1 timed out"
    caught, said = judged(tree, endless._replace(hangs=True), timeout=3)
    assert caught and said[0].startswith("caught") and "did not end" in said[0]


def test_nothing_is_said_where_tests_fail_anyway(tree):
    path = tree / "tests" / "test_wrong.py"
    path.write_text("def test_wrong():\n    assert False\n")
    try:
        caught, said = judged(tree, GOOD._replace(tests=("test_wrong.py",)))
    finally:
        path.unlink()
    assert not caught and len(said) == 1
    assert "assert False" in said[0] and said[0].endswith("without any fault.")


def test_faults_that_do_not_apply_are_named(tree):
    wrong = [
        GOOD,
        GOOD._replace(old="absent"),
        fault("code: twice", "n", "m"),
        fault("code: same", "2 * x", "2 * x"),
        fault("code: no Python", "2 * x", "2 *"),
        GOOD._replace(name="code: no test", tests=("test_code.py::test_no[1]",)),
        GOOD._replace(name="code: no tests", tests=("test_none.py",)),
        GOOD._replace(name="code: no file", file="other.py"),
        GOOD._replace(name="code: slow", tests=("test_code.py::test_slow",)),
    ]
    assert mutate.problems(wrong[:1], tree) == []
    said = mutate.problems(wrong, tree)
    for line, words in zip(
        said,
        [
            "code: good: the name of two faults",
            "code: good: no longer applies, its line is 0 times in code_under_test.py",
            "code: twice: no longer applies, its line is",
            "code: same: changes nothing",
            "code: no Python: is no Python: invalid syntax",
            "code: no test: there is no test_code.py::test_no[1]",
            "code: no tests: there is no test_none.py",
            "code: no file: no longer applies, there is no other.py",
            "code: slow: test_code.py::test_slow is slow, and the fault is not",
        ],
        strict=True,
    ):
        assert line.startswith(words)
    assert mutate.judge(wrong[1], tree).word == "stale"


def test_copies_are_the_working_tree(tree):
    with mutate.copies(2, tree) as (one, two):
        assert (one / "tests" / "test_code.py").read_text() == TESTS
        (one / "code_under_test.py").write_text("")
        assert (two / "code_under_test.py").read_text() == CODE
        assert not (one / "secret").exists() and not (one / ".git").exists()
    assert not one.exists() and (tree / "code_under_test.py").read_text() == CODE


def test_names_are_chosen_by_patterns(capsys):
    asked = [GOOD, GOOD._replace(name="memory: old"), GOOD._replace(name="memory: new")]
    assert mutate.chosen(asked, []) == asked
    assert mutate.chosen(asked, ["memory: *"], ["*new"]) == [asked[1]]
    assert mutate.main(["--list", "optim: *"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5 and all("jaxcl/optim.py" in line for line in lines)
    with pytest.raises(SystemExit):
        mutate.main(["no such fault"])


def test_the_list_of_slow_tests_names_tests():
    """A line that names none, half an id for one, would leave a slow test among all."""
    tests = pathlib.Path(__file__).parent
    for line in (tests / "slow.txt").read_text().splitlines():
        module, name, variant = re.fullmatch(r"(\S+\.py)::(\w+)(.*)", line).groups()
        assert f"def {name}(" in (tests / module).read_text(), line
        assert not variant or (variant[0], variant[-1]) == ("[", "]"), line
