"""TensorBoard events, in `tensorboard/` of the run."""

import os

from jaxcl.run import loggers


class Events:
    """A writer that holds the events of `rows` and no others.

    A resumed run writes all events again. Events reach the disk later than rows: a
    crash may lose events from before the checkpoint, and keep events from after it.
    """

    def __init__(self, directory, rows):
        import tensorboardX  # only runs with TensorBoard pay for it

        directory.mkdir(parents=True, exist_ok=True)
        for old in list(directory.glob("events.out.tfevents.*")):
            old.unlink()
        # Tells a TensorBoard that is open now to drop what it has read, from step 0 on.
        path = os.fspath(directory)
        self._writer = tensorboardX.SummaryWriter(path, purge_step=0, flush_secs=30)
        for row in rows:
            self.write(row)

    def write(self, row: dict) -> None:
        """Add the numbers of a row."""
        time = row["time"]["unix"]
        for tag, value in loggers.numbers(row):
            self._writer.add_scalar(tag, value, row["step"], walltime=time)

    def close(self) -> None:
        """Write all events to the disk."""
        self._writer.close()


def make(directory, rows) -> Events:
    """Open the events of a run."""
    return Events(directory / "tensorboard", rows)
