"""The configs build, and have the numbers of their papers, typed here."""

import itertools
import pathlib

import pytest

from helpers import config_files
from jaxcl.config import build, recipe, sections
from jaxcl.run import evaluation, result_file, train

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(ROOT.joinpath("configs").glob("*.py"))

# base: learning rate, weight decay, 1-D parameters excluded, probe's learning rate
_CIFAR = {
    "mocov2plus": (0.6, 1e-4, False, 3.0),
    "simclr": (0.6, 1e-4, True, 1.0),
    "supcon": (0.4, 1e-4, True, 1.0),
    "barlow_twins": (0.4, 1e-4, True, 0.1),
    "byol": (1.0, 1e-5, True, 3.0),
    "vicreg": (0.3, 1e-4, True, 0.3),
}
_IMAGENET = _CIFAR | {
    "simclr": (0.4, 1e-4, True, 1.0),
    "byol": (0.6, 1e-5, True, 3.0),
    "vicreg": (0.4, 1e-4, True, 0.3),
}
_OURS = {  # in no table of the papers
    "simsiam": (0.5, 1e-5, True, 3.0),
    "dino": (0.3, 1e-6, True, 3.0),
}
_CIFAR |= _OURS | {"lejepa": (0.3, 1e-4, True, 0.3)}
_IMAGENET |= _OURS | {"lejepa": (0.4, 1e-4, True, 0.3)}
# At the small budget the probe has no augmentation, and at most 1.0.
_SMALL = {name: (*row[:3], min(row[3], 1.0)) for name, row in _CIFAR.items()}
RATES = {
    "pnr_cifar10": _CIFAR,
    "pnr_cifar100": _CIFAR,
    "pnr_cifar100_small": _SMALL,
    "pnr_imagenet100": _IMAGENET,
    "pnr_imagenet1k": _IMAGENET,
    "pnr_domainnet": _IMAGENET,
}
TEN = "--config.scenario.num_tasks=10"
DATA = "--config.scenario.name=data"
# (config, overrides): PNR's lambda for Barlow Twins, BYOL and VICReg, Table 15
LAMBDA = {
    ("pnr_cifar10",): (1.0, 0.5, 23.0),
    ("pnr_cifar100",): (1.0, 0.5, 23.0),
    ("pnr_cifar100", TEN): (1.0, 0.7, 23.0),
    ("pnr_cifar100_small",): (1.0, 0.5, 23.0),
    ("pnr_imagenet100",): (1.0, 1.0, 23.0),
    ("pnr_imagenet100", TEN): (1.0, 1.0, 23.0),
    ("pnr_imagenet100", DATA): (0.1, 0.1, 5.0),
    ("pnr_imagenet100", DATA, TEN): (0.1, 0.1, 5.0),
    ("pnr_imagenet1k",): (1.0, 1.0, 23.0),
    ("pnr_imagenet1k", TEN): (1.0, 1.0, 23.0),
    ("pnr_domainnet",): (1.0, 1.0, 8.0),
}
NAMES = tuple(RATES)
BASES = tuple(_CIFAR)
PAIRS = list(itertools.product(NAMES, BASES))
BLURS = ("pnr_imagenet100", "pnr_imagenet1k", "pnr_domainnet")  # CIFAR does not


def parsed(name, *arguments):
    """The config as the command line makes it, overrides in their order."""
    path, _, argument = name.partition(":")
    where = f"{ROOT}/configs/{path}.py" + (f":{argument}" if argument else "")
    return config_files.parse([f"--config={where}", *arguments])


def take(name, base, *arguments):
    return parsed(name, f"--config.method.base={base}", *arguments)


def flat(config, field="config"):
    """Path -> value of every leaf."""
    found = {}
    for key, value in config.to_dict().items() if field == "config" else config.items():
        path = f"{field}.{key}"
        found |= flat(value, path) if isinstance(value, dict) else {path: value}
    return found


def changed(old, new):
    old, new = flat(old), flat(new)
    return {key for key in {*old, *new} if old.get(key) != new.get(key)}


def probes(config):
    """The sections of all linear probes."""
    sections = config.evaluators.to_dict().items()
    return [s for name, s in sections if s.get("name", name) == "linear"]


