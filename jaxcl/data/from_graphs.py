"""Readers of sets of graphs, and the node features they compute."""

import os
import warnings
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from jaxcl import schema
from jaxcl.data import files, storage, stream
from jaxcl.data import graphs as graphs_lib

Feature = Literal["attributes", "labels", "ldp"]
Features = Annotated[Sequence[Feature], schema.Entries()]
Std = Literal["sample", "population"]
# Nodes without an edge, and without an array that tells of them, take no bytes of a
# file: more than so many for each edge or graph are an error in `graph_ptr`.
_ISOLATED = 100
_ENTRIES = 2**28  # of the one-hot node labels: 2 GiB
_ARRAYS = ("edges", "graph_ptr", "edge_ptr", "label")
_OPTIONAL = ("node_label", "node_attr", "class_names")


@schema.checked("config.data")
def graphs(
    *,
    path: str,
    features: Features | None = None,
    std: Std = "sample",
    normalise: bool = True,
) -> stream.Dataset:
    """A set of graphs. All graphs are for training; there is no test split.

    An .npz file holds edges [2,E] (both directions, sorted by source, nodes numbered
    over the whole set), graph_ptr and edge_ptr [G+1] (graph g's nodes and edges begin
    at entry g) and label [G] from 0; optionally node_label [N] or [N,k], node_attr
    [N,A] and class_names.

    A folder holds the text files of the TUDataset collection (Morris et al., 2020):
    NAME_A.txt, NAME_graph_indicator.txt, NAME_graph_labels.txt, and
    perhaps NAME_node_labels.txt and NAME_node_attributes.txt. There self-loops and
    repeated edges are dropped, missing reverse edges are added, and classes and node
    labels are numbered in the order of their codes.

    Args:
      path: the .npz file or the folder.
      features: names of a `Feature`, concatenated in this order: "attributes", "labels"
        (one-hot), "ldp" (see `degree_profile`). None: attributes and labels if the set
        has them, but no labels if all nodes have the same; "ldp" if neither.
      std: see `degree_profile`.
      normalise: divide each node's features x by max(sum x, 1); none is negative.

    Raises:
      ValueError: a file is missing, breaks these promises or lacks what `features`
        names.
    """
    graph_set = read(path, features=features, std=std, normalise=normalise)
    label, names = graph_set.label, graph_set.class_names
    train = stream.Examples(label, np.zeros_like(label), graphs=graph_set)
    return stream.Dataset(graph_set.name, names, ("all",), train, None, None)


def read(
    path: str,
    *,
    features: Sequence[Feature] | None = None,
    std: Std = "sample",
    normalise: bool = True,
) -> graphs_lib.GraphSet:
    """Read a set of graphs, see `graphs`."""
    name, arrays = _read_npz(path) if path.endswith(".npz") else _read_text(path)
    return graphs_lib.GraphSet(
        _features(path, arrays, features, std, normalise),
        *(arrays[key].astype(np.int32) for key in _ARRAYS),
        name,
        tuple(str(name) for name in arrays["class_names"]),
    )


def _read_npz(path) -> tuple[str, dict[str, np.ndarray]]:
    """Read the name of a set and the arrays of its file."""
    arrays = files.read_npz(path, (*_ARRAYS, *_OPTIONAL))
    missing = [key for key in _ARRAYS if key not in arrays]
    if missing:
        raise ValueError(f"{path} lacks {missing}: must hold {list(_ARRAYS)}")
    for key in (*_ARRAYS, *({"node_label"} & {*arrays})):
        values = arrays[key]
        if not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"{path}: {key} is {values.dtype}, expected integers")
        # Unsigned ones would rise where they fall, and int32 has no larger ones.
        if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
            raise ValueError(f"{path}: {key} holds numbers beyond int32")
        arrays[key] = values.astype(np.int64)
    structure = [arrays[key] for key in _ARRAYS]
    told = max(len(np.atleast_1d(arrays.get(key, ()))) for key in _OPTIONAL[:2])
    for holds, problem in _promises(*structure, arrays.get("class_names"), told):
        if not holds:
            raise ValueError(f"{path}: {problem}")
    arrays.setdefault("class_names", np.arange(arrays["label"].max() + 1))
    return os.path.splitext(os.path.basename(path))[0], arrays


