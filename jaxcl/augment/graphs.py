"""Random changes of graphs on the device, with static shapes: nodes are masked.

`make` builds the function. Three kinds of change, each of one graph with n nodes:

- "drop": floor(share n) nodes without replacement leave, with their edges.
- "mask": the features of as many are drawn anew from N(mean, std).
- "subgraph": a set of nodes grows from a random one by a random neighbour of the set,
  until it has floor(keep n) + 1 nodes or n neighbours were drawn (those that are in it
  already count); all others leave.

You et al., "Graph Contrastive Learning with Augmentations", NeurIPS 2020, with the
options of ICL, WSDM 2023.

Departures from the released code of both, which never extends the neighbours that it
draws from, so that only those of the first node come in (`growth="one_hop"`), and which
draws one kind for a whole batch (`choice="batch"`). Instead of by single draws a set
grows by rounds over all edges, with the same distribution, draws that hit nothing new
included: where every neighbour that is drawn from rings after an exponential time, the
next to ring is any of them with equal probability. So the times of first ringing are
shortest paths (first passage percolation), and how many draws hit nothing new between
two of them is geometric. Not here: the edge changes that the code has and never draws.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxcl import core
from jaxcl.data import graphs as graphs_lib

KINDS = ("drop", "subgraph", "mask")
CHOICES = ("graph", "batch")
GROWTHS = ("growing", "one_hop")


def make(
    *,
    kinds: tuple[str, ...] = KINDS,
    choice: str = "graph",
    share: float = 0.1,
    keep: float = 0.2,
    growth: str = "growing",
    mean: float = 0.5,
    std: float = 0.5,
    remove_isolated: bool = True,
) -> Callable:
    """Build `augment(key, graphs) -> Graphs` of the same shapes.

    What a graph gets depends on the key, its slot in the batch and its own nodes and
    edges alone, not on the filling, the other graphs or the devices.

    Args:
      kinds: that one is drawn of, uniformly.
      choice: draw it for each "graph" (the paper) or for the "batch" (released code).
      share: of a graph's nodes that "drop" and "mask" change, in [0, 1).
      keep: of a graph's nodes that "subgraph" keeps beside the first, in [0, 1].
      growth: "growing" draws from the neighbours of all nodes of the set, "one_hop"
        from those of the first (released code).
      mean, std: of the features that "mask" draws.
      remove_isolated: then mask nodes without an edge, whatever the kind; a graph of
        which nothing is left stays as it was (released code).

    Raises:
      ValueError: an option is out of range.
    """
    if isinstance(kinds, str) or not kinds or len({*kinds}) < len(kinds):
        raise ValueError(f"kinds={kinds!r}: must be a list of {KINDS}, each once")
    for kind in kinds:
        core.check_choice("kinds", kind, KINDS)
    core.check_choice("choice", choice, CHOICES)
    core.check_choice("growth", growth, GROWTHS)
    for name, value, good, allowed in (
        ("share", share, 0 <= share < 1, "in [0, 1)"),
        ("keep", keep, 0 <= keep <= 1, "in [0, 1]"),
        ("std", std, std >= 0, "at least 0"),
    ):
        if not good:
            raise ValueError(f"{name}={value!r}: must be {allowed}")
    changed = functools.partial(
        _changed,
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
        return _or_original(without_isolated(out), graphs) if remove_isolated else out

    return augment


def _changed(key, graphs, *, kinds, choice, share, keep, growing, mean, std):
    """The graphs after one kind of change each."""
    k_kind, k_clock, k_grow, k_noise = jax.random.split(key, 4)
    kind = _kinds(k_kind, graphs, len(kinds), choice)
    due = {name: kinds.index(name) == kind for name in kinds}
    dropped, grown, masked = (
        due.get(name, jnp.zeros_like(kind, bool)) for name in KINDS
    )
    # All three take the first nodes of an order in time, which is sorted only once.
    time = _clocks(k_clock, graphs)
    if "subgraph" in kinds:
        time, draws = _growth(k_grow, graphs, time, grown, growing)
    rank = _ranks(time, graphs)
    quota = _quota(graphs, jnp.where(grown, keep, share))
    out, of = graphs, graphs.node_graph
    if "mask" in kinds:
        chosen = masked[of] & (rank < quota) & graphs.node_mask
        out = _redrawn(k_noise, graphs, chosen, mean, std)
    stays = ~dropped[of] | (rank >= quota)
    if "subgraph" in kinds:
        inside = jnp.isfinite(time) & (rank <= quota)
        inside &= _in_time(draws, time, rank, graphs, growing)
        stays &= ~grown[of] | inside
    return keep_nodes(out, stays)


def keep_nodes(graphs: graphs_lib.Graphs, stays) -> graphs_lib.Graphs:
    """Mask the nodes outside of bool[n], and their edges."""
    ends = stays[graphs.senders] & stays[graphs.receivers]
    return graphs._replace(
        node_mask=graphs.node_mask & stays, edge_mask=graphs.edge_mask & ends
    )


def without_isolated(graphs: graphs_lib.Graphs) -> graphs_lib.Graphs:
    """Mask the nodes without an edge."""
    linked = _over_edges(
        jax.ops.segment_max, graphs.edge_mask.astype(jnp.int32), graphs
    )
    return keep_nodes(graphs, linked > 0)


def _or_original(changed, graphs):
    """The graphs of `changed` that have a node, the others as they were."""
    count = _counts(changed)[graphs.node_graph]
    left, edge_left = count > 0, count[graphs.receivers] > 0
    return graphs._replace(
        features=jnp.where(left[:, None], changed.features, graphs.features),
        node_mask=jnp.where(left, changed.node_mask, graphs.node_mask),
        edge_mask=jnp.where(edge_left, changed.edge_mask, graphs.edge_mask),
    )


def _kinds(key, graphs, count, choice):
    """Number of each graph's kind, i32[B]."""
    slots = jnp.arange(len(graphs.graph_mask))
    if choice == "batch":
        return jnp.zeros_like(slots) + jax.random.randint(key, (), 0, count)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, slots)
    return jax.vmap(lambda k: jax.random.randint(k, (), 0, count))(keys)