@pytest.mark.parametrize("name, base", PAIRS)
def test_a_base_brings_its_own_hyper_parameters(name, base):
    config = take(name, base)
    lr, decay, exclude, probe_lr = RATES[name][base]
    optimizer, augment = config.optimizer, config.augment
    assert optimizer.name == "lars"
    assert (optimizer.lr, optimizer.weight_decay) == (lr, decay)
    assert optimizer.exclude_1d is exclude
    assert {section["lr"] for section in probes(config)} == {probe_lr}
    vicreg, blurs = base == "vicreg", name in BLURS
    assert augment.scale == ((0.2, 1.0) if vicreg else (0.08, 1.0))
    assert augment.solarize == ((0.1, 0.1) if vicreg else (0.0, 0.2))
    blur = (0.5, 0.5) if vicreg else (1.0, 0.1)
    assert augment.blur == (blur if blurs else (0.0, 0.0))
    assert augment.jitter == (0.4, 0.4, 0.2, 0.1)
    nested, small = sections.nest_method(config.to_dict())["method"], "small" in name
    hidden = nested["base"].get("predictor_hidden_dim", 512)
    widths = {"simsiam": (64, 512), "byol": (256, 8192)}.get(base, (512, 512))
    assert hidden == (widths[0] if small else widths[1] if blurs else 512)


@pytest.mark.parametrize("name", LAMBDA, ids="".join)
def test_lambda_follows_base_and_scenario(name):
    for base, want in zip(
        ("barlow_twins", "byol", "vicreg"), LAMBDA[name], strict=True
    ):
        for arguments in itertools.permutations(name[1:]):
            assert (
                take(name[0], base, *arguments).method.strategy.negative_weight == want
            )


@pytest.mark.parametrize("name, base", PAIRS)
def test_every_base_builds_under_pnr(name, base):
    config_files.check_options(take(name, base))
    if name != "pnr_domainnet":
        config_files.check_options(take(name, base, DATA, TEN))


@pytest.mark.parametrize("name, base", list(zip(NAMES, BASES, strict=False)))
def test_any_strategy_builds_and_so_does_joint_training(name, base):
    for strategy in ("finetune", "cassle", "ewc", "der", "lump", "less_forget"):
        arguments = [f"--config.method.strategy={strategy}"]
        config_files.check_options(take(name, base, *arguments))
    joint = "--config.scenario.name=joint", "--config.scenario.num_tasks=1"
    config_files.check_options(take(name, base, *joint))


# base: learning rate of the online head in PNR's CIFAR scripts
HEAD_LR = {
    "mocov2plus": 0.3,
    "simclr": 0.1,
    "supcon": 0.3,
    "barlow_twins": 0.1,
    "byol": 0.1,
    "vicreg": 0.3,
}
RELEASED = "--config.regime=released"


@pytest.mark.parametrize("name", ["pnr_cifar100", "pnr_cifar100_small"])
@pytest.mark.parametrize("base", HEAD_LR)
def test_the_released_regime_is_that_of_the_released_runs(name, base):
    plain = take(name, base)
    for arguments in ((RELEASED,), ()):
        config = take(name, base, *arguments)
        told = [config.method.strategy.frozen_bn]
        told += [config.method[key] for key in ("online_head", "head_form")]
        predict, linear = config.evaluators.predict, config.evaluators.linear
        if arguments:
            assert told == ["batch", True, "released"] and linear.momentum == 0.0
            assert config.method.head_lr == HEAD_LR[base]
            assert not predict.skip and not predict.met_only
            config_files.check_options(config)
        else:
            assert told == ["running", False, "apart"] and linear.momentum == 0.9
            assert predict.skip
        assert config.scenario.class_order == "released"
    assert changed(plain, take(name, base, RELEASED)) <= {
        "config.regime",
        "config.method.strategy.frozen_bn",
        "config.method.online_head",
        "config.method.head_form",
        "config.method.head_lr",
        "config.evaluators.linear.momentum",
        "config.evaluators.predict.skip",
    }
    with pytest.raises(ValueError, match="lbrary"):
        take(name, base, "--config.regime=lbrary").to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_an_override_wins_and_leaves_the_rest_tied(name):
    given = {
        "--config.optimizer.lr": 0.123,
        "--config.optimizer.weight_decay": 0.002,
        "--config.optimizer.exclude_1d": False,
        "--config.augment.scale": (0.3, 0.9),
        "--config.augment.solarize": (0.7, 0.6),
        "--config.method.strategy.negative_weight": 4.5,
        "--config.evaluators.linear.lr": 7.0,
        "--config.evaluators.linear.lrs": (0.1, 1.0),
    }
    plain, path = take(name, "byol"), "--config.method.base=byol"
    for option, value in given.items():
        one = f"{option}={value}"
        for arguments in ((one, path), (path, one)):
            config = parsed(name, *arguments)
            assert flat(config)[option.removeprefix("--")] == value
            # The other probes of ImageNet-100 too keep what they follow.
            assert changed(plain, config) == {option.removeprefix("--")}
        config_files.check_options(config)


