"""Sets in the format of Hugging Face `datasets`, with and without the library."""

import io
import json
import re

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from jaxcl.config import own_images
from jaxcl.data.images import decode
from jaxcl.data.sources import by_name, huggingface

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (7, 6, 5, 3), np.uint8)
LABELS = np.array([0, 1, 2, 1, 0, 2, 1])
NAMES = ("ant", "bee", "cat")
ROWS = {"train": slice(0, 5), "test": slice(5, 7)}


def encoded(pixels):
    data = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(data, "PNG")
    return data.getvalue()


def structs(rows, **changes):
    return [{"bytes": encoded(x), "path": None} | changes for x in PIXELS[rows]]


def table(rows, names=NAMES, **columns):
    """As `datasets` writes it: structs of bytes, labels, names in the header."""
    made = pa.table({"image": structs(rows), "label": LABELS[rows]} | columns)
    if names:
        features = {"label": {"names": [*names], "_type": "ClassLabel"}}
        info = {"info": {"features": features}}
        made = made.replace_schema_metadata({"huggingface": json.dumps(info)})
    return made


def write_arrow(folder, made, parts=2, **state):
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{i:05d}-of-{parts:05d}.arrow" for i in range(parts)]
    cuts = np.linspace(0, len(made), parts + 1).astype(int)
    for name, start, end in zip(names, cuts[:-1], cuts[1:], strict=True):
        part = made.slice(start, end - start)
        with pa.ipc.new_stream(str(folder / name), part.schema) as file:
            file.write_table(part, max_chunksize=2)
    entries = [{"filename": name} for name in names]
    whole = {"_data_files": entries, "_split": None} | state
    (folder / "state.json").write_text(json.dumps(whole))


def saved(root, **options):
    """A set of two splits as `save_to_disk` writes it."""
    for split, rows in ROWS.items():
        write_arrow(root / split, table(rows, **options))
    (root / "dataset_dict.json").write_text(json.dumps({"splits": [*ROWS]}))
    return root


def in_parquet(root, names=("data/{}-00000-of-00001",), **options):
    for split, rows in ROWS.items():
        made = table(rows, **options)
        cuts = np.linspace(0, len(made), len(names) + 1).astype(int)
        for name, start, end in zip(names, cuts[:-1], cuts[1:], strict=True):
            file = root / f"{name.format(split)}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(made.slice(start, end - start), file)
    return root


def load(path, **options):
    options = {"decoder": "pillow", **options}
    return by_name.load("huggingface", path=str(path), **options)


def check(data, pixels=PIXELS, labels=LABELS):
    for split, rows in ROWS.items():
        part = getattr(data, split)
        assert part.label.tolist() == labels[rows].tolist()
        images = part.images
        if images is None:
            images = [part.read(row) for row in range(len(part.label))]
        np.testing.assert_array_equal(images, pixels[rows])


@pytest.mark.parametrize(
    "names",
    [
        ("data/{}-00000-of-00002", "data/{}-00001-of-00002"),
        ("{}",),
        ("default/{}/0000", "default/{}/0001"),
    ],
)
def test_parquet_files(names, tmp_path):
    data = load(in_parquet(tmp_path / "pets", names))
    check(data)
    assert data.name == "pets" and data.class_names == NAMES
    assert data.validation is None and data.train.images is None


def test_arrow_files(tmp_path):
    data = load(saved(tmp_path / "pets"))
    check(data)
    assert data.name == "pets" and data.class_names == NAMES
    assert data.decoder == "pillow" and data.train.reader.channels == 3
    reader = data.train.reader
    assert "data-00001-of-00002.arrow (row 1)" in reader.name(3)
    assert reader.raw(3) == encoded(PIXELS[3])
    # A single split has a name of its own, or is the train split.
    for state, split in (({}, "train"), ({"_split": "all"}, "all")):
        write_arrow(tmp_path / split, table(ROWS["train"]), **state)
        data = load(tmp_path / split, train_split=split, test_split=None)
        assert data.test is None and len(data.train.label) == 5


