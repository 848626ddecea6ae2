"""Configs: overrides, wrong keys and types, refusals before anything compiles."""

import functools
import json
import pathlib
import re
import types

import chex
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from PIL import Image

from helpers import config_files, eval_toy, run_directories, toy
from jaxcl import core, sharding
from jaxcl.config import build, checks, resolve, run_config, sections, transfer_config
from jaxcl.data import stream
from jaxcl.evals import tsne
from jaxcl.methods import two_view
from jaxcl.run import (
    cost,
    evaluation,
    finish,
    job,
    log_file,
    metrics_log,
    result_file,
    train,
)

CONFIGS = sorted(pathlib.Path(__file__).parents[1].joinpath("configs").glob("*.py"))


def check_refused(tmp_path, match, **changes):
    with pytest.raises((ValueError, OSError), match=match):
        build.build(toy.config(**changes), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    "changes, match",
    [
        (
            {"method.temprature": 0.1},
            r"config\.method\.temprature.*mean base.temperature",
        ),
        ({"log_every": 0}, r"config\.log_every=0"),
        ({"method.base": "mocov2"}, r"config\.method\.base='mocov2'.*mocov2plus"),
        ({"data": {"name": "npz"}}, r"config\.data\.path: missing"),
        ({"scenario.name": "classes"}, r"'classes'.*class"),
        ({"scenario.num_tasks": 11}, r"11.*10 classes"),
        ({"encoder.depth": 18}, r"config\.encoder\.depth.*width"),
        (
            {"scenario.evaluation": "none", "evaluators": {"b": {"name": "linear"}}},
            r"^config\.evaluators\.b: ",
        ),
        ({"batchsize": 3}, r"config\.batchsize.*batch_size"),
        ({"batch_size": 4000}, r"4000.*task 0"),
        ({"batch_size": 50, "devices": 8}, r"config\.batch_size=50.*8 devices"),
        (
            {"steps_per_call": "task", "device_bytes": 0},
            r"config\.steps_per_call='task'",
        ),
        ({"augment.size": 12, "evaluators": {"knn": {}}}, r"8.*12|12.*8"),
        ({"augment.mean": (0.1, 0.2)}, r"mean"),
        ({"method.queue_size": 40}, r"config\.method\.base\.queue_size=40"),
    ],
)
def test_refuses_and_names_the_field(tmp_path, changes, match):
    check_refused(tmp_path, match, **changes)


def test_first_task_has_a_schedule_of_its_own():
    raw = toy.config().to_dict() | {"epochs": (2, 4), "scale_lr": False}
    raw["schedule"] = {"name": "cosine"}
    make_parts, _ = sections.read_parts(sections.read_top(resolve.resolve(raw)))
    parts = make_parts(num_classes=10)
    rates = [float(parts.lr(jnp.float32(0.3), jnp.int32(task))) for task in (0, 1, 2)]
    np.testing.assert_allclose(rates[0], raw["optimizer"]["lr"])
    later = rates[0] * (0.5 + 0.25 * 2**0.5)
    np.testing.assert_allclose(rates[1:], [later, later], rtol=1e-6)


@pytest.mark.parametrize(
    "section",
    [
        "data",
        "scenario",
        "augment",
        "encoder",
        "method",
        "optimizer",
        "schedule",
        "evaluators",
    ],
)
def test_every_section_is_needed(tmp_path, section):
    config = toy.config()
    del config[section]
    with pytest.raises(ValueError, match=rf"^config\.{section}"):
        build.build(config, tmp_path / "run")


