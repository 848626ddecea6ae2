"""Several sets as one, and a task after those of another run."""

import numpy as np
import pytest
from PIL import Image

from jaxcl.data.sources import arrays, by_name
from jaxcl.data.stream import scenarios
from jaxcl.run import result_file

RNG = np.random.default_rng(0)


def images(n, size=4, channels=3):
    return RNG.integers(0, 255, (n, size, size, channels), np.uint8)


@pytest.fixture
def sets(tmp_path):
    """Two .npz files, their classes named in another order, and a folder."""
    a = {"train_x": images(6), "train_y": np.array([0, 1, 2] * 2, np.int32)}
    a |= {"test_x": images(2), "test_y": np.array([0, 2], np.int32)}
    np.savez(tmp_path / "a.npz", class_names=["cat", "dog", "owl"], **a)
    b = {"train_x": images(4), "train_y": np.array([0, 1, 0, 1], np.int32)}
    np.savez(tmp_path / "b.npz", class_names=["owl", "bee"], **b)
    np.savez(tmp_path / "c.npz", train_x=images(5, size=6))
    (tmp_path / "files").mkdir()
    for i in range(3):
        pixels = np.full((5, 5, 3), 50 * i, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "files" / f"{i}.png")
    return tmp_path, a, b


def section(path):
    name = "npz" if path.suffix == ".npz" else "image_folder"
    return {"name": name, "path": str(path)}


def read(root, *names):
    return by_name.joined(sets=[section(root / name) for name in names])


def test_sets_of_one_shape_stay_in_memory_and_share_classes(sets):
    root, a, b = sets
    data = read(root, "a.npz", "b.npz")
    assert data.class_names == ("cat", "dog", "owl", "bee")
    np.testing.assert_array_equal(
        data.train.images, np.concatenate([a["train_x"], b["train_x"]])
    )
    assert data.train.label.tolist() == [0, 1, 2, 0, 1, 2, 2, 3, 2, 3]
    assert data.train.domain.tolist() == [0] * 6 + [1] * 4
    assert data.domain_names == ("0: a", "1: b")
    np.testing.assert_array_equal(data.test.images, a["test_x"])
    assert data.test.label.tolist() == [0, 2] and data.test.domain.tolist() == [0, 0]
    assert data.name == "b" and data.validation is None


def test_others_are_read_row_by_row(sets):
    root, a, _ = sets
    data = read(root, "a.npz", "files", "c.npz")
    train = data.train
    assert train.images is None and len(train.label) == 6 + 3 + 5
    assert train.label.tolist() == [0, 1, 2] * 2 + [-1] * 8
    np.testing.assert_array_equal(train.read(5), a["train_x"][5])
    assert train.read(7).tolist() == np.full((5, 5, 3), 50).tolist()
    assert train.read(13).shape == (6, 6, 3)
    assert "1.png" in train.reader.name(7)
    assert train.reader.name(13).startswith("c ") and "(row 4)" in train.reader.name(13)
    assert data.decoder in ("cv2", "pillow")


def test_images_in_memory_keep_the_names_of_their_files(sets):
    root, *_ = sets
    folder = section(root / "files") | {"resident": True, "size": 4}
    train = by_name.joined(sets=[section(root / "a.npz"), folder]).train
    assert train.images.shape == (9, 4, 4, 3)
    assert "(row 5)" in train.reader.name(5)
    assert train.reader.name(7) == str(root / "files" / "1.png")


def test_the_next_task_is_the_last_set(sets):
    root, *_ = sets
    data = read(root, "a.npz", "b.npz")
    made = scenarios.make(data, name="after", num_tasks=4, evaluation="none")
    *before, task = made.tasks
    assert [t.index for t in made.tasks] == [0, 1, 2, 3] and task.name == "b"
    assert task.train.rows.tolist() == [6, 7, 8, 9]
    assert task.earlier.tolist() == [0, 1, 2, 3, 4, 5] and len(before) == 3
    alone = scenarios.make(
        arrays.npz(path=str(root / "c.npz")),
        name="after",
        num_tasks=2,
        evaluation="none",
    )
    assert alone.tasks[1].train.rows.tolist() == [0, 1, 2, 3, 4]
    assert len(alone.tasks[1].earlier) == 0
    for wrong in (1, None):
        with pytest.raises(ValueError, match="num_tasks=.*must be 2"):
            scenarios.make(data, name="after", num_tasks=wrong, evaluation="none")


def test_results_of_a_run_make_room_for_another_task():
    found = result_file.empty_results(2, task_names=["a", "b"])
    for task in range(2):
        found = result_file.add_task(
            found, task, {"knn/all": [0.5, 0.5]}, {"x": task}, 3.0
        )
    found["cost"]["total"] = {"steps": 7}
    wide = result_file.make_room(found, ["earlier 1", "earlier 2", "c"])
    assert wide["task_names"] == ["a", "b", "c"] and wide["matrices"] == {}
    assert wide["scalars"] == [{"x": 0}, {"x": 1}, None]
    assert wide["cost"]["total"] == {"steps": 7} and wide["seconds"] == [3.0, 3.0, None]
    assert len(wide["cost"]["per_task"]) == 3 and result_file.count_finished(wide) == 2
    assert result_file.make_room(found, ["x", "y"]) == found
    added = result_file.add_task(wide, 2, {}, {}, 1.0)
    assert result_file.count_finished(added) == 3
