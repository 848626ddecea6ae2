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


def undisturbed(place: kind_lib.Place, name: str, words, prepare=None) -> pathlib.Path:
    """The folder of a command that nobody disturbed, its seconds in `SECONDS`.

    Args:
      name: of the folder.
      words: folder -> the words of the command that works in it.
      prepare: makes in a folder what the command needs.
    """

    def make(folder):
        for _ in range(2):  # the second knows the programs, as one that is killed
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
            if prepare is not None:
                prepare(folder)
            seconds = commands.finish(words(folder), folder)
        (folder / SECONDS).write_text(json.dumps(seconds))

    return place.once(name, make)


def whole(place: kind_lib.Place, name: str) -> pathlib.Path:
    """A run that nobody disturbed."""
    words = lambda folder: train_words(name, folder / "run")  # noqa: E731
    return undisturbed(place, f"run-{name}", words)


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


def compare(rng, place, other, words, left_behind, prepare=None) -> str:
    """Kill a command, and compare what it leaves with what an undisturbed one left.

    Args:
      other: from `undisturbed`, with the same `words` and `prepare`.
      left_behind: folder -> all that must be equal.

    Returns:
      The outcome; Broken where two that must be equal differ.
    """
    if prepare is not None:
        prepare(place.folder)
    seconds = json.loads((other / SECONDS).read_text())
    times = killed(rng, words(place.folder), place.folder, seconds)
    parts = left.differences(*map(left_behind, (other, place.folder)))
    if parts:
        raise kind_lib.Broken(f"killed after {times} s, it ended otherwise: {parts}")
    return f"same bits after {len(times)} kills" if times else "over before a kill"


def train(name: str, rng: np.random.Generator, place: kind_lib.Place) -> str:
    """A run."""
    return compare(
        rng,
        place,
        whole(place, name),
        lambda folder: train_words(name, folder / "run"),
        lambda folder: left.of_run(folder / "run"),
    )


def update(rng: np.random.Generator, place: kind_lib.Place) -> str:
    """An update of a run."""
    base = whole(place, "mocov2plus-pnr")
    images = place.once("images", _make_images)

    def words(folder):
        given = ["-m", "jaxcl", "update", f"--run={folder / 'run'}"]
        given += [f"--data={images / 'new.npz'}", f"--test={images / 'test.npz'}"]
        given += ["--config.rows=100", "--config.evaluators.knn.k=5"]
        return [*given, "--config.limits.accuracy_drop=1.0"]

    def prepare(folder):
        shutil.copytree(base / "run", folder / "run")

    other = undisturbed(place, "update", words, prepare)
    of = lambda folder: left.of_update(folder / "run")  # noqa: E731
    return compare(rng, place, other, words, of, prepare)


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
        given = ["-m", "jaxcl.weights.export", f"--run={base / 'run'}"]
        return [*given, f"--out={folder / 'out'}"]

    other = undisturbed(place, "export", words)
    of = lambda folder: left.of_export(folder / "out")  # noqa: E731
    return compare(rng, place, other, words, of)


def sweep(rng: np.random.Generator, place: kind_lib.Place) -> str:
    """A sweep of two runs, one beside the other; its runs are killed with it."""
    config = f"{commands.CONFIG}:er"

    def words(folder):
        given = [commands.TESTS.parent / "launch" / "sweep.py", f"--config={config}"]
        given += ["--seeds", "0", "1", f"--root={folder / 'runs'}", "--run", "--jobs=2"]
        return [*given, f"--python={commands.sys.executable}"]

    def of(folder):
        runs = sorted((folder / "runs").glob("*/seed_*/"))
        return {str(path.relative_to(folder)): left.of_run(path) for path in runs}

    other = undisturbed(place, "sweep", words)
    return compare(rng, place, other, words, of)


KINDS = (
    *(
        kind_lib.Kind(f"kill: train {name}", functools.partial(train, name))
        for name in TRAINED
    ),
    kind_lib.Kind("kill: update", update),
    kind_lib.Kind("kill: export", export),
    kind_lib.Kind("kill: sweep", sweep),
)
