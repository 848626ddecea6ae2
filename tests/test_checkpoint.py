"""Checkpoints: exact restore, damage, other meshes, full disks."""

import pathlib
import resource
import shutil
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcl import core, sharding
from jaxcl.run import checkpoint, result_file


def make_state(seed, mesh):
    """One leaf of every type that methods keep."""
    key = jax.random.key(seed)
    tree = {
        "key": key,
        "f32": jax.random.normal(key, (3, 5)),
        "bf16": jax.random.normal(key, (7,), jnp.bfloat16),
        "u8": jax.random.randint(key, (2, 4), 0, 255).astype(jnp.uint8),
        "i32": jnp.int32(seed),
        "bool": jax.random.bernoulli(key, 0.5, (6,)),
        "pair": (None, {}, jnp.ones(())),
    }
    return jax.jit(core.copy, out_shardings=sharding.replicated(mesh))(tree)


def bits(tree):
    return np.asarray(checkpoint.checksum(tree))


def files(directory):
    return [p for p in pathlib.Path(directory).rglob("*") if p.is_file()]


def test_restores_every_type_bitwise_on_another_mesh(tmp_path):
    state = make_state(3, sharding.mesh(4))
    saver = checkpoint.Checkpoints(tmp_path)
    saver.save(7, state, {"task": 1, "nested": [1.5, None]})
    saver.close()
    other = make_state(0, sharding.mesh(2))
    restored = checkpoint.Checkpoints(tmp_path).restore(other)
    assert restored.number == 7
    assert restored.cursor == {"task": 1, "nested": [1.5, None]}
    chex.assert_trees_all_equal_shapes_and_dtypes(restored.state, state)
    np.testing.assert_array_equal(bits(restored.state), bits(state))
    np.testing.assert_array_equal(restored.state["f32"], state["f32"])
    assert restored.state["f32"].sharding.mesh.size == 2


def test_checksum_sees_one_bit_and_a_swap():
    tree = {"x": jnp.array([1.0, 2.0, 3.0])}
    for other in ([1.0, 2.0, np.nextafter(np.float32(3), np.float32(4))], [2.0, 1, 3]):
        assert bits({"x": jnp.array(other, jnp.float32)}) != bits(tree)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damaged_newest_falls_back_and_says_so(tmp_path, caplog, damage):
    mesh = sharding.mesh(1)
    saver = checkpoint.Checkpoints(tmp_path, keep=2)
    for number in (1, 2, 3):
        saver.save(number, make_state(number, mesh), {"n": number})
    saver.close()
    assert {p.name for p in tmp_path.iterdir()} == {"2", "3"}  # keep=2
    hurt = max(files(tmp_path / "3" / "state" / "d"), key=lambda p: p.stat().st_size)
    content = bytearray(hurt.read_bytes())
    if damage == "truncate":
        hurt.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        hurt.write_bytes(content)
    saver = checkpoint.Checkpoints(tmp_path, keep=2)
    restored = saver.restore(make_state(0, mesh))
    assert restored.number == 2 and restored.cursor == {"n": 2}
    np.testing.assert_array_equal(bits(restored.state), bits(make_state(2, mesh)))
    assert "checkpoint 3" in caplog.text and "damaged" in caplog.text
    saver.save(3, make_state(30, mesh), {"n": 30})  # its number is free again
    saver.close()
    again = checkpoint.Checkpoints(tmp_path).restore(make_state(0, mesh))
    assert again.cursor == {"n": 30}


def test_a_cursor_with_another_digit_is_damage(tmp_path, caplog):
    state = make_state(1, sharding.mesh(1))
    saver = checkpoint.Checkpoints(tmp_path)
    saver.save(1, state, {"results": {"x": [0.25, None]}, "offset": 7, "é": 1e-30})
    saver.save(2, state, {"results": {"x": [0.25, None]}, "offset": 1234567})
    saver.close()
    (hurt,) = [p for p in files(tmp_path / "2") if b"1234567" in p.read_bytes()]
    hurt.write_bytes(hurt.read_bytes().replace(b"1234567", b"1234568"))
    restored = checkpoint.Checkpoints(tmp_path).restore(state)
    assert restored.number == 1 and restored.cursor["offset"] == 7
    assert "checksum" in caplog.text


def test_all_damaged_is_an_error(tmp_path):
    mesh = sharding.mesh(1)
    saver = checkpoint.Checkpoints(tmp_path)
    saver.save(1, make_state(1, mesh), {})
    saver.close()
    for path in files(tmp_path / "1" / "state" / "d"):
        path.write_bytes(b"")
    match = r"every checkpoint in .* is damaged \(\[1\]\), the newest by: \w+Error: "
    with pytest.raises(checkpoint.CheckpointError, match=match) as error:
        checkpoint.Checkpoints(tmp_path).restore(make_state(0, mesh))
    assert "remove" not in str(error.value) and "delete" not in str(error.value)


def saved_twice(directory, state):
    saver = checkpoint.Checkpoints(directory)
    saver.save(1, state, {"n": 1})
    saver.save(2, state, {"n": 2})
    saver.close()


def with_optimizer(tx):
    params = {"w": jnp.ones((3, 2))}
    state = core.new_state(jax.random.key(0), params, {}, tx, ())
    return jax.device_put(state, sharding.replicated(sharding.mesh(1)))


