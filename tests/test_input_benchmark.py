"""benchmarks/input.py: what it counts, and what it says that chips ask for."""

import argparse
import io
import json
import pathlib
import re
import shlex

import pytest
from PIL import Image

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
SMALL = "--decoders pillow --images=4 --batch=2 --repeats=1 --steps-per-call=2".split()


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import input as made

    monkeypatch.setattr(made, "SIZE", 16)
    return made


def test_pictures_are_as_large_as_photos(bench):
    data = bench.picture(bench.np.random.default_rng(0))
    assert 80_000 < len(data) < 150_000
    assert Image.open(io.BytesIO(data)).size == (500, 375)


def test_links_are_of_what_a_run_reads(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "HEIGHT", 40)
    monkeypatch.setattr(bench, "WIDTH", 50)
    args = bench.parser().parse_args(SMALL)
    bench.write(tmp_path / "images", args.images)
    cropped, decoded = [], []
    crop, decode = bench.prefetch.Crop.__call__, bench.files.decode

    def counted(self, image, rng):
        cropped.append(image.shape)
        return crop(self, image, rng)

    def counted_too(*given, **options):
        decoded.append(given[1])
        return decode(*given, **options)

    monkeypatch.setattr(bench.prefetch.Crop, "__call__", counted)
    monkeypatch.setattr(bench.files, "decode", counted_too)
    links = list(bench.chain(args, tmp_path, "pillow"))
    names = [link.name.removeprefix("pillow: ") for link in links]
    ends = ["from JPEGs, all", "from the cache, all", "from the cache, 256, all"]
    assert names == ["decode", "two crops", *ends]
    assert all(link.shared and link.seconds > 0 for link in links)
    assert len(cropped) == 4 * 4 * bench.VIEWS  # by itself, and three ways to read
    assert {shape for shape in cropped} == {(40, 50, 3)}
    # By itself twice, in a run, and for a cache twice: its size is looked at first.
    assert len(decoded) == 4 * (1 + 1 + 1 + 2 * 2)


def test_the_least_of_some_runs_counts(bench, monkeypatch):
    clock = iter([0.0, 9.0, 10.0, 14.0, 20.0, 26.0])
    monkeypatch.setattr(bench.time, "process_time", lambda: next(clock))
    assert bench.least(lambda: None, 2, 3) == 2.0


def test_what_chips_ask_for(bench, monkeypatch):
    monkeypatch.setattr(bench, "FLOPS", 989e9)
    one, gpus, tpus = bench.needs()
    assert [need["hosts"] for need in (one, gpus, tpus)] == [1, 1, 2]
    assert one["images"] == pytest.approx(300)  # 0.3 of 989 TFLOP/s
    assert gpus["images"] == pytest.approx(2400)
    assert tpus["images"] == pytest.approx(300 * 4 * 197 / 989)


def test_a_line_of_the_table(bench):
    link = bench.Link("b, all", True, 1e-3)
    assert bench.line(link) == "| b, all | 1 | 1,000 | every worker |"
    link = link._replace(shared=False)
    assert bench.line(link).endswith("| the process that trains |")


@pytest.mark.slow
def test_the_whole_chain(bench, tmp_path, capsys):
    path = tmp_path / "found.json"
    found = bench.main([*SMALL, f"--json={path}"])
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    alone = [link for link in found["links"] if not link["shared"]]
    assert len(alone) == 4 and all(link["seconds"] >= 0 for link in alone)
    assert "| take it from a worker |" in capsys.readouterr().out


def test_commands_of_the_readme_parse(bench):
    text = (BENCHMARKS / "README.md").read_text() + bench.__doc__
    commands = re.findall(r"python benchmarks/input\.py([^`\n]*)", text)
    assert len(commands) > 2
    for command in commands:
        assert isinstance(
            bench.parser().parse_args(shlex.split(command)), argparse.Namespace
        )
