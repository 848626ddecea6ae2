"""Faults that the tests must notice, one wrong line each; mutate.py puts them in.

They are written from the equations and from what the code means: a wrong sign or
index, a missing stop of the gradient, a wrong norm, swapped views, a mask that nobody
reads, a wrong order, an update that is missing, a default that is not the paper's.
Each names the tests that must fail, as narrowly as it can: the whole list takes as
long as they do.
"""

from faults import (
    bring,
    data,
    evaluators,
    front,
    launch,
    leaderboard,
    losses,
    memories,
    report,
    reproduce,
    runs,
    scaling,
    steps,
    training,
    tuning,
    two_view,
)

FAULTS = tuple(
    fault
    for part in (
        *(losses, memories, training, steps, two_view),
        *(evaluators, data, report, runs, launch, scaling, bring, tuning, front),
        *(reproduce, leaderboard),
    )
    for fault in part.FAULTS
)
