"""Faults that the tests must notice; tests/mutate.py puts them in, one at a time.

Each replaces one function that the package offers by a wrong one: a mask that nobody
reads, swapped views, a gradient where none may flow, an update that is missing. Only
public names are replaced, so that the inside of a module may change freely.
"""

from faults import evaluators, indexes, losses, memories, runs, steps, training, weights

FAULTS = [
    *(*losses.FAULTS, *memories.FAULTS, *training.FAULTS),
    *(*steps.FAULTS, *evaluators.FAULTS, *runs.FAULTS),
    *(*weights.FAULTS, *indexes.FAULTS),
]
