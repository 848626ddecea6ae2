"""Readers against hand-made sets, batches against the graphs they were cut from."""

import math
import statistics

import jax
import numpy as np
import pytest

from helpers import graph_sets
from jaxcl.data import stream
from jaxcl.data.sources import graphs
from jaxcl.data.stream import graph_arrays


def dense(batch, slot):
    """Features and adjacency matrix of the live nodes of one slot."""
    nodes = np.flatnonzero((batch.node_graph == slot) & batch.node_mask)
    matrix = np.zeros((len(batch.node_mask),) * 2, int)
    live = batch.edge_mask
    np.add.at(matrix, (batch.senders[live], batch.receivers[live]), 1)
    return batch.features[nodes], matrix[np.ix_(nodes, nodes)]


def own(made, row):
    """The same of a row of a set."""
    low, high = made.graph_ptr[row : row + 2]
    matrix = np.zeros((high - low,) * 2, int)
    first, last = made.edge_ptr[row : row + 2]
    for a, b in made.edges[:, first:last].T:
        matrix[a - low, b - low] += 1
    return made.features[low:high], matrix


# --- readers ------------------------------------------------------------------


# A path of three nodes, a node alone, a triangle.
FILE = {
    "edges": [[0, 1, 1, 2, 4, 4, 5, 5, 6, 6], [1, 0, 2, 1, 5, 6, 4, 6, 4, 5]],
    "graph_ptr": [0, 3, 4, 7],
    "edge_ptr": [0, 4, 4, 10],
    "label": [1, 0, 1],
}
LABELS = [0, 2, 0, 1, 2, 2, 0]
ATTRIBUTES = [[0.5], [3.0], [0.0], [1.0], [-2.0], [0.25], [7.0]]


def read_graphs(path, **options):
    """The graphs of a source, all of which are for training."""
    return graphs.graphs(path=str(path), **options).train.graphs


def write(path, **arrays):
    arrays = {k: v for k, v in (FILE | arrays).items() if v is not None}
    np.savez(path, **{k: np.asarray(v) for k, v in arrays.items()})
    return str(path)


def test_graphs_without_nodes_are_told_of(tmp_path, caplog):
    """As where graph_labels has more lines than there are graphs."""
    path = write(tmp_path / "a.npz", graph_ptr=[0, 3, 3, 7], edge_ptr=[0, 4, 4, 10])
    assert len(read_graphs(path).label) == 3
    assert "1 of 3" in caplog.text and "graph 2" in caplog.text
    caplog.clear()
    read_graphs(write(tmp_path / "b.npz"))
    assert not caplog.records


def test_npz_is_read_as_written(tmp_path):
    path = write(tmp_path / "small.npz", node_label=LABELS, node_attr=ATTRIBUTES)
    made = read_graphs(path, normalise=False)
    for field in ("edges", "graph_ptr", "edge_ptr", "label"):
        np.testing.assert_array_equal(getattr(made, field), FILE[field])
        assert getattr(made, field).dtype == np.int32
    want = np.concatenate([ATTRIBUTES, np.eye(3)[LABELS]], axis=1)
    np.testing.assert_array_equal(made.features, want.astype(np.float32))
    assert made.features.dtype == np.float32
    assert (made.name, made.class_names) == ("small", ("0", "1"))
    path = write(tmp_path / "named.npz", class_names=["enzyme", "none"])
    assert read_graphs(path).class_names == ("enzyme", "none")


def test_rows_are_divided_by_their_sum_if_it_is_above_one(tmp_path):
    sizes = np.abs(ATTRIBUTES)
    path = write(tmp_path / "a.npz", node_label=LABELS, node_attr=sizes)
    made = read_graphs(path).features
    rows = np.concatenate([sizes, np.eye(3)[LABELS]], axis=1)
    # Sums are 1.5, 4, 1, 2, 3, 1.25, 8: the third stays.
    want = rows / np.array([1.5, 4, 1, 2, 3, 1.25, 8])[:, None]
    np.testing.assert_allclose(made, want, rtol=1e-6)


