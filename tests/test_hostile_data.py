"""Sets that are damaged, lie about their size, lead in circles or repeat themselves."""

import io
import json
import os
import struct
import tracemalloc
import types
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from helpers import toy
from jaxcl import cli, storage
from jaxcl.config import build, checks, resolve, sections
from jaxcl.data.images import crops, decode, listing, readers
from jaxcl.data.sources import by_name, graphs
from jaxcl.data.stream import identity
from jaxcl.evals import knn, linear, logistic, svm


def image(path, value=0, size=(4, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(path)


def folders(root, count=5):
    """train/ and test/ of two classes; all images differ."""
    for i, split in enumerate(("train", "test")):
        for label in range(2):
            for n in range(count):
                value = 100 * i + 50 * label + n
                image(root / split / f"class{label}" / f"{n}.png", value)
    return root


# Links, names, and what is no file


def test_links_in_circles_multiply_no_row(tmp_path):
    root = folders(tmp_path / "set")
    image(tmp_path / "stray.png", 77)
    for where, target in (
        ("train/class0/loop", "."),
        ("train/class0/up", ".."),
        ("train/class0/out", "../.."),
        ("test/class0/far", str(tmp_path)),
    ):
        (root / where).symlink_to(target, target_is_directory=True)
    data = by_name.load("image_folder", path=str(root))
    assert np.bincount(data.train.label).tolist() == [5, 5]
    assert np.bincount(data.test.label).tolist() == [5, 5]


def test_a_folder_that_two_ways_lead_to_is_read_once_where_it_lies(tmp_path):
    for n in range(3):
        image(tmp_path / "set" / "b" / "real" / f"{n}.png", n)
    image(tmp_path / "elsewhere" / "far.png")
    (tmp_path / "set" / "b" / "again").symlink_to("real")
    (tmp_path / "set" / "b" / "far").symlink_to(tmp_path / "elsewhere")
    names = listing.images(str(tmp_path / "set"))
    names = [os.path.relpath(name, tmp_path / "set") for name in names]
    assert names == ["b/far/far.png", *(f"b/real/{n}.png" for n in range(3))]


def test_names_that_are_not_utf8(tmp_path):
    root = folders(tmp_path / "set")
    odd = os.fsencode(root / "train" / "class0") + b"/n\xff\xfe.png"
    os.rename(root / "train" / "class0" / "3.png", odd)
    data = by_name.load("image_folder", path=str(root), size=4)
    assert sorted(data.train.read(row)[0, 0, 0] for row in range(5)) == [*range(5)]
    os.mkdir(os.fsencode(root / "train") + b"/\xff")
    with pytest.raises(ValueError, match=r"\\xff'.*UTF-8"):
        by_name.load("image_folder", path=str(root))


def test_a_pipe_among_the_images(tmp_path):
    root = folders(tmp_path / "set")
    os.mkfifo(root / "train" / "class0" / "pipe.jpg")
    data = by_name.load("image_folder", path=str(root))
    row = [data.train.reader.name(i)[-8:] for i in range(6)].index("pipe.jpg")
    with pytest.raises(decode.Unreadable, match="pipe.jpg"):
        data.train.read(row)


@pytest.mark.parametrize(
    "name, file",
    [
        ("npz", "x.npz"),
        ("graphs", "x.npz"),
        ("arrays", "meta.json"),
        ("graphs", "X_A.txt"),
        ("tfds", "dataset_info.json"),
        ("image_folder", "classes.txt"),
        ("image_lists", "train.txt"),
    ],
)
def test_a_pipe_in_place_of_a_file(name, file, tmp_path):
    """Opening it for reading would wait for ever."""
    os.mkfifo(tmp_path / file)
    for part in ("graph_labels", "graph_indicator"):
        (tmp_path / f"X_{part}.txt").write_text("1\n")
    for folder in ("train", "val"):
        (tmp_path / folder).mkdir()
    path = str(tmp_path / file) if file == "x.npz" else str(tmp_path)
    options = {
        "image_folder": {"classes": str(tmp_path / file)},
        "image_lists": {"train": file, "test": None},
    }.get(name, {})
    with pytest.raises((ValueError, OSError), match=f"{file}"):
        by_name.load(name, path=path, **options)


def test_a_file_or_link_of_another_kind_is_said_when_it_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.png").symlink_to("pipe")
    (tmp_path / "b.png").symlink_to("b.png")  # leads to itself
    names = listing.images(str(tmp_path))
    assert [os.path.basename(name) for name in names] == ["a.png", "b.png"]
    how = decode.Decoding("pillow")
    reader = readers.of_files(str(tmp_path), [b"a.png", b"b.png"], how)
    for row in range(2):
        with pytest.raises(decode.Unreadable, match=f"{'ab'[row]}.png"):
            reader.read(row)


# Sizes


def png(height, width):
    """A PNG of a few bytes that says it is of this size, and is whole."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 1000)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def jpeg(height, width):
    """A JPEG whose header says it is of this size."""
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, "JPEG")
    data = stream.getvalue()
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def peak(function) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data", [png(25_000, 25_000), jpeg(60_000, 60_000)])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(data, decoder):
    def read(**options):
        with pytest.raises(decode.Unreadable, match=r"x.img.*max_pixels="):
            decode.Decoding(decoder, **options)(data, "x.img")

    assert peak(read) < 10e6
    read(max_pixels=10**8)


def test_pillows_own_limit_is_that_of_the_process(decoder, monkeypatch):
    """The library leaves it alone; a command, whose process it is, lifts it."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    stream = io.BytesIO()
    Image.fromarray(np.full((10, 20, 3), 90, np.uint8)).save(stream, "PNG")
    decoding = decode.Decoding(decoder, max_pixels=200)
    with pytest.raises(decode.Unreadable, match="MAX_IMAGE_PIXELS=40"):
        decoding(stream.getvalue(), "x")
    assert Image.MAX_IMAGE_PIXELS == 40
    assert cli.main(["train", "no_such_config"]) == 2
    assert (decoding(stream.getvalue(), "x") == 90).all()
    with pytest.raises(decode.Unreadable, match="max_pixels=199"):
        decoding._replace(max_pixels=199)(stream.getvalue(), "x")


def test_the_limit_on_pixels_is_an_option_of_the_source(decoder, tmp_path):
    image(tmp_path / "a" / "x.png", size=(10, 20))
    image(tmp_path / "a" / "y.png", size=(10, 20), value=1)
    load = {"path": str(tmp_path), "test": 0.0, "decoder": decoder}
    data = by_name.load("image_folder", **load, max_pixels=200)
    assert data.train.read(0).shape == (10, 20, 3)
    data = by_name.load("image_folder", **load, max_pixels=199)
    with pytest.raises(decode.Unreadable, match=r"10 x 20 pixels.*max_pixels=199"):
        data.train.read(0)


def test_a_line_of_pixels_is_not_blown_up(tmp_path):
    crop = crops.CenterCrop(64, 64, decoder="pillow")
    assert crop(np.zeros((1, 100, 3), np.uint8)).shape == (64, 64, 3)
    image(tmp_path / "a" / "x.png", size=(1, 70_000))
    data = by_name.load("image_folder", path=str(tmp_path), test=0.0, size=64)
    with pytest.raises(decode.Unreadable, match=r"x.png.*1 x 70000"):
        data.train.read(0)


def npy(shape, dtype="|u1", data=b""):
    stream = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue() + data


def zipped(path, arrays, **sizes):
    with zipfile.ZipFile(path, "w") as file:
        for name, data in arrays.items():
            file.writestr(f"{name}.npy", data)
    return str(path)


@pytest.mark.parametrize("shape", [(10**6, 1000, 1000, 3), (10**15,)])
def test_headers_of_arrays_that_lie(tmp_path, shape):
    small = npy((2,), "<i8", bytes(16))
    path = zipped(tmp_path / "x.npz", {"x": npy(shape), "y": small})
    structure = {"edges": npy((2, 10**13), "<i8"), "graph_ptr": small}
    graphs = zipped(
        tmp_path / "g.npz", structure | {"edge_ptr": small, "label": npy((1,), "<i8")}
    )
    (tmp_path / "i.npy").write_bytes(npy(shape, data=b"12"))
    splits = {"train": {"images": {"file": "i.npy"}}}
    (tmp_path / "meta.json").write_text(json.dumps({"splits": splits}))

    for source, where in (("npz", path), ("graphs", graphs)):
        with pytest.raises(ValueError, match=f"{where}"):
            by_name.load(source, path=where)
    for resident in (True, False):
        with pytest.raises(ValueError, match="i.npy"):
            by_name.load("arrays", path=str(tmp_path), resident=resident)


def test_a_directory_of_an_archive_that_lies(tmp_path):
    """It says of an array how many bytes it unpacks to."""
    path = tmp_path / "x.npz"
    zipped(path, {"x": npy((2**33,))})
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02") + 20
    data[at : at + 8] = struct.pack("<II", 2**31, 2**32 - 2)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="x.npz"):
        by_name.load("npz", path=str(path))


def test_packed_images_that_lie(tmp_path):
    arrays = {"strips": np.zeros(9, np.uint8), "ptr": np.array([0, 9])}
    for shape in ([10**6, 10**4, 10**4, 3], [-1, 2, 2, 3], [1, 2, 2, 2]):
        np.savez(
            tmp_path / "x.npz",
            x__shape=shape,
            **{f"x__{key}": value for key, value in arrays.items()},
        )
        with pytest.raises(ValueError, match="x.npz.*x__shape"):
            by_name.load("npz", path=str(tmp_path / "x.npz"))


# Labels, classes, channels


@pytest.mark.parametrize(
    "label, said",
    [
        (np.array([0, 2**32]), "4294967296"),  # 0 as int32
        (np.array([0, 2**64 - 1], np.uint64), "18446744073709"),
        (np.array([0, 2 * 10**9]), "2000000000"),
        (np.array([-(2**32) + 1, 0]), "-4294967295"),
    ],
)
def test_labels_that_no_class_can_have(tmp_path, label, said):
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 4, 4, 3), np.uint8), y=label)
    with pytest.raises(ValueError, match=said):
        by_name.load("npz", path=str(tmp_path / "x.npz"))
    np.save(tmp_path / "i.npy", np.zeros((2, 4, 4, 3), np.uint8))
    np.save(tmp_path / "l.npy", label)
    entries = {"images": {"file": "i.npy"}, "label": {"file": "l.npy"}}
    (tmp_path / "meta.json").write_text(json.dumps({"splits": {"train": entries}}))
    for resident in (True, False):
        with pytest.raises(ValueError, match=said):
            by_name.load("arrays", path=str(tmp_path), resident=resident)