def test_semi_supervised_probes_are_those_of_table_6():
    config = parsed("pnr_imagenet100")
    found = {
        key: evaluation.read_entry(key, section)
        for key, section in config.evaluators.to_dict().items()
    }
    shares = {
        key: entry.options.get("fraction", 1.0)
        for key, entry in found.items()
        if entry.name == "linear"
    }
    assert shares == {"linear": 1.0, "linear_10": 0.1, "linear_1": 0.01}
    assert not found["linear"].last_only
    assert found["linear_10"].last_only and found["linear_1"].last_only
    full = found["linear"].options
    for key in ("linear_10", "linear_1"):
        assert full == {k: v for k, v in found[key].options.items() if k != "fraction"}
    for name in ("pnr_imagenet1k", "pnr_domainnet"):  # for their cost
        section = parsed(name).evaluators.linear
        assert evaluation.read_entry("linear", section.to_dict()).last_only
        assert parsed(name).plasticity is False


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("mirr", ["'mirr'"]),
        ("mir,sets=0", ["'sets=0'"]),
        ("mir,er", ["'er'", "'mir'"]),
        ("er,small,sets=2", ["'sets=2'", "'small'"]),
    ],
)
def test_words_name_the_argument_and_what_is_allowed(argument, wrong):
    with pytest.raises(ValueError) as caught:
        recipe.parse_words(argument, {"er": 1, "mir": 2}, ("", "small", "sets=N"))
    said = str(caught.value)
    allowed = ["er", "mir", "small", "sets=N", "debug"]
    assert all(word in said for word in [repr(argument), *wrong, *allowed])


TAKE_NO_WORDS = ("own_images", "quickstart", "quickstart_pnr")  # a path; nothing


def test_a_method_without_a_memory_takes_no_size_of_one():
    with pytest.raises(ValueError, match="'500'"):
        config_files.take("der_mnist", "finetune,500")


# Rows of the papers' tables


def words_of_configs():
    """(config, word) of every config that takes words."""
    words, asked = recipe.parse_words, []

    def keep(arg, *choices):
        asked.append(choices)
        return words(arg, *choices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "parse_words", keep)
        for path in (p for p in FILES if p.stem not in TAKE_NO_WORDS):
            config_files.load(path).get_config()
            for word in itertools.chain(*asked.pop()):
                if word and "=" not in word:
                    yield path.stem, word


WORDS = list(words_of_configs())


@pytest.mark.parametrize("name, word", WORDS)
def test_every_word_builds(name, word):
    config_files.check_options(config_files.take(name, word))


@pytest.mark.parametrize("name, word", list(dict(WORDS).items()))  # its last word
def test_every_config_has_a_debug_form(name, word):
    config_files.check_options(config_files.take(name, f"{word},debug"))


