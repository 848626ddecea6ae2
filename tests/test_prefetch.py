import functools
import itertools
import shutil
import threading
import time

import jax
import numpy as np
import pytest
from PIL import Image

from helpers.crops import check_boxes, torchvision_box
from jaxcl.data import stream
from jaxcl.data.feed import prefetch
from jaxcl.data.images import crops, decode, readers
from jaxcl.data.sources import by_name


def lazy(n=23, bad_row=-1):
    """Images of differing size, a function of the row."""

    def read(row):
        if row == bad_row:
            raise ValueError(f"row {row} is bad")
        rng = np.random.default_rng(row)
        return rng.integers(0, 256, (20 + row % 7, 30 - row % 5, 3), np.uint8)

    return function_rows(read, n)


def function_rows(read, n):
    label = (np.arange(n) % 5).astype(np.int32)
    reader = readers.FunctionRows(read, n, "made")
    return stream.Examples(label, np.zeros_like(label), reader=reader)


def in_memory(n=23):
    label = (np.arange(n) % 5).astype(np.int32)
    images = np.random.default_rng(0).integers(0, 256, (n, 6, 5, 3), np.uint8)
    return stream.Examples(label, np.zeros_like(label), images)


def source(examples, rows=None):
    rows = np.arange(2, len(examples.label)) if rows is None else rows
    return stream.Source(examples, np.asarray(rows, np.int32))


PLAN = {"seed": 3, "task": 1, "epochs": 3, "batch_size": 4}
CROP = crops.RandomCrop(8)


def check_equal(one, two):
    one, two = list(one), list(two)
    assert len(one) == len(two) > 0
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            np.testing.assert_array_equal(a[key], b[key])


def test_resident_batches_are_the_schedule():
    data = source(in_memory())
    got = list(prefetch.batches(data, **PLAN))
    plan = stream.schedule(data, **PLAN)
    assert [b["index"].tolist() for b in got] == [plan[i].tolist() for i in range(15)]
    assert [*got[0]] == ["index"] and got[0]["index"].dtype == np.int32
    check_equal(prefetch.batches(data, **PLAN, start=4), got[4:])
    assert not [*prefetch.batches(data, **PLAN, start=15)]
    with pytest.raises(ValueError, match="views=2.*crop"):
        prefetch.batches(data, **PLAN, views=2)
    for start in (-1, 16):
        with pytest.raises(ValueError, match=f"start={start}"):
            prefetch.batches(data, **PLAN, start=start)
    halves = [
        prefetch.batches(data, **PLAN, process_index=i, process_count=2) for i in (0, 1)
    ]
    for whole, *parts in zip(got, *halves, strict=True):
        joined = np.concatenate([part["index"] for part in parts])
        np.testing.assert_array_equal(joined, whole["index"])


def expected_crops(data, crop, views):
    """The documented rule, in plain loops."""
    plan = stream.schedule(data, **PLAN)
    for step in range(len(plan)):
        epoch, within = divmod(step, plan.steps_per_epoch)
        images = []
        for i, row in enumerate(plan[step]):
            seed = [PLAN["seed"], PLAN["task"], epoch, within * 4 + i + 1]
            rng = np.random.default_rng(seed)
            image = data.examples.read(row)
            images.append([crop(image, rng) for _ in range(views)])
        yield {
            "image": np.array(images),
            "label": data.examples.label[plan[step]],
            "index": plan[step],
        }


def test_streamed_crops_restart_and_processes():
    data = source(lazy())
    options = {**PLAN, "resident": False, "crop": CROP, "views": 2}
    whole = list(prefetch.batches(data, **options))
    assert whole[0]["image"].shape == (4, 2, 8, 8, 3)
    crop = CROP._replace(decoder=decode.choose_decoder())
    check_equal(whole, expected_crops(data, crop, 2))
    # Views and epochs differ, restarts do not.
    assert (whole[0]["image"][:, 0] != whole[0]["image"][:, 1]).any()
    check_equal(prefetch.batches(data, **options, start=7), whole[7:])
    parts = [
        prefetch.batches(data, **options, process_index=i, process_count=2)
        for i in (0, 1)
    ]
    joined = [
        {key: np.concatenate([a[key], b[key]]) for key in a}
        for a, b in zip(*parts, strict=True)
    ]
    check_equal(joined, whole)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(workers):
    data = source(lazy())
    options = {**PLAN, "resident": False, "crop": CROP, "views": 2}
    whole = list(prefetch.batches(data, **options))
    check_equal(prefetch.batches(data, **options, workers=workers), whole)
    check_equal(prefetch.batches(data, **options, workers=workers, start=7), whole[7:])
    examples, rows = data.examples, data.rows[:10]
    crop = crops.CenterCrop(8, 10)
    check_equal(
        prefetch.evaluation_batches(examples, rows, 4, crop=crop, workers=workers),
        prefetch.evaluation_batches(examples, rows, 4, crop=crop),
    )