def image_folder(root, size=(9, 9), classes=3, count=20):
    for label in range(classes):
        folder = root / "train" / f"class{label}"
        folder.mkdir(parents=True)
        for i in range(count):
            pixels = np.full((*size, 3), 60 * label + i, np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return {"name": "image_folder", "path": str(root), "size": 8, "resident": True}


def test_bad_images_are_named(tmp_path):
    data = image_folder(tmp_path / "data")
    data.pop("size")
    odd = tmp_path / "data" / "train" / "class1" / "3.png"
    Image.fromarray(np.zeros((5, 7, 3), np.uint8)).save(odd)
    check_refused(tmp_path, r"class1/3\.png.*7", data=data)
    odd.write_bytes(b"not an image")
    check_refused(tmp_path, r"class1/3\.png", data=data | {"size": 8})
    (tmp_path / "data" / "train" / "nothing").mkdir()
    check_refused(tmp_path, r"nothing", data=data | {"size": 8})


def test_another_config_is_refused_naming_the_fields(tmp_path):
    build.build(toy.config(), tmp_path)
    build.build(toy.config(), tmp_path)  # the same one is welcome
    (tmp_path / log_file.FILE).write_text('{"step": 3, "task": 0}\n')
    match = r"config\.method\.base\.temperature: absent -> 0\.1\s+config\.seed: .*-> 3"
    with pytest.raises(ValueError, match=match):
        build.build(toy.config(**{"seed": 3, "method.temperature": 0.1}), tmp_path)


def test_another_config_is_refused_before_data_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(build.jobs, "make_job", lambda *_: 1 / 0)
    begun = toy.config().to_dict() | {"resident": True, "decoder": "cv2"}
    (tmp_path / "config.json").write_text(json.dumps(begun))
    (tmp_path / log_file.FILE).write_text('{"step": 3, "task": 0}\n')
    with pytest.raises(ZeroDivisionError):
        build.build(toy.config(), tmp_path)
    for changes in ({"seed": 3}, {"seed": 3, "seeds": 2}):
        with pytest.raises(ValueError, match=r"config\.seed"):
            build.build(toy.config(**changes), tmp_path)


def test_divergence_stops_names_the_step_and_keeps_the_last_good_one(tmp_path):
    changes = {"optimizer.lr": 1e30, "save_every": 1, "batch_size": 48}
    with pytest.raises(metrics_log.Diverged, match=r"at step \d+"):
        train.run_tasks(toy.job(tmp_path, tasks=1, **changes), tmp_path)
    saved = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert saved  # the steps before it went wrong


# Those of ICL and of GraphCL, which a kNN does not judge, run in tests of their own.
PAPERS = [
    path
    for path in CONFIGS
    if path.stem not in ("quickstart", "quickstart_pnr", "transfer", "graphcl")
    and not path.stem.startswith("icl_")
]


# DUEL has one stream, and what is to be kept fresh is first trained on all rows.
ONE_TASK = ("duel_", "keep_fresh")


@pytest.mark.slow
@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_debug_config_trains(path, tmp_path):
    config = config_files.load(path).get_config("debug")
    config.update(devices=1, plots=False, plasticity=False, progress=False)
    config.evaluators = ml_collections.ConfigDict({"knn": {"k": 5}})
    work = build.build(config, tmp_path)
    results = train.run_tasks(work, tmp_path)
    rows = np.array(results["matrices"]["knn/class_incremental"], float)
    count = len(work.stream.tasks)
    assert count == (1 if path.stem.startswith(ONE_TASK) else 2)
    assert rows.shape == (count, count) and np.isfinite(rows).all()


def test_input_comes_from_the_device_and_steps_move_nothing(tmp_path):
    """The step's arguments are on the device already, and so is what it returns."""
    work = toy.job(tmp_path, tasks=1)
    step, resident = job.compile_step(work), job.resident(work)
    state, task = job.initial_state(work), work.stream.tasks[0]
    compiled = None
    for _, batches, number in job.feed_batches(work, task.train, 0, 0):
        arguments = (state, resident, batches, number)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(arguments))
        if compiled is None:
            compiled = step.lower(*arguments).compile()
            assert not re.search(r"outfeed|infeed|host_callback", compiled.as_text())
        with jax.transfer_guard("disallow"):
            state, metrics = step(*arguments)
        assert all(isinstance(x, jax.Array) for x in metrics.values())
    assert int(state.step) == 12


