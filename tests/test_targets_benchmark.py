"""benchmarks/targets.py: which rows it compiles, and when; its page."""

import json
import pathlib
import re

import pytest
from absl import flags

from jaxcl.config import sections
from jaxcl.scaling import command as scaling_command
from jaxcl.scaling import compiled

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    import targets

    return targets


def summary(**changes):
    memory = {"held": 3e9, "temporaries": 2e9}
    return {
        "fits": True,
        "program": "p",
        "compiler": "libtpu 7",
        "batch_size": 256,
        "seconds": 61.0,
        "memory": memory,
        "kernels": 1234.5,
        "products": {"convolution": {"float32": 7.0, "bfloat16": 5.0}, "product": {}},
        "grouped": 2.0,
        "flops": 4e9,
        "bytes": 5e8,
        "messages": 6.0,
        "alone": 7e6,
        "least": {
            "arithmetic": 1e-3,
            "memory": 2e-3,
            "launches": 0.0,
            "messages": 1e-3,
        },
        "cycles": None,
        "copies": [{"shape": "u8[5]", "bytes": 2e6}] * 2,
        "unknown_loops": 3,
        "host_transfers": [],
        "date": "2026-11-23",
        "jax": "0.10.2",
        "key": "k",
    } | changes


def cells(page, name):
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", page, re.M)
    return [cell.strip() for cell in row.split("|")]


def test_the_page_shows_what_was_found(bench):
    found = {
        "er": {"h200:1": summary(options={"xla_a": False})},
        "er_ace": {"h200:1": summary(unknown_loops=0, kernels=7, fits=False)},
        "icl": {"h200:1": {"fits": False, "error": "Ran out", "program": "p"}},
        "gem": {"h200:8": {"failed": "config.batch_size=10: must be"}},
    }
    page = bench.page(found)
    assert bench.page(json.loads(json.dumps(found, sort_keys=True))) == page
    want = ["yes", "3,000", "2,000", "1,234", "7 / 5", "2", "4", "500", "6", "7", "4"]
    want += ["25 / 50 / 0 / 25", "-", "61"]
    assert cells(page, "er") == want
    one, eight, tpu, missing = re.split(r"^## .*$", page, flags=re.M)[1:]
    assert "Compiled by libtpu 7 under jax 0.10.2, 2026-11-23." in one
    assert (
        "1 of 2 fit; kernels from 7 (er_ace) to 1,234 (er); least time from 4 ms" in one
    )
    assert "- 3 loops of unknown length, once each: er\n" in one
    assert "- compiled with xla_a=False, for the compiler fails without: er\n" in one
    assert "- copies 2 times u8[5], 2 MB a step: er_ace, er\n" in one
    assert "- icl: Ran out" in one and "- gem: config.batch_size=10: must be" in eight
    assert tpu.strip() == "Not asked for yet: er_ace, icl, er, gem."
    assert "Not asked for yet: gem." in one and "\n\n\n" not in page
    rows = len(bench.ROWS)
    assert f"{rows - 4} of {rows} rows, for no target so far: mocov2plus-pnr" in missing


def test_only_what_changed_is_asked_for_again(bench, tmp_path, monkeypatch):
    asked, sources = [], ["a"]

    def ask(row, target, *, kept, timeout, known):
        asked.append((row, target))
        return {"failed": "no"} if row == "gem" else summary()

    monkeypatch.setattr(bench, "ask", ask)
    monkeypatch.setattr(bench, "code", lambda: sources[-1])
    paths = [f"--json={tmp_path / 'found.json'}", f"--page={tmp_path / 'page.md'}"]
    words = ["--rows", "er", "gem", "--targets", "h200:1", "v5e:2x4", *paths]
    found = bench.main(words)
    assert (
        len(asked) == 4 and json.loads((tmp_path / "found.json").read_text()) == found
    )
    assert (tmp_path / "page.md").read_text() == bench.page(found)
    assert bench.main(words) == found and len(asked) == 4
    monkeypatch.setitem(bench.ROWS, "er", (*bench.ROWS["er"], "--rows=7"))
    bench.main(words)
    assert asked[4:] == [("er", "h200:1"), ("er", "v5e:2x4")]
    sources.append("b")
    bench.main(words)
    assert len(asked) == 10


