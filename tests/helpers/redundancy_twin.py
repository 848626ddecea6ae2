"""The rule of minimum redundancy, row by row."""

import numpy as np

from helpers import twins


def removed(rows, used, number, filled, excess):
    """Slots that are given up: of rows that were drawn those nearest to another.

    The oldest, where fewer than twice as many were drawn.
    """
    stored = [s for s in range(len(filled)) if filled[s]]
    seen = [s for s in stored if used[s]]
    if len(seen) < 2 * excess:
        return sorted(stored, key=lambda s: number[s])[: max(excess, 0)]
    gone = []
    for _ in range(excess):
        left = [s for s in seen if s not in gone]
        nearest = [
            max((1 + twins.cosine(rows[i], rows[j])) / 2 for j in left if j != i)
            for i in left
        ]
        gone.append(left[int(np.argmax(nearest))])
    return gone


def slots(filled, gone, mask):
    """Slots of the rows that exist, in order: free ones, and those of rows that go."""
    free = [s for s in range(len(filled)) if not filled[s] or s in gone]
    slots_of_rows = np.full(len(mask), len(filled))
    for row, slot in zip(np.flatnonzero(mask), free, strict=False):
        slots_of_rows[row] = slot
    return slots_of_rows