def test_steps_in_one_call_are_the_steps_one_by_one(tmp_path):
    """Same rows, same parameters; a save that falls inside a call cuts it short."""
    ends = []
    for k in (1, 4):
        work = toy.job(tmp_path / str(k), tasks=1, steps_per_call=k, save_every=6)
        counts, seen = [], []
        for count, batches, _ in job.feed_batches(
            work, work.stream.tasks[0].train, 0, 0
        ):
            counts.append(count)
            seen += [np.asarray(batches["index"])[i] for i in range(count)]
        train.run_tasks(work, tmp_path / str(k))
        state = toy.saved(work, tmp_path / str(k)).state
        ends.append((np.stack(seen), state, log_file.read_rows(tmp_path / str(k))))
    assert counts == [4, 2, 4, 2]
    np.testing.assert_array_equal(ends[0][0], ends[1][0])
    chex.assert_trees_all_close(ends[0][1].params, ends[1][1].params, rtol=1e-4)
    assert [r["step"] for r in ends[1][2]] == [*range(1, 13), 12]


STREAM = toy.ONLINE | {"method": {"name": "er"}, "encoder": {"name": "mlp"}}
STREAM |= {"batch_size": 10, "epochs": 4, "scenario.num_tasks": 2, "log_every": 50}


def calls_of(tmp_path, **changes):
    """How many steps each call made, the last state, and what was logged."""
    work, counts = toy.job(tmp_path, **STREAM, **changes), []
    compiled = job.compile_step(work)

    def step(state, resident, batches, count):
        counts.append(int(count))
        return compiled(state, resident, batches, count)

    train.run_tasks(work, tmp_path, step=step)
    state = toy.saved(work, tmp_path).state
    return counts, state, [row for row in log_file.read_rows(tmp_path) if "loss" in row]


def test_a_whole_task_is_one_call(tmp_path):
    """Bit for bit the steps that shorter calls make, replay and memory included."""
    short, ends, rows = calls_of(tmp_path / "2", steps_per_call=2)
    whole, state, logged = calls_of(tmp_path / "task", steps_per_call="task")
    assert len(whole) == 2 and sum(whole) == sum(short) > 500
    toy.check_same_bits(state, ends)
    assert [row["loss"] for row in logged] == [row["loss"] for row in rows]
    # The steps of a call come together: none took no time, so none is infinitely fast.
    assert len({row["time"]["images_per_second"] for row in logged}) == 2
    cut, state, _ = calls_of(tmp_path / "cut", steps_per_call="task", save_every=100)
    assert max(cut) == 100 and sum(cut) == sum(whole)
    toy.check_same_bits(state, ends)


@pytest.mark.parametrize(
    "changes, steps",
    [
        ({}, 24),
        ({"eval_every": 7, "save_every": 9}, 7),
        ({"eval_every": 9, "save_every": 7}, 7),
        ({"eval_epochs": 1}, 12),
        ({"patience": 3}, 12),
        ({"epochs": (1, 3)}, 27),
    ],
)
def test_a_call_of_a_task_ends_where_something_is_to_be_done(changes, steps, tmp_path):
    changes = {"steps_per_call": "task", "scenario.num_tasks": 3, **changes}
    work = run_directories.untried(tmp_path, **changes)
    assert work.loop.steps_per_call == steps


def test_evaluating_every_few_steps_changes_nothing_but_the_rows(tmp_path):
    ends = []
    for every in (0, 5):
        changes = {"eval_every": every, "evaluators": {"knn": {"k": 5}}}
        work = toy.job(tmp_path / str(every), tasks=1, **changes)
        train.run_tasks(work, tmp_path / str(every))
        ends.append(toy.saved(work, tmp_path / str(every)).state)
    toy.check_same_bits(*ends)
    rows = log_file.read_rows(tmp_path / "5")
    assert [row["step"] for row in rows if "eval" in row] == [5, 10, 12]
    losses = [row["step"] for row in rows if "loss" in row]
    assert losses == list(range(1, 13))


