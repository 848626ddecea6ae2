"""What commands say of wrong flags: one line, without a traceback."""

import pytest

from jaxcl import cli, core, errors, storage
from jaxcl.config import command, files
from jaxcl.report import compare
from jaxcl.run import lock, metrics_log, signals, terminal, train


def said(capsys, *words):
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxcl: ")
    return line


@pytest.mark.parametrize(
    "words, hint",
    [
        ("train quickstart --epochs=3", "--config.epochs?"),
        ("train quickstart --epoch=3", "--config.epochs?"),
        ("train quickstart --method.temperature=3", "--config.method.temperature?"),
        ("train quickstart --banana=3", "--banana"),
        ("train --confg=quickstart", "--config?"),
        ("train quickstart --worksdir x", "--workdir?"),
        ("update --run=a --data=b --epochs=3", "--config.train.epochs?"),
        ("update --run=a --date=b", "--data?"),
        ("index upgrade --vector=a", "--vectors?"),
        ("compare a --config.epochs=3", "--config.epochs"),
        ("report", "RUN"),
        ("export --run=a", "--out"),
        ("train quickstart other", "other"),
        ("check a --data=b --rows=many", "many"),
    ],
)
def test_a_wrong_option_is_named_with_the_nearest(capsys, words, hint):
    line = said(capsys, *words.split())
    assert hint in line and f"jaxcl {words.split()[0]}" in line


@pytest.mark.parametrize(
    "word, said_too",
    [
        ("epochs=abc", "a whole number"),
        ("optimizer.lr=abc", "a number"),
        ("banana.size=3", "banana"),
        ("data.name.size=3", "data.name"),
    ],
)
def test_an_override_that_has_no_place_is_named_with_its_field(capsys, word, said_too):
    line = said(capsys, "train", "quickstart", "--config.seed=1", f"--config.{word}")
    field, value = word.split("=")
    assert f"config.{field}" in line and value in line and said_too in line


def test_an_option_that_is_none_in_the_config_is_named(capsys, tmp_path):
    config = "import ml_collections\nget_config = lambda: "
    (tmp_path / "a.py").write_text(config + "ml_collections.ConfigDict({'a': None})")
    line = said(capsys, "train", str(tmp_path / "a.py"), "--config.a=3")
    assert "config.a" in line and "None" in line and "dict_keys" not in line


def test_a_word_for_a_config_that_takes_none(capsys):
    assert "quickstart:simclr" in said(capsys, "train", "quickstart:simclr")


@pytest.mark.parametrize(
    "words",
    [
        ["quickstart", "--config.epochs=3", "--noconfig.plots", "--workdir=a_b"],
        ["--config=quickstart", "--config.epochs", "3", "--config.plots=False"]
        + ["--workdir", "a_b"],
    ],
)
def test_a_config_is_named_with_and_without_its_flag(words):
    options = cli.make_parser("train").parse_args(words)
    config = files.read_config(options.config)
    assert (config.name, config.epochs, config.plots) == ("quickstart", 3, False)
    assert options.workdir == "a_b"


def test_flags_are_written_with_dashes_or_underscores():
    words = ["--run=a_b", "--data=c", "--accept_as_reference", "--config.rows=9"]
    for word in ("--accept_as_reference", "--accept-as-reference"):
        words[2] = word
        options = cli.make_parser("update").parse_args(words)
        assert options.accept_as_reference and options.run == "a_b"
        assert options.config == ["--config.rows=9"]


@pytest.mark.parametrize("word", cli.COMMANDS)
def test_the_help_of_a_command_names_its_options(capsys, word):
    with pytest.raises(SystemExit) as stopped:
        cli.main([word, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and f"usage: jaxcl {word}" in text
    assert all(name in text for name in {*cli.make_parser(word).names} - {"--config"})


def test_a_damaged_file_met_on_the_way_is_one_line(capsys):
    def work(made, stop):
        raise storage.NotJson("results.json: it is damaged")

    assert command.run_until_signal(lambda: None, work) == 1
    assert capsys.readouterr().err == "jaxcl: results.json: it is damaged\n"


@pytest.mark.parametrize(
    "error, code, lines",
    [
        (errors.Refused("config.x", 3, "must be 4"), 2, 1),
        (FileNotFoundError("images/a.png"), 2, 1),
        # As a failing zip(strict=True) inside jaxcl: no mistake of the user.
        (ValueError("zip() argument 2 is longer"), terminal.BUG, 3),
        (TypeError("unexpected keyword"), terminal.BUG, 3),
    ],
)
def test_a_mistake_is_told_in_a_line_and_a_bug_with_its_traceback(
    capsys, error, code, lines
):
    def make():
        raise error

    assert command.run_until_signal(make, lambda *_: None) == code
    text = capsys.readouterr().err
    assert str(error) in text and len(text.splitlines()) >= lines
    assert ("Traceback" in text) == (code == terminal.BUG)
    assert (len(text.splitlines()) == 1) == (code == 2)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (train.Interrupted("saved at step 7"), signals.STOPPED),
        (lock.LockHeldError("runs/a: process 3 works in it"), 2),
        (lock.LockLostError("runs/a: it was taken"), 1),
        (metrics_log.Diverged("loss is nan at step 3"), 1),
        (OSError("the disk is full"), 1),
    ],
)
def test_what_ends_a_run_has_a_code_of_its_own(capsys, error, code):
    def work(made, stop):
        assert made == "made" and not stop()
        raise error

    assert command.run_until_signal(lambda: "made", work) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert str(error) in line and ("continues" in line) == (code == signals.STOPPED)
    assert command.run_until_signal(lambda: 1, lambda *_: None) == 0
    assert command.run_until_signal(lambda: 1, lambda *_: 3) == 3


def test_every_command_shows_a_bug(capsys, monkeypatch):
    def fail(*_):
        raise ValueError("inside")

    monkeypatch.setattr(compare, "main", fail)
    assert cli.main(["compare", "a"]) == terminal.BUG
    assert "Traceback" in capsys.readouterr().err


def test_a_report_has_all_versions(capsys):
    assert cli.main(["--version", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("jaxcl", "jaxlib", "flax", "Python"))


def test_what_is_refused_names_field_value_and_advice():
    error = errors.Refused("config.x", "a", "must be b", "type --config.x=b")
    assert isinstance(error, ValueError) and error.field == "config.x"
    words = ("config.x='a'", "must be b", "type --config.x=b")
    assert all(word in str(error) for word in words)
    assert core.Refused is errors.Refused