def _promises(edges, graph_ptr, edge_ptr, label, names, told):
    """Yield (whether a promise holds, the message if not); later ones need earlier."""
    count = label.size
    yield label.ndim == 1 and count > 0, f"label has shape {label.shape}, expected [G]"
    yield label.min() >= 0, f"label holds {label.min()}: classes count from 0"
    yield label.max() < stream.LABELS, f"label holds {label.max()}: too many classes"
    if names is not None:
        yield names.ndim == 1, f"class_names has shape {names.shape}, expected [C]"
        problem = f"label holds {label.max()}, class_names only {len(names)} names"
        yield label.max() < len(names), problem
    for key, ptr in (("graph_ptr", graph_ptr), ("edge_ptr", edge_ptr)):
        problem = f"{key} has shape {ptr.shape}, expected [{count + 1}]"
        yield ptr.shape == (count + 1,), problem
        rises = ptr[0] == 0 and (np.diff(ptr) >= 0).all()
        yield rises, f"{key} must begin with 0 and never fall"
    nodes, shape = int(graph_ptr[-1]), (2, int(edge_ptr[-1]))
    few = _ISOLATED * (count + shape[1])
    problem = f"graph_ptr ends at {nodes} nodes, for {shape[1]} edges: most are alone"
    yield 0 < nodes <= max(few, told), problem if nodes else "there are no nodes"
    yield edges.shape == shape, f"edges has shape {edges.shape}, expected {shape}"
    graph = np.repeat(np.arange(count), np.diff(edge_ptr))
    outside = (edges < graph_ptr[graph]) | (edges >= graph_ptr[graph + 1])
    for at in np.flatnonzero(outside.any(axis=0))[:1]:
        yield False, f"edge {edges[:, at].tolist()} leaves its graph, {graph[at]}"
    yield (np.diff(edges[0]) >= 0).all(), "edges must be sorted by source, edges[0]"
    for at in np.flatnonzero(edges[0] == edges[1])[:1]:
        yield False, f"node {edges[0, at]} has an edge to itself"
    there, back = _codes(edges, graph_ptr[-1]), _codes(edges[::-1], graph_ptr[-1])
    for at in np.flatnonzero(np.diff(there) == 0)[:1]:
        pair = divmod(int(there[at]), int(graph_ptr[-1]))
        yield False, f"edge {list(pair)} is there more than once"
    problem = "each edge must be there in both directions"
    yield np.array_equal(there, back), problem


def _codes(edges, nodes) -> np.ndarray:
    """Return one number per directed edge, sorted."""
    return np.sort(edges[0].astype(np.int64) * int(nodes) + edges[1])


def _read_text(path) -> tuple[str, dict[str, np.ndarray]]:
    """Read text files; return a set's name and arrays as of an .npz file."""
    if not os.path.isdir(path):
        raise ValueError(f"path = {path!r}: no such directory")
    names = sorted(x for x in os.listdir(path) if x.endswith("_A.txt"))
    if len(names) != 1:
        raise ValueError(
            f"path = {path!r}: must hold one file NAME_A.txt, has {names[:5]}"
        )
    name = names[0].removesuffix("_A.txt")

    def file(part):
        return os.path.join(path, f"{name}_{part}.txt")

    codes = _table(file("graph_labels"), np.int64, columns=1)[:, 0]
    graph = _table(file("graph_indicator"), np.int64, columns=1)[:, 0]
    if len(codes) == 0 or len(graph) == 0:
        raise ValueError(f"{path}: {name} has no graphs or no nodes")
    if graph[0] < 1 or graph[-1] > len(codes) or (np.diff(graph) < 0).any():
        raise ValueError(
            f"{file('graph_indicator')}: numbers must not fall and be in 1 to "
            f"{len(codes)}, the lines of {file('graph_labels')}"
        )
    edges = _undirected(file("A"), _table(file("A"), np.int64, columns=2).T - 1, graph)
    graph_ptr = np.searchsorted(graph, np.arange(1, len(codes) + 2))
    classes, label = np.unique(codes, return_inverse=True)
    arrays = {
        "edges": edges,
        "graph_ptr": graph_ptr,
        "edge_ptr": np.searchsorted(edges[0], graph_ptr),
        "label": label,
        "class_names": classes,
    }
    for key, part, kind in (
        ("node_label", "node_labels", np.int64),
        ("node_attr", "node_attributes", np.float64),
    ):
        if os.path.exists(file(part)):
            arrays[key] = _table(file(part), kind, rows=len(graph))
    return name, arrays


def _table(file, kind, *, columns=None, rows=None) -> np.ndarray:
    """Read numbers separated by commas, one row a line, [lines, columns]."""
    with files.reading(file), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty file
        path = storage.check_ordinary(file)
        table = np.loadtxt(path, kind, delimiter=",", ndmin=2, comments=None)
    if table.size == 0:
        table = table.reshape(0, columns or 1)
    if columns is not None and table.shape[1] != columns:
        raise ValueError(f"{file} has {table.shape[1]} columns, expected {columns}")
    if rows is not None and len(table) != rows:
        raise ValueError(
            f"{file} has {len(table)} lines, expected one per node: {rows}"
        )
    return table


