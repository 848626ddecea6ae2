"""Write an encoder's folder, which `run.encoder_folder` reads."""

import datetime
import hashlib
import os
import platform
import shutil
import uuid

import flax
import jax
from etils import epath
from safetensors import numpy as tensors

import jaxcl
from jaxcl import storage
from jaxcl.errors import Refused
from jaxcl.index import maps
from jaxcl.run import encoder_folder, lock
from jaxcl.weights import encoder

# Files for PyTorch that an export may have: kind of network -> name.
PYTORCH = {kind: f"{kind}_torch.safetensors" for kind in ("resnet", "vit", "convnext")}
# All files of an export beside the weights and the card.
_FURTHER = {*PYTORCH.values(), maps.FILE, "encoder.stablehlo", "encoder.onnx"}


def describe(network: encoder.Encoder, files: dict[str, bytes]) -> dict:
    """Describe an encoder and its files as a card does."""
    time = datetime.datetime.now(datetime.UTC)
    return {
        "format": encoder_folder.FORMAT,
        "num_features": network.num_features,
        "parameters": sum(x.size for x in jax.tree.leaves(network.params)),
        "files": hash_files(files),
        "versions": {
            "jaxcl": jaxcl.__version__,
            "jax": jax.__version__,
            "flax": flax.__version__,
            "python": platform.python_version(),
        },
        "date": time.isoformat(timespec="seconds"),
    }


def hash_files(files: dict[str, bytes]) -> dict[str, str]:
    """Compute the sha256 of each file."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def pack_tensors(leaves, library) -> bytes:
    """Pack the leaves as a safetensors file."""
    return tensors.save(leaves, metadata={"format": library})


def write_folder(
    folder: epath.Path, files: dict[str, bytes], card: dict, force: bool
) -> dict:
    """Write all files, the card last; remove new files if an error occurs.

    Args:
      folder: path of the folder, which must be missing, empty, or hold the same
        encoder.
      files: name -> content.
      card: the content of card.json.
      force: whether to replace another encoder.

    Returns:
      The card with its checksum.

    Raises:
      Refused: the folder holds something else.
      lock.LockHeldError: another process writes to the folder.
    """
    card = card | {"checksum": encoder_folder.checksum(card)}
    _check_folder(folder, card, force)
    with lock.hold_lock(folder):
        _check_folder(folder, card, force)  # again: another process may have been first
        _write_files(folder, files | {encoder_folder.CARD: storage.dump_json(card)})
    return card


def _write_files(folder, files) -> None:
    """Write all files; on a disk none takes its place before all are written."""
    if storage.in_bucket(folder):  # buckets replace each object as a whole
        for name, data in files.items():
            (folder / name).write_bytes(data)
    else:
        # Inside the folder: its parent may be another disk, or read-only.
        draft = folder / f"{uuid.uuid4().hex}.tmp"
        draft.mkdir(parents=True)
        try:
            for name, data in files.items():
                (draft / name).write_bytes(data)
            for name in files:
                os.replace(draft / name, folder / name)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    for name in _FURTHER - set(files):
        (folder / name).unlink(missing_ok=True)


def _check_folder(folder, card, force) -> None:
    """Refuse a folder that holds anything but an export of the same checkpoint."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise Refused("--out", folder, "is a file; must be a folder")
    names = {path.name for path in folder.iterdir() if path.suffix != ".tmp"}
    names -= {lock.FILE}
    other = names - {encoder_folder.CARD, encoder_folder.TENSORS} - _FURTHER
    if other:
        raise Refused(
            f"--out={folder}: holds {', '.join(sorted(other)[:3])}, which is no "
            "part of an export; give a new folder"
        )
    if not names or force:
        return
    if encoder_folder.CARD not in names:  # cut off, if all files are of this export
        checksums = hash_files({name: (folder / name).read_bytes() for name in names})
        if checksums.items() <= card["files"].items():
            return
    try:
        before = encoder_folder.read_card(folder)
    except Refused as error:
        raise Refused(f"--out: {error}; --force replaces it") from error
    tensors = encoder_folder.TENSORS
    if before["files"].get(tensors) != card["files"][tensors]:
        raise Refused(
            f"--out={folder}: holds another export, of step "
            f"{before.get('checkpoint', {}).get('step')}; --force replaces it"
        )
