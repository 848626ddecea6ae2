"""Weights & Biases: `pip install 'jaxcl[wandb]'`, then --config.loggers=wandb.

Project, entity and mode come from wandb's environment variables: WANDB_PROJECT,
WANDB_ENTITY, WANDB_MODE=offline. `wandb.json` of the run keeps the id, under which a
resumed run continues.
"""

import os
import uuid
from typing import Any

from jaxcl import storage
from jaxcl.errors import Refused
from jaxcl.run import loggers


class WandbRun:
    """One run on Weights & Biases; its steps count rows, its x axis is "step"."""

    def __init__(self, run: Any, count: int):
        self._run, self._count = run, count
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    def write(self, row: dict) -> None:
        """Send the numbers of a row.

        A row that a resumed run logs again has the number that it had before, so that
        Weights & Biases leaves it out.
        """
        values = {"step": row["step"], "task": row["task"]}
        self._run.log(values | dict(loggers.numbers(row)), step=self._count)
        self._count += 1

    def close(self) -> None:
        """Wait until all is sent, or on the disk."""
        self._run.finish()


def check() -> None:
    """Raise Refused if wandb is not installed."""
    try:
        import wandb  # noqa: F401
    except ModuleNotFoundError as error:
        raise Refused(
            "config.loggers: 'wandb' is not installed; pip install 'jaxcl[wandb]'"
        ) from error


def make(directory, rows) -> WandbRun:
    """Begin a run named after its directory, or continue under its old id.

    Raises Refused if wandb cannot begin, such as without an account.
    """
    import wandb

    state, config = directory / "wandb.json", directory / "config.json"
    saved = storage.read_object(state) if state.exists() else {}
    name = saved.get("id") or uuid.uuid4().hex[:12]
    if not saved:
        storage.write_json(state, {"id": name})
    try:
        run = wandb.init(
            id=name,
            resume="allow",
            name=directory.name,
            config=storage.read_object(config) if config.exists() else {},
            # A bucket is no folder for its files: they go where WANDB_DIR says.
            dir=None if storage.in_bucket(directory) else os.fspath(directory),
            settings=wandb.Settings(console="off"),
        )
    except wandb.errors.Error as error:
        raise Refused(
            f"config.loggers: 'wandb' does not begin: {error}; WANDB_MODE=offline "
            "needs no account"
        ) from error
    board = WandbRun(run, len(rows) if saved else 0)
    for row in () if saved else rows:  # of a run that had no such logger before
        board.write(row)
    return board
