"""The config file of the runs that are attacked: a row of the table of methods."""

import test_methods
from helpers import toy


def get_config(name):
    row = test_methods.METHODS[name]
    changes = {"save_every": 5, "eval_every": 7, "evaluators": {"knn": {"k": 5}}}
    if name == "mocov2plus-pnr":  # an update follows a run of all its tasks
        changes["scenario.num_tasks"] = 2
    elif row.tasks > 1:
        changes["first_tasks"] = 2
    if name in ("er", "mocov2plus-pnr"):  # all that a run can leave, in one of each
        changes |= {"tensorboard": True, "plots": True}
    return toy.config(**changes | row.changes)
