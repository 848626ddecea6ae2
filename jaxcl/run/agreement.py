"""Refuse processes of one run that disagree, before its first step.

Processes that train with other options, versions or data would silently make another
model, or wait for each other for ever. All of them compare what they have, so that all
of them end, with the same message.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxcl import numerics, sharding
from jaxcl.errors import Refused

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "jaxcl")
_MOST = 5  # differences that a message has


def check(facts: Mapping[str, Any], advice: str) -> None:
    """Refuse facts that differ between processes. All processes must call it.

    Args:
      facts: name -> value in this process.
      advice: text on what to do about a difference.

    Raises:
      Refused: in all processes; the message names each fact that differs, and
        its value in each process.
    """
    if jax.process_count() == 1:
        return
    data = json.dumps({name: repr(value) for name, value in facts.items()})
    processes = [json.loads(x) for x in sharding.gather_bytes(data.encode())]
    differences = []
    for name in sorted({name for process in processes for name in process}):
        values = [process.get(name, "absent") for process in processes]
        if len({*values}) > 1:
            each = (f"{value} in process {i}" for i, value in enumerate(values))
            differences.append(f"{name}: {', '.join(each)}")
    if differences:
        rest = len(differences) - _MOST
        more = f"; and {rest} more" if rest > 0 else ""
        raise Refused(
            "the processes of this run disagree: "
            f"{'; '.join(differences[:_MOST])}{more}. {advice}"
        )


def check_surroundings(options: Mapping[str, Any], workdir) -> None:
    """Refuse processes with other options, versions, flags or code.

    Args:
      options: path of each option of the config -> value.
      workdir: the run directory.
    """
    if jax.process_count() == 1:
        return
    facts = {"--workdir": str(workdir), "code of jaxcl": _digest_code()}
    facts |= {f"version of {x}": importlib.metadata.version(x) for x in _PACKAGES}
    advice = (
        "Start all with the same command, variables, packages and code, from the same "
        "folder"
    )
    check(dict(options) | facts | numerics.process_flags(), advice)


@functools.cache
def _digest_code() -> str:
    """Return the start of the sha256 of the package's source."""
    digest, root = hashlib.sha256(), pathlib.Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"sha256 {digest.hexdigest()[:12]}"


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Make the error of one process an error of all, so that none waits for it.

    Within the context no process may wait for another.

    Raises:
      Refused: another process failed; the message has its number and its error.
    """
    if jax.process_count() == 1:
        yield
        return
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    text = "" if failure is None else f"{failure}" or repr(failure)
    errors = [x.decode() for x in sharding.gather_bytes(text.encode())]
    if failure is not None:
        raise failure
    for number, error in enumerate(errors):
        if error:
            raise Refused(f"process {number} of this run failed: {error}")