def _counts(graphs):
    """Nodes of each graph, i32[B]."""
    ones = graphs.node_mask.astype(jnp.int32)
    slots = len(graphs.graph_mask)
    return jax.ops.segment_sum(ones, graphs.node_graph, slots, indices_are_sorted=True)


def _quota(graphs, share):
    """floor(share n) of each node's graph, i32[n]; `share` f32[B]."""
    return jnp.floor(share * _counts(graphs)).astype(jnp.int32)[graphs.node_graph]


def _over_edges(reduce, sent, graphs):
    nodes = len(graphs.node_graph)
    return reduce(sent, graphs.receivers, nodes, indices_are_sorted=True)


def _clocks(key, graphs):
    """An exponential time for each node, infinite for masked ones, f32[n]."""
    drawn = jax.vmap(jax.random.exponential)(graphs_lib.node_keys(key, graphs))
    return jnp.where(graphs.node_mask, drawn, jnp.inf)


def _ranks(time, graphs):
    """Place of each node in the order in time of its graph, from 0, i32[n]."""
    places = jnp.arange(len(time), dtype=jnp.int32)
    order = lax.sort((graphs.node_graph, time, places), num_keys=2)[2]
    rank = jnp.zeros_like(places).at[order].set(places, unique_indices=True)
    return rank - graphs_lib.first_nodes(graphs)[graphs.node_graph]


def _before(counts, graphs):
    """Sum of i32[n] over the nodes of the same graph that lie before each."""
    before = jnp.cumsum(counts) - counts
    # Overflow is harmless: differences of wrapped sums are right.
    return before - before[graphs_lib.first_nodes(graphs)][graphs.node_graph]


