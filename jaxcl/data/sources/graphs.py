"""Readers of sets of graphs, and the node features they compute."""

import os
import warnings
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from absl import logging

from jaxcl import schema, storage
from jaxcl.data import stream
from jaxcl.data.images import array_files
from jaxcl.data.stream import graph_arrays
from jaxcl.errors import Refused

Feature = Literal["attributes", "labels", "ldp"]
Features = Annotated[Sequence[Feature], schema.Entries()]
Std = Literal["sample", "population"]
# Nodes without an edge take no bytes of a file: most for each edge or graph.
_ISOLATED = 100
_ENTRIES = 2**28  # of the one-hot node labels: 2 GiB
_GIVEN = ("edges", "graph_ptr", "label")  # of an .npz file
_OPTIONAL = ("node_label", "node_attr", "class_names")


@schema.checked("config.data")
def graphs(
    *,
    path: str,
    features: Features | None = None,
    std: Std = "sample",
    normalise: bool = True,
) -> stream.Dataset:
    """Read a set of graphs. All graphs are for training; there is no test split.

    An .npz file holds edges [2,E] (nodes numbered over the whole set), graph_ptr [G+1]
    (graph g's nodes begin at entry g) and label [G] from 0; optionally node_label [N]
    or [N,k], node_attr [N,A] and class_names.

    A folder holds the text files of the TUDataset collection (Morris et al., 2020):
    NAME_A.txt, NAME_graph_indicator.txt, NAME_graph_labels.txt, and
    perhaps NAME_node_labels.txt and NAME_node_attributes.txt. There classes and node
    labels are numbered in the order of their codes.

    Self-loops and repeated edges are dropped, missing reverse edges are added.

    Args:
      path: the .npz file or the folder.
      features: names of a `Feature`, concatenated in this order: "attributes", "labels"
        (one-hot), "ldp" (see `degree_profile`). None: attributes and labels if the set
        has them, but no labels if all nodes have the same; "ldp" if neither.
      std: rule of the deviation, see `degree_profile`.
      normalise: whether each node's features x, all >= 0, are divided by max(sum x, 1).

    Raises:
      Refused: a file is missing, breaks these promises or lacks what `features`
        names.
    """
    name, arrays = _read_npz(path) if path.endswith(".npz") else _read_text(path)
    return make_dataset(
        path, name, arrays, features=features, std=std, normalise=normalise
    )


def make_dataset(
    origin: str,
    name: str,
    arrays: dict,
    *,
    features: Sequence[Feature] | None,
    std: Std = "sample",
    normalise: bool,
) -> stream.Dataset:
    """Make a dataset of graphs from arrays; all graphs are for training.

    Args:
      origin: source of the set, for messages.
      name: name of the set.
      arrays: "where" the pairs come from; "pairs" of nodes i64[2,P], in any order;
        "graph" i64[N], the graph of each node, rising; "label" i[G]; "class_names";
        perhaps "node_label" and "node_attr".
      features, std, normalise: options of `graphs`.
    """
    graph, label = arrays["graph"], arrays["label"]
    edges = _make_undirected(arrays["where"], arrays["pairs"], graph)
    graph_ptr = np.searchsorted(graph, np.arange(len(label) + 1))
    edge_ptr = np.searchsorted(edges[0], graph_ptr)
    graph_set = graph_arrays.GraphSet(
        features=_features(origin, arrays, edges, features, std, normalise),
        edges=edges.astype(np.int32),
        graph_ptr=graph_ptr.astype(np.int32),
        edge_ptr=edge_ptr.astype(np.int32),
        label=label.astype(np.int32),
        name=name,
        class_names=tuple(str(name) for name in arrays["class_names"]),
    )
    if len(empty := np.flatnonzero(np.diff(graph_ptr) == 0)):
        logging.warning(
            "%s: %d of %d graphs have no nodes, and stay rows of the set; the first is "
            "graph %d",
            *(origin, len(empty), len(label), empty[0] + 1),
        )
    label = graph_set.label
    train = stream.Examples(label, np.zeros_like(label), graphs=graph_set)
    return stream.Dataset(name, graph_set.class_names, ("all",), train, None, None)


