"""The command `jaxcl`: what it starts, lists and shows, also where it is installed."""

import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import jax
import pytest

import jaxcl
import jaxcl.evals
import jaxcl.methods
from helpers import config_files, processes
from helpers.config_functions import FUNCTIONS
from jaxcl import cli, schema
from jaxcl.api import doctor, options
from jaxcl.api import list as listing
from jaxcl.config import files, sections
from jaxcl.data.sources import by_name
from jaxcl.data.stream import scenarios
from jaxcl.memory import policies
from jaxcl.methods import online_ssl
from jaxcl.methods.two_view import bases, strategies

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def test_every_command_says_what_it_does_and_has_its_two_functions():
    for word, (group, _, text) in cli.COMMANDS.items():
        assert group and text
        module = cli.import_command(word)
        assert callable(module.main) and callable(module.add_options)


def test_help_names_every_word_and_a_wrong_one_the_nearest(capsys):
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"jaxcl {w} " in told for w in cli.COMMANDS)
    assert cli.main([]) == 2
    assert cli.main(["trian"]) == 2
    assert "train" in capsys.readouterr().err
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["jaxcl", jaxcl.__version__]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_help_imports_nothing_that_takes_time(words):
    code = (
        "import sys, contextlib; from jaxcl import cli\n"
        f"with contextlib.suppress(SystemExit): cli.main({words})\n"
        "print(*({'jax', 'numpy', 'absl', 'ml_collections'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "" and done.returncode == 0, done.stderr


def test_a_warning_is_one_line():
    code = (
        "from absl import logging; from jaxcl.run import terminal\n"
        "terminal.use_plain_warnings(); logging.warning('too %s', 'warm')\n"
        "terminal.use_plain_warnings(); logging.warning('too cold')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    ends = [line.rpartition(": ")[2] for line in done.stderr.splitlines()]
    assert ends == ["too warm", "too cold"], done.stderr


def test_the_doctor_trains_ten_steps_and_names_what_fails(capsys, monkeypatch):
    assert cli.main(["doctor"]) == 0
    told = capsys.readouterr().out
    versions = [x for x in told.splitlines() if x.strip().startswith("jax ")]
    assert f"jax {jax.__version__}" in versions[0] and "10 steps" in told

    def fail(folder):
        raise RuntimeError("no such chip")

    monkeypatch.setattr(doctor, "time_steps", fail)
    assert cli.main(["doctor"]) == 1
    assert "no such chip" in capsys.readouterr().err


def test_every_kind_is_listed(capsys):
    wanted = {
        "bases": set(bases.BASES),
        "strategies": set(strategies.STRATEGIES),
        "encoders": set(sections.ENCODERS),
        "data": set(by_name.SOURCES),
        "configs": set(CONFIGS),
        "policies": set(policies.POLICIES),
        "optimizers": set(sections.OPTIMIZERS),
        "schedules": set(sections.SCHEDULES),
        "scenarios": set(scenarios.SCENARIOS),
        "regularisers": set(online_ssl.REGULARISERS),
        "loggers": {"tensorboard", "wandb"},
        "methods": {"two_view", "er_ace", "duel"},
        "evaluators": {"knn", "uniformity", "linear"},
    }
    assert set(wanted) == set(listing.KINDS)
    for kind, names in wanted.items():
        assert cli.main(["list", kind]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert not [line for line in lines if line.endswith(" -")]  # undescribed
        assert names <= {line.split()[0] for line in lines if line.split()}
    assert cli.main(["list", "basis"]) == 2
    assert "bases" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "jaxcl train quickstart"),
        (["--workdir=x"], "jaxcl train quickstart"),
        (["own_images"], "own_images:FOLDER"),
        (["configs/own_images.py"], "own_images:FOLDER"),
        (["--config=own_images"], "own_images:FOLDER"),
        (["photos"], "own_images:photos"),
    ],
)
def test_training_without_a_config_says_what_to_type(
    words, told, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert cli.main(["train", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


NOT_OF_USERS = {"augment images of evaluation"}


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - NOT_OF_USERS))
def test_every_option_says_what_it_means_and_may_be(name):
    function = FUNCTIONS[name]
    told = options.meanings(function)
    hidden = {"dtype", "directory"}
    # Functions of bases and strategies say what theirs mean.
    for name, option in schema.option_of(function).items():
        if name not in hidden and option.function is inspect.unwrap(function):
            assert told.get(name), f"{name}: its docstring has no line for it"
            assert schema.allowed(option.annotation)


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "own_images"])
def test_every_config_is_shown_as_it_is(name):
    raw, given = options.read_command([f"--config={name}"])
    found = [*options.entries(raw, given)]
    assert found[0].option.path.count(".") == 1
    for option, origin, meaning in found:
        path, value = option.path, raw
        for part in path.split(".")[1:-1]:
            value = value[part]
        if option.name in value:
            assert (option.value, origin) == (value[option.name], "config"), path
        else:
            assert (option.value, origin) == (option.default, "default"), path
        assert meaning != "no such option", path
    inside = {
        x.option.path.split(".")[1] for x in found if x.option.path.count(".") > 1
    }
    asked = {key for key, value in raw.items() if isinstance(value, dict)}
    assert inside == asked - ({"evaluators"} if not raw.get("evaluators") else set())


