"""Readers of sets of graphs, and the features that they give to nodes."""

import os
import warnings
from collections.abc import Sequence

import numpy as np

from jaxcl import core
from jaxcl.data import files, stream
from jaxcl.data import graphs as graphs_lib

FEATURES = ("attributes", "labels", "ldp")
STD = ("sample", "population")
_ARRAYS = ("edges", "graph_ptr", "edge_ptr", "label")
_OPTIONAL = ("node_label", "node_attr", "class_names")


def graphs(
    *,
    path: str,
    features: Sequence[str] | None = None,
    std: str = "sample",
    normalise: bool = True,
) -> stream.Dataset:
    """A set of graphs, all of it for training: there is no test part.

    Args:
      path: an .npz file (`npz`) or a folder in the text format of the
        TUDataset collection (`tu`).
      features, std, normalise: options of both.
    """
    read = npz if path.endswith(".npz") else tu
    features = None if features is None else tuple(features)
    found = read(path=path, features=features, std=std, normalise=normalise)
    domain = np.zeros_like(found.label)
    train = stream.Examples(label=found.label, domain=domain, graphs=found)
    return stream.Dataset(found.name, found.class_names, ("all",), train, None, None)


def npz(
    *,
    path: str,
    features: tuple[str, ...] | None = None,
    std: str = "sample",
    normalise: bool = True,
) -> graphs_lib.GraphSet:
    """A set in an .npz file.

    Args:
      path: holds edges [2,E] (both directions, sorted by source, nodes numbered over
        the whole set), graph_ptr and edge_ptr [G+1] (graph g's nodes and edges begin
        at entry g), label [G] from 0, and if there are any node_label [N] or [N,k],
        node_attr [N,A], class_names.
      features: names in `FEATURES`, side by side in the order given: "attributes",
        "labels" (one-hot), "ldp" (see `degree_profile`). None: the first two as far as
        the file has them, a single label for all not counted; "ldp" without any.
      std: see `degree_profile`.
      normalise: divide each node's features x by max(sum x, 1).

    Raises:
      ValueError: the file breaks these promises or lacks what `features` names.
    """
    found = files.read_npz(path, (*_ARRAYS, *_OPTIONAL))
    missing = [key for key in _ARRAYS if key not in found]
    if missing:
        raise ValueError(f"{path} lacks {missing}: must hold {list(_ARRAYS)}")
    for key in (*_ARRAYS, *({"node_label"} & {*found})):
        if not np.issubdtype(found[key].dtype, np.integer):
            raise ValueError(f"{path}: {key} is {found[key].dtype}, expected integers")
    arrays = [found[key] for key in _ARRAYS]
    for good, problem in _promises(*arrays, found.get("class_names")):
        if not good:
            raise ValueError(f"{path}: {problem}")
    label = found["label"]
    names = found.get("class_names", np.arange(label.max() + 1))
    base = os.path.splitext(os.path.basename(path))[0]
    return graphs_lib.GraphSet(
        _features(path, found, features, std, normalise),
        *(array.astype(np.int32) for array in arrays),
        base,
        tuple(str(name) for name in names),
    )


def _promises(edges, graph_ptr, edge_ptr, label, names):
    """Yield (whether it holds, what is wrong); each builds on those before."""
    count = label.size
    yield label.ndim == 1 and count > 0, f"label has shape {label.shape}, expected [G]"
    yield label.min() >= 0, f"label holds {label.min()}: classes count from 0"
    if names is not None:
        problem = f"label holds {label.max()}, class_names only {len(names)} names"
        yield label.max() < len(names), problem
    for key, ptr in (("graph_ptr", graph_ptr), ("edge_ptr", edge_ptr)):
        problem = f"{key} has shape {ptr.shape}, expected [{count + 1}]"
        yield ptr.shape == (count + 1,), problem
        rises = ptr[0] == 0 and (np.diff(ptr) >= 0).all()
        yield rises, f"{key} must begin with 0 and never fall"
    shape = (2, int(edge_ptr[-1]))
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
    """One number per directed edge, sorted."""
    return np.sort(edges[0].astype(np.int64) * int(nodes) + edges[1])