def test_as_many_images_are_read_at_once_as_there_are_workers():
    together, begun = threading.Barrier(3, timeout=30), []

    def read(row):  # cannot be pickled: it is read in this process
        begun.append(row)
        if row < 3:  # of one batch: its images do not wait for each other
            together.wait()
        return np.full((8, 8, 3), row, np.uint8)

    examples = function_rows(read, 60)
    made = prefetch.evaluation_batches(examples, np.arange(60), 4, workers=3)
    first = next(made)
    assert first["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    time.sleep(0.1)
    assert len(begun) <= 12  # one is taken, and at most 3 images and a batch wait
    rest = [int(batch["index"][0]) for batch in made]
    assert rest == [*range(4, 60, 4)] and sorted(begun) == [*range(60)]


def test_errors_of_readers_arrive_in_order_and_threads_end():
    before = threading.active_count()
    data = source(lazy(bad_row=7), rows=[2, 3, 4, 5, 6, 8, 9, 7])
    options = {"seed": 3, "task": 1, "epochs": 4, "batch_size": 2, "resident": False}
    plan = stream.schedule(data, seed=3, task=1, epochs=4, batch_size=2)
    bad = next(step for step in range(len(plan)) if 7 in plan[step])
    made = prefetch.batches(data, **options, workers=3, crop=CROP)
    for step in range(bad):
        assert next(made)["index"].tolist() == plan[step].tolist()
    with pytest.raises(ValueError, match="row 7 is bad"):
        next(made)
    made = prefetch.batches(source(lazy()), **options, workers=3, crop=CROP)
    next(made)
    made.close()  # in the middle, with batches under way
    assert threading.active_count() == before


def test_evaluation_batches_pad_and_keep_order():
    examples, rows = in_memory(), np.array([5, 3, 22, 0, 7, 1, 2])
    got = list(prefetch.evaluation_batches(examples, rows, 4))
    assert [len(batch["mask"]) for batch in got] == [4, 4]
    mask = np.concatenate([batch["mask"] for batch in got])
    assert mask.tolist() == [1] * 7 + [0] and mask.dtype == np.float32
    index = np.concatenate([batch["index"] for batch in got])
    np.testing.assert_array_equal(index[:7], rows)
    for batch in got:
        np.testing.assert_array_equal(batch["image"], examples.images[batch["index"]])
        np.testing.assert_array_equal(batch["label"], examples.label[batch["index"]])
    halves = [
        list(
            prefetch.evaluation_batches(
                examples, rows, 4, process_index=i, process_count=2
            )
        )
        for i in (0, 1)
    ]
    for whole, *parts in zip(got, *halves, strict=True):
        for key in whole:
            joined = np.concatenate([part[key] for part in parts])
            np.testing.assert_array_equal(joined, whole[key])
    assert list(prefetch.evaluation_batches(examples, rows[:0], 4)) == []
    with pytest.raises(ValueError, match="batch_size=0"):
        prefetch.evaluation_batches(examples, rows, 0)


def test_evaluation_crop():
    crop = crops.CenterCrop(8, 10, decoder="pillow")
    examples = lazy()
    (batch,) = prefetch.evaluation_batches(examples, np.arange(3), 3, crop=crop)
    for row in range(3):
        image = Image.fromarray(examples.read(row))
        width, height = image.size  # 30 - row, 20 + row
        long = int(10 * width / height)
        small = np.asarray(image.resize((long, 10), Image.BICUBIC))
        left = round((long - 8) / 2)
        np.testing.assert_array_equal(batch["image"][row], small[1:9, left : left + 8])


# --- crops


def test_center_crop_of_both_orientations(decoder):
    image = np.random.default_rng(0).integers(0, 256, (10, 14, 3), np.uint8)
    crop = crops.CenterCrop(6, 10, decoder=decoder)
    np.testing.assert_array_equal(crop(image), image[2:8, 4:10])
    turned = image.transpose(1, 0, 2)
    np.testing.assert_array_equal(crop(turned), turned[4:10, 2:8])
    assert crop(image[:5, :7, :1]).shape == (6, 6, 1)
    # Halves are rounded to even: of 2.5 and 3.5 rows the crop begins at 2 and 4.
    for short, top in ((11, 2), (13, 4)):
        crop = crops.CenterCrop(6, short, decoder=decoder)
        square = np.arange(short**2, dtype=np.uint8).reshape(short, short, 1)
        np.testing.assert_array_equal(crop(square), square[top:][:6, top : top + 6])


def test_boxes_have_torchvisions_distribution():
    rng = np.random.default_rng(0)
    crop = crops.RandomCrop(8, scale=(0.2, 0.6), ratio=(0.5, 2.0))
    boxes = np.array([crop.box(400, 500, rng) for _ in range(4000)])
    check_boxes(boxes, 400, 500, crop.scale, crop.ratio)
    top, _, h, w = boxes.T
    area, ratio = h * w / 200_000, w / h
    assert 0.199 < area.min() and area.max() < 0.601
    assert 0.49 < ratio.min() < 0.55 and 1.9 < ratio.max() < 2.03
    # The first and the last position of a box are drawn, too.
    room = 400 - h
    assert (top == room)[room > 20].any() and (top == 0)[room > 20].any()


@pytest.mark.parametrize("height, width", [(8, 400), (400, 8)])
def test_in_a_narrow_image_a_box_in_the_middle_has_the_nearest_ratio(height, width):
    crop = crops.RandomCrop(8, scale=(0.9, 1.0), ratio=(0.5, 2.0))
    box = crop.box(height, width, np.random.default_rng(0))
    want = torchvision_box(
        np.random.default_rng(0), height, width, crop.scale, crop.ratio
    )
    assert (*box,) == want


def test_resize_is_antialiased_and_centred(decoder):
    resize = functools.partial(crops.resize, interpolation="bicubic", decoder=decoder)
    # A mean over 64 noisy pixels deviates by 9, one over the nearest 4 by 37.
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    assert resize(noise, 8, 8).std() < 16
    # One side shrinks, the other grows: means over 8 pixels.
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    assert np.abs(resize(stripes, 128, 8).astype(int) - 127).max() <= 12
    ramp = np.repeat(np.arange(64, dtype=np.uint8)[None, :, None] * 4, 64, 0)
    small = resize(ramp, 16, 16)[..., 0].astype(int)
    np.testing.assert_allclose(small[8, 2:-2], np.arange(16)[2:-2] * 16 + 6, atol=1)
    large = resize(ramp, 64, 128)[..., 0].astype(int)
    want = ((np.arange(128) + 0.5) / 2 - 0.5) * 4
    np.testing.assert_allclose(large[8, 8:-8], want[8:-8], atol=1)
    assert resize(ramp, 5, 7).shape == (5, 7, 1)
    # Beside a step a bicubic curve overshoots, a straight line does not.
    step = np.where(np.arange(8) < 4, 50, 200)[None, :, None].repeat(8, 0)
    for interpolation, most in (("bicubic", range(202, 255)), ("bilinear", (200,))):
        grown = resize(step.astype(np.uint8), 24, 24, interpolation=interpolation)
        assert grown.max() in most


# --- reading ahead


def test_ahead_works_ahead_but_not_further_than_depth():
    placed = []
    made = prefetch.run_ahead(
        itertools.count(), lambda x: placed.append(x) or x, depth=2
    )
    assert next(made) == 0
    deadline = time.monotonic() + 5
    while len(placed) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.15)
    # One taken, two waiting, one in the thread's hand.
    assert placed == [0, 1, 2, 3]
    made.close()