def test_a_program_that_is_the_same_is_not_compiled(bench, tmp_path, monkeypatch):
    """While what reads programs is the same, too."""
    asked, hashes = [], {"code": "a", "reader": "r"}

    def ask(row, target, *, kept, timeout, known):
        asked.append(known)
        return {"same": True} if known == "p" else summary(kernels=len(asked))

    monkeypatch.setattr(bench, "ask", ask)
    for name in hashes:
        monkeypatch.setattr(bench, name, lambda name=name: hashes[name])
    paths = [f"--json={tmp_path / 'found.json'}", f"--page={tmp_path / 'page.md'}"]
    words = ["--rows", "er", "--targets", "h200:1", *paths]
    first = bench.main(words)["er"]["h200:1"]
    hashes["code"] = "b"
    second = bench.main(words)["er"]["h200:1"]
    assert asked == [None, "p"] and second["key"] != first["key"]
    assert {**second, "key": first["key"]} == first
    hashes |= {"code": "c", "reader": "s"}
    third = bench.main(words)["er"]["h200:1"]
    assert asked == [None, "p", None] and third["kernels"] == 3


def test_the_code_is_that_of_the_package_and_the_configs(bench, tmp_path, monkeypatch):
    for name in ("jaxcl/a.py", "jaxcl/a.json", "configs/b.py", "docs/c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    seen = {bench.code()}
    (tmp_path / "docs/c.md").write_text("2")
    (tmp_path / "jaxcl/a.py").write_text('"""What it is."""\n1  # why')
    assert {bench.code()} == seen
    for name in ("jaxcl/a.py", "jaxcl/a.json", "configs/b.py"):
        (tmp_path / name).write_text("2")
        seen.add(bench.code())
    assert len(seen) == 4


def test_what_the_page_keeps_of_a_program(bench):
    part = {"bytes": 100, "waits": True, "name": ""}
    sent = [{"times": 2.0, "beside": 0, "parts": [part, part]}]
    sent.append({"times": 1.0, "beside": 3, "parts": [part]})
    copies = [{"bytes": 2e6, "shape": "f32[5]"}, {"bytes": 9e5, "shape": "f32[4]"}]
    given = dict.fromkeys(
        ("fits", "program", "compiler", "batch_size", "seconds", "memory", "products")
        + ("grouped", "flops", "bytes", "least", "cycles", "unknown_loops")
        + ("host_transfers", "options")
    )
    given |= {"collectives": sent, "copies": copies, "kernels": {"copy": 2, "other": 3}}
    found = bench.summary(given)
    assert (found["messages"], found["alone"], found["kernels"]) == (3, 400, 5)
    assert found["copies"] == copies[:1]


def test_commands_of_the_rows_are_right(bench):
    """Each parses, and names a config and options that there are."""
    seen = set()
    for row in bench.ROWS:
        argv = ["scaling", *bench.command(row, "h200:8")]
        values = flags.FlagValues()
        scaling_command.define_flags(values, argv)
        assert values(argv) == ["scaling"]
        (target,) = scaling_command.wanted(values)
        assert target.chips == 8
        seen.add(tuple(argv))
        assert values.config.batch_size % 8 == 0, row
        candidates = values.config.method.get("candidates", values.config.batch_size)
        assert candidates >= values.config.batch_size, row
        top = sections.top_of(values.config.to_dict())
        size = {x: getattr(values, x) for x in ("classes", "rows", "pixels")}
        made = compiled.blank(top.data, top.scenario, top.augment, **size)
        sections.parts(top)
        sections.chosen(top.method)
        sections.tasks(top.data, top.scenario, top.seed, made)
    assert len(seen) == len(bench.ROWS)
    assert set(bench.FIRST) < set(bench.ROWS) and len(bench.order()) == len(bench.ROWS)


def test_the_page_is_that_of_its_numbers(bench):
    found = json.loads((ROOT / "docs" / "targets.json").read_text())
    assert (ROOT / "docs" / "targets.md").read_text() == bench.page(found)
    assert set(found) <= set(bench.ROWS)
    for row in found.values():
        assert set(row) <= set(bench.TARGETS)


@pytest.mark.parametrize("page", ["benchmarks/README.md", "docs/targets.md"])
def test_commands_of_the_pages_parse(bench, page):
    lines = re.findall(
        r"^python benchmarks/targets\.py(.*)$", (ROOT / page).read_text(), re.M
    )
    assert lines
    for line in lines:
        args = bench.parser().parse_args(line.split())
        assert set(args.rows) <= set(bench.ROWS) and args.targets
