"""Sets of graphs, and batches of graphs in one of a few static shapes.

`sources.graphs` reads a set, `buckets` chooses the shapes, and `pad_batch` makes a
batch of some rows on the host. Graphs are undirected: each edge is stored once in each
direction, and no node has an edge to itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl.data import stream
from jaxcl.errors import Refused

_DRAWS = 1000  # batches whose sizes `buckets` looks at
# Two quantiles and no more, since the program of each size takes seconds to compile.
_LEVELS = (0.9, 1.0)
_MULTIPLE = 32  # of which each size is one


class GraphSet(NamedTuple):
    """G graphs, addressed by row, with N nodes and E directed edges in all."""

    features: np.ndarray  # f32[N,F]
    edges: np.ndarray  # i32[2,E], nodes of the whole set, sorted by edges[0]
    graph_ptr: np.ndarray  # i32[G+1], graph g's nodes: graph_ptr[g]..graph_ptr[g+1]-1
    edge_ptr: np.ndarray  # i32[G+1], the same for its edges
    label: np.ndarray  # i32[G], from 0
    name: str
    class_names: tuple[str, ...]


class Graphs(NamedTuple):
    """A batch of B graphs with room for n nodes and e edges: a pytree.

    Nodes are sorted by graph, edges by receiver; padding comes last. Code that removes
    nodes unsets the masks of nodes and edges, and moves nothing.
    """

    features: jax.Array  # f32[n,F]
    node_graph: jax.Array  # i32[n], slot of the node's graph; B-1 for padding
    node_mask: jax.Array  # bool[n]
    senders: jax.Array  # i32[e], slots of nodes; n-1 for padding
    receivers: jax.Array  # i32[e]
    edge_mask: jax.Array  # bool[e]
    graph_mask: jax.Array  # bool[B]


class Budget(NamedTuple):
    """The static shape of a batch: the options of `pad_batch`."""

    nodes: int
    edges: int
    graphs: int


def take_graphs(graph_set: GraphSet, rows: np.ndarray) -> GraphSet:
    """Return the graphs at `rows`, renumbered from 0; labels are kept."""
    size, links = (x[rows] for x in _graph_sizes(graph_set))
    first, new = graph_set.graph_ptr[rows], np.cumsum(size) - size
    edges = graph_set.edges[:, _consecutive_runs(graph_set.edge_ptr[rows], links)]
    return graph_set._replace(
        features=graph_set.features[_consecutive_runs(first, size)],
        edges=(edges + np.repeat(new - first, links)).astype(np.int32),
        graph_ptr=np.append(0, np.cumsum(size)).astype(np.int32),
        edge_ptr=np.append(0, np.cumsum(links)).astype(np.int32),
        label=graph_set.label[rows],
    )


def pad_batch(
    graph_set: GraphSet, rows: np.ndarray, *, nodes: int, edges: int, graphs: int
) -> Graphs:
    """Return the graphs of some rows as one batch of this size, in NumPy arrays.

    Args:
      graph_set: set that `rows` index.
      rows: i[b], b <= graphs. The graph of rows[i] takes slot i; -1 leaves it empty.
      nodes, edges, graphs: sizes n, e and B of the batch.

    Raises:
      Refused: no such row, or the graphs are larger than the batch.
    """
    rows, count = np.asarray(rows), len(graph_set.label)
    is_valid = rows.ndim == 1 and np.issubdtype(rows.dtype, np.integer)
    if not is_valid or (rows.size and not -1 <= rows.min() <= rows.max() < count):
        raise Refused("rows", rows, f"must be integers below {count}, or -1")
    slots = np.flatnonzero(rows >= 0)
    part = take_graphs(graph_set, rows[slots])
    for name, needed, limit in (
        ("graphs", max(len(rows), 1), graphs),
        ("nodes", max(len(part.features), 1), nodes),
        ("edges", part.edges.shape[1], edges),
    ):
        if needed > limit:
            raise Refused(name, limit, f"the rows need at least {needed}")
    features = np.zeros((nodes, graph_set.features.shape[1]), np.float32)
    features[: len(part.features)] = part.features
    node_slots = np.repeat(slots, np.diff(part.graph_ptr))
    # The set is sorted by source. Each edge has its reverse, so swapping the ends gives
    # the same edges, sorted by receiver.
    receivers, senders = part.edges
    return Graphs(
        features=features,
        node_graph=_fill_up(node_slots, nodes, graphs - 1),
        node_mask=np.arange(nodes) < len(part.features),
        senders=_fill_up(senders, edges, nodes - 1),
        receivers=_fill_up(receivers, edges, nodes - 1),
        edge_mask=np.arange(edges) < len(senders),
        graph_mask=np.isin(np.arange(graphs), slots),
    )


def _graph_sizes(graph_set) -> list[np.ndarray]:
    """Return the number of nodes and number of edges of each graph, i64[G] each."""
    pointers = (graph_set.graph_ptr, graph_set.edge_ptr)
    return [np.diff(pointer).astype(np.int64) for pointer in pointers]


def _consecutive_runs(first, count) -> np.ndarray:
    """Return `count` numbers from each of `first` on, one after another."""
    return np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())


def _fill_up(values, length, padding) -> np.ndarray:
    """Return the values, followed by padding up to the length."""
    array = np.full(length, padding, np.int32)
    array[: len(values)] = values
    return array


def buckets(
    graph_set: GraphSet, batch_size: int, *, num_batches: int = 1
) -> tuple[Budget, ...]:
    """Choose a few rising sizes of batches; any `batch_size` rows fit the last.

    Each size costs one compilation, when a batch first needs it. The last has room for
    the most nodes and the most edges that `batch_size` graphs can have; batches hardly
    ever need it. The first holds nine tenths of 1,000 drawn batches, the next all of
    them.

    Args:
      graph_set: set that batches are drawn from.
      batch_size: graphs of a batch.
      num_batches: number of batches that share one size, see `pad_batches`.
    """
    sizes = np.stack(_graph_sizes(graph_set), axis=-1)
    drawn = _drawn_sizes(sizes, batch_size, num_batches)
    largest = np.sort(sizes, axis=0)[-batch_size:].sum(axis=0)
    wanted = [*(np.quantile(drawn, level, axis=0) for level in _LEVELS), largest]
    chosen = np.ceil(np.maximum(wanted, 1) / _MULTIPLE).astype(int) * _MULTIPLE
    return tuple(
        Budget(nodes, edges, batch_size)
        for nodes, edges in sorted({*map(tuple, chosen.tolist())})
    )


def _drawn_sizes(sizes, batch_size, num_batches) -> np.ndarray:
    """Draw sizes of batches, i64[_DRAWS,2]; the most of `num_batches` batches."""
    rng, steps = np.random.default_rng(0), -(-len(sizes) // batch_size)
    epochs, rows = range(-(-_DRAWS * num_batches // steps)), np.arange(len(sizes))
    orders = [stream.filled_order(rng, rows, batch_size) for _ in epochs]
    drawn = _batch_sizes(sizes, np.concatenate(orders)[: _DRAWS * num_batches])
    return drawn.reshape(_DRAWS, num_batches, 2).max(axis=1)


def _batch_sizes(sizes, order) -> np.ndarray:
    """Return nodes and edges of each batch of i[steps, batch], i64[steps,2]."""
    return np.where((order >= 0)[..., None], sizes[order], 0).sum(axis=1)


def budget_of(
    graph_set: GraphSet, rows: np.ndarray, budgets: Sequence[Budget]
) -> Budget:
    """Return the smallest batch shape of `budgets` that holds the graphs at some rows.

    Rows are i[b], or i[P, b] for P batches, which must all fit. Raises Refused
    if no budget is large enough.
    """
    rows = np.atleast_2d(rows)
    sizes = _batch_sizes(np.stack(_graph_sizes(graph_set), axis=-1), rows)
    for budget in budgets:
        if rows.shape[1] <= budget.graphs and (sizes <= budget[:2]).all():
            return budget
    nodes, edges = sizes.max(axis=0)
    raise Refused(
        f"{rows.shape[1]} rows with {nodes} nodes and {edges} edges fit none of "
        f"{budgets}"
    )


def pad_batches(
    graph_set: GraphSet, rows: np.ndarray, budgets: Sequence[Budget]
) -> Graphs:
    """Return P batches of one size, leaves [P, ...]: `pad_batch` for each row of i[P,
    b]."""
    budget = budget_of(graph_set, rows, budgets)._asdict()
    batches = [pad_batch(graph_set, part, **budget) for part in rows]
    return Graphs(*(np.stack(leaves) for leaves in zip(*batches, strict=True)))


def first_nodes(graphs: Graphs) -> jax.Array:
    """Return the first node slot of each graph, i32[B], masked or not."""
    slots = jnp.arange(len(graphs.graph_mask))
    return jnp.searchsorted(graphs.node_graph, slots).astype(jnp.int32)


def node_keys(key: jax.Array, graphs: Graphs) -> jax.Array:
    """Return a key for each node, keys[n], independent of padding and other graphs.

    The key is fold_in(fold_in(key, slot of the graph), position of the node in it).
    """
    fold_each = jax.vmap(jax.random.fold_in, (None, 0))
    keys = fold_each(key, jnp.arange(len(graphs.graph_mask)))[graphs.node_graph]
    within = jnp.arange(len(graphs.node_graph)) - first_nodes(graphs)[graphs.node_graph]
    return jax.vmap(jax.random.fold_in)(keys, within)