def test_negative_attributes_are_not_divided_by_a_sum(tmp_path):
    path = write(tmp_path / "a.npz", node_label=LABELS, node_attr=ATTRIBUTES)
    with pytest.raises(ValueError) as refused:
        read_graphs(path)
    assert "config.data.normalise=True" in str(refused.value)
    assert "-2" in str(refused.value)
    assert read_graphs(path, normalise=False).features.min() == -2
    labels = read_graphs(path, features=("labels",)).features
    np.testing.assert_array_equal(labels, np.eye(3)[LABELS])


@pytest.mark.parametrize(
    "given, features, width",
    [
        ({}, None, 5),  # nothing in the file: degrees
        ({"node_label": [0] * 7}, None, 5),  # one label for all says nothing
        ({"node_label": [0] * 7}, ("labels",), 1),
        ({"node_label": LABELS}, None, 3),
        ({"node_attr": ATTRIBUTES}, None, 1),
        ({"node_label": LABELS, "node_attr": ATTRIBUTES}, ("labels", "ldp"), 8),
        ({"node_label": np.stack([LABELS, [4, 5, 4, 5, 4, 4, 4]], 1)}, None, 5),
    ],
)
def test_features_are_those_asked_for(tmp_path, given, features, width):
    path = write(tmp_path / "a.npz", **given)
    made = read_graphs(path, features=features, normalise=False).features
    assert made.shape == (7, width)
    if features == ("labels", "ldp"):
        np.testing.assert_array_equal(made[:, :3], np.eye(3)[LABELS])
        np.testing.assert_array_equal(made[:, 3], [1, 2, 1, 0, 2, 2, 2])


def changed(field, at, value):
    array = np.array(FILE[field])
    array[at] = value
    return {field: array}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"graph_ptr": None}, r"lacks \['graph_ptr'\]"),
        ({"label": [0, -1, 1]}, "label.*-1"),
        (changed("graph_ptr", 1, 5), "graph_ptr"),
        (changed("edges", (1, 2), 4), r"edge 3.*\[2, 5\]"),
        ({"edges": [[0, 1]]}, r"edges.*\(1, 2\)"),
        ({"node_label": [0, 1]}, r"node labels \(2,\).* 7 "),
        ({"node_attr": [[np.nan]] * 7}, "node attributes"),
    ],
)
def test_npz_refuses_what_breaks_its_promises(tmp_path, wrong, message):
    path = write(tmp_path / "wrong.npz", **wrong)
    with pytest.raises(ValueError, match="wrong.npz.*" + message):
        read_graphs(path)


# The graphs of FILE: one direction of an edge missing, one line twice, a node with an
# edge to itself, lines in any order.
TEXT = {
    "A": "7, 6\n1, 2\n2, 1\n2, 3\n3,2\n5, 6\n6, 5\n5, 7\n7, 5\n5, 7\n4, 4\n",
    "graph_indicator": "1\n1\n1\n2\n3\n3\n3\n",
    "graph_labels": "1\n-1\n1\n",
    "node_labels": "".join(f"{10 * label}\n" for label in LABELS),
    "node_attributes": "".join(f"{x}\n" for (x,) in ATTRIBUTES),
}


def write_text(folder, name="TOY", **files):
    folder.mkdir(exist_ok=True)
    for part, text in (TEXT | files).items():
        if text is not None:
            (folder / f"{name}_{part}.txt").write_text(text)
    return str(folder)


def test_tu_text_gives_what_npz_gives(tmp_path):
    made = read_graphs(write_text(tmp_path / "toy"), normalise=False)
    path = write(tmp_path / "a.npz", node_label=LABELS, node_attr=ATTRIBUTES)
    want = read_graphs(path, normalise=False)
    for field in ("features", "edges", "graph_ptr", "edge_ptr", "label"):
        np.testing.assert_array_equal(getattr(made, field), getattr(want, field))
        assert getattr(made, field).dtype == getattr(want, field).dtype
    assert (made.name, made.class_names) == ("TOY", ("-1", "1"))


