"""One process at a time writes to a run directory: `lock.json` names it.

Process 0 of a run holds the lock until the run ends. On a disk the file is locked with
flock, which the system takes back when the process dies, so a crash leaves no lock that
anybody must remove; the file itself says who it was. Where a lock without its process
is found, it is taken over only if the process is known to be gone: another one has its
number or none on this machine, this machine has restarted, or both belong to one job of
a launcher that starts a job again only when it has ended (JAXCL_JOB, which the scripts
of launch/ set). A process on another machine cannot be asked: its lock stays.

In a bucket the file is created on the condition that there is none, which gcsfs and
s3fs hand on to the store. What a library does not offer is in docs/reliability.md.
"""

import contextlib
import datetime
import json
import os
import socket
import subprocess
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
_PATIENCE = 1.0  # seconds; a process that only checks the config is done sooner
_held = {}  # place -> Lock, of this process


class Held(RuntimeError):
    """Another process works in the directory; the message says which."""


class Lost(RuntimeError):
    """The lock of a directory is not this process's any more."""


class Lock:
    """A lock that this process holds; `release` gives it back."""

    def __init__(self, place: str, path: epath.Path, owner: dict, file: int | None):
        self._place, self._path, self._owner, self._file = place, path, owner, file
        self.count = 1  # how often this process has taken it

    def is_there(self) -> bool:
        """Whether the file is still this process's."""
        return _read(self._path) == self._owner

    def release(self) -> None:
        """Give it back; the last of several calls removes the file."""
        self.count -= 1
        if not self.count:
            del _held[self._place]
            self.remove()

    def remove(self) -> None:
        """Remove the file, if it is still this process's."""
        with contextlib.suppress(OSError):
            if self.is_there():
                self._path.unlink()
        # The thread of signals may come here while the main thread does.
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def check(folder: epath.PathLike) -> None:
    """Ask whether this process still has the lock of a directory that it took.

    Raises:
      Lost: the directory is gone, or somebody has removed the lock.
    """
    in_bucket = storage.in_bucket(folder)
    lock = _held.get(os.fspath(folder) if in_bucket else os.path.realpath(folder))
    if lock is not None and not lock.is_there():
        raise Lost(
            f"{os.fspath(folder)}: its {FILE} is gone or another process's: the "
            "directory was removed, moved or taken over while this run was at work. "
            "Nothing more is written there"
        )


def release_all() -> None:
    """Give back every lock of this process, which is about to end."""
    for lock in [*_held.values()]:
        lock.remove()


@contextlib.contextmanager
def held(folder: epath.PathLike) -> Iterator[None]:
    """Hold the lock of a directory, on behalf of all processes of the run.

    A process may hold a lock several times; it is free when all have ended.

    Args:
      folder: made if missing.

    Raises:
      Held: another process has it.
      OSError: the directory cannot be written.
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


def take(folder: epath.PathLike) -> Lock:
    """Take the lock of a directory for this process; see `held`, which asks no other.

    Raises:
      Held, OSError: as `held`.
    """
    in_bucket = storage.in_bucket(folder)
    place = os.fspath(folder) if in_bucket else os.path.realpath(folder)
    if place in _held:
        _held[place].count += 1
        return _held[place]
    path = epath.Path(folder) / FILE
    make = _in_bucket if in_bucket else _on_disk
    _held[place] = Lock(place, path, *make(path, _me()))
    return _held[place]


def _me() -> dict:
    """This process, as it stands in the file."""
    pid, now = os.getpid(), datetime.datetime.now(datetime.UTC)
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": pid,
        "started": _started(pid),
        "since": now.isoformat(timespec="seconds"),
        "job": os.environ.get(JOB) or None,
        "id": uuid.uuid4().hex,
    }


def _boot() -> str | None:
    """What a machine is called from one start to the next; None if it does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process of this machine started; None if it is not alive."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            # The name of the program, in parentheses, may hold anything.
            state, *fields = file.read().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return None
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return told.stdout.strip() or None


def _read(path) -> dict | None:
    """The owner in a lock file; None of an empty or a missing file, {} of damage."""
    try:
        data = epath.Path(path).read_bytes()
    except FileNotFoundError:
        return None
    return _owner(data)


def _owner(data: bytes) -> dict | None:
    if not data.strip(b"\0 \n"):
        return None  # its process died before it wrote, or the power went
    try:
        owner = json.loads(data)
        int(owner["pid"]), str(owner["host"]), str(owner["since"])
    except (ValueError, TypeError, KeyError):
        return {}
    return owner


def _on_disk(path, mine) -> tuple[dict, int]:
    """The owner written to the file, and the file, open and locked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + _PATIENCE
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _locked(file):
                if time.monotonic() >= give_up:
                    raise Held(_in_use(path, _read(path)))
            elif _is_at(file, path):
                _check_gone(path, _owner(os.pread(file, 1 << 20, 0)), mine)
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(mine).encode(), 0)
                return mine, file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(0.02)


def _locked(file) -> bool:
    """Lock an open file; False if another process has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks: the file's words count
        logging.info("no flock: %s", error)
    return True


def _is_at(file, path) -> bool:
    """Whether an open file is still the one at the path: its owner removes it."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _in_bucket(path, mine) -> tuple[dict, None]:
    """The owner written to the object."""
    data = json.dumps(mine).encode()
    if _create(path, data):
        return mine, None
    _check_gone(path, _read(path), mine)
    # Two that take over at once: the second removes what the first has written, which
    # the first sees if it looks again.
    path.unlink(missing_ok=True)
    if _create(path, data):
        time.sleep(_PATIENCE)
        if _read(path) == mine:
            return mine, None
    raise Held(_in_use(path, _read(path)))


def _create(path, data) -> bool:
    """Create an object; False if there is one."""
    import fsspec  # only buckets need it

    files, name = fsspec.core.url_to_fs(os.fspath(path))
    try:
        files.pipe_file(name, data, mode="create")
    except FileExistsError:
        return False
    return True


def _who(owner) -> str:
    if not owner:
        return "another process"
    job = f" (job {owner['job']})" if owner.get("job") else ""
    return f"process {owner['pid']} on {owner['host']}{job}, since {owner['since']}"


def _in_use(path, owner) -> str:
    return (
        f"{path.parent} is in use by {_who(owner)}: one process at a time writes "
        "there. Wait for its end, stop it, or give another directory"
    )


def _check_gone(path, owner, mine) -> None:
    """Say so if the owner of a lock is known to be gone.

    Raises:
      Held: it is alive, or nobody can tell.
    """
    if owner is None:
        return
    if not owner:
        raise Held(
            f"{path}: cannot be read as a lock. If no process works in {path.parent}, "
            "remove this file, which holds nothing else, and run the command again"
        )
    known = bool(owner.get("boot")) and bool(mine["boot"])
    same_host = owner["host"] == mine["host"]
    here = owner["boot"] == mine["boot"] if known else same_host
    if here:
        if _started(int(owner["pid"])) == owner.get("started"):
            raise Held(_in_use(path, owner))
        why = "it has ended"
    elif same_host:
        why = "the machine has restarted since"
    elif owner.get("job") and owner["job"] == mine["job"]:
        why = "its job was started again here"
    else:
        raise Held(
            f"{path.parent} is locked by {_who(owner)}, which cannot be asked from "
            f"{mine['host']}. If that process is gone, remove {path}, which holds "
            "nothing else, and run the command again"
        )
    logging.warning("%s: taken over from %s: %s", path.parent, _who(owner), why)
