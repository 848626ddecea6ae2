"""How images and the state lie in programs; CPUs stand in for GPUs and TPUs."""

import contextlib

import numpy as np
import pytest

from helpers import run_directories
from jaxcl import sharding
from jaxcl.run import job

GROWTH = {"scenario": {"name": "growth", "growth": 0.5}}


@pytest.mark.parametrize(
    "platform, changes",
    [
        ("cpu", {}),
        ("tpu", {}),
        ("cpu", {"method.online_head": True}),
        ("cpu", {"method": {"name": "icl"}, **GROWTH}),
    ],
    ids=["cpu", "tpu", "labelled", "side by side"],
)
def test_a_step_gets_the_images_of_its_rows_which_lie_flat(platform, changes, tmp_path):
    """A TPU would copy all of [N, H, W, C] before it gathers rows."""
    with sharding.compile_target(platform=platform):
        work = run_directories.untried(tmp_path, **changes)
        train, task = work.stream.dataset.train, work.stream.tasks[1]
        images = job.resident(work)["image"]
        method = work.method._replace(step=lambda state, batch: (state, batch))
        source = work.method.source(job.initial_state(work), task)
        with contextlib.closing(job.feed_batches(work, source, 1, 0)) as feed:
            _, batches, number = next(feed)
        step = job.compile_step(work._replace(method=method))
        _, batch = step(job.initial_state(work), job.resident(work), batches, number)
    assert images.shape == (len(train.images), {"cpu": 64, "tpu": 128}[platform])
    while batch:
        rows = np.asarray(batch["index"])
        assert len(set(rows.ravel())) > 10
        np.testing.assert_array_equal(batch["image"], train.images[rows])
        np.testing.assert_array_equal(batch["label"], train.label[rows])
        batch = batch.get("labelled")