def graph_file(path, **changes):
    arrays = {
        "edges": np.array([[0, 1], [1, 0]]),
        "graph_ptr": np.array([0, 2]),
        "edge_ptr": np.array([0, 2]),
        "label": np.array([0]),
    }
    np.savez(path, **arrays | changes)
    return str(path)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"label": np.array([2 * 10**9])}, "label.*2000000000"),
        ({"label": np.array([2**32])}, "label.*4294967296"),
        ({"graph_ptr": np.array([0, 10**9])}, "graph_ptr.*1000000000"),
        ({"node_attr": np.array(["a", "b"])}, "node attributes"),
        ({"node_attr": np.array([1e300, 0])}, "node attributes"),
        ({"node_attr": np.zeros((2, 0))}, "node attributes.*float64"),
        ({"class_names": np.array([["a"]])}, "class_names"),
    ],
)
def test_graphs_that_cannot_be(tmp_path, changes, said):
    assert len(by_name.load("graphs", path=graph_file(tmp_path / "g.npz")).train.label)
    with pytest.raises(ValueError, match=said):
        by_name.load("graphs", path=graph_file(tmp_path / "g.npz", **changes))


def test_unsigned_pointers_do_not_rise_by_falling(tmp_path):
    path = graph_file(
        tmp_path / "g.npz",
        graph_ptr=np.array([0, 2, 0], np.uint64),
        edge_ptr=np.array([0, 2, 2], np.uint64),
        label=np.array([0, 0]),
    )
    with pytest.raises(ValueError, match="graph_ptr"):
        by_name.load("graphs", path=path)


