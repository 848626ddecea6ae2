"""Stored vectors brought to a new encoder: files, kills, orders, canaries, refusals."""

import json
import os
import pathlib
import re
import resource
import shlex
import signal
import subprocess
import sys
import types

import jax
import numpy as np
import pyarrow as pa
import pytest
from etils import epath
from PIL import Image
from pyarrow import parquet as pq
from safetensors import numpy as tensors

import jaxcl
from helpers import pages, twins
from jaxcl import cli
from jaxcl.api import index as command
from jaxcl.data.sources import by_name
from jaxcl.errors import Refused
from jaxcl.index import canary, kit, maps, onnx_file, order, upgrade, vectors, ways
from jaxcl.run import encoder_folder, train
from jaxcl.weights import encoder, writer

IMAGES = {
    "kind": "images", "dtype": "uint8", "channels": 1, "size": 8, "resize": None,
    "interpolation": "bicubic", "mean": [0.5], "std": [0.25], "decoder": None,
    "background": 255, "bits": None,
}  # fmt: skip
OLD_WIDTH, PAIRS, ROWS = 12, 300, 700


def leave_update(place, kits, *, accepted=True):
    """A run whose updates left kits."""
    for number, one in enumerate(kits, 1):
        workdir = place / "updates" / f"{number:04d}"
        workdir.mkdir(parents=True, exist_ok=True)
        kit.write_kit(workdir, one, k=5)
        report = {"accepted": accepted, "asked": {}}
        (workdir / "update.json").write_text(json.dumps(report))
    return place


def make_kit(before, after, source="old", target="new", ids=None):
    """A kit of some pairs."""
    fitted = maps.fit_all(before, after, mapped="vectors", k=5)[0]
    measured = ways.measure_ways(before, after, k=5).ways
    ids = [str(i) for i in range(len(before))] if ids is None else ids
    return kit.Kit(source, target, before, after, ids, "digits", fitted, measured)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run with an update, and 700 digits as embedded before and after it."""
    root = tmp_path_factory.mktemp("index")
    card = {"encoder": {"name": "conv_net", "width": 4}, "input": IMAGES}
    module = encoder.make_module(card["encoder"])
    variables = module.init(jax.random.key(0), encoder.blank_inputs(IMAGES))
    stats = variables.get("batch_stats", {})
    net = encoder.make_encoder(card, variables["params"], stats)
    leaves = encoder.flatten_leaves(net.params, net.stats)
    files = {encoder_folder.TENSORS: writer.pack_tensors(leaves, "flax")}
    workdir = epath.Path(root / "run" / "updates" / "0001")
    writer.write_folder(workdir, files, card | writer.describe(net, files), False)
    digits = by_name.load("digits").train.images[:ROWS]
    np.savez(root / "digits.npz", train_x=digits)
    after = net.embed(digits)
    rng = np.random.default_rng(0)
    turn = rng.normal(size=(after.shape[1], OLD_WIDTH)) / 4
    before = np.float32(after @ turn + 0.02 * rng.normal(size=(ROWS, OLD_WIDTH)))
    name = kit.name_encoder({"path": str(workdir)})
    leave_update(root / "run", [make_kit(before[:PAIRS], after[:PAIRS], target=name)])
    np.save(root / "old.npy", before)
    np.save(root / "after.npy", after)
    (root / "ids.txt").write_text("".join(f"{i}\n" for i in range(ROWS)))
    return root


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(vectors, "BLOCK", 4096)


def write_as(suffix, path, rows, ids):
    """Vectors as users have them, with other columns beside them in Parquet."""
    path = f"{path}{suffix}"
    if suffix == ".npy":
        np.save(path, rows)
    elif suffix == ".safetensors":
        tensors.save_file({"train_x": rows, "train_y": np.arange(len(rows))}, path)
    else:
        flat = pa.array(rows.ravel())
        column = pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])
        table = pa.table({"id": ids, "price": np.arange(len(rows)), "emb": column})
        pq.write_table(table, path, row_group_size=111)
    return path


def read_rows(path):
    table = vectors.open_table(path)
    return table.take(np.arange(table.rows))


def run(*words):
    return cli.main(["index", *map(str, words)])


@pytest.mark.parametrize("out", vectors.SUFFIXES)
@pytest.mark.parametrize("suffix", vectors.SUFFIXES)
def test_every_file_is_mapped_row_by_row(root, tmp_path, small_blocks, suffix, out):
    before = np.load(root / "old.npy")
    names = [f"image {i}, left" for i in range(ROWS)]
    path, new = (
        write_as(suffix, tmp_path / "old", before, names),
        tmp_path / f"new{out}",
    )
    words = [f"--run={root / 'run'}", f"--vectors={path}", f"--out={new}"]
    assert run("upgrade", *words) == 0
    arrays = kit.read_kit(root / "run/updates/0001").fitted.arrays
    want = maps.map_features(arrays, before)
    np.testing.assert_allclose(read_rows(str(new)), want, atol=1e-5)
    table = vectors.open_table(str(new))
    (version,) = table.versions
    target = kit.read_kit(root / "run/updates/0001").target
    assert version == (target, "old", maps.map_id(arrays)) and not table.codes.any()
    if out == ".parquet":
        columns = pq.read_table(new)
        assert columns["version"][5].as_py() == str(version)
        if suffix == ".parquet":
            assert columns["id"].to_pylist() == names
            assert columns["price"].to_pylist() == list(range(ROWS))
            assert "emb" in columns.column_names
    assert {x.name for x in tmp_path.iterdir() if "part" in x.name} == set()
    song = f"--canary={new}.canary.safetensors"
    assert run("check", f"--vectors={new}", song) == 0
    # Vectors that are in this space already are copied.
    again = tmp_path / f"again{out}"
    assert run("upgrade", words[0], f"--vectors={new}", f"--out={again}") == 0
    np.testing.assert_array_equal(read_rows(str(again)), read_rows(str(new)))


def test_each_vector_is_of_its_own_version_in_every_block(tmp_path, monkeypatch):
    """Of 13 vectors five lie in a block; what is in the target's space is copied."""
    monkeypatch.setattr(vectors, "BLOCK", 5 * 4 * 4)
    rng = np.random.default_rng(0)
    rows, codes = rng.normal(size=(13, 4)).astype("f4"), rng.permutation(13) % 3
    np.save(tmp_path / "old.npy", rows)
    versions = [vectors.Version(name) for name in ("one", "two", "new")]
    table = vectors.open_table(str(tmp_path / "old.npy"))
    table = table._replace(versions=versions, codes=codes.astype("u2"))
    turns = {name: np.float32(rng.normal(size=(4, 4))) for name in ("one", "two")}
    routes = {x: upgrade.Route(x, [{"matrix": turn}]) for x, turn in turns.items()}
    out = str(tmp_path / "new.npy")
    upgrade.upgrade(table, out, "new", routes, source="")
    want = [twins.unit(rows @ turn) for turn in turns.values()] + [rows]
    np.testing.assert_allclose(
        read_rows(out), np.choose(codes[:, None], want), rtol=1e-5, atol=1e-6
    )
    near = {
        x: order.Reference(np.eye(4, dtype="f4"), np.full(4, n, "f4"))
        for n, x in enumerate(turns)
    }
    planned, errors = upgrade.plan_order(table, "new", lambda x: near[x.encoder], "")
    assert planned.tolist() == [
        *np.flatnonzero(codes == 1),
        *np.flatnonzero(codes == 0),
    ]
    np.testing.assert_array_equal(errors, codes[planned])


