"""Each change against what it promises: counts, exact probabilities, statistics."""

import collections
import functools
import math

import jax
import numpy as np
import pytest
from scipy import stats

from helpers import graph_sets, interpreted, key_uses
from jaxcl.data.augment import graphs as augment_graphs
from jaxcl.data.stream import graph_arrays

COMPLETE = [(a, b) for a in range(20) for b in range(a)]


@functools.lru_cache
def build(**options):
    return interpreted.jit(augment_graphs.make(**options))


def run(batch, seed=0, **options):
    out = build(**options)(jax.random.key(seed), batch)
    for field in ("node_graph", "senders", "receivers", "graph_mask"):
        np.testing.assert_array_equal(getattr(out, field), getattr(batch, field))
    return jax.tree.map(np.asarray, out)


def copies(pairs, size, count, features=None):
    """A batch of `count` equal graphs, without filling."""
    made = graph_sets.graph_set([pairs], [size], features)
    edges = max(2 * len(pairs), 1) * count
    budget = dict(nodes=size * count, edges=edges, graphs=count)
    return graph_arrays.pad_batch(made, np.zeros(count, int), **budget)


def live_edges(batch):
    pairs = np.stack([batch.senders, batch.receivers])[:, batch.edge_mask]
    return {(int(s), int(r)) for s, r in pairs.T}


def induced(batch, out):
    """Edges of `batch` both ends of which `out` has."""
    nodes = set(np.flatnonzero(out.node_mask).tolist())
    return {(s, r) for s, r in live_edges(batch) if {s, r} <= nodes}


# --- counts -------------------------------------------------------------------


SIZES = [1, 5, 9, 10, 19, 20, 25, 31]


def of_sizes(density=1.0):
    rng = np.random.default_rng(0)
    pairs = [
        [(a, b) for a in range(n) for b in range(a) if rng.random() < density]
        for n in SIZES
    ]
    made = graph_sets.graph_set(pairs, SIZES)
    return graph_arrays.pad_batch(made, range(8), nodes=130, edges=2600, graphs=10)


def per_graph(mask, batch):
    return np.bincount(batch.node_graph[mask], minlength=10)[:8].tolist()