@pytest.mark.parametrize(
    "saved, wanted, words",
    [
        (
            optax.sgd(0.1),
            optax.sgd(0.1, momentum=0.9),
            r"\['opt_state'\]\['0'\]\['trace'\]\['w'\] .*absent.*float32\[3, 2\] here$",
        ),
        (
            optax.sgd(0.1, momentum=0.9),
            optax.adam(0.1),
            r"\['count'\] is absent in the checkpoint, int32\[\] here; .*\['mu'\].*; "
            r".*\['nu'\].*; and 1 more$",
        ),
        (
            optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
            optax.sgd(0.1, momentum=0.9),
            r"\['w'\] is bfloat16\[3, 2\] in the checkpoint, float32\[3, 2\] here$",
        ),
    ],
    ids=["momentum", "adam", "dtype"],
)
def test_another_state_is_told_leaf_by_leaf_and_stays(tmp_path, saved, wanted, words):
    saved_twice(tmp_path / "run", with_optimizer(saved))
    before = files(tmp_path)
    with pytest.raises(checkpoint.Misfit, match=words) as error:
        checkpoint.Checkpoints(tmp_path / "run").restore(with_optimizer(wanted))
    assert f"{tmp_path}/run/2" in str(error.value)
    assert "damaged" not in str(error.value) and files(tmp_path) == before
    same = checkpoint.Checkpoints(tmp_path / "run").restore(with_optimizer(saved))
    assert same.number == 2


FAILURES = {
    "disk": OSError(5, "Input/output error"),
    "refused": PermissionError(13, "Permission denied"),
    "late": TimeoutError("no answer"),
    "bucket": ValueError("UNAVAILABLE: Error reading an object"),
}


@pytest.mark.parametrize(
    "failure, step", [*((name, "load") for name in FAILURES), ("disk", "metadata")]
)
def test_storage_that_does_not_answer_is_no_damage(
    tmp_path, monkeypatch, caplog, failure, step
):
    state = make_state(1, sharding.mesh(1))
    saved_twice(tmp_path / "run", state)
    before, saver = files(tmp_path), checkpoint.Checkpoints(tmp_path / "run")

    def fail(*_):
        try:
            raise FAILURES[failure]
        except Exception:
            raise KeyError("an error of Orbax's own")  # noqa: B904

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp, step, fail)
        match = "checkpoint 2 in .*/run could not be read now .*; it may be whole"
        with pytest.raises(checkpoint.CheckpointError, match=match):
            saver.restore(state)
    assert "trying the one before it" not in caplog.text
    assert files(tmp_path) == before
    assert saver.restore(state).number == 2


def test_a_missing_file_is_damage(tmp_path, monkeypatch):
    state = make_state(1, sharding.mesh(1))
    saved_twice(tmp_path / "run", state)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    for name in ("_CHECKPOINT_METADATA", "state/manifest.ocdbt", "state/_METADATA"):
        (tmp_path / "run" / "2" / name).unlink()
    assert checkpoint.Checkpoints(tmp_path / "run").restore(state).number == 1
    metadata = checkpoint.ocp.metadata

    def missing(path):
        if path.name == "2":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return metadata(path)

    monkeypatch.setattr(checkpoint.ocp, "metadata", missing)
    assert checkpoint.Checkpoints(tmp_path / "again").restore(state).number == 1


def test_what_a_link_in_a_circle_says_is_the_storage_too(tmp_path):
    """The real error of TensorStore, as far as one can be had without a bad disk."""
    state = make_state(1, sharding.mesh(1))
    saved_twice(tmp_path, state)
    data = files(tmp_path / "2" / "state" / "d")
    for path in data:
        path.unlink()
        path.symlink_to(path)
    with pytest.raises(checkpoint.CheckpointError, match="whole"):
        checkpoint.Checkpoints(tmp_path).restore(state)
    for path in data:
        path.unlink()  # now they are missing
    assert checkpoint.Checkpoints(tmp_path).restore(state).number == 1


def test_full_disk_is_an_error_and_keeps_the_last(tmp_path, caplog):
    mesh = sharding.mesh(1)
    big = {"x": jax.random.normal(jax.random.key(0), (1 << 20,))}
    saver = checkpoint.Checkpoints(tmp_path)
    saver.save(1, big, {})
    saver.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails, as on ENOSPC
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        words = r"has about 4,194,304 bytes; [\d,]+ bytes are free .*Whole .* \[1\]"
        with pytest.raises(checkpoint.CheckpointError, match=words):
            saver.save(2, big, {})
            saver.wait()
        saver.close()  # says nothing more, or two errors would be told
        assert not [x for x in caplog.records if "orbax" in x.pathname]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    like = {"x": jax.device_put(big["x"], sharding.replicated(mesh))}
    assert checkpoint.Checkpoints(tmp_path).restore(like).number == 1


def test_a_run_that_goes_on_counts_its_own_rows_and_seconds(tmp_path, monkeypatch):
    """The tasks of the other run keep their names and results; new ones are blank."""
    results = result_file.empty_results(1, task_names=["a"])
    results = result_file.add_task(results, 0, {"x": [0.5]}, {"y": 1}, 3.0)
    cursor = {"phase": "evaluated", "results": results, "rows": 9}
    cursor["seconds"] = {"train": 7.0}
    restored = checkpoint.Restored("state", cursor, 3)
    monkeypatch.setattr(checkpoint.Checkpoints, "restore", lambda *_: restored)
    (tmp_path / "checkpoints").mkdir()
    names = ["other", "b", "c"]
    found = checkpoint.restore_start(str(tmp_path), None, names, keep=2).cursor
    assert found["rows"] == 0 and found["seconds"] == {}
    assert found["results"]["task_names"] == ["a", "b", "c"]
    assert found["results"]["seconds"] == [3.0, None, None]
    assert found["results"]["scalars"] == [{"y": 1}, None, None]
    assert found["results"]["matrices"] == {}
    cursor["phase"] = "trained"
    with pytest.raises(checkpoint.CheckpointError, match="config.start"):
        checkpoint.restore_start(str(tmp_path), None, names, keep=2)
