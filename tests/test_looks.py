"""Permuted and rotated streams: every image in every look, pixel by pixel."""

import numpy as np
import PIL.Image
import pytest

from jaxcl.data import stream
from jaxcl.data.stream import looks, scenarios


def numbered(side=6, channels=1, count=4):
    """A set whose pixels all differ within an image."""
    size = side * side * channels
    pixels = [np.random.default_rng(i).permutation(size) for i in range(2 * count)]
    images = np.uint8(1 + np.array(pixels)).reshape(-1, side, side, channels)
    label = np.arange(2 * count, dtype=np.int32) % 2
    domain = np.zeros(2 * count, np.int32)
    splits = [
        stream.Examples(label[part], domain[part], images[part])
        for part in (slice(0, count), slice(count, None))
    ]
    train, test = splits
    return stream.Dataset("numbered", ("a", "b"), ("all",), train, None, test)


@pytest.mark.parametrize("look", ["permuted", "rotated"])
def test_a_look_is_a_task_of_all_images_changed_alike(look):
    data = numbered()
    cut = scenarios.make(data, name=look, num_tasks=3, seed=5)
    assert [task.domain for task in cut.tasks] == [0, 1, 2]
    assert len(set(cut.dataset.domain_names)) == 3
    train, test = cut.dataset.train, cut.dataset.test
    for number, task in enumerate(cut.tasks):
        rng = np.random.default_rng([5, number])
        if look == "permuted":
            order = rng.permutation(36)

            def changed(image, order=order):
                flat = image.ravel()
                return np.array([flat[source] for source in order]).reshape(6, 6)
        else:
            angle = rng.uniform(0, 180)

            def changed(image, angle=angle):
                return np.asarray(PIL.Image.fromarray(image[..., 0]).rotate(angle))

        for changes, original, rows in (
            (train, data.train, task.train.rows),
            (test, data.test, task.test),
        ):
            np.testing.assert_array_equal(rows, np.arange(4) + 4 * number)
            np.testing.assert_array_equal(changes.label[rows], original.label)
            assert (changes.domain[rows] == number).all()
            for row, image in zip(rows, original.images, strict=True):
                np.testing.assert_array_equal(
                    changes.images[row, ..., 0], changed(image)
                )


@pytest.mark.parametrize("side", [5, 8, 28])
def test_turned_pixels_are_pillows(side):
    image = np.arange(1, side * side + 1, dtype=np.int32).reshape(side, side)
    for angle in (0, 37.3, 90, 121.7, 179.2):
        source = looks.rotate_pixels(side, angle)
        found = np.where(source < 0, 0, image.ravel()[source]).reshape(side, side)
        expected = np.asarray(PIL.Image.fromarray(image).rotate(angle))
        assert (found != expected).mean() < 0.005, angle  # ties of rounding
    np.testing.assert_array_equal(
        image.ravel()[looks.rotate_pixels(side, 90)].reshape(side, side),
        np.rot90(image),
    )


def test_all_channels_of_a_pixel_stay_together():
    data = numbered(side=4, channels=3)
    made = looks.as_domains(data, "permuted", 2, 0)
    order = np.random.default_rng([0, 1]).permutation(16)
    expected = data.train.images.reshape(4, 16, 3)[:, order].reshape(4, 4, 4, 3)
    np.testing.assert_array_equal(made.train.images[4:], expected)


def test_looks_follow_the_run_unless_they_have_a_seed():
    for name in ("permuted", "rotated"):
        assert scenarios.run_seed({"name": name}, 3) == {"seed": 3}
        assert scenarios.run_seed({"name": name, "seed": 1}, 3) == {}
    ordered = {"name": "class", "class_order": "released"}
    assert scenarios.run_seed(ordered, 3) == {"seed": 3}
    assert scenarios.run_seed({"name": "class"}, 3) == {}
    one, other = (
        looks.as_domains(numbered(), "permuted", 2, s).train.images for s in (0, 1)
    )
    assert (one != other).any()
