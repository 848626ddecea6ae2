"""Parts of an index's upgrade against plain loops: every block, every field, limits."""

import json
import types

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from safetensors import numpy as tensors

from helpers import twins
from jaxcl import storage
from jaxcl.api import index as command
from jaxcl.errors import Refused
from jaxcl.index import canary, kit, maps, order, upgrade, vectors, ways
from jaxcl.update import served

RNG = np.random.default_rng(0)
ROWS = np.float32(RNG.normal(size=(43, 6)))


def write_table(path, rows, dtype="f4", versions=None, ids=None, **columns):
    """Vectors with versions in one of the three formats, as jaxcl writes them."""
    path, rows = str(path), np.asarray(rows, dtype)
    if path.endswith(".parquet"):
        flat = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
        columns = columns | {"emb": flat} | ({"id": ids} if ids else {})
        pq.write_table(pa.table(columns), path, row_group_size=9)
    elif path.endswith(".npy"):
        np.save(path, rows)
    else:
        more = {"aside": np.ones((5, 2), "f4"), "a": np.arange(3)}
        tensors.save_file(more | {"vectors": rows}, path)
    return vectors.open_table(path)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("suffix", vectors.SUFFIXES)
def test_every_block_and_row_is_read_from_any_start(
    tmp_path, monkeypatch, suffix, dtype
):
    """43 rows, five in a block, in files with other arrays before and after them."""
    monkeypatch.setattr(vectors, "BLOCK", 5 * 6 * np.dtype(dtype).itemsize)
    table = write_table(tmp_path / f"x{suffix}", ROWS, dtype)
    want = ROWS.astype(dtype)
    assert (table.rows, table.width, table.dtype) == (43, 6, np.dtype(dtype))
    assert table.block_rows() == 5 and not table.versions and not table.codes.any()
    for first in (0, 4, 5, 9, 17, 40, 42):
        blocks = list(table.read(first))
        np.testing.assert_array_equal(np.concatenate(blocks), want[first:])
        assert max(map(len, blocks)) <= 5
    places = np.array([42, 3, 3, 17, 0, 41, 5])
    np.testing.assert_array_equal(table.take(places), want[places].astype("f4"))
    assert table.take(np.array([], int)).shape == (0, 6)


@pytest.mark.parametrize("out", vectors.SUFFIXES)
def test_versions_and_ids_are_read_back(tmp_path, monkeypatch, out):
    """Some rows are embedded again, in blocks of five; all else stays as it is."""
    monkeypatch.setattr(vectors, "BLOCK", 5 * 6 * 4)
    names = [f"{i}" for i in range(43)]
    source = write_table(tmp_path / "old.npy", ROWS)
    mapped = [vectors.Version("new", "a", "m1"), vectors.Version("new", "b", "m2+m3")]
    codes = np.uint16(RNG.integers(0, 2, 43))
    source = source._replace(versions=mapped, codes=codes)
    again, fresh = np.array([0, 4, 5, 20, 42]), 3 * ROWS[::-1][:5]
    path = str(tmp_path / f"new{out}")
    upgrade.replace(source, path, "new", again, fresh, source="new")
    table, want = vectors.open_table(path), ROWS.copy()
    want[again] = twins.unit(fresh)
    np.testing.assert_allclose(table.take(np.arange(43)), want, rtol=1e-6)
    versions = [mapped[code] for code in codes]
    for row in again:
        versions[row] = vectors.Version("new")
    assert [table.versions[code] for code in table.codes] == versions
    assert table.ids.names(range(43)) == names
    np.testing.assert_array_equal(
        table.ids.find(["42", "43", "x", "7"]), [42, -1, -1, 7]
    )
    assert source.codes is codes and set(codes.tolist()) == {0, 1}  # of the input
    # A vector that is mapped once more keeps its first encoder and all its maps.
    route = upgrade.Route("new", [{"matrix": np.eye(6, dtype="f4")}])
    last = upgrade.upgrade(
        table, str(tmp_path / "last.npy"), "e", {"new": route}, source=""
    )
    assert {(x.encoder, x.source, x.by) for x in last} == {
        ("e", "a", f"m1+{route.name()}"), ("e", "b", f"m2+m3+{route.name()}"),
        ("e", "new", route.name()),
    }  # fmt: skip