def test_half_precision_stays_half_precision(root, tmp_path):
    before = np.load(root / "old.npy")
    np.save(tmp_path / "old.npy", before.astype(np.float16))
    words = [f"--run={root / 'run'}", f"--vectors={tmp_path / 'old.npy'}"]
    assert run("upgrade", *words, f"--out={tmp_path / 'new.npy'}") == 0
    arrays = kit.read_kit(root / "run/updates/0001").fitted.arrays
    found = np.load(tmp_path / "new.npy")
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, maps.map_features(arrays, before), atol=5e-3)


KILLED = """
import os, signal, sys
from jaxcl.api import index
from jaxcl.index import vectors
vectors.BLOCK, blocks = 4096, 0
def stop():
    global blocks
    blocks += 1
    if blocks == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return False
index.upgrade_file(*sys.argv[1:])(stop)
"""


@pytest.mark.parametrize("suffix", vectors.SUFFIXES)
def test_a_killed_upgrade_goes_on_where_it_stopped(
    root, tmp_path, small_blocks, monkeypatch, suffix
):
    names = [root / "run", root / "old.npy", tmp_path / f"new{suffix}"]
    words = [str(x) for x in names]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words])
    assert killed.returncode == -signal.SIGKILL
    part = pathlib.Path(f"{words[2]}.part")
    with open(part, "ab") as file:
        file.write(b"half a row")
    counts, map_features = [], maps.map_features

    def count(arrays, rows):
        counts.append(len(rows))
        return map_features(arrays, rows)

    monkeypatch.setattr(maps, "map_features", count)
    command.upgrade_file(*words)(lambda: False)
    os.unlink(f"{words[2]}.canary.safetensors")
    monkeypatch.undo()
    assert sum(counts) == ROWS - 3 * (4096 // (4 * OLD_WIDTH))
    whole = tmp_path / f"whole{suffix}"
    assert (
        run("upgrade", f"--run={words[0]}", f"--vectors={words[1]}", f"--out={whole}")
        == 0
    )
    np.testing.assert_allclose(read_rows(words[2]), read_rows(str(whole)), atol=1e-6)
    # One that was killed after the last vector writes the canary that is missing.
    song = pathlib.Path(f"{words[2]}.canary.safetensors")
    assert not song.exists()
    command.upgrade_file(*words)(lambda: False)
    assert song.exists()
    with pytest.raises(Refused, match="exists"):
        command.upgrade_file(*words)
    # Another command's draft is refused.
    part.write_bytes(b"")
    pathlib.Path(f"{part}.json").write_text("{}")
    os.unlink(words[2])
    with pytest.raises(Refused, match="new.*part"):
        command.upgrade_file(*words)(lambda: False)


@pytest.mark.parametrize(("suffix", "most"), [(".npy", 9000), (".parquet", 46_000)])
def test_a_full_disk_keeps_what_was_written(
    root, tmp_path, small_blocks, capsys, suffix, most
):
    out = tmp_path / f"new{suffix}"
    words = [f"--run={root / 'run'}", f"--vectors={root / 'old.npy'}", f"--out={out}"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        assert run("upgrade", *words) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    text = capsys.readouterr().err
    assert f"{out}.part" in text and "free there" in text and "continues" in text
    written = pathlib.Path(f"{out}.part").stat().st_size
    assert 0 < written <= most
    work = command.upgrade_file(str(root / "run"), str(root / "old.npy"), str(out))
    if suffix == ".npy":
        with pytest.raises(train.Interrupted):
            work(lambda: True)
        assert pathlib.Path(f"{out}.part").stat().st_size > written
    work(lambda: False)
    arrays = kit.read_kit(root / "run/updates/0001").fitted.arrays
    want = maps.map_features(arrays, np.load(root / "old.npy"))
    np.testing.assert_allclose(read_rows(str(out)), want, atol=1e-5)


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_stopped_refresh_goes_on(root, tmp_path, monkeypatch, killed_at):
    """It stops after it embedded images, or after it replaced the first vectors."""
    words = [f"--run={root / 'run'}", f"--vectors={root / 'old.npy'}"]
    assert run("upgrade", *words, f"--out={tmp_path / 'new.npy'}") == 0
    words[1] = f"--vectors={tmp_path / 'new.npy'}"
    assert run("plan", *words, f"--out={tmp_path / 'plan.csv'}") == 0
    monkeypatch.setattr(vectors, "BLOCK", 4096)
    names = [root / "run", tmp_path / "new.npy", root / "digits.npz"]
    names = [*map(str, [*names, tmp_path / "plan.csv"]), "40%"]
    out, calls = tmp_path / "newer.npy", iter(range(1, 99))
    work = command.refresh_file(*names, str(out))
    with pytest.raises(train.Interrupted):
        work(lambda: next(calls) == killed_at)
    assert not out.exists()
    command.refresh_file(*names, str(out))(lambda: False)
    again = sorted(int(x) for x in command.read_plan(names[3], names[4]))
    want = np.load(tmp_path / "new.npy")
    want[again] = twins.unit(np.load(root / "after.npy")[again])
    np.testing.assert_allclose(np.load(out), want, atol=1e-4)
    left = {x.name for x in tmp_path.iterdir() if x.name.startswith("newer")}
    assert left == {"newer.npy", *(f"newer.npy.{x}" for x in ("json", "version.npy",
                                   "canary.safetensors"))}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("nan", "ids 300, 301, 302"),
        ("zero", "ids 7"),
        ("short", "3 ids for 700"),
        ("twice", "ids.txt.*: .*such as 5, 6, 7"),
        ("width", "11 dimensions.*12"),
        ("length", "lengths of"),
        ("other", "cosines of"),
        ("kind", "old.csv.*npy"),
        ("shape", r"float32\[700\]"),
        ("damaged", "old.npy"),
        ("exists", "new.npy.*exists"),
        ("source", "--source=who.*old"),
        ("no_update", "--run=.*no accepted update"),
    ],
)
def test_bad_inputs_are_refused(root, tmp_path, case, match, capsys):
    rows, ids = np.load(root / "old.npy"), [str(i) for i in range(ROWS)]
    rng, name, run_folder = np.random.default_rng(5), "old.npy", root / "run"
    extra = []
    if case == "nan":
        rows[300:305, 1] = np.nan
    elif case == "zero":
        rows[7] = 0
    elif case == "short":
        ids = ids[:3]
    elif case == "twice":
        ids[100:103] = ids[5:8]
    elif case == "width":
        rows = rows[:, 1:]
    elif case == "length":
        rows *= 50
    elif case == "other":
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        rows = np.float32(twins.unit(rng.normal(size=rows.shape)) * length)
    elif case == "kind":
        name = "old.csv"
    elif case == "shape":
        rows = rows[:, 0]
    elif case == "exists":
        (tmp_path / "new.npy").write_text("mine")
    elif case == "source":
        extra = ["--source=who"]
    elif case == "no_update":
        run_folder = tmp_path
    path = tmp_path / name
    with open(path, "wb") as file:
        np.save(file, rows)
    if case == "damaged":
        path.write_bytes(b"no array")
    (tmp_path / "ids.txt").write_text("".join(f"{x}\n" for x in ids))
    words = [
        f"--run={run_folder}",
        f"--vectors={path}",
        f"--ids={tmp_path / 'ids.txt'}",
    ]
    code = run("upgrade", *words, f"--out={tmp_path / 'new.npy'}", *extra)
    text = capsys.readouterr().err
    assert code == (1 if case in ("nan", "zero") else 2), text
    assert re.search(match, text) and text.count("\n") == 1, text


