"""Programs of the compilers of chips, as text: what they compute, move and send.

`hlo/tpu_*.txt` and `hlo/gpu_*.txt` are what libtpu and the CUDA plugin made for v5e:2x2
and h200:4 of the functions below, without what nothing here reads:

    def conv(x, w, groups=1):  # 3 x 3, NHWC, "SAME"
    def step(state, x):
        # a convolution in bfloat16 of x f32[8 n, 8, 8, 16] with w f32[3, 3, 16, 32],
        # relu, the mean over the pixels, a product with v f32[32, 128]; the loss is the
        # mean square of its z. State: w, v less their gradients, and a queue
        # f32[256, 128] whose first rows become z.
    _step:     four steps in a loop of `count` turns, on 4 devices
    _grouped:  the gradient in w f32[3, 3, 4, 32] of a convolution in 4 groups, plus
               0 times its sum
    _loop:     lax.scan of six turns of sin(c) @ x, f32[128, 128]
    _overlap:  on v5e:2x4, pieces f32[1024, 1024] of eight devices are gathered into
               the head of a queue beside four products of bf16[2048, 2048]; x.T @ 2 x
               of the pieces is summed over the devices
"""

import functools
import json
import pathlib
import re
import types

import jax
import numpy as np
import pytest
from absl import flags

from helpers import toy
from jaxcl import sharding
from jaxcl.config import build
from jaxcl.scaling import collectives, hardware, hlo, kernels, tables, targets
from jaxcl.scaling import command as scaling_command
from jaxcl.scaling import compiled as compiled_lib

HLO = pathlib.Path(__file__).with_name("hlo")
TOY = pathlib.Path(__file__).with_name("helpers") / "toy_config.py"
BOTH = pytest.mark.parametrize("chip", ["tpu", "gpu"])


def text(name):
    return (HLO / f"{name}.txt").read_text()


def program(name, **options):
    return hlo.parse(text(name), **options)


def taps(side, kernel, pad):
    """Products with pixels along an axis, none with padding."""
    return sum(
        0 <= output + tap - pad < side
        for output in range(side)
        for tap in range(kernel)
    )


CONV = 2 * 8 * taps(8, 3, 1) ** 2 * 16 * 32  # 8 images, a pass of the step
PRODUCT = 2 * 8 * 32 * 128
# Both chips leave out the gradient in the images, which nobody asks for.
STEP = {"convolution": 2 * CONV, "product": 3 * PRODUCT}


@BOTH
def test_the_loop_over_the_steps_is_found(chip):
    found = program(f"{chip}_step", steps=4)
    assert found.turns == {found.loop_of_steps: 4}
    assert program(f"{chip}_step").turns == {found.loop_of_steps: None}
    assert kernels.unknown_loops(program(f"{chip}_step")) == 1
    assert found.devices == 4


@BOTH
def test_a_loop_of_known_length_runs_as_often(chip):
    found = program(f"{chip}_loop", steps=8)
    assert [*found.turns.values()] == [6] and found.loop_of_steps is None
    products = [x for x in kernels.of(found) if x.products]
    assert sum(x.times * x.flops for x in products) == 6 * 2 * 128**3


@BOTH
def test_arithmetic_is_that_of_the_step(chip):
    ran = kernels.of(program(f"{chip}_step", steps=4), steps=4)
    found = {"convolution": 0.0, "product": 0.0}
    for kernel in ran:
        for product in kernel.products:
            kind = "convolution" if product.convolution else "product"
            found[kind] += kernel.times * product.flops
            assert product.dtype == "bfloat16" or not product.convolution
            assert product.groups == 1
    assert found == STEP


