"""What commands say of wrong flags: one line, without a traceback."""

import pytest
from absl import flags
from ml_collections import config_flags

from jaxcl import cli, core, errors
from jaxcl.config import command
from jaxcl.data import storage
from jaxcl.report import compare
from jaxcl.run import lock, metrics_log, signals, train
from jaxcl.update import command as update


def said(capsys, monkeypatch, arguments, define, **options):
    values = flags.FlagValues()
    define(values, arguments)
    monkeypatch.setattr(command.flags, "FLAGS", values)
    with pytest.raises(SystemExit) as stopped:
        command.parse_flags(["command", *arguments], **options)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def of_a_run(values, arguments):
    config_flags.DEFINE_config_file(
        "config",
        flag_values=values,
        sys_argv=arguments,
        lock_config=False,
        accept_new_attributes=True,
    )


@pytest.mark.parametrize(
    "flag, hint",
    [
        ("--epochs=3", "--config.epochs"),
        ("--epoch=3", "--config.epochs"),
        ("--method.temperature=3", "--config.method.temperature"),
        ("--banana=3", "'banana'"),
        ("--confg=3", "--config?"),
    ],
)
def test_an_option_without_its_config_is_suggested(capsys, monkeypatch, flag, hint):
    arguments = ["--config=configs/quickstart.py", flag]
    line = said(capsys, monkeypatch, arguments, of_a_run)
    assert line.startswith("jaxcl: ") and hint in line


@pytest.mark.parametrize(
    "field, kind", [("epochs", "a whole number"), ("optimizer.lr", "a number")]
)
def test_a_number_that_is_none_is_named_with_its_field(
    capsys, monkeypatch, field, kind
):
    arguments = ["--config=configs/quickstart.py", f"--config.{field}=abc"]
    line = said(capsys, monkeypatch, arguments, of_a_run)
    assert f"config.{field}" in line and "abc" in line and kind in line


def test_an_update_has_the_options_of_a_run_below_train(capsys, monkeypatch):
    arguments = ["--run=a", "--data=b", "--epochs=3"]
    options = {"section": "config.train"}
    line = said(capsys, monkeypatch, arguments, update.define_flags, **options)
    assert "--config.train.epochs" in line


def test_a_word_for_a_config_that_takes_none(capsys, monkeypatch):
    arguments = ["--config=configs/quickstart.py:simclr"]
    line = said(capsys, monkeypatch, arguments, of_a_run)
    assert "--config=configs/quickstart.py:simclr" in line


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
        (ValueError("zip() argument 2 is longer"), command.BUG, 3),
        (TypeError("unexpected keyword"), command.BUG, 3),
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
    assert ("Traceback" in text) == (code == command.BUG)
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


def test_a_section_or_a_file_that_is_not_there_is_named(capsys, monkeypatch):
    arguments = ["--config=configs/quickstart.py", "--config.banana.size=3"]
    line = said(capsys, monkeypatch, arguments, of_a_run)
    assert "banana" in line
    values = flags.FlagValues()
    monkeypatch.setattr(command.flags, "FLAGS", values)

    def missing():
        raise FileNotFoundError("configs/gone.py")

    with pytest.raises(SystemExit) as stopped:
        command.parse_flags(["command"], define=missing)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "jaxcl: configs/gone.py\n"


def test_every_command_shows_a_bug(capsys, monkeypatch):
    def fail(*_):
        raise ValueError("inside")

    monkeypatch.setattr(compare, "main", fail)
    assert cli.main(["compare", "a"]) == command.BUG
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