def test_ids_of_a_text_file_are_lines_whatever_they_hold(tmp_path):
    lines = ["NA", "", '"a"', "x,y", "null", "0"]
    (tmp_path / "ids").write_text("".join(f"{x}\n" for x in lines))
    np.save(tmp_path / "x.npy", ROWS[:6])
    table = vectors.open_table(str(tmp_path / "x.npy"), ids=str(tmp_path / "ids"))
    assert table.ids.names([5, 0, 1, 2, 3, 4]) == [lines[i] for i in (5, 0, 1, 2, 3, 4)]
    np.testing.assert_array_equal(table.ids.find(["", "7", "x,y"]), [1, -1, 3])


@pytest.mark.parametrize(("suffix", "copies"), [(".npy", 1), (".parquet", 2)])
def test_a_file_is_begun_where_it_fits(tmp_path, monkeypatch, suffix, copies):
    needed = copies * (43 * 24 + len(vectors._HEADERS[suffix]((43, 6), np.dtype("f4"))))
    given = str(tmp_path / f"x{suffix}"), 43, 6, "f4", {}
    monkeypatch.setattr(storage, "free_space", lambda path: needed - 1)
    with pytest.raises(OSError, match=f"{needed:,}"):
        vectors.Draft(*given)
    monkeypatch.setattr(storage, "free_space", lambda path: needed)
    vectors.Draft(*given).close()


def test_a_bad_row_is_named_whatever_block_it_is_in(tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "BLOCK", 5 * 6 * 4)
    rows = ROWS.copy()
    rows[17] = 0
    table = write_table(tmp_path / "old.npy", rows)
    route = {"a": upgrade.Route("a", [{"matrix": np.eye(6, dtype="f4")}])}
    with pytest.raises(Refused, match="1 of the vectors 15 to 19 .* 17$"):
        upgrade.upgrade(table, str(tmp_path / "new.npy"), "b", route, source="a")
    table = write_table(tmp_path / "old.npy", ROWS)  # the draft is not of this file
    with pytest.raises(Refused, match=r"new\.npy\.part"):
        upgrade.upgrade(table, str(tmp_path / "new.npy"), "b", route, source="a")
    # Vectors that stay and those that are mapped have one width.
    versions = [vectors.Version("a"), vectors.Version("b")]
    table = table._replace(versions=versions, codes=np.uint16(np.arange(43) % 2))
    route = {"a": upgrade.Route("a", [{"matrix": np.ones((6, 4), "f4")}])}
    with pytest.raises(Refused, match=r"\[4, 6\]"):
        upgrade.upgrade(table, str(tmp_path / "x.npy"), "b", route, source="a")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x: 0.55 * x, ""),
        (lambda x: 1.9 * x, ""),
        (twins.unit, ""),  # as many stores keep them
        (lambda x: 1.03 * twins.unit(x), "lengths"),
        (lambda x: 2.1 * x, "lengths"),
        (lambda x: 0.45 * x, "lengths"),
        (lambda x: x[:, ::-1], "cosines"),
        (lambda x: x[:, 1:], "11 dimensions"),
    ],
)
def test_vectors_of_another_encoder_are_refused(tmp_path, monkeypatch, change, match):
    """By their lengths, here 4 for all; those of a file of many blocks, too."""
    monkeypatch.setattr(vectors, "BLOCK", 64 * 12 * 4)
    base = np.repeat(RNG.normal(size=(20, 12)), 60, axis=0)
    rows = 4 * twins.unit(base + 0.1 * RNG.normal(size=base.shape))
    table = write_table(tmp_path / "x.npy", change(rows[1::2]))
    starts = [start for start in (0, 75, 150, 225, 300, 375, 450, 525)]
    sample = upgrade._sample(table, np.arange(600))
    want = np.concatenate([change(rows[1::2])[x : x + 64] for x in starts])
    np.testing.assert_allclose(sample, want, rtol=1e-5)
    if match:
        with pytest.raises(Refused, match=f"--old=.*{match}"):
            upgrade.check_belongs(table, np.float32(rows[::2]), "--old")
    else:
        upgrade.check_belongs(table, np.float32(rows[::2]), "--old")


