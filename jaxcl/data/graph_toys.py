"""A small set of graphs made by rule, for first runs and tests."""

import numpy as np

from jaxcl.data import graph_files, graphs, stream

_NAMES = ("rings", "trees")


def rings_and_trees(
    *, count: int = 96, nodes: tuple[int, int] = (6, 14), seed: int = 0
) -> stream.Dataset:
    """Rings with a few chords, and random trees, in turn.

    Features are degree profiles, see `graph_files.degree_profile`.

    Args:
      count: graphs.
      nodes: least and most nodes of a graph.
      seed: of sizes, chords and trees.

    Raises:
      ValueError: a number is out of its range.
    """
    if count < 2 or not 4 <= nodes[0] <= nodes[1]:
        raise ValueError(
            f"count = {count}, nodes = {nodes}: must be at least 2, and rise from 4"
        )
    rng = np.random.default_rng(seed)
    pairs, sizes = [], rng.integers(nodes[0], nodes[1], size=count, endpoint=True)
    for graph, size in enumerate(sizes):
        each = np.arange(size)
        if graph % 2:
            edges = [(i, rng.integers(i)) for i in each[1:]]
        else:
            edges = [(i, (i + 1) % size) for i in each]
            edges += [(i, (i + size // 2) % size) for i in rng.choice(size, 2)]
        pairs.append(np.array(edges) + sizes[:graph].sum())
    ends = np.concatenate(pairs).T
    both = np.unique(np.concatenate([ends, ends[::-1]], axis=1), axis=1)
    graph_ptr = np.concatenate([[0], np.cumsum(sizes)])
    made = graphs.GraphSet(
        graph_files.degree_profile(both, graph_ptr[-1]).astype(np.float32),
        both.astype(np.int32),
        graph_ptr.astype(np.int32),
        np.searchsorted(both[0], graph_ptr).astype(np.int32),
        (np.arange(count) % 2).astype(np.int32),
        "rings_and_trees",
        _NAMES,
    )
    domain = np.zeros_like(made.label)
    train = stream.Examples(label=made.label, domain=domain, graphs=made)
    return stream.Dataset(made.name, made.class_names, ("all",), train, None, None)