def test_node_labels_of_too_many_kinds(tmp_path, monkeypatch):
    path = graph_file(tmp_path / "g.npz", node_label=np.array([3, 5]))
    monkeypatch.setattr(graphs, "_ENTRIES", 4)
    assert by_name.load("graphs", path=path).train.graphs.features.shape == (2, 2)
    monkeypatch.setattr(graphs, "_ENTRIES", 3)
    with pytest.raises(ValueError, match="config.data.features"):
        by_name.load("graphs", path=path)


def test_classes_of_one_name(tmp_path):
    images = np.zeros((2, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "x.npz", x=images, y=[0, 1], class_names=["cat", "cat"])
    with pytest.raises(ValueError, match=r"class_names.*\['cat'\]"):
        by_name.load("npz", path=str(tmp_path / "x.npz"))


@pytest.mark.parametrize(
    "meta, said",
    [
        ([], ""),
        ({}, "splits"),
        ({"splits": 3}, "splits=3"),
        ({"splits": {}}, "train"),
        ({"splits": {"train": 3}}, ""),
        ({"splits": {"train": {"images": "x.npy"}}}, ""),
        ({"splits": {"train": {}}}, "images"),
        ({"splits": {"train": {"images": None}}}, ""),
        ({"splits": {"train": {"images": {"file": 3}}}}, "images.file=3"),
        (
            {"splits": {"train": {"images": {"file": "../../secret.npy"}}}},
            "images.file='../../secret.npy'",
        ),
        ({"splits": {"train": {"images": {"file": "/a.npy"}}}}, "file='/a.npy'"),
        ({"splits": {}, "class_names": "ab"}, "class_names='ab'"),
        ({"splits": {}, "class_names": [1]}, r"class_names\[0\]=1"),
        ({"splits": {}, "decoder": "gd"}, "decoder='gd'"),
    ],
)
def test_a_meta_json_of_other_types(tmp_path, meta, said):
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=f"meta.json.*{said}"):
        by_name.load("arrays", path=str(tmp_path))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\xff", "1" * 5000])