def test_a_predicted_error_is_the_mean_of_the_nearest_pairs():
    source, target = (twins.unit(RNG.normal(size=(31, 6))) for _ in range(2))
    fitted = maps.FittedMap("affine", {"rank": None, "ridge": 0.3}, 0.0, {})
    reference, want = order.make_reference(source, target, fitted), np.empty(31)
    for first in (0, 1):
        arrays = maps.fit_affine(
            source[1 - first :: 2], target[1 - first :: 2], ridge=0.3
        )
        mapped = maps.map_features(arrays, source[first::2])
        want[first::2] = 1 - (mapped * target[first::2]).sum(axis=1)
    np.testing.assert_allclose(reference.errors, want, atol=1e-5)
    near = np.argsort(-(twins.unit(ROWS) @ source.T), axis=1)[:, :10]
    found = order.predict_errors(5 * ROWS, reference)
    np.testing.assert_allclose(found, want[near].mean(axis=1), atol=1e-5)
    assert [len(x) for x in upgrade._pieces(np.arange(8193))] == [4097, 4096]


def fit_nothing(*pairs, base=None):
    """The linear map in place of an MLP, which takes seconds to compile."""
    return maps.fit_orthogonal(*pairs) if base is None else base


def same_map(first, second):
    shapes = [{name: np.shape(x) for name, x in one.items()} for one in (first, second)]
    return shapes[0] == shapes[1] and all(
        np.allclose(first[name], second[name], atol=1e-6) for name in first
    )


@pytest.mark.parametrize("turns", [True, False])
def test_the_map_is_chosen_by_recall_and_fitted_to_three_quarters(monkeypatch, turns):
    """Ridge 0.3 is best, then its half rank or none; of equal ones the simplest."""
    source, target = np.float32(RNG.normal(size=(2, 43, 8)))
    held, tried = np.arange(43) % 4 == 3, []
    pairs = source[~held], target[~held]
    best = {(None, 0.3): 0.5, (None, 1.0): 0.5, "orthogonal": 0.45}
    best |= {(4, 0.3): 0.6, "orthogonal": 0.6} if turns else {(2, 0.3): 0.5}
    maps_by_options = {"orthogonal": maps.fit_orthogonal(*pairs)} | {
        (rank, ridge): maps.fit_affine(*pairs, rank=rank, ridge=ridge)
        for rank in (None, 2, 4)
        for ridge in maps.RIDGES
    }

    def recall(arrays, *given):
        assert given[3:] == ("vectors", 9) and (given[2] == held).all()
        np.testing.assert_array_equal(given[:2], (source, target))
        tried.append(next(k for k, x in maps_by_options.items() if same_map(x, arrays)))
        return np.array([best.get(tried[-1], 0.4)])

    layers = []
    monkeypatch.setattr(maps, "measure_recall", recall)
    monkeypatch.setattr(
        maps, "fit_mlp", lambda *rows, base: layers.append((*rows, base)) or base
    )
    found = maps.fit_all(source, target, mapped="vectors", k=10)
    ranks, base = [(2, 0.3), (4, 0.3)], "orthogonal" if turns else (None, 0.3)
    assert tried == ["orthogonal", *((None, x) for x in maps.RIDGES), *ranks, base]
    kinds = ["orthogonal", "affine", "mlp"]
    assert [x.kind for x in found] == (kinds if turns else [*kinds[1:], kinds[0]])
    assert [x.recall for x in found] == ([0.6] * 3 if turns else [0.5, 0.5, 0.45])
    ((*rows, start),) = layers
    assert all(map(np.array_equal, rows, pairs)) and start is found[0].arrays
    by_kind = {one.kind: one for one in found}
    rank = 4 if turns else None
    assert by_kind["affine"].options == {"rank": rank, "ridge": 0.3}
    for kind, one in by_kind.items():  # the chosen one is fitted to all pairs
        arrays = maps.fit(source, target, kind, one.options)
        if kind == "orthogonal" or (turns and kind == "mlp"):
            want = maps.fit_orthogonal(source, target)
        else:
            want = maps.fit_affine(source, target, **one.options)
        assert same_map(arrays, want)
    assert len(layers) == 2 and np.array_equal(layers[1][0], source)


