"""What a run would send and take on devices that are not there, and how long."""

import contextlib
import functools
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from flax import struct
from jax.sharding import PartitionSpec

from helpers import toy
from jaxcl import sharding
from jaxcl.config import build, sections
from jaxcl.run import job
from jaxcl.scaling import collectives, hardware
from jaxcl.scaling import command as scaling_command
from jaxcl.scaling import compiled as compiled_lib

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scaling.md").read_text()
DEVICES = 8


# Programs as text

HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=8\n\n"
SUM = "%add (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n}\n\n"


def module(*lines, more=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"{HEAD}{SUM}{more}ENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def read(*lines, more=""):
    return collectives.read(module(*lines, more=more))


def op(shape, code, *, given="%p", more=""):
    return f"%it = {shape} {code}({given}), channel_id=1, {more}"


ALL = "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"


@pytest.mark.parametrize(
    "shape, code, more, size, group",
    [
        ("f32[10,3]{1,0:T(8,128)}", "all-reduce", ALL, 120, 8),
        ("f32[]", "all-reduce", ALL, 4, 8),
        ("bf16[10]{0}", "all-reduce", ALL, 20, 8),
        ("pred[7]{0}", "all-gather", ALL, 7, 8),
        ("s4[7]{0}", "all-gather", ALL, 4, 8),
        ("f8e4m3fn[7]{0}", "all-gather", ALL, 7, 8),
        ("c64[2]{0}", "all-to-all", ALL, 16, 8),
        ("u8[6]{0}", "all-gather", "replica_groups={{0,1},{2,3},{4,5},{6,7}}", 6, 2),
        ("u8[6]{0}", "all-gather", "replica_groups=[2,4]<=[8], dimensions={0}", 6, 4),
        ("u8[6]{0}", "all-gather", "replica_groups=[4,2]<=[2,4]T(1,0)", 6, 2),
        ("u8[6]{0}", "all-gather", "replica_groups={}, dimensions={0}", 6, 8),
        ("u8[6]{0}", "all-gather", "replica_groups=mesh['a'=2,'b'=4] {'b'}", 6, 4),
        ("u8[6]{0}", "all-gather", "replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 6, 8),
        ("u8[6]{0}", "all-gather", "replica_groups=mesh['a'=8] {'a':(2)4}", 6, 4),
        ("f32[3]{0}", "reduce-scatter", "replica_groups=[2,4]<=[8]", 48, 4),
        ("f32[3]", "collective-permute", "source_target_pairs={{0,1},{1,0}}", 12, 8),
        ("f32[3]", "collective-broadcast", ALL, 12, 8),
    ],
)
def test_bytes_and_devices_of_a_message(shape, code, more, size, group):
    (found,) = read(op(shape, code, more=more))
    assert (found.kind, found.bytes, found.group) == (code, size, group)
    assert found.times == 1 and found.counted


@pytest.mark.parametrize(
    "code, more",
    [
        ("all-reduce", "replica_groups={{0},{1},{2},{3}}"),
        ("all-gather", "replica_groups=[8,1]<=[8]"),
        ("collective-permute", "source_target_pairs={{0,0},{1,1}}"),
        ("collective-permute", "source_target_pairs={}"),
        ("add", 'metadata={op_name="all-reduce(x)"}'),
    ],
)
def test_what_stays_on_a_device_is_no_message(code, more):
    assert read(op("f32[3]{0}", code, more=more)) == []


def test_a_merged_message_has_its_parts_by_name():
    big = op(
        "(f32[4]{0}, f32[2,2]{1,0}, /*index=2*/f32[])",
        "all-reduce",
        given="%p, %q, /*index=2*/%r",
        more=f'{ALL}, metadata={{op_name="a(b:c)"}}',
    )
    taken = '%two = f32[2,2] get-tuple-element(%it), index=1, metadata={op_name="c"}'
    (found,) = read(big, taken)
    assert [part.bytes for part in found.parts] == [16, 16, 4]
    assert [part.name for part in found.parts] == ["a(b:c)", "c", "a(b:c)"]
    assert found.bytes == 36 and not any(part.waits for part in found.parts)


@pytest.mark.parametrize(
    "start, done, size",
    [
        ("(f32[2]{0}, f32[16]{0})", "f32[16]{0}", 64),
        ("((f32[2], f32[1]), (f32[16], f32[8]))", "(f32[16]{0}, f32[8]{0})", 96),
    ],
)
def test_a_start_and_its_done_are_one(start, done, size):
    lines = (
        f"%s = {start} all-gather-start(%p), {ALL}",
        "%other = f32[4]{0} add(%p, %p)",
        f"%d = {done} all-gather-done(%s)",
    )
    (found,) = read(*lines)
    assert (found.kind, found.bytes, found.group) == ("all-gather", size, 8)


def test_a_permute_that_starts_and_ends_is_one():
    pairs = "source_target_pairs={{0,1},{1,2}}"
    (found,) = read(
        f"%s = (f32[5], f32[5], u32[], u32[]) collective-permute-start(%p), {pairs}",
        "%d = f32[5]{0} collective-permute-done(%s)",
    )
    assert (found.kind, found.bytes) == ("collective-permute", 20)


def test_a_wrapped_message_counts_where_it_starts():
    more = f"%wrapped (p: f32[4]) -> f32[4] {{\n  {op('f32[4]', 'all-to-all')}\n}}\n\n"
    lines = [
        f"%{x} = f32[4] async-{x}(%y), calls=%wrapped"
        for x in ("start", "update", "done")
    ]
    (found,) = read(*lines, more=more)
    assert found.bytes == 16


def loop(name, inner, trips):
    known = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    body = f"%{name} (p: f32[4]) -> f32[4] {{\n  {inner}\n}}\n\n"
    return body, f"%w_{name} = f32[4] while(%p), condition=%add, body=%{name}, {known}"


@pytest.mark.parametrize(
    "outer, inner, times, counted",
    [(3, 5, 15, True), (0, 5, 5, False), (3, 0, 3, False)],
)
def test_a_message_in_loops_counts_as_often_as_they_run(outer, inner, times, counted):
    first, line = loop("in", op("f32[4]", "all-reduce", more=ALL), inner)
    second, line = loop("out", line, outer)
    (found,) = read(line, more=first + second)
    assert (found.times, found.counted, found.bytes) == (times, counted, 16)


@pytest.mark.parametrize(
    "said",
    [
        "branch_computations={%small, %large}",
        "true_computation=%small, false_computation=%large",
    ],
)
def test_of_branches_the_one_that_sends_most_counts(said):
    more = "".join(
        f"%{name} (p: f32[4]) -> f32[4] {{\n"
        f"  {op(f'f32[{n}]', 'all-reduce', more=ALL)}\n}}\n\n"
        for name, n in (("small", 4), ("large", 9))
    )
    (found,) = read(f"%c = f32[4] conditional(%p, %q), {said}", more=more)
    assert found.bytes == 36


def test_sixteen_bits_that_a_cpu_widens_count_as_sixteen():
    """Merged with one that is used in 32 bits, which the name of the sum hides."""
    narrowing = (
        "%narrow (a: f32[4], b: f32[4]) -> bf16[4] {\n"
        "  %a = f32[4] parameter(0)\n  %b = f32[4] parameter(1)\n"
        "  %c = bf16[4] convert(%b)\n  ROOT %d = bf16[4] negate(%c)\n}\n\n"
    )
    sums = ALL.replace("%add", "%add.clone_promoted")
    lines = [
        f"%it = (f32[4], f32[4], f32[4], f32[4]) all-reduce(%p, %q, %r, %s), {sums}",
        *(f"%g{i} = f32[4] get-tuple-element(%it), index={i}" for i in range(4)),
        "%x = bf16[4] convert(%g0)",
        "%y = f32[4] add(%g1, %g1)",
        "%z = bf16[4] fusion(%p, %g2), kind=kLoop, calls=%narrow",
        "%w = s32[4] convert(%g3)",
    ]
    (found,) = read(*lines, more=narrowing)
    assert [part.bytes for part in found.parts] == [8, 16, 8, 16]
    lines[0] = lines[0].replace("_promoted", "")
    (found,) = read(*lines, more=narrowing)
    assert [part.bytes for part in found.parts] == [16, 16, 16, 16]


@pytest.mark.parametrize(
    "product, waits",
    [
        ("%z = f32[4] dot(%y, %q)", True),
        ("%z = f32[4] convolution(%y, %q), window={size=3}", True),
        ('%z = f32[4] custom-call(%y), custom_call_target="__cublas$gemm"', True),
        ('%z = f32[4] custom-call(%y), custom_call_target="Sharding"', False),
        ("%z = f32[4] fusion(%y), kind=kOutput, calls=%inner", True),
        ("%z = f32[4] multiply(%y, %q)", False),
        ("%z = f32[4] dot(%q, %q)", False),
    ],
)
def test_a_message_is_waited_for_by_products_alone(product, waits):
    inner = "%inner (a: f32[4]) -> f32[4] {\n  %d = f32[4] dot(%a, %a)\n}\n\n"
    lines = [
        f"%it = (f32[4], f32[8]) all-reduce(%p, %q), {ALL}",
        "%g0 = f32[4] get-tuple-element(%it), index=0",
        "%g1 = f32[8] get-tuple-element(%it), index=1",
        "%y = f32[4] add(%g0, %p)",
        product,
        "ROOT %out = (f32[4], f32[8]) tuple(%z, %g1)",
    ]
    (found,) = read(*lines, more=inner)
    assert [part.waits for part in found.parts] == [waits, False]


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        collectives.read("HloModule x\n")


def test_messages_survive_json():
    found = read(op("f32[4]", "all-reduce", more=ALL))
    kept = json.loads(json.dumps(collectives.plain(found)))
    assert collectives.restored(kept) == found


# Programs that XLA compiles


def compiled(function, *shapes, split=(0,)):
    """Messages of a function whose arguments `split` are cut over 8 devices."""
    mesh = sharding.mesh(DEVICES)
    given = [
        jax.ShapeDtypeStruct(
            *shape,
            sharding=(sharding.split if i in split else sharding.replicated)(mesh),
        )
        for i, shape in enumerate(shapes)
    ]
    return collectives.read(jax.jit(function).lower(*given).compile().as_text())


def on_each(function, out):
    spec = PartitionSpec(sharding.AXIS)
    return jax.shard_map(
        function, mesh=sharding.mesh(DEVICES), in_specs=spec, out_specs=out
    )


def summary(found):
    return [(each.kind, each.bytes * each.times, each.group) for each in found]


F32, BF16 = jnp.float32, jnp.bfloat16


def test_a_sum_over_devices_is_one_all_reduce():
    add = functools.partial(jax.lax.psum, axis_name=sharding.AXIS)
    found = compiled(on_each(add, PartitionSpec()), ((8 * 100,), F32))
    assert summary(found) == [("all-reduce", 400, 8)]


def test_a_sum_at_each_turn_of_a_loop_counts_as_often():
    def several(x):
        return jax.lax.fori_loop(
            0, 6, lambda _, x: jax.lax.psum(jnp.sin(x), sharding.AXIS) + x, x
        )

    found = compiled(on_each(several, PartitionSpec(sharding.AXIS)), ((80,), F32))
    assert summary(found) == [("all-reduce", 6 * 40, 8)] and found[0].counted


def test_a_product_whose_inner_axis_is_split_sums_its_result():
    found = compiled(
        lambda x, y: x.T @ y, ((64, 10), F32), ((64, 6), F32), split=(0, 1)
    )
    assert summary(found) == [("all-reduce", 4 * 10 * 6, 8)]


def test_statistics_of_a_split_batch_are_summed():
    def normalised(x):
        centred = x - x.mean(0)
        return centred * jax.lax.rsqrt((centred**2).mean(0) + 1e-5)

    found = compiled(normalised, ((64, 12), F32))
    assert {each.kind for each in found} == {"all-reduce"}
    assert sum(each.bytes for each in found) == 2 * 4 * 12


def test_rolled_rows_go_to_a_neighbour():
    found = compiled(lambda x: jnp.roll(x, 1, axis=0), ((64, 5), F32))
    assert {each.kind for each in found} == {"collective-permute"}
    assert sum(each.bytes for each in found) == 4 * 5


def test_products_of_all_pairs_gather_rows_and_wait():
    found = compiled(lambda x: jnp.max(x @ x.T, 1), ((64, 5), F32))
    assert summary(found) == [("all-gather", 4 * 64 * 5, 8)]
    assert found[0].parts[0].waits


@pytest.mark.parametrize("dtype, width", [(F32, 4), (BF16, 2)])
def test_gradients_of_weights_are_summed_and_not_waited_for(dtype, width):
    def loss(w, v, x):
        hidden = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
        return jnp.sum((hidden @ v.astype(dtype)).astype(F32) ** 2)

    shapes = ((16, 32), F32), ((32, 4), F32), ((80, 16), F32)
    found = compiled(jax.grad(loss, argnums=(0, 1)), *shapes, split=(2,))
    parts = sorted(part.bytes for each in found for part in each.parts)
    assert parts == [width * 32 * 4, width * 16 * 32]
    assert not any(part.waits for each in found for part in each.parts)


# Steps of a run


@functools.cache
def toy_step(number, **changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    work = build.planned(toy.config(devices=number, **changes))
    return work, compiled_lib.measure(work, 1)


SIMPLE = {"method__base": "simclr"}


def size_of(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_gradients_of_a_simclr_step_are_as_large_as_its_parameters():
    """But for batch norm's own, sums that the gradient of its statistics needs too."""
    work, found = toy_step(DEVICES, **SIMPLE)
    state = jax.eval_shape(work.method.init, jax.random.key(0), blank_batch())
    flat = jax.tree_util.tree_flatten_with_path(state.params)[0]
    own = {jax.tree_util.keystr(path): leaf for path, leaf in flat}
    norm = {name: x for name, x in own.items() if "bn" in name}
    assert found["state"]["parameters"] == size_of(state.params) == size_of(own)
    sent = collectives.restored(found["collectives"])
    beside = [part.bytes for each in sent for part in each.parts if not part.waits]
    # Scalars are what the step tells: the loss and the like.
    assert sum(x for x in beside if x > 4) == size_of(own) - size_of(norm)
    assert norm and all(each.group == DEVICES for each in sent)


def blank_batch():
    image, number = np.zeros((1, 8, 8, 1), np.uint8), np.zeros(1, np.int32)
    return {"image": image, "label": number, "index": number}


def test_the_loss_gathers_the_embeddings_of_all_examples():
    _, found = toy_step(DEVICES, **SIMPLE)
    gathered = [x for x in found["collectives"] if x["kind"] == "all-gather"]
    sizes = {part["bytes"] for each in gathered for part in each["parts"]}
    assert sizes == {4 * 2 * 48 * 8}  # both views of the batch, output_dim
    assert all(part["waits"] for each in gathered for part in each["parts"])


def test_what_devices_share_and_what_each_holds_whole():
    (_, two), (_, eight) = toy_step(2, **SIMPLE), toy_step(DEVICES, **SIMPLE)
    assert two["state"] == eight["state"] and two["images"] == eight["images"]
    assert two["batch"] == 4 * 48 // 2 and eight["batch"] == 4 * 48 // 8
    assert two["flops_written"] == eight["flops_written"]
    assert eight["flops"] == pytest.approx(two["flops"] / 4, rel=0.1)
    assert two["flops"] == pytest.approx(two["flops_written"] / 2, rel=0.2)
    assert (two["devices"], eight["devices"], two["batch_size"]) == (2, 8, 48)


def test_bytes_of_state_batch_and_images_are_those_of_the_program():
    for number in (2, DEVICES):
        _, found = toy_step(number, **SIMPLE)
        told = sum(found["state"].values()) + found["batch"] + found["images"]
        # No label and no number of the task is read: XLA leaves them out.
        unread = 4 * 1437 + 4 + 2 * 4 - 4
        assert found["memory"]["arguments"] == told - unread


def test_a_program_is_that_of_accelerators():
    """A CPU would cut weight gradients in pieces, and send these to and fro."""
    with sharding.for_elsewhere():
        assert not sharding.on_cpu()
    assert sharding.on_cpu()
    _, found = toy_step(DEVICES, **SIMPLE)
    assert {each["kind"] for each in found["collectives"]} <= {
        "all-reduce",
        "all-gather",
    }


def test_a_memory_in_shards_lies_on_all_devices():
    changes = {**toy.ONLINE, "method": {"name": "er"}, "replay.capacity": 64}
    sizes = []
    for split in (False, True):
        made = {**changes, "replay.sharded": split, "devices": DEVICES}
        work = build.planned(toy.config(**made))
        state = compiled_lib._arguments(work, 1)[0]
        sizes.append(compiled_lib._parts(state))
    whole, split = (sum(x.values()) for x in sizes)
    image = 8 * 8 * 1
    assert whole - split > 64 * image * 7 / 8
    assert sizes[0]["parameters"] == sizes[1]["parameters"]


SEEDS = {**toy.ONLINE, "method": {"name": "er_ace"}, "seed": 5, "seeds": 3}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    "changes, together",
    [
        ({}, None),  # where a run would
        ({"side_by_side": True}, True),
        ({"side_by_side": "apart"}, True),
        ({"side_by_side": False}, False),
        ({"replay.sharded": True}, False),
        ({"seeds": 1, "side_by_side": True}, False),
    ],
)
def test_seeds_are_planned_as_a_run_takes_them(changes, together, elsewhere):
    config = toy.config(**SEEDS | changes)
    with sharding.for_elsewhere() if elsewhere else contextlib.nullcontext():
        work = build.planned(config, every_seed=True)
        assert build.planned(config).together == ()
    together = elsewhere if together is None else together
    assert work.together == ((5, 6, 7) if together else ())


def test_what_is_told_of_seeds_side_by_side_is_of_all():
    plans = [
        build.planned(toy.config(**SEEDS, side_by_side=how), every_seed=True)
        for how in (False, True)
    ]
    alone, all_three = (compiled_lib.measure(work, 1) for work in plans)
    assert (alone["seeds"], all_three["seeds"]) == (1, 3)
    assert alone["batch_size"] == all_three["batch_size"]
    parameters = [x["state"]["parameters"] for x in (alone, all_three)]
    assert parameters[1] == 3 * parameters[0]
    written = [x["flops_written"] for x in (alone, all_three)]
    np.testing.assert_allclose(written[1], 3 * written[0], rtol=0.05)
    setting = scaling_command._setting(parsed(TOY, "--machine=h100"))
    for found in (alone, all_three):
        made = scaling_command.estimates([found], setting)
        shown = scaling_command.tables.text([found], made, setting).splitlines()[0]
        assert ("3 seeds, each of 48 examples in all" in shown) == (found is all_three)


ICL = {
    "method": {"name": "icl", "output_dim": 8},
    "scenario": {"name": "growth", "growth": 0.5},
    "augment.views": 2,
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(SIMPLE, id="resident"),
        pytest.param({"device_bytes": 0, "workers": 0, **SIMPLE}, id="streamed"),
        pytest.param(
            {**toy.ONLINE, "method": {"name": "er"}, "replay.sharded": True},
            id="sharded",
        ),
        pytest.param(
            {"method.online_head": True}, id="labelled", marks=pytest.mark.slow
        ),
        pytest.param(ICL, id="side by side", marks=pytest.mark.slow),
    ],
)
def test_shapes_are_those_that_a_run_gives_its_step(changes, tmp_path):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    changes |= {"devices": DEVICES, "steps_per_call": 1}
    real = toy.job(tmp_path, **changes)
    task = real.stream.tasks[1]
    with contextlib.closing(job.feed(real, task.train, 1, 0)) as feed:
        _, batch, _ = next(feed)
    given = job.initial_state(real), batch, job.resident(real)
    ours = compiled_lib._arguments(build.planned(toy.config(**changes)), 1)
    assert jax.tree.structure(given) == jax.tree.structure(ours)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(ours), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize("task, products", [(0, 0), (1, 1)])
def test_the_number_of_the_task_decides_what_is_compiled(task, products, monkeypatch):
    class Stop(Exception):
        pass

    @struct.dataclass
    class State:
        task: jax.Array

    def step(state, x):
        return jax.lax.cond(state.task == 0, lambda: x, lambda: x @ x)

    def compile_step(work):
        assert not sharding.on_cpu()
        given = State(jnp.int32(7)), jnp.zeros((4, 4))
        text = jax.jit(work.method.step).lower(*given).compile().as_text()
        assert len(re.findall(r" dot\(| conditional\(", text)) == products
        raise Stop

    work = build.planned(toy.config(devices=2))
    work = work._replace(method=work.method._replace(step=step))
    monkeypatch.setattr(compiled_lib.job, "compile_step", compile_step)
    with pytest.raises(Stop):
        compiled_lib.measure(work, task)


# Machines, by hand

FLAT = hardware.Machine(
    peak=100e12, peak_float32=50e12, memory=1e9, bandwidth=1e9, latency=1e-3
)
ISLANDS = FLAT._replace(island=4, outside=1e8)


@pytest.mark.parametrize(
    "machine, kind, group, moving, hops",
    [
        (FLAT, "all-reduce", 8, 2 * 7 / 8 * 1.6, 6e-3),
        (FLAT, "all-gather", 8, 7 / 8 * 1.6, 3e-3),
        (FLAT, "reduce-scatter", 8, 7 / 8 * 1.6, 3e-3),
        (FLAT, "all-to-all", 8, 7 / 8 * 1.6, 3e-3),
        (FLAT, "collective-permute", 8, 1.6, 3e-3),
        (FLAT, "all-reduce", 2, 1.6, 2e-3),
        (FLAT, "all-reduce", 5, 2 * 4 / 5 * 1.6, 6e-3),
        (FLAT, "all-reduce", 1, 0.0, 0.0),
        # 2 islands of 4: 3/4 of 1.6 s inside, then half of a quarter of 16 s outside.
        (ISLANDS, "all-reduce", 8, 2 * (1.2 + 2.0), 6e-3),
        (ISLANDS, "all-gather", 8, 1.2 + 2.0, 3e-3),
        # Of eighths, 3 go to the island and 4 out of it.
        (ISLANDS, "all-to-all", 8, 0.6 + 8.0, 3e-3),
        (ISLANDS, "collective-permute", 8, 16.0, 3e-3),
        (ISLANDS, "all-reduce", 4, 2 * 1.2, 4e-3),
        (ISLANDS, "collective-permute", 4, 1.6, 2e-3),
    ],
)
def test_seconds_of_a_message(machine, kind, group, moving, hops):
    found = hardware.seconds(kind, 1_600_000_000, group, machine)
    np.testing.assert_allclose(found, (moving, hops), rtol=1e-12)


def message(*parts, times=1, kind="all-reduce"):
    made = tuple(collectives.Part(size, waits, "") for size, waits in parts)
    return collectives.Collective(kind, 2, times, True, made)


def test_seconds_of_a_step():
    sent = [
        message((3_000_000, True), (1_000_000, False)),  # 4 ms, and 2 ms of hops
        message((5_000_000, False), times=2),  # 2 x (5 + 2) ms
    ]
    options = {"utilisation": 0.5, "precision": "bfloat16"}
    found = hardware.estimate(1e12, sent, FLAT, **options)
    want = 20e-3, 5e-3, 15e-3
    np.testing.assert_allclose(found, want)
    np.testing.assert_allclose((found.fast, found.slow), (25e-3, 40e-3))
    wide = hardware.estimate(1e12, sent, FLAT, utilisation=0.5, precision="float32")
    np.testing.assert_allclose(wide.compute, 40e-3)
    little = hardware.estimate(1e11, sent, FLAT, **options)
    np.testing.assert_allclose(little.fast, 20e-3)  # 5 and, beside the 2, 15


def test_efficiency_is_of_examples_a_second():
    # A quarter of the examples in half of the time.
    assert hardware.efficiency(8, 32, 0.5, 1.0) == 0.5
    assert hardware.efficiency(32, 32, 1.25, 1.0) == 0.8


def test_machines_have_sane_numbers():
    for name, machine in hardware.MACHINES.items():
        assert 1e14 < machine.peak < 2e15 and machine.peak_float32 <= machine.peak, name
        assert 1e10 < machine.memory < 2e11 and 1e10 < machine.bandwidth < 1e12, name
        assert (machine.island is None) == (machine.outside is None), name
        assert 5e11 < machine.memory_bandwidth < 1e13, name


def test_the_tables_compare_with_the_fewest_devices():
    found = [toy_step(number, **SIMPLE)[1] for number in (2, DEVICES)]
    setting = scaling_command._setting(parsed(TOY, "--machine=h100"))
    made = scaling_command.estimates(found, setting)
    two, eight = made["h100"]
    shown = rows(scaling_command.tables.text(found, made, setting))
    # A quarter of the examples; slow and fast bounds are compared each with its own.
    want = [25 * two.slow / eight.slow, 25 * two.fast / eight.fast]
    assert shown["efficiency, %"][0] == [100]
    cell = shown["efficiency, %"][1]
    np.testing.assert_allclose([cell[0], cell[-1]], sorted(want), rtol=0.01)
    assert shown["examples of a device"] == [[24], [6]]
    share = found[1]["flops"] * DEVICES / found[1]["flops_written"]
    np.testing.assert_allclose(shown["times an even share"][1], [share], atol=0.006)


# Data that is not there


def given(data, scenario=None, augment=None, **size):
    augment = {"size": 24, "mean": (0.5,) * 3} | (augment or {})
    size = {"classes": None, "rows": None, "pixels": None} | size
    return compiled_lib.blank(data, scenario or {}, augment, **size)


def shape(data):
    train, held = data.train, data.train.images
    image = train.load(0).shape if held is None else held.shape[1:]
    return len(data.class_names), len(train.label), image, held is not None


def test_a_stand_in_is_as_the_config_tells(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("b\na\n")
    folder = {"name": "image_folder", "path": "x"}
    files = folder | {"classes": str(names)}
    assert shape(given(files)) == (2, 2000, (24, 24, 3), False)
    assert given(files).class_names == ("b", "a")
    held = files | {"size": 40, "resident": True}
    assert shape(given(held, rows=30)) == (2, 30, (40, 40, 3), True)
    assert shape(given(held, rows=30, pixels=9)) == (2, 30, (9, 9, 3), True)
    tiny = {"name": "tiny_imagenet", "path": "x"}
    assert shape(given(tiny)) == (200, 100_000, (64, 64, 3), True)
    assert shape(given(tiny | {"resident": False}))[-1] is False
    assert shape(given({"name": "stl10"})) == (10, 5000, (96, 96, 3), True)
    grey = {"mean": (0.5,)}
    arrays = {"name": "arrays"}
    assert shape(given(arrays, augment=grey, classes=3)) == (3, 3000, (24, 24, 1), True)
    named = given(arrays, {"classes": ("ship", "cat")})
    assert named.class_names == ("ship", "cat")
    lists = {"name": "image_lists", "domains": ("x", "y")}
    apart = given(lists, classes=2)
    assert apart.domain_names == ("x", "y") and len(apart.train.label) == 4000
    pairs = {*zip(apart.train.label.tolist(), apart.train.domain.tolist(), strict=True)}
    assert len(pairs) == 4
    assert given({"name": "digits"}) is None


def test_a_large_stand_in_takes_no_memory():
    made = given({"name": "arrays"}, classes=1000, rows=10**6, pixels=224)
    assert made.train.images.nbytes == 10**6 * 224 * 224 * 3
    assert made.train.images.strides == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "data, size, said",
    [
        ({"name": "arrays"}, {}, "--classes: missing, and config.data.name='arrays'"),
        ({"name": "graphs"}, {"classes": 2}, "no stand-in for a set of graphs"),
        ({"name": "arrays"}, {"classes": 9, "rows": 8}, "--rows=8: must be at least 9"),
    ],
)
def test_what_no_stand_in_is_for(data, size, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        given(data, **size)


# The command


def parsed(*arguments):
    values = flags.FlagValues()
    scaling_command.define_flags(values, ["scaling", *arguments])
    assert values(["scaling", *arguments]) == ["scaling"], arguments
    return values


CONFIG = f"--config={ROOT}/configs/quickstart.py"


def test_numbers_of_devices_are_sorted_and_checked():
    assert scaling_command.counts(["64", " 8", "1", "8"]) == [1, 8, 64]
    for wrong in (["0"], ["a"], [], ["-1"], ["1", ""]):
        with pytest.raises(ValueError, match="--devices=.*must be numbers from 1"):
            scaling_command.counts(wrong)


def test_flags_override_what_a_machine_is():
    values = parsed(
        CONFIG,
        "--machine=h100,tpu-v4",
        "--peak_flops=5e14",
        "--outside=25e9",
        "--latency=2e-6",
        "--bandwidth=1e11",
        "--island=4",
        "--memory_bandwidth=1e12",
        "--launch=0",
    )
    found = scaling_command.chosen(values)
    assert list(found) == ["h100", "tpu-v4"]
    for name, machine in found.items():
        own = hardware.MACHINES[name]
        given = 5e14, 5e14, own.memory, 1e11, 2e-6, 4, 25e9, 1e12, 0.0, own.clock
        assert machine == given
    assert scaling_command.chosen(parsed(CONFIG, "--machine=h100")) == {
        "h100": hardware.MACHINES["h100"]
    }
    with pytest.raises(
        ValueError, match="--machine=abacus: must be of tpu-v4, tpu-v5e"
    ):
        scaling_command.chosen(parsed(CONFIG, "--machine=abacus"))


def test_the_batch_is_of_all_devices_or_of_each(monkeypatch):
    seen = []

    def planned_job(config, stand_in, every_seed):
        assert every_seed
        seen.append((config.devices, config.batch_size))
        return types.SimpleNamespace(stream=types.SimpleNamespace(tasks=(1, 2)))

    monkeypatch.setattr(build, "planned", planned_job)
    monkeypatch.setattr(compiled_lib, "measure", lambda work, task: task)
    assert scaling_command.one(parsed(CONFIG), 4) == 1
    assert (
        scaling_command.one(parsed(CONFIG, "--per_device_batch=6", "--task=7"), 4) == 1
    )
    assert scaling_command.one(parsed(CONFIG, "--task=0"), 4) == 0
    assert seen == [(4, 64), (4, 24), (4, 64)]


def command(*arguments):
    """What the command says and leaves with, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "jaxcl.scaling", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
        capture_output=True,
        text=True,
        timeout=300,
    )


TOY = f"--config={ROOT}/tests/helpers/toy_config.py"


def test_a_child_says_what_is_wrong_with_its_number_of_devices():
    """In a process of its own, which has so many."""
    ran = command(TOY, "--devices=9")
    assert ran.returncode == 2 and not ran.stdout
    said = "jaxcl: config.batch_size=48: must be a multiple of the 9 devices"
    assert ran.stderr.count("jaxcl: ") == 1 and said in ran.stderr


@pytest.mark.slow
def test_the_command_compiles_where_there_are_devices_enough(tmp_path):
    path = tmp_path / "found.json"
    ran = command(
        TOY,
        "--config.method.base=simclr",
        "--config.method.strategy=finetune",
        "--devices=3",
        "--machine=tpu-v4",
        f"--json={path}",
    )
    assert ran.returncode == 0, ran.stderr
    assert "compiling, devices: 3" in ran.stderr
    whole = json.loads(path.read_text())
    (count,) = whole["counts"]
    assert (count["devices"], count["batch_size"], count["task"]) == (3, 48, 1)
    times = count["seconds"]["tpu-v4"]
    assert times["slow"] >= times["fast"] > 0 and whole["utilisation"] == 0.3
    assert "| examples of a device " in ran.stdout and "if it were tpu-v4" in ran.stdout
    assert re.search(r"^\| efficiency, % +\| +100 \|$", ran.stdout, re.M)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--devices=x"], "--devices=x: must be numbers from 1"),
        (["--machine=abacus"], "--machine=abacus: must be of"),
        (["--one=7"], "config.batch_size=48: must be a multiple of the 7 devices"),
        (["--one=1", "--config.checkpoint=x"], "config.checkpoint: nothing is trained"),
        (["more"], "unknown argument 'more'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, said, capsys, monkeypatch):
    values = flags.FlagValues()
    argv = ["scaling", TOY, *arguments]
    scaling_command.define_flags(values, argv)
    rest = values(argv)
    monkeypatch.setattr(scaling_command.flags, "FLAGS", values)
    assert scaling_command.main(rest) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxcl: ") and said in error and error.count("\n") == 1


def child(monkeypatch, *arguments, code=0, late=False, said=""):
    """The command with a child that is not started."""

    def run(started, *, env, timeout, **options):
        assert env["JAX_NUM_CPU_DEVICES"] == "8" and env["JAX_PLATFORMS"] == "cpu"
        assert started[:3] == [sys.executable, "-m", "jaxcl.scaling"]
        assert started[-1] == "--one=8"
        if late:
            raise subprocess.TimeoutExpired("x", timeout)
        return types.SimpleNamespace(returncode=code, stdout=f"noise\n{said}\n")

    values = parsed(TOY, "--devices=8", *arguments)
    monkeypatch.setattr(scaling_command.flags, "FLAGS", values)
    monkeypatch.setattr(scaling_command.subprocess, "run", run)
    return scaling_command.main(["scaling"])


def test_a_compilation_that_fails_or_takes_too_long(monkeypatch, capsys):
    assert child(monkeypatch, code=2) == 2
    assert child(monkeypatch, late=True) == 1
    assert "8 devices: not compiled in 480 s" in capsys.readouterr().err


def test_what_children_say_is_told_and_kept(monkeypatch, capsys, tmp_path):
    _, found = toy_step(DEVICES, **SIMPLE)
    path = tmp_path / "found.json"
    options = "--machine=tpu-v4,h100", f"--json={path}", "--utilisation=0.5"
    assert child(monkeypatch, *options, said=json.dumps(found)) == 0
    said, whole = capsys.readouterr().out, json.loads(path.read_text())
    assert "toy, a later task: a step of 48 examples in all, float32" in said
    assert "- tpu-v4: 0.5 of 275 TFLOP/s, 300 GB/s, 1 us a hop" in said
    assert "450 GB/s among 8, 50 GB/s to others, 3 us" in said
    assert whole["utilisation"] == 0.5 and list(whole["machines"]) == ["tpu-v4", "h100"]
    (count,) = whole["counts"]
    assert {**count, "seconds": 0} == {**found, "seconds": 0}
    times = count["seconds"]["tpu-v4"]
    assert times["compute"] == pytest.approx(found["flops"] / (275e12 * 0.5))
    assert times["slow"] >= times["fast"] >= times["waited"] > 0
    shown = rows(said)
    sent = [(x["kind"], p) for x in found["collectives"] for p in x["parts"]]
    reduced = sum(p["bytes"] for kind, p in sent if kind == "all-reduce") / 1e6
    waited = sum(p["bytes"] for _, p in sent if p["waits"]) / 1e6
    np.testing.assert_allclose(shown["all-reduce, MB"], [[reduced]], rtol=0.01)
    np.testing.assert_allclose(shown["MB waited for"], [[waited]], rtol=0.01)
    messages = sum(x["kind"] == "all-reduce" for x in found["collectives"])
    assert shown["all-reduce, messages"] == [[messages]]
    size = max(sent, key=lambda x: x[1]["bytes"])[1]
    assert f"{size['bytes'] / 1e6:.3g} MB, " in said


# The page


def commands(text):
    joined = re.sub(r"\\\n\s*", " ", text)
    return re.findall(r"^python -m jaxcl\.scaling\b([^\n]*)", joined, re.M)


def test_commands_of_the_page_are_right():
    lines = commands(PAGE)
    assert len(lines) >= 4
    for line in lines:
        values = parsed(*shlex.split(line.replace("configs/", f"{ROOT}/configs/")))
        assert scaling_command.counts(values.devices) and scaling_command.chosen(values)
        assert bool(scaling_command.wanted(values)) == ("--target" in line)
        raw = values.config.to_dict()
        top = sections.top_of(raw)
        size = {x: getattr(values, x) for x in ("classes", "rows", "pixels")}
        made = compiled_lib.blank(top.data, top.scenario, top.augment, **size)
        sections.tasks(top.data, top.scenario, top.seed, made)()


def rows(table):
    """Name -> numbers of each row of a markdown table."""
    found = {}
    for line in table.splitlines():
        if not line.startswith("|"):
            continue
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        numbers = [
            re.findall(r"[\d.]+(?:e[+-]?\d+)?", x.replace(",", "")) for x in cells
        ]
        if all(numbers):
            found[name] = [[float(x) for x in cell] for cell in numbers]
    return found


def test_the_small_table_of_the_page_is_what_the_command_prints():
    """Its last column; numbers of shapes exactly, what XLA does about so."""
    line = commands(PAGE)[0]
    values = parsed(*shlex.split(line.replace("configs/", f"{ROOT}/configs/")))
    found = [scaling_command.one(values, scaling_command.counts(values.devices)[-1])]
    setting = scaling_command._setting(values)
    text = scaling_command.tables.text(
        found, scaling_command.estimates(found, setting), setting
    )
    shown = re.search(r"^```text\n(.*?)^```", PAGE, re.M | re.S)[1]
    ours, theirs = rows(text), rows(shown)
    assert list(ours) == list(theirs) and len(ours) > 20
    exact = ["devices", "examples of a device", "batch, MB"]
    exact += [name for name in ours if name.startswith(("- ", "state", "images"))]
    for name, (cell,) in ours.items():
        rtol, atol = (0, 0) if name in exact else (0.35, 1e-3)
        if name.startswith(("temporaries", "all-", "MB")):
            rtol, atol = 0.5, 4 if "messages" in name else 0
        if name != "efficiency, %":  # against one device
            np.testing.assert_allclose(
                cell, theirs[name][-1], rtol=rtol, atol=atol, err_msg=name
            )
    for line in re.findall(r"^- .*", shown, re.M):
        assert line.startswith("- efficiency") or line in text or "MB, all-" in line


def test_machines_of_the_page_are_those_of_the_code():
    table = re.search(r"^\| machine \|.*?\n\n", PAGE, re.M | re.S)[0]
    shown = {}
    for line in table.strip().splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        shown[name.strip("`")] = [float(x) if x != "all" else None for x in cells]
    want = {
        name: [
            m.peak / 1e12,
            m.peak_float32 / 1e12,
            m.memory / 1e9,
            m.bandwidth / 1e9,
            m.island,
            (m.outside or m.bandwidth) / 1e9,
            m.latency * 1e6,
            m.memory_bandwidth / 1e9,
            m.launch * 1e6,
        ]
        for name, m in hardware.MACHINES.items()
    }
    assert list(shown) == list(want)
    for name, numbers in want.items():
        got = shown[name]
        assert [x is None for x in got] == [x is None for x in numbers]
        pairs = [(a, b) for a, b in zip(got, numbers, strict=True) if b is not None]
        np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-2)
