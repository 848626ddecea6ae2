"""Random changes of graphs on the device, with static shapes: nodes are masked.

`make` builds the function. A graph with n nodes changes in one of three ways:

- "drop": removes floor(share n) nodes, drawn without replacement, and their edges.
- "mask": replaces the features of floor(share n) nodes by draws from N(mean, std).
- "subgraph": keeps a set of nodes and removes all others. The set starts as a random
  node. Each draw picks a random neighbour of the set and adds it, unless it is already
  in the set. The set is done when it has floor(keep n) + 1 nodes or after n draws.

You et al., "Graph Contrastive Learning with Augmentations", NeurIPS 2020, with the
options of ICL, WSDM 2023.

Departures: the released code of both papers draws only neighbours of the first node
(`growth="one_hop"`) and one kind of change for a whole batch (`choice="batch"`); both
are options here. It also has changes of edges, which it never draws; they are left out.

The set does not grow by single draws, which would be slow, but by rounds over all
edges, with the same distribution. Let a clock at each neighbour ring after an
exponential time: the next clock to ring belongs to each neighbour with equal
probability. So the times at which nodes first ring are lengths of shortest paths (first
passage percolation). The number of draws that add no node between two of these times is
geometric.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxcl import schema
from jaxcl.data.stream import graph_arrays

Kind = Literal["drop", "subgraph", "mask"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@schema.checked("config.augment")
def make(
    *,
    kinds: Annotated[tuple[Kind, ...], schema.Entries(once=True)] = KINDS,
    choice: Literal["graph", "batch"] = "graph",
    share: schema.Fraction = 0.1,
    keep: schema.Share = 0.2,
    growth: Literal["growing", "one_hop"] = "growing",
    mean: Annotated[float, schema.Range(-1e6, 1e6)] = 0.5,
    std: Annotated[float, schema.Range(0, 1e6)] = 0.5,
    remove_isolated: bool = True,
) -> Callable:
    """Build `augment(key, graphs) -> Graphs` of the same shapes.

    The change of a graph depends on the key, its slot in the batch and its own nodes
    and edges alone, not on the padding, the other graphs or the devices.

    Args:
      kinds: kinds of change, of which one is drawn uniformly.
      choice: unit for which a kind is drawn: each "graph" (the paper) or the "batch"
        (released code).
      share: share of a graph's nodes that "drop" and "mask" change, in [0, 1).
      keep: share of a graph's nodes that "subgraph" keeps besides the first, in [0, 1].
      growth: rule. "growing" draws from the neighbours of all nodes of the set,
        "one_hop" from the first node's neighbours alone (released code).
      mean, std: moments of the features that "mask" draws.
      remove_isolated: whether to mask nodes without an edge after any change; a graph
        without any node left stays unchanged (released code).

    Raises:
      Refused: an option is out of range.
    """
    changed = functools.partial(
        _change_graphs,
        kinds=kinds,
        choice=choice,
        share=share,
        keep=keep,
        growing=growth == "growing",
        mean=mean,
        std=std,
    )

    def augment(key, graphs):
        out = changed(key, graphs)
        return _keep_nonempty(without_isolated(out), graphs) if remove_isolated else out

    return augment


def _change_graphs(key, graphs, *, kinds, choice, share, keep, growing, mean, std):
    """Return the graphs, each after one kind of change."""
    k_kind, k_clock, k_grow, k_noise = jax.random.split(key, 4)
    kind = _draw_kinds(k_kind, graphs, len(kinds), choice)
    applies = {name: kinds.index(name) == kind for name in kinds}
    dropped, grown, masked = (
        applies.get(name, jnp.zeros_like(kind, bool)) for name in KINDS
    )
    # All three kinds take the first nodes in order of time, so they share one sort.
    time = _draw_clocks(k_clock, graphs)
    if "subgraph" in kinds:
        time, draws = _entry_times(k_grow, graphs, time, grown, growing)
    rank = _rank_nodes(time, graphs)
    quota = _node_quotas(graphs, jnp.where(grown, keep, share))
    out, graph = graphs, graphs.node_graph
    if "mask" in kinds:
        chosen = masked[graph] & (rank < quota) & graphs.node_mask
        out = _redraw_features(k_noise, graphs, chosen, mean, std)
    stays = ~dropped[graph] | (rank >= quota)
    if "subgraph" in kinds:
        inside = jnp.isfinite(time) & (rank <= quota)
        inside &= _enters_in_time(draws, time, rank, graphs, growing)
        stays &= ~grown[graph] | inside
    return keep_nodes(out, stays)


def keep_nodes(graphs: graph_arrays.Graphs, stays: jax.Array) -> graph_arrays.Graphs:
    """Mask the nodes that are False in `stays` bool[n], and their edges."""
    edge_stays = stays[graphs.senders] & stays[graphs.receivers]
    return graphs._replace(
        node_mask=graphs.node_mask & stays, edge_mask=graphs.edge_mask & edge_stays
    )


def without_isolated(graphs: graph_arrays.Graphs) -> graph_arrays.Graphs:
    """Mask the nodes without an edge."""
    linked = _over_edges(
        jax.ops.segment_max, graphs.edge_mask.astype(jnp.int32), graphs
    )
    return keep_nodes(graphs, linked > 0)


def _keep_nonempty(changed, graphs):
    """Return the changed graphs; graphs that have lost all nodes stay as before."""
    count = _counts(changed)[graphs.node_graph]
    nonempty, edge_left = count > 0, count[graphs.receivers] > 0
    return graphs._replace(
        features=jnp.where(nonempty[:, None], changed.features, graphs.features),
        node_mask=jnp.where(nonempty, changed.node_mask, graphs.node_mask),
        edge_mask=jnp.where(edge_left, changed.edge_mask, graphs.edge_mask),
    )


def _draw_kinds(key, graphs, count, choice):
    """Return the kind drawn for each graph, i32[B]."""
    slots = jnp.arange(len(graphs.graph_mask))
    if choice == "batch":
        return jnp.zeros_like(slots) + jax.random.randint(key, (), 0, count)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, slots)
    return jax.vmap(lambda k: jax.random.randint(k, (), 0, count))(keys)


def _counts(graphs):
    """Return the number of unmasked nodes of each graph, i32[B]."""
    ones = graphs.node_mask.astype(jnp.int32)
    slots = len(graphs.graph_mask)
    return jax.ops.segment_sum(ones, graphs.node_graph, slots, indices_are_sorted=True)


def _node_quotas(graphs, share):
    """Return floor(share n) for the graph of each node, i32[n]; `share` f32[B]."""
    return jnp.floor(share * _counts(graphs)).astype(jnp.int32)[graphs.node_graph]


def _over_edges(reduce, messages, graphs):
    """Reduce what the edges send at each receiving node."""
    nodes = len(graphs.node_graph)
    return reduce(messages, graphs.receivers, nodes, indices_are_sorted=True)


def _draw_clocks(key, graphs):
    """Draw an exponential time of each node, f32[n]; infinite for masked nodes."""
    drawn = jax.vmap(jax.random.exponential)(graph_arrays.node_keys(key, graphs))
    return jnp.where(graphs.node_mask, drawn, jnp.inf)


def _rank_nodes(time, graphs):
    """Return the rank of each node's time within its graph, from 0, i32[n]."""
    places = jnp.arange(len(time), dtype=jnp.int32)
    order = lax.sort((graphs.node_graph, time, places), num_keys=2)[2]
    rank = jnp.zeros_like(places).at[order].set(places, unique_indices=True)
    return rank - graph_arrays.first_nodes(graphs)[graphs.node_graph]


