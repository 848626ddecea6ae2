"""The toy of toy.py as a config file, for tests that start processes."""

from helpers import toy


def get_config(arg=None):
    return toy.config(
        **{
            "scenario.num_tasks": 5,
            "method.strategy": "pnr",
            "evaluators": {"knn": {"k": 5}},
            "save_every": 1 if arg == "saves" else 4,
            "devices": None,
        }
    )