@BOTH
def test_groups_of_a_convolution_are_seen(chip):
    ran = kernels.of(program(f"{chip}_grouped"))
    found = [product for kernel in ran for product in kernel.products]
    assert [product.groups for product in found] == [4, 4]
    # Each output channel meets 4 of the 16 input channels.
    assert {product.flops for product in found} == {CONV // 4}
    assert {product.dtype for product in found} == {"float32"}


@BOTH
def test_what_is_updated_in_place_is_not_read(chip):
    """A queue f32[256, 128], of which 32 rows are written."""
    ran = kernels.of(program(f"{chip}_step", steps=4), steps=4)
    (queue,) = [x for x in ran if x.shape.startswith("f32[256,128]")]
    assert queue.bytes == 2 * 32 * 128 * 4 and queue.times == 1
    assert not [x for x in kernels.copied(ran) if "f32[256,128]" in x.shape]


@BOTH
def test_all_of_the_state_is_written_over_its_argument(chip):
    assert program(f"{chip}_step").aliases == {(0,): 0, (1,): 1, (2,): 2}


@BOTH
def test_messages_of_a_step(chip):
    sent = collectives.of(program(f"{chip}_step", steps=4), steps=4)
    found = {}
    for message in sent:
        assert message.times == 1 and message.group == 4 and message.counted
        found[message.kind] = found.get(message.kind, 0) + message.bytes
    gradients = 2 * 3 * 3 * 16 * 32 + 4 * 32 * 128
    assert found == {"all-reduce": gradients + 4, "all-gather": 4 * 32 * 128}


def test_a_gpu_runs_something_beside_its_messages():
    """Those of the gradients; a TPU's are synchronous in this program."""
    beside = {}
    for chip in ("gpu", "tpu"):
        sent = collectives.of(program(f"{chip}_step", steps=4), steps=4)
        beside[chip] = [x.beside > 0 for x in sent if x.kind == "all-reduce"]
    assert any(beside["gpu"]) and not any(beside["tpu"])


def test_a_message_that_a_tpu_sends_piece_by_piece_is_one():
    sent = collectives.of(program("tpu_overlap"))
    assert [(x.kind, x.bytes, x.group) for x in sent] == [
        ("all-gather", 8192 * 1024 * 4, 8),
        ("all-reduce", 1024 * 1024 * 4, 8),
    ]
    gathered, summed = sent
    assert gathered.beside >= 5 and summed.beside == 0  # products, and what is between
    ran = kernels.of(program("tpu_overlap"))
    products = [x for x in ran if x.products]
    flops = 4 * 2 * 2048**3 + 2 * 1024**3
    assert len(products) == 5 and sum(x.flops for x in products) == flops
    # What starts the gathering, what ends it, and the sum.
    assert [x.kind for x in ran].count("message") == 3


@BOTH
def test_nothing_goes_to_the_host(chip):
    found = program(f"{chip}_step")
    assert kernels.host_transfers(found) == []
    ops = found.computations[found.entry]
    moved = ops[0]._replace(name="away", shape="f32[4]{0:T(128)S(5)}")
    sent = ops[0]._replace(name="sent", code="outfeed")
    found.computations[found.entry] += [moved, sent]
    assert kernels.host_transfers(found) == ["away", "sent"]


FACTS = hardware.Machine(
    peak=2e9,
    peak_float32=1e9,
    memory=1e9,
    bandwidth=1e9,
    latency=1e-3,
    memory_bandwidth=1e8,
    launch=1e-3,
    clock=1e6,
)


def kernel(flops=0.0, moved=0.0, dtype=None, times=1.0, kind="other"):
    return kernels.Kernel(kind, times, flops, moved, dtype, None, "", "f32[]")


def test_the_least_time_is_what_each_kernel_is_bound_by():
    ran = [
        kernel(flops=4e6, dtype="bfloat16"),  # 2 ms
        kernel(flops=4e6, dtype="float32", moved=3e5),  # 4 ms of products, 3 of traffic
        kernel(moved=3e5, times=2),  # 3 ms each
        kernel(moved=1e3, times=5),  # a launch each
        kernel(moved=1e3, kind="prefetch"),  # 10 us, no launch
        kernel(moved=1e9, kind="message"),  # counted as a message
    ]
    part = collectives.Part(10**6, False, "")
    sent = [
        collectives.Collective("all-gather", 2, times, True, (part,), beside=beside)
        for beside, times in ((0, 3), (5, 7))
    ]
    found = targets.least(ran, sent, FACTS)
    want = 6e-3, 6e-3 + 1e-5, 5e-3, 3 * (0.5e-3 + 1e-3)
    np.testing.assert_allclose(found, want)
    np.testing.assert_allclose(found.total, sum(want))


def test_what_a_text_tells_in_numbers():
    found = targets.program(text("tpu_step"), 4, FACTS)
    assert found["products"]["convolution"] == {"bfloat16": 2}
    assert sum(found["products"]["product"].values()) == 3 and found["grouped"] == 0
    assert found["flops"] == sum(STEP.values()) and found["outputs_aliased"] == 3
    assert found["outputs"] == 4  # and the loss
    ran = kernels.of(program("tpu_step", steps=4), steps=4)
    cycles = sum(x.times * x.cycles for x in ran if x.cycles)
    assert found["cycles"] == pytest.approx(cycles / 1e6) and cycles > 1e4
    unknown = targets.program(text("tpu_step"), 4, FACTS._replace(clock=None))
    assert unknown["cycles"] is None
    overflowed, count = re.subn(
        r'"estimated_cycles":"\d+"',
        f'"estimated_cycles":"{2**63 - 1}"',
        text("tpu_step"),
        count=1,
    )
    assert count == 1
    assert targets.program(overflowed, 4, FACTS)["cycles"] is None
    assert found["unknown_loops"] == 0 and found["host_transfers"] == []
    assert json.loads(json.dumps(found)) == found
    # The longest kernels are in order, and those of one place are one.
    longest = found["longest"]
    assert 1 < len(longest) <= targets.SHOWN
    assert len({(x["name"], x["shape"], x["kind"]) for x in longest}) == len(longest)


# Single lines


def entry(*lines, more=""):
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(
        f"HloModule m\n\n{more}ENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"
    )


def only(*lines, more=""):
    return kernels.of(entry(*lines, more=more))[-1]


P = "%p = f32[64,8]{1,0} parameter(0)"


@pytest.mark.parametrize(
    "lines, moved",
    [
        (["%x = f32[64,8]{1,0} negate(%p)"], 2 * 64 * 8 * 4),
        (["%x = f32[64,8]{1,0} add(%p, %p)"], 2 * 64 * 8 * 4),
        (["%x = f32[64,8]{1,0:S(1)} negate(%p)"], 64 * 8 * 4),
        (["%x = f32[2,8]{1,0} dynamic-slice(%p, %i, %i)"], 2 * 2 * 8 * 4),
        (["%x = bf16[8,8]{1,0} gather(%p, %i)"], 2 * 8 * 8 * 2),
        (
            ["%u = f32[2,8] parameter(1)"]
            + ["%x = f32[64,8]{1,0} dynamic-update-slice(%p, %u, %i, %i)"],
            2 * 2 * 8 * 4,
        ),
        (
            ["%x = (f32[64,8]{1,0:S(1)}, f32[64,8]{1,0}, u32[]) copy-start(%p)"],
            64 * 8 * 4,
        ),
        (["%x = (f32[64,8]{1,0}, f32[64,8]{1,0}, u32[]) copy-start(%p)"], 2 * 2048),
        (
            ["%x = ((f32[64,8]{1,0}), f32[4,8]{1,0:S(1)}, s32[]) slice-start(%p)"],
            4 * 8 * 4,
        ),
    ],
)
def test_bytes_of_an_operation(lines, moved):
    assert only(P, *lines).bytes == moved


def fused(*lines, result="f32[64,8]{1,0}", given="%p, %i"):
    inner = "\n".join(f"  {line}" for line in ("%a = f32[64,8] parameter(0)", *lines))
    more = f"%inner (a: f32[64,8], b: s32[]) -> f32[64,8] {{\n{inner}\n}}\n\n"
    index = "%i = s32[] parameter(1)"
    made = f"%x = {result} fusion({given}), kind=kLoop, calls=%inner"
    return only(P, index, made, more=more)


def test_bytes_of_what_a_fusion_slices():
    index = "%b = s32[] parameter(1)"
    rows = fused(
        index,
        "%c = f32[64,8] bitcast(%a)",
        "%s = f32[2,8] dynamic-slice(%c, %b, %b)",
        "ROOT %n = f32[2,8] negate(%s)",
        result="f32[2,8]{1,0}",
    )
    assert rows.bytes == 2 * 2 * 8 * 4 + 4 and rows.kind == "other"
    both = fused(
        index,
        "%s = f32[2,8] dynamic-slice(%a, %b, %b)",
        "%m = f32[64,8] negate(%a)",
        "ROOT %u = f32[64,8] dynamic-update-slice(%m, %s, %b, %b)",
    )
    assert both.bytes == 64 * 8 * 4 + 2 * 8 * 4 + 4


def test_what_only_copies():
    assert only(P, "%x = f32[64,8]{0,1} copy(%p)").kind == "copy"
    assert fused("ROOT %t = f32[8,64] transpose(%a)", given="%p").kind == "copy"
    assert fused("ROOT %t = f32[64,8] negate(%a)", given="%p").kind == "other"
    prefetch = "%x = (f32[64,8]{1,0:S(1)}, f32[64,8]{1,0}, u32[]) copy-start(%p)"
    assert only(P, prefetch).kind == "prefetch"


def test_of_branches_the_one_that_moves_most_counts():
    more = "".join(
        f"%{name} (q: f32[4]) -> f32[4] {{\n  %{name}x = f32[{n}] negate(%q)\n}}\n\n"
        for name, n in (("small", 4), ("large", 9))
    )
    line = "%c = f32[4] conditional(%p, %q), branch_computations={%small, %large}"
    assert only(P, line, more=more).shape == "f32[9]"


def test_a_number_of_a_tpu_is_no_kernel():
    scalar = "%x = s32[]{:T(128)S(6)} add(%p, %p)"
    assert kernels.of(entry(P, scalar)) == []
    assert len(kernels.of(entry(P, "%x = s32[] copy(%p)"))) == 1


PLUS = (
    "%q = s32[] parameter(0)",
    "%o = s32[] constant(1)",
    "ROOT %a = s32[] add(%q, %o)",
)


def counting(condition, raised="%r = s32[] add(%i, %one)", first="0"):
    """A loop whose state is (a number, a counter)."""
    state = "%s = (f32[4], s32[]) parameter(0)"
    counter = "%i = s32[] get-tuple-element(%s), index=1"
    head = "(s: (f32[4], s32[])) ->"
    body = (state, counter, "%one = s32[] constant(1)", raised)
    test = (state, counter, "%n = s32[] constant(7)", condition)
    body += ("%x = f32[4] get-tuple-element(%s), index=0",)
    body += ("ROOT %t = (f32[4], s32[]) tuple(%x, %r)",)
    more = "".join(
        f"%{name} {head} {result} {{\n" + "".join(f"  {x}\n" for x in lines) + "}\n\n"
        for name, result, lines in (
            ("plus", "s32[]", PLUS),
            ("body", "(f32[4], s32[])", body),
            ("test", "pred[]", test),
        )
    )
    lines = (P, f"%z = s32[] constant({first})", "%c = s32[] copy(%z)")
    loop = "%w = (f32[4], s32[]) while(%g), condition=%test, body=%body"
    return entry(*lines, "%g = (f32[4], s32[]) tuple(%p, %c)", loop, more=more)


LESS = "ROOT %l = pred[] compare(%i, %n), direction=LT"


@pytest.mark.parametrize(
    "condition, turns",
    [
        (LESS, 7),
        ("ROOT %l = pred[] compare(%n, %i), direction=GT", 7),
        ("ROOT %l = pred[] compare(%i, %i), direction=LT", None),
        ("ROOT %l = pred[] compare(%i, %n), direction=NE", None),
        ("ROOT %l = pred[] and(%i, %n)", None),
    ],
)
def test_turns_that_the_condition_tells(condition, turns):
    assert counting(condition).turns == {"w": turns}


@pytest.mark.parametrize(
    "raised, turns",
    [
        ("%r = s32[] add(%one, %i)", 7),
        ("%r = s32[] fusion(%i), kind=kLoop, calls=%plus", 7),
        ("%r = s32[] add(%i, %i)", None),
        ("%r = s32[] multiply(%i, %one)", None),
        ("%r = s32[] fusion(%one), kind=kLoop, calls=%plus", None),
    ],
)
def test_only_a_counter_by_one_tells_the_turns(raised, turns):
    """A turn may do several things at once, as many as the data want."""
    assert counting(LESS, raised).turns == {"w": turns}


@pytest.mark.parametrize("first, turns", [("0", 7), ("2", 5), ("9", 0)])
def test_turns_count_from_where_the_counter_begins(first, turns):
    assert counting(LESS, first=first).turns == {"w": turns}


# What fits


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 31, 100, 5000])
@pytest.mark.parametrize("first", [1, 8, 256])
def test_the_largest_batch_is_found(limit, first):
    asked = []

    def fits(rows):
        asked.append(rows)
        return rows <= limit

    found = targets.largest(fits, first)
    assert found <= limit and limit <= found + max(found // 16, 0)
    assert len(asked) < 20 and (found == 0 or found in asked)


# Targets


@pytest.mark.parametrize(
    "given, machine, topology, chips",
    [
        ("v5e:2x4", "tpu-v5e", "v5e:2x4", 8),
        ("v5e:1x1", "tpu-v5e", "v5e:2x2", 1),
        ("v4:2x2x4", "tpu-v4", "v4:2x2x4", 16),
        ("h200:8", "h200", "1x1x8", 8),
        ("h100:2x8", "h100", "1x2x8", 16),
        (" a100", "a100", "1x1x1", 1),
    ],
)
def test_a_target_by_its_text(given, machine, topology, chips):
    found = targets.parse(given)
    platform = "tpu" if machine.startswith("tpu") else "cuda"
    assert found == (given.strip(), machine, platform, topology, chips)


@pytest.mark.parametrize(
    "given, said",
    [
        ("abacus:8", "--target=abacus:8: must be of v4:2x2x1, v5e:2x2"),
        ("v5e", "must be v5e and the 2 sides of a slice, as v5e:2x2"),
        ("v5e:8", "must be v5e and the 2 sides"),
        ("v5p:2x2", "must be v5p and the 3 sides"),
        ("v5e:2x0", "must be v5e and the 2 sides"),
        ("h200:x", "must be h200:GPUS or h200:MACHINESxGPUS"),
        ("h200:1x2x8", "must be h200:GPUS or"),
        ("h200:0", "must be h200:GPUS or"),
    ],
)
def test_a_target_that_is_not_there(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        targets.parse(given)


@pytest.mark.parametrize("machine", [x for x in hardware.CHIPS if "tpu" not in x])
def test_a_gpu_is_described_to_its_compiler(machine):
    text, facts = targets.description(machine), hardware.MACHINES[machine]
    found = dict(re.findall(r"^ *(\w+): (\S+)$", text, re.M))
    assert int(found["memory_bandwidth"]) == facts.memory_bandwidth
    assert int(found["device_memory_size"]) == facts.memory
    # What the cores do in a cycle is the vendor's rate in float32 without tensor cores.
    rate = {"a100": 19.5e12, "h100": 67e12, "h200": 67e12}[machine]
    cores = int(found["core_count"]) * int(found["fpus_per_core"])
    done = 2 * cores * 1e9 * float(found["clock_rate_ghz"])
    assert done == pytest.approx(rate, rel=0.01)
    assert text.count("{") == text.count("}") == 3
    major = 8 if machine == "a100" else 9
    assert f"cuda_compute_capability {{ major: {major} minor: 0 }}" in text


def test_a_chip_of_two_devices_is_shared():
    whole = hardware.MACHINES["tpu-v4"]
    half = hardware.shared(whole, 2)
    assert half.peak == whole.peak / 2 and half.memory == whole.memory / 2
    assert half.memory_bandwidth == whole.memory_bandwidth / 2
    assert half.bandwidth == whole.bandwidth and half.clock == whole.clock
    assert hardware.shared(whole, 1) == whole


# The command


def told(target, rows, *, limit=10**9):
    """What a process says of a target: made of the text that is shipped."""
    found = {
        "target": target,
        "machine": "tpu-v5e",
        "compiler": "libtpu 7",
        "chips": 4,
        "devices": 4,
        "batch_size": 4 * rows,
        "seeds": 1,
        "task": 1,
        "steps_per_call": 4,
        "peaks": FACTS._asdict(),
    }
    if rows > limit:
        return found | {"fits": False, "error": "RESOURCE_EXHAUSTED: Ran out"}
    memory = {"arguments": 300e6, "outputs": 201e6, "aliased": 200e6}
    memory |= {"temporaries": 80e6, "program": 19e6, "peak": 310e6}
    memory |= {"held": 400e6, "limit": 1000e6}
    found |= {"seconds": 12.0, "memory": memory, "fits": True, "options": {}}
    return found | targets.program(text("tpu_step"), 4, FACTS)


@pytest.fixture
def command(monkeypatch):
    """Runs the command with children that are not started; what they were asked."""

    def run(*arguments, limit=10**9, installed=("tpu",), devices=None):
        argv = ["scaling", f"--config={TOY}", *arguments]
        values = flags.FlagValues()
        scaling_command.define_flags(values, argv)
        rest, asked = values(argv), []

        def child(given, environment, timeout, what):
            last = dict(x.lstrip("-").partition("=")[::2] for x in given)
            if "one" in last:
                asked.append(("devices", last["one"]))
                return devices
            assert environment == targets.ENVIRONMENT and timeout == 3600
            assert what == last["one_target"]
            rows = int(last.get("per_device_batch", 12))
            asked.append((what, rows))
            return told(what, rows, limit=limit)

        def missing(target):
            return None if target.platform in installed else "it: pip install it"

        monkeypatch.setattr(scaling_command.flags, "FLAGS", values)
        monkeypatch.setattr(scaling_command, "_child", child)
        monkeypatch.setattr(scaling_command.targets, "missing", missing)
        monkeypatch.setattr(scaling_command.sys, "argv", argv)
        return scaling_command.main(rest), asked

    return run


def cells(said, name):
    (row,) = re.findall(rf"^\| {re.escape(name)} +\|(.*)\|$", said, re.M)
    return [cell.strip() for cell in row.split("|")]


def test_the_command_tells_what_was_found(command, capsys, tmp_path):
    path = tmp_path / "found.json"
    code, asked = command(
        "--target=v5e:2x2,v5e:4x4", "--target=v6e:2x2", f"--json={path}"
    )
    said = capsys.readouterr().out
    assert code == 0
    assert asked == [("v5e:2x2", 12), ("v5e:4x4", 12), ("v6e:2x2", 12)]
    assert cells(said, "a step on") == ["v5e:2x2", "v5e:4x4", "v6e:2x2"]
    assert cells(said, "memory of a device, MB")[0] == "400"
    assert cells(said, "- results beside the arguments")[0] == "1"
    assert cells(said, "of its memory, %")[0] == "40"
    assert cells(said, "convolutions in bfloat16")[0] == "2"
    assert cells(said, "all-gather, messages")[0] == "1"
    assert cells(said, "all-gather, MB")[0] == "0.0164"
    found = json.loads(path.read_text())["targets"]
    assert [x["target"] for x in found] == ["v5e:2x2", "v5e:4x4", "v6e:2x2"]
    least = sum(found[0]["least"].values())
    assert float(cells(said, "least time, ms")[0]) == pytest.approx(
        1e3 * least, rel=0.01
    )
    shares = [cells(said, f"- bound by {x}, %")[0] for x in targets.Least._fields]
    assert sum(map(float, shares)) == pytest.approx(100, rel=0.01)
    assert "toy, a later task: a step of 48 examples in all, float32" in said
    assert "Compiled by libtpu 7 under jax" in said


def test_the_largest_batch_is_searched_for(command, capsys):
    code, asked = command("--target=v5e:2x2", "--largest_batch", limit=70)
    said = capsys.readouterr().out
    assert code == 0 and 4 * 66 <= int(cells(said, "largest batch that fits")[0]) <= 280
    assert len({rows for _, rows in asked}) == len(asked) > 3


def test_a_known_program_is_in_no_table(command, capsys, monkeypatch, tmp_path):
    path = tmp_path / "found.json"
    same = {"same": True, "program": "p"}
    monkeypatch.setattr(scaling_command, "_for_target", lambda *_: same)
    assert command("--target=v5e:2x2", "--known=p", f"--json={path}") == (0, [])
    assert "a step on" not in capsys.readouterr().out
    assert json.loads(path.read_text())["targets"] == [same]


def test_what_does_not_fit_is_said(command, capsys):
    code, _ = command("--target=v5e:2x2,v5e:2x4", limit=5)
    said = capsys.readouterr().out
    assert code == 0 and cells(said, "fits") == ["no", "no"]
    assert "v5e:2x2: does not fit. RESOURCE_EXHAUSTED" in said


def test_without_a_compiler_the_program_is_that_of_a_cpu(command, capsys):
    code, asked = command("--target=h200:8,v5e:2x2", devices=7)
    said = capsys.readouterr().out
    assert code == 7 and asked == [("v5e:2x2", 12), ("devices", "8")]
    assert "h200:8: its compiler is not installed (it: pip install it)." in said
    assert "XLA makes for CPUs instead" in said


def test_a_child_that_stands_in_for_a_target_measures_alone(
    command, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(scaling_command, "one", lambda values, number: {"x": number})
    path = tmp_path / "found.json"
    words = "--target=v5e:2x2,h200:8", "--largest_batch", f"--json={path}", "--one=8"
    assert command(*words) == (0, [])
    assert json.loads(capsys.readouterr().out) == {"x": 8} and not path.exists()


def test_a_wrong_target_is_said_in_a_line(command, capsys):
    code, asked = command("--target=v5e:2x2,abacus")
    assert code == 2 and asked == []
    error = capsys.readouterr().err
    assert error.startswith("jaxcl: --target=abacus: must be of") and len(error) < 200


def test_programs_are_kept(tmp_path):
    """An error, too: it would take as long to come to it again."""

    class Lowered:
        compiled = 0

        def compile(self):
            Lowered.compiled += 1
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory\n\nx"
            )

    want = {"error": "RESOURCE_EXHAUSTED: Ran out of memory x"}
    for _ in range(2):
        assert targets._compiled(Lowered(), "name", str(tmp_path / "kept")) == want
    assert Lowered.compiled == 1
    assert targets._compiled(Lowered(), "name", None) == want and Lowered.compiled == 2


def test_a_program_that_is_known_is_not_compiled(monkeypatch):
    class Lowered:
        text = "one"

        def as_text(self):
            return self.text

    def compiled(lowered, name, kept):
        return {"error": "Ran out"}

    monkeypatch.setattr(targets.compiled, "lowered", lambda *_, **__: (Lowered(), {}))
    monkeypatch.setattr(targets, "_compiled", compiled)
    monkeypatch.setattr(targets, "compiler", lambda _: "libtpu 7")
    target = targets.parse("v5e:2x2")
    mesh = types.SimpleNamespace(size=4)
    work = types.SimpleNamespace(mesh=mesh, batch_size=8, together=(), steps_per_call=1)
    measure = functools.partial(targets.measure, work, 1, target, FACTS)
    first = measure()
    assert first["error"] == "Ran out" and not first.get("same")
    again = measure(known=first["program"])
    assert again["same"] and again["program"] == first["program"]
    Lowered.text = "another"
    assert measure(known=first["program"])["error"] == "Ran out"


def test_products_without_tiles_are_those_of_the_library(tmp_path):
    """As of a ViT, where no chip is there to time XLA's own."""

    class Made:
        def memory_analysis(self):
            names = ("argument", "output", "alias", "temp", "generated_code")
            sizes = {f"{name}_size_in_bytes": 1 for name in names}
            return types.SimpleNamespace(**sizes)

        def as_text(self):
            return "HloModule"

    class Lowered:
        asked = []

        def compile(self, compiler_options=None):
            Lowered.asked.append(compiler_options)
            if compiler_options is None:
                raise jax.errors.JaxRuntimeError(
                    "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot"
                )
            return Made()

    library = {"xla_gpu_enable_triton_gemm": False}
    for _ in range(2):  # kept, the second time
        found = targets._compiled(Lowered(), "name", str(tmp_path / "kept"))
        assert found["options"] == library and found["text"] == "HloModule"
    assert Lowered.asked == [None, library]
    setting = tables.Setting("toy", "bfloat16", False, 0.3, {})
    shown = tables.of_targets([told("h200:1", 8) | {"options": library}], setting)
    assert "For h200:1 with xla_gpu_enable_triton_gemm=False: without it" in shown


def test_other_errors_of_a_compiler_are_not_hidden():
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        targets._compiled(Lowered(), "name", None)


def test_a_job_for_devices_that_are_described():
    """Steps a call, unrolling and the mesh are theirs, not those of this machine."""
    here = tuple(jax.devices()[::-1][:4])
    config = toy.config(devices=4)
    with sharding.for_elsewhere(here):
        work = build.planned(config, one_step=False)
        assert [*work.mesh.devices.flat] == [*here] and work.steps_per_call == 8
        with pytest.raises(ValueError, match="config.devices=5: allowed are 1 to 4"):
            sharding.mesh(5)
    state, batch, _ = compiled_lib._arguments(work, 1)
    assert batch["index"].shape == (8, 48)