def test_a_layer_lies_along_the_main_axes_of_both_sides(monkeypatch):
    """Of 131 and 135 dimensions it reads and moves the 128 that vary most."""
    shapes, seen = {"down": (128, 4), "offset": 4, "up": (4, 128), "shift": 128}, []
    layer = {name: RNG.normal(size=shape) for name, shape in shapes.items()}
    monkeypatch.setattr(maps, "_train_layer", lambda *x: seen.extend(x) or layer)
    source, target = (
        RNG.normal(size=(150, n)) * np.linspace(1, 9, n) for n in (131, 135)
    )
    base = maps.fit_affine(source, target)
    found, close = maps.fit_mlp(source, target, base=base), np.testing.assert_allclose
    x, y = twins.unit(source), twins.unit(target)
    linear, (inputs, wanted, along, dots, squares) = (
        x @ base["matrix"] + base["shift"],
        seen,
    )
    for rows, side in ((x, found["down"]), (y, found["up"].T)):
        axes = np.linalg.svd(rows - rows.mean(axis=0))[2][:128]
        close(axes.T @ (axes @ side), side, atol=1e-4)
    close(x @ found["down"], inputs @ layer["down"], atol=1e-4)
    for rows, columns in ((y, wanted), (linear, along)):
        close(rows @ found["up"].T, columns @ layer["up"].T, atol=1e-4)
        close(
            rows @ (found["shift"] - base["shift"]), columns @ layer["shift"], atol=1e-4
        )
    close(dots, (linear * y).sum(axis=1), atol=1e-5)
    close(squares, (linear**2).sum(axis=1), atol=1e-5)


def test_each_way_is_measured_as_a_loop_does(monkeypatch):
    """Odd rows search among each other; the worst predicted ones are embedded again."""
    monkeypatch.setattr(maps, "fit_mlp", fit_nothing)
    label, k = RNG.integers(0, 3, 120), 5
    before = np.float32(np.eye(8)[label] + 0.7 * RNG.normal(size=(120, 8)))
    turned = before @ np.linalg.qr(RNG.normal(size=(8, 8)))[0]
    after = np.float32(turned + 0.4 * RNG.normal(size=(120, 8)))
    measured = ways.measure_ways(before, after, label=label, k=k)
    forward = maps.fit_all(before[::2], after[::2], mapped="vectors", k=k)[0]
    back = maps.fit_all(after[::2], before[::2], mapped="queries", k=k)[0]
    old, new, mapped = (
        before[1::2],
        after[1::2],
        maps.map_features(forward.arrays, before[1::2]),
    )
    reference = order.make_reference(before[::2], after[::2], forward)
    worst = np.argsort(-order.predict_errors(old, reference), kind="stable")
    pairs = {
        "old": (old, old),
        "leave": (new, old),
        "forward": (new, mapped),
        "all": (new, new),
    }
    pairs["back"] = maps.map_features(back.arrays, new), old
    for way, count in (("forward_10", 6), ("forward_25", 15), ("forward_50", 30)):
        index = mapped.copy()
        index[worst[:count]] = twins.unit(new[worst[:count]])
        pairs[way] = new, index
    near = {
        way: np.argsort(9 * np.eye(60) - twins.unit(x) @ twins.unit(y).T, axis=1)[:, :k]
        for way, (x, y) in pairs.items()
    }  # fmt: skip
    assert {*measured.ways} == {*pairs}
    for way, places in near.items():
        same = [len({*a} & {*b}) / k for a, b in zip(places, near["all"], strict=True)]
        hits = (label[1::2][places] == label[1::2][:, None]).mean(axis=1)
        for name, values in (("neighbours", same), ("precision", hits)):
            np.testing.assert_allclose(
                measured.ways[way][name], ways.interval(values), atol=2e-3
            )
    odd = np.arange(120) % 2 == 1
    for one in measured.back:
        recall = maps.measure_recall(one.arrays, after, before, odd, "queries", k)
        assert one.recall == pytest.approx(recall.mean())
    recalls = [one.recall for one in measured.back]
    assert (
        recalls == sorted(recalls, reverse=True)
        and measured.forward.kind == forward.kind
    )
    # The same, by hand, of what a map leaves in the files of an update.
    fitted, _ = kit.fit_kit(
        before, after, [*map(str, range(120))], source="a", target="b", images="d", k=k
    )
    want = maps.fit(before, after, forward.kind, forward.options)
    assert maps.map_id(fitted.fitted.arrays) == maps.map_id(want)
    assert (fitted.source, fitted.target, fitted.ids[1]) == ("a", "b", "1")


