"""Benchmarks: what they count, and that the PyTorch peer takes the same step."""

import json
import pathlib
import re
import shlex

import jax
import numpy as np
import pytest

from jaxcl import augment, core, optim

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
    assert "input stall" in capsys.readouterr().out


def test_pnr_adds_two_forward_passes(throughput, tmp_path):
    args = throughput.parser().parse_args([*TINY, "--no-augment"])
    work = throughput.make_job(args, tmp_path)
    state = throughput.second_task(work)
    assert int(state.task) == 1 and int(state.task_steps) > 1
    ours = throughput.Ours(work, state, iter([(1, *batch(work))]), steps=2)
    by_hand = step_flops(batch=16, width=16, hidden=32, size=16, passes=2)
    assert 1.0 < ours.flops() / by_hand < 1.15


def batch(work):
    rows = np.arange(work.batch_size, dtype=np.int32)[None]
    return {"index": rows}, np.int32(1)


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


@pytest.mark.parametrize("base", ["simclr", "mocov2plus"])
@pytest.mark.parametrize("strategy", ["finetune", "cassle", "pnr"])
def test_the_peer_takes_the_same_steps(throughput, tmp_path, base, strategy):
    torch = pytest.importorskip("torch")
    import peer

    args = [*TINY, "--width=4", f"--base={base}", f"--strategy={strategy}"]
    args = throughput.parser().parse_args([*args, "--no-augment"])
    work = throughput.make_job(args, tmp_path)
    state = throughput.second_task(work)
    rng = np.random.default_rng(0)

    def moved(tree):
        """Away from the network that learns, or the test could not tell them apart."""
        return jax.tree.map(lambda x: x * rng.uniform(0.8, 1.2, x.shape), tree)

    extra = state.extra._replace(
        momentum=moved(state.extra.momentum), teacher=moved(state.extra.teacher)
    )
    state = jax.tree.map(lambda x: jax.numpy.asarray(x), state.replace(extra=extra))
    theirs = peer.Peer(
        work.config, jax.device_get(state.replace(key=None)), device="cpu",
        precision="float32", channels_last=True,
    )  # fmt: skip
    step = jax.jit(work.method.step)
    # The optimiser, the average and the queues show from the second step on.
    for _ in range(3):
        images = rng.integers(0, 256, (16, 2, 16, 16, 3), np.uint8)
        label = np.zeros(16, np.int32)
        decay = float(optim.momentum_schedule(core.progress(state)))
        state, ours = step(state, {"image": images, "label": label})
        mean, std = (np.float32(work.config["augment"][k]) for k in ("mean", "std"))
        views = ((images / np.float32(255) - mean) / std).transpose(1, 0, 4, 2, 3)
        views = [torch.from_numpy(view.copy()) for view in views]
        found = theirs.step(views, float(ours["lr"]), decay)
        for name in ("loss", "grad_norm"):
            assert float(found[name]) == pytest.approx(float(ours[name]), rel=1e-4)


def test_the_peers_image_operations_are_ours(throughput):
    torch = pytest.importorskip("torch")
    import peer

    image = np.random.default_rng(0).uniform(size=(16, 16, 3)).astype(np.float32)
    x = torch.from_numpy(image.transpose(2, 0, 1).copy())[None]
    whole = peer.Augment({"size": 11, "sigma": (1.3, 1.3)})
    zero = torch.zeros(1)
    weights = whole._weights(zero, zero + 16, 16)
    pairs = (
        (peer._turned(x, torch.full((1, 1, 1), 0.3)), augment.adjust_hue(image, 0.3)),
        ((weights @ x @ weights.mT).clamp(0, 1), augment.resize(image, size=11)),
        (whole._blur(x), augment.gaussian_blur(image, 1.3, radius=8)),
        (peer._gray(x).expand(1, 3, 16, 16), augment.grayscale(image)),
    )
    for theirs, ours in pairs:
        np.testing.assert_allclose(theirs[0].permute(1, 2, 0), ours, atol=1e-5)
