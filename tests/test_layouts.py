"""How images and the state lie in programs; CPUs stand in for GPUs and TPUs."""

import contextlib

import jax
import numpy as np
import pytest

from helpers import toy
from jaxcl import sharding
from jaxcl.run import checkpoint, job, train

GPU = (3, 0, 1, 2)  # as its library takes kernels
CHANGES = {
    "method.base": "mocov2plus",
    "method.strategy": "pnr",
    "optimizer": {"name": "lars", "lr": 0.3},
    "save_every": 1,
}
GROWTH = {"scenario": {"name": "growth", "growth": 0.5}}


def layouts(state):
    """Name of each kernel of a convolution -> its layout; nothing else has a choice."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if leaf.ndim < 2:
            continue
        layout = leaf.format.layout.major_to_minor
        if "kernel" in str(path[-1]) and leaf.ndim == 4:
            found[jax.tree_util.keystr(path)] = layout
        else:
            assert layout == tuple(range(leaf.ndim))
    return found


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
    where = contextlib.nullcontext()
    if platform != "cpu":
        where = sharding.for_elsewhere(platform=platform)
    with where:
        work = toy.job(tmp_path, **changes)
        train, task = work.stream.dataset.train, work.stream.tasks[1]
        images = job.resident(work)["image"]
        method = work.method._replace(step=lambda state, batch: (state, batch))
        source = work.method.source(job.initial_state(work), task)
        with contextlib.closing(job.feed(work, source, 1, 0)) as feed:
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


def test_kernels_lie_as_a_gpu_takes_them_and_files_have_them_as_usual(tmp_path):
    usual = toy.job(tmp_path / "usual", **CHANGES)
    plain = job.initial_state(usual)
    assert set(layouts(plain).values()) == {(0, 1, 2, 3)}
    with sharding.for_elsewhere(platform="gpu"):
        work = toy.job(tmp_path / "gpu", **CHANGES)
        state = job.initial_state(work)
        begun = job.begin(work, state, work.stream.tasks[0])
        step = job.compile_step(work)
        after, _ = step(begun, *toy.first_call(work))
        again, _ = step(after, *toy.first_call(work))
        assert step._cache_size() == 1
        given = sharding.usual(again)
        settled = sharding.settle(given, work.mesh)
        with contextlib.closing(checkpoint.Checkpoints(tmp_path / "saved")) as there:
            there.save(1, again, {})
    # Parameters, their momentum, the slow copy and the teacher.
    names = layouts(state)
    assert len(names) == 4 * 3 and set(names.values()) == {GPU}
    assert all(x.is_deleted() for x in jax.tree.leaves(begun.params))  # written over
    assert layouts(again) == layouts(settled) == names
    assert set(layouts(given).values()) == {(0, 1, 2, 3)}
    with contextlib.closing(checkpoint.Checkpoints(tmp_path / "saved")) as there:
        restored = there.restore(plain).state
    assert set(layouts(restored).values()) == {(0, 1, 2, 3)}
    np.testing.assert_array_equal(
        checkpoint.checksum(restored), checkpoint.checksum(again)
    )


def test_a_run_for_gpus_resumes_bit_for_bit(tmp_path):
    with sharding.for_elsewhere(platform="gpu"):
        work = toy.job(tmp_path / "config", tasks=2, **CHANGES)
        step, calls = job.compile_step(work), []

        def counted(*arguments):
            calls.append(len(calls))
            return step(*arguments)

        def stop():  # in the second task
            return len(calls) == whole + whole // 2 + 1

        train.run(work, tmp_path / "whole", step=counted)
        whole = len(calls)
        with pytest.raises(train.Interrupted):
            train.run(work, tmp_path / "parts", step=counted, stop=stop)
        train.run(work, tmp_path / "parts", step=counted)
        assert len(calls) == 2 * whole and step._cache_size() == 1
        ends = [toy.saved(work, tmp_path / x).state for x in ("whole", "parts")]
    sums = [checkpoint.checksum(end) for end in ends]
    np.testing.assert_array_equal(*sums)
