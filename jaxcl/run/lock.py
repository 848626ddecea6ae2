"""Let one process at a time write to a run directory; `lock.json` names it.

Process 0 of a run holds the lock until the run ends. On a disk flock guards the file,
and the system frees it when a process dies. In a bucket the file is created only if
there is none. docs/reliability.md lists the locks that are taken over.
"""

import contextlib
import datetime
import json
import os
import pathlib
import socket
import time
import uuid
from collections.abc import Iterator

import jax
from absl import logging
from etils import epath

from jaxcl import sharding, storage
from jaxcl.errors import Refused

FILE = "lock.json"
JOB = "JAXCL_JOB"  # environment variable: name of the job of a launcher
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")  # new at each start of Linux
_PATIENCE = 1.0  # seconds; a process that only checks the config is done sooner
_locks = {}  # absolute path of a directory -> Lock, of this process


class LockHeldError(Refused):
    """Another process works in the directory; the message says which."""


class LockLostError(RuntimeError):
    """This process no longer has the lock of a directory."""


class Lock:
    """A lock that this process holds; `release` gives it back."""

    def __init__(self, place: str):
        """Write this process into the file, or raise as `acquire` does."""
        self._place, self._path, self.count = place, epath.Path(place) / FILE, 0
        self._owner = _describe_process()
        self._file = _acquire(self._path, self._owner)

    def is_there(self) -> bool:
        """Tell whether the file still names this process."""
        return _read_owner(self._path) == self._owner

    def remove(self) -> None:
        """Remove the file if it still names this process."""
        with contextlib.suppress(OSError):
            if self.is_there():
                self._path.unlink()

    def release(self) -> None:
        """Give the lock back; the last of several calls removes the file."""
        self.count -= 1
        if not self.count:
            del _locks[self._place]
            with self._file:
                self.remove()


def acquire(folder: epath.PathLike) -> Lock:
    """Take the lock of a directory; this process may take it again.

    Raises:
      LockHeldError: another process has the lock.
      OSError: the directory cannot be written.
    """
    place = _locate(folder)
    lock = _locks[place] = _locks.get(place) or Lock(place)
    lock.count += 1
    return lock


@contextlib.contextmanager
def hold_lock(folder: epath.PathLike) -> Iterator[None]:
    """Hold the lock of a directory, created if missing, for all processes of a run."""
    lock = failure = None
    if jax.process_index() == 0:
        try:
            lock = acquire(folder)
        except (LockHeldError, OSError) as error:
            failure = error
    if sharding.any_process(failure is not None):
        raise failure or LockHeldError(
            f"{os.fspath(folder)}: process 0 could not lock it"
        )
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def check_lock(folder: epath.PathLike) -> None:
    """Raise `LockLostError` if the lock that this process took no longer names it."""
    lock = _locks.get(_locate(folder))
    if lock is not None and not lock.is_there():
        raise LockLostError(
            f"{os.fspath(folder)}: its {FILE} is gone or names another process: the "
            "directory was removed, moved or taken over while this run was at work. "
            "Nothing more is written there"
        )


def release_all() -> None:
    """Remove the lock files of this process, which is about to end."""
    for lock in [*_locks.values()]:
        lock.remove()


def _locate(folder) -> str:
    in_bucket = storage.in_bucket(folder)
    return os.fspath(folder) if in_bucket else os.path.realpath(folder)


def _describe_process() -> dict:
    """Describe this process for the file."""
    return {
        "host": socket.gethostname(),
        "boot": _BOOT.read_text() if _BOOT.exists() else socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "job": os.environ.get(JOB) or None,
        "id": uuid.uuid4().hex,
    }


def _acquire(path, claim) -> contextlib.ExitStack:
    """Write the owner into the file; return what frees the file when closed."""
    data = json.dumps(claim).encode()
    with contextlib.ExitStack() as stack:
        if storage.in_bucket(path):
            has_flock, is_done = False, _create_object(path, data)
        else:
            has_flock, is_done = _lock_file(path, stack), False
        if not is_done:
            _check_gone(path, claim, has_flock)
            path.write_bytes(data)
        if not is_done and not has_flock:
            # Of two that take over at once the first sees what the second wrote.
            time.sleep(_PATIENCE)
            if (owner := _read_owner(path)) != claim:
                raise _refusal(path, owner)
        return stack.pop_all()


def _create_object(path, data) -> bool:
    """Create an object in a bucket; False if there is one already."""
    import fsspec  # only buckets need it

    files, name = fsspec.core.url_to_fs(os.fspath(path))
    try:
        files.pipe_file(name, data, mode="create")
    except FileExistsError:
        return False
    return True


def _lock_file(path, stack) -> bool:
    """Lock a file on a disk until `stack` closes; False where flock does not work."""
    path.parent.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + _PATIENCE
    while True:
        with contextlib.ExitStack() as attempt:
            file = attempt.enter_context(open(path, "ab"))
            try:
                import fcntl  # not on Windows

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last owner may have removed the file since it was opened.
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    stack.push(attempt.pop_all())
                    return True
            except FileNotFoundError:
                pass
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise _refusal(path, _read_owner(path)) from None
            except (OSError, ImportError) as error:
                logging.info("no flock: %s", error)
                return False
        time.sleep(0.02)


def _read_owner(path) -> dict:
    """Read the owner in a lock file; {} if there is none, or the file is damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):
        owner = json.loads(path.read_bytes())
        if owner.keys() == _describe_process().keys():
            return owner
    return {}


def _check_gone(path, claim, has_flock) -> None:
    """Raise `LockHeldError` unless the owner of a found lock is known to be gone."""
    owner = _read_owner(path)
    if not owner:
        return
    if owner["boot"] == claim["boot"]:  # this machine
        is_gone = has_flock or not _is_alive(owner["pid"])
    else:  # a machine that has restarted, or a job that was started again
        same_job = owner["job"] is not None and owner["job"] == claim["job"]
        is_gone = owner["host"] == claim["host"] or same_job
    if not is_gone:
        raise _refusal(path, owner)
    logging.warning("%s: taken over from process %s", path.parent, owner["pid"])


def _is_alive(pid: int) -> bool:
    """Tell whether this machine has a process with this number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True


def _refusal(path, owner) -> LockHeldError:
    holder = "another process"
    if owner:
        holder = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    return LockHeldError(
        f"{path.parent} is in use by {holder}: one process at a time writes there. "
        "Wait for its end, stop it, or give another directory. If that process is "
        f"gone, remove {path}, which holds nothing else, and run the command again"
    )