def test_the_order_puts_first_what_the_map_gets_wrong(root, tmp_path):
    """One part of the space was changed at random: no map finds it."""
    rng = np.random.default_rng(1)
    before = twins.unit(rng.normal(size=(1200, 10)))
    before[:, 0] += np.where(np.arange(1200) % 3 == 0, 3, -3)
    after = before @ np.linalg.qr(rng.normal(size=(10, 10)))[0]
    lost = before[:, 0] > 0
    after[lost] = after[lost][rng.permutation(lost.sum())]
    one = make_kit(np.float32(before[:600]), np.float32(after[:600]))
    reference = order.make_reference(one.before, one.after, one.fitted)
    errors = order.predict_errors(before[600:], reference)
    worst = np.argsort(-errors)[: lost[600:].sum()]
    assert lost[600:][worst].mean() > 0.95
    # The command writes this order, of mapped vectors as of those before.
    leave_update(tmp_path / "run", [one])
    np.save(tmp_path / "old.npy", before[600:])
    words = [f"--run={tmp_path / 'run'}", f"--vectors={tmp_path / 'old.npy'}"]
    assert run("plan", *words, f"--out={tmp_path / 'a.csv'}") == 0
    assert run("upgrade", *words, f"--out={tmp_path / 'new.npy'}") == 0
    words[1] = f"--vectors={tmp_path / 'new.npy'}"
    assert run("plan", *words, f"--out={tmp_path / 'b.csv'}") == 0
    for name in ("a.csv", "b.csv"):
        first = command.read_plan(str(tmp_path / name), "25%")
        assert len(first) == 150 and lost[600:][list(map(int, first))].mean() > 0.95
        lines = (tmp_path / name).read_text().splitlines()
        assert len(lines) == 601 and lines[-1].endswith(",1.0000")
    for wrong in ("0", "601", "101%", "1.5", "x"):
        with pytest.raises(Refused, match="--first"):
            command.read_plan(str(tmp_path / "a.csv"), wrong)
    np.save(tmp_path / "other.npy", 50 * before[600:])  # no encoder's
    words[1] = f"--vectors={tmp_path / 'other.npy'}"
    assert run("plan", *words, f"--out={tmp_path / 'c.csv'}") == 2


