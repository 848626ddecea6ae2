"""DUEL's policy against the plain loop of Algorithms 1 and 4, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import duel_twin, twins
from jaxcl.memory import buffer, duel, policies


def units(rng, count, dim, *, spread=1.0):
    """Unit rows around one of three directions."""
    centres = rng.normal(size=(3, dim))
    rows = centres[rng.integers(0, 3, count)] + spread * rng.normal(size=(count, dim))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def select64(memory, incoming, **options):
    with jax.enable_x64(True):
        arrays = {k: options[k] for k in ("filled", "incoming_mask") if k in options}
        fixed = {k: v for k, v in options.items() if k not in arrays}
        chosen = _jitted(
            tuple(fixed.items()), duel._CANDIDATES, duel._select_by_windows
        )
        return np.asarray(chosen(jnp.asarray(memory), jnp.asarray(incoming), **arrays))


@functools.lru_cache
def _jitted(options, *_):
    return jax.jit(functools.partial(duel.select, **dict(options)))


# As a CPU plays the rounds, and as accelerators do.
FORMS = {"windows": duel._select_by_windows, "all": duel._select_over_all}


@pytest.fixture(params=FORMS)
def narrow(monkeypatch, request):
    """Each form; few candidates and short windows, so that the bound has to decide."""
    monkeypatch.setattr(duel, "_CANDIDATES", (4, 0.0))
    monkeypatch.setattr(duel, "_ROUNDS", 5)
    monkeypatch.setattr(duel, "_BLOCK", 7)
    monkeypatch.setattr(duel, "_select_by_windows", FORMS[request.param])


# The same shapes and arguments throughout, so that a form is compiled once.
ALL = {"filled": np.ones(24, bool), "incoming_mask": np.ones(16, bool)}


def given(score, competes):
    return {"score": score, "temperature": 0.3, "newcomer_competes": competes}


@pytest.mark.parametrize("competes", [False, True])
@pytest.mark.parametrize("score", duel_twin.SCORES)
def test_select_is_the_plain_loop(score, competes, narrow):
    rng = np.random.default_rng(0)
    for spread in (0.3, 1.0, 3.0):
        rows = units(rng, 40, 5, spread=spread)
        memory, incoming = rows[:24], rows[24:]
        got = select64(memory, incoming, **ALL, **given(score, competes))
        want = duel_twin.loop(
            memory, incoming, duel_twin.SCORES[score], competes=competes
        )
        np.testing.assert_array_equal(got, want)
        assert got.sum() == 24 and 0 < got[24:].sum() < 16


@pytest.mark.parametrize("competes", [False, True])
@pytest.mark.parametrize("score", duel_twin.SCORES)
@pytest.mark.parametrize("stored", [0, 3, 18, 24])
def test_rows_that_do_not_exist_change_nothing(score, competes, stored, narrow):
    rng = np.random.default_rng(stored)
    rows = units(rng, 40, 5)
    memory, incoming = rows[:24], rows[24:]
    filled, mask = rng.permutation(24) < stored, rng.random(16) < 0.6
    assert 1 < mask.sum() < 15
    want = duel_twin.loop(
        memory,
        incoming[mask],
        duel_twin.SCORES[score],
        filled=filled,
        competes=competes,
    )
    incoming = np.where(mask[:, None], incoming, np.nan)
    options = given(score, competes)
    got = select64(memory, incoming, filled=filled, incoming_mask=mask, **options)
    np.testing.assert_array_equal(got[:24], want[:24])
    np.testing.assert_array_equal(got[24:][mask], want[24:])
    assert not got[24:][~mask].any()
    nothing = select64(
        memory, incoming, filled=filled, incoming_mask=np.zeros(16, bool), **options
    )
    np.testing.assert_array_equal(nothing, [*filled, *[False] * 16])


def test_default_sizes_choose_as_the_loop():
    """More rows than candidates, more rounds than a window has."""
    rng = np.random.default_rng(3)
    rows = units(rng, 1000, 8, spread=0.8)
    memory, incoming = rows[:700], rows[700:]
    gram = (1 + rows @ rows.T) / 2
    present = np.arange(1000) < 700
    for new in range(700, 1000):
        sums = np.where(present, gram @ present, -np.inf)
        present[np.argmax(sums)] = False
        present[new] = True
    np.testing.assert_array_equal(select64(memory, incoming), present)


@pytest.mark.parametrize("candidates", [4, 12])
def test_the_first_of_equal_rows_goes(candidates, narrow, monkeypatch):
    """Rows whose products are exact: signs of a Hadamard matrix over 4."""
    monkeypatch.setattr(duel, "_CANDIDATES", (candidates, 0.0))
    signs = np.array([[1]])
    for _ in range(4):
        signs = np.block([[signs, signs], [signs, -signs]])
    rng = np.random.default_rng(1)
    for competes in (False, True):
        for _ in range(40):
            rows = signs[rng.choice([3, 5, 7, 9], 20)] * rng.choice([1, 1, -1], (20, 1))
            got = select64(rows[:12] / 4, rows[12:] / 4, newcomer_competes=competes)
            want = duel_twin.loop(
                rows[:12] / 4,
                rows[12:] / 4,
                duel_twin.SCORES["affine"],
                competes=competes,
            )
            np.testing.assert_array_equal(got, want)


def near_tie(rng, dim):
    """A memory of five rows and two to come, after the first of which two rows tie.

    The first evicts row c and is c mirrored at the plane that row j is normal to, so
    that the sum moves along j: j's score grows by all that the bound allows. The sum is
    chosen so that the mirrored row then has j's score, in exact arithmetic.
    """
    angle, along = np.radians(rng.uniform(55, 65)), rng.uniform(0.2, 0.35)
    cos, sin = np.cos(angle), np.sin(angle)
    total = np.array([along, (along + 2 * cos) * np.tan(angle / 2), 0])
    rows = [[-cos, sin, 0], [-0.6, 0.8, 0], [1, 0, 0]]  # c, another candidate, j
    # Two rows far from all others, which bring the sum there.
    half = (total - np.sum(rows, axis=0)) / 2
    away = np.array([0, 0, np.sqrt(1 - half @ half)])
    rows = np.array([*rows, half + away, half - away])
    scores = rows @ total
    assert (np.diff(scores[:3]) < -0.01).all() and (scores[3:] < 0).all()
    frame = np.linalg.qr(rng.normal(size=(dim, dim)))[0][:3]
    incoming = np.array([[cos, sin, 0], [0, 0, 1]])
    return rows[rng.permutation(5)] @ frame, incoming @ frame


@pytest.mark.parametrize("dim", [3, 64])
def test_rows_that_are_left_out_win_no_near_tie(dim, monkeypatch):
    """Rounding decides in both, a window of two candidates and one of all rows.

    Without `slack` the two choose differently in one of ten of these memories.
    """
    rng = np.random.default_rng(0)
    ties = zip(*[near_tie(rng, dim) for _ in range(200)], strict=True)
    memory, incoming = (np.float32(np.stack(rows)) for rows in ties)
    kept = []
    for candidates in (2, 5):
        monkeypatch.setattr(duel, "_CANDIDATES", (candidates, 0.0))
        kept.append(np.asarray(jax.jit(jax.vmap(duel.select))(memory, incoming)))
    np.testing.assert_array_equal(*kept)
    stays = kept[0][:, 5]  # the mirrored row, where j goes
    assert 0.05 < stays.mean() < 0.95
    # Of two that tie any form may take either, and nothing else.
    monkeypatch.setattr(duel, "_select_by_windows", FORMS["all"])
    other = np.asarray(jax.jit(jax.vmap(duel.select))(memory, incoming))
    apart = kept[0] != other
    assert set(apart.sum(axis=1)) <= {0, 2} and not (apart.any(1) ^ apart[:, 5]).any()


def _distinct(queries, memory, q):
    return -np.log(np.mean(q(queries @ memory.T), axis=1))


@pytest.mark.parametrize("score", duel_twin.SCORES)
def test_distinctiveness_and_its_gradient(score):
    rng = np.random.default_rng(5)
    queries, memory = units(rng, 6, 4), units(rng, 9, 4)
    filled = np.arange(9) % 3 > 0

    def loss(queries, memory):
        return jnp.mean(
            duel.distinctiveness(
                queries, memory, temperature=0.3, score=score, filled=filled
            )
        )

    def twin(queries, memory):
        return np.mean(_distinct(queries, memory[filled], duel_twin.SCORES[score]))

    twins.check(loss, twin, [queries, memory], moving={0, 1})
    with jax.enable_x64(True):
        scores = duel.distinctiveness(queries, memory, temperature=0.3, score=score)
    np.testing.assert_allclose(
        scores, _distinct(queries, memory, duel_twin.SCORES[score])
    )


@pytest.mark.parametrize("score", duel_twin.SCORES)
def test_nothing_is_distinct_from_an_empty_memory(score):
    rows = jnp.eye(3, 4)
    scores = duel.distinctiveness(rows, rows, score=score, filled=jnp.zeros(3, bool))
    assert np.isposinf(scores).all()


@pytest.mark.parametrize("score", duel_twin.SCORES)
def test_an_update_is_safe_where_the_memory_stays_as_distinct(score):
    """To the incoming rows, whatever rows are kept; those that come may be all."""
    rng, found = np.random.default_rng(9), []
    q, arguments = duel_twin.SCORES[score], {"score": score, "temperature": 0.3}
    with jax.enable_x64(True):
        is_safe = jax.jit(functools.partial(duel.is_safe, **arguments))
        for trial in range(40):
            rows = units(rng, 12, 3, spread=0.4)
            keep = rng.permutation(12) < 5 if trial else np.arange(12) >= 7
            memory, incoming = rows[:5], rows[5:]
            found.append(bool(is_safe(memory, incoming, keep)))
            before, after = (
                np.mean(_distinct(incoming, some, q)) for some in (memory, rows[keep])
            )
            assert found[-1] == (before < after)
            # One that still fills up goes on.
            assert is_safe(memory, incoming, keep, filled=np.arange(5) != trial % 5)
    assert 2 < sum(found) < 38


def test_as_a_policy_it_is_the_loop():
    """Masked rows, in batches before and after the memory is full."""
    rng, capacity = np.random.default_rng(11), 9
    memory = buffer.create({"feature": np.zeros(4, np.float32)}, capacity)
    offer = jax.jit(policies.duel)
    for _ in range(8):
        rows = units(rng, 5, 4).astype(np.float32)
        mask = rng.random(5) < 0.8
        held = jax.tree.map(np.asarray, memory)
        keep = duel_twin.loop(
            held.items["feature"].astype(float),
            rows[mask].astype(float),
            duel_twin.SCORES["affine"],
            filled=held.filled,
        )
        slots = np.asarray(offer(memory, rows, mask))
        assert (slots[~mask] == capacity).all()
        free = iter(np.flatnonzero(~keep[:capacity]))
        want = [next(free) if comes else capacity for comes in keep[capacity:]]
        assert slots[mask].tolist() == want
        memory = buffer.write(memory, slots, {"feature": rows}, mask)
    assert bool(memory.filled.all())


def test_memory_use_is_linear():
    """Neither K x K nor K x B scores."""
    for score in duel_twin.SCORES:
        used = []
        for capacity in (2048, 8192):
            shapes = [
                jax.ShapeDtypeStruct((n, 32), jnp.float32) for n in (capacity, 2048)
            ]
            choose = jax.jit(functools.partial(duel.select, score=score))
            plan = choose.lower(*shapes).compile().memory_analysis()
            used.append(plan.temp_size_in_bytes)
        assert used[1] < 5 * used[0]
        assert used[1] < 32 * 2**20  # half of 8192 x 2048 floats
