"""launch/keep_fresh.py: what it runs and leaves out, and its table by hand."""

import json
import shlex

import pytest

from helpers import config_files, pictures
from jaxcl.run import cost
from jaxcl.run import results as results_lib

LAUNCH = config_files.ROOT / "launch"
# Notes the command, and leaves what a step of its kind leaves.
STAND_IN = """#!/bin/bash
for word; do case $word in --workdir=*) out=${word#*=} ;; --out=*) out=${word#*=} ;;
  --run=*) run=${word#*=} ;; esac; done
echo "$*" >> "$FAKE/log"
if [[ "$*" == *"$FAIL"* ]]; then exit 3; fi
case $2 in
  jaxcl.export) mkdir -p "$out"; echo '{}' > "$out/card.json" ;;
  jaxcl.update) cat "$run/card.json" > /dev/null || exit 4
    mkdir -p "$run/updates/0001"; cp "$FAKE/update.json" "$run/updates/0001" ;;
  *) mkdir -p "$out"; cp "$FAKE/left/"* "$out" ;;
esac
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    return config_files.load(LAUNCH / "keep_fresh.py")


def leave(folder, knn, linear):
    """A finished run of one task, of a tenth of a TFLOP and a second and a half."""
    rows = {"knn/class_incremental": [knn], "linear/class_incremental": [linear]}
    results = results_lib.add(results_lib.empty(1), 0, rows, {}, 1.0)
    machine = {"device": "cpu", "num_devices": 1, "peak_bytes": None}
    spent = cost.Spent(5, 50, int(1e11), {"train": 1.5}, machine)
    results["cost"] = cost.add(results["cost"], 0, spent)
    folder.mkdir(parents=True)
    results_lib.write_results(folder, results)
    (folder / "config.json").write_text(json.dumps({"plasticity": False}))


def update(change, overlap):
    accuracy = {"knn/class_incremental": {"before": 0.5, "change": change}}
    cost = {"flops": int(2e12), "train_seconds": 90.0}
    return {"accuracy": accuracy, "drift": {"overlap": overlap}, "cost": cost}


def test_every_command_is_one_that_can_be_run(script, capsys):
    arguments = ["--old=my old.npz", "--new=new.npz", "--seeds", "0", "4"]
    assert script.main([*arguments, "--dry-run", "--root=none", "--python=py"]) == 0
    words = [shlex.split(line)[2:] for line in capsys.readouterr().out.splitlines()]
    assert len(words) == 4 + 2 * 3 * len(script.ROWS) + 3
    assert script.main([*arguments, "--dry-run", "--root=none", "--no-retrain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(words) - 3
    for module, *flags in words:
        if module == "jaxcl.main":
            config = config_files.parse(flags)
            if "checkpoint" not in config:
                config_files.check_options(config)
    both = [flags for flags in words if flags[1].endswith(":both")]
    sets = config_files.parse(both[0][1:]).data.sets
    assert [section["path"] for section in sets] == ["my old.npz", "new.npz"]
    updates = [tuple(flags) for flags in words if flags[0] == "jaxcl.update"]
    assert len({*updates}) == 2 * len(script.ROWS)
    seeds = [flags[-1].removeprefix("--config.train.seed=") for flags in updates]
    assert seeds == ["0"] * len(script.ROWS) + ["4"] * len(script.ROWS)


def test_a_line_by_hand(script, tmp_path):
    for seed, (change, overlap) in enumerate([(-0.02, 0.5), (-0.03, 0.7)]):
        leave(tmp_path / str(seed) / "old", 0.2 + 0.2 * seed, 0.6)
        leave(tmp_path / str(seed) / "new", 0.4, 0.5)
        folder = tmp_path / str(seed) / "encoder/updates/0001"
        folder.mkdir(parents=True)
        (folder / "update.json").write_text(json.dumps(update(change, overlap)))
    line = script.line("A", [tmp_path / "0", tmp_path / "1"])
    assert line == (
        "| A | 2 | 30.0 ± 10.0 | 60.0 ± 0.0 | 40.0 ± 0.0 | 50.0 ± 0.0 | 60.0 ± 10.0 "
        "| 1 of 2 | 2.0 | 1.5 |"
    )


def test_what_is_done_is_kept_and_each_row_begins_with_the_encoder(
    script, tmp_path, monkeypatch, capsys
):
    fake, root = tmp_path / "a b", tmp_path / "runs"
    leave(fake / "left", 0.4, 0.6)
    (fake / "update.json").write_text(json.dumps(update(0.0, 0.9)))
    (fake / "python").write_text(STAND_IN)
    (fake / "python").chmod(0o755)
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("FAIL", "strategy=pnr")
    arguments = ["--old=o", "--new=n", "--seeds", "0", f"--root={root}"]
    arguments += [f"--python={fake}/python", "--rows", "continue", "pnr"]

    def ran():
        return len((fake / "log").read_text().splitlines())

    assert script.main(arguments) == 3
    assert ran() == 4 + 3 + 1
    lines = (root / "table.md").read_text().splitlines()[2:]
    titles = [line.split(" | ")[0] for line in lines]
    assert titles == ["| nothing: as it came", "| going on, all weights"]
    monkeypatch.setenv("FAIL", "nothing of all")
    assert script.main(arguments) == 0
    assert ran() == 8 + 3 + 3
    assert capsys.readouterr().out.endswith((root / "table.md").read_text())
    pictures.check_whole(root / "table.png")
    assert (root / "pnr/seed_0/encoder/card.json").read_text() == "{}\n"
