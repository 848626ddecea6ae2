"""resolved.json: every option of a run with the value that it had."""

import copy
import json
import typing

import pytest

from helpers import toy
from jaxcl import lookup, schema
from jaxcl.api import options as shown
from jaxcl.config import build, files, options, run_config, sections
from jaxcl.data.sources import by_name
from jaxcl.methods.online import replay as replay_lib
from jaxcl.methods.two_view import bases
from jaxcl.run import evaluation, log_file


def raw_of(**changes):
    return toy.config(**changes).to_dict()


@pytest.mark.parametrize("name", sorted(set(files.describe_configs()) - {"own_images"}))
def test_every_option_of_every_config_has_a_value(name):
    raw, _ = shown.read_command([f"--config={name}"])
    values = options.values(raw)
    assert json.loads(json.dumps(values)) == values

    def check(function, section, *without):
        for name, option in schema.option_of(function).items():
            if name not in ("dtype", "epochs", *without):
                assert name in section or option.default is schema.MISSING, name

    check(sections.TopLevel, values, *(set(values) & {"method", "encoder"}))
    check(by_name.SOURCES[raw["data"]["name"]], values["data"])
    for key, choices in (
        ("encoder", sections.ENCODERS),
        ("optimizer", sections.OPTIMIZERS),
        ("schedule", sections.SCHEDULES),
    ):
        if key in raw:
            check(choices[raw[key]["name"]], values[key])
    if "method" in raw:
        make = lookup.find_method(raw["method"]["name"]).make
        check(make, values["method"])
        for key, rule in schema.choices(make).items():
            check(rule.find(values["method"][key], key)[0], values["method"][key])
    for key, section in raw.get("evaluators", {}).items():
        make = lookup.find_module("jaxcl.evals", section.get("name", key), "").make
        check(make, values["evaluators"][key], "directory")
        entry = evaluation.read_entry(key, section)
        shared = [values["evaluators"][key][x] for x in ("last_only", "skip")]
        assert shared == [bool(entry.last_only), entry.skip]
    names = {section.get("name", key) for key, section in raw["evaluators"].items()}
    assert "collapse" in names  # which every config logs
    for key, value in raw.items():  # what is set stays
        for option, own in value.items() if isinstance(value, dict) else ():
            if own is not None and not isinstance(own, dict | list | tuple):
                assert values[key][option] == own


def test_none_stands_for_what_the_base_and_the_strategy_have():
    method = options.values(
        raw_of(**{"method": {"name": "two_view", "base": "byol", "strategy": "ewc"}})
    )["method"]
    base, byol = method["base"], bases.make_base("byol")
    assert method["hidden_dim"] == byol.projector.hidden_dim == 4096
    assert method["output_dim"] == 256 and method["hidden_layers"] == 1
    assert base["predictor_hidden_dim"] == byol.predictor_hidden_dim == 4096
    assert (base["momentum_start"], base["momentum_end"]) == byol.momentum
    assert method["strategy"]["weight"] == 0.01 != byol.weight
    section = {"name": "two_view", "base": "vicreg", "strategy": "pnr"}
    strategy = options.values(raw_of(method=section))["method"]["strategy"]
    assert (strategy["weight"], strategy["negative_weight"]) == (25.0, 23.0)
    section = {"name": "online_ssl", "base": "mocov2plus", "regulariser": "cla_r"}
    online = options.values(raw_of(method=section))["method"]
    assert online["regulariser"]["weight"] == 1
    assert online["base"]["temperature"] == 0.2
    assert online["base"]["queue_size"] == 2048 < base.get("queue_size", 65536)


@pytest.mark.parametrize(
    "method, option, value",
    [
        ({"name": "co2l", "temperature": 0.7}, "loss_scale", 10),
        ({"name": "co2l", "loss_scale": 2.0}, "loss_scale", 2),
        ({"name": "gem"}, "margin", 0),
        ({"name": "gem", "form": "code"}, "margin", 0.5),
        ({"name": "gem"}, "memory_rows", 12),
        ({"name": "gss"}, "rows", 1),
        ({"name": "gss", "form": "code"}, "rows", 12),
        ({"name": "gcr"}, "candidates", 64),
    ],
)
def test_none_stands_for_what_another_option_says(method, option, value):
    replay = None
    if method["name"] in ("gem", "gss", "gcr"):
        replay = replay_lib.settings(10, 48, capacity=64, size=12)
    found = options.values(raw_of(method=method), replay)["method"][option]
    assert found == pytest.approx(value)


