"""launch/online_table.py: what it runs, what it leaves out, its table by hand."""

import json
import pathlib
import shlex
import signal

import pytest

from helpers import config_files, pages, run_directories

LAUNCH = config_files.ROOT / "launch"
DOCS = config_files.ROOT / "docs"
# Leaves at --workdir what stands in $FAKE, or fails where the method is in $FAIL.
STAND_IN = """#!/bin/bash
for word; do case $word in
  --workdir=*) work=${word#*=} ;;
  --config=*) method=${word#*:} ;;
esac; done
echo "$method" >> "$FAKE/log"
if [[ $method == "$FAIL" ]]; then exit 3; fi
mkdir -p "$work"
cp "$FAKE/left/"* "$work"
"""


@pytest.fixture
def online(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    monkeypatch.setattr(signal, "signal", lambda *given: None)  # pytest has its own
    return config_files.load(LAUNCH / "online_table.py")


def leave(folder, last, aware, *, milliseconds=10.0, flops=int(1e11)):
    """A finished run of two tasks and 10 steps of a tenth of a TFLOP."""
    accuracies = [[0.8, None], last]
    run_directories.leave(
        folder, accuracies, seed=0, milliseconds=milliseconds, flops=flops
    )
    path = folder / "results.json"
    results = json.loads(path.read_text())
    results["matrices"]["predict/task_aware"] = [[0.8, None], aware]
    path.write_text(json.dumps(results))
    (folder / "config.json").write_text(json.dumps({"plasticity": False}))


def test_each_row_is_run_with_each_memory_one_seed_after_another(online, capsys):
    arguments = ["--data=my data", "--per-class", "20", "100", "--seeds", "0", "4"]
    assert online.main([*arguments, "--dry-run", "--root=none", "--python=py"]) == 0
    words = [shlex.split(x) for x in capsys.readouterr().out.splitlines()]
    assert (
        len(words) == len({tuple(line) for line in words}) == 2 * 2 * len(online.ROWS)
    )
    seeds = [line[-2].removeprefix("--config.seed=") for line in words]
    assert seeds == sorted(seeds) and {*seeds} == {"0", "4"}
    for line in words:
        config = config_files.parse(line[3:])
        config_files.check_options(config)
        assert config.data.path == "my data" and "my data" not in line[-1]
    made = [config_files.parse(line[3:]) for line in words[: len(online.ROWS)]]
    assert {config.replay.per_class for config in made} == {20}
    options = {(config.optimizer.lr, *config.method.values()) for config in made}
    assert len(options) == len(made)


def test_numbers_of_the_paper_are_those_of_the_page(online):
    page = (DOCS / "reproducing_others.md").read_text()
    table = page.partition("### Table 2: Split CIFAR-10")[2].partition("###")[0]
    lines = [pages.cells(line) for line in table.splitlines() if line.startswith("|")]
    found = {line[1].strip("`"): line[2:] for line in lines}
    named = {name: row.paper for name, row in online.ROWS.items() if row.paper}
    assert set(named) == {"er", "mir", "er_ace", "er_aml"}
    for name, paper in named.items():
        accuracy, forgetting = found[name][:4], ["", *found[name][4:]]
        want = {
            size: tuple(
                float(cell.partition(" ")[0]) if cell else "-" for cell in cells
            )
            for size, *cells in zip((5, 20, 50, 100), accuracy, forgetting, strict=True)
            if cells[0]
        }
        assert paper == want


def test_a_line_by_hand(online, tmp_path):
    leave(tmp_path / "0", [0.4, 0.6], [0.7, 0.9])
    leave(tmp_path / "1", [0.2, 0.6], [0.8, 0.9], milliseconds=8.0)
    results = {
        seed: online.results_lib.read_results(tmp_path / str(seed)) for seed in (0, 1)
    }
    # Averages 50 and 40, forgetting 40 and 60, anytime 65 and 60, aware 80 and 85.
    line = online.line(online.ROWS["er"], 100, results)
    assert line == (
        "| ER | 100 | 2 | 45.0 ± 5.0 | 41.5 | 50.0 ± 10.0 | 28.6 | 62.5 ± 2.5 "
        "| 82.5 ± 2.5 | 1.0 | 8 |"
    )
    one = online.line(online.ROWS["er_task_free"], 5, {0: results[0]})
    assert one == (
        "| ER task-free | 5 | 1 | 50.0 | - | 40.0 | - | 65.0 | 80.0 | 1.0 | 10 |"
    )
    assert online.HEAD[0] in (DOCS / "results.md").read_text()


def test_finished_runs_are_kept_and_the_table_grows(
    online, tmp_path, monkeypatch, capsys
):
    fake = tmp_path / "a b"
    leave(fake / "left", [0.4, 0.6], [0.7, 0.9])
    (fake / "python").write_text(STAND_IN)
    (fake / "python").chmod(0o755)
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("FAIL", "mir")
    root = tmp_path / "runs"
    arguments = ["--data=x", "--seeds", "0", f"--root={root}"]
    arguments += [f"--python={fake}/python", "--rows", "er", "mir", "er_ace"]

    def ran():
        return (fake / "log").read_text().split()

    assert online.main(arguments) == 1
    assert ran() == ["er", "mir", "er_ace"]  # one that fails does not end the others
    page = pathlib.Path(root / "table.md")
    assert [line.split(" | ")[0] for line in page.read_text().splitlines()[2:]] == [
        "| ER",
        "| ER-ACE",
    ]
    monkeypatch.setenv("FAIL", "nothing")
    assert online.main(arguments) == 0
    assert ran() == ["er", "mir", "er_ace", "mir"]
    lines = page.read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| ER", "| MIR", "| ER-ACE"]
    assert capsys.readouterr().out.endswith(page.read_text())


def test_a_bucket_is_refused(online, capsys):
    assert online.main(["--data=x", "--root=gs://b"]) == 2
    assert "--root=gs://b" in capsys.readouterr().err
