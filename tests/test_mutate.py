"""The list of faults can be put in, and mutate.py tells what becomes of a fault."""

import pathlib
import re
import subprocess
import sys

import faults
import mutate

HERE = pathlib.Path(__file__).parent
MADE = {
    "code_under_test.py": "def double(x):\n    return 2 * x\n",
    "test_code.py": """
import code_under_test as code

def test_double():
    assert code.double(3) == 6

def test_four():
    assert code.double(2) == 4
""",
    "faults.py": """
import collections

Fault = collections.namedtuple("Fault", "name target patch tests")

def instead(other):
    return lambda function: other

def fault(name, other, test="test_double", target="code_under_test.double"):
    return Fault(name, target, instead(other), (f"test_code.py::{test}",))

FAULTS = [
    fault("good", lambda x: 3 * x),
    fault("lucky", lambda x: x * x, "test_four"),
    fault("wrong", lambda x: nothing),
    fault("gone", lambda x: x, target="code_under_test.triple"),
]
""",
}


def judged(folder, *options):
    """The exit status and the lines of the command, for the tests of a folder."""
    command = [sys.executable, HERE / "mutate.py", f"--folder={folder}", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_a_fault_is_caught_survives_is_broken_or_has_no_target(tmp_path):
    for name, text in MADE.items():
        (tmp_path / name).write_text(text)
    status, lines = judged(tmp_path)
    found = (re.match(r"(\w[\w ]*?) +[\d.]+ s  (\w+)  (.*)", line) for line in lines)
    words = {match[2]: match[1] for match in found if match}
    assert status == 1 and lines[-1] == "1 broken, 1 caught, 1 no target, 1 survived"
    right = {"good": "caught", "lucky": "survived", "wrong": "broken"}
    assert words == right | {"gone": "no target"}
    text = "\n".join(lines)
    assert "good  test_code.py::test_double" in text and "::test_four" in text
    assert "'nothing' is not defined" in text and "code_under_test.triple" in text
    (tmp_path / "code_under_test.py").write_text("def double(x):\n    return x\n")
    status, lines = judged(tmp_path, "good")  # the test fails without a fault, too
    assert status == 1 and "caught" not in "".join(lines)


def test_every_fault_has_a_target_and_quick_tests():
    assert mutate.problems(faults.FAULTS) == []


def test_the_list_of_slow_tests_names_tests():
    """A line that names none, half an id for one, would leave a slow test among all."""
    for line in (HERE / "slow.txt").read_text().splitlines():
        module, name, variant = re.fullmatch(r"(\S+\.py)::(\w+)(.*)", line).groups()
        assert f"def {name}(" in (HERE / module).read_text(), line
        assert not variant or (variant[0], variant[-1]) == ("[", "]"), line
