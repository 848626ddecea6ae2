"""Change operators, constants and branches at random: do the quick tests notice?

    python tests/mutate_sample.py lines map.json            which test runs which line
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
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

import environment

ROOT = pathlib.Path(__file__).resolve().parent.parent
SWAPS = dict(Lt="LtE", Gt="GtE", Eq="NotEq", In="NotIn", Is="IsNot", And="Or")
SWAPS |= {b: a for a, b in SWAPS.items()} | dict(Add="Sub", Sub="Add", Mult="Div")
SWAPS |= dict(Div="Mult", FloorDiv="Mult", Mod="Mult")
WORDS = ("help", "flush", "description")  # arguments whose values no test holds


class Lines:
    """A pytest plugin that notes the lines of the package that each test runs."""

    def __init__(self):
        self.lines, self.seconds = collections.defaultdict(list), {}
        self.tool, self.seen, events = 3, set(), sys.monitoring.events
        sys.monitoring.use_tool_id(self.tool, "lines")
        sys.monitoring.register_callback(self.tool, events.LINE, self.note)
        loaders = importlib.machinery.SourceFileLoader
        get_code, package = loaders.get_code, str(ROOT / "jaxcl")

        def watched(loader, name):
            code = get_code(loader, name)
            if code.co_filename.startswith(package):
                self.watch(code)
            return code

        loaders.get_code = watched

    def watch(self, code):
        sys.monitoring.set_local_events(self.tool, code, sys.monitoring.events.LINE)
        for inner in filter(lambda x: hasattr(x, "co_code"), code.co_consts):
            self.watch(inner)

    def note(self, code, line):
        self.seen.add(f"{os.path.relpath(code.co_filename, ROOT)}:{line}")
        return sys.monitoring.DISABLE

    def pytest_runtest_logstart(self, nodeid):
        self.seen.clear()
        sys.monitoring.restart_events()
        self.begun = time.process_time()

    def pytest_runtest_logfinish(self, nodeid):
        self.seconds[nodeid] = round(time.process_time() - self.begun, 3)
        for line in self.seen:
            self.lines[line].append(nodeid)


def changes(tree):
    """Yield (node, its replacement) for all that can be changed in a tree."""
    messages = [x for x in ast.walk(tree) if isinstance(x, ast.Raise | ast.JoinedStr)]
    skipped = {id(part) for x in messages for part in ast.walk(x)}
    for node in ast.walk(tree):
        kind = type(getattr(node, "op", None)).__name__
        swapped = getattr(ast, SWAPS.get(kind, "AST"))()
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare):
            first = getattr(ast, SWAPS[type(node.ops[0]).__name__])()
            yield node, ast.Compare(node.left, [first, *node.ops[1:]], node.comparators)
        elif isinstance(node, ast.BoolOp):
            yield node, ast.BoolOp(swapped, node.values)
        elif isinstance(node, ast.BinOp) and kind in SWAPS:
            yield node, ast.BinOp(node.left, swapped, node.right)
        elif isinstance(node, ast.UnaryOp) and kind in ("Not", "USub"):
            yield node, node.operand
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            value = node.value
            number = value * 2 if isinstance(value, float) and value else value + 1
            yield node, ast.Constant(not value if isinstance(value, bool) else number)
        elif isinstance(node, ast.Call) and node.keywords:
            if node.keywords[-1].arg not in WORDS:
                yield node, ast.Call(node.func, node.args, node.keywords[:-1])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, ast.Pass()


def sample(folder, seed, count):
    """Draw changes, each of another line: (path, lines, text before, after, source)."""
    drawn, generator = [], random.Random(seed)
    for path in sorted([*folder.rglob("*.py")] if folder.is_dir() else [folder]):
        data, by_line = path.read_bytes(), collections.defaultdict(list)
        begins = [0]
        for line in data.splitlines(keepends=True):
            begins.append(begins[-1] + len(line))
        for node, other in changes(ast.parse(data)):
            by_line[node.lineno].append((node, ast.unparse(other) or "pass"))
        for line, sites in sorted(by_line.items()):
            node, after = generator.choice(sites)
            start = begins[line - 1] + node.col_offset
            end = begins[node.end_lineno - 1] + node.end_col_offset
            after = after if after == "pass" else f"({after})"
            name, span = str(path.relative_to(ROOT)), range(line, node.end_lineno + 1)
            source = data[:start] + after.encode() + data[end:]
            drawn.append((name, span, data[start:end].decode(), after, source))
    return generator.sample(drawn, min(count, len(drawn)))


def tests_of(record, name, span, limit):
    """Return the quick tests that run a line, up to `limit` seconds, by file.

    Lines that only an import runs have the tests of the next lines that tests run.
    """
    tests = {x for line in span for x in record["lines"].get(f"{name}:{line}", ())}
    for line in range(span[0], span[0] + 40):
        tests = tests or {*record["lines"].get(f"{name}:{line}", ())}
    cost, files, spent = record["seconds"], collections.Counter(), 0.0
    for test in tests:
        files[test.partition("::")[0]] += cost[test]
    for test in sorted(tests, key=lambda x: (files[x.partition("::")[0]], cost[x])):
        spent += cost[test]
        if spent < limit:
            yield test


def judge(change, record, limit):
    """Return what became of a change, and the test that failed or a note."""
    name, span, *_, source = change
    if not (tests := list(tests_of(record, name, span, limit))):
        return "unseen", "no quick test runs it"
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder, "tree")
        ignored = shutil.ignore_patterns(".git", "site", ".*_cache")
        shutil.copytree(ROOT, folder, ignore=ignored)
        (folder / name).write_bytes(source)
        (folder / "chosen").write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", "-qx", "-n0", "@chosen"]
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if done.returncode:
        return "caught", (failed or ["the process ended"])[0][:120]
    return "survived", f"{len(tests)} tests"


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", help="file or folder to change; or lines")
    parser.add_argument("map", type=pathlib.Path, help="which test runs which line")
    parser.add_argument("--count", type=int, default=40, help="number of changes")
    parser.add_argument("--seed", type=int, default=0, help="decides which")
    parser.add_argument("--jobs", type=int, default=1, help="changes at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="tests of each, s")
    options = parser.parse_args()
    environment.settle(devices=8)  # before jax is imported anywhere
    if options.path == "lines":
        os.chdir(ROOT)
        lines = Lines()
        status = pytest.main(["-q", "-n0"], plugins=[lines])
        record = {"seconds": lines.seconds, "lines": lines.lines}
        options.map.write_text(json.dumps(record))
        return int(status)
    record, counts = json.loads(options.map.read_text()), collections.Counter()
    drawn = sample(ROOT / options.path, options.seed, options.count)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        verdicts = pool.map(lambda x: judge(x, record, options.limit), drawn)
        for (name, span, before, after, _), found in zip(drawn, verdicts, strict=True):
            counts[found[0]] += 1
            print(f"{found[0]:8} {name}:{span[0]}  {found[1]}", flush=True)
            if found[0] != "caught":
                print(f"    {before}\n    -> {after}", flush=True)
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