def test_a_refreshed_part_is_what_the_encoder_embeds(root, tmp_path, capsys):
    words = [f"--run={root / 'run'}", f"--vectors={root / 'old.npy'}"]
    assert run("upgrade", *words, f"--out={tmp_path / 'new.npy'}") == 0
    words[1] = f"--vectors={tmp_path / 'new.npy'}"
    assert run("plan", *words, f"--out={tmp_path / 'plan.csv'}") == 0
    words += [f"--images={root / 'digits.npz'}", f"--plan={tmp_path / 'plan.csv'}"]
    out = tmp_path / "newer.npy"
    assert run("refresh", *words, "--first=10%", f"--out={out}") == 0
    again = [int(x) for x in command.read_plan(str(tmp_path / "plan.csv"), "10%")]
    mapped, after, found = (
        np.load(x) for x in (tmp_path / "new.npy", root / "after.npy", out)
    )
    others = np.setdiff1d(np.arange(ROWS), again)
    np.testing.assert_array_equal(found[others], mapped[others])
    np.testing.assert_allclose(found[again], twins.unit(after[again]), atol=1e-4)
    table = vectors.open_table(str(out))
    fresh = [i for i in range(ROWS) if not table.versions[table.codes[i]].source]
    assert fresh == sorted(again)
    # What is embedded is not planned again.
    words = [f"--run={root / 'run'}", f"--vectors={out}"]
    assert run("plan", *words, f"--out={tmp_path / 'rest.csv'}") == 0
    rest = {int(x) for x in command.read_plan(str(tmp_path / "rest.csv"), "100%")}
    assert rest == set(others.tolist())
    # Images that are not there, and an index that is still the old one.
    np.savez(tmp_path / "few.npz", train_x=np.zeros((9, 8, 8, 1), np.uint8))
    plan = f"--plan={tmp_path / 'plan.csv'}"
    few = [*words, f"--images={tmp_path / 'few.npz'}", plan]
    capsys.readouterr()
    assert run("refresh", *few, f"--out={tmp_path / 'x.npy'}") == 2
    assert "few.npz" in capsys.readouterr().err
    words[1] = f"--vectors={root / 'old.npy'}"
    words += [f"--images={root / 'digits.npz'}", plan]
    assert run("refresh", *words, f"--out={tmp_path / 'x.npy'}") == 2
    assert "upgrade" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_vectors_by_two_encoders_suffice_without_a_run(root, tmp_path, capsys, suffix):
    before, after = np.load(root / "old.npy"), np.load(root / "after.npy")
    names = [f"image {i}" for i in range(ROWS)]
    mixed = np.random.default_rng(0).permutation(PAIRS)
    new_rows = after[:PAIRS] if suffix == ".npy" else after[mixed]
    old = write_as(suffix, tmp_path / "clip", before[:PAIRS], names[:PAIRS])
    new = write_as(suffix, tmp_path / "dino", new_rows, [names[i] for i in mixed])
    np.save(tmp_path / "y.npy", np.arange(PAIRS) % 3)
    kit_folder, labels = tmp_path / "kit", f"--labels={tmp_path / 'y.npy'}"
    assert (
        run("fit", f"--old={old}", f"--new={new}", f"--out={kit_folder}", labels) == 0
    )
    assert "clip" not in (printed := capsys.readouterr().out) and "class" in printed
    left = kit.read_kit(kit_folder)
    assert (left.source, left.target) == ("clip", "dino")
    assert left.ways["all"]["precision"][0] < 0.5  # these labels mean nothing
    words = [f"--run={kit_folder}", f"--vectors={root / 'old.npy'}"]
    mapped = tmp_path / "mapped.npy"
    assert run("upgrade", *words, f"--out={mapped}") == 0
    queries = np.arange(PAIRS, ROWS)
    near = [
        np.asarray(upgrade.drift.find_neighbours(after[queries], index, 5))
        for index in (np.load(mapped), after, np.roll(after, 1, axis=0))
    ]
    assert maps.share_found(near[0], near[1]).mean() > 0.35
    assert maps.share_found(near[2], near[1]).mean() < 0.1
    assert run("map", words[0], f"--out={tmp_path / 'map.safetensors'}") == 0
    assert maps.read_map(tmp_path / "map.safetensors")[1]["target"] == "dino"
    # What the user embeds again, in the order of the plan, replaces what was mapped.
    words[1] = f"--vectors={mapped}"
    assert run("plan", *words, f"--out={tmp_path / 'plan.csv'}") == 0
    first = command.read_plan(str(tmp_path / "plan.csv"), "20%")
    np.save(tmp_path / "fresh.npy", after[[int(x) for x in first]])
    (tmp_path / "first.txt").write_text("".join(f"{x}\n" for x in first))
    fresh = f"--embedded={tmp_path / 'fresh.npy'}"
    listed = f"--embedded-ids={tmp_path / 'first.txt'}"
    newer = tmp_path / "newer.npy"
    assert run("refresh", *words, fresh, listed, f"--out={newer}") == 0
    again = sorted(int(x) for x in first)
    others = np.setdiff1d(np.arange(ROWS), again)
    np.testing.assert_allclose(
        np.load(newer)[again], twins.unit(after[again]), atol=1e-5
    )
    np.testing.assert_array_equal(np.load(newer)[others], np.load(mapped)[others])
    song = f"--canary={newer}.canary.safetensors"
    assert run("check", f"--vectors={newer}", song) == 0
    capsys.readouterr()
    images = [f"--images={root / 'digits.npz'}", f"--plan={tmp_path / 'plan.csv'}"]
    assert run("refresh", *words, *images, f"--out={tmp_path / 'x.npy'}") == 2
    assert "--embedded" in capsys.readouterr().err
    assert run("refresh", *words, fresh, f"--out={tmp_path / 'x.npy'}") == 2
    assert "--embedded-ids" in capsys.readouterr().err
    np.save(tmp_path / "fresh.npy", before[:, :2].repeat(8, 1)[: len(first)])
    assert run("refresh", *words, fresh, listed, f"--out={tmp_path / 'x.npy'}") == 2
    assert "--embedded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("rows", "--new=.*299.*300"),
        ("few", "--old=.*31 pairs.*at least 32"),
        ("nan", "--new=.*ids 4, 9, 17"),
        ("names", "--source='a'"),
        ("blank", "--target='b c'"),
        ("ids", r"--new=.*lacks 2 .*y, z"),
        ("labels", "--labels=.*300"),
        ("neighbours", "--neighbours=0"),
        ("exists", "--out="),
    ],
)
def test_pairs_that_fit_no_map_are_refused(root, tmp_path, capsys, case, match):
    old, new = (np.load(root / x)[:PAIRS] for x in ("old.npy", "after.npy"))
    suffix, extra, ids = ".npy", [], [str(i) for i in range(PAIRS)]
    old_ids = ids.copy()
    if case == "rows":
        new = new[1:]
    elif case == "few":
        old, new = old[:31], new[:31]
    elif case == "nan":
        new[[4, 9, 17, 20]] = np.nan
    elif case == "names":
        extra = ["--source=a", "--target=a"]
    elif case == "blank":
        extra = ["--target=b c"]
    elif case == "ids":
        suffix, old_ids[5:7] = ".parquet", ["y", "z"]
    elif case == "labels":
        np.save(tmp_path / "y.npy", np.zeros(5, int))
        extra = [f"--labels={tmp_path / 'y.npy'}"]
    elif case == "neighbours":
        extra = ["--neighbours=0"]
    elif case == "exists":
        (tmp_path / "kit").mkdir()
    old = write_as(suffix, tmp_path / "old", old, old_ids)
    new = write_as(suffix, tmp_path / "new", new, ids)
    words = [f"--old={old}", f"--new={new}", f"--out={tmp_path / 'kit'}"]
    assert run("fit", *words, *extra) == 2
    text = capsys.readouterr().err
    assert re.search(match, text) and text.count("\n") == 1, text