def test_a_json_file_of_anything(tmp_path, text):
    (tmp_path / "x.json").write_text(text, encoding="latin-1")
    with pytest.raises(storage.NotJson, match="x.json"):
        storage.read_json(tmp_path / "x.json")


def test_classes_that_are_judged_and_not_trained_on_are_counted(tmp_path, caplog):
    def run(test):
        train = {"train_x": np.zeros((8, 8, 8), np.uint8), "train_y": np.arange(8) % 2}
        path = str(tmp_path / "x.npz")
        judged = {"test_x": np.zeros((4, 8, 8), np.uint8), "test_y": np.array(test)}
        np.savez(path, **train, **judged)
        section = {"name": "npz", "path": path}
        config = toy.config(data=section, batch_size=2, evaluators={})
        top = sections.read_top(resolve.resolve(config.to_dict()))
        tasks = build.sections.read_tasks(section, {"name": "joint"}, 0)()
        with caplog.at_level("WARNING"):
            caplog.clear()
            checks.check_data(top, tasks, tmp_path / str(test))
        return [r.getMessage() for r in caplog.records if "no train" in r.getMessage()]

    assert run([0, 1, -1, 1]) == []
    (said,) = run([0, 1, 2, 3])
    assert "2 of 4" in said and "2 (2, 3)" in said
    assert len(run([2, 2, 3, 3])) == 1  # nothing is measured, or not by train images


@pytest.mark.parametrize("probe", [knn, linear, logistic, svm])
def test_a_probe_refuses_images_of_classes_it_cannot_learn(probe, tmp_path):
    train = {"train_x": np.zeros((8, 8, 8), np.uint8), "train_y": np.arange(8) % 2}
    test = {"test_x": np.zeros((4, 8, 8), np.uint8), "test_y": np.array([2, 2, 3, 3])}
    np.savez(tmp_path / "x.npz", **train, **test)
    section = {"name": "npz", "path": str(tmp_path / "x.npz")}
    tasks = build.sections.read_tasks(section, {"name": "joint"}, 0)()
    with pytest.raises(ValueError, match=r"config\.data.*4 of 4"):
        probe.make(types.SimpleNamespace(stream=tasks))


