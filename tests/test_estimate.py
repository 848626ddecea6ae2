"""A compiled step: its collectives, FLOPs, bytes, memory and least time."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import PartitionSpec

from helpers import run_directories, toy
from jaxcl import estimate, sharding
from jaxcl.config import build
from jaxcl.data.sources import stand_in
from jaxcl.run import job

DEVICES, AXIS = 8, sharding.AXIS
CHIP = estimate.Chip(("toy",), 100.0, 50.0, 1000.0, 10.0, 4.0, "", island=4, outside=1)


def sent(function):
    """Collectives of a function of 80 rows of 16 numbers, 10 rows a device."""
    mesh, spec = sharding.mesh(DEVICES), PartitionSpec(AXIS)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    rows = jax.ShapeDtypeStruct(
        (80, 16), jnp.float32, sharding=sharding.split_sharding(mesh)
    )
    return estimate.collectives(jax.jit(mapped).lower(rows).compile().as_text())


def sums(x):
    return jnp.broadcast_to(jax.lax.psum(x, AXIS), x.shape)


PAIRS = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
HELD = 10 * 16 * 4  # bytes of a device


@pytest.mark.parametrize(
    "kind, size, function",
    [
        ("all-reduce", HELD, sums),
        ("all-gather", 8 * HELD, lambda x: jax.lax.all_gather(x, AXIS).sum(0)),
        (
            "reduce-scatter",
            4 * 8 * 16,
            lambda x: jax.lax.psum_scatter(x[:8], AXIS, tiled=True),
        ),
        ("all-to-all", 4 * 8 * 16, lambda x: jax.lax.all_to_all(x[:8], AXIS, 0, 0)),
        ("collective-permute", HELD, lambda x: jax.lax.ppermute(x, AXIS, PAIRS)),
    ],
)
def test_collectives_of_a_program_on_eight_devices(kind, size, function):
    assert sent(function) == [estimate.Collective(kind, 8, size, 1, True)]


def test_a_loop_counts_as_often_as_it_turns_and_a_conditional_by_one_branch():
    def turns(count, x):
        return jax.lax.fori_loop(0, count, lambda _, x: sums(jnp.sin(x)) + x, x)

    def either(x):
        large = functools.partial(turns, 2)
        return jax.lax.cond(x[0, 0] > 0, large, lambda x: x, jax.lax.psum(x, AXIS))

    (six,) = sent(lambda x: turns(6, x))
    assert (six.times, six.bytes, six.counted) == (6, HELD, True)
    (unknown,) = sent(lambda x: turns(jnp.int32(9 * x[0, 0]), x))
    assert (unknown.times, unknown.counted) == (1, False)
    assert [message.times for message in sent(either)] == [1, 2]


STARTS = """HloModule m, replica_count=1, num_partitions=8

%first (p: f32[4]) -> f32[32] {
  %p = f32[4]{0:T(8,128)} parameter(0)
  ROOT %a = f32[32]{0} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8], \
frontend_attributes={chain_id="0"}
}

%wrapped (p: f32[8]) -> f32[2] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %r = f32[2]{0} reduce-scatter(%p.1), replica_groups={{0,1,2,3},{4,5,6,7}}
}

ENTRY %main (x: f32[4], y: f32[8]) -> f32[32] {
  %x = f32[4]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %s = (f32[4]{0}, f32[16]{0}) all-gather-start(%x), \
replica_groups=mesh['a'=4,'b'=2] {'a'}
  %s.1 = ((bf16[6], pred[3]), (bf16[6], pred[3])) all-reduce-start(%x), \
replica_groups={}
  %d.1 = (bf16[6]{0}, pred[3]{0}) all-reduce-done(%s.1)
  %d = f32[16]{0:T(128)S(1)} all-gather-done(%s)
  %w = ((f32[8]), f32[2], u32[]) async-start(%y), calls=%wrapped
  %f = f32[32]{0} fusion(%x), kind=kCustom, calls=%first
  %f.1 = f32[32]{0} fusion(%x), kind=kCustom, calls=%first
  %alone = f32[4]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}
  ROOT %still = f32[4]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}
}
"""


def test_collectives_as_compilers_of_chips_write_them():
    found = [message[:3] for message in estimate.collectives(STARTS)]
    assert found == [
        ("all-gather", 4, 64),
        ("all-reduce", 8, 15),
        ("reduce-scatter", 4, 32),
        ("all-gather", 8, 128),
    ]


KERNELS = """HloModule m, num_partitions=1

