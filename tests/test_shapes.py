"""The drawn set `shapes`: the same bits everywhere, every class in every domain."""

import hashlib

import numpy as np
import pytest

from jaxcl import cli
from jaxcl.data.sources import by_name, shapes

SMALL = {"train": 20, "test": 10, "size": 16}
# Of the small draw, taken once on x86-64.
SHA256 = "4286605401a76e8115c77a27510bf89444932b2ab0b4660ccbc7f8fc1cef7913"


@pytest.fixture(scope="module")
def small():
    return shapes.shapes(**SMALL)


def digest(data):
    """One sum of all pixels, labels and domains."""
    found = hashlib.sha256()
    for part in (data.train, data.test):
        for array in (part.images, part.label, part.domain):
            found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def test_a_draw_has_the_same_bits_on_every_machine(small):
    assert digest(small) == SHA256


def test_a_seed_draws_another_set_and_a_domain_does_not_depend_on_the_others(small):
    assert digest(shapes.shapes(**SMALL, draw_seed=1)) != SHA256
    alone = shapes.shapes(**SMALL, domains=("busy",)).train.images
    number = small.domain_names.index("busy")
    np.testing.assert_array_equal(
        alone, small.train.images[small.train.domain == number]
    )


def test_every_class_is_in_every_domain_and_split(small):
    assert small.class_names == shapes.CLASSES and len(shapes.CLASSES) == 10
    assert small.domain_names == shapes.DOMAINS
    for part, each in ((small.train, 2), (small.test, 1)):
        assert part.images.shape == (40 * each, 16, 16, 3)
        for domain in range(4):
            counts = np.bincount(part.label[part.domain == domain], minlength=10)
            assert (counts == each).all()
    train = {image.tobytes() for image in small.train.images}
    assert len(train) == 80  # no image twice, none of the test images among them
    assert not train & {image.tobytes() for image in small.test.images}


@pytest.mark.parametrize("kind", shapes.CLASSES)
def test_a_silhouette_lies_within_its_image_and_has_a_common_area(kind):
    areas = []
    for polygon in shapes.SILHOUETTES[kind]:
        x, y = np.array(polygon).T
        assert np.hypot(x, y).max() < 1.5
        areas.append(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)
    assert 1.2 < sum(areas) < 2.8  # size must not tell the class


def test_written_folders_are_read_back(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shapes, "shapes", lambda: small)
    out = tmp_path / "shapes"
    assert cli.main(["data", "shapes", f"--out={out}"]) == 0
    assert f"own_images:{out}/plain" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == set(shapes.DOMAINS)
    for number, domain in enumerate(shapes.DOMAINS):
        read = by_name.load("image_folder", path=str(out / domain), resident=True)
        assert set(read.class_names) == set(shapes.CLASSES)
        for part, drawn in ((read.train, small.train), (read.test, small.test)):
            images = {
                (read.class_names[label], image.tobytes())
                for label, image in zip(part.label, part.images, strict=True)
            }
            rows = np.flatnonzero(drawn.domain == number)
            assert images == {
                (shapes.CLASSES[drawn.label[row]], drawn.images[row].tobytes())
                for row in rows
            }
    assert cli.main(["data", "shapes", f"--out={out}"]) == 2  # it is not empty
    assert cli.main(["data", "shapes", f"--out={tmp_path}/b", f"--from={out}"]) == 2
    assert not (tmp_path / "b").exists()