def test_options_reach_the_rows(tmp_path):
    root = saved(tmp_path / "set")
    check(load(root, resident=True))
    small = load(root, resident=True, size=4, validation=0.3)
    assert small.train.images.shape == (3, 4, 4, 3)
    assert small.validation.images.shape == (2, 4, 4, 3)
    held = load(root, test_split=None, validation_split="test")
    assert held.test is None and len(held.validation.label) == 2
    grey = load(root, channels=1)
    assert grey.train.read(0).shape == (6, 5, 1)
    unlabelled = load(root, label_key=None)
    assert unlabelled.class_names == () and {*unlabelled.train.label.tolist()} == {-1}
    (tmp_path / "names").write_text("cat\nant\n")
    some = load(root, classes=str(tmp_path / "names"))
    assert some.class_names == ("cat", "ant")
    assert some.train.label.tolist() == [1, 0, 1]
    np.testing.assert_array_equal(some.train.read(1), PIXELS[2])
    for options, words in (
        ({"train_split": "all"}, r"train_split='all'.*\['test', 'train'\]"),
        ({"validation_split": "val"}, "validation_split='val'"),
        ({"image_key": "img"}, r"image_key='img'.*\['image', 'label'\]"),
        ({"label_key": "fine"}, "label_key='fine'"),
        ({"image_key": "label"}, "image_key='label'"),
        ({"label_key": "image"}, "label_key='image'"),
        ({"max_pixels": 20}, "max_pixels=20"),
        ({"decoder": "turbo"}, "decoder='turbo'"),
    ):
        with pytest.raises(ValueError, match=words):
            load(root, **options).train.read(0)


def test_a_set_that_is_written_anew_is_read_anew(tmp_path):
    """In one process, as a notebook does that mends its labels."""
    for shift in (0, 1):
        labels = (LABELS + shift) % 3
        for split, rows in ROWS.items():
            made = table(rows, label=labels[rows], image=structs(rows)[::-1])
            made = made if shift else table(rows)
            parquet.write_table(made, tmp_path / f"{split}.parquet")
        pixels = PIXELS.copy()
        for rows in ROWS.values():
            pixels[rows] = PIXELS[rows][::-1] if shift else PIXELS[rows]
        check(load(tmp_path), pixels, labels)
    assert huggingface.guess_options(str(tmp_path))["test_split"] == "test"
    unknown = table(ROWS["test"], label=[-1, -1])
    parquet.write_table(unknown, tmp_path / "test.parquet")
    assert huggingface.guess_options(str(tmp_path))["test_split"] is None


def test_labels_of_every_kind(tmp_path):
    words = np.array(["bee", "cat", "ant"])[LABELS]
    number = {"ant": 0, "bee": 1, "cat": 2}
    for i, (labels, names, expected) in enumerate(
        (
            (LABELS, (), LABELS),
            (words, (), np.array([number[x] for x in words])),
            (pa.array(words).dictionary_encode(), (), None),
            (LABELS > 0, (), (LABELS > 0).astype(int)),
            (pa.array([None, *LABELS[1:]]), NAMES, np.array([-1, *LABELS[1:]])),
        )
    ):
        root = tmp_path / str(i)
        for split, rows in ROWS.items():
            part = labels[rows]
            write_arrow(root / split, table(rows, names, label=part))
        (root / "dataset_dict.json").write_text(json.dumps({"splits": [*ROWS]}))
        data = load(root)
        if expected is None:  # as the same words above
            expected = np.array([number[x] for x in words])
        check(data, labels=expected)
        count = len({*expected.tolist()} - {-1})
        assert data.class_names == (NAMES if i else ("0", "1", "2"))[:count] or i == 3
    assert load(tmp_path / "3").class_names == ("0", "1")


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()], ids=str)
def test_images_of_every_kind(kind, tmp_path):
    for split, rows in ROWS.items():
        values = [encoded(x) for x in PIXELS[rows]]
        made = table(rows, image=pa.array(values, kind))
        write_arrow(tmp_path / "a" / split, made)
        (tmp_path / "b").mkdir(exist_ok=True)
        parquet.write_table(made, tmp_path / "b" / f"{split}.parquet")
    (tmp_path / "a/dataset_dict.json").write_text(json.dumps({"splits": [*ROWS]}))
    check(load(tmp_path / "a"))
    check(load(tmp_path / "b"))
    raw = load(tmp_path / "a").train.reader.raw(1)
    assert raw == encoded(PIXELS[1])


STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.mark.parametrize(
    "image, kind",
    [
        (None, pa.binary()),
        ({"bytes": None, "path": "/etc/passwd"}, STRUCT),
        (b"no image", pa.binary()),
    ],
)
def test_images_that_are_none(image, kind, tmp_path):
    made = pa.table({"image": pa.array([image], kind), "label": [0]})
    write_arrow(tmp_path, made, parts=1)
    data = load(tmp_path, test_split=None, channels=1, max_pixels=8)
    with pytest.raises(decode.Unreadable, match=r"\(row 0\)"):
        data.train.read(0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_data_files": [{"filename": "../x.arrow"}]}, r"\.\./x\.arrow"),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, "/etc/passwd"),
        ({"_data_files": [{}]}, r"filename\[0\]=None"),
        ({"_data_files": "x"}, "_data_files='x'"),
        ({"_data_files": []}, "rows"),
    ],
)
def test_a_state_that_names_other_files(changes, words, tmp_path):
    write_arrow(tmp_path, table(ROWS["train"]), **changes)
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path))}.*{words}"):
        load(tmp_path, test_split=None)


