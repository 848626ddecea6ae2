"""DUEL's choice of rows, written as the loops of its algorithms."""

import numpy as np

SCORES = {
    "affine": lambda s: (1 + s) / 2,
    "exponential": lambda s: np.exp((s - 1) / 0.3),
}


def loop(memory, incoming, q, *, filled=None, competes=False):
    """Algorithm 4, and Algorithm 1 where the newcomer competes, row by row."""
    rows = np.concatenate([memory, incoming])
    capacity = len(memory)
    filled = np.ones(capacity, bool) if filled is None else filled
    present = [k for k in range(capacity) if filled[k]]
    for new in range(capacity, len(rows)):
        full = len(present) == capacity
        if competes:
            present.append(new)
        if full:
            sums = [sum(q(rows[j] @ rows[k]) for k in present) for j in present]
            present.remove(present[int(np.argmax(sums))])
        if not competes:
            present.append(new)
    return np.isin(np.arange(len(rows)), present)
