"""Average the encoders before and after an update: WiSE-FT.

Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022: weights (1 -
share) old + share new keep more of the old than the new ones, and learn less.

Departures:
- Heads are those after the update, since the old ones may be of another method.
- Running statistics of batch norm are averaged like weights, and so are the factors of
  adapters.
"""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from etils import epath

from jaxcl import core
from jaxcl.run import checkpoint, job

SHARES = (1.0, 0.75, 0.5, 0.25)  # that "auto" tries, in this order


def mix_weights(old: core.PyTree, new: core.PyTree, share: float) -> core.PyTree:
    """Compute (1 - share) old + share new for all floating-point leaves."""

    def mix_leaf(a, b):
        if not jnp.issubdtype(b.dtype, jnp.floating):
            return b
        return ((1 - share) * a + share * b).astype(b.dtype)

    return jax.tree.map(mix_leaf, old, new)


def save_average(work: job.Job, workdir: epath.PathLike, choose: Callable) -> dict:
    """Save the average as the newest checkpoint of a finished run, once.

    Args:
      work: the run that trained, from the earlier encoder.
      workdir: directory of the update.
      choose: (share -> params and stats of the encoder) -> {"share": float} and, as
        JSON, further fields of the record.

    Returns:
      The record from `choose`, also if the average was saved before.
    """
    folder = epath.Path(workdir) / "checkpoints"
    saved = checkpoint.Checkpoints(folder, keep=work.loop.keep)
    with contextlib.closing(saved) as checkpoints:
        blank = job.initial_state(work)
        trained = checkpoints.restore(blank)
        assert trained is not None  # the run is over
        if "average" in trained.cursor:
            return trained.cursor["average"]
        before, start = blank, work.loop.start
        if start is not None:
            names, keep = work.data.task_names, work.loop.keep
            before = checkpoint.restore_start(start, blank, names, keep=keep).state
        after: core.TrainState = trained.state

        old = before.params["encoder"], before.stats["encoder"]
        new = after.params["encoder"], after.stats["encoder"]

        def average(share):
            return mix_weights(old, new, share)

        chosen = choose(average)
        params, stats = average(chosen["share"])
        state = after.replace(
            params={**after.params, "encoder": params},
            stats={**after.stats, "encoder": stats},
        )
        cursor = trained.cursor | {"average": chosen}
        checkpoints.save(trained.number + 1, state, cursor)
    return chosen