@pytest.mark.parametrize(
    "words, told",
    [
        (["--config=quikstart"], "quickstart"),
        (["--config=quickstart_pnr", "--config.method.base.x=1"], ""),
        (["--config=quickstart", "--config.epochs=-1"], "config.epochs=-1"),
        (["--config=quickstart_pnr", "--config.method.temprature=1"], "temperature"),
        (["--config=er_ace_cifar10", "--config.replay.policy=resevoir"], "reservoir"),
    ],
)
def test_a_config_that_is_not_there_is_one_line(words, told, capsys):
    assert cli.main(["options", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxcl: ") and told in line


def test_configs_are_found_by_name_and_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = str(ROOT / "configs" / "quickstart.py")
    assert files.locate("quickstart") == here
    assert files.locate("configs/quickstart.py") == here
    assert files.locate("own_images:a:b").endswith("own_images.py:a:b")
    (tmp_path / "quickstart").write_text("")  # a file is what it says
    assert files.locate("quickstart") == "quickstart"
    with pytest.raises(ValueError, match="pnr_cifar100"):
        files.locate("pnr_cifar1000")
    with pytest.raises(ValueError, match="elsewhere/quickstart.py"):
        files.locate("elsewhere/quickstart.py")
    (tmp_path / "photos").mkdir()
    with pytest.raises(ValueError, match="own_images:photos"):
        files.locate("photos")


def test_a_package_in_the_current_folder_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "mylab").mkdir()
    source = (ROOT / "jaxcl" / "methods" / "er_ace.py").read_text()
    (tmp_path / "mylab" / "margin_ace.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
    method = "--config.method.name=mylab.margin_ace"
    assert cli.main(["options", "quickstart", method]) == 0
    assert "mylab.margin_ace" in capsys.readouterr().out


def install(checkout, site, kind="wheel"):
    """Copy what a build reads into `checkout`, build it and unpack it into `site`."""
    pytest.importorskip(
        "setuptools", minversion="77", reason="the group release has it"
    )
    checkout.mkdir(exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("jaxcl", "configs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=skip)
    build = f"from setuptools import build_meta; build_meta.build_{kind}('out')"
    env = {**os.environ, "JAXCL_REPOSITORY": "https://example.org/jaxcl"}
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, env=env)
    (wheel,) = (checkout / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)


@pytest.mark.slow
def test_an_editable_install_works_in_the_folder_that_holds_the_checkout(tmp_path):
    install(tmp_path / "jaxcl", tmp_path / "site", "editable")
    words = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
    words += "import jaxcl; print(jaxcl.__file__)"
    # In this folder `jaxcl` is a folder without __init__.py, the checkout. Without -S
    # the installed copy of whoever runs the tests would be found.
    words = [sys.executable, "-S", "-c", words]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == f"{tmp_path}/jaxcl/jaxcl/__init__.py", done.stderr


@pytest.mark.slow
def test_a_wheel_brings_the_command_and_the_configs(tmp_path):
    install(tmp_path, tmp_path / "site")
    (entry,) = (tmp_path / "site").glob("*.dist-info/entry_points.txt")
    assert "jaxcl = jaxcl.cli:main" in entry.read_text()
    about = entry.with_name("METADATA").read_text()
    assert "Project-URL: Source, https://example.org/jaxcl\n" in about
    links = re.findall(r"\]\(([^)]+)\)", about)
    assert len(links) > 20 and all(re.match("https://|#", link) for link in links)
    (tmp_path / "empty").mkdir()

    def run(*words):
        words = ["-m", "jaxcl", *words]
        return processes.run(words, tmp_path / "empty", packages=tmp_path / "site")

    listed = {line.split()[0] for line in run("list", "configs").splitlines()}
    assert listed > {"pnr_cifar100", "own_images"}
    told = run("options", "pnr_imagenet100")
    assert f"{tmp_path}/site/jaxcl/configs/imagenet100.txt" in told
    run("train", "pnr_pacs:debug", "--config.plots=False")
    assert (tmp_path / "empty" / "runs").is_dir()


def test_an_installed_copy_has_its_configs_in_the_package(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "jaxcl"
    shutil.copytree(ROOT / "configs", package / "configs")
    monkeypatch.setattr(files, "_PACKAGE", package)
    assert set(files.describe_configs()) == set(CONFIGS)
    found = files.locate("pnr_imagenet100")
    assert found == str(package / "configs" / "pnr_imagenet100.py")
    config = config_files.parse([f"--config={found}"])
    assert config.data.classes == str(package / "configs" / "imagenet100.txt")