%update (a: f32[1000], b: f32[10], c: s32[]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %u = f32[1000]{0} dynamic-update-slice(%a, %b, %c)
}

%take (d: f32[1000], e: s32[7,1]) -> f32[7] {
  %d = f32[1000]{0} parameter(0)
  %e = s32[7,1]{1,0} parameter(1)
  ROOT %g = f32[7]{0} gather(%d, %e), slice_sizes={1}
}

ENTRY %main (x: f32[1000], y: f32[10], z: s32[], i: s32[7,1]) -> f32[7] {
  %x = f32[1000]{0} parameter(0)
  %y = f32[10]{0} parameter(1)
  %z = s32[] parameter(2)
  %i = s32[7,1]{1,0} parameter(3)
  %k = f32[10]{0} custom-call(%y, %y), custom_call_target="__cudnn$convForward"
  %l = f32[1000]{0} fusion(%x, %k, %z), kind=kLoop, calls=%update
  ROOT %m = f32[7]{0} fusion(%l, %i), kind=kLoop, calls=%take
}
"""


def test_bytes_that_kernels_move():
    """A queue of which ten rows are written, or seven read, is not moved whole."""
    assert estimate.count_moved_bytes(KERNELS) == 3 * 40 + (40 + 4) + (28 + 28)


@struct.dataclass
class State:
    task: jax.Array
    weight: jax.Array


def of_step(monkeypatch, step, *, chip=CHIP, parted=True):
    """What is read of a step on weights f32[64, 32] and rows f32[128, 64]."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = State(number, jax.ShapeDtypeStruct((64, 32), jnp.float32))
    shapes = shapes, jax.ShapeDtypeStruct((128, 64), jnp.float32)
    monkeypatch.setattr(job, "shapes", lambda *_: shapes)
    mesh = sharding.mesh(DEVICES)
    whole, rows = sharding.replicated(mesh), sharding.split_sharding(mesh)
    work = types.SimpleNamespace(
        method=types.SimpleNamespace(step=step),
        data=None,
        mesh=mesh,
        stream=types.SimpleNamespace(tasks=[types.SimpleNamespace(index=0)]),
        batches_per_step=lambda _: 1,
        config={},
    )
    jitted = jax.jit(step, in_shardings=(whole, rows if parted else whole))
    return estimate.read_program(jitted.lower(*shapes).compile(), work, chip)


def test_flops_of_a_product(monkeypatch):
    product = 2 * 128 * 64 * 32

    def once(state, rows):
        return rows @ state.weight

    def five_times(state, rows):
        def turn(x, _):
            return x @ state.weight @ state.weight.T, None

        return jax.lax.scan(turn, rows, None, length=5)[0]

    shared = of_step(monkeypatch, once)
    assert shared["flops"] == product / 8 and shared["collectives"] == []
    assert shared["least"]["arithmetic"] == product / 8 / 50
    assert shared["memory"]["arguments"] == 4 * (64 * 32 + 128 * 64 / 8)
    assert shared["memory"]["outputs"] == 4 * 128 * 32 / 8
    assert of_step(monkeypatch, once, parted=False)["flops"] == product
    assert of_step(monkeypatch, five_times)["flops"] >= 10 * product / 8
    unknown = of_step(monkeypatch, once, chip=None)
    assert unknown["fits"] is None and unknown["least"] is None