def _undirected(file, pairs, graph) -> np.ndarray:
    """Return pairs of nodes i64[2,P] as sorted edges, each in both directions, once.

    Args:
      file: where the pairs come from, for messages.
      graph: i64[N], number of each node's graph.
    """
    nodes = len(graph)
    for line in np.flatnonzero(((pairs < 0) | (pairs >= nodes)).any(axis=0))[:1]:
        raise ValueError(
            f"{file}, line {line + 1}: nodes {(pairs[:, line] + 1).tolist()} must be "
            f"in 1 to {nodes}"
        )
    for line in np.flatnonzero(graph[pairs[0]] != graph[pairs[1]])[:1]:
        raise ValueError(
            f"{file}, line {line + 1}: nodes {(pairs[:, line] + 1).tolist()} are of "
            f"graphs {graph[pairs[:, line]].tolist()}, expected one graph"
        )
    pairs = pairs[:, pairs[0] != pairs[1]]
    both = np.concatenate([pairs, pairs[::-1]], axis=1)
    return np.stack(np.divmod(np.unique(both[0] * nodes + both[1]), nodes))


def _features(where, arrays, names, std, normalise) -> np.ndarray:
    """Return node features f32[N,F] as the options of a reader ask.

    Args:
      where: what the arrays come from, for messages.
      arrays: "edges", "graph_ptr" and perhaps "node_label" and "node_attr", as `npz`.
      names: option `features`.
    """
    nodes, labels = int(arrays["graph_ptr"][-1]), arrays.get("node_label")
    attributes = arrays.get("node_attr")
    if names is None:
        several = labels is not None and len(np.unique(labels)) > 1
        names = ("attributes",) * (attributes is not None) + ("labels",) * several
        names = names or ("ldp",)
    columns = []
    for name in names:
        if name == "ldp":
            columns.append(degree_profile(arrays["edges"], nodes, std=std))
            continue
        values = attributes if name == "attributes" else labels
        if values is None:
            raise ValueError(f"features = {names!r}: {where} has no node {name}")
        if values.ndim not in (1, 2) or len(values) != nodes:
            shape = values.shape
            raise ValueError(f"{where}: node {name} {shape} for {nodes} nodes")
        values = values.reshape(nodes, -1)
        if values.dtype.kind not in "iuf" or values.shape[1] == 0:
            shape = f"{values.dtype}{list(values.shape)}"
            raise ValueError(f"{where}: node {name} are {shape}, expected numbers")
        if not np.isfinite(values).all():
            raise ValueError(f"{where}: node {name} that are not finite")
        columns += _one_hot(where, values) if name == "labels" else [values]
    features = np.concatenate(columns, axis=1, dtype=np.float64)
    # float32, of which a network is made, ends at 3.4e38.
    if not np.abs(features).max() <= np.finfo(np.float32).max / features.shape[1]:
        raise ValueError(f"{where}: node attributes that are too large")
    if normalise:
        below = features.min(axis=1)
        if below.min() < 0:
            raise ValueError(
                f"config.data.normalise=True: {(below < 0).sum()} nodes of {where} "
                f"have negative attributes, down to {below.min():g}, which no sum "
                "scales; must be False, or config.data.features without 'attributes'"
            )
        features /= np.maximum(features.sum(axis=1, keepdims=True), 1.0)
    return features.astype(np.float32)


def _one_hot(where, labels) -> list[np.ndarray]:
    """Return columns of each kind of node label, for labels i[N,k]."""
    found = [np.unique(codes, return_inverse=True) for codes in labels.T]
    width = sum(len(kinds) for kinds, _ in found)
    if width * len(labels) > _ENTRIES:
        raise ValueError(
            f"{where}: node labels of {width} kinds on {len(labels)} nodes: as columns "
            "they fill the memory; leave 'labels' out of config.data.features"
        )
    return [number[:, None] == np.arange(len(kinds)) for kinds, number in found]


def degree_profile(edges: np.ndarray, nodes: int, *, std: Std = "sample") -> np.ndarray:
    """Describe nodes by their degrees and those of their neighbours.

    A node without neighbours has zeros.

    Args:
      edges: i[2,E], each in both directions, sorted by edges[0].
      nodes: number of nodes.
      std: "sample" divides by max(d - 1, 1), where d is the number of neighbours, as
        the library that ICL's released code uses does; "population" divides by d.

    Returns:
      f64[nodes,5].

    Source: Cai and Wang, "A simple yet effective baseline for non-attributed graph
    classification" (2018), LDP.
    """
    schema.check_value(std, Std, "std")
    degree = np.bincount(edges[0], minlength=nodes)
    profile = np.zeros((nodes, 5))
    profile[:, 0] = degree
    linked = np.flatnonzero(degree)
    if len(linked) == 0:
        return profile
    count = degree[linked]
    first = np.cumsum(count) - count
    neighbours = degree[edges[1]].astype(np.float64)
    mean = np.add.reduceat(neighbours, first) / count
    squares = np.add.reduceat((neighbours - np.repeat(mean, count)) ** 2, first)
    divisor = np.maximum(count - 1, 1) if std == "sample" else count
    profile[linked, 1] = np.minimum.reduceat(neighbours, first)
    profile[linked, 2] = np.maximum.reduceat(neighbours, first)
    profile[linked, 3] = mean
    profile[linked, 4] = np.sqrt(squares / divisor)
    return profile