def _read_npz(path) -> tuple[str, dict]:
    """Read the name of a set, and its pairs of nodes, graph of each node and labels."""
    arrays = array_files.read_npz(path, (*_GIVEN, *_OPTIONAL))
    if missing := [key for key in _GIVEN if key not in arrays]:
        raise Refused(f"{path} lacks {missing}: must hold {list(_GIVEN)}")
    for key in (*_GIVEN, *({"node_label"} & {*arrays})):
        if not np.issubdtype(arrays[key].dtype, np.integer):
            raise Refused(f"{path}: {key} is {arrays[key].dtype}, expected integers")
        arrays[key] = arrays[key].astype(np.int64)
    edges, ptr = arrays["edges"], arrays["graph_ptr"]
    label = stream.as_numbers(path, "label", arrays["label"], 0)
    names = arrays.setdefault("class_names", np.arange(label.max(initial=0) + 1))
    length = max(len(np.atleast_1d(arrays.get(key, ()))) for key in _OPTIONAL[:2])
    most = max(length, _ISOLATED * (len(label) + edges.size))
    for key, is_valid, expected in (
        ("label", label.ndim == 1 and len(label) > 0, "[G]"),
        ("class_names", names.ndim == 1 and label.max() < len(names), "[C], of all"),
        ("edges", edges.ndim == 2 and len(edges) == 2, "[2, E]"),
        ("graph_ptr", ptr.shape == (len(label) + 1,), f"[{len(label) + 1}]"),
    ):
        if not is_valid:
            raise Refused(f"{path}: {key} is {arrays[key].shape}, expected {expected}")
    if ptr[0] or (np.diff(ptr) < 0).any() or not 0 < ptr[-1] <= most:
        raise Refused(
            f"{path}: graph_ptr must begin with 0, never fall, and end at the number "
            f"of nodes, at most {most}; it ends at {ptr[-1]}"
        )
    graph = np.repeat(np.arange(len(label)), np.diff(ptr))
    columns = {"where": path, "pairs": edges, "graph": graph, "label": label}
    return os.path.splitext(os.path.basename(path))[0], arrays | columns


def _read_text(path) -> tuple[str, dict]:
    """Read text files; return a set's name, and what `_read_npz` returns."""
    if not os.path.isdir(path):
        raise Refused("path", path, "no such directory")
    names = sorted(x for x in os.listdir(path) if x.endswith("_A.txt"))
    if len(names) != 1:
        raise Refused("path", path, f"must hold one file NAME_A.txt, has {names[:5]}")
    name = names[0].removesuffix("_A.txt")

    def part_path(part):
        return os.path.join(path, f"{name}_{part}.txt")

    codes = _read_table(part_path("graph_labels"), np.int64, columns=1)[:, 0]
    graph = _read_table(part_path("graph_indicator"), np.int64, columns=1)[:, 0]
    if len(codes) == 0 or len(graph) == 0:
        raise Refused(f"{path}: {name} has no graphs or no nodes")
    if graph[0] < 1 or graph[-1] > len(codes) or (np.diff(graph) < 0).any():
        raise Refused(
            f"{part_path('graph_indicator')}: numbers must not fall and be in 1 to "
            f"{len(codes)}, the lines of {part_path('graph_labels')}"
        )
    classes, label = np.unique(codes, return_inverse=True)
    arrays = {
        "where": part_path("A"),
        "pairs": _read_table(part_path("A"), np.int64, columns=2).T - 1,
        "graph": graph - 1,
        "label": label,
        "class_names": classes,
    }
    for key, part, kind in (
        ("node_label", "node_labels", np.int64),
        ("node_attr", "node_attributes", np.float64),
    ):
        if os.path.exists(part_path(part)):
            arrays[key] = _read_table(part_path(part), kind, rows=len(graph))
    return name, arrays


def _read_table(file, kind, *, columns=None, rows=None) -> np.ndarray:
    """Read numbers separated by commas, one row a line, [lines, columns]."""
    with storage.reading(file), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty file
        path = storage.check_ordinary(file)
        table = np.loadtxt(path, kind, delimiter=",", ndmin=2, comments=None)
    if table.size == 0:
        table = table.reshape(0, columns or 1)
    if columns is not None and table.shape[1] != columns:
        raise Refused(f"{file} has {table.shape[1]} columns, expected {columns}")
    if rows is not None and len(table) != rows:
        raise Refused(f"{file} has {len(table)} lines, expected one per node: {rows}")
    return table


