"""Kill a process while it writes a file: the file is the old one or the new one."""

import json
import multiprocessing
import time

import numpy as np

from attack import kind
from jaxcl import storage


def _value(number: int, size: int) -> dict:
    return {"number": number, "filling": [number] * size}


def _write_without_end(path: str, size: int) -> None:
    number = 1
    while True:
        storage.write_json(path, _value(number, size))
        number += 1


def json_file(rng: np.random.Generator, place: kind.Place) -> str:
    """SIGKILL a process that writes one JSON file again and again."""
    path, size = place.folder / "value.json", int(rng.integers(1, 100_000))
    storage.write_json(path, _value(0, size))
    writer = multiprocessing.get_context("spawn").Process(
        target=_write_without_end, args=(str(path), size)
    )
    writer.start()
    while json.loads(path.read_text())["number"] == 0:
        if not writer.is_alive():
            raise kind.Broken(f"the writer ended with {writer.exitcode}")
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.05))
    writer.kill()
    writer.join()
    value = storage.read_json(path)
    if value != _value(value["number"], size):
        raise kind.Broken(f"{path}: holds a mixture of two values")
    return "whole"


KINDS = (kind.Kind("kill: a JSON file", json_file),)
