"""launch/icl_table.py: what begins with what, what is compared, and its tables."""

import pathlib
import re
import shlex
import shutil
import signal

import pytest

from helpers import config_files, pages, run_directories

LAUNCH = config_files.ROOT / "launch"
# Leaves at --workdir what stands in $FAKE for the row, or fails where the row is $FAIL.
STAND_IN = """#!/bin/bash
for word; do case $word in
  --workdir=*) work=${word#*=} ;;
  --config=*) row=${word#*:} ;;
  --config.start=*) ls "${word#*=}/seed_1" > /dev/null || exit 4 ;;
esac; done
echo "$row" >> "$FAKE/log"
if [[ $row == "$FAIL" ]]; then exit 3; fi
mkdir -p "$work"
cp -r "$FAKE/left/$row/"* "$work"
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    monkeypatch.setattr(signal, "signal", lambda *given: None)  # pytest has its own
    return config_files.load(LAUNCH / "icl_table.py")


def printed(script, capsys, *arguments):
    given = ["--data=my data", "--dry-run", "--root=none", "--python=py", *arguments]
    assert script.main(given) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def value(words, option):
    (found,) = [x.partition("=")[2] for x in words if x.startswith(f"--{option}=")]
    return found


def test_every_row_begins_with_the_old_encoders_of_its_growth(script, capsys):
    lines = printed(script, capsys, "--growths", "0.3", "0.5", "--seeds=3")
    each = 1 + len(script.ROWS)
    assert len(lines) == len({value(x, "workdir") for x in lines}) == 2 * each
    for first in range(0, len(lines), each):
        old, *rows = lines[first : first + each]
        assert value(old, "config").endswith(":old")
        options = set()
        for words in rows:
            assert value(words, "config.start") == value(old, "workdir")
            for option in ("config.seeds", "config.scenario.growth"):
                assert value(words, option) == value(old, option)
            config = config_files.parse([x for x in words[3:] if ".start=" not in x])
            config_files.check_options(config)
            assert (config.patience, config.log_every) == (50, 1)
            assert (config.seed, config.seeds) == (0, 3)
            options.add(str(config.method.to_dict()))
        assert len(options) == len(rows)


def test_options_are_those_of_all_runs_and_name_their_directories(script, capsys):
    (old, *rows) = printed(
        script,
        capsys,
        "--config=configs/icl_mnist2.py:small",
        *("--growths", "0.7", "--patience=9", "--epochs=20"),
        *("--rows", "retrain", "frozen"),
        *("--set", "config.evaluators.svm.inner_folds=3"),
    )
    assert value(old, "config").endswith("icl_mnist2.py:old,small")
    assert [value(x, "config").rpartition(":")[2] for x in rows] == [
        "retrain,small",
        "frozen,small",
    ]
    for words in (old, *rows):
        config = config_files.parse([x for x in words[3:] if ".start=" not in x])
        assert (config.patience, config.epochs) == (9, 20)
        assert config.evaluators.svm.inner_folds == 3
        name = pathlib.Path(value(words, "workdir")).name
        assert "patience=9" in name and "inner_folds=3" in name


def test_the_documentation_names_the_rows_and_defaults(script):
    text = (config_files.ROOT / "docs/launching.md").read_text()
    section = text.partition("## The table of ICL")[2].partition("\n## ")[0]
    table = {
        cells[0]: cells[1:]
        for cells in map(pages.cells, section.splitlines())
        if len(cells) == 3
    }
    rows = re.findall(r"`([a-z_0-9.-]+)`", table["`--rows`"][1])
    assert sorted({*rows} - {"no_lrl_sgd"}) == sorted(script.ROWS)
    options = script.parser().parse_args(["--data=x"])
    assert table["`--config`"][0] == f"`{options.config}`"
    assert table["`--growths`"][0] == f"`{' '.join(map(str, options.growths))}`"
    assert table["`--seeds`"][0] == f"`{options.seeds}`"
    both = f"`{options.patience}`, `{options.epochs}`"
    assert table["`--patience`, `--epochs`"][0] == both


def leave(folder, values, **options):
    options = {"best": len(values), "passes": 10.0, **options}
    run_directories.leave_epochs(folder, values, **options)


def planned(script, root, *arguments):
    given = ["--data=x", "--growths", "0.5", f"--root={root}", *arguments]
    options = script.parser().parse_args([*given, "--rows", "frozen", "retrain", "icl"])
    return options, script.planned(options)


def test_a_row_is_done_when_all_its_seeds_are(script, tmp_path):
    options, runs = planned(script, tmp_path, "--seeds=2")
    run = runs[0.5, "icl"]
    for seed in (0, 1):
        assert not script.done(run, options)
        leave(run.folder / f"seed_{seed}", [3.0], seed=seed)
    assert script.done(run, options)
    more, runs = planned(script, tmp_path, "--seeds=3")
    assert not script.done(runs[0.5, "icl"], more)


def test_seeds_that_lack_what_others_are_compared_with_wait(script, tmp_path):
    options, runs = planned(script, tmp_path, "--seeds=3")
    assert script.table(options, runs) == "Nothing to compare is finished."
    for seed in (0, 1, 2):
        folder = {name: run.folder / f"seed_{seed}" for (_, name), run in runs.items()}
        leave(folder["icl"], [3.0, 2.5], seed=seed)
        if seed != 2:
            leave(folder["frozen"], [3.0] * 3, seed=seed)
        if seed != 1:
            leave(folder["retrain"], [2.9, 2.0], seed=seed)
    (row,) = [x for x in script.finished(options, runs) if x.name == "icl"]
    assert row.seed == 0
    text = script.table(options, runs)
    assert text.startswith("## Growth 0.5\n\n")
    lines = [pages.cells(x) for x in text.splitlines() if x.startswith("|")]
    # Retraining gains 1.0: the target is 2.1, where icl never is.
    cells = {x[0]: dict(zip(lines[0], x, strict=True)) for x in lines}["icl"]
    assert (cells["seeds"], cells["reached"], cells["at best"]) == ("1", "0", "2.5 [-]")


def test_finished_runs_are_kept_and_the_tables_grow(
    script, tmp_path, monkeypatch, capsys
):
    fake, root = tmp_path / "a b", tmp_path / "runs"
    for row, last in {"frozen": 3.0, "retrain": 2.0, "icl": 2.5, "old": 3.0}.items():
        for seed in (0, 1):
            leave(fake / f"left/{row}/seed_{seed}", [3.0, last + seed], seed=seed)
    (fake / "python").write_text(STAND_IN)
    (fake / "python").chmod(0o755)
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("FAIL", "retrain")
    arguments = ["--data=x", "--growths", "0.5", "--seeds=2", f"--root={root}"]
    arguments += [f"--python={fake}/python", "--rows", "frozen", "retrain", "icl"]

    def ran():
        return (fake / "log").read_text().split()

    assert script.main(arguments) == 1
    assert ran() == ["old", "frozen", "retrain", "icl"]
    page = root / "table.md"
    assert page.read_text() == "Nothing to compare is finished.\n"
    monkeypatch.setenv("FAIL", "nothing")
    assert script.main(arguments) == 0
    assert ran() == ["old", "frozen", "retrain", "icl", "retrain"]
    assert "| icl | 2 | " in page.read_text()
    assert capsys.readouterr().out.endswith(page.read_text())
    shutil.rmtree(next(root.glob("icl_proteins+icl,*/seed_1")))
    assert script.main([*arguments, "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--rows", "frozen", "icl"], "--rows: must have retrain"),
        (["--set", "epochs=3"], "--set epochs=3: must be config.PATH=VALUE"),
        (["--set", "config.epochs"], "--set config.epochs: must be"),
        (["--seeds=1"], "--seeds=1: must be 2 or more"),
        (["--root=gs://b"], "--root=gs://b"),
    ],
)
def test_what_cannot_be_is_refused(script, capsys, wrong, said):
    assert script.main(["--data=x", *wrong]) == 2
    assert said in capsys.readouterr().err
