"""Let one process at a time write to a run directory; `lock.json` names it.

Process 0 of a run holds the lock until the run ends. On a disk the file is locked with
flock, which the system takes back when a process dies. In a bucket the file is created
on the condition that there is none. A lock whose process is gone is taken over; a
process on another machine cannot be asked, so its lock stays. docs/reliability.md says
which storage keeps processes apart.
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

from jaxcl import sharding
from jaxcl.data import storage

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None

FILE = "lock.json"
JOB = "JAXCL_JOB"  # environment variable: name of the job of a launcher
_NAMES = {"host", "boot", "pid", "since", "job"}  # in the file
_PATIENCE = 1.0  # seconds; a process that only checks the config is done sooner
_locks = {}  # place -> Lock, of this process


class Held(RuntimeError):
    """Another process works in the directory; the message says which."""


class Lost(RuntimeError):
    """This process no longer has the lock of a directory."""


class Lock:
    """A lock that this process holds; `release` gives it back."""

    def __init__(self, place: str, folder: epath.PathLike):
        """Write this process into the file, or raise as `take` does."""
        self._place, self._path = place, epath.Path(folder) / FILE
        self._owner, self.count = _describe_process(), 0
        lock = _create_object if storage.in_bucket(folder) else _lock_file
        self._file = lock(self._path, self._owner)

    def is_there(self) -> bool:
        """Tell whether the file still names this process."""
        return _parse(_read(self._path)) == self._owner

    def release(self) -> None:
        """Give the lock back; the last of several calls removes the file."""
        self.count -= 1
        if not self.count:
            del _locks[self._place]
            self.remove()

    def remove(self) -> None:
        """Remove the file if it still names this process."""
        with contextlib.suppress(OSError):
            if self.is_there():
                self._path.unlink()
        # The thread of signals may come here while the main thread does.
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def take(folder: epath.PathLike) -> Lock:
    """Take the lock of a directory for this process, or count it once more.

    Raises:
      Held: another process has the lock.
      OSError: the directory cannot be written.
    """
    place = _locate(folder)
    if place not in _locks:
        _locks[place] = Lock(place, folder)
    _locks[place].count += 1
    return _locks[place]


@contextlib.contextmanager
def held(folder: epath.PathLike) -> Iterator[None]:
    """Hold the lock of a directory for all processes of the run; see `take`.

    Args:
      folder: made if missing.
    """
    lock = failure = None
    if jax.process_index() == 0:
        try:
            lock = take(folder)
        except (Held, OSError) as error:
            failure = error
    if sharding.any_process(failure is not None):
        raise failure or Held(f"{os.fspath(folder)}: process 0 could not lock it")
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def check(folder: epath.PathLike) -> None:
    """Check that this process still has the lock that it took.

    Raises:
      Lost: the directory is gone, or somebody has removed the lock.
    """
    lock = _locks.get(_locate(folder))
    if lock is not None and not lock.is_there():
        raise Lost(
            f"{os.fspath(folder)}: its {FILE} is gone or names another process: the "
            "directory was removed, moved or taken over while this run was at work. "
            "Nothing more is written there"
        )


def release_all() -> None:
    """Give back every lock of this process, which is about to end."""
    for lock in [*_locks.values()]:
        lock.remove()


def _locate(folder) -> str:
    in_bucket = storage.in_bucket(folder)
    return os.fspath(folder) if in_bucket else os.path.realpath(folder)


def _describe_process() -> dict:
    """Describe this process for the file."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "host": socket.gethostname(),
        "boot": _read_boot(),
        "pid": os.getpid(),
        "since": now.isoformat(timespec="seconds"),
        "job": os.environ.get(JOB) or None,
        "id": uuid.uuid4().hex,
    }


def _read_boot() -> str:
    """Read what names this machine from one start to the next."""
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _lock_file(path, mine) -> int:
    """Lock a file on a disk and write the owner; returns the open file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + _PATIENCE
    while True:
        with contextlib.ExitStack() as stack:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, file)
            try:
                has_flock = _flock(file)
                if _is_at(file, path):  # its last owner has not removed it
                    _check_gone(path, _parse(_read(path)), mine, has_flock)
                    os.ftruncate(file, 0)
                    os.pwrite(file, json.dumps(mine).encode(), 0)
                    stack.pop_all()
                    return file
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise _refusal(path, _parse(_read(path))) from None
        time.sleep(0.02)


def _flock(file) -> bool:
    """Lock an open file, or raise BlockingIOError; False where flock does not work."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except (OSError, AttributeError) as error:
        logging.info("no flock: %s", error)
        return False
    return True


def _is_at(file, path) -> bool:
    """Tell whether an open file is still the one at the path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


def _create_object(path, mine) -> None:
    """Create the object in a bucket if there is none."""
    import fsspec  # only buckets need it

    files, name = fsspec.core.url_to_fs(os.fspath(path))
    data = json.dumps(mine).encode()
    with contextlib.suppress(FileExistsError):
        files.pipe_file(name, data, mode="create")
        return
    _check_gone(path, _parse(_read(path)), mine, has_flock=False)
    # Two that take over at once: the second removes what the first has written, which
    # the first sees if it looks again.
    path.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):
        files.pipe_file(name, data, mode="create")
        time.sleep(_PATIENCE)
        if _read(path) == data:
            return
    raise _refusal(path, _parse(_read(path)))


def _read(path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def _parse(data: bytes) -> dict | None:
    """Read the owner in a lock file; None if it is empty, {} if it is damaged."""
    if not data.strip(b"\0 \n"):
        return None  # its process died before it wrote, or the power went
    try:
        owner = json.loads(data)
        return {**owner, "pid": int(owner["pid"])} if owner.keys() >= _NAMES else {}
    except (ValueError, TypeError, AttributeError):
        return {}


def _check_gone(path, owner, mine, has_flock) -> None:
    """Raise `Held` unless the owner of a lock that was found is known to be gone."""
    if owner is None:
        return
    if not owner:
        is_gone = False
    elif owner["boot"] == mine["boot"]:  # this machine
        is_gone = has_flock or not _is_alive(owner["pid"])
    else:  # a machine that has restarted, or a job that was started again
        same_job = bool(owner["job"]) and owner["job"] == mine["job"]
        is_gone = owner["host"] == mine["host"] or same_job
    if not is_gone:
        raise _refusal(path, owner)
    logging.warning("%s: taken over from process %s", path.parent, owner["pid"])


def _is_alive(pid: int) -> bool:
    """Tell whether a process of this machine has a number, or nothing tells."""
    if fcntl is not None:
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
    return True


def _refusal(path, owner) -> Held:
    who = "another process"
    if owner:
        who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    return Held(
        f"{path.parent} is in use by {who}: one process at a time writes there. Wait "
        "for its end, stop it, or give another directory. If that process is gone, "
        f"remove {path}, which holds nothing else, and run the command again"
    )
