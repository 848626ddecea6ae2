"""Change operators, constants and branches at random: do the quick tests notice?

    python tests/mutate_sample.py lines map.json           which test runs which line
    python tests/mutate_sample.py jaxcl/run map.json        40 changes below a path
    python tests/mutate_sample.py jaxcl map.json --seed=7 --count=60 --jobs=2

The first command runs all quick tests once. A sampled change is put into a copy of the
tree, and the quick tests that run its line are run until one fails. What survives is
printed: read it, and write the test that is missing, unless the change changes nothing.
Needs Python 3.12.
"""

import argparse
import ast
import collections
import concurrent.futures
import importlib.machinery
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time

import pytest

import environment
import mutate

ROOT = mutate.HERE.parent
SWAPS = dict(
    zip(
        ("Lt LtE Gt GtE Eq NotEq In NotIn Is IsNot And Or").split(),
        ("LtE Lt GtE Gt NotEq Eq NotIn In IsNot Is Or And").split(),
        strict=True,
    )
) | dict(Add="Sub", Sub="Add", Mult="Div", Div="Mult", FloorDiv="Mult", Mod="Mult")


class Lines:
    """A pytest plugin that notes the lines of the package that each test runs."""

    def __init__(self):
        self.lines, self.seconds = collections.defaultdict(list), {}
        self.tool, self.seen = sys.monitoring.PROFILER_ID, set()
        sys.monitoring.use_tool_id(self.tool, "lines")
        event = sys.monitoring.events.LINE
        sys.monitoring.register_callback(self.tool, event, self.note)
        loaders = importlib.machinery.SourceFileLoader
        get_code, package = loaders.get_code, str(ROOT / "jaxcl")

        def watched(loader, name):
            code = get_code(loader, name)
            if code.co_filename.startswith(package):
                self.watch(code)
            return code

        loaders.get_code = watched

    def watch(self, code):
        event = sys.monitoring.events.LINE
        sys.monitoring.set_local_events(self.tool, code, event)
        for constant in code.co_consts:
            if hasattr(constant, "co_code"):
                self.watch(constant)

    def note(self, code, line):
        self.seen.add((os.path.relpath(code.co_filename, ROOT), line))
        return sys.monitoring.DISABLE

    def pytest_runtest_logstart(self, nodeid):
        self.seen.clear()
        sys.monitoring.restart_events()
        self.begun = time.process_time()

    def pytest_runtest_logfinish(self, nodeid):
        self.seconds[nodeid] = round(time.process_time() - self.begun, 3)
        for path, line in self.seen:
            self.lines[f"{path}:{line}"].append(nodeid)


class Chosen:
    """A pytest plugin that runs the tests that are asked for."""

    def __init__(self, tests):
        self.tests, self.failure = set(tests), ""

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid in self.tests]

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.failure:
            self.failure = report.nodeid


def changes(tree):
    """Yield (node, its replacement as text) for all that can be changed in a tree."""
    words = ast.Raise | ast.JoinedStr  # messages: their words are not held
    inside = [ast.walk(node) for node in ast.walk(tree) if isinstance(node, words)]
    skipped = {id(node) for nodes in inside for node in nodes}
    for node in ast.walk(tree):
        kind = type(getattr(node, "op", None)).__name__
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare):
            kind = type(node.ops[0]).__name__
            others = [getattr(ast, SWAPS[kind])(), *node.ops[1:]]
            yield node, ast.Compare(node.left, others, node.comparators)
        elif isinstance(node, ast.BoolOp):
            yield node, ast.BoolOp(getattr(ast, SWAPS[kind])(), node.values)
        elif isinstance(node, ast.BinOp) and kind in SWAPS:
            other = getattr(ast, SWAPS[kind])()
            yield node, ast.BinOp(node.left, other, node.right)
        elif isinstance(node, ast.UnaryOp) and kind in ("Not", "USub"):
            yield node, node.operand
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.comprehension):
            yield from ((test, ast.Constant(True)) for test in node.ifs)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            value = node.value
            number = value * 2 if isinstance(value, float) and value else value + 1
            yield node, ast.Constant(not value if isinstance(value, bool) else number)
        elif isinstance(node, ast.Call) and node.keywords:
            if node.keywords[-1].arg not in ("help", "flush", "description"):
                yield node, ast.Call(node.func, node.args, node.keywords[:-1])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, ast.Pass()


