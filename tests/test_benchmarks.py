"""Benchmarks: what they count, and that the PyTorch peer takes the same step."""

import itertools
import json
import pathlib
import re
import shlex

import jax
import numpy as np
import pytest

from jaxcl import core, optim
from jaxcl.augment import crops
from jaxcl.augment import images as augment_images
from jaxcl.methods.two_view import bases, strategies

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
TINY = "--depth=10 --width=16 --hidden=32 --queue=64 --size=16 --batch=16".split()


@pytest.fixture
def throughput(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import throughput

    return throughput


def taps(side, stride, pad, kernel=3):
    """Multiplications of one filter and channel, and the side of what comes out.

    As XLA counts, without those that fall on the padding.
    """
    starts = np.arange(-pad, side + pad - kernel + 1, stride)
    places = starts[:, None] + np.arange(kernel)
    return np.sum((places >= 0) & (places < side)) ** 2, len(starts)


def step_flops(*, batch, width, hidden, size, passes, output=128):
    """Convolutions and projector of a step on two views, by hand.

    `passes` besides the forward and the two backward products of the learner.
    """
    count, side = taps(size, 1, 2)  # the stem pads by 2
    stem, forward, inputs = count * 3 * width, 0, width
    for stage in range(4):
        filters, stride = width * 2**stage, 1 if stage == 0 else 2
        shortcut, _ = taps(side, stride, 0, kernel=1)
        first, side = taps(side, stride, 1)
        second, side = taps(side, 1, 1)
        forward += first * inputs * filters + second * filters * filters
        forward += shortcut * inputs * filters if stride == 2 else 0
        inputs = filters
    forward += inputs * hidden + hidden * output
    # Images have no gradient: the stem has one backward product.
    total = 3 * forward + 2 * stem + passes * (forward + stem)
    return 2 * total * 2 * batch


def test_a_finetune_step_costs_three_forward_passes(throughput, tmp_path, capsys):
    lines = tmp_path / "lines.json"
    found = throughput.main(
        [*TINY, "--base=simclr", "--strategy=finetune", "--no-augment"]
        + ["--windows=2", "--steps=2", f"--json={lines}"]
    )
    by_hand = step_flops(batch=16, width=16, hidden=32, size=16, passes=0)
    assert 1.0 < found["flops_per_step"] / by_hand < 1.15  # batch norm, loss, LARS
    low, high = found["images_per_second_min"], found["images_per_second_max"]
    assert 0 < low <= found["images_per_second"] <= high
    assert found["images_per_second"] * found["step_ms"] == pytest.approx(16e3)
    assert 0 <= found["input_stall"] <= 1
    assert found["compile_seconds"] > 0
    assert found["peak_fraction"] is None  # of a CPU
    parameters = 4 * (1_228_000)  # bytes of the encoder, about; momentum as much
    assert found["memory_bytes"] > 2 * parameters
    assert json.loads(lines.read_text()) == json.loads(json.dumps(found))
    shown = capsys.readouterr().out
    assert "input stall" in shown and "first / second" not in shown
    assert found["first_task_flops_per_step"] == found["flops_per_step"]


def job(throughput, directory, *more):
    directory.mkdir(exist_ok=True)
    args = throughput.parser().parse_args([*TINY, "--no-augment", *more])
    return throughput.make_job(args, directory)


@pytest.mark.parametrize("base, slow", [("mocov2plus", 1), ("simclr", 0)])
def test_the_teacher_is_one_forward_pass_per_view(throughput, tmp_path, base, slow):
    work = job(throughput, tmp_path, f"--base={base}")
    for task in (0, 1):
        passes = slow + task  # the first task has no teacher
        by_hand = step_flops(batch=16, width=16, hidden=32, size=16, passes=passes)
        assert 1.0 < throughput.flops(work, task) / by_hand < 1.05


def test_the_first_task_is_timed_beside_the_second(throughput, monkeypatch, capsys):
    seen = []

    def window(self, calls=None):
        seen.append(int(self.state.task))
        return 1.0 + 2.0 * self.state.task, 0.0

    monkeypatch.setattr(throughput.Ours, "window", window)
    more = ["--base=simclr", "--strategy=cassle", "--width=8", "--no-augment"]
    found = throughput.main([*TINY, *more, "--first-task", "--windows=2", "--steps=4"])
    assert seen == [1, 0, 0, 1, 0, 1]  # one each to warm up, then in turns
    assert found["step_ms"] == pytest.approx(750)
    assert found["first_task_step_ms"] == pytest.approx(250)
    assert found["first_task_ratio"] == pytest.approx(1 / 3)
    assert found["first_task_flops_per_step"] < 0.85 * found["flops_per_step"]
    assert "first / second 0.33  (0.33 to 0.33)" in capsys.readouterr().out


def test_a_task_begins_as_in_training(throughput, tmp_path):
    work = job(throughput, tmp_path, "--strategy=ewc", "--base=simclr")
    ended = []

    def end_task(state, task):
        ended.append((int(state.task), task.index))
        return state

    work = work._replace(method=work.method._replace(end_task=end_task))
    for index in (0, 1):
        state = throughput.begun(work, index)
        assert int(state.task) == index and int(state.task_steps) > 1
    assert ended == [(0, 0)]


def test_values_follow_the_base(throughput):
    def config(*more):
        return throughput.config(throughput.parser().parse_args(more), "x.npz")

    byol, moco = config("--base=byol"), config()
    assert (byol.optimizer.lr, byol.optimizer.weight_decay) == (1.0, 1e-5)
    assert (byol.method.negative_weight, byol.optimizer.exclude_1d) == (0.5, True)
    assert (moco.optimizer.lr, moco.optimizer.exclude_1d) == (0.6, False)
    assert config("--base=vicreg").augment.scale == (0.2, 1.0)
    large = config("--base=byol", "--size=224")
    assert (large.optimizer.lr, large.method.predictor_hidden_dim) == (0.6, 8192)
    assert large.method.negative_weight == 1.0
    assert "hidden_dim" not in byol.method and "output_dim" not in byol.method
    narrow = config("--base=byol", "--hidden=8", "--output=4").method
    widths = ("hidden_dim", "predictor_hidden_dim", "distill_hidden_dim", "output_dim")
    assert [narrow[name] for name in widths] == [8, 8, 8, 4]
    plain = config("--base=vicreg", "--no-augment").augment
    assert plain.blur == plain.solarize == (0.0, 0.0) and not plain.crop


def test_every_base_and_strategy_can_be_measured(throughput, tmp_path):
    options = {action.dest: action for action in throughput.parser()._actions}
    choices = [options[name].choices for name in ("base", "strategy")]
    assert len(choices[0]) >= len(choices[1]) and {*choices[0]} <= {*bases.BASES}
    assert {*choices[1]} == {*strategies.STRATEGIES}
    # Each of both; building a job traces its step.
    for base, strategy in zip(choices[0], itertools.cycle(choices[1]), strict=False):
        more = [f"--base={base}", f"--strategy={strategy}", "--output=16"]
        job(throughput, tmp_path / f"{base}_{strategy}", *more)


def test_peaks_are_found_by_the_kind_of_the_device(throughput):
    class Device:
        device_kind = "NVIDIA H100 PCIe"

    assert throughput.device_peak(Device, "bfloat16") == 756e12
    Device.device_kind = "TPU v5 lite"
    assert throughput.device_peak(Device, "float32") == 197e12
    Device.device_kind = "TPU v5"
    assert throughput.device_peak(Device, "bfloat16") == 459e12
    Device.device_kind = "cpu"
    assert throughput.device_peak(Device, "bfloat16") is None


def test_commands_of_the_readme_parse(throughput):
    text = (BENCHMARKS / "README.md").read_text()
    commands = re.findall(r"python benchmarks/throughput\.py([^`\n|]*)", text)
    assert len(commands) > 5
    for command in commands:
        throughput.parser().parse_args(shlex.split(command))


def test_what_has_no_peer_is_refused(throughput, capsys):
    pytest.importorskip("torch")
    for wrong in ("--base=supcon", "--strategy=der"):
        with pytest.raises(SystemExit):
            throughput.main(["--base=byol", wrong, "--peer"])
        said = capsys.readouterr().err
        assert wrong[2:] in said and "vicreg under finetune, cassle, pnr" in said


ALL = ("finetune", "cassle", "pnr")
PAIRS = [(base, s) for base in ("simclr", "mocov2plus", "byol") for s in ALL]
# Without negatives PNR's loss is the sum of the other two, less a distance.
PAIRS += [("barlow_twins", "pnr"), ("vicreg", "pnr")]


@pytest.mark.parametrize("base, strategy", PAIRS)
def test_the_peer_takes_the_same_steps(
    throughput, tmp_path, monkeypatch, base, strategy
):
    torch = pytest.importorskip("torch")
    import peer

    config = throughput.config

    def faster(*given):
        """Steps so large that three of them show what the optimiser does."""
        made = config(*given)
        made.optimizer.weight_decay, made.schedule.start = 0.1, 0.03
        return made

    monkeypatch.setattr(throughput, "config", faster)
    more = ["--width=4", "--output=24", f"--base={base}", f"--strategy={strategy}"]
    work = job(throughput, tmp_path, *more)
    state = throughput.begun(work, 1)
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
    step, slow = jax.jit(work.method.step), bases.get(base).momentum
    end = slow.end if slow else 1.0
    # The optimiser, the average and the queues show from the second step on.
    for _ in range(3):
        images = rng.integers(0, 256, (16, 2, 16, 16, 3), np.uint8)
        label = np.zeros(16, np.int32)
        decay = float(optim.momentum_schedule(core.progress(state), end=end))
        state, ours = step(state, {"image": images, "label": label})
        mean, std = (np.float32(work.config["augment"][k]) for k in ("mean", "std"))
        views = ((images / np.float32(255) - mean) / std).transpose(1, 0, 4, 2, 3)
        views = [torch.from_numpy(view.copy()) for view in views]
        found = theirs.step(views, float(ours["lr"]), decay)
        # The gradient jumps where a ReLU's input is zero but for rounding.
        for name, rel in (("loss", 1e-5), ("grad_norm", 1e-3)):
            assert float(found[name]) == pytest.approx(float(ours[name]), rel=rel)


def test_the_peers_image_operations_are_ours(throughput):
    torch = pytest.importorskip("torch")
    import peer_augment

    image = np.random.default_rng(0).uniform(size=(16, 16, 3)).astype(np.float32)
    x = torch.from_numpy(image.transpose(2, 0, 1).copy())[None]
    whole = peer_augment.Augment({"size": 11, "sigma": (1.3, 1.3)})
    zero = torch.zeros(1)
    weights = whole._weights(zero, zero + 16, 16)
    pairs = (
        (
            peer_augment.turned(x, torch.full((1, 1, 1), 0.3)),
            augment_images.adjust_hue(image, 0.3),
        ),
        ((weights @ x @ weights.mT).clamp(0, 1), crops.resize(image, size=11)),
        (whole._blur(x), augment_images.gaussian_blur(image, 1.3, radius=8)),
        (peer_augment.gray(x).expand(1, 3, 16, 16), augment_images.grayscale(image)),
    )
    for theirs, ours in pairs:
        np.testing.assert_allclose(theirs[0].permute(1, 2, 0), ours, atol=1e-5)


@pytest.mark.slow
def test_seeds_side_by_side_against_one_after_another(throughput, capsys):
    import seeds as bench

    small = "--seeds=2 --width=4 --size=32 --batch=4 --windows=2 --steps=1"
    found = bench.main(small.split())
    assert found["seeds"] == 2 and found["one_ms"] > 0
    expected = found["side_by_side_ms"] / (2 * found["one_ms"])
    assert found["ratio"] == expected
    assert "er_ace, 2 seeds on cpu" in capsys.readouterr().out
