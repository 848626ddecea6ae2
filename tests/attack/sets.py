"""Damage a small set at random: it is read right, or soon refused by name."""

import functools
import json
import os
import pathlib
import resource
import shutil
import signal
from collections.abc import Callable

import numpy as np
from PIL import Image

from attack import kind
from helpers import tfds_sets
from jaxcl.data import convert, files, from_arrays, identity, sources, stream

SECONDS = 30  # a set of a few bytes that takes longer hangs
GROWTH = 400 * 2**20  # bytes of memory that a set of a few kilobytes may take
_ODD = (b"", b"\0" * 40, b"\xff" * 40, b"[" * 50_000, b"-1", b"1e999", b"9" * 30, b"\n")
_ODD += (b"../../x.png 0\n", b"null", b"{}", b"\xef\xbb\xbf", b"NaN", b"PK\x05\x06")


def _pixels(rng, count, side=8, channels=3):
    return rng.integers(0, 256, (count, side, side, channels), np.uint8)


def _npz(folder):
    rng = np.random.default_rng(0)
    names = {"class_names": ["a", "b", "c"]}
    y = np.arange(12) % 3
    np.savez_compressed(
        folder / "x.npz", x=_pixels(rng, 12), y=y, is_test=y < 1, **names
    )


def _packed(folder):
    images = _pixels(np.random.default_rng(0), 6)
    strips = [
        tfds_sets.encoded(part.reshape(-1, 8, 3)) for part in (images[:4], images[4:])
    ]
    arrays = {
        "strips": np.frombuffer(b"".join(strips), np.uint8),
        "ptr": np.cumsum([0, *map(len, strips)]),
        "shape": np.array(images.shape),
        "sha256": np.array(files.sha256(images)),
    }
    arrays = {f"train_x__{key}": value for key, value in arrays.items()}
    np.savez(folder / "x.npz", **arrays, train_y=np.arange(6) % 2)


def _arrays(folder):
    _npz(folder)
    convert.write_arrays(
        from_arrays.npz(path=str(folder / "x.npz")), str(folder / "set")
    )
    (folder / "x.npz").unlink()


def _images(folder, names):
    rng = np.random.default_rng(0)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_pixels(rng, 1)[0]).save(path)


def _folder(folder):
    _images(folder, [f"train/{c}/{i}.png" for c in "ab" for i in range(4)])
    _images(folder, [f"test/{c}/{i}.jpg" for c in "ab" for i in range(2)])
    _images(
        folder, ["train/a/x.gif", "train/b/x.bmp", "train/a/y.webp", "train/b/z.tif"]
    )


def _lists(folder):
    names = [f"d/{c}/{i}.png" for c in "ab" for i in range(4)]
    _images(folder, names)
    lines = [f"{name} {i // 4}\n" for i, name in enumerate(names)]
    (folder / "train.txt").write_text("".join(lines))
    (folder / "test.txt").write_text("".join(lines[:2] + lines[-2:]))


def _graphs(folder):
    data = sources.load("rings_and_trees", count=8).train.graphs
    np.savez(
        folder / "x.npz",
        edges=data.edges,
        graph_ptr=data.graph_ptr,
        edge_ptr=data.edge_ptr,
        label=data.label,
        node_label=np.arange(len(data.features)) % 3,
        node_attr=data.features,
    )


def _tu(folder):
    data = sources.load("rings_and_trees", count=8).train.graphs
    graph = np.repeat(np.arange(8), np.diff(data.graph_ptr)) + 1
    for name, table in (
        ("A", data.edges.T + 1),
        ("graph_indicator", graph),
        ("graph_labels", data.label),
        ("node_labels", np.arange(len(graph)) % 3),
        ("node_attributes", data.features),
    ):
        np.savetxt(folder / f"X_{name}.txt", table, "%g", delimiter=", ")


def _tfds(folder, kind_of_files):
    folder.joinpath("made").mkdir()
    made = tfds_sets.array_record(folder / "made")
    if kind_of_files == "tfrecord":
        made = tfds_sets.tfrecord(made, folder / "other")
    for path in pathlib.Path(made).iterdir():
        shutil.move(path, folder / path.name)
    for path in (folder / "made", folder / "other"):
        shutil.rmtree(path, ignore_errors=True)


# name -> how the set is written, and (source, options) of a folder that holds it
SETS: dict[str, tuple[Callable, Callable]] = {
    "npz": (_npz, lambda x: ("npz", {"path": f"{x}/x.npz"})),
    "packed": (_packed, lambda x: ("npz", {"path": f"{x}/x.npz"})),
    "arrays": (_arrays, lambda x: ("arrays", {"path": f"{x}/set"})),
    "mapped": (_arrays, lambda x: ("arrays", {"path": f"{x}/set", "resident": False})),
    "folder": (_folder, lambda x: ("image_folder", {"path": f"{x}"})),
    "resident": (
        _folder,
        lambda x: ("image_folder", {"path": f"{x}", "size": 8, "resident": True}),
    ),
    "lists": (
        _lists,
        lambda x: (
            "image_lists",
            {"path": f"{x}", "train": "train.txt", "test": "test.txt"},
        ),
    ),
    "graphs": (_graphs, lambda x: ("graphs", {"path": f"{x}/x.npz"})),
    "tu": (_tu, lambda x: ("graphs", {"path": f"{x}"})),
    "array_record": (
        functools.partial(_tfds, kind_of_files="array_record"),
        lambda x: ("tfds", {"path": f"{x}", "index": f"{x}/index.npz"}),
    ),
    "tfrecord": (
        functools.partial(_tfds, kind_of_files="tfrecord"),
        lambda x: ("tfds", {"path": f"{x}"}),
    ),
}


