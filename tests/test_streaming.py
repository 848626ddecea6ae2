"""Sets that do not live on the device, and the other scenarios, end to end."""

import shutil

import numpy as np
import pytest
from PIL import Image

from helpers import toy
from jaxcl.data.images import decode
from jaxcl.data.sources import shared
from jaxcl.run import job, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four classes of noisy colour, images of several sizes, two a domain."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 6)):
        for label in range(4):
            there = root / split / f"class{label}"
            there.mkdir(parents=True)
            for i in range(count):
                shape = (10 + i % 3, 12 + label, 3)
                colour = np.eye(4, 3)[label] * 150
                pixels = rng.integers(0, 100, shape) + colour
                Image.fromarray(pixels.astype(np.uint8)).save(there / f"{i}.png")
    return root


def config(folder, **changes):
    return {
        "data": {"name": "image_folder", "path": str(folder)},
        "scenario": {"name": "class", "num_tasks": 2},
        "augment.mean": (0.4, 0.4, 0.4),
        "augment.std": (0.3, 0.3, 0.3),
        "augment.jitter": (0.2, 0.2, 0.1, 0.05),
        "batch_size": 16,
        "method.queue_size": 32,
        "method.strategy": "pnr",
        **changes,
    }


def ends(workdir, **changes):
    work = toy.job(workdir, **changes)
    results = train.run_tasks(work, workdir)
    return work, results, toy.saved(work, workdir).state


def test_images_that_stream_train_resume_and_are_judged(folder, tmp_path):
    judges = {
        "linear": {"epochs": 8, "batch_size": 16, "augment": False},
        "knn": {"k": 5},
    }
    changes = config(folder, evaluators=judges)
    work, results, state = ends(tmp_path / "whole", **changes)
    assert not work.data.resident and job.resident(work) == {}
    for name in ("linear/class_incremental", "knn/class_incremental"):
        assert np.mean(results["matrices"][name][1]) > 0.5  # colours; chance is 0.25
    asked = iter([False] * 5 + [True])
    again = toy.job(tmp_path / "parts", **changes)
    with pytest.raises(train.Interrupted):
        train.run_tasks(again, tmp_path / "parts", stop=lambda: next(asked))
    train.run_tasks(again, tmp_path / "parts")
    parts = toy.saved(again, tmp_path / "parts").state
    toy.check_same_bits(parts, state)


@pytest.mark.slow
def test_workers_change_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "KEPT_BYTES", 0)  # every epoch decodes
    one, two = (ends(tmp_path / str(n), **config(folder, workers=n))[2] for n in (1, 3))
    toy.check_same_bits(one, two)


def test_domain_incremental(tmp_path):
    """Two domains of the same classes: the second is the first inverted."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 80).astype(np.int32)
    x = rng.integers(0, 60, (240, 8, 8, 1)) + 60 * y[:, None, None, None]
    domain = (np.arange(240) % 2).astype(np.int32)
    x = np.where(domain[:, None, None, None] == 1, 255 - x, x).astype(np.uint8)
    path = tmp_path / "set.npz"
    np.savez(
        path,
        x=x,
        y=y,
        domain=domain,
        is_test=rng.random(240) < 0.25,
        domain_names=np.array(["plain", "inverted"]),
    )
    judge = {"epochs": 20, "batch_size": 32, "lr": 1.0, "augment": False}
    _, results, _ = ends(
        tmp_path / "run",
        data={"name": "npz", "path": str(path)},
        scenario={"name": "domain"},
        evaluators={"linear": judge},
        batch_size=40,
        **{"method.queue_size": 80},
    )
    assert results["task_names"] == ["plain", "inverted"]
    rows = np.array(results["matrices"]["linear/domain_aware"])
    assert rows.shape == (2, 2) and (rows > 0.5).all()


def test_a_corrupt_image_is_named_or_replaced(folder, tmp_path):
    root = tmp_path / "images"
    shutil.copytree(folder, root)
    bad = root / "train" / "class0" / "3.png"
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(decode.Unreadable, match=r"class0/3\.png"):
        ends(tmp_path / "error", tasks=1, **config(root))
    data = {"name": "image_folder", "path": str(root), "on_corrupt": "skip"}
    with pytest.warns(UserWarning, match=r"class0/3\.png.* in its place"):
        _, _, state = ends(tmp_path / "skip", tasks=1, **config(root, data=data))
    assert int(state.step) == 4