def test_a_tenth_of_the_nodes_drops_with_its_edges():
    batch = of_sizes()
    out = run(batch, kinds=("drop",), remove_isolated=False)
    left = [n - n // 10 for n in SIZES]
    assert per_graph(out.node_mask, batch) == left
    assert not (out.node_mask & ~batch.node_mask).any()
    assert live_edges(out) == induced(batch, out)
    np.testing.assert_array_equal(out.features, batch.features)
    out = run(batch, kinds=("drop",), share=0.5, remove_isolated=False)
    assert per_graph(out.node_mask, batch) == [n - n // 2 for n in SIZES]


def test_a_tenth_of_the_nodes_gets_drawn_features():
    batch = of_sizes()
    out = run(batch, kinds=("mask",), remove_isolated=False)
    moved = (out.features != batch.features).any(axis=1)
    assert per_graph(moved, batch) == [n // 10 for n in SIZES]
    assert not moved[~batch.node_mask].any()
    np.testing.assert_array_equal(out.node_mask, batch.node_mask)
    np.testing.assert_array_equal(out.edge_mask, batch.edge_mask)


@pytest.mark.parametrize("choice, growth", [("graph", "growing"), ("batch", "one_hop")])
def test_no_two_draws_share_a_key(choice, growth):
    """Which nodes change, and to what, are independent."""
    change = augment_graphs.make(choice=choice, growth=growth)
    given = jax.random.key(0), of_sizes()
    uses = key_uses.of(jax.make_jaxpr(change)(*given), jax.tree.leaves(given))
    assert len(uses) > 3 * sum(SIZES) and not key_uses.shared(uses)


@pytest.mark.parametrize("growth", ["growing", "one_hop"])
def test_a_fifth_of_the_nodes_and_one_stay_and_hang_together(growth):
    batch = of_sizes()
    out = run(batch, kinds=("subgraph",), growth=growth, remove_isolated=False)
    assert per_graph(out.node_mask, batch) == [n // 5 + 1 for n in SIZES]
    assert live_edges(out) == induced(batch, out)
    # Where edges are few the set hangs together, and n draws may not be enough.
    batch = of_sizes(density=0.15)
    out = run(batch, kinds=("subgraph",), growth=growth, remove_isolated=False)
    assert live_edges(out) == induced(batch, out)
    for slot, n in enumerate(SIZES):
        nodes = np.flatnonzero(out.node_mask & (batch.node_graph == slot)).tolist()
        assert 1 <= len(nodes) <= n // 5 + 1
        found, edges = {nodes[0]}, live_edges(out)
        for _ in nodes:
            found |= {r for s, r in edges if s in found}
        assert found == set(nodes)
        if growth == "one_hop":
            around = [{r for s, r in edges if s == v} | {v} for v in nodes]
            assert set(nodes) in around


# --- probabilities ------------------------------------------------------------


def chi_square(counts, probabilities):
    """p-value of counts of outcomes; the rare ones are joined."""
    assert set(counts) <= {k for k, p in probabilities.items() if p > 0}
    total = sum(counts.values())
    assert abs(sum(probabilities.values()) - 1) < 1e-9
    common = [k for k, p in probabilities.items() if p * total >= 8]
    got = [counts[k] for k in common]
    want = [probabilities[k] * total for k in common]
    if total - sum(want) > 1e-6 * total:
        got.append(total - sum(got))
        want.append(total - sum(want))
    return stats.chisquare(got, want).pvalue


def outcomes(out, size):
    """How often each set of nodes is what is left of a copy."""
    rows = out.node_mask.reshape(-1, size)
    return collections.Counter(tuple(np.flatnonzero(row).tolist()) for row in rows)


def test_all_sets_of_nodes_are_equally_likely_to_drop():
    out = run(copies([], 7, 3000), kinds=("drop",), share=0.3, remove_isolated=False)
    counts = outcomes(out, 7)
    sets = {
        tuple(sorted({*range(7)} - {a, b})): 1 / 21 for a in range(7) for b in range(a)
    }
    assert chi_square(counts, sets) > 1e-3
    # Neighbouring copies and other keys are other draws.
    rows = np.flatnonzero(~out.node_mask).reshape(3000, 2) % 7
    assert 0.01 < (rows[1:] == rows[:-1]).all(axis=1).mean() < 0.09
    again = run(
        copies([], 7, 3000), 1, kinds=("drop",), share=0.3, remove_isolated=False
    )
    same = (again.node_mask == out.node_mask).reshape(3000, 7).all(axis=1).mean()
    assert 0.03 < same < 0.07


def released_growth(pairs, size, keep, growing):
    """Exact probability of each final set of the loop of single draws.

    while |set| <= keep * size: count one try, stop above `size` of them or without
    neighbours; draw a neighbour; go on if it is in the set; else it joins, and, with
    `growing`, its neighbours join those drawn from.
    """
    near = collections.defaultdict(set)
    for a, b in pairs:
        near[a].add(b)
        near[b].add(a)
    final = collections.defaultdict(float)
    states = collections.defaultdict(float)
    for v in range(size):
        states[frozenset([v]), frozenset(near[v])] += 1 / size
    for tries in range(1, size + 2):
        after = collections.defaultdict(float)
        for (inside, around), p in states.items():
            if len(inside) > math.floor(keep * size) or tries > size or not around:
                final[tuple(sorted(inside))] += p
                continue
            for v in around:
                joined = around | near[v] if growing and v not in inside else around
                after[inside | {v}, frozenset(joined)] += p / len(around)
        states = after
    assert not states
    return dict(final)


TREES = {
    # A path with a short cut and a branch: neighbours differ in number, and n tries
    # are often too few for six nodes.
    "branched": ([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 4), (2, 6), (6, 7)], 8),
    "star": ([(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (5, 6)], 8),  # 7 has no edge
}


@pytest.mark.parametrize("keep", [0.4, 0.7])
@pytest.mark.parametrize("growth", ["growing", "one_hop"])
@pytest.mark.parametrize("name", TREES)
def test_sets_grow_with_the_probabilities_of_single_draws(name, growth, keep):
    pairs, size = TREES[name]
    batch = copies(pairs, size, 4000)
    out = run(
        batch, kinds=("subgraph",), keep=keep, growth=growth, remove_isolated=False
    )
    want = released_growth(pairs, size, keep, growth == "growing")
    assert chi_square(outcomes(out, size), want) > 1e-3


def kinds_of(out, batch, size):
    """What happened to each of some complete graphs, no two of which look alike."""
    left = out.node_mask.reshape(-1, size).sum(axis=1)
    moved = (out.features != batch.features).any(axis=1).reshape(-1, size).any(axis=1)
    names = {(18, False): "drop", (5, False): "subgraph", (20, True): "mask"}
    return [names[int(n), bool(m)] for n, m in zip(left, moved, strict=True)]


def test_one_kind_is_drawn_for_each_graph_or_for_the_batch():
    batch = copies(COMPLETE, 20, 200)
    found = collections.Counter(kinds_of(run(batch), batch, 20))
    assert chi_square(found, dict.fromkeys(augment_graphs.KINDS, 1 / 3)) > 1e-3
    batch = copies(COMPLETE, 20, 3)
    drawn = [set(kinds_of(run(batch, i, choice="batch"), batch, 20)) for i in range(40)]
    assert all(len(names) == 1 for names in drawn)
    found = collections.Counter(name for names in drawn for name in names)
    assert chi_square(found, dict.fromkeys(augment_graphs.KINDS, 1 / 3)) > 1e-3
    two = run(batch, kinds=("mask", "drop"), choice="graph")
    assert set(kinds_of(two, batch, 20)) <= {"mask", "drop"}


# --- what the draws depend on -------------------------------------------------


@pytest.mark.parametrize("choice, growth", [("graph", "growing"), ("batch", "one_hop")])
def test_filling_and_other_graphs_change_nothing(choice, growth):
    made = graph_sets.random_set(
        30, np.random.default_rng(1), least=5, most=30, density=0.2
    )
    rows = np.arange(30)[::-1]
    small = graph_arrays.pad_batch(made, rows[:20], nodes=500, edges=3000, graphs=20)
    large = graph_arrays.pad_batch(made, rows, nodes=1111, edges=7000, graphs=40)
    n = int(small.node_mask.sum())
    e = int(small.edge_mask.sum())
    for seed in range(3):
        options = dict(choice=choice, growth=growth)
        a, b = run(small, seed, **options), run(large, seed, **options)
        np.testing.assert_array_equal(a.node_mask[:n], b.node_mask[:n])
        np.testing.assert_array_equal(a.edge_mask[:e], b.edge_mask[:e])
        np.testing.assert_allclose(a.features[:n], b.features[:n], rtol=1e-5, atol=1e-6)
        assert (a.node_mask[:n] != small.node_mask[:n]).any() or choice == "batch"
        for out, batch in ((a, small), (b, large)):
            assert not (out.node_mask & ~batch.node_mask).any()
            assert not (out.edge_mask & ~batch.edge_mask).any()
            new = (out.features != batch.features).any(axis=1)
            assert not (new & ~batch.node_mask).any()


def test_masked_nodes_do_not_count():
    batch = copies(COMPLETE, 20, 6)
    gone = np.arange(120) % 20 < 10
    live = batch.edge_mask & ~gone[batch.senders] & ~gone[batch.receivers]
    batch = batch._replace(node_mask=~gone, edge_mask=live)
    for kind, left in (("drop", 9), ("subgraph", 3), ("mask", 10)):
        out = run(batch, kinds=(kind,))
        assert out.node_mask.reshape(6, 20).sum(axis=1).tolist() == [left] * 6
        assert not (out.node_mask & gone).any()
        moved = (out.features != batch.features).any(axis=1)
        assert moved.sum() == (6 if kind == "mask" else 0) and not moved[gone].any()


# --- nodes without an edge ----------------------------------------------------


@functools.cache
def sparse():
    """30 times: half of the nodes without an edge, then a graph without any."""
    pairs = [(0, 1), (2, 3), (3, 4), (4, 5), (5, 2)]  # 6 .. 11 have none
    made = graph_sets.graph_set([pairs, []], [12, 12])
    return graph_arrays.pad_batch(made, [0, 1] * 30, nodes=720, edges=300, graphs=60)


@pytest.mark.parametrize("kind", augment_graphs.KINDS)
def test_nodes_without_an_edge_leave_and_no_graph_does(kind):
    batch = sparse()
    whole = run(batch, kinds=(kind,), remove_isolated=False)
    out = run(batch, kinds=(kind,))
    for slot in range(60):
        mine = batch.node_graph == slot
        at = mine[batch.receivers]
        ends = set(batch.receivers[whole.edge_mask & at].tolist())
        if ends:
            assert set(np.flatnonzero(out.node_mask & mine)) == ends
            np.testing.assert_array_equal(out.edge_mask[at], whole.edge_mask[at])
            np.testing.assert_allclose(
                out.features[mine], whole.features[mine], atol=1e-6
            )
        else:  # the graph as it was, nodes without an edge and features too
            assert (out.node_mask & mine).sum() == 12
            np.testing.assert_array_equal(out.edge_mask[at], batch.edge_mask[at])
            np.testing.assert_array_equal(out.features[mine], batch.features[mine])
    left = out.node_mask.reshape(60, 12).sum(axis=1)
    assert (left[1::2] == 12).all()
    if kind == "subgraph":  # both cases occur
        assert {*left[::2]} >= {2, 3, 12}
    # Without the option the change itself is kept.
    moved = (whole.features != batch.features).any(axis=1).reshape(60, 12).sum(axis=1)
    assert (moved == (1 if kind == "mask" else 0)).all()
    kept = whole.node_mask.reshape(60, 12).sum(axis=1)[1::2]
    assert (kept == {"drop": 11, "subgraph": 1, "mask": 12}[kind]).all()


def test_a_batch_without_graphs_passes():
    made = graph_sets.random_set(3, np.random.default_rng(0))
    for rows in ([-1], [-1, 0]):
        batch = graph_arrays.pad_batch(made, rows, nodes=130, edges=2600, graphs=10)
        out = run(
            batch, 2, kinds=("subgraph",), growth="growing", remove_isolated=False
        )
        assert out.node_mask.any() == (len(rows) > 1)
        assert not (out.node_mask & ~batch.node_mask).any()
