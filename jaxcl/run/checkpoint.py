"""Save checkpoints, a state with a cursor, and restore them.

Orbax writes a checkpoint under a temporary name and renames it once it is complete, so
a save that was killed leaves nothing that looks like a checkpoint. Every leaf of the
state has a checksum: if a file was damaged later, `restore` notices it and uses the
checkpoint before. A checkpoint of another state, or storage that does not answer, has
its own error, since such a checkpoint is not damaged.

All calls of Orbax are here.
"""

import contextlib
import enum
import errno
import functools
import hashlib
import itertools
import json
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from jaxcl import sharding, storage
from jaxcl.errors import Refused
from jaxcl.run import encoder_folder, result_file


class Phase(enum.StrEnum):
    """The progress of a run at a checkpoint; "phase" of the cursor."""

    TRAINING = "training"  # a part of a task
    TRAINED = "trained"  # a task, with the method's `end_task`
    EVALUATED = "evaluated"  # a task, with its evaluation


class Restored(NamedTuple):
    """The starting point of a resumed run."""

    state: object
    cursor: dict  # JSON, as passed to `save`
    number: int


class CheckpointInfo(NamedTuple):
    """The description of a checkpoint, without the arrays."""

    tree: dict  # leaves with shape and dtype; dicts where the state has fields
    cursor: dict  # as in `Restored`
    sums: dict  # name of a leaf -> its checksum


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which."""


class Misfit(CheckpointError):
    """An undamaged checkpoint has other leaves than the wanted state."""


# What TensorStore's errors begin with where the storage failed to answer, so that the
# file may be whole: not those of a missing, short or wrong one.
_UNANSWERED = re.compile(
    "(UNKNOWN|UNAVAILABLE|UNAUTHENTICATED|PERMISSION_DENIED|DEADLINE_EXCEEDED"
    "|RESOURCE_EXHAUSTED|ABORTED|CANCELLED|INTERNAL): "
)


_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def _leaf_bits(leaf) -> jax.Array:
    """Return the bits of a leaf as u32 words."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    size = leaf.dtype.itemsize
    if leaf.dtype == jnp.bool_ or size == 1:
        return leaf.astype(jnp.uint32)
    words = jax.lax.bitcast_convert_type(leaf, jnp.uint16 if size == 2 else jnp.uint32)
    return words.astype(jnp.uint32)


def _describe_leaves(tree) -> dict:
    """Name the shape and type of each leaf, of a state or of `CheckpointInfo.tree`."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        # Orbax has dicts where the state has fields; keys are saved as two words.
        name = "".join(f"['{jax.tree_util.keystr((k,), simple=True)}']" for k in path)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        leaves[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaves


def differences(saved: Any, like: Any, *, most: int = 3) -> str:
    """List the leaves that differ in name, shape or type; "" if none does.

    Args:
      saved: the tree from `read_info`, or a part of it.
      like: wanted leaves, in the same places.
      most: number of leaves to name; further ones are counted.
    """
    misfits = encoder_folder.shape_mismatches(
        _describe_leaves(saved), _describe_leaves(like)
    )
    lines = [f"{name} is {a} in the checkpoint, {b} here" for name, a, b in misfits]
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "; ".join(lines[:most] + more)


@jax.jit
def checksum(tree: Any) -> jax.Array:
    """Sum the words of each leaf, weighted by place, modulo 2^32: u32[leaves]."""
    sums = []
    for leaf in jax.tree.leaves(tree):
        words = _leaf_bits(leaf).ravel()
        weights = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
        sums.append(jnp.sum(words * weights, dtype=jnp.uint32))
    return jnp.stack(sums)


def read_info(path: epath.PathLike) -> CheckpointInfo:
    """Read a checkpoint without its arrays; Orbax's errors pass through."""
    metadata = ocp.metadata(path)
    if metadata.metadata is None:  # Orbax keeps the reason to itself; load raises it
        with warnings.catch_warnings(action="ignore"):  # no shardings are given
            ocp.load(path)
        raise OSError(f"{path}: its leaves cannot be listed, though they can be read")
    custom = metadata.custom_metadata
    if custom["cursor_checksum"] != _text_sum(custom["cursor"]):
        raise Refused("the checksum of its cursor does not match")
    return CheckpointInfo(metadata.metadata, custom["cursor"], custom["checksum"])


