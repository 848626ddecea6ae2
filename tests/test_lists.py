"""Sets given by list files: DomainNet's, ImageNet-LT's."""

import numpy as np
import pytest
from PIL import Image

from jaxcl.config import sections
from jaxcl.data import stream
from jaxcl.data.feed import prefetch
from jaxcl.data.images import crops, decode
from jaxcl.data.sources import by_name

NAMES = ("apple", "big pear", "plum")
LISTS = {  # pear has no photo to learn from
    "photo_train.txt": [0, 2, 2, 0, 2, 0],
    "photo_test.txt": [2, 1, 0],
    "sketch_train.txt": [2, 0, 1, 1, 2, 1, 0],
    "sketch_test.txt": [1, 1, 2, 0],
}


def colour(domain, label):
    """One flat colour for each domain and class; JPEG keeps it but for a level."""
    return 40 + 100 * domain + 30 * label


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("lists")
    for name, labels in LISTS.items():
        domain, split = name.removesuffix(".txt").split("_")
        lines = []
        for i, label in enumerate(labels):
            file = f"{domain}/{NAMES[label]}/{split} {i}.jpg"
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            value = colour(["photo", "sketch"].index(domain), label)
            pixels = np.full((20 + i, 30 - i, 3), value, np.uint8)
            Image.fromarray(pixels).save(path / file, quality=95)
            lines.append(f"{file} {label}\n")
        (path / name).write_text("".join(lines))
    return path


def load(path, **options):
    return by_name.load("image_lists", path=str(path), **options)


def read(path, **options):
    """Lists alone: of their images none need be there."""
    return load(path, **options, on_corrupt="skip")


def write(path, **lists):
    for name, text in lists.items():
        data = text if isinstance(text, bytes) else text.encode()
        (path / f"{name}.txt").write_bytes(data)
    return {"train": "train.txt", "test": "test.txt" if "test" in lists else None}


def test_domains_labels_files_and_names(root):
    data = load(root, domains=["sketch", "photo"])
    assert data.domain_names == ("sketch", "photo") and data.class_names == NAMES
    assert data.name == root.name and data.decoder in ("cv2", "pillow")
    assert data.validation is None
    for split, examples in (("train", data.train), ("test", data.test)):
        one, two = LISTS[f"sketch_{split}.txt"], LISTS[f"photo_{split}.txt"]
        assert examples.label.tolist() == one + two
        assert examples.domain.tolist() == [0] * len(one) + [1] * len(two)
        assert examples.label.dtype == examples.domain.dtype == np.int32
        for row, domain in enumerate(examples.domain):
            name = examples.reader.name(row)
            label = NAMES[examples.label[row]]
            want = f"{data.domain_names[domain]}/{label}/{split} "
            assert name.startswith(str(root / want))
            with Image.open(name) as image:
                assert examples.read(row).shape == (image.height, image.width, 3)
                difference = examples.read(row).astype(int) - np.asarray(image)
            assert abs(difference).max() <= 2
    sized = load(root, domains=["photo"], size=8, resident=True, channels=1)
    assert sized.train.images.shape == (6, 8, 8, 1)
    assert sized.test.images.shape == (3, 8, 8, 1)


def test_one_domain_of_several_keeps_its_labels(root, tmp_path):
    both = load(root, domains=["photo", "sketch"])
    one = load(root, domains=["sketch"], test="")
    assert one.train.label.tolist() == both.train.label[both.train.domain == 1].tolist()
    assert one.test is None and one.domain_names == ("sketch",)
    photo = load(root, domains=("photo",), test=None)
    assert photo.test is None and photo.class_names == ("apple", "1", "plum")
    file = tmp_path / "names.txt"
    file.write_text("a\nb\nc\nd\n")
    named = load(root, domains=["photo"], class_names=str(file))
    assert named.class_names == ("a", "b", "c", "d")
    assert named.train.label.tolist() == LISTS["photo_train.txt"]


