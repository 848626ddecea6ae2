"""config.mesh: weights of a Vision Transformer that are split over devices."""

import contextlib
import itertools
import types

import jax
import numpy as np
import pytest

from helpers import run_directories, toy
from jaxcl import sharding
from jaxcl.config import build
from jaxcl.run import checkpoint, train
from jaxcl.run import job as job_lib

VIT = {"name": "vit", "width": 16, "layers": 2, "heads": 2, "hidden": 32, "patch": 4}
VIT |= {"image_size": 8}
CHANGES = {"encoder": VIT, "method.base": "byol", "method.strategy": "finetune"}
CHANGES["evaluators"] = {"knn": {"k": 5}}
CHANGES["optimizer"] = {"name": "adam", "lr": 1e-3}  # its rate shows every gradient
SIDES = {"data": 4, "model": 2}


def make(workdir, mesh, **changes):
    one = {"devices": 1} if mesh is None else {"devices": None, "mesh": mesh}
    return run_directories.untried(workdir, **CHANGES, **one, **changes)


def begin(work):
    """A state that no training made, where the run keeps it."""
    return sharding.commit_placement(run_directories.random_state(work), work.mesh)


def split(tree):
    """Paths of the leaves that no device has whole."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in leaves
        if not leaf.sharding.is_fully_replicated
    }


def same(one, two):
    # Sums over devices have another order: of six random states two ended 1e-4 apart,
    # and one 2e-4.
    for have, want in zip(toy.leaves(one), toy.leaves(two), strict=True):
        np.testing.assert_allclose(np.asarray(have), np.asarray(want), 3e-4, 3e-5)


@pytest.fixture(scope="module")
def works(tmp_path_factory):
    """The job with whole weights, and the one with split ones."""
    folder = tmp_path_factory.mktemp("mesh")
    return make(folder / "whole", None), make(folder / "split", SIDES)


def test_devices_that_share_rows_are_those_of_one_part_of_the_weights():
    for data, model in ((4, 2), (2, 4), (8, 1)):
        mesh = sharding.mesh(8, model=model)
        sharding.check_batch(3 * data, mesh)
        with pytest.raises(ValueError, match=f"batch_size={data + 1}.*{data} "):
            sharding.check_batch(data + 1, mesh)


def test_a_step_is_that_of_whole_weights(works):
    after = []
    for work in works:
        step, state = job_lib.compile_step(work), begin(work)
        after.append(step(state, *toy.first_call(work)))
    (whole, told), (cut, ours) = after
    same(cut, whole)
    same(ours, told)
    names = split(cut)
    assert split(begin(works[1])) == names
    ends = {"query/kernel", "query/bias", "out/kernel", "fc1/kernel", "fc2/kernel"}
    for tree in ("params", "extra/momentum", "opt_state"):
        own = [name for name in names if name.startswith(tree) and "block_0/" in name]
        for end in ends:
            assert any(name.endswith(end) for name in own), (tree, end)
    kernel = cut.params["encoder"]["block_0"]["mlp"]["fc1"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (16, 16)


def test_weights_are_split_by_name_and_the_rest_is_whole():
    block = {"mlp": {"fc1": {"kernel": np.zeros((8, 32)), "bias": np.zeros(32)}}}
    tree = {"params": {"encoder": {"block_0": block, "norm": {"scale": np.zeros(8)}}}}
    mesh = sharding.mesh(8, model=2)
    places = sharding.placement(tree, mesh)["params"]["encoder"]
    kernel = places["block_0"]["mlp"]["fc1"]["kernel"]
    assert kernel.shard_shape((8, 32)) == (8, 16)
    assert places["norm"]["scale"].shard_shape((8,)) == (8,)
    halves = {  # path -> the axis that is split
        **{f"attention/{x}/kernel": 1 for x in ("query", "key", "value")},
        **{f"attention/{x}/bias": 0 for x in ("query", "key", "value")},
        **{f"mlp/{x}/kernel": 1 for x in ("fc1", "gate", "up")},
        **{f"mlp/{x}/bias": 0 for x in ("fc1", "gate", "up")},
        **{f"{x}/kernel": 0 for x in ("attention/out", "mlp/fc2", "mlp/down")},
        **dict.fromkeys(("mlp/fc2/bias", "attention/out/bias", "patch/kernel")),
    }
    for name, axis in halves.items():
        leaf = np.zeros((8, 8)[: 2 if name.endswith("kernel") else 1])
        place = sharding.placement({"a": {name: leaf}}, mesh)["a"][name]
        want = [4 if axis == i else 8 for i in range(leaf.ndim)]
        assert list(place.shard_shape(leaf.shape)) == want, name
    whole = sharding.placement(tree, sharding.mesh(8))
    assert all(x.is_fully_replicated for x in jax.tree.leaves(whole))


def test_a_checkpoint_goes_on_with_split_and_with_whole_weights(works, tmp_path):
    whole, cut = works
    state = begin(cut)
    run_directories.save(cut, tmp_path, state)
    for work in (cut, whole):
        like = sharding.commit_placement(
            run_directories.random_state(work, seed=1), work.mesh
        )
        made = checkpoint.Checkpoints(tmp_path / "checkpoints")
        with contextlib.closing(made) as kept:
            back = sharding.commit_placement(kept.restore(like).state, work.mesh)
        toy.check_same_bits(back, state)
        assert split(back) == (split(state) if work is cut else set())


def test_a_run_that_is_stopped_goes_on_bitwise(works, tmp_path):
    work = works[1]
    work = toy.change(work, stream=work.stream._replace(tasks=work.stream.tasks[:1]))
    step, asked = job_lib.compile_step(work), itertools.count()
    results = train.run_tasks(work, tmp_path / "whole", step=step)
    with pytest.raises(train.Interrupted, match="step 3"):
        train.run_tasks(
            work, tmp_path / "cut", step=step, stop=lambda: next(asked) == 3
        )
    again = train.run_tasks(work, tmp_path / "cut", step=step)
    ends = [toy.saved(work, tmp_path / name).state for name in ("whole", "cut")]
    toy.check_same_bits(*ends)
    assert again["matrices"] == results["matrices"]
    assert split(sharding.commit_placement(ends[1], work.mesh))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"mesh": {"data": 2, "model": 3}}, "model=3.*heads=2"),
        ({"mesh": {"data": 8, "model": 2}}, "config.mesh.*16"),
        ({"mesh": {"data": 4, "rows": 2}}, "rows"),
        ({"mesh": {"data": 4}, "devices": 4}, "devices=4"),
        ({"mesh": SIDES, "encoder": {"name": "conv_net"}}, "'conv_net'"),
        ({"mesh": SIDES, "batch_size": 6}, "batch_size=6"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(changes, told, tmp_path):
    config = toy.config(**{**CHANGES, "devices": None, **changes})
    with pytest.raises(ValueError, match=told):
        build.build(config, tmp_path)


@pytest.mark.parametrize(
    ("platform", "capability", "multiplies", "cudnn"),
    [
        ("cpu", "", True, False),  # stands in for any chip
        ("tpu", "", True, False),
        ("cuda", "7.5", False, False),
        ("cuda", "8.0", True, True),
        ("rocm", "gfx90a", True, False),
    ],
)
def test_what_a_chip_can_do(platform, capability, multiplies, cudnn):
    chip = types.SimpleNamespace(platform=platform, compute_capability=capability)
    calls = []
    program = sharding.traced_once(lambda x: calls.append(sharding.platform()) or x)

    def trace():
        jax.eval_shape(lambda x: program(x), np.zeros(1))

    with sharding.compile_target((chip,)):
        assert sharding.multiplies_bfloat16() == multiplies
        assert sharding.has_cudnn_attention() == cudnn
        trace()
    trace()  # for this machine anew, and once
    trace()
    names = {"cuda": "gpu", "rocm": "gpu", "cpu": "any"}
    assert calls == [names.get(platform, platform), "cpu"]
    assert not sharding.multiplies_bfloat16() and not sharding.has_cudnn_attention()


def test_processes_have_as_many_devices_each(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    devices = [types.SimpleNamespace(process_index=i // 3, id=i) for i in range(6)]
    for count, want in ((2, [0, 3]), (4, [0, 1, 3, 4]), (6, [0, 1, 2, 3, 4, 5])):
        chosen = sharding._share_devices(devices, count)
        assert [device.id for device in chosen] == want
    with pytest.raises(ValueError, match="config.devices=3: .*of 2.*devices=4"):
        sharding._share_devices(devices, 3)


def test_rows_are_shared_evenly_and_in_order():
    mesh, rows = sharding.mesh(8), np.arange(48).reshape(3, 16)
    with pytest.raises(ValueError, match="batch_size=12: .* 8 or 16;"):
        sharding.check_batch(12, mesh)
    for wrong in (0, 12):
        with pytest.raises(ValueError, match=f"slots={wrong}"):
            sharding.per_device("slots", wrong, mesh)
    assert sharding.per_device("slots", 16, mesh) == 2
    split = sharding.shard_rows(rows, mesh, axis=1)
    shards = [np.asarray(x.data) for x in split.addressable_shards]
    np.testing.assert_array_equal(np.concatenate(shards, axis=1), rows)
    assert split.sharding.spec == jax.P(None, "data")

    def first(x, y):  # of each device's rows
        return jax.numpy.full_like(x, x[0, 0]) + y

    columns = rows.T
    with sharding.use_mesh(mesh):
        found = jax.jit(lambda x: sharding.map_per_device(first, (x,), (1,)))(columns)
        kept = jax.jit(sharding.shard_rows_in_jit)((columns, np.ones((12, 2))))
        with sharding.on_host():
            alike = jax.jit(lambda x: sharding.map_per_device(first, (x,), (1,)))(
                columns
            )
    want = np.repeat(columns[::2, :1], 2, axis=0) + 1 + np.zeros((16, 3), int)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(alike, want)
    assert kept[0].sharding.shard_shape((16, 3)) == (2, 3)
    assert kept[1].is_fully_replicated


def test_the_peak_is_that_of_the_fullest_device():
    def device(peak):
        return types.SimpleNamespace(
            device_kind="abacus", memory_stats=lambda: {"peak_bytes_in_use": peak}
        )

    row = [device(3), device(7), device(5)]
    mesh = types.SimpleNamespace(local_devices=row, devices=np.array(row), size=3)
    assert sharding.describe(mesh)["peak_bytes"] == 7