def tu(
    *,
    path: str,
    name: str | None = None,
    features: tuple[str, ...] | None = None,
    std: str = "sample",
    normalise: bool = True,
) -> graphs_lib.GraphSet:
    """A set in the text format of the TUDataset collection (Morris et al., 2020).

    Edges of a node to itself and repeated ones are left out, and the reverse of an
    edge is added where it is missing. Classes and node labels are renumbered from 0 in
    the order of their codes; a class is called by its code.

    Args:
      path: the folder of NAME_A.txt, NAME_graph_indicator.txt, NAME_graph_labels.txt,
        and if there are any NAME_node_labels.txt, NAME_node_attributes.txt.
      name: NAME; None: that of the only *_A.txt in the folder.
      features, std, normalise: as of `npz`.

    Raises:
      ValueError: a file is missing or cannot be understood, files do not fit each
        other, or they lack what `features` names.
    """
    name = _tu_name(path) if name is None else name

    def file(part):
        return os.path.join(path, f"{name}_{part}.txt")

    codes = _table(file("graph_labels"), np.int64, columns=1)[:, 0]
    of = _table(file("graph_indicator"), np.int64, columns=1)[:, 0]
    if len(codes) == 0 or len(of) == 0:
        raise ValueError(f"{path}: {name} has no graphs or no nodes")
    if of[0] < 1 or of[-1] > len(codes) or (np.diff(of) < 0).any():
        raise ValueError(
            f"{file('graph_indicator')}: numbers must not fall and be in 1 to "
            f"{len(codes)}, the lines of {file('graph_labels')}"
        )
    graph_ptr = np.searchsorted(of, np.arange(1, len(codes) + 2))
    pairs = _table(file("A"), np.int64, columns=2).T - 1
    edges = _undirected(file("A"), pairs, of)
    given = {}
    for key, part, kind in (
        ("node_label", "node_labels", np.int64),
        ("node_attr", "node_attributes", np.float64),
    ):
        if os.path.exists(file(part)):
            given[key] = _table(file(part), kind, rows=len(of))
    given |= {"edges": edges, "graph_ptr": graph_ptr}
    classes, label = np.unique(codes, return_inverse=True)
    return graphs_lib.GraphSet(
        _features(path, given, features, std, normalise),
        edges.astype(np.int32),
        graph_ptr.astype(np.int32),
        np.searchsorted(edges[0], graph_ptr).astype(np.int32),
        label.astype(np.int32),
        name,
        tuple(str(code) for code in classes),
    )


def _tu_name(path):
    if not os.path.isdir(path):
        raise ValueError(f"path = {path!r}: no such directory")
    end = "_A.txt"
    found = sorted(f for f in os.listdir(path) if f.endswith(end))
    if len(found) != 1:
        raise ValueError(
            f"path = {path!r}: holds {len(found)} files NAME{end} {found[:5]}, "
            "expected 1; say which by name"
        )
    return found[0].removesuffix(end)


