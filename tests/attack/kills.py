"""SIGKILL at a random moment; the same command again ends with the same bits."""

import functools
import json
import pathlib
import shutil
import time

import numpy as np

from attack import commands, left
from attack import kind as kind_lib

# Of each family of methods one, and those whose tasks end otherwise.
TRAINED = ("er", "mocov2plus-pnr", "cclis", "duel-moco", "icl", "gdumb", "icarl")
SECONDS = "seconds.json"


def train_words(name: str, workdir: pathlib.Path) -> list:
    """The command that trains a row of the table of methods."""
    config = f"--config={commands.CONFIG}:{name}"
    return ["-m", "jaxcl.main", config, f"--workdir={workdir}"]


def whole(place: kind_lib.Place, name: str) -> pathlib.Path:
    """A run that nobody disturbed; how long it took is in `SECONDS` beside it."""

    def make(folder):
        words = train_words(name, folder / "run")
        # The second knows the programs: so long does one take that is killed.
        commands.finish(words, folder)
        shutil.rmtree(folder / "run")
        seconds = commands.finish(words, folder)
        (folder / SECONDS).write_text(json.dumps(seconds))

    return place.once(f"run-{name}", make)


def killed(rng, words, folder, seconds) -> list[float]:
    """Run a command, kill it up to three times, let it end.

    Returns:
      When it was killed, seconds after its start.
    """
    times = []
    for _ in range(int(rng.integers(1, 4))):
        command, wait = commands.start(words, folder), rng.uniform(0, seconds)
        began = time.monotonic()
        while time.monotonic() < began + wait and not command.ended():
            time.sleep(0.002)
        if command.ended():
            break
        command.kill()
        times.append(time.monotonic() - began)
    ended = commands.start(words, folder).wait()
    if ended.code != 0 or "Traceback" in ended.text:
        raise kind_lib.Broken(
            f"killed after {times} s, the same command ended with {ended.code}:\n"
            f"{ended.text[-4000:]}"
        )
    return times


def compare(want: dict, got: dict, times) -> str:
    """The outcome; Broken where two that must be equal differ."""
    parts = left.differences(want, got)
    if parts:
        raise kind_lib.Broken(f"killed after {times} s, it ended otherwise: {parts}")
    return f"same bits after {len(times)} kills" if times else "over before a kill"


def train(name: str, rng: np.random.Generator, place: kind_lib.Place) -> str:
    """A run."""
    other = whole(place, name)
    seconds = json.loads((other / SECONDS).read_text())
    words = train_words(name, place.folder / "run")
    times = killed(rng, words, place.folder, seconds)
    want, got = (left.of_run(folder / "run") for folder in (other, place.folder))
    return compare(want, got, times)


def update(rng: np.random.Generator, place: kind_lib.Place) -> str:
    """An update of a run."""
    base = whole(place, "mocov2plus-pnr")
    images = place.once("images", _make_images)

    def words(folder):
        given = ["-m", "jaxcl.update", f"--run={folder / 'run'}"]
        given += [f"--data={images / 'new.npz'}", f"--test={images / 'test.npz'}"]
        given += ["--config.rows=100", "--config.evaluators.knn.k=5"]
        return [*given, "--config.limits.accuracy_drop=1.0"]

    def make(folder):
        shutil.copytree(base / "run", folder / "run")
        commands.finish(words(folder), folder)
        shutil.rmtree(folder / "run")
        shutil.copytree(base / "run", folder / "run")
        seconds = commands.finish(words(folder), folder)
        (folder / SECONDS).write_text(json.dumps(seconds))

    other = place.once("update", make)
    shutil.copytree(base / "run", place.folder / "run")
    seconds = json.loads((other / SECONDS).read_text())
    times = killed(rng, words(place.folder), place.folder, seconds)
    want, got = (left.of_update(folder / "run") for folder in (other, place.folder))
    return compare(want, got, times)


def _make_images(folder):
    from sklearn import datasets

    digits = datasets.load_digits()
    pixels = (digits.images * 255 / 16).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int32)
    np.savez(folder / "new.npz", train_x=pixels[:240])
    splits = {"train_x": pixels[300:500], "train_y": labels[300:500]}
    splits |= {"test_x": pixels[500:600], "test_y": labels[500:600]}
    np.savez(folder / "test.npz", **splits)


def export(rng: np.random.Generator, place: kind_lib.Place) -> str:
    """An export of a run."""
    base = whole(place, "er")

    def words(folder):
        return [
            "-m",
            "jaxcl.weights.export",
            f"--run={base / 'run'}",
            f"--out={folder / 'out'}",
        ]

    def make(folder):
        seconds = commands.finish(words(folder), folder)
        (folder / SECONDS).write_text(json.dumps(seconds))

    other = place.once("export", make)
    seconds = json.loads((other / SECONDS).read_text())
    times = killed(rng, words(place.folder), place.folder, seconds)
    want, got = (left.of_export(folder / "out") for folder in (other, place.folder))
    return compare(want, got, times)


def sweep(rng: np.random.Generator, place: kind_lib.Place) -> str:
    """A sweep of two runs, one beside the other; its runs are killed with it."""
    config = f"{commands.CONFIG}:er"

    def words(folder):
        given = [commands.TESTS.parent / "launch" / "sweep.py", f"--config={config}"]
        given += ["--seeds", "0", "1", f"--root={folder / 'runs'}", "--run", "--jobs=2"]
        return [*given, f"--python={commands.sys.executable}"]

    def make(folder):
        seconds = commands.finish(words(folder), folder)
        (folder / SECONDS).write_text(json.dumps(seconds))

    other = place.once("sweep", make)
    seconds = json.loads((other / SECONDS).read_text())
    times = killed(rng, words(place.folder), place.folder, seconds)
    for path in sorted((other / "runs").glob("*/seed_*/")):
        mine = place.folder / path.relative_to(other)
        outcome = compare(left.of_run(path), left.of_run(mine), times)
    return outcome


KINDS = (
    *(
        kind_lib.Kind(f"kill: train {name}", functools.partial(train, name))
        for name in TRAINED
    ),
    kind_lib.Kind("kill: update", update),
    kind_lib.Kind("kill: export", export),
    kind_lib.Kind("kill: sweep", sweep),
)