def test_tu_text_without_node_files_or_edges(tmp_path):
    folder = write_text(tmp_path / "x", node_labels=None, node_attributes=None)
    made = read_graphs(folder, features=("ldp",), normalise=False)
    np.testing.assert_array_equal(made.features[:, 0], [1, 2, 1, 0, 2, 2, 2])
    folder = write_text(tmp_path / "y", A="")
    made = read_graphs(folder, normalise=False)
    assert made.edges.shape == (2, 0) and made.edge_ptr.tolist() == [0] * 4
    write_text(tmp_path / "y", name="OTHER", graph_labels="0\n0\n0\n")
    with pytest.raises(ValueError, match="OTHER_A.txt.*TOY_A.txt"):
        read_graphs(folder)


@pytest.mark.parametrize(
    "files, message",
    [
        ({"A": "1, 2\n3, 8\n"}, r"TOY_A.txt: edge 2.*\[3, 8\].*1 to 7"),
        ({"A": "1, 2\n2, 1\n3, 4\n"}, r"edge 3.*\[3, 4\]"),
        ({"graph_labels": None}, "TOY_graph_labels.txt"),
        ({"graph_labels": "1\n1\n"}, "graph_indicator.txt.*in 1 to 2"),
        ({"graph_indicator": "1\n1\n1\n3\n2\n3\n3\n"}, "graph_indicator.txt"),
        ({"A": None}, "NAME_A.txt"),
    ],
)
def test_tu_text_refuses_what_does_not_fit(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        read_graphs(write_text(tmp_path / "toy", **files))
    with pytest.raises(ValueError, match="path='nowhere'"):
        read_graphs("nowhere")


@pytest.mark.parametrize("std", ["sample", "population"])
def test_degree_profile_equals_loops(std):
    made = graph_sets.random_set(20, np.random.default_rng(0))
    got = graphs.degree_profile(made.edges, len(made.features), std=std)
    neighbours = [made.edges[1, made.edges[0] == v] for v in range(len(got))]
    spread = statistics.pstdev if std == "population" else statistics.stdev
    for v, near in enumerate(neighbours):
        degrees = [float(len(neighbours[u])) for u in near]
        want = [0.0] * 5
        if degrees:
            last = spread(degrees) if len(degrees) > 1 else 0.0
            middle = statistics.fmean(degrees)
            want = [len(near), min(degrees), max(degrees), middle, last]
        np.testing.assert_allclose(got[v], want, atol=1e-9)


# --- batches ------------------------------------------------------------------


def test_an_epoch_holds_every_row_once_and_says_where_rows_end():
    rows = np.arange(100, 111)
    order = stream.filled_order(np.random.default_rng(0), rows, 4)
    assert order.shape == (3, 4) and order.dtype == np.int32
    assert order.ravel()[-1] == -1 and (order.ravel()[:-1] >= 0).all()
    assert sorted(order.ravel()[:-1]) == rows.tolist()
    assert order.ravel()[:-1].tolist() != rows.tolist()
    again = stream.filled_order(np.random.default_rng(0), rows, 4)
    np.testing.assert_array_equal(order, again)
    assert stream.filled_order(np.random.default_rng(0), rows, 11).min() == 100


def test_a_batch_holds_the_graphs_of_its_rows():
    made = graph_sets.random_set(12, np.random.default_rng(1))
    rows = [7, 0, -1, 11, 3]
    batch = graph_arrays.pad_batch(made, rows, nodes=50, edges=160, graphs=7)
    assert batch.graph_mask.tolist() == [True, True, False, True, True, False, False]
    for slot in range(7):
        features, matrix = dense(batch, slot)
        row = rows[slot] if slot < 5 else -1
        want = own(made, row) if row >= 0 else (features[:0], matrix[:0, :0])
        np.testing.assert_array_equal(features, want[0])
        np.testing.assert_array_equal(matrix, want[1])
    # What fast sums rely on, and indices that need no check.
    for index, top in ((batch.node_graph, 7), (batch.receivers, 50)):
        assert (np.diff(index) >= 0).all() and 0 <= index.min() <= index.max() < top
    assert (batch.senders[~batch.edge_mask] == 49).all()
    assert not batch.features[~batch.node_mask].any()
    assert {x.dtype for x in batch} == {np.dtype(t) for t in ("f4", "i4", "?")}


def test_every_batch_fits_a_bucket_the_largest_graphs_too():
    rng = np.random.default_rng(2)
    made = graph_sets.random_set(60, rng, most=20)
    rows, budgets = np.arange(60), graph_arrays.buckets(made, 8)
    assert budgets == graph_arrays.buckets(made, 8) and 2 <= len(budgets) <= 3
    pairs = np.array([b[:2] for b in budgets])
    assert (np.diff(pairs, axis=0) >= 0).all() and (pairs % 32 == 0).all()
    nodes, links = np.diff(made.graph_ptr), np.diff(made.edge_ptr)
    largest = [np.sort(x)[-8:].sum() for x in (nodes, links)]
    assert budgets[-1][:2] == tuple(32 * math.ceil(x / 32) for x in largest)
    most = [np.argsort(x)[-8:] for x in (nodes, links)]
    epochs = [stream.filled_order(rng, rows, 8) for _ in range(20)]
    for batch in [*most, *np.concatenate(epochs)]:
        graph_arrays.pad_batch(
            made, batch, **graph_arrays.budget_of(made, batch, budgets)._asdict()
        )
    # The first size holds nine tenths of the batches.
    chosen = [graph_arrays.budget_of(made, x, budgets) for x in np.concatenate(epochs)]
    uses = [chosen.count(budget) for budget in budgets]
    assert 0.8 < uses[0] / sum(uses) < 1 and uses[-1] <= 2


def test_a_batch_has_the_first_budget_that_it_fits():
    made = graph_sets.random_set(23, np.random.default_rng(3))
    budgets = (graph_arrays.Budget(18, 30, 5), graph_arrays.Budget(40, 120, 5))
    uses = [0, 0]
    for rows in stream.filled_order(np.random.default_rng(0), np.arange(23), 5):
        budget = graph_arrays.budget_of(made, rows, budgets)
        graph_arrays.pad_batch(made, rows, **budget._asdict())
        uses[budgets.index(budget)] += 1
        if budget == budgets[1]:
            with pytest.raises(ValueError, match="need at least"):
                graph_arrays.pad_batch(made, rows, **budgets[0]._asdict())
            with pytest.raises(ValueError, match="5 rows"):
                graph_arrays.budget_of(made, rows, budgets[:1])
    assert min(uses) > 0
    sizes = np.diff(made.graph_ptr)  # of several batches all must fit
    several = np.stack([np.argsort(sizes)[:3], np.argsort(sizes)[-3:]])
    one, both = (
        graph_arrays.budget_of(made, x, budgets) for x in (several[0], several)
    )
    assert (one, both) == budgets
    with pytest.raises(ValueError, match="6 rows"):
        graph_arrays.budget_of(made, np.full(6, -1), budgets)


def test_node_keys_are_those_of_slot_and_place():
    made = graph_sets.random_set(6, np.random.default_rng(4))
    key = jax.random.key(3)
    for budget in (graph_arrays.Budget(40, 120, 4), graph_arrays.Budget(61, 99, 9)):
        batch = graph_arrays.pad_batch(made, [5, -1, 2, 3], **budget._asdict())
        keys = graph_arrays.node_keys(key, batch)
        assert keys.shape == (budget.nodes,)
        got = jax.random.key_data(keys)
        assert len(np.unique(np.asarray(got), axis=0)) == budget.nodes
        place = 0
        for node in np.flatnonzero(batch.node_mask):
            slot = int(batch.node_graph[node])
            new = node == 0 or batch.node_graph[node - 1] != slot
            place = 0 if new else place + 1
            want = jax.random.fold_in(jax.random.fold_in(key, slot), place)
            np.testing.assert_array_equal(got[node], jax.random.key_data(want))