def test_a_way_serves_from_its_limit_on():
    low = {"leave": 0.4, "back": 0.5, "forward": 0.375, "forward_10": 0.625}
    found = {way: {"neighbours": [0.9, x, 1.0]} for way, x in low.items()}
    found["all"] = {"neighbours": [1.0, 0.1, 1.0]}
    assert ways.list_usable(found, 0.5) == ["back", "forward_10", "all"]
    assert ways.list_usable(found, 0.25) == [*low, "all"]
    found["all"]["precision"] = [0.8, 0.1, 0.9]
    for way, x in low.items():
        found[way]["precision"] = [0.9, x, 1.0]
    assert ways.list_usable(found, 0.5) == ["leave", "back", "forward_10", "all"]
    words = [ways.verdict_of(x) for x in ways.WAYS]
    assert words == ["keep", "adapt", "upgrade", *["refresh"] * 3, "rebuild"]


def make_kit(number, count=60, ids=None, **fields):
    """The kit of update `number`, between spaces, by a map of any numbers."""
    arrays = {"matrix": np.float32(np.eye(6) + 0.1 * number)}
    fitted = maps.FittedMap(
        "orthogonal", {"rank": None, "ridge": None}, number / 8, arrays
    )
    ids = [*map(str, range(count))] if ids is None else ids
    rows = [
        np.float32(np.random.default_rng(10 * number + i).normal(size=(count, 6)))
        for i in (0, 1)
    ]
    measured = {
        way: {"neighbours": [x / 10, 0.0, 1.0]} for x, way in enumerate(ways.WAYS)
    }
    one = kit.Kit(
        f"s{number - 1}", f"s{number}", *rows, ids, "digest", fitted, measured
    )
    return one._replace(**fields)


@pytest.mark.parametrize(("direct", "length"), [(0.0, 2), (None, 1), (1.0, 1)])
def test_the_better_of_a_chain_and_a_map_of_its_own_is_taken(
    monkeypatch, direct, length
):
    """Images that both updates embedded, reordered; of equal recall its own map."""
    last = make_kit(2, ids=[str(i) for i in reversed(range(10, 70))])
    first, k = make_kit(1), 3
    rows, new = first.before[10:], last.after[::-1][:50]
    held = np.arange(50) % 4 == 3
    mapped = maps.map_features(first.fitted.arrays, rows[held])
    mapped = maps.map_features(last.fitted.arrays, mapped)
    near = [
        np.argsort(9 * np.eye(12) - twins.unit(new[held]) @ twins.unit(x).T)[:, :k]
        for x in (mapped, new[held])
    ]
    composed = np.mean([len({*a} & {*b}) / k for a, b in zip(*near, strict=True)])
    asked = []

    def fit_all(before, after, *, mapped, k):
        asked.append((before, after, mapped, k))
        recall = float(np.float32(composed)) if direct is None else direct
        return [maps.FittedMap("orthogonal", {"rank": None, "ridge": None}, recall, {})]

    monkeypatch.setattr(maps, "fit_all", fit_all)
    routes = upgrade.make_routes([first, last], k=k)
    ((before, after, side, count),) = asked
    np.testing.assert_array_equal(before, rows)
    np.testing.assert_array_equal(after, new)
    assert (side, count, {*routes}) == ("vectors", k, {"s0", "s1"})
    route = routes["s0"]
    assert len(route.chain) == length and route.composed == pytest.approx(composed)
    chain = (
        [first.fitted.arrays, last.fitted.arrays]
        if length == 2
        else [maps.fit_orthogonal(rows, new)]
    )
    assert route.name() == "+".join(maps.map_id(x) for x in chain)
    assert [*route.recalls] == ([1 / 8, 1 / 4] if length == 2 else [route.direct])
    np.testing.assert_array_equal(route.apply(rows[held]), mapped) if length == 2 else 0
    assert (routes["s1"].chain, routes["s1"].recalls) == (
        [last.fitted.arrays],
        (1 / 4,),
    )
    for other in (
        last._replace(images="x"),
        make_kit(2, ids=[str(i) for i in range(41, 101)]),
    ):
        assert upgrade.make_routes([first, other], k=k)["s0"].direct is None
    assert len(asked) == 1 and {
        *upgrade.make_routes([first, last], sources={"s1"})
    } == {"s1"}
    upgrade.make_routes([first, make_kit(2, ids=[str(i) for i in range(40, 100)])], k=k)
    assert len(asked) == 2  # 20 images in common are enough for 3 neighbours


