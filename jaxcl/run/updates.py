"""Find the updates of a run, RUN/updates/0001, 0002 and so on.

Each is a run directory; it has an update.json once the update is over.
"""

import re

from etils import epath

from jaxcl import storage

UPDATES, VERDICT = "updates", "update.json"


def find_current(run: str) -> str:
    """Find the directory of a run's last accepted update, or the run's own."""
    for path in reversed(list_updates(run)):
        if (read_report(path) or {}).get("accepted"):
            return str(path)
    return str(run)


def list_updates(run: str) -> list[epath.Path]:
    """List the directories of all updates of a run, in order."""
    folder = epath.Path(run) / UPDATES
    entries = folder.iterdir() if folder.exists() else ()
    folders = (path for path in entries if re.fullmatch(r"\d{4,}", path.name))
    return sorted(folders, key=lambda path: int(path.name))


def read_report(workdir: epath.PathLike) -> dict | None:
    """Read update.json; None while the update is unfinished."""
    path = epath.Path(workdir) / VERDICT
    return storage.read_object(path) if path.exists() else None
