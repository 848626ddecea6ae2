"""Resolve what a config leaves open, once, before its sections are read."""

from collections.abc import Mapping
from typing import Any

from etils import epath

from jaxcl.config import run_config, sections
from jaxcl.errors import Refused
from jaxcl.run import encoder_folder, transfer


def resolve(raw: Mapping[str, Any], workdir=None) -> dict:
    """Fill in values that follow from the machine, an encoder or other options.

    Args:
      raw: the config.
      workdir: the run directory, whose precision a resumed run keeps; None: there is
        none.

    Raises:
      Refused: there is no such encoder, or it does not fit the config; a method, base
        or strategy is unknown.
    """
    return sections.nest_method(fill_from_encoder(fill_precision(dict(raw), workdir)))


def fill_precision(raw: dict, workdir) -> dict:
    """Put the precision in place of "auto".

    A resumed run keeps the precision it started with, on any device.
    """
    if raw.get("precision") != "auto":
        return raw
    path = None if workdir is None else epath.Path(workdir) / "config.json"
    saved = (
        run_config.read_saved_config(path) if path is not None and path.exists() else {}
    )
    return raw | {"precision": saved.get("precision") or sections.choose_precision(raw)}


def fill_from_encoder(raw: dict) -> dict:
    """Fill in values from the encoder of config.checkpoint or config.start.

    Raises:
      Refused: there is none, or it does not fit the config.
    """
    if raw.get("checkpoint") is not None:
        raw = transfer.complete(raw, transfer.config_of(raw["checkpoint"]))
    return fill_from_start(raw)


def fill_from_start(raw: dict) -> dict:
    """Fill in a config that begins with the folder of an encoder.

    The folder sets the encoder, and the mean and standard deviation of its images. If
    config.encoder names the same network, its drop_path and remat are kept.

    Raises:
      Refused: the folder cannot be read, or does not fit the config.
    """
    if not encoder_folder.exists_at(raw.get("start")):
        return raw
    if raw.get("augment", {}).get("name") == "graphs":
        raise Refused(
            f"config.start={raw['start']!r}: the folder of an encoder is a start for "
            "images, and config.augment.name is 'graphs'; leave it out"
        )
    start = encoder_folder.as_config(raw["start"])
    encoder = dict(raw.get("encoder") or {})
    options = {}
    if encoder.get("name") == start["encoder"]["name"]:
        options = {
            name: encoder[name] for name in ("drop_path", "remat") if name in encoder
        }
    look = {name: start["augment"][name] for name in ("mean", "std")}
    augment = raw.get("augment", {}) | look
    return raw | {"encoder": start["encoder"] | options, "augment": augment}
