"""The memory that drops what it has learnt, row by row in float64."""

import numpy as np


def scores(loss, draws, filled):
    """Of each stored row its loss between 0 and 1, less half its share of draws."""
    stored = [s for s in range(len(filled)) if filled[s]]
    if not stored:
        return {}
    least, most = (f(float(loss[s]) for s in stored) for f in (min, max))
    often = max(max(int(draws[s]) for s in stored), 1)
    return {
        s: (float(loss[s]) - least) / max(most - least, 1e-6)
        - 0.5 * int(draws[s]) / often
        for s in stored
    }


def lowest(scores, count):
    """The slots of the lowest scores, of equal ones the first."""
    return sorted(scores, key=lambda s: (scores[s], s))[: max(count, 0)]


def entering(loss, draws, filled, new, admitted):
    """Slots of rows that come one after another, as `loss_aware.replace_in_reservoir`.

    Args:
      new: losses of the rows.
      admitted: slots that a reservoir gives them; one beyond all: it does not enter.
    """
    loss, draws, filled = (np.array(x) for x in (loss, draws, filled))
    slots = []
    for value, slot in zip(new, admitted, strict=True):
        if slot < len(filled) and filled.all():
            (slot,) = lowest(scores(loss, draws, filled), 1)
        slots.append(int(slot))
        if slot < len(filled):
            loss[slot], draws[slot], filled[slot] = value, 0, True
    return slots