def test_files_that_are_damaged(tmp_path):
    root = saved(tmp_path / "a")
    file = root / "train/data-00000-of-00002.arrow"
    whole = file.read_bytes()
    for bad in (b"", b"none at all", whole[: len(whole) // 2], whole[8:]):
        file.unlink()  # what is mapped stays as it was
        file.write_bytes(bad)
        huggingface._column.cache_clear()
        with pytest.raises(ValueError, match=r"00000-of-00002.arrow"):
            load(root)
    file.unlink()
    with pytest.raises(ValueError, match=r"00000-of-00002.arrow"):
        load(root)
    root = in_parquet(tmp_path / "b")
    (file,) = root.glob("data/train*")
    whole = file.read_bytes()
    for bad in (b"", b"PAR1none at allPAR1", whole[: len(whole) // 2]):
        file.write_bytes(bad)
        with pytest.raises(ValueError, match="train-00000-of-00001.parquet"):
            load(root)


def test_offsets_that_lead_out_of_the_file(tmp_path):
    """Reading such a row may end the process."""
    rows = ROWS["train"]
    made = table(rows, image=[encoded(x) for x in PIXELS[rows]])
    write_arrow(tmp_path, made, parts=1)
    (file,) = tmp_path.glob("*.arrow")
    data = file.read_bytes()
    lengths = [len(encoded(x)) for x in PIXELS[rows]]
    offsets = np.cumsum([0, *lengths[:2]]).astype("<i4")
    assert offsets.tobytes() in data  # of one batch of rows or more
    # The last of a batch stays right: a look at the ends alone sees nothing.
    wrong = np.array([0, offsets[2] + 1, offsets[2]], "<i4").tobytes()
    file.unlink()
    file.write_bytes(data.replace(offsets.tobytes(), wrong))
    with pytest.raises(ValueError, match=r"arrow"):
        load(tmp_path, test_split=None).train.read(0)


def test_labels_that_are_none(tmp_path):
    rows = ROWS["train"]
    for labels, names, words in (
        ([0, 1, 2, 3, 1], NAMES, "label 3 "),
        ([0, 1, 2, 2**40, 1], (), f"labels.* {2**40}"),
        ([0, 1, 2, -2, 1], (), "labels.* -2 "),
        (["a", "b", None, "a", "b"], (), "label"),
        ([0.5] * 5, (), "double"),
        ([0, 1, 2, 1, 0], (1, 2, 3), r"names of 'label'\[0\]=1"),
    ):
        write_arrow(tmp_path, table(rows, names, label=labels))
        huggingface._column.cache_clear()
        with pytest.raises(ValueError, match=words):
            load(tmp_path, test_split=None)


def test_files_that_number_their_classes_otherwise(tmp_path):
    """As `class_encode_column` of each split by itself makes them."""

    def written(name, *parts):
        for i, part in enumerate(parts):
            (tmp_path / name).mkdir(exist_ok=True)
            split = "test" if i == len(parts) - 1 else f"train-{i}"
            parquet.write_table(part, tmp_path / name / f"{split}.parquet")
        return tmp_path / name

    train, test = (table(rows) for rows in ROWS.values())
    swapped = table(ROWS["test"], ("ant", "cat", "bee"))
    fewer = table(ROWS["test"], ("ant", "bee"))
    for number, (parts, words) in enumerate(
        (
            ((train, swapped), "train.*test"),
            ((train, fewer), "train.*test"),
            ((train, swapped, test), "train-0.*train-1"),
            ((train, table(ROWS["test"], label=["1", "ant"]), test), "text"),
        )
    ):
        with pytest.raises(ValueError, match=f"label_key='label': .*{words}"):
            load(written(str(number), *parts))
    # Names that only one split gives hold for all.
    assert load(written("bare", table(ROWS["train"], ()), test)).class_names == NAMES


@pytest.mark.parametrize(
    "names", [("one/{}-0", "two/{}-0"), ("one/{}/0000", "two/{}/0000"), ("{}/data-0",)]
)
def test_several_sets_in_a_folder_are_not_mixed(names, tmp_path):
    root = in_parquet(tmp_path, names)
    for read in (load, own_images.make_section):
        with pytest.raises(ValueError, match="folders"):
            read(root)


@pytest.mark.parametrize(
    "write, told",
    [
        (saved, {"test_split": "test"}),
        (in_parquet, {"test_split": "test"}),
        (lambda root: in_parquet(root, ("default/{}/0000",)), {"test_split": "test"}),
        (lambda root: write_arrow(root, table(ROWS["train"])), {}),
        (
            lambda root: write_arrow(root, table(ROWS["train"]), _split="all"),
            {"train_split": "all"},
        ),
    ],
)
def test_a_path_says_how_a_set_is_read(write, told, tmp_path):
    root = tmp_path / "set"
    write(root)
    (root / "dataset_info.json").write_text("{}")  # `datasets` writes one, as TFDS
    section = own_images.make_section(root)
    held_out = {} if told.get("test_split") else {"test_split": None, "test": 0.2}
    keys = {"image_key": "image", "label_key": "label", "train_split": "train"}
    named = {"name": "huggingface", "path": str(root)}
    assert section == named | keys | held_out | told
    data = by_name.load(**section)
    assert len(data.train.label) + len(data.test.label) == (5 if held_out else 7)


def test_columns_of_other_names_are_found(tmp_path):
    def write(root, rows, labels, names=NAMES):
        features = {"fine": {"names": [*names]}}
        info = {"huggingface": json.dumps({"info": {"features": features}})}
        lists = pa.array([[1, 2]] * len(labels), pa.list_(pa.int32()))
        columns = {"box": lists, "img": structs(rows), "fine": labels}
        write_arrow(root, pa.table(columns).replace_schema_metadata(info))

    rows = ROWS["train"]
    write(tmp_path / "train", rows, LABELS[rows])
    write(tmp_path / "validation", rows, LABELS[rows])
    write(tmp_path / "test", rows, [-1] * 5)
    splits = {"splits": ["validation", "test", "train"]}
    (tmp_path / "dataset_dict.json").write_text(json.dumps(splits))
    told = huggingface.guess_options(str(tmp_path))
    assert (told["image_key"], told["label_key"]) == ("img", "fine")
    assert told["test_split"] == "validation"  # the other has no labels
    write(tmp_path / "bare", rows, LABELS[rows], names=())
    assert huggingface.guess_options(str(tmp_path / "bare"))["label_key"] is None


def test_what_the_real_library_saves(tmp_path):
    datasets = pytest.importorskip("datasets", reason="`datasets` is not installed")
    features = {
        "image": datasets.Image(),
        "array": datasets.Array3D((6, 5, 3), "uint8"),
        "label": datasets.ClassLabel(names=[*NAMES]),
    }
    made = datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict(
                {
                    "image": [Image.fromarray(x) for x in PIXELS[rows]],
                    "array": PIXELS[rows].tolist(),
                    "label": LABELS[rows].tolist(),
                },
                features=datasets.Features(features),
            )
            for split, rows in ROWS.items()
        }
    )
    made.save_to_disk(tmp_path / "saved", num_shards={"train": 2, "test": 1})
    made["train"].select([4, 0, 2]).save_to_disk(tmp_path / "some")
    for split, rows in made.items():
        (tmp_path / "parquet").mkdir(exist_ok=True)
        rows.to_parquet(tmp_path / f"parquet/{split}-00000-of-00001.parquet")
    for root in ("saved", "parquet"):
        data = load(tmp_path / root)
        check(data)
        assert data.class_names == NAMES
        with pytest.raises(ValueError, match="image_key='array'"):
            load(tmp_path / root, image_key="array")
        section = own_images.make_section(tmp_path / root)
        assert section["name"] == "huggingface" and section["test_split"] == "test"
        check(by_name.load(**section))
    assert own_images.make_section(tmp_path / "some")["test"] == 0.2
    some = load(tmp_path / "some", test_split=None).train
    assert some.label.tolist() == LABELS[[4, 0, 2]].tolist()
    np.testing.assert_array_equal(some.read(1), PIXELS[0])


@pytest.mark.parametrize(
    "names, words",
    [
        (["train-00000-of-00003", "train-00002-of-00003"], "2 files"),
        (["train-00000-of-00001", "train-extra"], "2 files"),
    ],
)
def test_a_set_that_lacks_a_part_is_refused(names, words, tmp_path):
    for name in names:
        parquet.write_table(table(ROWS["train"]), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match=f"'train' .*{words}"):
        load(tmp_path, test_split=None)


def test_what_a_state_leaves_out_is_refused(tmp_path):
    write_arrow(tmp_path / "part", table(ROWS["train"]), parts=2)
    file = tmp_path / "part" / "state.json"
    state = json.loads(file.read_text())
    changes = {"_indices_data_files": [{"filename": "indices.arrow"}]}
    changes = [changes, {"_data_files": state["_data_files"][:1]}]
    for change, words in zip(changes, ("_indices_data_files", "1 files"), strict=True):
        file.write_text(json.dumps(state | change))
        with pytest.raises(ValueError, match=words):
            load(tmp_path / "part", test_split=None)