def test_files_of_an_update_are_read_back_field_by_field(tmp_path):
    one = make_kit(3)
    kit.write_kit(tmp_path, one, k=4)
    found = kit.read_kit(tmp_path)
    for name, want, got in zip(one._fields, one, found, strict=True):
        if name == "fitted":
            np.testing.assert_array_equal(got.arrays["matrix"], want.arrays["matrix"])
            want, got = want._replace(arrays=0), got._replace(arrays=0)
        assert (
            np.array_equal(got, want) if name in ("before", "after") else got == want
        ), name
    song = canary.read_canary(tmp_path / canary.FILE)
    assert (song.encoder, song.members, song.query_ids) == ("s3", one.ids, one.ids)
    rows = twins.unit(one.after)
    near = np.argsort(9 * np.eye(60) - rows @ rows.T, axis=1, kind="stable")[:, :4]
    assert [[*map(int, names)] for names in song.expected] == near.tolist()
    np.testing.assert_allclose(song.queries, rows, rtol=1e-5)
    np.testing.assert_allclose(
        song.cosines, np.take_along_axis(rows @ rows.T, near, 1), atol=1e-5
    )


def test_a_canary_asks_queries_from_first_to_last_and_counts_what_is_there(tmp_path):
    rows = twins.unit(RNG.normal(size=(900, 6)))
    names = [f"i{i}" for i in range(900)]
    song = canary.make_canary("e", rows, rows, names, k=5)
    assert len(song.queries) == 200 and song.query_ids[::199] == ["i0", "i899"]
    np.testing.assert_allclose(song.queries[-1], rows[-1], rtol=1e-6)
    small = canary.make_canary("e", rows[:20], rows[:20], names[:20], k=5)
    np.save(tmp_path / "x.npy", rows[:20])
    table = vectors.open_table(str(tmp_path / "x.npy"))._replace(
        ids=vectors.Ids(pa.array(names[:20]), 20, "")
    )

    def check(first, swap=False, **options):
        np.save(tmp_path / "y.npy", rows[first:20])
        there = vectors.open_table(str(tmp_path / "y.npy"))
        left = [names[1], names[0], *names[2:20]] if swap else names[first:20]
        ids = vectors.Ids(pa.array(left), len(left), "")
        return canary.check_index(there._replace(ids=ids), small, **options)

    assert check(2) == (1.0, [])  # what is gone is not looked for
    assert [x.split()[0] for x in check(3).wrong] == ["3"]
    swapped = check(0, True, least=0.0)
    assert 0.5 < swapped.share < 1 and not swapped.wrong
    table = table._replace(rows=20)
    assert not check(0, True, least=swapped.share).wrong
    assert check(0, True, least=swapped.share + 1e-9).wrong
    # A version that no vector has any more is no mistake.
    versions = [vectors.Version("e", "d", "m"), vectors.Version("other")]
    for codes, count in ((np.zeros(20), 0), (np.arange(20) < 3, 1)):
        mixed = table._replace(versions=versions, codes=np.uint16(codes))
        assert len(canary.check_index(mixed, small, encoder="e").wrong) == count
    assert len(canary.check_index(table, small, encoder="f").wrong) == 1