def _sum_earlier_nodes(counts, graphs):
    """Sum i32[n] over the earlier nodes of each node's graph."""
    before = jnp.cumsum(counts) - counts
    # Overflow is harmless: differences of wrapped sums are still exact.
    return before - before[graph_arrays.first_nodes(graphs)][graphs.node_graph]


def _redraw_features(key, graphs, chosen, mean, std):
    """Return the graphs with new random features at the chosen nodes, bool[n]."""
    width = graphs.features.shape[1:]
    keys = graph_arrays.node_keys(key, graphs)
    noise = mean + std * jax.vmap(lambda k: jax.random.normal(k, width))(keys)
    features = jnp.where(chosen[:, None], noise, graphs.features)
    return graphs._replace(features=features)


def _entry_times(key, graphs, clock, grown, growing):
    """Return the time at which each node enters the set of its graph.

    T(first) = 0, T(v) = clock(v) + min of T over the neighbours of v. This takes rounds
    over all edges until nothing changes, or one round if not `growing`.

    Args:
      key: threefry key of the first nodes, and of uniform numbers for
        `_enters_in_time`.
      graphs: the batch.
      clock: f32[n], exponential.
      grown: bool[B], the graphs whose kind is "subgraph".
      growing: whether neighbours of neighbours can enter.

    Returns:
      Times f32[n], infinite for nodes that cannot be reached; in graphs of another kind
      a node's time is its clock. Uniform draws f32[n] in (0, 1).
    """
    k_first, k_draws = jax.random.split(key)
    slots = jnp.arange(len(grown))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(k_first, slots)
    place_of_first = jax.vmap(lambda k, n: jax.random.randint(k, (), 0, n))(
        keys, jnp.maximum(_counts(graphs), 1)
    )
    place = _sum_earlier_nodes(graphs.node_mask.astype(jnp.int32), graphs)
    inside = grown[graphs.node_graph]
    first = inside & graphs.node_mask & (place == place_of_first[graphs.node_graph])

    def further(carry):
        time, _, rounds = carry
        messages = jnp.where(graphs.edge_mask, time[graphs.senders], jnp.inf)
        arrival = clock + _over_edges(jax.ops.segment_min, messages, graphs)
        new = jnp.where(first, 0.0, arrival)
        return new, jnp.any(new < time), rounds + 1

    # A shortest path has fewer edges than there are nodes.
    most = len(clock) if growing else 1
    start = (jnp.where(first, 0.0, jnp.inf), jnp.any(first), 0)
    time, *_ = lax.while_loop(
        lambda carry: carry[1] & (carry[2] < most), further, start
    )
    # Neither 0 nor 1, since `_enters_in_time` takes the logarithm and divides.
    draw = jax.vmap(lambda k: jax.random.uniform(k, minval=1e-7))
    draws = draw(graph_arrays.node_keys(k_draws, graphs))
    return jnp.where(inside, time, clock), draws


