"""Put one fault at a time into the package and ask whether the tests notice.

    python tests/mutate.py                    all faults of faults/
    python tests/mutate.py 'memory: *'        those whose name matches
    python tests/mutate.py --shard=3/40       every 40th, from the third
    python tests/mutate.py --list             their names, targets and tests

The tests of all chosen faults must pass without a fault, or nothing else is run. Each
fault then has a process of its own, which replaces one function before any test module
is imported. One line says what became of the fault:

    caught     a test failed by an assertion
    survived   all passed: a test is missing
    broken     no assertion failed, but something else: the fault itself is wrong
    no target  what it replaces does not exist
    timed out  the tests did not end

The command exits with 1 unless every fault is caught.
"""

import argparse
import concurrent.futures
import contextlib
import fnmatch
import importlib
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time

import pytest

import environment

HERE = pathlib.Path(__file__).resolve().parent
# Imported once, for all faults; nothing of jaxcl, which a fault has to meet fresh.
PRELOADED = ["chex", "flax.linen", "jax", "optax", "orbax.checkpoint"]


def find(target: str) -> tuple[object, str]:
    """Return the module or class that holds a target, and the target's name there.

    Raises:
      LookupError: there is no such thing.
    """
    names = target.split(".")
    for count in range(len(names) - 1, 0, -1):
        path = ".".join(names[:count])
        try:
            owner = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name and not f"{path}.".startswith(f"{error.name}."):
                raise  # a package that is missing, not a part of the target
            continue
        for name in names[count:-1]:
            owner = getattr(owner, name, None)
        if hasattr(owner, names[-1]):
            return owner, names[-1]
        break
    raise LookupError(f"there is no {target}")


def problems(faults) -> list[str]:
    """Say which faults cannot be put in, one line each."""
    slow = set((HERE / "slow.txt").read_text().splitlines())
    names = [fault.name for fault in faults]
    found = [f"{n}: the name of two faults" for n in names if names.count(n) > 1]
    for fault in faults:
        try:
            find(fault.target)
        except LookupError as error:
            found.append(f"{fault.name}: {error}")
        for test in fault.tests:
            if {test, test.partition("[")[0]} & slow:
                found.append(f"{fault.name}: {test} is slow")
    return sorted(set(found))


class _Noticed:
    """The pytest plugin that puts a fault in and keeps the first failure."""

    def __init__(self, fault):
        self.fault, self.failure, self.ran = fault, None, 0

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self):
        try:
            owner, name = find(self.fault.target)
        except LookupError as error:
            self.failure = "no target", str(error)
            raise pytest.UsageError(str(error)) from error
        setattr(owner, name, self.fault.patch(getattr(owner, name)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        self.ran += call.when == "call"
        if report.failed and self.failure is None:
            by_assertion = call.excinfo.errisinstance(
                (AssertionError, pytest.fail.Exception)
            )
            word = "caught" if by_assertion else "broken"
            self.failure = word, f"{item.nodeid}  {call.excinfo.typename}"
        return report

    def verdict(self):
        if self.failure:
            return self.failure
        return ("survived", "") if self.ran else ("broken", "no test ran")


def _judge(folder, name, output, send):
    """In a process of its own: run the tests of one fault, and send the verdict."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    (fault,) = (fault for fault in _faults(folder) if fault.name == name)
    noticed = _Noticed(fault)
    options = ["-q", "-x", "-n0", "--tb=short", "--rootdir=."]
    options += ["-p", "no:cacheprovider"]
    status = pytest.main([*options, *fault.tests], plugins=[noticed])
    word, note = noticed.verdict()
    if word == "survived" and status != 0:
        word = "broken"
    send.send((word, note))


def judge(folder, fault, timeout) -> tuple[str, str]:
    """Return the word for a fault and a note: the failed test, or the last output."""
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(prefix="mutate-", mode="r") as output:
        process = context.Process(
            target=_judge, args=(folder, fault.name, output.name, send)
        )
        process.start()
        send.close()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            return "timed out", f"after {timeout:.0f} s"
        with contextlib.suppress(EOFError):
            word, note = receive.recv()
            if word != "broken":
                return word, note
        return "broken", "\n" + "".join(output.readlines()[-20:])


def _faults(folder):
    """The list FAULTS of the module or package `faults` in a folder."""
    sys.path.insert(0, str(folder))
    return list(importlib.import_module("faults").FAULTS)


def passes_without(faults, folder, jobs) -> bool:
    """Run the tests that the faults name, without any fault."""
    tests = sorted({test for fault in faults for test in fault.tests})
    os.chdir(folder)
    workers = jobs if jobs > 1 else 0
    command = [sys.executable, "-m", "pytest", "-q", f"-n{workers}", "--rootdir=."]
    command += ["-p", "no:cacheprovider", *tests]
    return os.spawnv(os.P_WAIT, sys.executable, command) == 0


def run(faults, folder, *, jobs, timeout) -> bool:
    """Judge faults, `jobs` at a time, and print a line for each; are all caught?"""
    preloaded = PRELOADED if folder == HERE else []
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
    counts = {}

    def timed(fault):
        began = time.monotonic()
        return fault, *judge(folder, fault, timeout), time.monotonic() - began

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for fault, word, note, seconds in pool.map(timed, faults):
            counts[word] = counts.get(word, 0) + 1
            asked = f"{fault.target}: {' '.join(fault.tests)}"
            note = asked if word == "survived" else note
            print(f"{word:9} {seconds:5.1f} s  {fault.name}  {note}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    return set(counts) == {"caught"}


def main(arguments=None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of faults, with * and ?; all if none")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--shard", default="1/1", help="I/N: every Nth fault, from I")
    parser.add_argument("--timeout", type=float, default=600.0, help="of a fault, s")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="of tests")
    options = parser.parse_args(arguments)
    environment.settle(devices=8)  # before jax is imported anywhere
    folder, patterns = options.folder.resolve(), options.names or ["*"]
    every = _faults(folder)
    chosen = [f for f in every if any(fnmatch.fnmatchcase(f.name, p) for p in patterns)]
    part, parts = map(int, options.shard.split("/"))
    chosen = chosen[part - 1 :: parts]
    if not chosen:
        parser.error(f"{' '.join(patterns)}, shard {options.shard}: there is no fault")
    if options.list:
        for fault in chosen:
            print(f"{fault.name}  {fault.target}  {' '.join(fault.tests)}")
        return 0
    if not passes_without(chosen, folder, options.jobs):
        print("The tests fail without any fault.")
        return 1
    return int(not run(chosen, folder, jobs=options.jobs, timeout=options.timeout))


if __name__ == "__main__":
    sys.exit(main())
