"""Compiled programs that runs keep for later ones."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxcl.run import compile_cache


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    """JAX as it is without JAX_COMPILATION_CACHE_DIR; afterwards as it was."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(compile_cache, "_SECONDS", 0.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_folder_of_the_user_gets_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compile_cache.use_cache("auto")
    assert folder.startswith(str(tmp_path / "jaxcl"))
    assert os.stat(folder).st_mode & 0o777 == 0o700
    jax.jit(lambda x: jnp.tanh(x) * 3 + 17.25)(jnp.ones(3))  # no other test has it
    assert os.listdir(folder)
    assert compile_cache.use_cache("elsewhere") == folder  # JAX has one already


def test_no_folder_where_none_is_asked_for_or_none_can_be(monkeypatch, tmp_path):
    assert compile_cache.use_cache("") is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_cache.use_cache("auto") is None
    assert jax.config.jax_compilation_cache_dir is None
    with pytest.raises(OSError, match="file"):
        compile_cache.use_cache(str(tmp_path / "file" / "programs"))


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ValueError, match=r"config.compile_cache=.*open"):
        compile_cache.use_cache(str(tmp_path / "open"))


def test_what_was_not_read_for_the_longest_time_goes_first(tmp_path):
    for age, name in enumerate(("new", "used", "old", "oldest")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    os.utime(tmp_path / "oldest", (2e9, 1))  # written long ago, read since
    compile_cache.trim_cache(tmp_path, 250)
    assert sorted(os.listdir(tmp_path)) == ["new", "oldest"]