def test_entries_have_names_of_their_own_and_may_run_at_the_end_alone(
    tmp_path, monkeypatch
):
    """Two of one evaluator, and what waits for the end of the last task."""
    monkeypatch.setattr(tsne, "project", lambda x, **_: x[:, :2])  # t-SNE is slow
    evaluators = {
        "knn": {"k": 5},
        "far": {"name": "knn", "k": 50},
        "late": {"name": "knn", "k": 5, "last_only": True},
        "tsne": {"max_points": 20},
        "all": {"name": "tsne", "max_points": 20, "last_only": False},
    }
    changes = {"scenario.num_tasks": 2, "epochs": 1, "eval_every": 6, "plots": True}
    changes |= {"evaluate_untrained": True, "evaluators": evaluators}
    work = toy.job(tmp_path, **changes)
    assert set(work.evaluation.evaluators) == {"knn", "far", "late"}
    results = finish.run_job(work, tmp_path)
    found = {name: result_file.matrix(results, name) for name in results["matrices"]}
    rows = ("class_incremental", "task_aware")
    assert set(found) == {
        f"{key}/{row}" for key in work.evaluation.evaluators for row in rows
    }
    late, knn = found["late/class_incremental"], found["knn/class_incremental"]
    assert np.isnan(late[0]).all() and not np.isnan(knn).any()
    np.testing.assert_array_equal(late[1], knn[1])
    assert (found["far/class_incremental"] != knn).any()
    assert set(results["untrained"]) == {n for n in found if not n.startswith("late")}
    named = [set(row["eval"]) for row in log_file.read_rows(tmp_path) if "eval" in row]
    assert len(named) > 4  # untrained, within the tasks, and after each
    late = {"late/accuracy", *(f"late/{row}" for row in rows)}
    assert not any(late & names for names in named[:-1]) and late <= named[-1]
    measures = result_file.summary(results)["late/class_incremental"]
    assert measures["average_accuracy"] == pytest.approx(knn[1].mean())
    assert measures["average_accuracy_per_task"][0] is None
    assert measures["forgetting"] is None and measures["stability"] is None
    drawn = tmp_path / "plots"
    pictures = {str(p.relative_to(drawn)) for p in drawn.rglob("tsne*.png")}
    assert pictures == {"tsne_task2.png", "all/tsne_task1.png", "all/tsne_task2.png"}


@pytest.mark.parametrize("devices, steps_per_call", [(1, 1), (8, 4)])
def test_the_step_is_traced_once(devices, steps_per_call, tmp_path, monkeypatch):
    """To check the config and to compile Python runs it once; again to count FLOPs.

    FLOPs are those of one task's program, in which no branch is open.
    """
    made, traced = two_view.make, []

    @functools.wraps(made)
    def make(parts, **options):
        method = made(parts, **options)

        def step(state, batch):
            traced.append(batch)
            return method.step(state, batch)

        return method._replace(step=step)

    monkeypatch.setattr(two_view, "make", make)
    work = toy.job(
        tmp_path, devices=devices, steps_per_call=steps_per_call, first_tasks=1
    )
    assert len(traced) == 1
    counts = []
    count = cost.count_flops

    def count_after(*given, **named):
        counts.append(len(traced))
        return count(*given, **named)

    monkeypatch.setattr(cost, "count_flops", count_after)
    results = train.run_tasks(work, tmp_path)
    assert results["cost"]["flops_per_step"]["first_task"]
    assert counts == [1] and len(traced) <= 2  # a count may be kept


def test_auto_is_what_the_devices_want_and_a_run_keeps_it(tmp_path):
    def began(folder, **changes):
        made = run_directories.untried(tmp_path / folder, **changes)
        written = json.loads((tmp_path / folder / "config.json").read_text())
        assert made.config.get("precision") == written.get("precision")
        return written.get("precision")

    assert began("cpu", precision="auto") == "float32"
    with sharding.compile_target(platform="tpu"):
        assert began("tpu", precision="auto") == "bfloat16"
        assert began("cpu", precision="auto") == "float32"
    assert began("tpu", precision="auto") == "bfloat16"
    (tmp_path / "tpu" / log_file.FILE).write_text('{"step": 3, "task": 0}\n')
    with pytest.raises(ValueError, match="config.precision"):
        began("tpu", precision="float32")


