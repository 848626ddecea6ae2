"""Batches of graphs for training and evaluation, padded on the host.

A batch is {"graph": graph_arrays.Graphs, "label": i32[B], "index": i32[B]}. An empty
slot has index -1 and label -1. A step may take P > 1 batches at once; then the leaves
are [P, ...].
"""

from collections.abc import Generator, Sequence

import numpy as np

from jaxcl.data import stream
from jaxcl.data.stream import graph_arrays


def blank_batch(examples: stream.Examples, batch_size: int, count: int = 1) -> dict:
    """Return a batch without graphs, of the size used most often."""
    rows = np.full((count, batch_size), -1, np.int32)
    sizes = graph_arrays.buckets(examples.graphs, batch_size, num_batches=count)
    return _padded(examples, rows, sizes, count > 1)


def batches(
    source: stream.Source,
    *,
    seed: int,
    task: int,
    epochs: int | Sequence[int],
    batch_size: int,
    num_batches: int = 1,
    start: int = 0,
) -> Generator[dict, None, None]:
    """Yield a task's batches from its step `start` on, on the host.

    Args:
      source: training set of the task. Each step takes batch_size x P rows of its
        order; place P i + p is row i of part p.
      epochs: numbers of epochs, see `stream.epochs_of_tasks`.
      batch_size: graphs of each part.
      num_batches: P, number of batches that a step takes.
    """
    plan = stream.schedule(
        source, seed=seed, task=task, epochs=epochs, batch_size=batch_size * num_batches
    )
    graphs = source.examples.graphs
    sizes = graph_arrays.buckets(graphs, batch_size, num_batches=num_batches)
    for step in range(start, len(plan)):
        rows = plan[step].reshape(batch_size, num_batches).T
        yield _padded(source.examples, rows, sizes, num_batches > 1)


def evaluation_batches(
    examples: stream.Examples, rows: np.ndarray, batch_size: int
) -> Generator[dict, None, None]:
    """Yield batches of some rows in order; the last is filled with empty slots."""
    filled = np.full(-(-len(rows) // batch_size) * batch_size, -1, np.int32)
    filled[: len(rows)] = rows
    sizes = graph_arrays.buckets(examples.graphs, batch_size)
    for part in filled.reshape(-1, 1, batch_size):
        yield _padded(examples, part, sizes, False)


def _padded(examples, rows, sizes, side_by_side):
    """Return the batch of rows i32[P, B]; without P if a step takes one part."""
    label = np.where(rows < 0, -1, examples.label[rows]).astype(np.int32)
    graph = graph_arrays.pad_batches(examples.graphs, rows, sizes)
    batch = {"graph": graph, "label": label, "index": rows.astype(np.int32)}
    if side_by_side:
        return batch
    batch["graph"] = graph_arrays.Graphs(*(leaf[0] for leaf in graph))
    return batch | {"label": label[0], "index": batch["index"][0]}