def test_a_batch_is_placed_under_the_flags_of_a_run():
    flag = "jax_numpy_dtype_promotion"
    try:
        jax.config.update(flag, "strict")
        made = prefetch.run_ahead(iter([0]), lambda _: getattr(jax.config, flag))
        assert next(made) == "standard"
    finally:
        jax.config.update(flag, "standard")


def test_ahead_raises_in_order_and_closes():
    closed = []

    def numbers():
        try:
            for number in range(5):
                time.sleep(0.01)
                yield number
            raise KeyError("end of numbers")
        finally:
            closed.append(True)

    made = prefetch.run_ahead(numbers(), lambda x: x)
    assert [next(made) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="end of numbers"):
        next(made)
    assert closed == [True]

    def refuse(x):
        raise OSError("no place")

    with pytest.raises(OSError, match="no place"):
        next(prefetch.run_ahead(numbers(), refuse))
    assert closed == [True] * 2
    before = threading.active_count()
    endless = numbers()  # which is closed, though it is still there
    made = prefetch.run_ahead(endless, lambda x: x, depth=1)
    next(made)
    made.close()  # while the thread reads
    assert closed == [True] * 3 and threading.active_count() == before
    with pytest.raises(ValueError, match="depth=0"):
        prefetch.run_ahead(numbers(), refuse, depth=0)


# --- images that stay in memory


def test_images_that_stay_in_memory_are_decoded_once(tmp_path):
    for label in range(2):
        (tmp_path / f"class{label}").mkdir()
        for i in range(8):
            image = np.random.default_rng(i).integers(0, 256, (9 + i, 8, 3), np.uint8)
            Image.fromarray(image).save(tmp_path / f"class{label}" / f"{i}.png")
    data = source(by_name.load("image_folder", path=str(tmp_path)).train, range(8))
    options = {**PLAN, "resident": False, "workers": 2, "crop": CROP}
    whole = list(prefetch.batches(data, **options))
    shutil.rmtree(tmp_path / "class0")  # nothing is read again
    check_equal(prefetch.batches(data, **options), whole)
    reader = data.examples.reader
    assert len(reader.cache) == 8
    other = data.examples._replace(reader=reader.uncached())
    with pytest.raises(decode.Unreadable):  # or they would not be equal by chance
        list(prefetch.batches(source(other, range(8)), **options))