@pytest.mark.parametrize(
    "kind, group, seconds",
    [
        ("all-reduce", 4, 2 * 3 / 4 * 96 / 4),
        ("all-reduce", 32, 2 * 96 / 4 * 7 / 8),  # a quarter each, over 8 islands
        ("all-gather", 4, 3 / 4 * 96 / 4),
        ("all-to-all", 8, 96 * 4 / 8 / 1),
        ("collective-permute", 8, 96),
    ],
)
def test_the_least_time_by_hand(kind, group, seconds):
    twice = estimate.Collective(kind, group, 96, 2, True)
    found = estimate.least_seconds(300.0, 70.0, [twice], CHIP, "bfloat16")
    assert found["links"] == pytest.approx(2 * seconds)
    assert (found["arithmetic"], found["memory"]) == (3.0, 7.0)
    assert found["total"] == max(7.0, found["links"])
    slow = estimate.least_seconds(300.0, 70.0, [], CHIP, "float32")
    assert (slow["arithmetic"], slow["total"]) == (6.0, 7.0)


@pytest.mark.parametrize(
    "text, topology, chips",
    [
        ("v5e:2x4", "v5e:2x4", 8),
        ("v5e", "v5e:2x2", 1),
        ("v5p:1x1x1", "v5p:2x2x1", 1),
        ("h200:8", "1x1x8", 8),
        ("h100:2x8", "1x2x8", 16),
    ],
)
def test_targets(text, topology, chips):
    assert estimate.parse_target(text)[1:] == (topology, chips)


@pytest.mark.parametrize(
    "text", ["v9:2x2", "h200:0", "h200:1x2x3", "v5e:8", "v5p:2x2", "h100_pcie:1", ""]
)
def test_an_unknown_target_names_those_there_are(text):
    with pytest.raises(ValueError, match=r"v5e:2x2, .*h200:8") as told:
        estimate.parse_target(text)
    assert f"--target={text}:" in str(told.value) and "pcie:8" not in str(told.value)


@pytest.mark.parametrize("changes", [{}, {"device_bytes": 0, "workers": 0}])
def test_the_program_takes_what_a_run_gives_it(changes, tmp_path):
    changes |= {"method.base": "simclr", "method.strategy": "finetune", "devices": 2}
    work = run_directories.untried(tmp_path, **changes)
    images, batches, number = toy.first_call(work)
    _, metrics = estimate.lower_step(
        build.plan_job(toy.config(**changes), one_step=False)
    ).compile()(job.initial_state(work), images, batches, number)
    assert np.isfinite(metrics["loss"]).all()


def test_blank_data_are_as_the_config_tells():
    augment = {"size": 24, "mean": (0.5,) * 3}

    def made(data, scenario=None, **sizes):
        return stand_in.make_blank_dataset(data, scenario or {}, augment, **sizes)

    hundred = made({"name": "arrays", "path": "data/cifar100/"})
    assert len(hundred.class_names) == 100
    assert hundred.train.images.shape == (50_000, 24, 24, 3)
    files = {"name": "image_folder", "path": "x", "size": 40, "resident": True}
    assert made(files, classes=3, rows=30).train.images.shape == (30, 40, 40, 3)
    assert made({"name": "arrays", "path": "x/tiny_imagenet"}).train.reader is None
    named = made(
        {"name": "image_lists", "domains": ("x", "y")}, {"classes": ("a", "b")}
    )
    assert named.class_names == ("a", "b") and len(named.train.label) == 4000
    assert made({"name": "digits"}) is None
    for data, field in (
        ({"name": "arrays"}, "--classes"),
        ({"name": "graphs"}, "name"),
    ):
        with pytest.raises(ValueError, match=field):
            made(data)


def test_memory_that_does_not_fit_is_said(monkeypatch):
    about = {"name": "n", "examples": 1, "precision": "float32", "devices": 8}
    about |= {"device": "toy", "seconds": 1.0}
    for memory, fits in ((1e6, True), (1e4, False)):
        chip = CHIP._replace(memory=memory)
        found = of_step(monkeypatch, lambda s, x: x @ s.weight, chip=chip)
        assert found["fits"] is fits
        text = estimate.format_estimate(about | found, chip)
        assert ("DOES NOT FIT" in text) is not fits
