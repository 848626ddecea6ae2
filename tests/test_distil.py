"""A student of the encoder in a folder: what it sees, keeps, refuses and exports."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcl
from helpers import interpreted, loss_twins, run_directories, teachers, toy
from jaxcl import estimate
from jaxcl.config import files, resolve, sections, teacher
from jaxcl.methods.two_view import bases, records, step, strategies
from jaxcl.run import encoder_folder, job, train
from jaxcl.weights import encoder, export

MLP = {"name": "mlp", "widths": (8,), "batch_norm": True}
CHEAP = {"encoder": MLP, "augment.crop": False, "augment.flip": 0.5}
CHEAP |= {"augment.jitter_probability": 0.0, "scenario": {"name": "joint"}}
CHEAP |= {"method.base": "simclr", "method.strategy": "distil", "epochs": 1}


def changes(folder, **more):
    return CHEAP | {"teacher": str(folder)} | more


def views_of(z, f, p=None):
    return records.Features(z=z, label=None, f=f, p=p)


WEIGHTS = {"cosine": 0.7, "smooth_l1": 0.3, "distance": 2.0, "angle": 1.5}
TWINS = {
    "cosine": loss_twins.teacher_cosine,
    "smooth_l1": loss_twins.teacher_smooth_l1,
    "distance": loss_twins.rkd_distance,
    "angle": loss_twins.rkd_angle,
}


@pytest.mark.parametrize("spoilt", [False, True], ids=["finite", "nan"])
def test_the_loss_is_the_sum_of_its_terms(spoilt):
    """Rows whose feature is not finite are left out, in their view alone."""
    rng = np.random.default_rng(0)
    z, p, f = (rng.normal(size=(5, 2, 4)) for _ in range(3))
    rows = np.ones((5, 2), bool)
    if spoilt:
        f[1, 0, 2], f[3, 1, 0] = np.nan, np.inf
        rows[1, 0] = rows[3, 1] = False
    want = sum(
        weight * TWINS[name](p[rows[:, v], v], f[rows[:, v], v]) / 2
        for name, weight in WEIGHTS.items()
        for v in range(2)
    )
    base = bases.make_base("simclr")
    section = {"name": "distil", **WEIGHTS}
    beside = strategies.make_strategy(section | {"base_weight": 0.25})
    x = jax.tree.map(np.float32, views_of(z, f, p))
    both = want + 0.25 * loss_twins.nt_xent(z[:, 0], z[:, 1])
    np.testing.assert_allclose(loss_of(base, beside, x)[0], both, rtol=1e-5)
    alone = strategies.make_strategy(section)  # its head is the projector
    x = x._replace(z=x.p, p=None)
    value, grads = loss_of(base, alone, x)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert np.isfinite(grads).all() and not grads[~rows].any() and grads[rows].any()
    nowhere = x._replace(f=np.full_like(x.f, np.nan))
    assert np.isnan(loss_of(base, alone, nowhere)[0])  # which ends the run


def loss_of(base, strategy, x):
    """The loss of features, and its gradient by z."""
    loss = lambda z: step.compute_loss(base, strategy, x._replace(z=z))  # noqa: E731
    return interpreted.value_and_grad(loss)(x.z)


def read(folder, **more):
    top = sections.read_top(resolve.resolve(toy.config(**more).to_dict() | folder))
    return teacher.read_teacher(top, sections.read_parts(top)[1])


@pytest.mark.parametrize("size", [4, 8])
def test_the_teacher_sees_the_views_as_its_card_says(size, tmp_path):
    """Its own size, mean and deviation; its weights stay on the host until a run."""
    teachers.leave(tmp_path, size=size, mean=[0.1], std=[0.7], interpolation="bilinear")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1)).astype(np.uint8)
    views = (pixels / 255 - 0.3) / 0.4  # the toy's moments
    made = read({"teacher": str(tmp_path)})
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(made.weights))
    rows = made.embed(made.weights, jnp.float32(views))
    want = encoder.load_encoder(tmp_path).embed(pixels)
    np.testing.assert_allclose(rows, want, atol=1e-5)
    np.testing.assert_array_less(0.1, want.std(axis=0).max())


@pytest.mark.parametrize(
    "card, more, named",
    [
        ({"drop": ["size"]}, {}, "input.size=None"),
        ({"drop": ["mean"]}, {}, "input.mean=None"),
        ({"drop": ["std"]}, {}, "input.std=None"),
        ({"channels": 3}, {}, "3 channels.*have 1"),
        ({"num_features": 9}, {}, "num_features=9.*has 5"),
        (
            {"leaves": {"params/linear1/bias": np.full(5, np.nan, "f4")}},
            {},
            "linear1/bias has numbers that are not finite",
        ),
        ({}, {"method.strategy": "finetune"}, "config.teacher=.*distil"),
        ({}, {"teacher": None}, "config.teacher=None.*--config.teacher="),
        ({}, {"teacher": "nowhere"}, "config.teacher='nowhere'"),
        ({}, {"method.cosine": 0.0}, "cosine=0, smooth_l1=0.*above 0"),
    ],
)
def test_a_wrong_teacher_is_refused_before_anything_trains(card, more, named, tmp_path):
    teachers.leave(tmp_path / "teacher", **card)
    with pytest.raises(ValueError, match=named):
        run_directories.untried(
            tmp_path / "run", **changes(tmp_path / "teacher") | more
        )
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_run_keeps_its_teachers_digest_and_no_weight(tmp_path):
    """A changed folder is refused at resume, naming both; an export names it."""
    folder, run = tmp_path / "teacher", tmp_path / "run"
    teachers.leave(folder)
    first = encoder_folder.read_card(folder)
    work = toy.job(run, **changes(folder), **{"save_every": 4, "log_every": 1})
    with pytest.raises(train.Interrupted):
        calls = iter(range(9))
        train.run_tasks(work, run, stop=lambda: next(calls) == 6)
    state = toy.saved(work, run).state
    shapes = {x.shape for x in jax.tree.leaves(state)}
    assert (36, 5) not in shapes and (8, 5) in shapes  # the student's head alone
    rows = toy.untimed_rows(run)
    assert all(row["untaught"] == 0 for row in rows if "loss" in row)
    card = export.export(str(run), str(tmp_path / "student"))
    assert card["teacher"]["checksum"] == first["checksum"]
    assert card["teacher"]["encoder"] == first["encoder"]
    assert str(tmp_path) not in json.dumps(card)
    teachers.leave(folder, seed=4)
    second = encoder_folder.read_card(folder)["checksum"]
    with pytest.raises(ValueError, match=f"{first['checksum']}.*{second}"):
        toy.job(run, **changes(folder), **{"save_every": 4, "log_every": 1})


def test_images_without_a_feature_are_left_out_and_counted(tmp_path):
    """A teacher that overflows on some views."""
    kernel = np.full((64, 5), 1e8, "f4")
    kernel[::2] *= -1
    leaves = {"params/linear1/kernel": kernel}
    teachers.leave(tmp_path / "teacher", size=8, std=[1e-30], leaves=leaves)
    work = toy.job(tmp_path / "run", **changes(tmp_path / "teacher"))
    batch = toy.first_call(work)
    state = job.begin_task(work, job.initial_state(work), work.stream.tasks[0])
    after, metrics = job.compile_step(work)(state, *batch)
    assert 0 < metrics["untaught"][0] < 1 and np.isfinite(metrics["loss"][0])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))


def test_a_teacher_in_one_call(tmp_path):
    """By its folder or as an encoder in memory; the run is joint."""
    teachers.leave(tmp_path / "teacher")
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8)).astype(np.uint8)
    options = {"evaluators.uniformity.skip": True, "evaluators.collapse.skip": True}
    options |= {"plots": False, "tensorboard": False, "evaluate_untrained": False}
    options |= {"evaluators.neighbours.skip": True, "device_bytes": 0}
    cards = []
    loaded = encoder.load_encoder(tmp_path / "teacher")
    for number, given in enumerate((tmp_path / "teacher", loaded)):
        run = tmp_path / f"run{number}"
        jaxcl.fit(
            images, teacher=given, encoder=MLP, epochs=1, batch_size=16, quiet=True,
            out=run, options=options,
        )  # fmt: skip
        config = json.loads((run / "config.json").read_text())
        assert config["method"]["strategy"]["name"] == "distil"
        assert config["scenario"]["name"] == "joint"
        assert config["optimizer"]["name"] == "adam"
        cards.append(config["teacher_card"])
    assert cards[0]["weights"] == cards[1]["weights"]


def test_a_teacher_by_a_word_of_the_config_and_its_cost(tmp_path):
    """`jaxcl estimate` counts the teacher's work and memory."""
    np.savez(tmp_path / "set.npz", train_x=np.zeros((64, 8, 8, 1), np.uint8))
    asked = ["--config.encoder.width=4", "--config.batch_size=16", "--config.devices=1"]
    costs = []
    for width in (64, 512):
        folder = tmp_path / f"teacher{width}"
        teachers.leave(folder, size=16, width=width)
        words = f"{tmp_path / 'set.npz'},encoder=conv_net,teacher={folder}"
        config = files.read_config([f"--config=own_images:{words}", *asked])
        assert config.method.strategy.name == "distil"
        assert config.scenario.name == "joint" and config.optimizer.name == "adam"
        costs.append(estimate.estimate(config, classes=2, rows=64)[0])
    small, large = costs
    weights, images = 256 * (512 - 64), 2 * 16
    assert large["flops"] - small["flops"] > 2 * images * weights
    gap = large["memory"]["arguments"] - small["memory"]["arguments"]
    assert gap > 4 * weights
