"""The encoder of another run, judged: what is read, measured, and refused."""

import json
import shutil
import types

import ml_collections
import pytest

from helpers import run_directories, toy
from jaxcl import core
from jaxcl.config import build
from jaxcl.data.sources import toys
from jaxcl.data.stream import scenarios
from jaxcl.evals import knn, linear
from jaxcl.run import evaluation, finish, job, log_file, result_file, train, transfer

STRATEGY = {"method.strategy": "finetune", "scenario.num_tasks": 5, "epochs": 1}
PROBE = {"epochs": 3, "augment": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory after one task, as a run that goes on leaves it."""
    workdir = tmp_path_factory.mktemp("run")
    train.run_tasks(toy.job(workdir, tasks=1, **STRATEGY), workdir)
    return workdir


def config(run, **changes):
    made = ml_collections.ConfigDict(
        {
            "name": "transfer_toy",
            "checkpoint": str(run),
            "seed": 3,
            "data": {"name": "digits", "validation": 0.3},
            "scenario": {"name": "joint"},
            "augment": {"size": 8},
            "evaluators": {"linear": dict(PROBE), "knn": {"k": 5}},
            "devices": 1,
            "plots": False,
            "tensorboard": False,
            "progress": False,
        }
    )
    toy.put(made, changes)
    return made


def copy_of(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def judged(run, workdir, **changes):
    return finish.run_job(build.build(config(run, **changes), workdir), workdir)


def without_clock(results):
    return {key: value for key, value in results.items() if key != "seconds"}


@pytest.mark.parametrize("devices", [1, 2])
def test_the_trained_encoder_is_judged_and_left_alone(run, tmp_path, devices, capsys):
    before = run_directories.contents(run)
    results = judged(run, tmp_path, devices=devices)
    assert run_directories.contents(run) == before
    work = toy.job(tmp_path / "like", tasks=1, **STRATEGY)
    saved = toy.saved(work, run)
    parts = run_directories.eval_parts(work)
    cut = scenarios.make(toys.digits(validation=0.3), name="joint", num_tasks=None)
    parts = parts._replace(stream=cut, seed=3)
    want = {
        "linear": linear.make(parts, lr=3.0, **PROBE)(saved.state, 0),
        "knn": knn.make(parts, k=5)(saved.state, 0),
    }
    for name, result in want.items():
        (ours,) = result_file.matrix(results, f"{name}/class_incremental")
        gap = 0 if devices == 1 else 2 / len(cut.evaluation.label)
        assert abs(ours[0] - result.rows["class_incremental"][0]) <= gap
    loss = results["scalars"][0]["linear/train_loss"]
    assert loss == pytest.approx(want["linear"].scalars["train_loss"], rel=1e-4)
    assert loss != want["linear"].scalars["accuracy"]
    assert results["task_names"] == ["joint"]
    assert results["checkpoint"]["number"] == saved.number
    assert results["checkpoint"]["step"] == int(saved.state.step) > 0
    assert without_clock(result_file.read_results(tmp_path)) == without_clock(results)
    (row,) = log_file.read_rows(tmp_path)
    assert row["step"] == int(saved.state.step)
    assert row["eval"]["knn/accuracy"] == results["scalars"][0]["knn/accuracy"]
    said = capsys.readouterr().out
    assert "linear/class_incremental" in said


def check_refused(match, run, workdir, **changes):
    with pytest.raises(ValueError, match=match) as error:
        build.build(config(run, **changes), workdir)
    assert "\n" not in str(error.value)
    assert not (workdir / "config.json").exists()


def test_what_is_wrong_with_the_directory_is_one_line(run, tmp_path):
    here = tmp_path / "here"
    check_refused(
        r"config\.checkpoint='.*nowhere': no such folder", tmp_path / "nowhere", here
    )
    check_refused(r"config\.checkpoint='': it has no config", "", here)
    copy = copy_of(run, tmp_path)
    (copy / "config.json").write_text('{"name": "x"}')
    check_refused(r"config\.json lacks \['augment', 'encoder'\]", copy, here)
    (copy / "config.json").write_text('{"name": ')
    check_refused(r"config\.json: it is damaged", copy, here)
    shutil.copy(run / "config.json", copy)
    shutil.rmtree(copy / "checkpoints")
    check_refused(r"there is no checkpoint in it yet", copy, here)
    (copy / "checkpoints").mkdir()
    (copy / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    check_refused(r"there is no checkpoint in it yet", copy, here)


def numbers(run):
    return sorted(int(p.name) for p in (run / "checkpoints").iterdir())


def truncate(run, number):
    files = (run / "checkpoints" / str(number) / "state" / "d").rglob("*")
    largest = max((p for p in files if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def test_damaged_checkpoints_are_passed_over_and_stay(run, tmp_path, caplog):
    copy, here = copy_of(run, tmp_path), tmp_path / "here"
    older, newest = numbers(copy)
    truncate(copy, newest)
    before = run_directories.contents(copy)
    results = judged(copy, here)
    assert results["checkpoint"]["number"] == older
    assert f"checkpoint {newest}" in caplog.text
    assert run_directories.contents(copy) == before
    truncate(copy, older)
    check_refused(
        rf"every checkpoint in .* is damaged \(\[{older}, {newest}\]\)",
        copy,
        tmp_path / "other",
    )


def test_another_encoder_is_refused(run, tmp_path):
    copy, here = copy_of(run, tmp_path), tmp_path / "here"
    there = json.loads((copy / "config.json").read_text())
    there["encoder"]["width"] = 8
    (copy / "config.json").write_text(json.dumps(there))
    match = r"\['params'\]\['encoder'\]\['bn1'\]\['bias'\] is float32\[4\] in the "
    check_refused(match + r"checkpoint, float32\[8\] here", copy, here)
    there["encoder"] = {"name": "resnet", "depth": 10, "width": 4}
    (copy / "config.json").write_text(json.dumps(there))
    check_refused(r"is absent in the checkpoint|absent here", copy, here)
    # Images with three channels for an encoder of one.
    colour = {"data": {"name": "digits", "channels": 3}}
    match = r"conv1'\]\['kernel'\] is float32\[3, 3, 1, 4\] .* float32\[3, 3, 3, 4\]"
    check_refused(match, run, here, **colour)


def run_config(**method):
    made = {"encoder": {"name": "conv_net"}, "precision": "bfloat16"}
    augment = {"mean": [0.1], "std": [0.2], "size": 99, "jitter": [0.4] * 4}
    return made | {"augment": augment, "method": {"name": "two_view", **method}}


@pytest.mark.parametrize("number", [6, 7])
def test_results_are_read_again_for_the_same_checkpoint_alone(
    tmp_path, monkeypatch, number
):
    source = {"path": "run", "number": 7}
    known = result_file.empty_results(1) | {"checkpoint": source | {"number": number}}
    result_file.write_results(tmp_path, known)
    measured = core.Result({"knn/x": [0.5]}, {})
    monkeypatch.setattr(evaluation, "run_evaluators", lambda *_, **__: measured)
    tasks = types.SimpleNamespace(tasks=[types.SimpleNamespace(name="all")])
    logging = job.Logging(1, (), False, False)
    work = transfer.Transfer(None, source, tasks, job.Evaluation({}), logging)
    results = transfer.run_transfer(work, tmp_path)
    assert ("knn/x" in results["matrices"]) == (number == 6)
    for step in (9, 10):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    assert transfer.find_checkpoints(str(tmp_path)).numbers == (9, 10)
    tuned = transfer.complete({}, run_config() | {"tuning": {"lora_rank": 4}})
    assert tuned["tuning"] == {"lora_rank": 4}


def test_what_the_config_says_itself_stays():
    raw = {"precision": "float32", "evaluators": {"linear": {"lr": 0.7}}}
    raw["augment"] = {"size": 8, "mean": (0.5,)}
    made = transfer.complete(raw, run_config())
    assert made["precision"] == "float32"
    assert made["evaluators"]["linear"]["lr"] == 0.7
    assert made["augment"] == {"size": 8, "mean": (0.5,), "std": [0.2]}
    bare = transfer.complete({"evaluators": {"linear": {}}}, run_config())
    assert bare["evaluators"]["linear"]["lr"] == 3.0  # two_view's default is MoCo
    for method in ({"base": "another"}, {"name": "no_such"}):
        with pytest.raises(ValueError, match=r"config\.evaluators\.linear\.lr"):
            transfer.complete({"evaluators": {"linear": {}}}, run_config(**method))


def test_again_is_harmless_and_a_newer_checkpoint_is_judged_anew(run, tmp_path):
    run, here = copy_of(run, tmp_path), tmp_path / "here"
    first, files = judged(run, here), run_directories.contents(here)
    again = judged(run, here)
    assert again == first and run_directories.contents(here) == files
    train.run_tasks(toy.job(run, tasks=2, **STRATEGY), run)
    newer = judged(run, here)
    assert newer["checkpoint"]["number"] > first["checkpoint"]["number"]
    assert newer["scalars"] != first["scalars"]
    assert len(log_file.read_rows(here)) == 1