def test_a_canary_falls_silent_where_index_and_encoder_part(root, tmp_path, capsys):
    new = tmp_path / "new.npy"
    words = [f"--run={root / 'run'}", f"--vectors={root / 'old.npy'}"]
    assert run("upgrade", *words, f"--out={new}") == 0
    song = f"--canary={new}.canary.safetensors"

    def check(rows, *more, said=""):
        path = tmp_path / "served.npy"
        np.save(path, rows)
        capsys.readouterr()
        code = run("check", f"--vectors={path}", song, *more)
        text = capsys.readouterr().out
        assert said in text, text
        return code

    mapped = np.load(new)
    served = f"--encoder={root / 'run/updates/0001'}"
    assert check(mapped, served) == 0
    grown = np.concatenate([mapped, mapped[:50]])  # entries that joined later
    assert check(grown) == 0
    assert check(np.roll(mapped, 1, axis=0), said="find") == 1
    assert check(np.load(root / "old.npy"), said="12") == 1
    assert check(mapped[:300], said="400 of the canary's 700") == 1
    (tmp_path / "lines").write_text("".join(f"x{i}\n" for i in range(ROWS)))
    assert check(mapped, f"--ids={tmp_path / 'lines'}", said="x" and "700 of") == 1
    # Another encoder is served; some vectors are of another one.
    card = encoder_folder.read_card(root / "run/updates/0001")
    (tmp_path / "encoder").mkdir()
    data = (root / "run/updates/0001" / encoder_folder.TENSORS).read_bytes()
    (tmp_path / "encoder" / encoder_folder.TENSORS).write_bytes(data)
    card = {k: v for k, v in card.items() if k != "checksum"}
    card["checkpoint"] = {"step": 3, "checksum": 4}
    card["checksum"] = encoder_folder.checksum(card)
    (tmp_path / "encoder" / encoder_folder.CARD).write_text(json.dumps(card))
    assert (
        check(mapped, f"--encoder={tmp_path / 'encoder'}", said="served encoder") == 1
    )
    about = json.loads(pathlib.Path(f"{new}.json").read_text())
    about["versions"].append("another")
    pathlib.Path(f"{new}.json").write_text(json.dumps(about))
    codes = np.load(f"{new}.version.npy")
    codes[:20] = 1
    np.save(f"{new}.version.npy", codes)
    assert run("check", f"--vectors={new}", song) == 1
    assert "20 vectors" in capsys.readouterr().out
    assert run("check", f"--vectors={new}", f"--canary={new}") == 2
    # A command that was killed before it wrote the canary writes it with its ids.
    os.unlink(f"{new}.canary.safetensors")
    named = f"--ids={tmp_path / 'lines'}"
    assert run("upgrade", *words, f"--out={new}", named) == 0
    assert check(mapped, named) == 0