def test_a_gap_breaks_the_chain_of_updates(tmp_path, capsys, monkeypatch):
    """Of five, the first is before the gap, the third was rolled back."""
    numbers = [(1, "s0"), (2, "x"), (3, "s2"), (3, "s2"), (4, "s3")]
    for place, (number, source) in enumerate(numbers, 1):
        folder = tmp_path / "updates" / f"{place:04d}"
        folder.mkdir(parents=True)
        one = make_kit(number, source=source, images=f"{place}")
        one = one._replace(before=10**place * one.before)  # no space is another's
        kit.write_kit(folder, one, k=3)
        (folder / "update.json").write_text(json.dumps({"accepted": place != 3}))
    found = command.read_kits(str(tmp_path))
    names = [("x", "s2"), ("s2", "s3"), ("s3", "s4")]
    assert [(one.source, one.target) for one in found] == names
    # Vectors of the first take all three maps; without a name they are of the last.
    for source, many in (("x", 3), (None, 1)):
        path, out = str(tmp_path / "x.npy"), str(tmp_path / f"{many}.npy")
        np.save(path, found[-many].before)
        work = command.upgrade_file(str(tmp_path), path, out, source=source)
        line = work(lambda: False)[1]
        assert all(f"{100 * x / 8:.0f} %" in line for x in range(5 - many, 5))
        want = found[-many].before
        for one in found[-many:]:
            want = maps.map_features(one.fitted.arrays, want)
        np.testing.assert_allclose(np.load(out), want, atol=1e-5)
        (version,) = vectors.open_table(out).versions
        assert version[:2] == ("s4", source or "s3")
        assert version.by.count("+") == many - 1
    # Of a file with versions each vector takes the maps of its own.
    path, out = str(tmp_path / "all.npy"), str(tmp_path / "new.npy")
    np.save(path, np.concatenate([found[-3].before, found[-1].before]))
    np.save(f"{path}.version.npy", np.repeat(np.uint16([0, 1]), 60))
    storage.write_json(f"{path}.json", {"versions": ["s0", "s3"]})
    with pytest.raises(Refused, match="s0"):
        command.upgrade_file(str(tmp_path), path, out)
    storage.write_json(f"{path}.json", {"versions": ["x", "s3"]})
    monkeypatch.setattr(canary, "MEMBERS", 8)
    command.upgrade_file(str(tmp_path), path, out)(lambda: False)
    song = canary.read_canary(f"{out}.canary.safetensors")
    assert song.members == [f"{17 * i}" for i in range(8)]  # from first to last
    want = np.concatenate([np.load(tmp_path / f"{many}.npy") for many in (3, 1)])
    np.testing.assert_allclose(np.load(out), want, rtol=1e-5)
    # A part of it in the newest space is not enough to embed a part again.
    storage.write_json(f"{path}.json", {"versions": ["x", "s4"]})
    with pytest.raises(Refused, match="is not upgraded"):
        command.replace_file(str(tmp_path), path, path, str(tmp_path / "part.npy"))


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_pairs_of_a_fit_are_of_one_image(tmp_path, monkeypatch, suffix):
    """40 of 43 rows; by ids if both files have them, else by the number of the row."""
    names, mixed = [f"i{i}" for i in range(43)], RNG.permutation(43)
    new = -ROWS if suffix == ".npy" else -ROWS[mixed]
    write_table(tmp_path / f"old{suffix}", ROWS, ids=names)
    write_table(tmp_path / f"new{suffix}", new, ids=[names[i] for i in mixed])
    np.save(tmp_path / "y.npy", np.arange(43))
    asked = {}

    def fit_kit(before, after, ids, **options):
        asked.update(options, before=before, after=after, ids=ids)
        return make_kit(1), None

    monkeypatch.setattr(kit, "fit_kit", fit_kit)
    paths = [str(tmp_path / f"{x}{suffix}") for x in ("old", "new")]
    out, labels = str(tmp_path / "kit"), str(tmp_path / "y.npy")
    command.fit_file(*paths, out, labels=labels, rows=40, neighbours=7)
    rows = asked["label"]
    assert len({*rows.tolist()}) == 40 and (np.diff(rows) > 0).all() and rows[-1] > 40
    np.testing.assert_array_equal(asked["before"], ROWS[rows])
    np.testing.assert_array_equal(asked["after"], -ROWS[rows])
    want = [str(x) for x in rows] if suffix == ".npy" else [names[x] for x in rows]
    assert (asked["ids"], asked["k"]) == (want, 7)
    assert (asked["source"], asked["target"]) == ("old", "new")
    asked.clear()
    command.fit_file(*paths, f"{out}2", rows=32, neighbours=15, source="a", target="b")
    assert (asked["source"], asked["target"], asked["label"]) == ("a", "b", None)
    with pytest.raises(Refused, match="--old=.* 32 pairs, must be at least 34"):
        command.fit_file(*paths, f"{out}3", rows=32, neighbours=16)


