"""Each script of benchmarks/ runs in small, and its numbers are finite."""

import importlib
import json
import pathlib
import re
import shlex

import jax
import numpy as np
import pytest

from helpers import config_files
from jaxcl import core, optim
from jaxcl.config import resolve, sections
from jaxcl.data.sources import by_name
from jaxcl.methods.two_view import bases

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
# Arguments of a run that takes seconds, one line for each script and subcommand.
RUNS = {
    "steps": "cclis_cifar10 pnr_cifar100 --width=4 --size=16 --batch=16 --windows=1"
    " --steps=1 --override encoder.depth=10",
    "steps-peer": "er_ace_cifar10:mir --peer --width=4 --batch=4 --windows=1 --steps=1"
    " --override replay.per_class=2",
    "input": "--decoders pillow --images=4 --batch=2 --repeats=1 --threads 2",
    "input-bucket": "--decoders pillow --images=4 --batch=2 --repeats=1 --threads 2"
    " --bucket --latency=0",
    "experiments": "--tiny --rows replay_mnist --repeats=0",
    "old_index": "--streams digits --seeds 0 --epochs=1",
    "gpu_quarter_hour": "--tiny --stages er_ace input",
}


@pytest.fixture
def load(monkeypatch):
    for folder in (BENCHMARKS / "trials", BENCHMARKS):
        monkeypatch.syspath_prepend(str(folder))
    return lambda name: importlib.import_module(name.partition("-")[0])


def numbers(found):
    """Return all numbers of a nested result of `main`."""
    leaves = jax.tree.leaves(json.loads(json.dumps(found)))
    return [x for x in leaves if isinstance(x, int | float)]


@pytest.mark.parametrize("name", RUNS)
def test_a_small_run_ends_with_finite_numbers(load, name, tmp_path):
    words, script = RUNS[name].split(), load(name)
    if "--peer" in words:
        pytest.importorskip("torch")
    if name in ("gpu_quarter_hour", "old_index"):
        words.append(f"--out={tmp_path / 'out'}")
    if name == "old_index":
        page, picture = tmp_path / "page.md", tmp_path / "picture.png"
        page.write_text("Old.")
        words += [f"--page={page}", f"--picture={picture}"]
    told = script.main(words)
    found = numbers(told)
    assert found and np.isfinite(found).all()
    if name == "old_index":
        script.main([*words, "--measured"])  # writes the same again
        shares = told["digits"][0]["vectors mapped forward"]
        assert page.read_text().count(f"mapped forward | {shares[1]:.1f} |") == 1
        assert page.read_text().startswith("Old.") and picture.stat().st_size > 9999
    assert "not_done" not in json.dumps(told)


@pytest.mark.parametrize("network, row", [("vit", "still"), ("resnet", "lora")])
def test_keep_fresh_refuses_a_row_of_another_network(load, capsys, network, row):
    script = load("keep_fresh")
    words = f"--old=a.npz --new=b.npz --network={network}".split()
    with pytest.raises(SystemExit):
        script.main([*words, "--rows", row])
    allowed = script.list_rows(network)
    assert str(allowed) in capsys.readouterr().err
    assert row not in allowed and "cassle" in allowed
    assert {*script.list_rows("vit"), *script.list_rows("resnet")} == {*script.ROWS}


@pytest.mark.parametrize("network, row", [("vit", "lora"), ("resnet", "cassle_still")])
def test_a_row_of_keep_fresh_is_taught_and_evaluated(load, tmp_path, network, row):
    for name, white in (("old", 0), ("new", 255)):  # as they are, and inverted
        data = by_name.load(name="digits", size=16, channels=3)
        parts = {"train": data.train, "test": data.test}
        arrays = {f"{k}_x": x.images[:160] ^ white for k, x in parts.items()}
        arrays |= {f"{k}_y": x.label[:160] for k, x in parts.items()}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    words = [f"--{x}={tmp_path / x}.npz" for x in ("old", "new")]
    words += f"--debug --network={network} --seeds 0 --rows {row}".split()
    words += "--epochs=1 --batch=32".split()
    script = load("keep_fresh")
    table = script.main([*words, f"--root={tmp_path / 'runs'}"]).splitlines()
    assert [row.split(" | ")[1] for row in table[2:]] == ["1", "1"]


