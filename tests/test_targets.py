"""Programs that the compilers of TPUs and GPUs make of the toy's steps.

They need no chip, but the compilers: `pip install -e '.[tpu-compiler,gpu-compiler]'`.
Where one is not installed its tests are skipped.
"""

import collections
import itertools
import re

import pytest

from helpers import kernels_on_target, on_target, toy
from jaxcl.scaling import hlo, kernels, targets

NARROW = {"hidden_dim": 16, "output_dim": 128, "memory_size": 512}
# Rows of 128 numbers, as in the papers: narrower ones have other layouts on a TPU.
QUEUES = {
    "method.strategy": "pnr",
    "method.output_dim": 128,
    "method.queue_size": 512,
    "precision": "bfloat16",
}
FAMILIES = {
    "two-view": QUEUES,
    "online": toy.ONLINE | {"method": {"name": "er"}},
    "rehearsal": {"method": NARROW | {"name": "cclis"}, "augment.views": 1},
    "duel": {"method": NARROW | {"name": "duel"}},
    "icl": {
        "method": {"name": "icl", "output_dim": 8},
        "scenario": {"name": "growth", "growth": 0.5},
    },
}
CHIPS = {"tpu": "v5e:2x4", "gpu": "h200:8"}


def needs(chip):
    """Skip a test where the compiler of a chip is not installed."""
    lacks = targets.missing(targets.parse(CHIPS[chip]))
    if lacks:
        pytest.skip(f"no compiler for this chip: {lacks}")


@pytest.fixture(params=CHIPS)
def chip(request):
    needs(request.param)
    return request.param


def step(chip, family):
    """The step of a family's method on eight chips, in bfloat16."""
    if (chip, family) == ("gpu", "icl"):
        pytest.xfail("XLA's compiler for GPUs ends with a failed check of its own")
    return on_target.measured(CHIPS[chip], FAMILIES[family] | {"precision": "bfloat16"})


pytestmark = pytest.mark.slow
EACH = pytest.mark.parametrize("family", FAMILIES)


@EACH
def test_convolutions_of_bfloat16_are_in_bfloat16(chip, family):
    found = step(chip, family)["products"]["convolution"]
    assert list(found) == ["bfloat16"] and found["bfloat16"] > 5


@EACH
def test_all_of_the_state_is_written_over_its_argument(chip, family):
    """What is not is what a step measures, and nothing else."""
    found = step(chip, family)
    assert found["outputs"] - found["outputs_aliased"] == found["metrics"]
    memory = found["memory"]
    # A TPU pads eight numbers to a tile of 1,024.
    assert memory["outputs"] - memory["aliased"] <= 4096 * (found["metrics"] + 1)


def copies(found):
    """Kernels that copy a queue or a memory: (times a step, shape, source)."""
    steps = found["steps_per_call"]
    program = hlo.parse(found["text"], steps=steps)
    held = {tuple(shape) for shape in found["held"]}
    return [
        (kernel.times, kernel.shape, kernel.name)
        for kernel in kernels.copied(kernels.of(program, steps=steps))
        if any(array.sides in held for array in hlo.arrays(kernel.shape))
    ]


@EACH
def test_no_step_copies_a_queue_or_a_memory(chip, family):
    assert not [copy for copy in copies(step(chip, family)) if copy[0] >= 1]


# At the paper's size a GPU does so, too, see docs/targets.md.
QUEUE = (
    "the loop over a call's steps wants queues of [2, K, D] in another layout than the "
    "state has, so that each call copies them there and back"
)
PIXELS = (
    "rows of images are gathered from another layout than the state has; a memory of "
    "[N, H * W * C] would not be copied"
)
COPIED = {
    ("tpu", "two-view"): QUEUE,
    ("tpu", "online"): PIXELS,
}


@pytest.mark.parametrize(
    "chip, family",
    [
        pytest.param(
            *pair,
            marks=pytest.mark.xfail(strict=True, reason=COPIED[pair])
            if pair in COPIED
            else (),
        )
        for pair in itertools.product(CHIPS, FAMILIES)
    ],
)
def test_no_call_copies_a_queue_or_a_memory(chip, family):
    needs(chip)
    assert not copies(step(chip, family))


def test_no_call_copies_a_queue_that_batches_divide():
    """There rows are written at once, as at the papers' sizes; a batch is 48."""
    needs("gpu")
    found = on_target.measured("h200:8", QUEUES | {"method.queue_size": 480})
    assert found["held"] and not copies(found)


def sides_of_copies(found):
    """The sides of every array that a call copies and does not prefetch."""
    steps = found["steps_per_call"]
    ran = kernels.of(hlo.parse(found["text"], steps=steps), steps=steps)
    return [
        array.sides
        for kernel in kernels.copied(ran)
        for array in hlo.arrays(kernel.shape)
    ]


def sides_of_kernels(found):
    """The sides of every array that the program is given, and leaves, of four sides."""
    given = found["text"].splitlines()[0]
    shapes = re.findall(r"\[(\d+,\d+,\d+,\d+)\]", given)
    return [tuple(map(int, sides.split(","))) for sides in shapes]