# (config:row, ...): dotted path -> value, typed here from the papers.
PROMISED = {
    ("pnr_cifar10:", "pnr_cifar100:"): {
        "method.base.name": "mocov2plus",
        "method.strategy.name": "pnr",
        "scenario.num_tasks": 5,
        "epochs": 500,
        "batch_size": 256,
        "encoder.depth": 18,
        "augment.size": 32,
        "schedule.start": 0.003,
        "evaluators.linear.epochs": 100,
        "evaluators.linear.batch_size": 128,
    },
    ("pnr_imagenet100:", "pnr_imagenet1k:"): {
        "scenario.num_tasks": 5,
        "epochs": 400,
        "augment.size": 224,
        "augment.resize": 256,
        "evaluators.linear.batch_size": 256,
    },
    ("pnr_imagenet1k:",): {"encoder.depth": 50},
    ("pnr_domainnet:",): {"epochs": 200, "batch_size": 256, "encoder.depth": 18},
    ("cclis_cifar10:cclis", "cclis_cifar100:released", "cclis_cifar10:random"): {
        "scenario.num_tasks": 5,
        "augment.size": 32,
        "augment.scale": (0.2, 1.0),
        "augment.views": 1,
        "batch_size": 512,
        "epochs": (500, 100),
        "method.memory_size": 200,
        "evaluators.linear.preset": "cclis",
    },
    ("cclis_cifar10:cclis", "cclis_tinyimagenet:no_prd"): {"evaluators.linear.lr": 0.5},
    ("cclis_cifar100:neither",): {"evaluators.linear.lr": 0.1},
    ("cclis_cifar10:co2l", "cclis_cifar100:co2l_no_ird"): {"augment.views": 2},
    ("cclis_tinyimagenet:cclis", "cclis_tinyimagenet:released"): {
        "scenario.num_tasks": 10,
        "augment.size": 64,
        "augment.scale": (0.1, 1.0),
        "augment.blur": (0.5,),
        "evaluators.linear.blur": 0.5,
        "epochs": (500, 50),
    },
    ("cclis_cifar10:er", "cclis_cifar100:derpp", "cclis_tinyimagenet:gcr"): {
        "replay.capacity": 200,
        "replay.size": 32,
        "replay.augment": "all",
        "batch_size": 32,
    },
    ("cclis_cifar10:icarl",): {"epochs": 50},
    ("cclis_tinyimagenet:gem",): {"epochs": 100},
    ("er_ace_cifar10:er_ace", "er_ace_cifar10:mir"): {
        "scenario.name": "class",
        "scenario.num_tasks": 5,
        "batch_size": 10,
    },
    ("er_ace_cifar100:er_aml", "er_ace_miniimagenet:gss"): {"scenario.num_tasks": 20},
    ("er_ace_cifar100:iid", "er_ace_cifar10:iidpp", "er_ace_cifar10:iid_offline"): {
        "scenario.name": "joint",
        "scenario.num_tasks": 1,
    },
    ("er_ace_cifar10:iid_offline",): {"batch_size": 128},
    # The scores that these configs state are of the released masks.
    ("er_ace_cifar10:er_ace", "er_ace_cifar100:er_ace", "er_ace_miniimagenet:er_ace"): {
        "method.form": "code",
        "optimizer.lr": 0.1,
        "replay.augment": "none",
    },
    # "+Aug", at the rate of the authors' search.
    ("er_ace_cifar10:er_aug", "er_ace_cifar10:er_ace_aug"): {
        "optimizer.lr": 0.01,
        "replay.augment": "replay",
    },
    ("cclis_cifar10:random", "cclis_cifar10_small:neither"): {
        "method.keep": "uniform",
        "method.scope": "none",
    },
    ("cclis_cifar10_small:selection_only",): {
        "method.scope": "none",
        "method.weight": 0,
    },
    ("cclis_cifar10_small:cclis", "cclis_cifar10_small:co2l_no_ird"): {
        "evaluators.linear_seen.name": "linear",
        "evaluators.linear_seen.train_on": "seen",
    },
    ("duel_cifar10:d_moco", "duel_stl10:byol", "duel_imagenetlt:simclr"): {
        "optimizer.name": "adam",
        "batch_size": 256,
        "encoder.depth": 50,
        "augment.flip": 0.75,
        "augment.crop": False,
    },
    ("duel_cifar10:d_moco", "duel_stl10:byol"): {"evaluators.linear.preset": "duel"},
    ("duel_imagenetlt:moco",): {"evaluators.linear.preset": "duel_longtail"},
    ("duel_cifar10:moco",): {"encoder.stem": "cifar"},
    ("duel_stl10:moco", "duel_imagenetlt:moco"): {"encoder.stem": "imagenet"},
    ("icl_proteins:icl", "icl_reddit:no_lrl", "icl_cifar10:replay"): {
        "batch_size": 32,  # section 4.1.4
        "patience": 50,
        "scale_lr": False,
        "optimizer.name": "adam",
        "schedule.name": "constant",
        "scenario.name": "growth",
        "scenario.growth": 0.5,
        "eval_epochs": 1,
    },
    ("icl_proteins:icl",): {"data.features": ("labels",)},
    ("icl_proteins:frozen", "icl_reddit:random"): {"scenario.evaluation": "none"},
    ("icl_cifar10:icl", "icl_imagenet2:old"): {"encoder.depth": 18},
    ("icl_cifar10:no_lrl",): {"augment.size": 32},
    ("icl_imagenet2:icl", "icl_mnist2:icl"): {
        "augment.size": 224,
        "method.output_dim": 1000,
    },
    ("icl_proteins:no_meta",): {"method.meta": False},
    ("icl_proteins:no_both",): {"method.meta": False, "method.learnt_rate": False},
    ("icl_proteins:no_lrl_sgd", "icl_proteins:retrain_sgd"): {"method.fixed_lr": 0.03},
    ("icl_mnist2:distill",): {"method.strategy": "distill"},
    ("graphcl:mutag", "graphcl:proteins", "graphcl:reddit"): {
        "epochs": 20,
        "batch_size": 128,
        "scale_lr": False,
        "optimizer.lr": 0.01,
        "method.temperature": 0.2,
        "method.with_positive": False,
        "method.projector": 96,
        "method.anchors": "original",
        "evaluators.svm.folds": 10,
        "data.features": ("labels",),
    },
}