# Damage: (random numbers, a file) -> None


def _cut(rng, path):
    os.truncate(path, int(rng.integers(path.stat().st_size + 1)))


def _flip(rng, path):
    """Flip some bytes, often those of a header at either end."""
    data = bytearray(path.read_bytes())
    if data:
        near = min(int(rng.choice([16, 128, len(data)])), len(data))
        for at in rng.integers(near, size=int(rng.choice([1, 4, 64]))):
            data[-int(at) - 1 if rng.integers(2) else int(at)] = rng.integers(256)
        path.write_bytes(data)


def _splice(rng, path):
    """Put odd bytes somewhere, in place of others or between them."""
    data, odd = path.read_bytes(), _ODD[rng.integers(len(_ODD))]
    at = int(rng.integers(len(data) + 1))
    path.write_bytes(data[:at] + odd + data[at + int(rng.choice([0, len(odd)])) :])


def _replace(rng, path):
    path.write_bytes(_ODD[rng.integers(len(_ODD))])


def _value(rng, path):
    """Another value in a JSON file, or another number in a text."""
    odd = [None, -1, 2**40, "x", "../x", [], {}, [1], "Infinity", 1e300, True]
    chosen = odd[rng.integers(len(odd))]
    try:
        whole = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        words = path.read_bytes().split(b" ")
        words[rng.integers(len(words))] = str(chosen).encode()
        path.write_bytes(b" ".join(words))
        return
    places, waiting = [], [whole] if isinstance(whole, dict | list) else []
    while waiting:
        node = waiting.pop()
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                waiting.append(node[key])
    if places:
        node, key = places[rng.integers(len(places))]
        node[key] = chosen
    path.write_text(json.dumps(whole))


def _remove(rng, path):
    path.unlink()


def _pipe(rng, path):
    path.unlink()
    os.mkfifo(path)


def _link(rng, path):
    """A link in place of the file: to itself, upwards, to nothing, to a device."""
    path.unlink()
    targets = (path.name, ".", "..", "nowhere", "/dev/zero", "/")
    path.symlink_to(targets[rng.integers(len(targets))])


def _name(rng, path):
    """Another name, such as no text can hold."""
    names = (b"\xff\xfe", b"a\nb", b"-x", "é ".encode(), b"x" * 200)
    name = os.fsencode(path.parent) + b"/" + names[rng.integers(len(names))]
    os.rename(path, name + os.fsencode(path.suffix))


def _beside(rng, path):
    """Something else beside the file: a link, a pipe, an empty folder or file."""
    beside = path.with_name(f"odd{rng.integers(2**30)}{path.suffix}")
    made = int(rng.integers(4))
    if made == 0:
        beside.symlink_to(("..", ".", path.name)[rng.integers(3)])
    elif made == 1:
        os.mkfifo(beside)
    elif made == 2:
        beside.mkdir()
    else:
        beside.write_bytes(b"")


DAMAGE = (_cut, _flip, _flip, _splice, _replace, _value, _remove, _pipe, _link, _name)
DAMAGE += (_beside,)


def check(dataset: stream.Dataset) -> int:
    """Read all that a set holds; how many rows were refused as they were read."""
    stream.validate(dataset)
    refused = 0
    for split in (dataset.train, dataset.validation, dataset.test):
        if split is None or split.load is None:
            continue
        for row in range(min(stream.count_rows(split), 100)):
            try:
                image = split.load(row)
            except files.Unreadable:
                refused += 1
                continue
            if (
                image.dtype != np.uint8
                or image.ndim != 3
                or image.shape[-1] not in (1, 3)
            ):
                raise kind.Broken(f"row {row} is {image.dtype}{list(image.shape)}")
    identity.describe_duplicates(identity.identify(dataset), "x")
    return refused


def outcome(name: str, folder: pathlib.Path) -> str:
    """Read a set: "read", "rows refused" or "refused"; raises `Broken` otherwise."""

    def late(*_):
        raise kind.Broken(f"not read after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    files.mapped.cache_clear()
    source, options = SETS[name][1](folder)
    signal.alarm(SECONDS)
    try:
        refused = check(sources.load(source, **options))
    except (ValueError, OSError) as error:
        text = str(error)
        if str(folder) not in text and not any(f"{x} = " in text for x in options):
            data = sources.SOURCES[source].__name__
            if not text.startswith(
                (f"{folder.name}:", f"{data}:", "toy:", "x:", "set:")
            ):
                raise kind.Broken(f"refused without a name: {text}") from error
        return "refused"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        if grown * 1024 > GROWTH:
            raise kind.Broken(f"{grown // 1024} MiB of memory for a few kilobytes")
    return "rows refused" if refused else "read"


def attack(name: str, rng: np.random.Generator, place: kind.Place) -> str:
    """Damage a set in one to three places, and read it."""
    whole = place.once(f"set {name}", SETS[name][0])
    folder = place.folder / "set"
    shutil.copytree(whole, folder)
    done = []
    for _ in range(int(rng.integers(1, 4))):
        there = sorted(x for x in folder.rglob("*") if x.is_file())
        if there:
            path = there[rng.integers(len(there))]
            harm = DAMAGE[rng.integers(len(DAMAGE))]
            done.append(f"{harm.__name__[1:]} {path.relative_to(folder)}")
            harm(rng, path)
    try:
        return outcome(name, folder)
    except Exception as error:
        raise kind.Broken(f"{name}, {', '.join(done)}: {error!r}") from error


KINDS = tuple(
    kind.Kind(f"data: {name}", functools.partial(attack, name), often=3)
    for name in SETS
)
