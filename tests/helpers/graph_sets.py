"""Sets of small graphs, given pair by pair or drawn."""

import numpy as np

from jaxcl.data.stream import graph_arrays


def graph_set(pairs, sizes, features=None, labels=None):
    """A set of graphs given as lists of undirected pairs of their own nodes."""
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    edges, edge_ptr = [], [0]
    for start, edges_of in zip(starts, pairs, strict=False):
        edges += sorted(
            (start + a, start + b) for p in edges_of for a, b in (p, p[::-1])
        )
        edge_ptr.append(len(edges))
    if features is None:
        features = np.random.default_rng(len(edges)).normal(size=(starts[-1], 3))
    label = np.arange(len(sizes)) % 2 if labels is None else labels
    return graph_arrays.GraphSet(
        np.asarray(features, np.float32),
        np.array(edges, np.int32).reshape(-1, 2).T,
        starts.astype(np.int32),
        np.array(edge_ptr, np.int32),
        np.asarray(label, np.int32),
        "made",
        ("0", "1"),
    )


def random_set(count, rng, least=1, most=8, density=0.4, features=3):
    sizes = rng.integers(least, most + 1, count)
    pairs = [
        [(a, b) for a in range(n) for b in range(a) if rng.random() < density]
        for n in sizes
    ]
    return graph_set(pairs, sizes, rng.normal(size=(sizes.sum(), features)))


def dense(batch):
    """Features f64[n, F] and the matrix A of each slot of a padded batch."""
    for slot in range(len(batch.graph_mask)):
        nodes = np.flatnonzero((batch.node_graph == slot) & batch.node_mask)
        matrix = np.zeros((len(nodes),) * 2)
        for s, r in zip(
            batch.senders[batch.edge_mask],
            batch.receivers[batch.edge_mask],
            strict=True,
        ):
            if r in nodes:
                matrix[list(nodes).index(r), list(nodes).index(s)] = 1
        yield np.asarray(batch.features[nodes], np.float64), matrix