class _Graph:
    """What `onnx_file` asks of the package onnx, and NumPy that computes the graph."""

    TensorProto, checker = types.SimpleNamespace(FLOAT=1), types.SimpleNamespace()
    helper, numpy_helper = types.SimpleNamespace(), types.SimpleNamespace()
    checker.check_model = lambda model: None
    numpy_helper.from_array = lambda value, name: (name, value)
    helper.make_opsetid = helper.make_tensor_value_info = lambda *given: given
    helper.make_node = lambda kind, inputs, output, **options: types.SimpleNamespace(
        kind=kind, inputs=inputs, output=output, options=options
    )
    helper.make_graph = lambda *given: given
    helper.make_model = lambda graph, opset_imports: types.SimpleNamespace(
        SerializeToString=lambda: graph
    )

    def compute(graph, rows):
        nodes, _, inputs, outputs, constants = graph
        values = dict(constants) | {"vectors": rows}
        operations = {
            "ReduceL2": lambda x, axis: np.linalg.norm(x, axis=axis[0], keepdims=True),
            "Gelu": lambda x: np.asarray(jax.nn.gelu(x, approximate=True)),
            "Div": np.divide, "Max": np.maximum, "MatMul": np.matmul, "Add": np.add,
            "Identity": lambda x: x,
        }  # fmt: skip
        for node in nodes:
            assert node.options == {"ReduceL2": {"keepdims": 1}}.get(
                node.kind, {"approximate": "tanh"} if node.kind == "Gelu" else {}
            )
            found = operations[node.kind](*(values[x] for x in node.inputs))
            values[node.output[0]] = found
        widths = inputs[0][2][1], outputs[0][2][1]
        assert widths == (rows.shape[1], values["mapped"].shape[1])
        return values["mapped"]


