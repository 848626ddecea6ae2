"""Load an encoder from its folder, or export it from a run directory."""

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from typing import Any, Literal

from etils import epath

from jaxcl.run import encoder_folder, updates
from jaxcl.weights import encoder, export

# Errors of a directory that one may only read
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def load_encoder(
    folder: Any, *, check: bool = False, into: Literal["old"] | None = None
) -> encoder.Encoder:
    """Load the encoder of a folder that `jaxcl export` or `jaxcl import` wrote.

    A run directory has one, too: that of its last accepted update if there is one. It
    is exported to the folder `encoder` in it. An encoder's folder stays as it was
    written; a line names its last accepted update.

    Args:
      folder: path of the folder, which may be in a bucket.
      check: compute the features of a fixed picture, and compare them with the card's,
        see `Encoder.check`.
      into: "old" maps the features of `Encoder.embed` to the space of the index before
        the last update, by the folder's adapter.safetensors. Rows then have length 1.

    Raises:
      Refused: a file is missing, damaged, or contradicts the card; the message has the
        first difference.
    """
    is_folder = encoder_folder.exists_at(folder)
    if is_folder:
        updates.tell_newer(folder)
    is_run = (epath.Path(folder) / "config.json").exists()
    if is_folder or not is_run:
        return encoder.load_encoder(folder, check=check, into=into)
    with exported(str(folder)) as place:
        return encoder.load_encoder(place, check=check, into=into)


@contextlib.contextmanager
def exported(run: str) -> Iterator[str]:
    """Yield a folder with a run's exported encoder: in the run, or a temporary one."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"{updates.find_current(run)}/encoder"
        try:
            export.export(run, place, force=True)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            place = f"{folder}/encoder"
            export.export(run, place)
        yield place