def sample(folder, seed, count):
    """Draw changes: (path, lines of the statement, text before, text after, source)."""
    drawn, random_ = [], random.Random(seed)
    for path in sorted([*folder.rglob("*.py")] if folder.is_dir() else [folder]):
        source = path.read_text()
        tree, by_line = ast.parse(source), collections.defaultdict(list)
        for node, other in changes(tree):
            by_line[node.lineno].append((node, ast.unparse(other)))
        offsets = [0]
        for line in source.encode().splitlines(keepends=True):
            offsets.append(offsets[-1] + len(line))
        for line, sites in sorted(by_line.items()):
            node, after = random_.choice(sites)
            start = offsets[line - 1] + node.col_offset
            end = offsets[node.end_lineno - 1] + node.end_col_offset
            data = source.encode()
            before, after = data[start:end].decode(), f"({after})" * (after != "pass")
            changed = data[:start] + (after or "pass").encode() + data[end:]
            name, span = str(path.relative_to(ROOT)), range(line, node.end_lineno + 1)
            drawn.append((name, span, before, after or "pass", changed.decode()))
    return random_.sample(drawn, min(count, len(drawn)))


def tests_of(record, name, span, limit):
    """Return quick tests that run a line, by file, the fastest first, and what is left.

    Lines that only an import runs have the tests of the next lines that tests run.
    """
    lines, seconds = record["lines"], record["seconds"]
    tests = {test for line in span for test in lines.get(f"{name}:{line}", ())}
    for line in range(span[0], span[0] + 40):
        tests = tests or set(lines.get(f"{name}:{line}", ()))
    files = collections.defaultdict(float)
    for test in tests:
        files[test.partition("::")[0]] += seconds[test]
    chosen, spent = [], 0.0
    for test in sorted(tests, key=lambda x: (files[x.partition("::")[0]], seconds[x])):
        spent += seconds[test]
        chosen += [test] * (spent < limit)
    return chosen, len(tests) - len(chosen)


def _judge(folder, tests, send):
    """In a process of its own: run tests in a copy of the tree."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    os.chdir(folder)
    sys.path[:0] = [folder]
    os.environ["PYTHONPATH"] = folder
    chosen = Chosen(tests)
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    options = ["-q", "-x", "-n0", "--rootdir=.", "-p", "no:cacheprovider"]
    status = pytest.main([*options, *files], plugins=[chosen])
    send.send(chosen.failure or ("" if status == 0 else f"status {int(status)}"))


def judge(change, record, limit, timeout):
    """Return what became of a change: (word, the test that failed or a note)."""
    name, span, *_, changed = change
    tests, left = tests_of(record, name, span, limit)
    if not tests:
        return "unseen", "no quick test runs it"
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = f"{temporary}/tree"
        ignore = shutil.ignore_patterns(".git", "site", ".*_cache")
        shutil.copytree(ROOT, folder, ignore=ignore)
        pathlib.Path(folder, name).write_text(changed)
        process = context.Process(target=_judge, args=(folder, tests, send))
        process.start()
        send.close()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            return "caught", "the tests do not end"
        try:
            failure = receive.recv()
        except EOFError:
            failure = "the process died"
    if failure:
        return "caught", failure
    return "survived", f"{len(tests)} tests" + (f", {left} left out" if left else "")


def main(arguments=None):
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", help="file or folder to change; or lines")
    parser.add_argument("map", type=pathlib.Path, help="which test runs which line")
    parser.add_argument("--count", type=int, default=40, help="number of changes")
    parser.add_argument("--seed", type=int, default=0, help="decides which")
    parser.add_argument("--jobs", type=int, default=1, help="changes at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="tests of each, s")
    options = parser.parse_args(arguments)
    environment.settle(devices=8)  # before jax is imported anywhere
    if options.path == "lines":
        os.chdir(ROOT)
        lines = Lines()
        status = pytest.main(["-q", "-n0", "-p", "no:cacheprovider"], plugins=[lines])
        record = {"seconds": lines.seconds, "lines": lines.lines}
        options.map.write_text(json.dumps(record))
        return int(status)
    record = json.loads(options.map.read_text())
    multiprocessing.get_context("forkserver").set_forkserver_preload(mutate.PRELOADED)
    counts = collections.Counter()

    def timed(change):
        begun = time.monotonic()
        verdict = judge(change, record, options.limit, 10 * options.limit)
        return change, verdict, time.monotonic() - begun

    chosen = sample(ROOT / options.path, options.seed, options.count)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for change, (word, note), seconds in pool.map(timed, chosen):
            counts[word] += 1
            name, span, before, after, _ = change
            print(f"{word:8} {seconds:4.0f} s  {name}:{span[0]}  {note}")
            if word != "caught":
                print(f"    {before}\n    -> {after}", flush=True)
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
