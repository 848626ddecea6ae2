"""launch/keep_fresh.py: what it runs and leaves out, and its table by hand."""

import json
import shlex

import pytest
from absl import flags

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
    return {
        "accuracy": accuracy,
        "drift": {"overlap": overlap},
        "index": "keep" if overlap > 0.6 else "rebuild",
        "cost": cost,
    }


def test_every_command_is_one_that_can_be_run(script, capsys):
    arguments = ["--old=my old.npz", "--new=new.npz", "--seeds", "0", "4"]
    assert script.main([*arguments, "--dry-run", "--root=none", "--python=py"]) == 0
    words = [shlex.split(line)[2:] for line in capsys.readouterr().out.splitlines()]
    assert len(words) == 4 + 2 * 3 * len(script.ROWS) + 2 * 3
    assert script.main([*arguments, "--dry-run", "--root=none", "--retrain", "4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(words) - 3
    assert script.main([*arguments, "--dry-run", "--root=none", "--retrain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(words) - 6
    for module, *options in words:
        if module == "jaxcl.main":
            config = config_files.parse(options)
            if "checkpoint" not in config:
                config_files.check_options(config)
    both = [options[1:] for options in words if options[1].endswith(":sets=2")]
    assert [config_files.parse(options).seed for options in both] == [0, 4]
    sets = config_files.parse(both[0]).data.sets
    assert [section["path"] for section in sets] == ["my old.npz", "new.npz"]
    updates = [tuple(options) for options in words if options[0] == "jaxcl.update"]
    assert len({*updates}) == 2 * len(script.ROWS)
    seeds = [options[-1].removeprefix("--config.train.seed=") for options in updates]
    assert seeds == ["0"] * len(script.ROWS) + ["4"] * len(script.ROWS)


def test_several_sets_are_taught_one_after_another(script, capsys):
    arguments = ["--old=o.npz", "--new", "a/first.npz", "second", "--seeds=3"]
    arguments += ["--rows=pnr", "--dry-run", "--root=none", "--python=py"]
    assert script.main(arguments) == 0
    words = [shlex.split(line)[2:] for line in capsys.readouterr().out.splitlines()]
    updates = [flags for flags in words if flags[0] == "jaxcl.update"]
    assert [flags[2] for flags in updates] == ["--data=a/first.npz", "--data=second"]
    assert {flags[1] for flags in updates} == {"--run=none/pnr/seed_3/encoder"}
    judged = [flags for flags in words if flags[1].endswith(":judge")]
    assert [flags[2].split("/", 1)[1] for flags in judged] == [
        f"{row}/{name}"
        for row in ("have", "pnr/seed_3", "retrain/seed_3")
        for name in ("old", "first", "second")
    ]
    assert {flags[3].split("/", 3)[3] for flags in judged[3:6]} == {
        "encoder/updates/0002"
    }
    kinds = {config_files.parse(flags[1:]).data.name for flags in judged[2::3]}
    assert kinds == {"arrays"}
    (retrain,) = [flags for flags in words if flags[1].endswith(":sets=3")]
    sets = config_files.parse(retrain[1:]).data.sets
    assert [(section["name"], section["path"]) for section in sets] == [
        ("npz", "o.npz"),
        ("npz", "a/first.npz"),
        ("arrays", "second"),
    ]
    for wrong in (["a/x.npz", "b/x"], ["x", "old.npz"]):
        assert script.main([*arguments, "--new", *wrong]) == 2
        error = capsys.readouterr().err
        assert error.startswith("jaxcl: --new ") and error.count("\n") == 1
        assert "must have names of their own" in error


def test_a_line_by_hand(script, tmp_path):
    for seed, (change, overlap) in enumerate([(-0.02, 0.5), (-0.03, 0.7)]):
        folder = tmp_path / f"pnr/seed_{seed}"
        leave(folder / "old", 0.2 + 0.2 * seed, 0.6)
        leave(folder / "a", 0.4, 0.5)
        leave(folder / "b", 0.5, 0.6)
        for number in ("0001", "0002"):
            folder_of_one = folder / "encoder/updates" / number
            folder_of_one.mkdir(parents=True)
            text = json.dumps(update(change, overlap))
            (folder_of_one / "update.json").write_text(text)
    options = script.parser().parse_args(
        ["--old=o", "--new", "a", "b", f"--root={tmp_path}", "--rows=pnr"]
    )
    head, _, line, *_ = script.table(options).splitlines()
    assert line == (
        "| PNR, all weights | 2 | 30.0 ± 10.0 | 60.0 ± 0.0 | 40.0 ± 0.0 | 50.0 ± 0.0 "
        "| 55.0 ± 0.0 | 60.0 ± 5.8 | 2 keep, 2 rebuild | 2 of 4 | 4.0 | 3.0 |"
    )
    assert head.split(" | ")[2:7] == [
        "old kNN", "old probe", "a kNN", "b kNN", "new probe"
    ]  # fmt: skip


def test_differences_are_paired_by_seed(script, tmp_path):
    # Old kNN of the first row, which lacks the last seed, and of the second.
    for row, values in {"continue": (0.2, 0.3), "lora": (0.3, 0.44, 0.9)}.items():
        for seed, value in enumerate(values):
            leave(tmp_path / row / f"seed_{seed}/old", value, 0.6)
            leave(tmp_path / row / f"seed_{seed}/new", 0.4, value)
    options = script.parser().parse_args(
        ["--old=o", "--new=n", f"--root={tmp_path}", "--rows", "continue", "lora"]
    )
    *_, head, _, line = script.differences(options, script.finished(options))
    assert head.startswith("| against going on, all weights | old kNN | old probe |")
    # 10 and 14 points: 12 +- 12.706 standard errors of 2.
    wide = "+12.0 (-13.4 to 37.4)"
    assert line == (
        f"| going on, LoRA | {wide} | +0.0 (0.0 to 0.0) | +0.0 (0.0 to 0.0) | {wide} |"
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
    arguments = ["--old=o", "--new=n", "--seeds=0", "--retrain=0", f"--root={root}"]
    arguments += [f"--python={fake}/python", "--rows", "continue", "pnr"]

    def ran():
        return len((fake / "log").read_text().splitlines())

    assert script.main(arguments) == 3
    assert ran() == 4 + 3 + 1
    lines = (root / "table.md").read_text().split("\n\n")[0].splitlines()[2:]
    titles = [line.split(" | ")[0] for line in lines]
    assert titles == ["| nothing: as it came", "| going on, all weights"]
    monkeypatch.setenv("FAIL", "nothing of all")
    assert script.main(arguments) == 0
    assert ran() == 8 + 3 + 3
    assert capsys.readouterr().out.endswith((root / "table.md").read_text())
    pictures.check_whole(root / "table.png")
    assert (root / "pnr/seed_0/encoder/card.json").read_text() == "{}\n"


@pytest.mark.parametrize("words", ["sets=2,sets=3", "judge,sets=2"])
def test_keep_fresh_takes_one_way_at_a_time(words):
    with pytest.raises(
        flags.Error, match="exclude one another; .* one of sets=N, judge; debug"
    ):
        config_files.take("keep_fresh", words)