@pytest.mark.parametrize("package", [True, False])
@pytest.mark.parametrize("kind", [*maps.KINDS, "rank"])
def test_onnx_maps_as_numpy_does(kind, package, monkeypatch):
    """Also where the package is not installed, by its names alone."""
    rng = np.random.default_rng(0)
    rows = np.float32(rng.normal(size=(90, 6)))
    options = {"rank": 2 if kind == "rank" else None, "ridge": 0.1}
    target = rows[:, 4::-1] ** 2
    arrays = maps.fit(rows, target, kind.replace("rank", "affine"), options)
    if package:
        pytest.importorskip("onnx")
        from onnx import load_from_string, reference

        graph = load_from_string(onnx_file.pack_onnx(arrays))
        model = reference.ReferenceEvaluator(graph)
        (found,) = model.run(None, {"vectors": 3 * rows})
    else:
        monkeypatch.setitem(sys.modules, "onnx", _Graph)
        found = _Graph.compute(onnx_file.pack_onnx(arrays), 3 * rows)
    np.testing.assert_allclose(found, maps.map_features(arrays, rows), atol=1e-5)


def test_the_map_is_written_with_its_card(root, tmp_path, capsys):
    words = ["map", f"--run={root / 'run'}"]
    assert run(*words, f"--out={tmp_path / 'map.safetensors'}") == 0
    arrays, card = maps.read_map(tmp_path / "map.safetensors")
    left = kit.read_kit(root / "run/updates/0001")
    assert maps.map_id(arrays) == maps.map_id(left.fitted.arrays)
    assert card["dimensions"] == [OLD_WIDTH, left.after.shape[1]]
    assert card["ways"] == left.ways and card["pairs"] == PAIRS
    assert run(*words, f"--out={tmp_path / 'map.txt'}") == 2
    assert "map.txt" in capsys.readouterr().err