def test_each_second_of_an_experiment_belongs_to_one_stage(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    stages, now = importlib.import_module("stages"), iter([2.0, 5.0, 9.0, 10.0])
    monkeypatch.setenv("STARTED", "0")
    monkeypatch.setattr(stages.time, "time", lambda: next(now))
    watch = stages.Stages()  # start 0 to 2, train 2 to 5 and 9 to 10, save 5 to 9
    watch.turn("train")
    with watch.on("save"):
        pass
    # 1 to 3 and 8 to 9.5, one of them within another
    found = watch.seconds([(2.5, 3.0), (1.0, 3.0), (8.0, 9.5)])
    named = {name: found[name] for name in ("start", "compile", "train", "save")}
    assert named == {"start": 1.0, "compile": 3.5, "train": 2.5, "save": 3.0}
    assert sum(found.values()) == 10.0


PROGRAM = """HloModule jit_steps
FileNames
1 "/here/jaxcl/nets/layers.py"
2 "/here/jaxcl/optim.py"
FunctionNames
1 "BatchNorm.__call__"
2 "lars.<locals>.update"
FileLocations
1 {file_name_id=1 function_name_id=1 line=1}
2 {file_name_id=2 function_name_id=2 line=2}
StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%fused (x: f32[2]) -> f32[2] {
  %a = f32[2]{0} add(%x, %x), metadata={op_name="jit(steps)/add" stack_frame_id=1}
  ROOT %b = f32[2]{0} negate(%a), metadata={op_name="jit(steps)/neg" stack_frame_id=1}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %loop_fusion.1 = f32[2]{0} fusion(%x), calls=%fused, metadata={stack_frame_id=2}
  %cudnn-conv.3 = (f32[2]{0}, u8[0]) custom-call(%x), metadata={op_name="convolution"}
  %move.2 = f32[2]{0} add(%x, %x), metadata={op_name="jit(steps)/add" stack_frame_id=2}
  ROOT %copy.1 = f32[2]{0} copy(%x)
}
"""
# Stream, kernel's name, its instruction, start and end in us; two steps in all.
TRACE = [
    ("Stream #1(Compute)", "loop_fusion_1", "", 0, 4),
    ("Stream #1(Compute)", "sm90_xmma_fprop_f32", "cudnn-conv.3", 4, 10),
    ("Stream #1(Compute)", "move_2", "command_buffer", 14, 16),
    ("Stream #2(Compute)", "nchwToNhwcKernel", "", 14, 18),
    ("Stream #2(Memcpy)", "MemcpyD2D", "copy.1", 15, 17),
    ("XLA Modules", "jit_steps", "", 0, 18),
]


def test_kernels_of_a_gpu_belong_to_the_parts_of_a_step(load):
    kernels, lines = load("kernels"), []
    for i, (line, name, op, start, end) in enumerate(TRACE, 1):
        told = f'stats {{ metadata_id: 1 str_value: "{op}" }}' if op else ""
        lines.append(
            f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
            f'lines {{ id: {i} name: "{line}" events {{ metadata_id: {i} offset_ps: '
            f"{start}000000 duration_ps: {end - start}000000 {told} }} }}"
        )
    text = 'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }' + "".join(lines)
    text = f'planes {{ name: "/device:GPU:0" {text} }} planes {{ name: "/host:CPU" }}'
    rows = kernels.read(jax.profiler.ProfileData.from_text_proto(text), PROGRAM)
    found = kernels.summarize(rows, 2, untraced_ms=0.01)
    us = {name: 1e3 * ms for name, ms in found["ms"].items()}
    kinds = {"norms": 2, "convolutions": 5, "optimizer": 1, "copies": 1}
    assert us == pytest.approx(kinds | {"busy": 7, "gaps": 2, "gaps untraced": 3})
    assert found["kernels"][0]["name"] == "sm90_xmma_fprop_f32"


def test_epochs_of_two_runs_take_nine_tenths_of_the_time_left(load):
    step = {"ms": 16.8, "first_task_flops": 3.0, "program": {"flops": 4.0}}
    notes = {"pnr": step | {"compile_seconds": 71}, "about": {"rows": 50_000}}
    # 39 steps an epoch; tasks of PNR cost 4.75, of fine-tuning 3.75 later ones.
    made = load("gpu_quarter_hour").plan(notes, 600.0, tiny=False)
    assert made["epochs"] == int(0.9 * (600 - 2 * (90 + 71)) / (39 * 0.0168 * 8.5))


def commands():
    for name in sorted({name.partition("-")[0] for name in RUNS}):
        text = (BENCHMARKS / "README.md").read_text()
        for words in re.findall(
            rf"python benchmarks/(?:trials/)?{name}\.py([^`\n|]*)", text
        ):
            yield pytest.param(name, shlex.split(words), id=f"{name}{words}")


@pytest.mark.parametrize("name, words", list(commands()))
def test_commands_of_the_readme_parse(load, name, words):
    assert vars(load(name).parser().parse_args(words))


@pytest.mark.parametrize(
    "name",
    ["looks", "digits_online", "looks_online"]
    + ["rehearsal", "duel", "split_mnist", "icl_mutag"],
)
def test_entries_of_the_leaderboard_build(load, name, tmp_path):
    for folder in ("mnist", "mutag"):
        (tmp_path / folder).mkdir()
    bench = load("leaderboard")
    problem = bench.PROBLEMS[name]
    for entry in problem.entries.values():
        config = bench.make_config(problem, entry, str(tmp_path))
        changes = {bench.FIELDS[entry.spends or problem.spends]: 1}
        if rates := entry.rates or problem.rates:
            changes |= bench._SEARCH | {entry.rate: rates[0]}
        top, *_ = config_files.made(bench.changed(config, changes), 10)
        assert problem.measure.partition("/")[0] in top.evaluators


def test_rows_of_reproduce_build(load, tmp_path):
    bench = load("reproduce")
    for name, row in bench.ROWS.items():
        (tmp_path / row.data).mkdir(exist_ok=True)
        config = bench.make_config(row, count=3, data=str(tmp_path))
        top = sections.read_top(resolve.resolve(config.to_dict()))
        for measure in (row.measure, *row.other):
            assert measure.partition("/")[0] in top.evaluators, name
        config_files.made(config, 100 if row.data == "cifar100" else 10)


@pytest.mark.parametrize(
    "base, strategy", [("mocov2plus", "pnr"), ("simclr", "finetune")]
)
def test_the_peer_takes_the_same_steps(load, tmp_path, base, strategy):
    torch, steps = pytest.importorskip("torch"), load("steps")
    peer = load("peers.torch_two_view")
    changes = {
        "encoder.depth": 10,
        "method.base": base,
        "method.strategy": strategy,
        "method.hidden_dim": 32,
        "method.output_dim": 24,
        "augment.crop": False,
        "augment.jitter": "(0,0,0,0)",
        "augment.grayscale": 0.0,
        "augment.flip": 0.0,
        "augment.solarize": "(0,0)",
        # Steps so large that three of them show what the optimiser does.
        "optimizer.lr": 0.03,
        "optimizer.weight_decay": 0.1,
        "scale_lr": False,
    }
    if base == "mocov2plus":
        changes["method.queue_size"] = 64
    words = "pnr_cifar100 --width=4 --size=16 --batch=16 --override".split()
    words += [f"{path}={value}" for path, value in changes.items()]
    work = steps.make_job(steps.parser().parse_args(words), words[0], tmp_path)
    state = steps.second_task(work)
    rng = np.random.default_rng(0)

    def moved(tree):
        """Away from the network that learns, or the test could not tell them apart."""
        return jax.tree.map(lambda x: x * rng.uniform(0.8, 1.2, x.shape), tree)

    extra = state.extra._replace(
        momentum=moved(state.extra.momentum), teacher=moved(state.extra.teacher)
    )
    state = jax.tree.map(lambda x: jax.numpy.asarray(x), state.replace(extra=extra))
    theirs = peer.Peer(
        work.config,
        jax.device_get(state.replace(key=None)),
        device="cpu",
        precision="float32",
        channels_last=True,
    )
    step, decays = jax.jit(work.method.step), bases.make_base(base).momentum
    start, end = decays or (1.0, 1.0)
    # The optimiser, the average and the queues show from the second step on.
    for _ in range(3):
        images = rng.integers(0, 256, (16, 2, 16, 16, 3), np.uint8)
        label = np.zeros(16, np.int32)
        decay = float(
            optim.momentum_schedule(core.progress(state), start=start, end=end)
        )
        state, ours = step(state, {"image": images, "label": label})
        mean, std = (np.float32(work.config["augment"][k]) for k in ("mean", "std"))
        views = ((images / np.float32(255) - mean) / std).transpose(1, 0, 4, 2, 3)
        views = [torch.from_numpy(view.copy()) for view in views]
        found = theirs.step(views, float(ours["lr"]), decay)
        # The gradient jumps where a ReLU's input is zero but for rounding.
        for name, rel in (("loss", 1e-5), ("grad_norm", 1e-3)):
            assert float(found[name]) == pytest.approx(float(ours[name]), rel=rel)
