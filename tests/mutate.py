"""Puts one fault at a time into the code and asks whether the tests notice.

    python tests/mutate.py                      all faults of faults/
    python tests/mutate.py 'memory: *' --jobs 2   those whose name matches
    python tests/mutate.py --check              do all faults still apply?

Faults go into a copy of the working tree; this one stays as it is. The tests that a
fault names must pass on the unchanged copy, or nothing is said. One line per fault:

    caught     a test failed
    survived   all passed: a test is missing
    broken     the code does not run, so that no test was asked anything
    timed out  the tests did not end (of a fault that `hangs` this is "caught")

Exits with 1 unless every fault is caught. It is slow and not a part of the tests, but
test_mutate.py asks that the faults apply: who rewrites a line mends its faults, too.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import fnmatch
import importlib.util
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import faults
from faults import fault as fault_lib

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A failure of this kind says that the code is wrong, whatever it computes.
_BROKEN = re.compile(
    r"^(FAILED|ERROR) .*? - (\w+\.)*"
    r"(NameError|SyntaxError|IndentationError|ImportError|ModuleNotFoundError)",
    re.MULTILINE,
)
# The test that failed, and by what: a crash says less of the tests than an assertion.
_FAILED = re.compile(
    r"^(?:FAILED|ERROR) (?:tests/)?(\S+)(?: - (?:\w+\.)*(\w+))?", re.MULTILINE
)


class Verdict(NamedTuple):
    """What the tests said of a fault."""

    fault: fault_lib.Fault
    word: str  # one of those at the top, or "stale"
    seconds: float = 0.0
    note: str = ""


def problems(asked, root=ROOT) -> list[str]:
    """Why faults do not apply to the tree, one line each."""
    lines, names = [], [fault.name for fault in asked]
    lines += [f"{name}: the name of two faults" for name in _repeated(names)]
    for fault in asked:
        lines += [f"{fault.name}: {reason}" for reason in _reasons(fault, root)]
    return lines


def _repeated(names):
    return sorted({name for name in names if names.count(name) > 1})


def _reasons(fault, root):
    path = root / fault.file
    if not path.exists():
        return [f"no longer applies, there is no {fault.file}"]
    text = path.read_text()
    count = text.count(fault.old)
    if count != 1:
        return [f"no longer applies, its line is {count} times in {fault.file}"]
    if fault.old == fault.new:
        return ["changes nothing"]
    try:
        ast.parse(text.replace(fault.old, fault.new))
    except SyntaxError as error:
        return [f"is no Python: {error}"]
    listed = (root / "tests/slow.txt").read_text().splitlines()
    slow = (
        ()
        if fault.slow
        else {
            test for test in fault.tests if {test, test.partition("[")[0]} & set(listed)
        }
    )
    return [
        *(f"there is no {test}" for test in fault.tests if not _is_there(test, root)),
        *(f"{test} is slow, and the fault is not" for test in sorted(slow)),
    ]


def _is_there(test, root) -> bool:
    file, _, function = test.partition("::")
    path, name = root / "tests" / file, function.partition("[")[0]
    return path.exists() and (not name or f"def {name}(" in path.read_text())


def chosen(every, patterns, without=()) -> list:
    """Faults whose name matches one of the patterns (all, if there are none)."""

    def matches(fault, patterns):
        return any(fnmatch.fnmatchcase(fault.name, pattern) for pattern in patterns)

    kept = [fault for fault in every if not patterns or matches(fault, patterns)]
    return [fault for fault in kept if not matches(fault, without)]


@contextlib.contextmanager
def copies(count, root=ROOT):
    """That many directories with the files of the working tree, for a while."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True)
    names = [name for name in os.fsdecode(listed.stdout).split("\0") if name]
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        trees = [pathlib.Path(folder) / str(number) for number in range(count)]
        for tree in trees:
            for name in names:
                if (root / name).is_file():  # one that is deleted is listed still
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(root / name, tree / name)
        yield trees