def test_missing_data_directory_is_named(tmp_path):
    for name in ("npz", "arrays", "image_folder", "tfds"):
        where = str(tmp_path / "nowhere")
        check_refused(tmp_path, "nowhere", data={"name": name, "path": where})


def test_unwritable_run_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        build.build(toy.config(), tmp_path / "file" / "run")


def test_an_encoder_to_start_from_takes_images_of_as_many_channels(monkeypatch):
    folder = checks.encoder_folder
    monkeypatch.setattr(folder, "exists_at", lambda path: path == "encoder")
    card = {"input": {"channels": 3}}
    monkeypatch.setattr(folder, "read_card", lambda path: card)
    label = np.zeros(2, np.int32)
    images = {n: np.zeros((2, 4, 4, n), np.uint8) for n in (1, 3)}
    grey, colour = (stream.Examples(label, label, images[n]) for n in (1, 3))
    read = eval_toy.streamed(grey)
    graphs = stream.Examples(label, label, graphs=object())

    def check(start, train, scenario="class"):
        top = types.SimpleNamespace(start=start, scenario={"name": scenario})
        checks.check_start(top, {}, train)

    check("encoder", colour)
    check(None, grey)
    for start, images, scenario, words in (
        ("encoder", grey, "class", "config.start='encoder'.* 3 .* 1"),
        ("encoder", read, "class", "config.start='encoder'.* 3 .* 1"),
        ("encoder", graphs, "class", "config.start='encoder'"),
        ("encoder", colour, "after", "config.scenario.name='after'"),
        (None, colour, "after", "config.scenario.name='after'"),
        ("nowhere", colour, "after", "config.start='nowhere'"),
    ):
        with pytest.raises(ValueError, match=words):
            check(start, images, scenario)


# Option -> whether another value keeps a run from being a start, the run before an
# update, a source of FT_i, and a source of FT_i of a method with options of its own.
OF_A_RUN = {
    "encoder": "1111", "augment": "1111", "precision": "1111", "method": "0110",
    "seed": "1011", "data": "1011", "scenario": "1011", "batch_size": "1011",
    "epochs": "0011", "optimizer": "0011", "schedule": "0011", "scale_lr": "0011",
    "evaluators": "0011", "replay": "0011", "workers": "0000", "tuning": "0000",
}  # fmt: skip


@pytest.mark.parametrize("option", OF_A_RUN)
def test_a_run_of_other_options_is_refused_where_they_matter(option, tmp_path):
    method = {"name": "two_view", "base": {"name": "simclr"}, "strategy": {"name": "x"}}
    config = dict.fromkeys(OF_A_RUN, 1) | {"method": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "results.json").write_text(json.dumps({"finetune": {"a": [1]}}))
    other = {"method": method | {"strategy": {"name": "y"}}}.get(option, 2)

    def start(scenario, plain):
        top = types.SimpleNamespace(start=str(tmp_path), scenario={"name": scenario})
        checks.check_start(top, plain, None)

    def single(options, plain):
        method = types.SimpleNamespace(single_task_options=options)
        found = checks.read_single_task_results(str(tmp_path), plain, method)
        assert found == {"a": [1]}

    refused = ""
    for check in (
        functools.partial(start, "class"),
        functools.partial(start, "after"),
        functools.partial(single, {}),
        functools.partial(single, {"x": 1}),
    ):
        check(config)
        try:
            check(config | {option: other})
            refused += "0"
        except ValueError as error:
            assert f"config.{option}" in str(error)
            refused += "1"
    assert refused == OF_A_RUN[option]
    if option != "method":  # the base counts for methods with options of their own
        return
    base = method | {"base": {"name": "byol"}}
    with pytest.raises(ValueError, match="base"):
        single({"x": 1}, config | {"method": base})


