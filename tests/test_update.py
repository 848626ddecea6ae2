"""Updates: the next task of a finished run, judged, accepted or rolled back."""

import json
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from PIL import Image
from sklearn import datasets

import jaxcl
from helpers import run_directories, toy
from jaxcl import cli, core
from jaxcl.config import build, files, own_images
from jaxcl.data.stream import identity
from jaxcl.errors import Refused
from jaxcl.index import canary, drift, kit, maps
from jaxcl.index import ways as ways_lib
from jaxcl.run import checkpoint, finish, job, result_file, transfer, updates
from jaxcl.update import average, gate, lineage, references, served
from jaxcl.update import command as update_command
from jaxcl.update import plan as update_plan
from jaxcl.update import verdict as update_verdict
from jaxcl.weights import export

PIXELS = (datasets.load_digits().images * 255 / 16).astype(np.uint8)[..., None]
LABELS = datasets.load_digits().target.astype(np.int32)
RUN = {
    "data": {"name": "digits"},
    "scenario.num_tasks": 5,
    "epochs": 1,
    "method.base": "simclr",
    "method.strategy": "pnr",
    # What trains is no subject here: a step that compiles in half of the time.
    "encoder": {"name": "mlp", "widths": (16,), "batch_norm": True},
    "augment.crop": False,
    "augment.jitter_probability": 0.0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has finished five tasks, with any weights; images beside it."""
    root = tmp_path_factory.mktemp("update")
    made = run_directories.untried(root / "run", **RUN)
    state = run_directories.random_state(made)
    run_directories.save(made, root / "run", state, done=5)
    results = run_directories.results_of(made, done=5)
    result_file.write_results(root / "run", results)
    np.savez(root / "new.npz", train_x=PIXELS[:240])
    np.savez(
        root / "test.npz",
        train_x=PIXELS[300:500],
        train_y=LABELS[300:500],
        test_x=PIXELS[500:700],
        test_y=LABELS[500:700],
    )
    return root


@pytest.fixture
def copy(run, tmp_path):
    """One that a test may update."""
    shutil.copytree(run, tmp_path / "root", dirs_exist_ok=True)
    return tmp_path / "root"


def config(**changes):
    made = update_plan.default_options()
    for path, value in {"rows": 200, "evaluators.knn.k": 5, **changes}.items():
        section, _, name = path.rpartition(".")
        place = made
        for part in section.split(".") if section else ():
            place = place[part]
        with place.ignore_type():
            place[name] = value
    return made.to_dict()


OPTIONS = ("old", "join", "again", "select", "reference", "becomes_reference")


def plan(root, *, test=True, data="new.npz", **changes):
    options = {k: changes.pop(k) for k in OPTIONS if k in changes}
    judge = str(root / "test.npz") if test else None
    data, given = str(root / data), config(**changes)
    return update_plan.make_plan(str(root / "run"), data, given, test=judge, **options)


def encoder(run):
    """What the newest checkpoint has of an encoder."""
    own = transfer.config_of(str(run))
    made = build.sections.make_encoder(
        build.sections.TopLevel(**{k: v for k, v in own.items() if k in FIELDS})
    )
    blank = np.zeros((1, 8, 8, 1), np.float32)
    state, _ = transfer.restore(str(run), made, blank, build.sharding.mesh(1))
    return jax.device_get((state.params, state.stats)), int(state.step)


FIELDS = {field.name for field in build.dataclasses.fields(build.sections.TopLevel)}


def same(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_the_new_task_goes_on_with_the_method_and_is_accepted(copy):
    asked = {"limits.accuracy_drop": 1.0}
    work = plan(copy, **asked)
    before = encoder(copy / "run")
    found = update_command.carry_out(work)
    assert found["accepted"] and found["broken"] == []
    assert updates.find_current(copy / "run") == str(work.workdir) == found["run"]
    # The run itself is as it was; the update goes on from its weights and steps.
    assert same(encoder(copy / "run"), before)
    (weights, steps), new = encoder(work.workdir), 240 // 48
    assert steps == before[1] + new and not same(weights, before[0])
    made = build.build(ml_collections.ConfigDict(work.config), work.workdir)
    state = toy.saved(made, work.workdir).state
    assert int(state.task) == 5 and int(state.task_steps) == new
    # PNR's teacher is the network that the run ended with.
    teacher = jax.device_get(state.extra.teacher["encoder"])
    assert same(teacher, before[0][0]["encoder"])
    results = result_file.read_results(work.workdir)
    assert results["task_names"][-1] == "new" and len(results["task_names"]) == 6
    assert results["cost"]["per_task"][-1]["steps"] == new
    # What was said is what separate measurements say.
    (name,) = found["accuracy"]
    for when, where in (("before", copy / "run"), ("after", work.workdir)):
        judged = ml_collections.ConfigDict({**work.test, "checkpoint": str(where)})
        again = finish.run_job(build.build(judged, copy / when), copy / when)
        want = again["matrices"][name][0][0]
        assert found["accuracy"][name][when] == want
    change = found["accuracy"][name]
    assert change["change"] == change["after"] - change["before"]
    # The answers to single images are kept, and compared in pairs.
    before_right, after_right = (
        references.read_answers(copy / x)[name] for x in ("before", "after")
    )
    pairs = found["gate"]["matrices"][name]["reference"]
    assert pairs == found["gate"]["matrices"][name]["parent"]
    assert pairs["lost"] == (before_right & ~after_right).sum()
    assert pairs["gained"] == (~before_right & after_right).sum()
    assert pairs["after"] == change["after"] and found["gate"]["images"] == 200
    kept = references.read_reference(references.find_file(copy / "run"))
    assert kept.run == str(copy / "run")
    np.testing.assert_array_equal(kept.right[name], before_right)
    rows = np.sort(np.random.default_rng(0).permutation(1438)[:200])
    old, fresh = (
        build.make_embedder(
            ml_collections.ConfigDict({**work.old, "checkpoint": str(x)})
        )[1]
        for x in (copy / "run", work.workdir)
    )
    moved = drift.measure_drift(old(rows), fresh(rows), k=10)
    label = own_images.read_images({"name": "digits"}).train.label[rows]
    measured = ways_lib.measure_ways(old(rows), fresh(rows), label=label, k=10)
    best, *others = measured.back
    moved["adapters"] = {one.kind: one.recall for one in (best, *others)}
    assert found["drift"] == result_file.jsonable(moved) | {"rows": 200}
    assert found["ways"] == measured.ways
    assert found["index"] == update_verdict.decide_index(moved, measured.ways, 0.9)
    # What brings stored vectors to the new encoder lies beside the verdict.
    left = kit.read_kit(work.workdir)
    np.testing.assert_allclose(left.before, old(rows), rtol=1e-5)
    np.testing.assert_allclose(left.after, fresh(rows), rtol=1e-5)
    assert left.ids == [str(row) for row in rows] and left.fitted.kind
    assert canary.read_canary(work.workdir / canary.FILE).encoder == left.target
    told = update_verdict.write_sentences(found)
    for one in (best, *others):
        assert f"{one.kind} {100 * one.recall:.0f} %" in told
    adapter = work.workdir / maps.FILE
    assert adapter.exists() == (found["index"] == "adapt")
    # An adapter is exported with the encoder, which maps its embeddings by it.
    lineage.write_report(work.workdir, found, maps.pack_map(best.arrays))
    export.export(str(copy / "run"), str(copy / "out"))
    plain, adapted = (jaxcl.load_encoder(copy / "out", into=x) for x in (None, "old"))
    images = own_images.read_images({"name": "digits"}).train.images[rows]
    np.testing.assert_allclose(plain.embed(images), fresh(rows), rtol=1e-3, atol=1e-4)
    mapped = maps.map_features(best.arrays, fresh(rows))
    np.testing.assert_allclose(adapted.embed(images), mapped, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(adapted.picture_features(), plain.picture_features())
    adapter.unlink()
    export.export(str(copy / "run"), str(copy / "out"))  # without it again
    with pytest.raises(ValueError, match="into='old'"):
        jaxcl.load_encoder(copy / "out", into="old")

    # The same command finds it done; other data go on from it.
    again = plan(copy, **asked)
    assert again.workdir == work.workdir and updates.read_report(
        again.workdir
    ) == json.loads(json.dumps(found))
    other = plan(copy, **asked, again=True)
    assert other.workdir.name == "0002" and other.parent == str(work.workdir)
    assert other.config["scenario"]["num_tasks"] == 7


def test_fewer_new_images_than_a_batch_come_in_smaller_ones(copy, capsys):
    with np.load(copy / "new.npz") as new:
        few = {name: x[:20] for name, x in new.items()}
    np.savez(copy / "few.npz", **few)
    work = plan(copy, data="few.npz")
    assert work.config["batch_size"] == 4  # four batches and more
    said = capsys.readouterr().out
    assert "config.train.batch_size=4" in said
    asked = plan(copy, data="few.npz", **{"train.batch_size": 16})
    assert asked.config["batch_size"] == 16
    assert plan(copy).config["batch_size"] == 48


def test_the_smaller_batch_of_few_images_ends_with_their_update(copy):
    def update(number, batch_size, *, asked, accepted=True):
        folder = copy / "run" / "updates" / number
        shutil.copytree(copy / "run", folder, ignore=shutil.ignore_patterns("updates"))
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(saved | {"batch_size": batch_size, "data": {"name": "x"}})
        )
        report = {"accepted": accepted, "asked": {"train": asked}}
        (folder / "update.json").write_text(json.dumps(report))

    update("0001", 4, asked={})
    assert plan(copy).config["batch_size"] == 48
    update("0002", 24, asked={"batch_size": 24})
    update("0003", 2, asked={})
    update("0004", 16, asked={"batch_size": 16}, accepted=False)
    assert plan(copy).config["batch_size"] == 24
    update("0005", 20, asked={"batch_size": 20})
    last = plan(copy)
    assert last.config["batch_size"] == 20 and last.parent.endswith("0005")
    assert last.old["data"] == {"name": "digits"}  # old images are those of the run
    assert plan(copy, **{"train.batch_size": 32}).config["batch_size"] == 32


@pytest.mark.parametrize("asked, share", [(0.5, 0.5), ("auto", 0.75)])
def test_an_average_lies_between_both_encoders(copy, monkeypatch, asked, share):
    """Saved once, though the command was killed before it wrote its verdict."""
    measured = {"before": 0.71, "average_1.0": 0.6, "average_0.75": 0.7, "after": 0.7}
    for name in ("measure_accuracies", "_measure_choice"):
        monkeypatch.setattr(
            update_command, name, lambda *given: {"knn": measured[given[2]]}
        )
    work = plan(copy, average=asked)
    found = update_command.carry_out(work)
    tried = {name[8:]: {"knn": measured[name]} for name in [*measured][1:3]}
    record = {"share": share} | ({"tried": tried} if asked == "auto" else {})
    assert found["average"] == record and found["accepted"]
    assert f"{100 * share:.0f} % of the new" in update_verdict.write_sentences(found)
    # One checkpoint before the last is what the training ended with.
    trained = shutil.copytree(work.workdir, copy / "trained")
    *_, last = sorted((trained / "checkpoints").iterdir(), key=lambda x: int(x.name))
    shutil.rmtree(last)
    old, new, mixed = (encoder(x)[0] for x in (copy / "run", trained, work.workdir))
    for a, b, c in zip(*map(jax.tree.leaves, (old, new, mixed)), strict=True):
        twin = (1 - share) * np.float64(a) + share * np.float64(b)
        np.testing.assert_allclose(c, twin, rtol=1e-6, atol=1e-7)
    assert not same(new, mixed) and not same(old, mixed)
    (work.workdir / "update.json").unlink()
    again = update_command.carry_out(work)
    assert again["average"] == record and same(encoder(work.workdir)[0], mixed)


@pytest.mark.parametrize("before", [{"warmup_epochs": 10}, {}])  # 10 by default
@pytest.mark.parametrize("epochs, warmup", [(11, 10), (10, 1), (3, 1), (1, 0)])
def test_a_warmup_ends_before_the_training(epochs, warmup, before):
    config = {"schedule": {"name": "warmup_cosine", **before}}
    found = update_plan._shorten_warmup(config, {"epochs": epochs})
    assert found["schedule"].get("warmup_epochs", 10) == warmup
    assert update_plan._shorten_warmup(config, {}) == config
    asked = {"epochs": epochs, "schedule": {"warmup_epochs": 10}}
    assert update_plan._shorten_warmup(config, asked) == config


def test_the_new_set_is_the_last_of_joined_ones():
    one, two = {"name": "digits"}, {"name": "npz"}
    both = lineage.join_sections(one, two)
    assert both == {"name": "joined", "sets": [one, two]}
    assert lineage.join_sections(both, {"name": "x"})["sets"] == [
        one,
        two,
        {"name": "x"},
    ]


def test_an_average_is_of_the_encoder_its_statistics_too(monkeypatch):
    """Heads stay as they were after the update; the average is the next checkpoint."""

    def state(number):
        tree = {name: {"x": jnp.float32(number)} for name in ("encoder", "projector")}
        fields = {"params": tree, "stats": tree, "opt_state": (), "extra": ()}
        numbers = dict.fromkeys(("key", "step", "task", "task_start", "task_steps"), 0)
        return core.TrainState(**fields, **numbers)

    saved = []

    class Saved:
        def __init__(self, folder, keep):
            pass

        def restore(self, like):
            return checkpoint.Restored(state(4.0), {"phase": "evaluated"}, 7)

        def save(self, *given):
            saved.append(given)

        def close(self):
            pass

    monkeypatch.setattr(checkpoint, "Checkpoints", Saved)
    monkeypatch.setattr(job, "initial_state", lambda work: state(0.0))
    work = types.SimpleNamespace(loop=types.SimpleNamespace(keep=1, start=None))
    tried = {}

    def choose(mix):
        tried.update({share: jax.tree.leaves(mix(share)) for share in (1.0, 0.75)})
        return {"share": 0.25}

    assert average.save_average(work, "run", choose) == {"share": 0.25}
    assert tried == {1.0: [4, 4], 0.75: [3, 3]}
    counts = {"n": np.int32(3)}, {"n": np.int32(5)}
    assert average.mix_weights(*counts, 0.25) == {"n": 5}  # no average
    ((number, after, cursor),) = saved
    assert number == 8 and cursor == {"phase": "evaluated", "average": {"share": 0.25}}
    for tree in after.params, after.stats:
        assert jax.tree.map(float, tree) == {"encoder": {"x": 1}, "projector": {"x": 4}}


def test_a_share_is_judged_as_an_encoder_is(copy):
    """The weights of a run, tried as an average, have the accuracies of the run.

    A part of the labelled images chooses, or images of their own.
    """
    own = [tree["encoder"] for tree in encoder(copy / "run")[0]]
    for select in (None, str(copy / "test.npz")):
        work = plan(
            copy, average="auto", **{"limits.accuracy_drop": 1.0}, select=select
        )
        if select is None:
            shutil.copytree(copy / "run", work.workdir)
        assert (len(work.comparison.rows) == 200) == bool(select)
        found = update_command._choose_share(work, lambda _: own, lambda: False)
        place = work.workdir / ("select_before" if select else "before")
        ((name, right),) = references.read_answers(place).items()
        if select is None:
            assert 50 <= work.comparison.choosing.sum() <= 150
            right = right[work.comparison.choosing]
        assert found["share"] == 1.0
        assert found["tried"] == {"1.0": {name: pytest.approx(right.mean())}}


def test_a_share_is_chosen_by_what_is_measured(copy):
    for changes in ({"test": False}, {"limits.accuracy_drop": None}):
        with pytest.raises(ValueError, match=r"config\.average='auto'"):
            plan(copy, average="auto", **changes)
    with pytest.raises(ValueError, match=r"config\.average=1\.5"):
        plan(copy, average=1.5)
    asked = {"average": "auto", "limits.accuracy_drop": None, "limits.accuracy": 0.5}
    assert plan(copy, **asked).comparison.choosing.any()


@pytest.mark.slow
def test_updates_go_on_from_each_other(copy):
    runs, past = [], []
    for number, (limit, current) in enumerate([(1.0, 1), (-1.0, 1), (1.0, 3)], 1):
        asked = {"limits.accuracy_drop": limit, "becomes_reference": number == 3}
        work = plan(copy, again=True, **asked)
        assert work.workdir.name == f"{number:04d}"
        found = update_command.carry_out(work)
        runs.append(found["run"])
        assert updates.find_current(copy / "run").endswith(f"updates/{current:04d}")
        # Losses count from the run, whatever the parent is; each spends its share.
        compared = found["gate"]
        assert compared["reference"] == str(copy / "run")
        share = gate.share_budget(past, 0.05, on_trust=True)
        assert compared["error"] == pytest.approx(share.error)
        past.append(gate.PastUpdate(compared["outcome"], True))
        assert compared["outcome"] == ("harmful" if number == 2 else "harmless")
    ((name, right),) = references.read_answers(work.workdir / "after").items()
    kept = references.read_reference(references.find_file(copy / "run"))
    assert kept.run == runs[2]
    np.testing.assert_array_equal(kept.right[name], right)
    assert plan(copy, again=True, reference=runs[0]).comparison.run == runs[0]
    assert plan(copy, again=True).comparison.run == runs[2]
    # The second, rolled back, left no trace in the third.
    assert encoder(work.workdir)[1] == encoder(copy / "run")[1] + 2 * (240 // 48)


def test_the_command_rolls_back_and_resumes(copy):
    command = [
        sys.executable,
        "-m",
        "jaxcl",
        "update",
        f"--run={copy / 'run'}",
        f"--data={copy / 'new.npz'}",
        f"--test={copy / 'test.npz'}",
        "--config.rows=100",
        "--config.limits.accuracy=1.0",
        "--config.train.optimizer.lr=0.1",
        "--config.train.epochs=2",
        "--average=0.5",
    ]
    # What a stop amid the new task leaves: a claimed directory, no verdict.
    work = plan(
        copy,
        rows=100,
        average=0.5,
        **{"limits.accuracy": 1.0, "train.optimizer.lr": 0.1, "train.epochs": 2},
    )
    build.build(ml_collections.ConfigDict(work.config), work.workdir)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == update_command.ROLLED_BACK, done.stderr
    assert "knn/class_incremental" in done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert "Rolled back" in last and str(copy / "run") in last
    found = updates.read_report(work.workdir)
    assert not found["accepted"] and found["average"] == {"share": 0.5}
    assert found["cost"]["steps"] == 2 * (240 // 48)
    assert updates.find_current(copy / "run") == str(copy / "run")
    assert not (work.workdir / "checkpoints").exists()
    assert len(updates.list_updates(copy / "run")) == 1


def test_an_unfinished_update_is_not_mixed_with_another(copy):
    work = plan(copy)
    with run_directories.untraced():
        made = build.build(ml_collections.ConfigDict(work.config), work.workdir)
    state = run_directories.random_state(made)
    run_directories.save(made, work.workdir, state, done=5)
    np.savez(copy / "more.npz", train_x=PIXELS[240:360])
    other = plan(copy, data="more.npz")
    assert other.workdir == work.workdir
    with pytest.raises(ValueError, match=r"(?s)0001: .*data\.path.*more\.npz"):
        update_command.carry_out(other)


def test_other_images_at_one_path_are_another_update(copy, capsys):
    """Also corrected labels of those that judge; the same images are nothing new."""
    asked = {"limits.accuracy_drop": 1.0}
    work = plan(copy, **asked)
    build.build(ml_collections.ConfigDict(work.config), work.workdir)
    np.savez(copy / "new.npz", train_x=PIXELS[1:241])
    with pytest.raises(ValueError, match="0001: .*240 .*row 0 of train"):
        update_command.prepare(plan(copy, **asked))
    np.savez(copy / "new.npz", train_x=PIXELS[:240])
    report = {"asked": plan(copy, **asked).asked, "accepted": False, "parent": "x"}
    lineage.write_report(work.workdir, report, None)
    assert plan(copy, **asked).workdir == work.workdir
    assert "0001" in update_plan.say_nothing_new(work)
    with np.load(copy / "test.npz") as arrays:
        arrays = dict(arrays)
    np.savez(copy / "test.npz", **arrays | {"test_y": arrays["test_y"][::-1]})
    assert plan(copy, **asked).workdir.name == "0002"
    np.savez(copy / "test.npz", **arrays)
    np.savez(copy / "new.npz", train_x=PIXELS[1:241])
    assert plan(copy, **asked).workdir.name == "0002"


def test_images_that_judge_and_are_trained_on_are_counted(copy, capsys):
    plan(copy)
    assert "are trained on" not in capsys.readouterr().out
    np.savez(copy / "new.npz", train_x=PIXELS[690:930])
    plan(copy)
    assert "10 of 200" in capsys.readouterr().out
    np.savez(copy / "old.npz", train_x=PIXELS[695:930])
    old = own_images.read_images({"name": "npz", "path": str(copy / "old.npz")})
    (copy / "run" / identity.FILE).unlink(missing_ok=True)
    identity.write_identity(copy / "run", identity.identify(old))
    plan(copy)
    assert "5 of 200" in capsys.readouterr().out


def test_every_row_of_the_new_images_is_trained_on(tmp_path):
    """Of folders of classes, of images beside folders, and of images alone."""
    theirs = {"augment": {"mean": (0.5,)}, "encoder": {"name": "conv_net"}}
    for number, names in enumerate((("a", "b"), (".", "b"), (".",))):
        root = tmp_path / str(number)
        for i in range(20):
            where = root / names[i % len(names)] / f"{i}.png"
            where.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(PIXELS[i, ..., 0]).save(where)
        section = own_images.make_section(
            str(root), parent_config=theirs, all_rows=True
        )
        data = own_images.read_images(section)
        assert len(data.train.label) == 20 and data.test is None
        judge = own_images.read_images(
            own_images.make_section(str(root), parent_config=theirs)
        )
        assert (judge.test is None) == (names == (".",))


def test_a_joined_update_reads_old_images_as_earlier_ones(copy):
    work = plan(copy, join=True)
    made = build.build(ml_collections.ConfigDict(work.config), work.workdir)
    *before, task = made.stream.tasks
    assert len(before) == 5 and task.name == "new"
    images = made.stream.dataset.train.images
    np.testing.assert_array_equal(images[task.train.rows], PIXELS[:240])
    assert len(task.earlier) == 1438
    assert not set(task.earlier) & set(task.train.rows)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": "none.npz"}, r"config\.data"),
        ({"rows": 20}, r"config\.rows=20"),
        ({"neighbours": 0}, r"config\.neighbours=0"),
        ({"index": 1.5}, r"config\.index=1\.5"),
        ({"limits.index": "best"}, r"config\.limits\.index='best'"),
        ({"limits.acuracy": 1.0}, r"config\.limits\.acuracy"),
        ({"limits.accuracy": 0.5, "test": False}, r"accuracy=0\.5"),
        ({"train.method": {"name": "er"}}, r"config\.train\.method"),
        ({"limits.confidence": 1.0}, r"config\.limits\.confidence=1\.0"),
        ({"limits.undecided": "keep"}, r"config\.limits\.undecided='keep'"),
        ({"reference": "nowhere"}, r"--reference='nowhere'"),
        ({"becomes_reference": True, "test": False}, "--accept-as-reference.*--test"),
        ({"select": "a.npz"}, "--select='a.npz'.*--average"),
        ({"old": "none"}, r"config\.old"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(run, changes, said):
    with pytest.raises(ValueError, match=said):
        plan(run, **changes)
    assert not (run / "run" / "updates").exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--config.train.epochs=0", "config.epochs=0"),
        ("--config.train.batch_size=4000", "batch_size=4000"),
        ("--config.evaluators.knn.k=0", "config.evaluators.knn.k=0"),
    ],
)
def test_what_the_new_task_refuses_is_one_line(copy, capsys, option, said):
    test = f"--test={copy}/test.npz"
    words = ["update", f"--run={copy}/run", f"--data={copy}/new.npz", test, option]
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxcl: ") and said in line
    assert not (copy / "run" / "updates").exists() or "evaluators" in option


def test_a_run_that_cannot_be_updated(run, tmp_path):
    given = str(run / "new.npz"), config()
    with pytest.raises(ValueError, match="config.json"):
        update_plan.make_plan(str(tmp_path), *given)
    own = json.loads((run / "run" / "config.json").read_text())
    for change, said in (
        ({"seeds": 3}, "several seeds; name the directory of one"),
        ({}, "is not finished; let it finish first"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**own, **change}))
        with pytest.raises(ValueError, match=said):
            update_plan.make_plan(str(tmp_path), *given)
    results = json.loads((run / "run" / "results.json").read_text())
    first = len(results["scalars"])
    results["scalars"].append(None)
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "config.json").write_text(json.dumps({**own, "first_tasks": first}))
    with pytest.raises(ValueError, match=f"config.first_tasks={first}.* 1 "):
        update_plan.make_plan(str(tmp_path), *given)


def test_old_data_that_are_gone(copy, capsys):
    own = json.loads((copy / "run" / "config.json").read_text())
    own["data"] = {"name": "npz", "path": str(copy / "gone.npz")}
    (copy / "run" / "config.json").write_text(json.dumps(own))
    work = plan(copy, test=False)
    assert work.old is None
    assert "gone.npz" in capsys.readouterr().out
    for limit in ({"limits.index": "keep"}, {"limits.overlap": 0.5}):
        with pytest.raises((ValueError, OSError), match=r"gone\.npz"):
            plan(copy, **limit)


def test_icl_wants_the_old_images(tmp_path):
    method = {"name": "icl", "strategy": "icl", "output_dim": 8}
    after = {"name": "after", "num_tasks": 2, "evaluation": "none"}
    given = {"method": method, "start": "somewhere", "scenario": after}
    with pytest.raises(ValueError, match="somewhere"):
        toy.job(tmp_path / "a", **given)
    given["start"] = None
    with pytest.raises(ValueError, match="'after'.*config.start"):
        toy.job(tmp_path / "a", **given)
    start = tmp_path / "start"
    start.mkdir()
    own = toy.config(method=method).to_dict()
    (start / "config.json").write_text(json.dumps(own))
    given["start"] = str(start)
    with pytest.raises(ValueError, match=r"config\.method\.strategy="):
        toy.job(tmp_path / "a", **given)
    digits = {"name": "digits"}
    given["data"] = {"name": "joined", "sets": [digits, digits]}
    assert toy.job(tmp_path / "a", **given).batches_per_step(1) > 1
    with pytest.raises(ValueError, match=r"config\.start.*config\.method"):
        toy.job(
            tmp_path / "b",
            **{**given, "method.strategy": "pnr"} | {"method": {"name": "two_view"}},
        )


def test_a_state_of_another_shape_is_named(copy):
    own = transfer.config_of(str(copy / "run"))
    own["method"] = {**own["method"], "output_dim": 4}
    (copy / "run" / "config.json").write_text(json.dumps(own))
    work = plan(copy)
    match = r"config\.start.*float32\[16, 8\].*\[16, 4\] here"
    with pytest.raises(checkpoint.CheckpointError, match=match):
        update_command.carry_out(work)


MOVED = {"index_overlap": 0.85, "overlap": 0.7}
MOVED |= {"adapters": {"affine": 0.95, "orthogonal": 0.3}}


def ways_of(measure, **values):
    """Ways with the low ends of their intervals; a new index has 0.8."""
    values = {"leave": 0.3, "back": 0.4, "forward": 0.5, "forward_25": 0.6} | values
    ways = {way: {measure: [x + 0.05, x, x + 0.1]} for way, x in values.items()}
    return ways | {"all": {measure: [0.8, 0.75, 0.85]}}


def test_the_verdict_on_an_index():
    def decide(least, measure="neighbours", **values):
        return update_verdict.decide_index(MOVED, ways_of(measure, **values), least)

    assert update_verdict.decide_index(None, None, 0.9) == "unknown"
    # Without labels the old neighbours count, too.
    assert decide(0.8) == decide(0.85) == "keep"
    assert decide(0.9) == "adapt"
    assert decide(0.96) == "rebuild"
    assert decide(0.96, forward=0.77) == "upgrade"
    # With labels the precision counts, as a share of that of a new index.
    labelled = {"measure": "precision"}
    assert decide(0.9, **labelled) == "rebuild"
    assert decide(0.9, **labelled, forward_25=0.73) == "refresh"
    assert decide(0.9, **labelled, forward=0.73) == "upgrade"
    assert decide(0.92, **labelled, forward=0.73) == "rebuild"
    assert decide(0.9, **labelled, forward=0.73, back=0.74) == "adapt"
    assert decide(0.9, **labelled, leave=0.75) == "keep"


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({}, 1),
        ({"accuracy_drop": 0.05}, 0),
        ({"accuracy_drop": None}, 0),
        ({"accuracy_drop": None, "accuracy": 0.86}, 1),
        ({"accuracy_drop": None, "accuracy": 0.85}, 0),
        ({"accuracy_drop": 0.05, "index": "keep"}, 1),
        ({"accuracy_drop": 0.05, "index": "adapt"}, 0),
        ({"accuracy_drop": 0.05, "overlap": 0.71}, 1),
        ({"accuracy_drop": 0.05, "overlap": 0.7}, 0),
        ({"accuracy": 0.9, "index": "keep", "overlap": 0.9}, 4),
    ],
)
def test_limits(limits, count):
    accuracy = {
        "a/all": {"before": 0.89, "after": 0.85, "change": -0.04},
        "b/all": {"before": 0.8, "after": 0.9, "change": 0.1},
    }
    found = {"accuracy": accuracy, "drift": MOVED, "index": "adapt"}
    said = update_verdict.list_broken(found, update_plan.Limits(**limits))
    assert len(said) == count
    if not limits:
        numbers = re.findall(r"\d+\.?\d*", said[0])
        assert "a/all" in said[0] and [float(x) for x in numbers] == [4.0, 2.0]


@pytest.mark.parametrize(
    ("measure", "better", "words"),
    [
        ("precision", "forward", ["old encoder is better", "best index"]),
        ("precision", "back", ["old encoder is better", "does not help"]),
        ("neighbours", "forward", ["best index"]),
    ],
)
def test_sentences_have_the_numbers_of_a_report(measure, better, words):
    share = {"forward_10": 0.61, "forward_25": 0.62, "forward_50": 0.63, "old": 0.9}
    ways = ways_of(measure, **share, **{better: 0.57})
    ways = {way: {measure: [x - 0.05 for x in v[measure]]} for way, v in ways.items()}
    report = {
        "accuracy": {"knn/x": {"before": 0.512, "after": 0.45, "change": -0.062}},
        "asked": {"limits": {"accuracy_drop": 0.02}},
        "average": {"share": 0.25},
        "drift": MOVED,
        "ways": ways,
        "index": "upgrade",
        "accepted": True,
        "broken": [],
        "run": "runs/new",
        "parent": "runs/old",
    }
    text = update_verdict.write_sentences(report)
    for word in (
        *("knn/x", "51.2 % before", "45.0 % after", "-6.2 points", "2.0 points"),
        *("25 % of the new", "75 % of the old", "85 %", "70 %"),
        *("affine 95 %, orthogonal 30 %", "± 5", "61 / 62 / 63", "jaxcl index upgrade"),
        *words,
    ):
        assert word in text, word
    assert ("all 75" in text) == (measure == "precision")
    assert ("old encoder is better" in text) == (measure == "precision")
    lines = text.splitlines()
    assert "runs/new" in lines[-1] and "runs/old" not in text
    assert sum("labelled images" in line for line in lines) == 1
    report |= {"accepted": False, "broken": ["knn/x lost"], "accuracy": {}, "asked": {}}
    text = update_verdict.write_sentences(report | {"drift": None})
    assert sum("labelled images" in line for line in text.splitlines()) == 1
    assert "knn/x lost" in text and "% before" not in text and "95 %" not in text
    assert "jaxcl index upgrade" not in text
    assert "runs/old" in text.splitlines()[-1] and "runs/new" not in text


@pytest.mark.parametrize("accepted", [True, False])
def test_the_command_prints_its_report_and_exits_by_it(
    copy, monkeypatch, capsys, accepted
):
    """What is made of the images is a report from elsewhere."""
    report = {"accuracy": {}, "drift": None, "index": "unknown", "broken": ["a limit"]}
    report |= {"accepted": accepted, "run": "the new", "parent": "the old"}
    options = dict.fromkeys(("old", "select", "reference", "average"))
    options |= dict.fromkeys(("join", "again", "accept_as_reference", "verbose"), False)
    options |= {"run": str(copy / "run"), "data": str(copy / "new.npz")}
    options |= {"test": str(copy / "test.npz"), "average": 0.5, "verbose": True}
    options["config"] = ["--config.rows=200", "--config.evaluators.knn.k=5"]
    calls = []

    def carry_out(work, prepared, stop):
        calls.append((work.options.average, work.options.rows, prepared, stop()))
        return report

    given = types.SimpleNamespace(**options)
    monkeypatch.setattr(update_command, "prepare", lambda work: "ready")
    monkeypatch.setattr(update_command, "carry_out", carry_out)
    code = update_command.main(given)
    assert code == (0 if accepted else update_command.ROLLED_BACK)
    assert calls == [(0.5, 200, "ready", False)]
    said = capsys.readouterr().out
    assert '"accepted": ' in said and "a limit" in said
    given.average, given.verbose = 1.5, False
    assert update_command.main(given) == 2
    assert "1.5" in capsys.readouterr().err
    # Another update that ended meanwhile.
    given.average = None
    found, real = iter([str(copy / "run")]), updates.find_current
    monkeypatch.setattr(updates, "find_current", lambda run: next(found, "another"))
    assert update_command.main(given) == 2 and len(calls) == 1
    monkeypatch.setattr(updates, "find_current", real)
    # One that is done is told again, and is no failure.
    monkeypatch.setattr(updates, "read_report", lambda folder: report)
    assert update_command.main(given) == 0 and len(calls) == 1
    said = capsys.readouterr().out
    assert "--again" in said and '"accepted"' not in said


@pytest.mark.parametrize(
    ("accepted", "words", "outcome"),
    [
        (True, [gate.HARMLESS, gate.HARMLESS], gate.ACCEPTED),
        (True, [gate.HARMLESS, gate.UNDECIDED], gate.ON_TRUST),
        (True, [None], gate.ON_TRUST),
        (False, [gate.HARMLESS, gate.HARMFUL], gate.REJECTED),
        (False, [gate.UNDECIDED], gate.ROLLED_BACK),
    ],
)
def test_the_outcome_is_noted_and_the_first_reference_kept(
    copy, monkeypatch, accepted, words, outcome
):
    work = plan(copy, **{"limits.accuracy_drop": 1.0})
    matrices = {str(i): {"verdict": word} for i, word in enumerate(words)}
    report = {"accepted": accepted, "gate": {"matrices": matrices}}
    first = {"knn/x": np.arange(200) % 2 > 0}
    left = dict.fromkeys(
        (gate.ACCEPTED, gate.ON_TRUST, gate.REJECTED, gate.ROLLED_BACK), 0.5
    )
    share = work.comparison.share._replace(left=left | {outcome: 0.125})
    work = work._replace(comparison=work.comparison._replace(share=share))
    update_command._close_comparison(work, report, first)
    found = report["gate"]
    assert (found["outcome"], found["left"]) == (outcome, 0.125)
    assert found["judge"] == "0001/before" and found["on_trust"]
    kept = references.read_reference(references.find_file(copy / "run"))
    assert kept.run == str(copy / "run")
    np.testing.assert_array_equal(kept.right["knn/x"], first["knn/x"])
    # Answers of the reference: what is known, what the parent said, or anew.
    said = []
    monkeypatch.setattr(references, "read_answers", lambda path: said.append(path.name))
    answer = update_command._answer_as_reference
    assert answer(work._replace(comparison=None), None) == {}
    known = work.comparison._replace(reference=kept)
    assert answer(work._replace(comparison=known), None) is kept.right and not said
    answer(work, None)
    assert said == ["before"]
    for name in ("_prepare_evaluation", "measure_accuracies"):
        monkeypatch.setattr(update_command, name, lambda *given: said.append(given[1]))
    answer(work._replace(parent="an update of it"), None)  # the run itself, anew
    assert said[1:] == [str(copy / "run"), None, "reference"]


def test_flags_change_the_recipe_of_an_encoder_option_by_option(tmp_path):
    (tmp_path / "card.json").write_text("{}")
    recipe = lineage.make_recipe({"encoder": {"name": "vit"}, "augment": {"size": 8}})

    def changed(*arguments):
        options = update_plan.default_options()
        files.override(options, [f"--config.train.{word}" for word in arguments])
        changes = options.to_dict()["train"]
        return lineage.make_next_config(
            str(tmp_path), recipe, {"name": "digits"}, changes
        )

    made = changed("tuning.lora_rank=4", "method.strategy=pnr", "epochs=2")
    assert made["tuning"] == {"lora_rank": 4, "open_layers": 1}
    names = {"base": {"name": "simclr"}, "strategy": {"name": "pnr"}}
    assert made["method"] == recipe["method"] | names
    made = changed("method.base.temperature=0.1", "method.strategy.weight=2.0")
    assert made["method"]["base"] == {"name": "simclr", "temperature": 0.1}
    assert made["method"]["strategy"] == {"name": "cassle", "weight": 2.0}
    made = changed("tuning.lora_rank=4", "method.strategy=pnr", "epochs=2")
    assert made["epochs"] == 2 and made["augment"] == {"size": 8}
    recipe["method"]["strategy"] = {"name": "cassle", "weight": 2.0}
    found = changed("method.strategy=pnr")["method"]["strategy"]
    assert found == {"name": "pnr"}  # the options of another do not stay
    recipe["tuning"] = None  # of an encoder that has no adapters
    assert changed()["tuning"] is None
    assert changed("tuning.frozen_layers=1")["tuning"] == {"frozen_layers": 1}
    other = {"name": "step_decay", "milestones": [3]}  # without options of the recipe's
    words = "schedule.name=step_decay", "schedule.milestones=[3]"
    assert changed(*words)["schedule"] == other
    slower = changed("schedule.name=cosine", "schedule.end=1e-6")["schedule"]
    assert slower == {"name": "cosine", "per_epoch": False, "end": 1e-6}


def test_an_update_of_a_run_may_change_its_statistics_alone(run):
    name, own = str(run / "run"), lineage.read_run_config(str(run / "run"))

    def changed(before, **options):
        config, changes = {**own, "tuning": before}, {"tuning": options}
        return lineage.make_next_config(name, config, {"name": "digits"}, changes)

    for before in (None, {"statistics": "batch"}, {"frozen_layers": 1}, "decay"):
        kept = {"layer_decay": 0.75} if before == "decay" else before or {}
        found = changed(before, statistics="running")["tuning"]
        assert found == kept | {"statistics": "running"}
        assert changed(before, frozen_layers=kept.get("frozen_layers", 0))
        for options in ({"layer_decay": 0.5}, {"frozen_layers": 2}):
            with pytest.raises(Refused, match=r"config\.train\.tuning"):
                changed(before, **options)


def test_numbers_are_not_given_again(tmp_path):
    """Updates that a user deletes leave gaps; 10000 comes after 9999."""
    for number in ("0002", "9999", "10000"):
        folder = tmp_path / "updates" / number
        folder.mkdir(parents=True)
        verdict = {"accepted": number != "10000", "asked": {"data": number}}
        (folder / "update.json").write_text(json.dumps(verdict))
    names = [path.name for path in updates.list_updates(tmp_path)]
    assert names == ["0002", "9999", "10000"]
    assert updates.find_current(tmp_path).endswith("9999")
    assert lineage.choose_folder(tmp_path, {"data": "new"}).name == "10001"
    assert lineage.choose_folder(tmp_path, {"data": "10000"}).name == "10000"
    for number in ("9999", "10000"):
        shutil.rmtree(tmp_path / "updates" / number)
    assert lineage.choose_folder(tmp_path, {"data": "new"}).name == "0003"


@pytest.mark.parametrize("matrices", [{}, {"knn/all": [[None]]}])
def test_without_an_accuracy_no_limit_is_kept(matrices, tmp_path, monkeypatch):
    results = result_file.empty_results(1) | {"matrices": matrices, "scalars": [{}]}
    monkeypatch.setattr(transfer, "run_transfer", lambda *_, **__: results)
    work = types.SimpleNamespace(workdir=tmp_path)
    (tmp_path / "before").mkdir()

    def measure(made, stop):
        update_command.measure_accuracies(work, made, "before", stop)

    with pytest.raises(Refused, match="--test"):
        measure("judging", lambda: False)
    assert update_command.measure_accuracies(work, None, "before", None) == {}


def test_accuracies_at_their_limits():
    """What is allowed may be lost; that of the reference counts, if there is one."""

    def broken(change, reference=None, word=None, **limits):
        report = {
            "accuracy": {"a": {"before": 0.5, "after": 0.5 + change, "change": change}}
        }
        if reference is not None:
            pairs = {"reference": {"loss": reference}, "verdict": word}
            report["gate"] = {"matrices": {"a": pairs}}
        limits = update_plan.Limits(**{"accuracy_drop": 0.25} | limits)
        return len(update_verdict.list_broken_accuracy(report, limits))

    assert [broken(-0.25), broken(-0.3), broken(0.2)] == [0, 1, 0]
    assert [broken(-0.3, 0.25), broken(0.0, 0.26)] == [0, 1]
    careful = {"undecided": "keep the old", "word": gate.UNDECIDED}
    assert [broken(0, 0.25, **careful), broken(0, 0.26, **careful)] == [1, 1]
    assert broken(0, 0.25, **careful | {"word": gate.HARMLESS}) == 0
    assert [broken(0, accuracy=0.5), broken(0, accuracy=0.501)] == [0, 1]


def test_a_plan_says_all_that_is_asked_and_how_it_is_compared(run, monkeypatch):
    compared = {}
    monkeypatch.setattr(
        references, "plan_comparison", lambda *given, **named: compared.update(named)
    )
    careful = {"limits.undecided": "keep the old"}
    changes = {"neighbours": 7, "rows": 150, "index": 0.8, "average": "auto"}
    work = plan(run, **changes, **careful, **{"limits.confidence": 0.9})
    assert {name: work.asked[name] for name in changes} == changes
    assert work.asked["limits"]["confidence"] == 0.9
    assert work.asked["limits"]["undecided"] == "keep the old"
    assert compared == {"budget": pytest.approx(0.1), "on_trust": False} | {
        "chooses": True,
        "named": None,
        "by_bytes": True,
    }
    rows = np.sort(np.random.default_rng(0).permutation(1438)[:150])
    np.testing.assert_array_equal(work.sample[0], rows)
    fixed = {"evaluators": {}, "first_tasks": None, "start": str(run / "run")}
    assert {name: work.config[name] for name in fixed} == fixed
    assert work.config["scenario"]["num_tasks"] == 6
    work = plan(run, **careful, **{"limits.accuracy_drop": None})
    assert compared["on_trust"] and not compared["chooses"]
    assert compared["budget"] == pytest.approx(0.05)
    select = str(run / "test.npz")
    other = plan(run, average="auto", select=select, becomes_reference=True)
    assert other.asked["reference"] == {"run": None, "becomes": True}
    assert other.asked["select"]["data"]["path"] == select and not compared["chooses"]
    short = {"train.epochs": 1, "train.schedule": {"name": "warmup_cosine"}}
    assert plan(run, **short).config["schedule"]["warmup_epochs"] == 0
    # Options that older updates do not have are left out where they are the default.
    assert {*work.asked["limits"]} == {*vars(update_plan.Limits())} - {"confidence"}
    for neighbours, fits in ((99, True), (100, False)):
        if fits:
            plan(run, rows=200, neighbours=neighbours, test=False)
        else:
            with pytest.raises(ValueError, match="config.rows=200"):
                plan(run, rows=200, neighbours=neighbours, test=False)


def test_a_batch_shrinks_where_images_do_not_fill_it(capsys):
    config = {"batch_size": 48}
    assert update_plan._shrink_batch(config, 48) == config
    assert update_plan._shrink_batch(config, 47)["batch_size"] < 48
    assert "47" in capsys.readouterr().out


@pytest.mark.parametrize(("good", "share"), [(0.75, 0.75), (1.0, 1.0), (0.0, 0.25)])
def test_the_largest_share_that_keeps_the_limits_is_chosen(monkeypatch, good, share):
    state = types.SimpleNamespace(
        params={}, stats={}, replace=lambda **options: options
    )
    made = types.SimpleNamespace(state=state, source={"path": "p"})
    made._replace = lambda **options: options
    monkeypatch.setattr(update_command, "_prepare_evaluation", lambda *given: made)

    def measure(work, evaluation, name, stop):
        if name == "before":
            return {"a": 0.5}
        assert evaluation["source"] == {"path": "p", "average": float(name[8:])}
        assert float(evaluation["state"]["params"]["encoder"]["x"]) == float(name[8:])
        return {"a": 0.48 if float(name[8:]) <= good else 0.47}

    monkeypatch.setattr(update_command, "_measure_choice", measure)
    monkeypatch.setattr(update_command.jax, "device_put", lambda x, places: x)
    options = types.SimpleNamespace(average="auto")
    work = types.SimpleNamespace(
        options=options, limits=update_plan.Limits(accuracy_drop=0.0201), parent="p",
        select=None, test={}, workdir="w",
    )  # fmt: skip
    found = update_command._choose_share(work, lambda x: ({"x": x}, {}), None)
    shares = [x for x in (1.0, 0.75, 0.5, 0.25) if x >= share]
    assert found["share"] == share and [*found["tried"]] == [str(x) for x in shares]
    options.average = 0.5
    assert update_command._choose_share(work, None, None) == {"share": 0.5}


@pytest.mark.parametrize("accepted", [True, False])
def test_what_is_rolled_back_leaves_no_encoder(tmp_path, accepted):
    (tmp_path / "checkpoints").mkdir()
    found = lineage.write_report(tmp_path, {"accepted": accepted}, b"a map")
    assert json.loads((tmp_path / "update.json").read_text()) == found
    assert found == {"accepted": accepted, "run": str(tmp_path)}
    for path in (tmp_path / "checkpoints", tmp_path / maps.FILE):
        assert path.exists() == accepted


def test_an_encoder_without_a_run_is_trained_so_that_it_keeps_what_it_knows():
    adapters = {"lora_rank": 16, "open_layers": 1}
    for name, tuning in (("vit", adapters), ("resnet", None), ("convnext", None)):
        recipe = lineage.make_recipe({"encoder": {"name": name}})
        assert recipe["tuning"] == tuning and recipe["batch_size"] == 256


@pytest.mark.parametrize(
    ("encoder", "before", "after"),
    [
        ("resnet", None, {"statistics": "running"}),
        ("conv_net", "decay", {"layer_decay": 0.75, "statistics": "running"}),
        ("resnet", {"statistics": "batch"}, {"statistics": "batch"}),
        ("vit", {"lora_rank": 16}, {"lora_rank": 16}),
        ("convnext", None, None),
    ],
)
def test_an_update_keeps_the_statistics_of_old_images(encoder, before, after, capsys):
    config = {"encoder": {"name": encoder}, "tuning": before}
    found = update_plan._keep_statistics(config)
    assert found == config | {"tuning": after}
    told = "config.train.tuning.statistics=running" in capsys.readouterr().out
    assert told == (before != after)


def test_ids_of_images_are_their_paths_within_the_set(tmp_path):
    names = [f"{tmp_path}/a/1.png", "/elsewhere/2.png", f"{tmp_path}/3.png"]
    reader = types.SimpleNamespace(name=names.__getitem__)
    section = {"path": str(tmp_path)}
    found = served.list_ids(
        types.SimpleNamespace(reader=reader), np.array([2, 0, 1]), section
    )
    assert found == ["3.png", "a/1.png", "/elsewhere/2.png"]
    assert served.list_ids(
        types.SimpleNamespace(reader=None), np.array([2]), section
    ) == ["2"]


@pytest.mark.parametrize(
    ("accepted", "index"), [(True, "adapt"), (True, "keep"), (False, "adapt")]
)
def test_files_for_an_index_are_left_by_what_is_accepted(monkeypatch, accepted, index):
    """An adapter maps queries to the old encoder's index, where that is the verdict."""
    between = types.SimpleNamespace(source="the old", target="the new")
    compared, kits = served.Comparison({"rows": 9}, {}, "a map", between), []
    tasks = {"cost": {"per_task": [{"steps": 1}, {"steps": 2}]}}
    names = "_prepare_evaluation", "measure_accuracies", "_answer_as_reference"
    for module, name, value in (
        *((update_command, name, {}) for name in (*names, "_compare_answers")),
        (served, "embed_old", 1), (served, "compare", compared),
        (finish, "run_job", tasks), (update_verdict, "decide_index", index),
        (update_verdict, "list_broken", [] if accepted else ["a limit"]),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *given, value=value, **options: value)
    monkeypatch.setattr(served, "write_kit", lambda *given: kits.append(given[2]))
    monkeypatch.setattr(maps, "pack_map", lambda *given: given)
    monkeypatch.setattr(lineage, "write_report", lambda folder, *given: given)
    options = types.SimpleNamespace(average=None, index=0.9, neighbours=7)
    work = types.SimpleNamespace(
        workdir="w", parent="p", asked={}, options=options, limits=None
    )
    ready = types.SimpleNamespace(job=None, evaluation=None)
    report, adapter = update_command._carry_out(work, ready, None)
    assert report["accepted"] == accepted and report["cost"] == {"steps": 2}
    assert kits == [7] * accepted
    maps_queries = accepted and index == "adapt"
    assert adapter == (("a map", {"target": "the old"}) if maps_queries else None)


def test_old_images_are_those_of_the_index_in_use(tmp_path, monkeypatch):
    """An adapter of the parent maps them to the space of an earlier encoder."""
    monkeypatch.setattr(maps, "map_to_index", lambda folder, rows: 2 * rows)
    monkeypatch.setattr(maps, "read_map", lambda path: (None, {"target": "earlier"}))
    monkeypatch.setattr(kit, "name_encoder", lambda source: source["path"])
    embedder = types.SimpleNamespace(embed=lambda x: x + 1, source={"path": "parent"})
    work = types.SimpleNamespace(parent=tmp_path, sample=(np.arange(3), embedder))
    assert served.embed_old(work).encoder == "parent"
    (tmp_path / maps.FILE).touch()
    found = served.embed_old(work)
    assert found.encoder == "earlier" and found.rows.tolist() == [2, 4, 6]


@pytest.mark.parametrize("label", [[0, 1, 1], [0, 1, -1], [1, 1, 1]])
def test_an_index_is_compared_by_labels_if_every_image_has_one(monkeypatch, label):
    kinds = {"affine": 0.9, "orthogonal": 0.5}  # the best is the first
    fits = [
        types.SimpleNamespace(kind=k, recall=x, options=x) for k, x in kinds.items()
    ]
    measured, asked = types.SimpleNamespace(back=fits, ways={}), []
    examples = types.SimpleNamespace(label=np.array(label), reader=None)
    embedder = build.Embedder(3, lambda rows: np.eye(3)[rows], {}, examples)
    for module, name, replaced in (
        (build, "make_embedder", lambda config: embedder),
        (kit, "name_encoder", lambda source: "new"),
        (kit, "fit_kit", lambda *_, **x: asked.append(x["label"]) or ("kit", measured)),
        (drift, "measure_drift", lambda *_, k: {"overlap": 0.25 * k}),
        (maps, "fit", lambda after, before, *how: how),
    ):
        monkeypatch.setattr(module, name, replaced)
    options, sample = types.SimpleNamespace(neighbours=2), (np.arange(3), None)
    work = types.SimpleNamespace(sample=sample, options=options, old={"data": {}})
    found = served.compare(work, served.OldImages(np.eye(3), "old"), "run")
    assert (asked[0] is not None) == (label == [0, 1, 1])
    assert found.adapter == ("affine", 0.9) and found.kit == "kit"
    assert found.drift == {"overlap": 0.5, "adapters": kinds, "rows": 3}