def test_sections_inside_sections_have_theirs():
    data = {
        "name": "judged_by",
        "train": {"name": "joined", "sets": [{"name": "digits", "channels": 3}]},
        "test": {"name": "digits"},
    }
    values = options.values(
        raw_of(
            data=data,
            scenario={"name": "growth"},
            seed=7,
            **{"augment.local": {"views": 2, "size": 4}, "method.base": "dino"},
        )
    )
    (first,) = values["data"]["train"]["sets"]
    assert first["channels"] == 3 and first["interpolation"] == "bicubic"
    assert values["data"]["test"]["channels"] == 1
    assert values["augment"]["local"]["size"] == 4
    assert values["augment"]["local"]["blur"] == 0.5
    assert values["scenario"]["seed"] == 7  # that of the run cuts its tasks
    assert options.values(raw_of(seed=7))["scenario"]["seed"] == 0
    recipe = options.values(raw_of(tuning="lora", encoder={"name": "vit"}))
    assert recipe["tuning"]["lora_alpha"] == recipe["tuning"]["lora_rank"] > 0
    assert (recipe["encoder"]["width"], recipe["encoder"]["heads"]) == (384, 6)


def test_a_run_leaves_what_its_data_and_devices_decide(tmp_path):
    replay = {"augment": "all", "per_class": 2}
    changes = toy.ONLINE | {"method": {"name": "er"}, "replay": replay}
    build.build(toy.config(**changes), tmp_path)
    values = json.loads((tmp_path / options.RESOLVED).read_text())
    assert values["replay"]["capacity"] == 20 and values["replay"]["size"] == 48
    assert (values["devices"], values["steps_per_call"]) == (1, 1)
    assert values["resident"] is True and values["method"]["head"] == "linear"
    asked = json.loads((tmp_path / "config.json").read_text())
    assert asked["method"] == {"name": "er"} and asked["replay"] == replay


def test_a_run_resumes_by_what_was_asked(tmp_path):
    asked = {"method": {"name": "er"}, "workers": 4}
    began = {"method": {"name": "er", "head": "cosine"}, "workers": 4}
    path = tmp_path / options.RESOLVED
    run_config.write_or_check(tmp_path, asked, began)
    assert json.loads(path.read_text()) == began
    # Another version of the library has another default.
    now = {"method": {"name": "er", "head": "linear"}, "workers": 9}
    run_config.write_or_check(tmp_path, asked, now)
    assert json.loads(path.read_text()) == began
    with pytest.raises(ValueError, match=r"config\.method\.head"):
        more = {"method": {"name": "er", "head": "linear"}}
        run_config.write_or_check(tmp_path, asked | more, now)