def test_a_run_resumes_with_other_machines_and_no_other_options(tmp_path):
    names = [*run_config.MACHINE, "epochs", "method", "precision", "seed"]
    config = dict.fromkeys(names, 1)
    assert not run_config.check_config(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in names:
        other = config | {name: 2}
        may = name in {*names[:-4]}
        assert may == (run_config._list_changes(tmp_path, other, ()) == [])
        if may or name == "seed":
            aside = () if may else ("seed",)
            assert run_config.check_config(tmp_path, other, aside)
        else:
            with pytest.raises(run_config.Differs, match=f"config.{name}: 1 -> 2"):
                run_config.check_config(tmp_path, other)
    assert {*run_config.MACHINE} == {
        *("devices", "mesh", "device_bytes", "steps_per_call", "compile_cache"),
        *("workers", "progress", "loggers", "duplicates", "seeds"),
    }
    assert len(run_config.options.differences({"a": None}, {})) == 1
    # Flags that resolved.json does not have yet are no difference.
    for flags, fits in (({}, True), ({"jax_enable_x64": "other"}, False)):
        resolved = {run_config.FLAGS: flags}
        (tmp_path / run_config.options.RESOLVED).write_text(json.dumps(resolved))
        if fits:
            assert run_config.check_config(tmp_path, config)
        else:
            with pytest.raises(run_config.Differs, match="jax_enable_x64"):
                run_config.check_config(tmp_path, config)
    # A directory without a step is cleared for another config, never for its own.
    for steps, config_, cleared in (
        ([0], config, False),
        ([0, 3], 2, False),
        ([0], 2, True),
    ):
        rows = "".join(f'{{"step": {step}, "task": 0}}\n' for step in steps)
        (tmp_path / log_file.FILE).write_text(rows)
        asked = config_ if config_ is config else config | {"epochs": 2}
        assert run_config.clear_unstarted(tmp_path, asked) == cleared
        assert (tmp_path / "config.json").exists() != cleared


def test_entries_are_made_as_they_ask(monkeypatch, tmp_path):
    """Pictures have folders by key; the entry, or the evaluator, says when it runs."""

    def make_late(parts, *, directory, size: int = 2):
        def evaluate(state, task):
            return core.Result({}, {"at": str(directory)})

        return core.Evaluator(evaluate, last_only=True)

    def make_now(parts, *, size: int = 2):
        return lambda state, task: core.Result({"row": [size]}, {"a": np.nan})

    modules = {"late": make_late, "now": make_now}
    monkeypatch.setattr(
        evaluation.lookup,
        "find_module",
        lambda package, name, where: types.SimpleNamespace(make=modules[name]),
    )
    tasks = types.SimpleNamespace(evaluation=None, tasks=range(2))
    section = {
        "late": {}, "other": {"name": "late", "last_only": False},
        "now": {"size": 3},
        "end": {"name": "now", "last_only": True},
        "none": {"name": "now", "skip": True},
    }  # fmt: skip
    parts = types.SimpleNamespace(stream=tasks)
    for plots in (True, False):
        made = evaluation.make(section, parts, tmp_path, plots=plots)
        assert {*made.evaluators} == {"now", "end"}
        assert {*made.pictures} == ({"late", "other"} if plots else set())
    made = evaluation.make(section, parts, tmp_path, plots=True)
    late = [
        x
        for x in made.evaluators
        if isinstance(made.evaluators[x], evaluation.AtTheEnd)
    ]
    assert late == ["end"] and isinstance(made.pictures["late"], evaluation.AtTheEnd)
    folders = [
        x.evaluate(0, 0) if hasattr(x, "evaluate") else x(0, 0)
        for x in made.pictures.values()
    ]
    assert [x.scalars["at"] for x in folders] == [
        str(tmp_path / x) for x in ("plots", "plots/other")
    ]
    # Results have the names of their entries; nan is a warning, once.
    logged = []
    recorder = types.SimpleNamespace(
        log=lambda *given, **named: logged.append((given, named))
    )
    state = types.SimpleNamespace(step=4, task_start=0, task_steps=5)
    found = evaluation.run_evaluators(made.evaluators, state, 1, recorder)
    assert found.rows == {"now/row": [3]} and {*found.scalars} == {"now/a"}
    (words,) = found.warnings
    assert "config.evaluators.now" in words and "nan" in words
    (((step, task), named),) = logged
    assert (step, task, {*named["eval"]}) == (4, 1, {"now/row", "now/a"})
    told = core.Result({}, {"a": np.nan}, ("a warning",))
    assert evaluation._warn_of_nan(told) is told


def test_a_config_that_evaluates_sees_images_as_the_run_did():
    augment = {"size": 8, "resize": 9, "mean": (0.5,), "name": "images"}
    made = transfer_config.make_config({"name": "x"}, "test", {"augment": augment})
    assert made["augment"] == {"size": 8, "resize": 9} and made["evaluators"] == {}
    assert made["scenario"] == {"name": "joint", "evaluation": "test"}
    whole = transfer_config.add_checkpoint(made, pathlib.Path("run"))
    assert whole.checkpoint == "run" and whole.data.name == "x"


def test_a_start_brings_its_network_and_moments_and_keeps_how_it_runs(monkeypatch):
    folder = resolve.encoder_folder
    theirs = {
        "encoder": {"name": "vit", "width": 8},
        "augment": {"mean": 1, "std": 2, "size": 3},
    }
    monkeypatch.setattr(folder, "exists_at", lambda path: path == "there")
    monkeypatch.setattr(folder, "as_config", lambda path: theirs)
    own = {"name": "vit", "drop_path": 0.1, "remat": True, "width": 4}
    raw = {"start": "there", "encoder": own, "augment": {"size": 5, "std": 0}}
    found = resolve.fill_from_start(raw)
    assert found["encoder"] == {
        "name": "vit",
        "width": 8,
        "drop_path": 0.1,
        "remat": True,
    }
    assert found["augment"] == {"size": 5, "mean": 1, "std": 2}
    other = resolve.fill_from_start(raw | {"encoder": own | {"name": "resnet"}})
    assert other["encoder"] == theirs["encoder"]
    assert resolve.fill_from_start(raw | {"start": None})["encoder"] == own


def test_a_small_view_of_images_is_told():
    assert not checks._describe_small_view({"size": 71, "resize": 100})
    told = checks._describe_small_view({"size": 70, "resize": 100})
    assert "49%" in told and "resize=80" in told
    assert not checks._describe_small_view({"size": 70, "resize": None})


@pytest.mark.parametrize("asked", [None, True, False])
def test_an_evaluator_waits_for_the_end_if_it_is_asked_to(asked):
    parts = eval_toy.parts_of(embed=eval_toy.embed)
    section = {"name": "knn", "last_only": asked}
    made = evaluation.make({"a": section}, parts, None).evaluators["a"]
    assert isinstance(made, evaluation.AtTheEnd) == bool(asked)
    assert not asked or made.last == len(parts.stream.tasks) - 1
    late = evaluation.AtTheEnd(None, last=2)
    for step, task, due in ((5, 2, True), (4, 2, False), (5, 1, False)):
        state = types.SimpleNamespace(step=step + 10, task_start=10, task_steps=5)
        assert late.is_due(state, task) == due


def test_files_are_cropped_as_images_in_memory():
    how = {"scale": (0.3, 0.7), "ratio": (0.9, 1.6), "interpolation": "bilinear"}
    changes = {f"augment.{name}": value for name, value in how.items()}
    top = sections.read_top(resolve.resolve(toy.config(**changes).to_dict()))
    crop = sections.read_parts(top)[1].crop
    assert {name: getattr(crop, name) for name in how} == how and crop.size == 8


@pytest.mark.parametrize("asked", [None, 1, 2, "task"])
def test_batches_of_graphs_are_a_call_each(asked, tmp_path):
    changes = {
        "data": {"name": "rings_and_trees"},
        "scenario": {"name": "growth", "evaluation": "none"},
        "augment": {"name": "graphs"},
        "encoder": {"name": "gcn", "width": 4, "layers": 1},
        "method": {"name": "icl"},
        "steps_per_call": asked,
    }
    if asked in (None, 1):
        work = run_directories.untried(tmp_path, **changes)
        assert work.loop.steps_per_call == 1 and work.data.graphs
        return
    with pytest.raises(ValueError, match="config.steps_per_call"):
        run_directories.untried(tmp_path, **changes)
