"""Change operators, constants and branches at random: do the quick tests notice?

    python tests/mutate_sample.py jaxcl/update tests/test_{update,gate}.py --count=40

Each change is put into a copy of the tree, and the tests are run until one fails. What
survives is printed: read it, and write the test that is missing, unless the change
changes nothing. A seed draws other changes.
"""

import argparse
import ast
import collections
import concurrent.futures
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SWAPS = dict(Lt="LtE", Gt="GtE", Eq="NotEq", In="NotIn", Is="IsNot", And="Or")
SWAPS |= {b: a for a, b in SWAPS.items()} | dict(Add="Sub", Sub="Add", Mult="Div")
SWAPS |= dict(Div="Mult", FloorDiv="Mult", Mod="Mult")
WORDS = ("help", "flush", "description")  # arguments whose values no test holds


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
    """Draw changes, each of another line: (path, line, text before, after, source)."""
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
            name = str(path.relative_to(ROOT))
            source = data[:start] + after.encode() + data[end:]
            drawn.append((name, line, data[start:end].decode(), after, source))
    return generator.sample(drawn, min(count, len(drawn)))


def judge(change, tests):
    """Return what became of a change, and the test that failed."""
    name, *_, source = change
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder, "tree")
        ignored = shutil.ignore_patterns(".git", "site", ".*_cache")
        shutil.copytree(ROOT, folder, ignore=ignored)
        (folder / name).write_bytes(source)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-qx", "-n0", *tests],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if done.returncode:
        return "caught", (failed or ["the process ended"])[0][:120]
    return "survived", ""


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", help="file or folder to change")
    parser.add_argument("tests", nargs="+", help="files of tests, or single ones")
    parser.add_argument("--count", type=int, default=40, help="number of changes")
    parser.add_argument("--seed", type=int, default=0, help="decides which")
    parser.add_argument("--jobs", type=int, default=1, help="changes at a time")
    options = parser.parse_args()
    counts = collections.Counter()
    drawn = sample(ROOT / options.path, options.seed, options.count)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        verdicts = pool.map(lambda x: judge(x, options.tests), drawn)
        for (name, line, before, after, _), (word, test) in zip(
            drawn, verdicts, strict=True
        ):
            counts[word] += 1
            print(f"{word:8} {name}:{line}  {test}", flush=True)
            if word != "caught":
                print(f"    {before}\n    -> {after}", flush=True)
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