def _enters_in_time(draws, time, rank, graphs, growing):
    """Return whether n draws are enough for each node to enter the set.

    When j nodes have entered beside the first, the draws are from two kinds of
    neighbours: new ones, and others, which are in the set already: those j nodes, and
    with `growing` also the first node, which is a neighbour of one of them. The number
    of draws without a new node before the next new one is geometric with
    p = new / (new + others).

    Args:
      draws: f32[n] in (0, 1); a graph's j-th node has the draw for step j.
      time, rank: arrays from `_entry_times` and `_rank_nodes`.
      graphs, growing: arguments of `_entry_times`.

    Returns:
      bool[n]; it means nothing for graphs of another kind.
    """
    nodes = len(time)
    start = graph_arrays.first_nodes(graphs)[graphs.node_graph]
    reached = jnp.isfinite(time) & (rank > 0)
    # The step from which a node is a neighbour of the set, and may be drawn.
    since = jnp.zeros_like(rank)
    if growing:
        messages = jnp.where(graphs.edge_mask, rank[graphs.senders], nodes)
        since = _over_edges(jax.ops.segment_min, messages, graphs)
    entered = jax.ops.segment_sum(
        reached.astype(jnp.int32), jnp.where(reached, start + since, nodes), nodes
    )
    step = jnp.arange(nodes) - start
    new = _sum_earlier_nodes(entered, graphs) + entered - step
    others = step + (step > 0) if growing else step
    p = jnp.where(new > 0, new / jnp.maximum(new + others, 1), 1.0)
    size = _counts(graphs)[graphs.node_graph]
    wasted = jnp.floor(jnp.log(draws) / jnp.log1p(-p))
    used = 1 + jnp.minimum(wasted, size).astype(jnp.int32)
    return (
        _sum_earlier_nodes(used, graphs)[jnp.minimum(start + rank, nodes - 1)] <= size
    )
