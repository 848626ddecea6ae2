"""Run directories and data in a bucket, through etils, gcsfs and TensorStore.

The bucket is `fake_gcs`'s, on loopback; the clients are the real ones.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from helpers import toy

# Asked when gcsfs is imported: no look for zonal buckets, of which there are none.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
pytest.importorskip("gcsfs", reason="gs:// needs gcsfs: pip install -e '.[gcs]'")

from etils import epath  # noqa: E402

from helpers import fake_gcs  # noqa: E402
from jaxcl import storage
from jaxcl.config import build
from jaxcl.data.sources import arrays, by_name, convert, folders, shards
from jaxcl.run import finish, lock, result_file, train, transfer  # noqa: E402

RUN = {
    "scenario.num_tasks": 10,
    "epochs": 1,
    "save_every": 4,
    "evaluators": {"knn": {"k": 5}},
    "plots": True,
    "first_tasks": 2,
}


@pytest.fixture(scope="module")
def server():
    with fake_gcs.serve("bucket") as found:
        yield found


def leaves(workdir):
    return toy.leaves(toy.saved(build.build(toy.config(**RUN), workdir), workdir).state)


def test_a_run_in_a_bucket_is_stopped_and_goes_on(server, tmp_path):
    workdir, asked = "gs://bucket/runs/a", []

    def stop():
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(train.Interrupted):
        finish.run_job(build.build(toy.config(**RUN), workdir), workdir, stop=stop)
    half = len(toy.untimed_rows(workdir))
    assert 0 < half
    finish.run_job(build.build(toy.config(**RUN), workdir), workdir)
    local = tmp_path / "a"
    finish.run_job(build.build(toy.config(**RUN), local), local)
    assert half < len(toy.untimed_rows(workdir)) and toy.untimed_rows(
        workdir
    ) == toy.untimed_rows(local)
    found = [result_file.read_results(x)["matrices"] for x in (workdir, local)]
    assert found[0] == found[1]
    path = epath.Path(workdir)
    same = [leaves(path), leaves(local)]
    assert all(map(np.array_equal, *same))
    names = {name.split("/")[2] for _, name in server.objects if "runs/a/" in name}
    files = {"config.json", "resolved.json", "metrics.jsonl", "data.npz"}
    assert names == files | {"results.json", "checkpoints", "plots"}
    # Whoever goes on from it, judges or exports it reads it there.
    assert transfer.config_of(workdir)["name"] == "toy"
    with pytest.raises(ValueError, match=r"config\.batch_size"):
        build.build(toy.config(**RUN, batch_size=24), workdir)


def image(value):
    return np.full((4, 4, 3), value, np.uint8)


@pytest.fixture(scope="module")
def data(server, tmp_path_factory):
    """The same sets on a disk and in the bucket."""
    root = tmp_path_factory.mktemp("data")
    pixels = np.stack([image(10 * i) for i in range(6)])
    np.savez(root / "set.npz", train_x=pixels, train_y=np.arange(6, dtype=np.int32))
    for i in range(12):
        folder = root / "folder" / "train" / f"class {i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image(i)).save(folder / f"{i}.png")
    convert.write_arrays(arrays.npz(path=str(root / "set.npz")), str(root / "arrays"))
    data = folders.image_folder(path=str(root / "folder"), test=0.0)
    shards.write_shards(data, str(root / "shards"))
    shards.write_shards(data, "gs://bucket/data/written", shard_bytes=300)
    for path in root.rglob("*"):
        if path.is_file():
            name = f"gs://bucket/data/{path.relative_to(root)}"
            epath.Path(name).write_bytes(path.read_bytes())
    return str(root), "gs://bucket/data"


def same(a, b):
    for name in ("class_names", "name"):
        assert getattr(a, name) == getattr(b, name)
    np.testing.assert_array_equal(a.train.label, b.train.label)
    images = [
        np.stack([x.train.read(i) for i in range(len(x.train.label))]) for x in (a, b)
    ]
    np.testing.assert_array_equal(*images)


def test_sets_in_a_bucket_are_those_on_a_disk(data):
    for name, path in (("npz", "set.npz"), ("arrays", "arrays"), ("shards", "shards")):
        same(*(by_name.load(name, path=f"{root}/{path}") for root in data))
    for resident in (False, True):
        found = [
            folders.image_folder(path=f"{root}/folder", resident=resident, test=0.0)
            for root in data
        ]
        same(*found)
    assert len(found[0].class_names) == 2
    written = by_name.load("shards", path=f"{data[1]}/written", test=0.0)
    same(written._replace(name="folder"), found[0])
    there = folders.image_folder(path=f"{data[1]}/folder")
    assert there.train.reader.name(0).startswith("gs://bucket/data/folder/train/class")


def test_what_a_bucket_cannot_do_is_said(data):
    with pytest.raises(ValueError, match=r"gs://"):
        arrays.arrays(path=f"{data[1]}/arrays", resident=False)
    with pytest.raises(ValueError, match=r"gs://bucket/data/no\.npz"):
        arrays.npz(path=f"{data[1]}/no.npz")
    with pytest.raises(ValueError, match=r"gs://bucket/none"):
        folders.image_folder(path="gs://bucket/none")
    assert storage.exists(f"{data[1]}/set.npz") and not storage.exists("gs://bucket/x")


def test_a_bucket_has_one_owner_by_the_condition_that_there_is_none(
    server, monkeypatch, caplog
):
    monkeypatch.setattr(lock, "_PATIENCE", 0.01)
    run, key = "gs://bucket/locked", ("bucket", "locked/lock.json")
    with lock.hold_lock(run):
        owner = json.loads(server.objects[key][1])
        assert owner["pid"] == os.getpid()
        created = [path for kind, path in server.requests if kind == "POST"]
        assert "ifGenerationMatch=0" in created[-1]
        held = lock._locks.pop(run)  # as another process sees it
        with pytest.raises(lock.LockHeldError, match=f"{os.getpid()}"):
            lock.acquire(run)
        lock._locks[run] = held
    assert key not in server.objects
    server.objects[key] = (1, json.dumps(owner | {"pid": 1 << 30}).encode())
    taken = lock.acquire(run)
    assert f"{1 << 30}" in caplog.text
    assert json.loads(server.objects[key][1])["pid"] == os.getpid()
    taken.release()
    assert key not in server.objects
    elsewhere = owner | {"host": "elsewhere", "boot": "another"}
    server.objects[key] = (1, json.dumps(elsewhere).encode())
    with pytest.raises(lock.LockHeldError, match="gs://bucket/locked/lock.json"):
        lock.acquire(run)
    assert json.loads(server.objects[key][1]) == elsewhere


READER = """
import hashlib, sys, time
import numpy as np
from jaxcl.data import stream
from jaxcl.data.feed import prefetch
from jaxcl.data.images import crops
from jaxcl.data.sources import by_name