def test_a_query_does_not_look_for_its_own_image_however_far_others_are():
    rows = np.float32([[1, 0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
    song = canary.make_canary("one", rows, rows, [*"abc"], k=2)
    assert [{*names} for names in song.expected] == [{*"bc"}, {*"ac"}, {*"ab"}]
    np.testing.assert_allclose(song.cosines, -0.5, rtol=1e-6)


def test_an_interval_is_of_a_sample():
    values = np.array([0.25, 1.0, 0.5])
    half = 1.96 * (7 / 48) ** 0.5 / 3**0.5  # 7 / 48 = 7 / 24 / (3 - 1)
    found = ways.interval(values)
    np.testing.assert_allclose(found, 7 / 12 + half * np.array([0, -1, 1]))


def test_canaries_are_read_only_from_canaries(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors.save_file({"a": np.zeros(1)}, path)
    with pytest.raises(Refused, match="x.safetensors"):
        canary.read_canary(path)


PAGE = pathlib.Path(__file__).parents[1] / "docs" / "index_upgrade.md"


def leave_faiss(rows):
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    faiss.write_index(index, "old.faiss")
    os.symlink("old.faiss", "current.faiss")


def search_faiss(queries):
    import faiss

    return faiss.read_index("current.faiss").search(queries, 5)[1]


def leave_qdrant_client(rows):
    client_lib = pytest.importorskip("qdrant_client")
    client, models = client_lib.QdrantClient(path="qdrant"), client_lib.models
    params = models.VectorParams(size=rows.shape[1], distance=models.Distance.COSINE)
    client.create_collection("blue", vectors_config=params)
    points = [
        models.PointStruct(id=i, vector=row, payload={"price": i})
        for i, row in enumerate(rows.tolist())
    ]
    client.upsert("blue", points)
    client.close()


def search_qdrant_client(queries):
    import qdrant_client

    client = qdrant_client.QdrantClient(path="qdrant")
    found = [
        client.query_points("images", query=row, limit=5).points
        for row in queries.tolist()
    ]
    one = found[0][0]
    assert one.payload["price"] == one.id and " from old by " in one.payload["version"]
    client.close()
    return np.array([[point.id for point in points] for points in found])


def test_the_commands_of_the_page_run_one_after_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits = by_name.load("digits").train.images[:300]
    for name, images in (("indexed_images", digits), ("new_images", 255 - digits[:99])):
        os.makedirs(name)
        for number, image in enumerate(images):
            Image.fromarray(image[..., 0]).save(f"{name}/{number:03d}.png")
    options = {"encoder.width": 4, "plots": False, "tensorboard": False}
    result = jaxcl.fit(
        "indexed_images", encoder="conv_net", epochs=1, batch_size=32, options=options,
        out="runs/mine", quiet=True,
    )  # fmt: skip
    names = sorted(os.listdir("indexed_images"))
    shown = np.stack([np.array(Image.open(f"indexed_images/{x}")) for x in names])
    shown = np.repeat(shown[..., None], 3, axis=3)
    before = result.encoder.embed(shown)
    np.save("old.npy", before)
    pathlib.Path("ids.txt").write_text("".join(f"{x}\n" for x in names))
    with_run, without = (
        [shlex.split(line)[1:] for line in x.replace("\\\n", "").splitlines()]
        for x in pages.blocks(PAGE.read_text(), "")
        if x.startswith("jaxcl")
    )
    update, *rest = with_run
    subprocess.run([sys.executable, "-m", "jaxcl", *update], check=True)
    for words in rest:
        assert cli.main(words) == 0, words
    after = jaxcl.load_encoder("runs/mine/updates/0001").embed(shown)
    again = [names.index(x) for x in command.read_plan("plan.csv", "10%")]
    others = np.setdiff1d(np.arange(300), again)
    mapped, newer = np.load("new.npy"), np.load("newer.npy")
    np.testing.assert_allclose(newer[again], twins.unit(after[again]), atol=1e-4)
    np.testing.assert_array_equal(newer[others], mapped[others])
    np.save("old_pairs.npy", before[:200])
    np.save("new_pairs.npy", after[:200])
    for path in [*pathlib.Path().glob("new*.npy*"), pathlib.Path("plan.csv")]:
        if path.name != "new_pairs.npy":
            path.unlink()
    for words in without:
        if words[1] == "refresh":
            first = command.read_plan("plan.csv", "10%")
            pathlib.Path("first.txt").write_text("".join(f"{x}\n" for x in first))
            np.save("first.npy", after[[int(x) for x in first]])
        assert cli.main(words) == 0, words
    arrays = maps.read_map("map.safetensors")[0]
    np.testing.assert_allclose(
        np.load("new.npy"), maps.map_features(arrays, before), atol=1e-5
    )


@pytest.mark.parametrize("store", ["faiss", "qdrant_client"])
def test_the_page_upgrades_a_store(root, tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    before, after = np.load(root / "old.npy"), np.load(root / "after.npy")
    globals()[f"leave_{store}"](before)
    os.makedirs("runs")
    os.symlink(root / "run", "runs/mine")
    (code,) = (
        x for x in pages.blocks(PAGE.read_text(), "python") if f"import {store}" in x
        or f"from {store} import" in x
    )  # fmt: skip
    exec(compile(code, store, "exec"), {})
    queries = twins.unit(after[:40]).astype(np.float32)
    arrays = kit.read_kit(root / "run/updates/0001").fitted.arrays
    want = np.argsort(-(queries @ maps.map_features(arrays, before).T), axis=1)[:, :5]
    found = globals()[f"search_{store}"](queries)
    assert maps.share_found(found, want).mean() > 0.98  # neighbours may tie


@pytest.mark.parametrize("kind", [*maps.KINDS, "rank"])
def test_the_page_maps_by_numpy_alone(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    rows = np.float32(np.random.default_rng(0).normal(size=(90, 6)))
    options = {"rank": 2 if kind == "rank" else None, "ridge": 0.1}
    arrays = maps.fit(rows, rows[:, ::-1] ** 2, kind.replace("rank", "affine"), options)
    pathlib.Path("map.safetensors").write_bytes(maps.pack_map(arrays))
    np.save("old.npy", rows)
    (code,) = (x for x in pages.blocks(PAGE.read_text(), "python") if "load_file" in x)
    exec(compile(code, "numpy", "exec"), {})
    want = maps.map_features(arrays, rows)
    np.testing.assert_allclose(np.load("mapped.npy"), want, atol=1e-5)