def _make_undirected(origin, pairs, graph) -> np.ndarray:
    """Return pairs of nodes i64[2,P] as sorted edges, each in both directions, once.

    Args:
      origin: source of the pairs, for messages.
      graph: i64[N], number of each node's graph.
    """
    nodes = len(graph)
    outside = ((pairs < 0) | (pairs >= nodes)).any(axis=0)
    members = graph[np.where(outside, 0, pairs)]
    for edge in np.flatnonzero(outside | (members[0] != members[1]))[:1]:
        raise Refused(
            f"{origin}: edge {edge + 1}, of nodes {(pairs[:, edge] + 1).tolist()}, "
            f"must be of two in 1 to {nodes} of one graph"
        )
    pairs = pairs[:, pairs[0] != pairs[1]]
    directed = np.concatenate([pairs, pairs[::-1]], axis=1)
    return np.stack(np.divmod(np.unique(directed[0] * nodes + directed[1]), nodes))


def _features(origin, arrays, edges, names, std, normalise) -> np.ndarray:
    """Return node features f32[N,F] as the options of a reader ask.

    Args:
      origin: source of the arrays, for messages.
      arrays: "graph" and perhaps "node_label" and "node_attr".
      edges: i64[2,E], from `_make_undirected`.
      names: names of the features, the option `features`.
    """
    nodes, labels = len(arrays["graph"]), arrays.get("node_label")
    attributes = arrays.get("node_attr")
    if names is None:
        several = labels is not None and len(np.unique(labels)) > 1
        names = ("attributes",) * (attributes is not None) + ("labels",) * several
        names = names or ("ldp",)
    columns = []
    for name in names:
        if name == "ldp":
            columns.append(degree_profile(edges, nodes, std=std))
            continue
        values = attributes if name == "attributes" else labels
        if values is None:
            raise Refused("features", names, f"{origin} has no node {name}")
        if values.ndim not in (1, 2) or len(values) != nodes:
            shape = values.shape
            raise Refused(f"{origin}: node {name} {shape} for {nodes} nodes")
        values = values.reshape(nodes, -1)
        if values.dtype.kind not in "iuf" or values.shape[1] == 0:
            shape = f"{values.dtype}{list(values.shape)}"
            raise Refused(f"{origin}: node {name} are {shape}, expected numbers")
        if not np.isfinite(values).all():
            raise Refused(f"{origin}: node {name} that are not finite")
        columns += _one_hot(origin, values) if name == "labels" else [values]
    features = np.concatenate(columns, axis=1, dtype=np.float64)
    # float32, in which a network computes, ends at 3.4e38.
    if not np.abs(features).max() <= np.finfo(np.float32).max / features.shape[1]:
        raise Refused(f"{origin}: node attributes that are too large")
    if normalise:
        below = features.min(axis=1)
        if below.min() < 0:
            raise Refused(
                f"config.data.normalise=True: {(below < 0).sum()} nodes of {origin} "
                f"have negative attributes, down to {below.min():g}, which no sum "
                "scales; must be False, or config.data.features without 'attributes'"
            )
        features /= np.maximum(features.sum(axis=1, keepdims=True), 1.0)
    return features.astype(np.float32)


def _one_hot(origin, labels) -> list[np.ndarray]:
    """Return columns of each kind of node label, for labels i[N,k]."""
    columns = [np.unique(codes, return_inverse=True) for codes in labels.T]
    width = sum(len(kinds) for kinds, _ in columns)
    if width * len(labels) > _ENTRIES:
        raise Refused(
            f"{origin}: node labels of {width} kinds on {len(labels)} nodes: as "
            "columns they fill the memory; leave 'labels' out of config.data.features"
        )
    return [number[:, None] == np.arange(len(kinds)) for kinds, number in columns]


def degree_profile(edges: np.ndarray, nodes: int, *, std: Std = "sample") -> np.ndarray:
    """Describe each node by its degree and its neighbours' degrees.

    A node without neighbours has zeros.

    Args:
      edges: i[2,E], each in both directions, sorted by edges[0].
      nodes: number of nodes.
      std: rule of the deviation. "sample" divides by max(d - 1, 1), where d is the
        number of neighbours, like the library that ICL's released code uses;
        "population" divides by d.

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