def _table(file, kind, *, columns=None, rows=None) -> np.ndarray:
    """Numbers with commas between, one row a line, [lines, columns]."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an empty file
            table = np.loadtxt(file, kind, delimiter=",", ndmin=2, comments=None)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if table.size == 0:
        table = table.reshape(0, columns or 1)
    if columns is not None and table.shape[1] != columns:
        raise ValueError(f"{file} has {table.shape[1]} columns, expected {columns}")
    if rows is not None and len(table) != rows:
        raise ValueError(
            f"{file} has {len(table)} lines, expected one per node: {rows}"
        )
    return table


def _undirected(file, pairs, of) -> np.ndarray:
    """Pairs of nodes i64[2,P] as sorted edges, each in both directions, once."""
    nodes = len(of)
    for line in np.flatnonzero(((pairs < 0) | (pairs >= nodes)).any(axis=0))[:1]:
        raise ValueError(
            f"{file}, line {line + 1}: nodes {(pairs[:, line] + 1).tolist()} must be "
            f"in 1 to {nodes}"
        )
    for line in np.flatnonzero(of[pairs[0]] != of[pairs[1]])[:1]:
        raise ValueError(
            f"{file}, line {line + 1}: nodes {(pairs[:, line] + 1).tolist()} are of "
            f"graphs {of[pairs[:, line]].tolist()}, expected one graph"
        )
    pairs = pairs[:, pairs[0] != pairs[1]]
    both = np.concatenate([pairs, pairs[::-1]], axis=1)
    return np.stack(np.divmod(np.unique(both[0] * nodes + both[1]), nodes))


def _features(where, found, names, std, normalise) -> np.ndarray:
    """What a reader's options make of `found`, f32[N,F]."""
    nodes, labels = int(found["graph_ptr"][-1]), found.get("node_label")
    attributes = found.get("node_attr")
    if names is None:
        several = labels is not None and len(np.unique(labels)) > 1
        names = ("attributes",) * (attributes is not None) + ("labels",) * several
        names = names or ("ldp",)
    if isinstance(names, str) or not names:
        raise ValueError(f"features = {names!r}: must be a list of {FEATURES}")
    core.check_choice("std", std, STD)
    columns = []
    for name in names:
        core.check_choice("features", name, FEATURES)
        if name == "ldp":
            columns.append(degree_profile(found["edges"], nodes, std=std))
            continue
        values = attributes if name == "attributes" else labels
        if values is None:
            raise ValueError(f"features = {names!r}: {where} has no node {name}")
        if values.ndim not in (1, 2) or len(values) != nodes:
            shape = values.shape
            raise ValueError(f"{where}: node {name} {shape} for {nodes} nodes")
        values = values.reshape(nodes, -1)
        if not np.isfinite(values).all():
            raise ValueError(f"{where}: node {name} that are not finite")
        columns += [_one_hot(c) for c in values.T] if name == "labels" else [values]
    made = np.concatenate(columns, axis=1, dtype=np.float64)
    if normalise:
        made /= np.maximum(made.sum(axis=1, keepdims=True), 1.0)
    return made.astype(np.float32)


def _one_hot(codes):
    kinds, number = np.unique(codes, return_inverse=True)
    return number[:, None] == np.arange(len(kinds))


def degree_profile(edges, nodes: int, *, std: str = "sample") -> np.ndarray:
    """Degree, and minimum, maximum, mean and deviation of the neighbours' degrees.

    Zeros where a node has no neighbour.

    Args:
      edges: i[2,E], each in both directions, sorted by edges[0].
      nodes: how many there are.
      std: "sample" divides by max(d - 1, 1), as the released code of ICL does by way
        of its library; "population" by d, the number of neighbours.

    Returns:
      f64[nodes,5].

    Source: Cai and Wang, "A simple yet effective baseline for non-attributed graph
    classification" (2018), LDP.
    """
    core.check_choice("std", std, STD)
    degree = np.bincount(edges[0], minlength=nodes)
    profile = np.zeros((nodes, 5))
    profile[:, 0] = degree
    linked = np.flatnonzero(degree)
    if len(linked) == 0:
        return profile
    count = degree[linked]
    first = np.cumsum(count) - count
    theirs = degree[edges[1]].astype(np.float64)
    mean = np.add.reduceat(theirs, first) / count
    squares = np.add.reduceat((theirs - np.repeat(mean, count)) ** 2, first)
    divisor = np.maximum(count - 1, 1) if std == "sample" else count
    profile[linked, 1] = np.minimum.reduceat(theirs, first)
    profile[linked, 2] = np.maximum.reduceat(theirs, first)
    profile[linked, 3] = mean
    profile[linked, 4] = np.sqrt(squares / divisor)
    return profile