index, count, start, pause = map(int, sys.argv[1:])
train = by_name.load("shards", path="gs://bucket/data/written", test=0.0).train
made = prefetch.batches(
    stream.Source(train, np.arange(len(train.label))),
    **{"seed": 1, "task": 0, "epochs": 4, "batch_size": 4, "start": start},
    **{"process_index": index, "process_count": count},
    **{"crop": crops.RandomCrop(8), "views": 2, "resident": False},
)
for step, batch in enumerate(made, start):
    for row, image in zip(batch["index"], batch["image"]):
        print(step, row, hashlib.sha256(image).hexdigest(), flush=True)
    time.sleep(pause)
"""


def start_reader(*numbers):
    words = [sys.executable, "-c", READER, *map(str, numbers)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_one_process_goes_on_where_two_were_killed(data):
    with start_reader(0, 1, 0, 0) as alone:
        want = alone.stdout.read().splitlines()
    assert len(want) == 12 * 4
    lines = []
    with start_reader(0, 2, 0, 9) as one, start_reader(1, 2, 0, 9) as two:
        for process in (one, two):
            lines += [process.stdout.readline().strip() for _ in range(2)]
        one.kill()
        two.kill()
    assert lines == want[:4]  # the first step, half a batch from each
    with start_reader(0, 1, 1, 0) as alone:
        assert alone.stdout.read().splitlines() == want[4:]