def test_a_plan_has_every_row_and_what_to_expect(tmp_path, monkeypatch):
    """In each chunk of 100,000 lines: row, error, percent and expectation."""
    kit.write_kit(tmp_path, make_kit(1), k=3)
    np.save(tmp_path / "x.npy", ROWS)
    rows, errors = np.arange(43)[::-1], np.linspace(2, 1, 43, dtype="f4")
    more = 100_000 // 43 + 1
    monkeypatch.setattr(upgrade, "check_belongs", lambda *given: None)
    monkeypatch.setattr(
        upgrade,
        "plan_order",
        lambda *given: (np.tile(rows, more), np.repeat(errors, more)),
    )
    curve = command.plan_file(
        str(tmp_path), str(tmp_path / "x.npy"), str(tmp_path / "p")
    )
    assert [*curve.items()] == [(0, 0.2), (10, 0.3), (25, 0.4), (50, 0.5), (100, 0.6)]
    lines = (tmp_path / "p").read_text().splitlines()[1:]
    count = 43 * more
    assert len(lines) == count > 100_000
    for place in (0, count // 20, count // 2, 99_999, 100_000, count - 1):
        row, percent = 42 - place % 43, 100 * (place + 1) / count
        expected = np.interp(percent, [*curve], [*curve.values()])
        want = [row, row, errors[place // more], percent, expected]
        np.testing.assert_allclose(
            [*map(float, lines[place].split(","))], want, atol=6e-5
        )
    (tmp_path / "q").write_text("id,row\n" + "".join(f"i{i},0\n" for i in range(8)))
    for first, many in (("1", 1), ("8", 8), ("25%", 2), ("100%", 8), ("70%", 6)):
        found = command.read_plan(str(tmp_path / "q"), first)
        assert found == [f"i{i}" for i in range(many)]


def test_an_index_that_was_kept_is_of_the_encoder_whose_space_it_has(tmp_path):
    rng = np.random.default_rng(0)
    rows, arrays = rng.normal(size=(5, 4)), {"matrix": rng.normal(size=(4, 3))}
    source = {"path": str(tmp_path), "step": 7, "checksum": "ab"}
    embedder = types.SimpleNamespace(embed=lambda images: images, source=source)
    work = types.SimpleNamespace(sample=(rows, embedder), parent=str(tmp_path))
    plain = served.embed_old(work)
    np.testing.assert_array_equal(plain.rows, rows)
    assert plain.encoder == kit.name_encoder(source)
    card = {"source": "the one in use", "target": "the one before"}
    (tmp_path / maps.FILE).write_bytes(maps.pack_map(arrays, card))
    kept = served.embed_old(work)
    np.testing.assert_array_equal(kept.rows, maps.map_features(arrays, rows))
    assert kept.encoder == "the one before"
