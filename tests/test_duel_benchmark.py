"""benchmarks/duel.py: what it counts, and that its forms of the policy choose alike."""

import functools
import json
import pathlib
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcl.memory import duel as policy

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
POLICY = "policy --memory 48 --batch 16 --dim 8 --windows=2 --seconds=0".split()
STEP = "step --size=8 --batch=8 --memory=16 --windows=2 --steps=1".split()


@pytest.fixture
def bench(monkeypatch):
    """The script; a step's encoder is the small net of three convolutions."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import duel

    config = duel.config

    def small(*given):
        made = config(*given)
        made.encoder = {"name": "conv_net", "width": 2}
        made.method.output_dim = 8
        made.augment.update(jitter=(0.0,) * 4, grayscale=0.0)
        return made

    monkeypatch.setattr(duel, "config", small)
    return duel


def batches(bench, capacity, count, dim):
    """Memory and incoming rows of the stream, float64."""
    stream = bench.Rows(dim)
    memory, _ = bench.settled(stream, capacity, 1.0)
    return memory.astype(float), stream.take(count)[0].astype(float)


@pytest.mark.parametrize("capacity, count", [(40, 24), (900, 300)])
def test_the_forms_choose_the_same_rows(bench, capacity, count):
    import duel_algorithm

    memory, incoming = batches(bench, capacity, count, 16)
    alike = (1 + np.concatenate([memory, incoming]) @ np.r_[memory, incoming].T) / 2
    want = np.arange(capacity + count) < capacity
    for new in range(capacity, capacity + count):
        want[np.argmax(np.where(want, alike @ want, 0))] = False
        want[new] = True
    assert 0 < want[capacity:].sum() < count
    with jax.enable_x64(True):
        for form in (policy.select, duel_algorithm.in_jax):
            np.testing.assert_array_equal(jax.jit(form)(memory, incoming), want)
    torch = pytest.importorskip("torch")
    held = duel_algorithm.in_torch(torch.tensor(memory), torch.tensor(incoming))
    np.testing.assert_array_equal(held, want)


def test_half_of_the_stream_is_of_a_class_and_the_settled_memory_is_not(bench):
    stream = bench.Rows(16)
    rows, label = stream.take(4000)
    assert 0.45 < np.mean(label == 0) < 0.55
    assert {*label} == set(range(10))
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    memory, label = bench.settled(stream, 300, 2.5)
    assert len(memory) == len(label) == 300
    assert np.mean(label == 0) < 0.2
    nearest = np.argmax(memory @ stream.centres.T, axis=1)
    assert np.mean(nearest == label) > 0.8  # labels go with their rows


def test_every_turn_of_a_loop_counts(bench):
    import loops

    def twice(x, turns, doubled):  # a product of 3 x 8 with 8 x 8
        def inner(carry):
            return carry[0] @ jnp.ones((8, 8)), carry[1] + 1

        def outer(carry):
            x, number = carry
            x, _ = jax.lax.while_loop(lambda c: c[1] < turns[number], inner, (x, 0))
            return x, number + 1

        x, _ = jax.lax.while_loop(lambda c: c[1] < 3, outer, (x, 0))
        return jax.lax.fori_loop(0, doubled, lambda i, y: y * 2.0, x)

    def counted(numbers, doubled):
        given = jnp.ones((3, 8)), np.array(numbers)
        program = jax.make_jaxpr(functools.partial(twice, doubled=doubled))(*given)
        return loops.operations(program, *given)

    x = jnp.ones((3, 8))
    count, turns = counted([5, 0, 2], 7)
    assert turns == [3, 7]
    # Of an inner turn: its product, its number, its test with turns[number] in it.
    assert counted([5, 0, 12], 7)[0] - count == 10 * (2 * 3 * 64 + 1 + 4)
    assert counted([5, 0, 2], 9)[0] - count == 2 * (3 * 8 + 1)
    # With no more than a few for what is around the loops.
    assert counted([0, 0, 0], 7)[0] < 8 * (3 * 8 + 1)
    assert count > 7 * (2 * 3 * 64 + 5) + 7 * (3 * 8 + 1)

    def hidden(x):
        return jax.jit(lambda y: jax.lax.fori_loop(0, 7, lambda i, z: z * 2, y))(x)

    with pytest.raises(ValueError, match="inside of jit"):
        loops.operations(jax.make_jaxpr(hidden)(x), x)


def test_operations_of_both_forms_are_those_of_a_count_by_hand(bench, monkeypatch):
    import duel_algorithm
    import loops

    monkeypatch.setattr(policy, "_ROUNDS", 5)
    memory, incoming = (np.float32(x) for x in batches(bench, 40, 20, 256))
    both, dim, looked_at = 60, 256, 45
    program = jax.make_jaxpr(duel_algorithm.in_jax)(memory, incoming)
    flops, turns = loops.operations(program, memory, incoming)
    by_hand = 2 * dim * both**2 + 2 * both**2 + 40**2 + 20 * 16 * both
    assert turns == [20] and flops == pytest.approx(by_hand, rel=2e-3)
    # All stored rows are candidates, so a window ends after five rounds.
    program = jax.make_jaxpr(policy.select)(memory, incoming)
    flops, turns = loops.operations(program, memory, incoming)
    by_hand = 2 * dim * both * (1 + 4) + 20 * 2 * dim * looked_at
    by_hand += 20 * (11 * looked_at + 6 * dim)  # argmax; the sum, how far it moved
    by_hand += 4 * dim * looked_at  # where a row comes from
    assert turns == [4] and flops == pytest.approx(by_hand, rel=0.01)


def test_windows_are_those_that_were_opened(bench, monkeypatch):
    """Against jax.lax.while_loop in plain Python, where the bound often fails."""
    import loops

    monkeypatch.setattr(policy, "_CANDIDATES", (6, 0.0))
    monkeypatch.setattr(policy, "_ROUNDS", 8)
    memory, incoming = (np.float32(x) for x in batches(bench, 40, 24, 6))
    program = jax.make_jaxpr(policy.select)(memory, incoming)
    _, turns = loops.operations(program, memory, incoming)
    calls = []

    def plainly(test, body, carry):
        calls.append(body)
        while test(carry):
            carry = body(carry)
        return carry

    monkeypatch.setattr(jax.lax, "while_loop", plainly)
    policy.select(jnp.asarray(memory), jnp.asarray(incoming))
    assert turns == [len(calls) - 1] and len(calls) - 1 > 3


def test_the_policys_table(bench, tmp_path, capsys):
    path = tmp_path / "lines.json"
    rows = bench.main([*POLICY, f"--json={path}"])
    assert [json.loads(text) for text in path.read_text().splitlines()] == rows
    ours, plain = rows
    assert (ours["side"], plain["side"]) == ("ours", "plain")
    assert (ours["K"], ours["B"], ours["Z"]) == (48, 16, 8)
    assert ours["ratio"] == ours["ratio_min"] == ours["ratio_max"] == 1
    assert plain["ratio_min"] <= plain["ratio"] <= plain["ratio_max"]
    assert ours["same"] == 1 and plain["same"] > 0.9
    assert ours["opened"] == 1 and plain["opened"] is None
    assert plain["distinctiveness"] == pytest.approx(ours["distinctiveness"], rel=1e-3)
    assert plain["temporary_bytes"] >= 4 * 64**2
    assert plain["flops"] > 2 * 8 * 64**2
    head, *lines = capsys.readouterr().out.splitlines()[-3:]
    assert {len(head)} == {len(each) for each in lines}


def test_distinctiveness_is_that_of_the_policy(bench):
    memory, incoming = (np.float32(x) for x in batches(bench, 20, 10, 8))
    want = policy.distinctiveness(incoming, memory, score="affine").mean()
    assert bench.distinctness(memory, incoming) == pytest.approx(float(want), rel=1e-5)


def test_agreement_is_that_of_the_rows_which_leave(bench, monkeypatch):
    import duel_algorithm

    def oldest(memory, incoming):  # first in, first out
        return jnp.arange(len(memory) + len(incoming)) >= len(incoming)

    monkeypatch.setattr(duel_algorithm, "in_jax", oldest)
    args = bench.parser().parse_args(POLICY)
    memory, incoming = (np.float32(x) for x in batches(bench, 48, 16, 8))
    found, queue = bench.measure_policy(args, memory, [incoming])
    left = ~np.asarray(jax.jit(policy.select)(memory, incoming))
    assert queue["same"] == left[:16].sum() / 16 < 0.9
    assert queue["distinctiveness"] < found["distinctiveness"]


def test_scores_above_the_limit_are_left_out(bench, capsys):
    (only,) = bench.main([*POLICY, "--limit=1e-5"])  # GiB: 64 rows need 1.5e-5
    assert only["side"] == "ours"
    assert "ours alone" in capsys.readouterr().out


def test_pytorch_is_beside_them(bench, capsys):
    pytest.importorskip("torch")
    found = bench.main([*POLICY, "--peer"])
    assert [row["side"] for row in found] == ["ours", "plain", "PyTorch"]
    assert found[2]["same"] > 0.9 and found[2]["flops"] is None


def test_without_pytorch_the_peer_is_refused(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main([*POLICY, "--peer"])
    assert "[peers]" in capsys.readouterr().err


@pytest.mark.parametrize("base", ["moco", "simclr"])
def test_steps_are_beside_those_of_the_base(bench, monkeypatch, tmp_path, capsys, base):
    seconds, order = {base: 2.0, f"d_{base}": 2.5}, []

    def window(self, calls=None):
        if calls is not None:
            return plain(self, calls)
        order.append(self)
        return seconds[[base, f"d_{base}"][len({*map(id, order)}) - 1]], 0.0

    plain = bench.throughput.Ours.window
    monkeypatch.setattr(bench.throughput.Ours, "window", window)
    ready, begun = bench.ready, []

    def recorded(*given):
        ours = ready(*given)
        begun.append(jax.device_get(ours.state.replace(key=None)))
        return ours

    monkeypatch.setattr(bench, "ready", recorded)
    path = tmp_path / "lines.json"
    rows = bench.main([*STEP, "--windows=1", "--base", base, f"--json={path}"])
    assert [json.loads(text) for text in path.read_text().splitlines()] == rows
    found, active = rows
    assert [found["method"], active["method"]] == [base, f"d_{base}"]
    assert active["ms"] == 2500 and found["ms"] == 2000
    assert active["ratio"] == 1.25 and active["share"] == pytest.approx(0.2)
    assert found["memory_bytes"] > 1000 and found["share"] == 0
    head, *lines = capsys.readouterr().out.splitlines()[-3:]
    assert {len(head)} == {len(each) for each in lines} and "20.0 %" in lines[1]
    # Full, and as many rows more, before it is timed.
    memory = begun[1].extra.memory
    assert memory.filled.all() and memory.capacity == 16
    assert begun[1].step == 2 * 16 / 8
    assert (begun[0].extra.memory is None) == (base == "simclr")


def test_commands_of_the_readme_parse(bench):
    text = (BENCHMARKS / "README.md").read_text()
    commands = re.findall(r"python benchmarks/duel\.py([^`\n|]*)", text)
    assert {shlex.split(command)[0] for command in commands} == {"policy", "step"}
    for command in commands:
        bench.parser().parse_args(shlex.split(command))