@EACH
def test_no_call_copies_the_images_of_the_set(chip, family):
    """Of [N, H, W, C] a TPU would, into a layout whose rows it can gather."""
    found = step(chip, family)
    pixels = {"tpu": 128, "gpu": 8 * 8}[chip]  # a byte each; rows of whole tiles
    rows = found["images"] // (pixels + 4)  # and a label
    assert rows > 1000
    assert not [sides for sides in sides_of_copies(found) if rows in sides]


@pytest.mark.parametrize("family", ["two-view", "online", "duel"])
def test_a_gpu_neither_copies_nor_turns_kernels_of_convolutions(family):
    needs("gpu")
    found = step("gpu", family)
    # The maps of the third are smaller than the kernel: XLA makes another convolution
    # of its gradient, whose result may lie in another order.
    second = (3, 3, 4, 8)
    assert second in sides_of_kernels(found)
    copies = sides_of_copies(found)
    assert not [sides for sides in copies if sorted(sides) == sorted(second)]


def test_a_gpu_copies_no_running_statistics():
    """Each is read for the last time where the new one is written over it."""
    needs("gpu")
    found = on_target.measured("h200:1", FAMILIES["online"])
    assert not [sides for sides in sides_of_copies(found) if len(sides) == 1]


def test_a_gpu_passes_incoming_and_replayed_rows_at_once():
    """Three convolutions: three forward, three and two backward, not twice as many."""
    needs("gpu")
    found = on_target.measured("h200:1", FAMILIES["online"])
    assert sum(found["products"]["convolution"].values()) == 3 + 3 + 2


@EACH
def test_nothing_goes_to_the_host(chip, family):
    assert step(chip, family)["host_transfers"] == []


@EACH
def test_messages_of_a_step_are_bounded(chip, family):
    """A few for each layer; ICL has two gradients in a step, others one."""
    found = step(chip, family)
    size, count = collections.Counter(), collections.Counter()
    for message in found["collectives"]:
        bytes_ = sum(part["bytes"] for part in message["parts"])
        size[message["kind"]] += message["times"] * bytes_
        count[message["kind"]] += message["times"]
    assert count["all-reduce"] <= 40 and count["all-gather"] <= 12
    assert 0 < size["all-reduce"] <= 4 * found["state"]["parameters"] + 4096
    # Of ER's draw and ICL's pairs, a TPU moves some indices and masks of 48 rows.
    others = set(size) - {"all-reduce", "all-gather"}
    assert sum(size[kind] for kind in others) <= 1024


def test_a_memory_in_shards_takes_less_of_each_chip(chip):
    changes = toy.ONLINE | {
        "method": {"name": "er"},
        "replay": {"capacity": 65536, "augment": "all", "sharded": True},
    }
    few, many = {"tpu": ("v5e:2x2", "v5e:2x4"), "gpu": ("h200:4", "h200:8")}[chip]
    held = [
        on_target.measured(target, changes)["memory"]["arguments"]
        for target in (few, many)
    ]
    images = 65536 * 8 * 8
    assert held[0] - held[1] > 0.9 * images / 8


@pytest.mark.parametrize("apart", [False, True], ids=["grouped", "apart"])
def test_seeds_apart_make_no_grouped_convolution(chip, apart):
    """`vmap` over seeds makes one with a group for each, unless it is told not to."""
    seeds = {"seeds": 2, "side_by_side": "apart" if apart else None}
    found = on_target.measured(CHIPS[chip], FAMILIES["online"] | seeds)
    assert found["seeds"] == 2
    assert found["products"]["convolution"] and (found["grouped"] == 0) == apart


def test_the_slow_network_sends_no_messages_of_its_own():
    """One for each batch norm of encoder and predictor, forward and back; two more."""
    needs("gpu")
    found = step("gpu", "two-view")
    sent = [x["times"] for x in found["collectives"] if x["kind"] == "all-reduce"]
    assert sum(sent) <= 2 * (3 + 1) + 2  # of the loss and of the gradients


def test_a_teachers_convolutions_add_the_offset_of_their_norm():
    """And end with the ReLU: cuDNN has all of it as one kernel."""
    needs("gpu")
    found = step("gpu", "two-view")
    assert found["text"].count('"__cudnn$convBiasActivationForward"') == 3


def test_a_streamed_loss_takes_no_memory_of_rows_times_columns(chip):
    """Forward and backward, in float32 and bfloat16; the plain form beside it."""
    found = kernels_on_target.streamed(CHIPS[chip])
    parts = 256 * 64 * 128 * 4  # of a GPU's programs
    for rows, columns, made in zip(*found["sizes"], found["streamed"], strict=True):
        assert made["temporaries"] < 4 * 128 * (rows + columns) + parts
        assert made["kernels"] <= 30  # with those that pad
    # A TPU has smaller matrices in its own memory, not the device's.
    assert found["plain"][1]["temporaries"] >= 4 * 1024 * kernels_on_target.COLUMNS


@pytest.mark.parametrize("score", ["affine", "exponential"])
def test_duels_rounds_are_one_kernel(chip, score):
    found = kernels_on_target.selected(CHIPS[chip], score)
    assert found["unknown_loops"] == 0 and found["kernels"] <= 16