def test_files_are_the_same_where_their_bytes_are(tmp_path):
    root = folders(tmp_path)
    os.link(root / "train/class0/1.png", root / "test/class1/copy.png")
    (root / "train/class1/gone.png").symlink_to("nowhere")
    data = by_name.load("image_folder", path=str(root), on_corrupt="skip")
    found = identity.describe_duplicates(identity.identify(data), "x")
    assert found.startswith("x: 1 rows of test are in train, too (such as ")
    assert "train/class0/1.png" in found and "test/class1/copy.png" in found
    joined = by_name.load(
        "joined", sets=[{"name": "image_folder", "path": str(root)}] * 2
    )
    assert "10 rows of train repeat" in identity.describe_duplicates(
        identity.identify(joined), "x"
    )


def test_a_run_tells_duplicates_where_that_is_quick_or_asked_for(
    tmp_path, monkeypatch, caplog
):
    told = []
    monkeypatch.setattr(checks.logging, "warning", lambda *text: told.append(text[-1]))
    root = folders(tmp_path / "set")
    os.link(root / "train/class0/1.png", root / "test/class1/copy.png")
    section = {"name": "image_folder", "path": str(root), "size": 8}
    changes = {"data": section, "scenario": {"name": "joint"}, "batch_size": 2}
    config = toy.config(**changes, evaluators={})
    tasks = build.sections.read_tasks(section, {"name": "joint"}, 0)()
    for asked, rows in ((None, 10**6), (None, 10), (True, 10), (False, 10**6)):
        monkeypatch.setattr(identity, "ROWS", rows)
        config.duplicates = asked
        top = sections.read_top(resolve.resolve(config.to_dict()))
        checks.check_data(top, tasks, tmp_path / f"{asked}{rows}")
    assert len(told) == 2 and told[0] == told[1] and "1 rows of test" in told[0]


@pytest.mark.parametrize("resize, share", [(122, "7%"), (37, None), (None, None)])
def test_an_evaluation_of_the_middle_of_images_is_said(tmp_path, caplog, resize, share):
    section = {"name": "digits"}
    config = toy.config(data=section, evaluators={})
    config.augment = {"size": 32, "resize": resize}
    top = sections.read_top(resolve.resolve(config.to_dict()))
    tasks = build.sections.read_tasks(section, {"name": "joint"}, 0)()
    with caplog.at_level("WARNING"):
        checks.check_data(top, tasks, tmp_path)
    told = " ".join(record.getMessage() for record in caplog.records)
    assert (f"config.augment.resize={resize}" in told) == (share is not None)
    assert (share or "") in told


def test_grey_train_and_coloured_test_images(tmp_path):
    grey, coloured = (np.zeros((2, 4, 4, c), np.uint8) for c in (1, 3))
    np.savez(tmp_path / "x.npz", train_x=grey, test_x=coloured)
    with pytest.raises(ValueError, match="1 in train, 3 in test"):
        by_name.load("npz", path=str(tmp_path / "x.npz"))
    splits = {}
    for split, x in (("train", grey), ("test", coloured)):
        np.save(tmp_path / f"{split}.npy", x)
        splits[split] = {"images": {"file": f"{split}.npy"}}
    (tmp_path / "meta.json").write_text(json.dumps({"splits": splits}))
    with pytest.raises(ValueError, match="1 in train, 3 in test"):
        by_name.load("arrays", path=str(tmp_path), resident=False)
    sets = []
    for name, x in (("a", grey), ("b", coloured)):
        np.savez(tmp_path / f"{name}.npz", train_x=x)
        sets.append({"name": "npz", "path": str(tmp_path / f"{name}.npz")})
    with pytest.raises(ValueError, match="sets.* 1 .* 3 channels"):
        by_name.load("joined", sets=sets)