def test_the_domain_scenario_streams_through_a_config(root):
    data = {"name": "image_lists", "path": str(root), "domains": ("sketch", "photo")}
    scenario = {"name": "domain", "domain_order": ("photo", "sketch")}
    tasks = sections.read_tasks(data, scenario)()
    assert [task.name for task in tasks.tasks] == ["photo", "sketch"]
    assert [task.classes.tolist() for task in tasks.tasks] == [[0, 2], [0, 1, 2]]
    for index, task in enumerate(tasks.tasks):
        name = task.name
        assert tasks.evaluation.label[task.test].tolist() == LISTS[f"{name}_test.txt"]
        count, seen = len(LISTS[f"{name}_train.txt"]), []
        batches = prefetch.batches(
            task.train,
            seed=0,
            task=index,
            epochs=2,
            batch_size=3,
            workers=0,
            crop=crops.RandomCrop(8),
            views=2,
            resident=False,
        )
        for batch in batches:
            assert batch["image"].shape == (3, 2, 8, 8, 3)
            want = colour(index, batch["label"])[:, None, None, None, None]
            assert abs(batch["image"].astype(int) - want).max() <= 2
            seen += batch["index"].tolist()
        assert len(seen) == 2 * (count // 3 * 3)
        # Numbers follow `domains`, tasks follow `domain_order`.
        assert (tasks.dataset.train.domain[seen] == 1 - index).all()
    with pytest.raises(ValueError, match=r"config\.data\.domain"):
        sections.read_tasks({**data, "domain": "photo"}, scenario)


def test_one_train_and_one_test_list_elsewhere(root, tmp_path):
    options = write(
        tmp_path,
        # A mark of utf-8, tabs, Windows ends, blank lines, spaces around, zeros.
        train=b"\xef\xbb\xbfphoto/apple/train 0.jpg\t0\r\n\r\n  photo/plum/train 1.jpg"
        b"   002  \r\n   \nphoto/plum/train 2.jpg 2",
        test="sketch/big pear/test 0.jpg 1\n",
    )
    data = load(root, **options, lists=str(tmp_path))
    assert data.domain_names == ("all",)
    assert data.train.label.tolist() == [0, 2, 2] and data.test.label.tolist() == [1]
    assert data.class_names == ("apple", "1", "plum")  # 1 is not in train
    shapes = [data.train.read(row).shape for row in range(3)]
    assert shapes == [(20, 30, 3), (21, 29, 3), (22, 28, 3)]
    assert data.test.reader.name(0) == str(root / "sketch/big pear/test 0.jpg")
    held = load(root, domains=["photo", "sketch"], validation=0.4, seed=1)
    kinds = list(zip(held.validation.label, held.validation.domain, strict=True))
    assert sorted(kinds) == [(0, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert len(held.train.label) == 13 - 5


@pytest.mark.parametrize(
    "line",
    ["a.jpg", "7", "a.jpg -1", "a.jpg 1.0", "a.jpg x", "a.jpg ١", "a.jpg 1000000"],
)
def test_lines_that_are_none(tmp_path, line):
    options = write(tmp_path, train="a.jpg 0\n\n" + line + "\nb.jpg\n")
    with pytest.raises(ValueError, match=r"train\.txt, line 3: '.*0 to 999999"):
        load(tmp_path, **options)
    assert read(tmp_path, **write(tmp_path, train="a.jpg 42")).train.label == [42]
    (tmp_path / "names").write_text("a\nb\n")
    write(tmp_path, train="a.jpg 1\na.jpg 2")
    with pytest.raises(ValueError, match=r"line 2: 'a\.jpg 2'.*0 to 1"):
        load(tmp_path, **options, class_names=str(tmp_path / "names"))


def test_missing_images_are_errors_at_once_or_replaced(root, tmp_path):
    lines = "photo/apple/none.jpg 0\nphoto/apple/train 0.jpg 0\n"
    options = write(tmp_path, train=lines) | {"lists": str(tmp_path)}
    with pytest.raises(ValueError, match=r"train: 1 of 2 images .*apple/none\.jpg"):
        load(root, **options)
    data = read(root, **options)
    with pytest.warns(UserWarning, match="none.jpg.*used .*train 0.jpg in its place"):
        assert data.train.read(0).shape == (20, 30, 3)
    assert stream.count_rows(data.train) == 2
    # An image that goes later is an error when it is read.
    late = tmp_path / "late" / "1.jpg"
    late.parent.mkdir()
    Image.new("RGB", (9, 7)).save(late)
    options = write(tmp_path, train="late/1.jpg 0\nlate/1.jpg 0")
    data = load(tmp_path, **options)
    late.unlink()
    with pytest.raises(decode.Unreadable, match="late/1.jpg"):
        data.train.read(0)
    assert read(tmp_path, **options).train.label.tolist() == [0, 0]


def test_every_missing_image_of_every_list_is_counted(root, tmp_path):
    there = "photo/apple/train 0.jpg 0\nsketch/apple/train 1.jpg 0\n"
    gone = "\n".join(["gone/1.jpg 0", "photo/apple 0", "photo/apple/2/3.jpg 0"])
    names = "test.txt", "train.txt", "validation_list.txt"
    for field in ("train", "validation_list", "test"):
        write(tmp_path, train=there, validation_list=there, test=there)
        options = dict(zip(("test", "train", "validation_list"), names, strict=True))
        options |= {"lists": str(tmp_path)}
        assert load(root, **options).validation.label.tolist() == [0, 0]
        write(tmp_path, **{field: there + gone})
        with pytest.raises(ValueError, match=rf"^{field}: 2 of 5 images.*gone/1.*2/3"):
            load(root, **options)


@pytest.mark.parametrize("name", ["../a.jpg", "/a.jpg", "x/../../a.jpg", ".."])
def test_paths_that_lead_out(tmp_path, name):
    (tmp_path / "in").mkdir()
    Image.new("RGB", (9, 7)).save(tmp_path / "a.jpg")
    options = write(tmp_path, train=f"a.jpg 0\n{name} 1") | {"lists": str(tmp_path)}
    with pytest.raises(ValueError, match=r"train\.txt, line 2"):
        read(tmp_path / "in", **options)


WNIDS = ("n01440764", "n01443537", "n03888257")


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Folders as ImageNet-1k's, and lists as ImageNet-LT's, not sorted by label."""
    path = tmp_path_factory.mktemp("imagenet")
    lists = {"train": [], "val": [], "test": []}
    for label, (wnid, count) in enumerate(zip(WNIDS, (4, 2, 1), strict=True)):
        files = [f"train/{wnid}/{wnid}_{i}.JPEG" for i in range(6)]
        files += [f"val/{wnid}/ILSVRC2012_val_0000000{label}.JPEG"]
        for i, file in enumerate(files):
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (10 + i, 12), 30 * label + i).save(path / file)
        parts = files[:count], files[5:6], files[6:]
        for split, chosen in zip(lists, parts, strict=True):
            lists[split] = [f"{x} {label}\n" for x in chosen] + lists[split]
    (path / "lt").mkdir()
    for split, lines in lists.items():
        (path / "lt" / f"ImageNet_LT_{split}.txt").write_text("".join(lines))
    return path


def long_tailed(path, **options):
    lists = {"train": "train", "validation_list": "val", "test": "test"}
    lists = {key: f"ImageNet_LT_{name}.txt" for key, name in lists.items()}
    return load(path, **lists, lists=str(path / "lt"), **options)


def test_imagenet_lt_has_the_classes_of_the_folders(imagenet):
    data = long_tailed(imagenet, size=8, resident=True)
    whole = by_name.load("image_folder", path=str(imagenet))
    assert data.class_names == whole.class_names == WNIDS
    assert data.train.label.tolist() == [2, 1, 1, 0, 0, 0, 0]
    for examples in (data.validation, data.test):
        assert np.bincount(examples.label).tolist() == [1, 1, 1]
        assert examples.images.shape == (3, 8, 8, 3)
    # The same label for the same file.
    lines = (imagenet / "lt" / "ImageNet_LT_train.txt").read_text().split("\n")[:-1]
    rows = {whole.train.reader.name(row): row for row in range(18)}
    found = [rows[str(imagenet / line.split()[0])] for line in lines]
    assert whole.train.label[found].tolist() == data.train.label.tolist()
    values = [60, 30, 31, 0, 1, 2, 3]  # grey levels, as drawn above
    assert abs(data.train.images[:, 4, 4, 0].astype(int) - values).max() <= 1