def _redrawn(key, graphs, chosen, mean, std):
    width = graphs.features.shape[1:]
    keys = graphs_lib.node_keys(key, graphs)
    noise = mean + std * jax.vmap(lambda k: jax.random.normal(k, width))(keys)
    features = jnp.where(chosen[:, None], noise, graphs.features)
    return graphs._replace(features=features)


def _growth(key, graphs, clock, grown, growing):
    """When each node would come into the growing set of its graph.

    T(first) = 0, T(v) = clock(v) + min of T over the neighbours of v, found by rounds
    over all edges, until nothing changes or, with `growing` unset, one.

    Args:
      key: of the first nodes and of uniform draws for `_in_time`.
      graphs: the batch.
      clock: f32[n], exponential.
      grown: bool[B], graphs that have such a set.
      growing: neighbours of neighbours may follow.

    Returns:
      Times f32[n], infinite for what cannot be reached; those of other graphs are
      their clocks. Draws f32[n] in (0, 1).
    """
    k_first, k_draws = jax.random.split(key)
    slots = jnp.arange(len(grown))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(k_first, slots)
    at = jax.vmap(lambda k, n: jax.random.randint(k, (), 0, n))(
        keys, jnp.maximum(_counts(graphs), 1)
    )
    place = _before(graphs.node_mask.astype(jnp.int32), graphs)
    inside = grown[graphs.node_graph]
    first = inside & graphs.node_mask & (place == at[graphs.node_graph])

    def further(now):
        time, _, rounds = now
        sent = jnp.where(graphs.edge_mask, time[graphs.senders], jnp.inf)
        near = clock + _over_edges(jax.ops.segment_min, sent, graphs)
        new = jnp.where(first, 0.0, near)
        return new, jnp.any(new < time), rounds + 1

    # No shortest path has more edges than there are nodes.
    most = len(clock) if growing else 1
    start = (jnp.where(first, 0.0, jnp.inf), jnp.any(first), 0)
    time, *_ = lax.while_loop(lambda now: now[1] & (now[2] < most), further, start)
    # Between 0 and 1 with neither: a logarithm and a quotient follow.
    draw = jax.vmap(lambda k: jax.random.uniform(k, minval=1e-7))
    draws = draw(graphs_lib.node_keys(k_draws, graphs))
    return jnp.where(inside, time, clock), draws


def _in_time(draws, time, rank, graphs, growing):
    """Whether n draws from the neighbours of the set are enough to reach each node.

    After step j, with j nodes beside the first inside, some of the neighbours that are
    drawn from are new, the others are those j (and with `growing` the first node, which
    is a neighbour of one of them). The draws that hit none of the new ones before one
    that does are geometric with p = new / (new + others).

    Args:
      draws: f32[n] in (0, 1); those of a graph's j-th node serve step j.
      time, rank: of each node, as `_growth` and `_ranks` give them.
      graphs, growing: as in `_growth`.

    Returns:
      bool[n], of use in growing sets alone.
    """
    nodes = len(time)
    start = graphs_lib.first_nodes(graphs)[graphs.node_graph]
    reached = jnp.isfinite(time) & (rank > 0)
    # The step from which a node is among the neighbours that are drawn from.
    since = jnp.zeros_like(rank)
    if growing:
        sent = jnp.where(graphs.edge_mask, rank[graphs.senders], nodes)
        since = _over_edges(jax.ops.segment_min, sent, graphs)
    entered = jax.ops.segment_sum(
        reached.astype(jnp.int32), jnp.where(reached, start + since, nodes), nodes
    )
    step = jnp.arange(nodes) - start
    new = _before(entered, graphs) + entered - step
    others = step + (step > 0) if growing else step
    p = jnp.where(new > 0, new / jnp.maximum(new + others, 1), 1.0)
    size = _counts(graphs)[graphs.node_graph]
    wasted = jnp.floor(jnp.log(draws) / jnp.log1p(-p))
    used = 1 + jnp.minimum(wasted, size).astype(jnp.int32)
    return _before(used, graphs)[jnp.minimum(start + rank, nodes - 1)] <= size