@pytest.mark.parametrize("names", PROMISED, ids=" ".join)
def test_a_row_has_the_numbers_of_its_paper(names):
    for name in names:
        found = flat(config_files.take(*name.split(":")))
        for path, value in PROMISED[names].items():
            assert found[f"config.{path}"] == value, f"{name}: {path}"


@pytest.mark.parametrize(
    "name, steps", [("cifar10", 160_000), ("stl10", 40_000), ("imagenetlt", 160_000)]
)
def test_duel_makes_the_steps_of_its_paper(name, steps):
    for row in ("d_moco", "simclr"):
        top, _, method, _ = config_files.made(
            config_files.take(f"duel_{name}", row), 10
        )
        epoch = top.scenario.get("imbalance", {"epoch_steps": 115_846 // 256})
        assert abs(top.epochs * epoch["epoch_steps"] - steps) < 256
        assert (method.memory is None) == (row == "simclr")


@pytest.mark.parametrize(
    "name, classes, slots",
    [("cifar10", 10, 200), ("cifar100", 100, 10_000), ("miniimagenet", 100, 10_000)],
)
def test_er_ace_has_the_memories_of_its_paper(name, classes, slots):
    for row, augment in {"er": "none", "gdumb": "replay", "derpp": "all"}.items():
        config = config_files.take(f"er_ace_{name}", row)
        *_, settings = config_files.made(config, classes)
        assert (settings.capacity, settings.augment) == (slots, augment)


@pytest.mark.parametrize("row", ["icl", "no_meta", "frozen"])
def test_a_row_of_icl_goes_on_from_the_old_encoder(row, tmp_path):
    config = config_files.take("icl_proteins", "old,debug")
    old = train.run_tasks(build.build(config, tmp_path / "old"), tmp_path / "old")
    config = config_files.take("icl_proteins", f"{row},debug")
    config.start = str(tmp_path / "old")
    found = train.run_tasks(build.build(config, tmp_path / "new"), tmp_path / "new")
    assert (result_file.count_finished(old), result_file.count_finished(found)) == (
        1,
        2,
    )
    assert found["scalars"][0] == old["scalars"][0]
    assert found["convergence"]["0"] == old["convergence"]["0"]
    # 96 graphs, half of them new: passes of two batches of 32, 3 or 2 for each row.
    passes = {"icl": 6, "no_meta": 6, "frozen": 3}[row]
    assert found["convergence"]["1"]["last"]["passes"] == 2 * 32 * passes


@pytest.mark.parametrize(
    "name", ["cclis_cifar10", "cclis_cifar100", "cclis_tinyimagenet"]
)
def test_the_released_row_of_cclis_has_the_released_mistakes(name):
    method = config_files.take(name, "released").method.to_dict()
    own = config_files.take(name, "cclis").method.to_dict()
    wrong = {"leftover": True}
    if name != "cclis_cifar10":  # its tasks of two classes hide this one
        wrong["scope"] = "all_negatives"
    assert method == own | wrong


@pytest.mark.parametrize("row", ["cla_e", "cla_r", "pnr", "replay", "minred", "iid"])
def test_online_ssl_sees_as_many_images_as_cla(row):
    config = config_files.take("online_ssl_cifar100", row)
    top, _, method, replay = config_files.made(config, 100)
    per_class, views = 450, 2
    steps = top.epochs * 100 * per_class // top.batch_size
    drawn = 0 if method.memory is None else replay.size
    images = views * replay.updates * steps * (top.batch_size + drawn)
    assert images == pytest.approx(3.73e6, rel=0.02)