def test_a_run_of_another_config_is_replaced_only_before_its_first_step(tmp_path):
    folder, other = tmp_path / "run", {"batch_size": 24}
    build.build(toy.config(), folder)
    (folder / log_file.FILE).write_text('{"step": 0, "task": 0}\n')
    build.build(toy.config(**other), folder)
    assert json.loads((folder / "config.json").read_text())["batch_size"] == 24
    assert not (folder / log_file.FILE).exists()
    for path, text in (
        (folder / "results.json", "{}"),
        (folder / "checkpoints" / "1" / "x", ""),
        (folder / log_file.FILE, '{"step": 3, "task": 0}\n'),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        with pytest.raises(run_config.Differs, match="batch_size"):
            build.build(toy.config(), folder)
        path.unlink()
        if path.parent != folder:
            path.parent.rmdir()
    build.build(toy.config(), folder)


def test_every_section_of_the_top_level_has_a_rule():
    def holds_a_section(kind):
        kinds = (kind, *typing.get_args(kind))
        return any(typing.get_origin(x) is dict or x is dict for x in kinds)

    kinds = typing.get_type_hints(sections.TopLevel)
    held = [name for name, kind in kinds.items() if holds_a_section(kind)]
    assert sorted(sections.SECTIONS) == sorted(held)


OLD = {"name": "two_view", "base": "simclr", "strategy": "pnr", "temperature": 0.3}
NEW = OLD | {"base": {"name": "simclr", "temperature": 0.3}}
del NEW["temperature"]


def test_a_run_of_an_older_config_resumes_with_todays(tmp_path):
    """Its options of base and strategy stand beside their names."""
    build.build(toy.config(method=NEW), tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    assert saved["method"] == NEW | {"strategy": {"name": "pnr"}}
    path.write_text(json.dumps(saved | {"method": OLD | {"queue_size": None}}))
    for method in (NEW, OLD):
        build.build(toy.config(method=method), tmp_path)
    (tmp_path / log_file.FILE).write_text('{"step": 3, "task": 0}\n')
    with pytest.raises(ValueError, match=r"config\.method\.base\.temperature"):
        build.build(toy.config(method=OLD | {"temperature": 0.2}), tmp_path)


@pytest.mark.parametrize(
    "words, base",
    [
        ("", {"name": "mocov2plus", "queue_size": 256}),
        (".base=byol", {"name": "byol"}),
        (".base=byol .base.form=paper", {"name": "byol", "form": "paper"}),
        (".base={'name':'byol','form':'paper'}", {"name": "byol", "form": "paper"}),
        (".base=nnclr .base.temperature=1.0", {"name": "nnclr", "temperature": 1.0}),
        # As flags were before a base had a section.
        (".base=dino .temperature=0.3", {"name": "dino", "temperature": 0.3}),
    ],
)
def test_a_flag_names_a_base_or_sets_its_option(words, base):
    config = files.read_config(
        ["--config=digits", *(f"--config.method{word}" for word in words.split())]
    )
    for one in (config, copy.deepcopy(config)):
        method = sections.nest_method(one.to_dict())["method"]
        assert method["base"].pop("queue_size", 256) == 256
        assert method["base"] == {k: v for k, v in base.items() if k != "queue_size"}
        assert method["strategy"] == {"name": "pnr", "distill_hidden_dim": 128}


def test_values_that_follow_a_base_follow_its_section():
    """Also in a copy; an option that is set wins."""
    config = files.read_config(["--config=pnr_cifar10_small"])
    copied = copy.deepcopy(config)
    copied.method.base = "vicreg"
    copied.method.update(strategy="pnr", hidden_dim=7)
    assert copied.method.strategy.negative_weight == 23.0
    assert (config.method.base.name, copied.method.hidden_dim) == ("mocov2plus", 7)
    assert config.method.strategy.negative_weight == 1.0 != config.optimizer.lr
    assert copied.optimizer.lr != config.optimizer.lr
    copied.method.strategy.negative_weight = 2.0
    copied.method.base = "byol"
    assert copied.method.strategy.negative_weight == 2.0
    assert copied.method.base.predictor_hidden_dim == 256


def test_options_of_a_base_are_listed_under_the_base():
    words = ["--config.method.base=dino", "--config.method.temperature=0.3"]
    raw, given = shown.read_command(["--config=digits", *words])
    origins = {x.option.path: x.origin for x in shown.entries(raw, given)}
    base, strategy = "config.method.base", "config.method.strategy.name"
    assert origins[f"{base}.name"] == origins[f"{base}.temperature"] == "command"
    assert origins["config.method.name"] == origins[strategy] == "config"
    assert origins[f"{base}.prototypes"] == "default"
    for seed in (0, 5):  # a default is told where it is another value
        raw, given = shown.read_command(["--config=digits", f"--config.seed={seed}"])
        listed = (
            x for x in shown.entries(raw, given) if x.option.path == "config.seed"
        )
        assert ("default 0" in shown.format_options([*listed])) == (seed == 5)
