"""Damage to a random file of a run: it is refused by name, or the bits are the same."""

import functools
import json
import os
import pathlib
import re
import shutil
import signal
import time

import numpy as np

from attack import commands, kills, left
from attack import kind as kind_lib

NAMED = re.compile(r"^jaxcl: .*", re.MULTILINE)


def _flip(rng, data: bytearray) -> bytearray:
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    return data


def _cut(rng, data: bytearray) -> bytearray:
    return data[: int(rng.integers(len(data)))]


def _zeros(rng, data: bytearray) -> bytearray:
    """As a power cut leaves blocks that were not written."""
    begin = int(rng.integers(len(data)))
    end = min(len(data), begin + int(rng.integers(1, 4096)))
    data[begin:end] = bytes(end - begin)
    return data


def _garbage(rng, data: bytearray) -> bytearray:
    return bytearray(rng.bytes(int(rng.integers(1, 1000))))


def _longer(rng, data: bytearray) -> bytearray:
    return data + rng.bytes(int(rng.integers(1, 1000)))


def _empty(rng, data: bytearray) -> bytearray:
    return bytearray()


def _list(rng, data: bytearray) -> bytearray:
    return bytearray(b"[1, 2]\n")


WAYS = {
    "a bit flipped": _flip,
    "cut": _cut,
    "a block of zeros": _zeros,
    "garbage": _garbage,
    "longer": _longer,
    "empty": _empty,
    "a list": _list,
    "gone": None,
}


def harm(rng: np.random.Generator, path: pathlib.Path) -> str:
    """Damage a file at random; returns in which way."""
    way = list(WAYS)[int(rng.integers(len(WAYS)))]
    data = bytearray(path.read_bytes())
    if WAYS[way] is None or not data:
        path.unlink()
        return "gone"
    path.write_bytes(WAYS[way](rng, data))
    return way


def stopped(place: kind_lib.Place, name: str) -> pathlib.Path:
    """A run that was told to stop in its second task."""

    def make(folder):
        run = folder / "run"
        for _ in range(9):  # it may be over before the signal comes
            shutil.rmtree(run, ignore_errors=True)
            command = commands.start(kills.train_words(name, run), folder)
            while not (run / "results.json").exists() and not command.ended():
                time.sleep(0.001)  # the first task is not over
            if not command.ended():
                command.send(signal.SIGTERM)
            ended = command.wait()
            if ended.code == 75:
                return
        raise RuntimeError(f"{ended.code}: {ended.text[-4000:]}")

    return place.once(f"stopped-{name}", make)


def part_of(path: pathlib.Path, run: pathlib.Path) -> str:
    """What is damaged, for the counts: the file, or the place of a checkpoint's."""
    parts = path.relative_to(run).parts
    return parts[0] if len(parts) == 1 else f"{parts[0]}/..."


def resume(
    name: str, over: bool, rng: np.random.Generator, place: kind_lib.Place
) -> str:
    """A run that was stopped, or is over, is damaged and told to go on."""
    other = kills.whole(place, name)
    source = other if over else stopped(place, name)
    run = place.folder / "run"
    shutil.copytree(source / "run", run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    # Each of the first names as often as another: most files are a checkpoint's.
    firsts = sorted({path.relative_to(run).parts[0] for path in files})
    first = firsts[int(rng.integers(len(firsts)))]
    below = [path for path in files if path.relative_to(run).parts[0] == first]
    path = below[int(rng.integers(len(below)))]
    way = harm(rng, path)
    where = f"{path.relative_to(run)} ({way})"
    ended = commands.start(kills.train_words(name, run), place.folder).wait()
    if "Traceback" in ended.text:
        raise kind_lib.Broken(f"{where}: a traceback:\n{ended.text[-4000:]}")
    if ended.code in (1, 2):
        messages = NAMED.findall(ended.text)
        if not messages or os.fspath(run) not in messages[-1]:
            raise kind_lib.Broken(f"{where}: refused without a name: {ended.text}")
        if re.search(r"\b(delete|remove)\b", messages[-1]):
            raise kind_lib.Broken(
                f"{where}: advises to remove something: {messages[-1]}"
            )
        return f"refused: {part_of(path, run)}"
    if ended.code != 0:
        raise kind_lib.Broken(f"{where}: exit code {ended.code}:\n{ended.text}")
    parts = left.differences(left.of_run(other / "run"), left.of_run(run))
    if parts:
        raise kind_lib.Broken(f"{where}: it ended otherwise: {parts}")
    return f"same bits: {part_of(path, run)}"


def exported(rng: np.random.Generator, place: kind_lib.Place) -> str:
    """An exported folder is damaged and loaded."""
    import jaxcl

    base = kills.whole(place, "er")

    def make(folder):
        words = ["-m", "jaxcl.weights.export", f"--run={base / 'run'}"]
        commands.finish([*words, f"--out={folder / 'out'}"], folder)

    source = place.once("export to load", make)
    want = jaxcl.load_encoder(source / "out")
    out = place.folder / "out"
    shutil.copytree(source / "out", out)
    files = sorted(out.iterdir())
    path = files[int(rng.integers(len(files)))]
    way = harm(rng, path)
    try:
        encoder = jaxcl.load_encoder(out)
    except ValueError as error:
        if path.name not in str(error):
            words = f"{path.name} ({way}): named otherwise: {error}"
            raise kind_lib.Broken(words) from error
        return f"refused: {path.name}"
    same = all(
        np.array_equal(a, b)
        for a, b in zip(*(_leaves(one) for one in (want, encoder)), strict=True)
    )
    if not same:
        raise kind_lib.Broken(f"{path.name} ({way}): another network was loaded")
    return f"same network: {path.name}"


def _leaves(encoder):
    from jaxcl.weights import encoder as encoder_lib

    flat = encoder_lib.flatten_leaves(encoder.params, encoder.stats)
    return [flat[name] for name in sorted(flat)] + [json.dumps(encoder.card["input"])]


KINDS = (
    kind_lib.Kind("damage: a stopped run", functools.partial(resume, "er", False), 3),
    kind_lib.Kind("damage: a run that is over", functools.partial(resume, "er", True)),
    kind_lib.Kind("damage: an export", exported, 2),
)
