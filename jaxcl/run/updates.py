"""Find the updates of a run, RUN/updates/0001, 0002 and so on.

Each is a run directory; it has an update.json once the update is over.
"""

import re

from absl import logging
from etils import epath

from jaxcl import storage

UPDATES, VERDICT = "updates", "update.json"


def find_current(run: str) -> str:
    """Find the directory of a run's last accepted update, or the run's own."""
    for path in reversed(list_updates(run)):
        if (read_report(path) or {}).get("accepted"):
            return str(path)
    return str(run)


def tell_newer(folder: str) -> None:
    """Say in one line that an encoder's folder has a newer one in its updates."""
    if (newest := find_current(folder)) != str(folder):
        logging.warning(
            "%s: is the encoder before its updates; that of the last accepted one is "
            "in %s, and jaxcl export --run=%s writes it to a folder of its own",
            folder,
            newest,
            folder,
        )


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
