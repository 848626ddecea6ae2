"""Checkpoints: save the state with a cursor beside it, and restore them.

Orbax writes a checkpoint under a temporary name and renames it once it is complete, so
a save that was killed leaves nothing that looks like a checkpoint. Every leaf of the
state has a checksum: if a file was damaged later, `restore` notices it and uses the
checkpoint before.
"""

import contextlib
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from jaxcl import sharding
from jaxcl.data import storage
from jaxcl.run import results as results_lib


class Restored(NamedTuple):
    """What a run continues from."""

    state: object
    cursor: dict  # JSON: what `save` was given
    number: int


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which."""


def _bits(leaf) -> jax.Array:
    """The bits of a leaf as u32 words."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_ or leaf.dtype.itemsize == 1:
        return leaf.astype(jnp.uint32)
    if leaf.dtype.itemsize == 2:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, jnp.uint32)


def _shapes(tree) -> dict:
    """Path -> shape of each leaf, the same for a state and for Orbax's metadata."""
    shapes = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        # The metadata has dicts where the state has fields; keys are saved as words.
        name = re.sub(r"\.(\w+)", r"['\1']", jax.tree_util.keystr(path))
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        shapes[name] = tuple(leaf.shape) + ((2,) if is_key else ())
    return shapes


@jax.jit
def checksum(tree: Any) -> jax.Array:
    """u32[leaves]: sum of each leaf's words, weighted by place, modulo 2^32."""
    sums = []
    for leaf in jax.tree.leaves(tree):
        words = _bits(leaf).ravel()
        weights = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
        sums.append(jnp.sum(words * weights, dtype=jnp.uint32))
    return jnp.stack(sums)


class Checkpoints:
    """The numbered checkpoints of a run directory, newest last."""

    def __init__(self, directory: epath.PathLike, *, keep: int = 2):
        """Open the checkpoints of a directory, of which the newest `keep` are kept."""
        path = epath.Path(directory)
        # Orbax wants an absolute path; an address in a bucket is one.
        self._directory = path if storage.in_bucket(path) else path.resolve()
        training = ocp.training
        self._checkpointer = training.Checkpointer(
            self._directory,
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )
        self._pending = None

    def save(self, number: int, state: Any, cursor: dict) -> None:
        """Begin to write checkpoint `number`, once the previous save is done.

        Args:
          number: its place in the order of checkpoints.
          state: pytree of arrays.
          cursor: JSON; `restore` returns it with the state.

        Raises:
          CheckpointError: this or the previous save failed, e.g. a full disk.
        """
        self.wait()
        sums = np.asarray(checksum(state)).tolist()
        try:
            self._pending = self._checkpointer.save_async(
                number,
                state,
                force=True,
                custom_metadata={"cursor": cursor, "checksum": sums},
            )
        except Exception as error:  # whatever the storage raises
            raise self._failed(error) from error

    def wait(self) -> None:
        """Wait until the save under way, if any, is done.

        Raises:
          CheckpointError: it failed.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CheckpointError:
        good = [c.step for c in self._checkpointer.checkpoints]
        return CheckpointError(
            f"could not write a checkpoint to {self._directory}: "
            f"{type(error).__name__}: {str(error)[:300]}. Whole checkpoints there: "
            f"{good or 'none'}. Make room or give another --workdir, then run the "
            "same command again: it continues from the newest whole one"
        )

    def restore(self, like: Any) -> Restored | None:
        """Read the newest checkpoint that is not damaged; None if there is none at all.

        Args:
          like: a state with the shapes, types and shardings to restore to; the
            mesh may differ from the one that saved it.

        Raises:
          CheckpointError: there are checkpoints, but every one is damaged.
        """
        numbers = [c.step for c in self._checkpointer.checkpoints]
        for number in reversed(numbers):
            try:
                metadata = self._checkpointer.metadata(number).custom_metadata
                state = self._checkpointer.load(number, abstract_state(like))
                if np.asarray(checksum(state)).tolist() != metadata["checksum"]:
                    raise ValueError("its checksum does not match its contents")
            except Exception as error:  # whatever the damage, try the one before
                logging.error(
                    "checkpoint %s in %s is damaged (%s: %s); trying the one before it",
                    number,
                    self._directory,
                    type(error).__name__,
                    str(error)[:300],
                )
                continue
            self._drop(n for n in numbers if n > number)
            return Restored(state, metadata["cursor"], number)
        if numbers:
            raise CheckpointError(
                f"every checkpoint in {self._directory} is damaged ({numbers}); "
                "remove the directory to start again"
            )
        return None

    def check_shapes(self, like: Any, field: str) -> None:
        """Compare the shapes of the newest checkpoint with those of `like`.

        A checkpoint that cannot be read is left to `restore`.

        Args:
          like: as in `restore`.
          field: what named the checkpoint, for the message.

        Raises:
          CheckpointError: a shape differs; the message names the first such leaf.
        """
        for newest in self._checkpointer.checkpoints[-1:]:
            try:
                saved = _shapes(self._checkpointer.metadata(newest.step).metadata)
            except Exception:  # whatever the storage raises
                return
            for name, shape in _shapes(like).items():
                if saved.get(name, shape) != shape:
                    raise CheckpointError(
                        f"{field}: its state has {name} of shape {saved[name]}, this "
                        f"run's has {shape}; images and sizes must be the same in both"
                    )

    def _drop(self, numbers) -> None:
        """Move damaged checkpoints aside: the run will write their numbers again."""
        for number in numbers:
            path = self._directory / str(number)
            if jax.process_index() == 0 and path.exists():
                for copy in itertools.count():
                    aside = self._directory.parent / f"damaged-{number}-{copy}"
                    if not aside.exists():
                        path.rename(aside)
                        break
        sharding.barrier("damaged checkpoints are aside")
        self._checkpointer.reload()

    def close(self) -> None:
        """Finish the save under way and stop Orbax's threads."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()


def abstract_state(tree: Any) -> Any:
    """Shapes, types and shardings of a tree of arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def taken_over(
    start: str, like: Any, task_names: Sequence[str], *, keep: int
) -> Restored:
    """The last state of another run, for this run to continue from.

    Args:
      start: directory of the other run.
      like, keep: as in `Checkpoints`.
      task_names: of this run, which may have more tasks, see `results.widened`.

    Raises:
      CheckpointError: the other run has not finished its task, or its state has other
        shapes.
    """
    folder, restored = epath.Path(start) / "checkpoints", None
    if folder.exists():
        with contextlib.closing(Checkpoints(folder, keep=keep)) as checkpoints:
            checkpoints.check_shapes(like, f"config.start={start!r}")
            restored = checkpoints.restore(like)
    if restored is None or restored.cursor["phase"] != "evaluated":
        raise CheckpointError(
            f"config.start={start!r}: has not come to the end of a task; let it finish "
            "(config.first_tasks says how many it trains)"
        )
    results = results_lib.widened(restored.cursor["results"], task_names)
    cursor = {**restored.cursor, "offset": 0, "seconds": {}, "results": results}
    return restored._replace(cursor=cursor)