def _pytest(tree, tests, *, slow, timeout, options=()):
    """(exit status, output) of the tests in a tree; None where they did not end."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "" if slow else "not slow", *options]
    command += [f"tests/{test}" for test in tests]
    # Wide enough that no reason at the end of a line is cut off.
    environment = os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "300"}
    environment.pop("PYTEST_ADDOPTS", None)  # meant for whoever runs this
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if process.poll() is None:  # and those that it started
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def baseline(asked, tree, jobs=1) -> str:
    """What the tests say of the unchanged tree: "" if they pass."""
    for slow in (False, True):
        wanted = [test for fault in asked if fault.slow == slow for test in fault.tests]
        tests = sorted(set(wanted))
        if tests:
            workers = ("-n", str(jobs if jobs > 1 else 0))
            status, output = _pytest(
                tree, tests, slow=slow, timeout=None, options=workers
            )
            if status != 0:
                return output
    return ""


def judge(fault, tree, timeout=600.0) -> Verdict:
    """Put a fault into a tree, run its tests, and take it out again."""
    reasons = _reasons(fault, tree)
    if reasons:
        return Verdict(fault, "stale", note="; ".join(reasons))
    path, began = tree / fault.file, time.monotonic()
    text = path.read_text()
    try:
        _write(path, text.replace(fault.old, fault.new))
        status, output = _pytest(
            tree,
            fault.tests,
            slow=fault.slow,
            timeout=timeout,
            options=("-x", "-n", "0"),
        )
    finally:
        _write(path, text)
    word, note = _word(fault, status, output)
    return Verdict(fault, word, time.monotonic() - began, note)


def _write(path, text):
    """Python tells a module's bytecode from an older one by second and size alone."""
    path.write_text(text)
    pathlib.Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def _word(fault, status, output):
    if status is None:
        return ("caught", "did not end") if fault.hangs else ("timed out", "")
    if status == 0:
        return "survived", f"{fault.file}: {' '.join(fault.tests)}"
    # 1: tests failed. Others: nothing was collected, or the process died.
    if status != 1 or _BROKEN.search(output):
        return "broken", "\n" + "\n".join(output.splitlines()[-20:])
    failed = _FAILED.search(output)
    return "caught", "  ".join(filter(None, failed.groups())) if failed else ""


def run(asked, *, jobs=1, timeout=600.0, root=ROOT, say=print) -> bool:
    """Judge faults side by side, and say of each what became of it.

    Returns:
      Whether all were caught.
    """
    counts = {}
    with (
        copies(jobs, root) as trees,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        failed = baseline(asked, trees[0], jobs)
        if failed:
            say(f"{failed}\nThe tests fail without any fault.")
            return False
        free = queue.SimpleQueue()
        for tree in trees:
            free.put(tree)

        def judge_somewhere(fault):
            tree = free.get()
            try:
                return judge(fault, tree, timeout)
            finally:
                free.put(tree)

        for verdict in pool.map(judge_somewhere, asked):
            counts[verdict.word] = counts.get(verdict.word, 0) + 1
            fault, word, seconds, note = verdict
            say(f"{word:9} {seconds:6.1f} s  {fault.name}  {note}".rstrip())
    say(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    return set(counts) <= {"caught"}


def main(arguments=None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of faults, with * and ?; all if none")
    parser.add_argument("--without", nargs="*", default=[], help="names to leave out")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--timeout", type=float, default=600.0, help="of a fault, s")
    parser.add_argument("--list", action="store_true", help="say the names and end")
    parser.add_argument("--check", action="store_true", help="do the faults apply?")
    options = parser.parse_args(arguments)
    asked = chosen(faults.FAULTS, options.names, options.without)
    if not asked:
        parser.error(f"no fault is called {' '.join(options.names)}")
    if options.list:
        for fault in asked:
            print(f"{fault.name}  {fault.file}  {' '.join(fault.tests)}")
        return 0
    stale = problems(asked)
    print("".join(f"{line}\n" for line in stale), end="")
    if options.check or stale:
        print(f"{len(asked)} faults, {len(stale)} problems")
        return int(bool(stale))
    sys.stdout.reconfigure(line_buffering=True)  # a line as soon as it is known
    all_caught = run(asked, jobs=options.jobs, timeout=options.timeout)
    return int(not all_caught)


if __name__ == "__main__":
    sys.exit(main())