def _text_sum(cursor: dict) -> str:
    """Return a checksum of JSON that survives writing and reading."""
    text = json.dumps(cursor, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load_leaves(path: epath.PathLike, like: Any, saved: CheckpointInfo) -> Any:
    """Load the leaves that `like` has, which may be a part of the state.

    Args:
      path: the folder of the checkpoint.
      like: a tree with the shapes, types and shardings to restore to; the mesh may
        differ from the one that saved it.
      saved: description from `read_info`.

    Raises:
      Refused: a checksum does not match; or whatever Orbax raises.
    """
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        loaded = ocp.load(path, abstract_state(like))
    if any(saved.sums[name] != value for name, value in _checksums(loaded).items()):
        raise Refused("its checksum does not match its contents")
    return loaded


def _checksums(tree) -> dict[str, int]:
    """Compute the checksum of each leaf, by name."""
    return dict(
        zip(_describe_leaves(tree), np.asarray(checksum(tree)).tolist(), strict=True)
    )


def _may_be_undamaged(error: BaseException | None) -> bool:
    """Tell whether the storage did not answer, rather than gave a wrong or no file.

    Orbax raises its own error while it handles the storage's error.
    """
    while error is not None:
        failed = isinstance(error, OSError | MemoryError)
        if failed and not isinstance(error, _ABSENT) or _UNANSWERED.match(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def newest(
    folder: epath.Path, numbers: Sequence[int], reader: Callable
) -> tuple[int, Any]:
    """Find the newest undamaged checkpoint: its number and what `reader` returns.

    Args:
      folder: folder of the checkpoints.
      numbers: numbers of the checkpoints, from the oldest; at least one.
      reader: path of a checkpoint -> anything; it may raise anything.

    Raises:
      Misfit: as `reader` raised it.
      CheckpointError: the storage did not answer, or every checkpoint is damaged.
    """
    damage = []
    for number in reversed(numbers):
        try:
            return number, reader(folder / str(number))
        except Misfit:
            raise
        except Exception as error:  # whatever the damage, try the one before
            cause, name = _describe(error), f"checkpoint {number} in {folder}"
            if _may_be_undamaged(error):
                raise CheckpointError(
                    f"{name} could not be read now ({cause}); it may be whole. Run the "
                    "same command again"
                ) from error
            logging.error("%s is damaged (%s); trying the one before it", name, cause)
            damage.append(cause)
    raise CheckpointError(
        f"every checkpoint in {folder} is damaged ({[*numbers]}), the newest by: "
        f"{damage[0]}; move that folder away to start afresh"
    )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


@functools.cache
def _mute_orbax() -> None:
    """Mute Orbax's log of errors, which it raises, too."""
    logging.get_absl_logger().addFilter(
        lambda record: record.levelname != "ERROR" or "orbax" not in record.pathname
    )


class Checkpoints:
    """The numbered checkpoints of a run directory, newest last."""

    def __init__(self, directory: epath.PathLike, *, keep: int = 2):
        """Open the checkpoints of a directory, which keeps the newest `keep`."""
        _mute_orbax()
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
        self._pending, self._bytes, self._broken = None, 0, False

    def save(self, number: int, state: Any, cursor: dict) -> None:
        """Begin to write checkpoint `number`, once the previous save is done.

        Args:
          number: place in the order of checkpoints.
          state: pytree of arrays.
          cursor: JSON that `restore` returns with the state.

        Raises:
          CheckpointError: this or the previous save failed, such as on a full disk.
        """
        self.wait()
        self._bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        try:
            sums = {"cursor_checksum": _text_sum(cursor), "checksum": _checksums(state)}
            metadata = {"cursor": cursor, **sums}
            self._pending = self._checkpointer.save_async(
                number, state, force=True, custom_metadata=metadata
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
        self._broken = True
        numbers = self.numbers()
        # Not every error of a full disk says of itself that it is one.
        left = storage.describe_room(self._directory, OSError(errno.ENOSPC, ""))
        return CheckpointError(
            f"could not write a checkpoint to {self._directory}: {_describe(error)} "
            f"(it has about {self._bytes:,} bytes{left}). Whole checkpoints there: "
            f"{numbers or 'none'}. Make room or give another --workdir, then run "
            "the same command again: it continues from the newest whole one"
        )

    def numbers(self) -> list[int]:
        """List the numbers of all checkpoints, oldest first."""
        return [c.step for c in self._checkpointer.checkpoints]

    def restore(self, like: Any) -> Restored | None:
        """Read the newest checkpoint that is not damaged; None if there is none at all.

        Args:
          like: the whole state, as in `load_leaves`.

        Raises:
          Misfit: the newest undamaged checkpoint has other leaves.
          CheckpointError: there are checkpoints, but every one is damaged, or the
            storage did not answer.
        """
        numbers = self.numbers()
        if not numbers:
            return None

        def reader(path):
            saved = read_info(path)
            if misfits := differences(saved.tree, like):
                raise Misfit(f"{path} is whole, but holds another state: {misfits}")
            return load_leaves(path, like, saved), saved.cursor

        number, (state, cursor) = newest(self._directory, numbers, reader)
        self._set_aside(n for n in numbers if n > number)
        return Restored(state, cursor, number)

    def _set_aside(self, numbers) -> None:
        """Move damaged checkpoints aside: the run will write their numbers again."""
        for number in numbers:
            path = self._directory / str(number)
            if jax.process_index() == 0 and path.exists():
                parent = self._directory.parent
                names = (f"damaged-{number}-{copy}" for copy in itertools.count())
                path.rename(
                    next(parent / x for x in names if not (parent / x).exists())
                )
        sharding.barrier("damaged checkpoints are aside")
        self._checkpointer.reload()

    def close(self) -> None:
        """Finish the save under way and stop Orbax's threads."""
        try:
            self.wait()
        finally:
            # Orbax raises the error of a failed save once more, in place of ours.
            with contextlib.suppress(*(Exception,) * self._broken):
                self._checkpointer.close()


def abstract_state(tree: Any) -> Any:
    """Return the shapes, types and shardings of a tree of arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def restore_start(
    start: str, like: Any, task_names: Sequence[str], *, keep: int
) -> Restored:
    """Read the last state of another run, for this run to continue from.

    Args:
      start: directory of the other run.
      like, keep: arguments of `Checkpoints`.
      task_names: tasks of this run, perhaps more than the other's, see
        `result_file.make_room`.

    Raises:
      CheckpointError: the other run has not finished its task, or its state has other
        leaves.
    """
    folder, restored = epath.Path(start) / "checkpoints", None
    if folder.exists():
        with contextlib.closing(Checkpoints(folder, keep=keep)) as checkpoints:
            try:
                restored = checkpoints.restore(like)
            except Misfit as error:
                raise Misfit(
                    f"config.start={start!r}: {error}; the images' size, the method "
                    "and the optimiser must be the same in both"
                ) from error
    if restored is None or restored.cursor["phase"] != Phase.EVALUATED:
        raise CheckpointError(
            f"config.start={start!r}: has not come to the end of a task; let it finish "
            "(config.first_tasks says how many it trains)"
        )
    results = result_file.make_room(restored.cursor["results"], task_names)
    cursor = {**restored.cursor, "rows": 0, "seconds": {}, "results": results}
    return restored._replace(cursor=cursor)
