"""Keep compiled programs from run to run, so that the second run compiles nothing.

JAX stores them, see docs.jax.dev/en/latest/persistent_compilation_cache.html. This
module chooses the folder, its size, and who may write to it, since programs are loaded
as code.
"""

import hashlib
import os
import pathlib
import platform
import stat

import jax
from absl import logging
from jax.experimental.compilation_cache import compilation_cache

from jaxcl.errors import Refused

LIMIT = 4 * 2**30  # bytes that a folder may hold when a run begins
_SECONDS = 0.2  # programs that compile faster are not kept


def use_cache(choice: str) -> str | None:
    """Make JAX store its programs in a folder, unless it has one already.

    A folder from the variable JAX_COMPILATION_CACHE_DIR, or from JAX's config, is kept.

    Args:
      choice: a folder; "auto": this user's folder for this kind of processor; "": none.

    Returns:
      The folder that JAX uses now; None: there is none.

    Raises:
      Refused: the folder named cannot be used: other users may write to it.
      OSError: it cannot be created.
    """
    current = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if current:
        return current
    if not choice:
        return None
    folder = pathlib.Path(choice) if choice != "auto" else _user_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(folder, choice)
    except (OSError, ValueError) as error:
        if choice != "auto":
            raise
        logging.warning("compiled programs are not kept for later runs: %s", error)
        return None
    trim_cache(folder, LIMIT)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SECONDS)
    compilation_cache.reset_cache()  # JAX looked for a folder when it first compiled
    return str(folder)


def _user_folder() -> pathlib.Path:
    """Return the folder of this user for programs of this kind of processor.

    A home directory may serve machines of several kinds; a program of one may crash on
    another.
    """
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    kind = hashlib.sha256(_processor().encode()).hexdigest()[:8]
    return pathlib.Path(base, "jaxcl", f"programs-{kind}")


def _processor() -> str:
    """Describe the instructions that programs for this processor may use."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    features = [x for x in lines if x.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), platform.processor(), *sorted({*features})])


def _check_folder(folder: pathlib.Path, choice: str) -> None:
    """Refuse a folder that others may write to, since its files are run as code."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(
            f"config.compile_cache={choice!r}: other users may write to {folder}, and "
            "programs from it are run; must be a folder that you alone may write to"
        )


def trim_cache(folder: pathlib.Path, limit: int) -> None:
    """Delete the files that were not read for the longest time, down to a size.

    Args:
      folder: folder of compiled programs.
      limit: most bytes that stay.
    """
    files = []
    for path in folder.iterdir():
        try:
            files.append((path.stat(), path))
        except OSError:  # another run deletes, too
            continue
    size = sum(status.st_size for status, _ in files)
    for status, path in sorted(files, key=lambda x: max(x[0].st_atime, x[0].st_mtime)):
        if size <= limit:
            return
        path.unlink(missing_ok=True)
        size -= status.st_size
