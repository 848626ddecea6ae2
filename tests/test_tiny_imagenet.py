"""tiny-imagenet-200 in its official layout, and with val sorted into folders."""

import numpy as np
import pytest
from PIL import Image

from jaxcl.config import sections
from jaxcl.data import files as files_lib
from jaxcl.data import prefetch, sources, stream

WNIDS = ("n03", "n01", "n02")  # of wnids.txt: not sorted
# wnid of val_K.JPEG. Files are sorted as text: val_10 and val_11 before val_2.
VAL = ("n02", "n03", "n03", "n01", "n02", "n01", *["n03"] * 6)
TRAIN = {"n01": 4, "n02": 3, "n03": 12}


def save(file, rng, size=(8, 8)):
    """A JPEG, every third one grey; what Pillow reads of it, as RGB."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
    number = int(file.stem.split("_")[1])
    image.convert("L" if number % 3 == 0 else "RGB").save(file, "JPEG", quality=90)


def make(root):
    rng = np.random.default_rng(0)
    for wnid, count in TRAIN.items():
        for i in range(count):
            save(root / f"train/{wnid}/images/{wnid}_{i}.JPEG", rng)
        (root / f"train/{wnid}/{wnid}_boxes.txt").write_text("")
    for i in range(len(VAL)):
        save(root / f"val/images/val_{i}.JPEG", rng)
    lines = [f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n" for i, wnid in enumerate(VAL)]
    (root / "val/val_annotations.txt").write_text("".join(lines))
    save(root / "test/images/test_0.JPEG", rng)
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (root / "words.txt").write_text("n01\tgoldfish, Carassius auratus\n")
    return root


def sort_val(root, inner):
    for i, wnid in enumerate(VAL):
        (root / "val" / wnid / inner).mkdir(parents=True, exist_ok=True)
        file = root / f"val/images/val_{i}.JPEG"
        file.rename(root / "val" / wnid / inner / file.name)


def load(path, **options):
    return sources.load(
        "tiny_imagenet", **{"path": str(path), "decoder": "pillow", **options}
    )


def expected(root, names):
    """(split, label, file) of every train and test row, in order."""
    for label, wnid in enumerate(names):
        for i in sorted(range(TRAIN[wnid]), key=str):
            yield "train", label, root / f"train/{wnid}/images/{wnid}_{i}.JPEG"
        for i in sorted(np.flatnonzero(np.array(VAL) == wnid), key=str):
            yield "test", label, root / f"val/images/val_{i}.JPEG"


def check(data, rows):
    for split in ("train", "test"):
        part, wanted = getattr(data, split), [x for x in rows if x[0] == split]
        assert part.load is None and part.images.dtype == np.uint8
        assert part.label.dtype == part.domain.dtype == np.int32
        assert part.label.tolist() == [label for _, label, _ in wanted]
        assert not part.domain.any()
        np.testing.assert_array_equal(part.images, [x for _, _, x in wanted])


def with_pixels(root, names=WNIDS):
    rows = []
    for split, label, file in expected(root, names):
        with Image.open(file) as image:
            rows.append((split, label, np.asarray(image.convert("RGB"))))
    return rows


def test_rows_of_every_layout(tmp_path):
    rows = with_pixels(make(tmp_path))
    grey = [(x == x[..., :1]).all() for _, _, x in rows]
    assert 0 < sum(grey) < len(rows) == sum(TRAIN.values()) + len(VAL)
    data = load(tmp_path)
    assert data.name == "tiny_imagenet" and data.decoder == "pillow"
    assert data.class_names == WNIDS and data.domain_names == ("all",)
    assert data.validation is None
    check(data, rows)
    # Editors leave blank lines, Windows ends its lines otherwise.
    file = tmp_path / "val/val_annotations.txt"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n") + b"\n \n")
    check(load(tmp_path), rows)


@pytest.mark.parametrize("inner", ["", "images"])
@pytest.mark.parametrize("left", [True, False])
def test_val_sorted_into_folders(tmp_path, inner, left):
    rows = with_pixels(make(tmp_path))
    sort_val(tmp_path, inner)
    if not left:
        (tmp_path / "val/images").rmdir()
        (tmp_path / "val/val_annotations.txt").unlink()
    check(load(tmp_path), rows)
    (tmp_path / "names").write_text("n02\nn03\n")
    data = load(tmp_path, classes=str(tmp_path / "names"))
    assert data.class_names == ("n02", "n03")
    assert data.test.label.tolist() == [0] * 2 + [1] * 8
    (tmp_path / "val/n09").mkdir()
    with pytest.raises(ValueError, match=r"val.*\['n09"):
        load(tmp_path)
    (tmp_path / "val/n09").rmdir()
    for i in np.flatnonzero(np.array(VAL) == "n01"):
        (tmp_path / "val/n01" / inner / f"val_{i}.JPEG").unlink()
    with pytest.raises(ValueError, match="val/n01"):
        load(tmp_path)
    assert load(tmp_path, classes=str(tmp_path / "names")).class_names[1] == "n03"


def test_classes_to_keep_in_an_order_of_their_own(tmp_path):
    make(tmp_path)
    (tmp_path / "names").write_text("n01\nn03\n")
    (tmp_path / "wnids.txt").unlink()  # not needed then
    data = load(tmp_path, classes=str(tmp_path / "names"))
    assert data.class_names == ("n01", "n03")
    check(data, with_pixels(tmp_path, ("n01", "n03")))


def test_options_reach_the_rows(tmp_path):
    make(tmp_path)
    whole = load(tmp_path)
    small = load(tmp_path, size=4)
    assert small.train.images.shape == (19, 4, 4, 3)
    assert small.test.images.shape == (12, 4, 4, 3)
    held = load(tmp_path, validation=0.3, seed=1)
    assert np.bincount(held.validation.label).tolist() == [4, 1, 1]
    both = np.concatenate([held.train.images, held.validation.images])
    assert sorted(x.tobytes() for x in both) == sorted(
        x.tobytes() for x in whole.train.images
    )
    other = load(tmp_path, validation=0.3, seed=2).validation.images
    assert (other != held.validation.images).any()
    np.testing.assert_array_equal(held.test.images, whole.test.images)
    assert load(tmp_path, decoder="auto").decoder == prefetch.choose_decoder("auto")
    streamed = load(tmp_path, resident=False)
    for split in ("train", "test"):
        part, want = getattr(streamed, split), getattr(whole, split)
        assert part.images is None
        pixels = [part.load(row) for row in range(stream.size(part))]
        np.testing.assert_array_equal(pixels, want.images)


def test_images_that_cannot_be_decoded(tmp_path):
    make(tmp_path)
    bad = tmp_path / "train/n01/images/n01_1.JPEG"
    bad.write_bytes(b"no image")
    with pytest.raises(files_lib.Unreadable, match=r"n01_1\.JPEG"):
        load(tmp_path)
    with pytest.warns(UserWarning, match=r"n01_1\.JPEG.*used .*n01_2\.JPEG"):
        data = load(tmp_path, on_corrupt="skip")
    row = int(np.flatnonzero(data.train.label == 1)[1])
    np.testing.assert_array_equal(data.train.images[row], data.train.images[row + 1])


def test_a_config_cuts_it_into_tasks(tmp_path):
    make(tmp_path)
    data = {"name": "tiny_imagenet", "path": str(tmp_path)}
    tasks = sections.tasks(data, {"name": "class", "num_tasks": 3})()
    assert [task.classes.tolist() for task in tasks.tasks] == [[0], [1], [2]]
    assert [len(task.test) for task in tasks.tasks] == [VAL.count(x) for x in WNIDS]
    with pytest.raises(ValueError, match=r"config\.data\.label_key"):
        sections.tasks({**data, "label_key": 1}, {"name": "joint"})


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("", "path = '.*tiny'"),
        ("train", "tiny/train"),
        ("val", "tiny/val"),
        ("wnids.txt", r"classes = '.*tiny/wnids\.txt'"),
        ("val/val_annotations.txt", r"tiny/val/val_annotations\.txt"),
        ("val/images", r"tiny/val"),
        ("train/n02", r"train.*\['n02'\]"),
        ("train/n02/images", "train/n02"),
        ("val/images/val_3.JPEG", r"txt.* 1, \['val_3\.JPEG'\]"),
    ],
)
def test_what_is_missing_is_named(tmp_path, missing, words):
    root = make(tmp_path / "tiny")
    (root / missing).rename(tmp_path / "away")
    with pytest.raises(ValueError, match=words):
        load(root)


def test_annotations_and_images_that_do_not_meet(tmp_path):
    make(tmp_path)
    file = tmp_path / "val/val_annotations.txt"
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    file.write_text("".join(lines[:4] + lines[5:]))
    with pytest.raises(ValueError, match=r" 1, \['val_4\.JPEG'\]"):
        load(tmp_path)
    file.write_text(text.replace("n01", "n02"))
    with pytest.raises(ValueError, match=r"txt.*\['n01'\]"):
        load(tmp_path)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"val_annotations\.txt"):
        load(tmp_path)
