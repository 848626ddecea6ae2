"""benchmarks/online.py: what it counts, and that PyTorch takes the same steps."""

import contextlib
import json
import pathlib
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcl.memory import sharded
from jaxcl.methods import er_aml
from jaxcl.run import job as job_lib

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
TINY = "--width=4 --batch=4 --per-class=2 --windows=2 --steps=3".split()
METHODS = ("er", "er_ace", "er_aml", "mir", "der", "icarl")


@pytest.fixture
def online(monkeypatch):
    """The script, its networks of depth 10."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import online

    config = online.config

    def shallow(*given):
        made = config(*given)
        made.encoder.depth = 10
        return made

    monkeypatch.setattr(online, "config", shallow)
    return online


def job(online, directory, method, *more):
    args = online.parser().parse_args([*TINY, *more])
    return args, online.make_job(args, method, directory)


@pytest.mark.parametrize("method", METHODS)
def test_passes_are_those_that_the_step_makes(online, tmp_path, method):
    import throughput

    args, work = job(online, tmp_path, method)
    state = jax.eval_shape(lambda: throughput.job.initial_state(work))
    encoder = work.config["encoder"]
    images = jax.ShapeDtypeStruct((args.batch, args.size, args.size, 3), jnp.float32)

    def flops(function, *arguments):
        return jax.jit(function).lower(*arguments).cost_analysis()["flops"]

    passed = flops(work.method.embed, state, images)
    # Images have no gradient; XLA counts no product with the padding.
    stem = 2 * args.batch * (3 * args.size - 2) ** 2 * 4 * encoder["width"]
    made = online.METHODS[method]
    forward = made.forward + min(made.scored, 2 * 20) / args.batch  # 20 slots
    by_hand = forward * passed + made.backward * (2 * passed - stem)
    assert 0.99 < throughput.flops(work, 1) / by_hand < 1.05


def test_the_memory_is_full_and_the_second_task_begun(online, tmp_path):
    args, work = job(online, tmp_path, "er")
    with contextlib.ExitStack() as stack:
        ours = online.ready(args, work, stack)
        state = ours.state
        assert state.extra.memory.filled.all()
        assert {*np.asarray(state.extra.memory.items["label"])} == {0, 1}
        assert int(state.task) == 1 and state.task_start == state.step >= 5
        number = int(state.step)
        ours.window(2)
        assert int(ours.state.step) == number + 2
        assert ours.state.extra.seen.sum() > 2


def test_the_table(online, tmp_path, monkeypatch, capsys):
    import throughput

    class Side:
        steps, compile_seconds, state = 3, 1.0, None

        def window(self, calls=None):
            return 0.6, 0.0

    monkeypatch.setattr(online, "ready", lambda args, work, stack: Side())
    monkeypatch.setattr(throughput, "flops", lambda work, task: 2e9 + task)
    lines = tmp_path / "lines.json"
    asked = [*TINY, "--methods", "er", "--no-peer", f"--json={lines}"]
    (found,) = online.main(asked)
    assert found["ours_ms"] == pytest.approx(200)
    assert found["flops"] == 2e9 + 1 and found["backward"] == 2
    assert "ratio" not in found
    assert json.loads(lines.read_text()) == json.loads(json.dumps(found))
    head, row = capsys.readouterr().out.splitlines()[-2:]
    assert head.endswith("ours / PyTorch") and len(head) == len(row)
    assert row.split()[:6] == ["er", "2", "/", "2", "2.00", "200.0"]


def test_the_ratio_is_time_of_ours_over_theirs(online, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    import peer_online

    turns = []

    class Side:
        steps, compile_seconds = 2, 1.0

        class state:
            replace = staticmethod(lambda key: {})

        def window(self, calls=None):
            turns.append("ours")
            return 0.2, 0.0

    def timed(args, work, state, threads):
        def window(steps):
            turns.append("peer")
            return steps * (0.2 if turns.count("peer") == 1 else 0.4)

        assert threads == 1
        return window, "PyTorch"

    monkeypatch.setattr(online, "ready", lambda args, work, stack: Side())
    monkeypatch.setattr(peer_online, "timed", timed)
    found = online.main([*TINY, "--methods", "er", "--windows=3", "--threads=1"])[0]
    assert turns == ["ours", *["peer", "ours"] * 3]
    assert found["peer_ms"] == pytest.approx(400)
    assert found["ratio"] == pytest.approx(0.25) and found["ratio_max"] == 0.5
    assert "0.25  (0.25 to 0.50)" in capsys.readouterr().out


def test_commands_of_the_readme_parse(online):
    text = (BENCHMARKS / "README.md").read_text()
    commands = re.findall(r"python benchmarks/online\.py([^`\n|]*)", text)
    assert len(commands) > 1
    for command in commands:
        online.parser().parse_args(shlex.split(command))


def full(work, rng):
    """A state in the second task whose memory is full and takes no more rows."""
    import throughput

    state = throughput.begun(work, 0)
    memory = state.extra.memory
    capacity = memory.capacity
    items = {
        "image": rng.integers(0, 256, memory.items["image"].shape, np.uint8),
        "label": np.arange(capacity, dtype=np.int32) % 4,  # two of the second task
        "task": np.arange(capacity, dtype=np.int32) % 4 // 2,
    }
    if "logits" in memory.items:
        items["logits"] = rng.normal(size=(capacity, 10)).astype(np.float32)
    memory = memory._replace(
        items=items, filled=np.ones(capacity, bool), seen=np.int32(2**30)
    )
    seen = np.arange(10) < 2
    stats = jax.tree.map(lambda x: x + rng.uniform(0.1, 1, x.shape), state.stats)
    state = state.replace(
        extra=state.extra._replace(memory=memory, seen=seen), stats=stats
    )
    state = jax.tree.map(jnp.asarray, state)
    first, second = work.stream.tasks[:2]
    return job_lib.begin(work, work.method.end_task(state, first), second)


@pytest.mark.parametrize("method", METHODS)
def test_the_peer_takes_the_same_steps(online, tmp_path, monkeypatch, method):
    torch = pytest.importorskip("torch")
    import peer_online

    rng = np.random.default_rng(0)
    _, work = job(online, tmp_path, method)
    state = full(work, rng)
    config = work.config
    theirs = peer_online.Peer(
        config,
        jax.device_get(state.replace(key=None)),
        device="cpu",
        channels_last=True,
    )
    # Both draw the same rows at every step; MIR's candidates are all of the first task.
    draws = [np.array([5, 8, 1, 12]), np.array([4, 0, 17, 9])]
    if method == "mir":
        draws = [np.flatnonzero(np.arange(20) % 4 < 2)]
    turn = {"ours": 0, "peer": 0}

    def drawn(side):
        turn[side] += 1
        return draws[(turn[side] - 1) % (2 if method == "der" else 1)]

    def sample(memory, key, count, *, log_weights=None):
        slots = drawn("ours")
        items = jax.tree.map(lambda x: x[slots], memory.items)
        return items, jnp.ones(len(slots), bool), jnp.asarray(slots)

    monkeypatch.setattr(sharded, "WHOLE", sharded.WHOLE._replace(sample=sample))
    theirs.memory.draw = lambda *given: torch.from_numpy(drawn("peer"))
    rows, valid = np.array([[0, 22], [23, 3], [7, 11], [14, 20]]), np.arange(4) != 2
    labels = np.arange(4)  # of the negatives: the triplet loss does not read them
    monkeypatch.setattr(er_aml, "pick", lambda *a: er_aml.Picked(rows, valid, labels))
    picked = torch.from_numpy(rows), torch.from_numpy(valid)
    monkeypatch.setattr(peer_online, "pick", lambda *a: picked)

    start = jax.device_get(state.params)
    for _ in range(2):  # the teacher and the classes seen show in the second
        images = rng.integers(0, 256, (4, 32, 32, 3), np.uint8)
        label = rng.integers(2, 4, 4).astype(np.int32)
        state, ours = jax.jit(work.method.step)(
            state, {"image": images, "label": label, "index": np.arange(4)}
        )
        found = theirs.step(
            torch.from_numpy(images).permute(0, 3, 1, 2),
            torch.from_numpy(label.astype(np.int64)),
        )
        assert float(found["loss"]) == pytest.approx(float(ours["loss"]), rel=1e-4)
        assert float(found["grad_norm"]) == pytest.approx(
            float(ours["grad_norm"]), rel=1e-3
        )
    head = theirs.options["head"]
    after = peer_online.Network(config["encoder"], head, state.params, state.stats)
    before = peer_online.Network(config["encoder"], head, start, state.stats)
    assert turn == (
        {"ours": 2, "peer": 4} if method == "der" else {"ours": 1, "peer": 2}
    )
    moved = 0
    for (name, got), want, old in zip(
        theirs.net.named_parameters(),
        after.parameters(),
        before.parameters(),
        strict=True,
    ):
        got, want, old = (x.detach().numpy() for x in (got, want, old))
        # A ReLU's input that is zero but for rounding changes a few of the weights.
        gap, way = np.linalg.norm(got - want), np.linalg.norm(want - old)
        assert gap < 0.01 * way + 1e-5, name
        moved = max(moved, np.abs(want - old).max())
    assert moved > 0.01
    for (name, got), want in zip(
        theirs.net.named_buffers(), after.buffers(), strict=True
    ):
        if "running" in name:
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4, err_msg=name)


def buffer(capacity, **items):
    """A full memory of numpy arrays, its images blank."""
    from jaxcl.memory import buffer

    rows = np.arange(capacity)
    items = {"image": np.zeros((capacity, 1, 1, 3), np.uint8), "label": rows} | items
    items |= {"task": np.zeros(capacity, np.int32)}
    return buffer.Buffer(items, np.ones(capacity, bool), np.int32(capacity))


def test_the_peers_reservoir_keeps_all_rows_alike(online):
    torch = pytest.importorskip("torch")
    import peer_online

    torch.manual_seed(0)
    kept, trials = np.zeros(16), 600
    for _ in range(trials):
        memory = peer_online.Memory(buffer(4), "cpu", True)
        for first in range(4, 16, 3):
            label = torch.arange(first, first + 3)
            images = label.to(torch.uint8)[:, None, None, None].expand(3, 3, 1, 1)
            memory.write(images, label, 1)
        kept[memory.label.numpy()] += 1
        new = memory.label >= 4
        assert (memory.images[new, 0, 0, 0] == memory.label[new]).all()
        assert (memory.task == new.long()).all()
    assert memory.seen == 16
    # Three of a batch may meet in a slot; else each is kept with probability 1 / 4.
    np.testing.assert_allclose(kept / trials, 0.25, atol=0.07)
    memory.task = torch.tensor([0, 1, 1, 0])
    assert {*memory.draw(9, memory.task < 1).tolist()} == {0, 3}
    assert sorted(memory.draw(4).tolist()) == [0, 1, 2, 3]


def test_the_peer_refuses_a_memory_with_room(online):
    pytest.importorskip("torch")
    import peer_online

    with pytest.raises(ValueError, match="full"):
        peer_online.Memory(buffer(4)._replace(filled=np.arange(4) < 3), "cpu", True)


def test_the_peer_picks_positives_and_negatives(online):
    torch = pytest.importorskip("torch")
    import peer_online

    class Peer:
        seen = torch.zeros(10, dtype=torch.bool)
        memory = peer_online.Memory(
            buffer(4, label=np.array([0, 1, 5, 0])), "cpu", True
        )

    torch.manual_seed(0)
    found = [peer_online.pick(Peer, torch.tensor([0, 1, 1, 2])) for _ in range(60)]
    rows = np.stack([rows.numpy() for rows, _ in found])
    assert all(valid.tolist() == [True, True, True, False] for _, valid in found)
    sets = [[{*rows[:, i, j]} for j in range(2)] for i in range(4)]
    assert sets[0] == [{0, 3}, {1, 5, 6, 7}]  # 5 is in no incoming row
    assert sets[1] == [{1, 6}, {0, 3, 4, 7}]
    assert sets[2] == [{1, 5}, {0, 3, 4, 7}]
    assert sets[3][0] == {7}  # has no positive, stands in for it
