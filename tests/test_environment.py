"""XLA's flags, and the folder of compiled programs, which is this user's alone."""

import os
import pathlib
import subprocess
import sys

import pytest

import environment


@pytest.mark.parametrize("flag", [f for f, last in environment.FLAGS.items() if last])
def test_a_flag_is_set_where_jaxlib_knows_it(flag):
    """JAX starts with the flag if and only if the table says that jaxlib knows it."""
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=os.environ | {"XLA_FLAGS": flag},
        capture_output=True,
        text=True,
    )
    if flag in environment.known_flags():
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0 and flag in done.stderr


def test_the_cache_is_this_users_alone_and_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    first = pathlib.Path(environment.compile_cache())
    assert first.stat().st_mode & 0o777 == 0o700
    assert environment.compile_cache() == str(first) == f"{first.parent}/{first.name}"
    assert str(os.getuid()) in first.name  # .ci/run tidies up the same folder
    ci = (pathlib.Path(__file__).parents[1] / ".ci" / "run").read_text()
    assert f"/{first.name.replace(str(os.getuid()), '$(id -u)')}" in ci

    first.chmod(0o755)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        environment.compile_cache()
    first.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    first.symlink_to(tmp_path / "elsewhere")  # a link may lead into another's folder
    with pytest.raises(PermissionError):
        environment.compile_cache()
    first.unlink()
    environment.compile_cache()
    monkeypatch.setattr(environment.os, "getuid", lambda: 12345)
    first.rename(first.with_name("jaxcl-test-cache-12345"))
    with pytest.raises(PermissionError):
        environment.compile_cache()


def test_half_an_entry_of_the_cache_fails_nothing(tmp_path):
    """As tests leave it that are killed while they write; JAX compiles again."""
    test = tmp_path / "test_one.py"
    test.write_text(
        "import jax\ndef test_it():\n    assert jax.jit(lambda x: x + 1)(2) == 3\n"
    )
    configured = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", f"-c{configured}"]
    own = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTEST_ADDOPTS": "",
    }

    def ran(*options):
        return subprocess.run(
            [*command, *options, f"--rootdir={tmp_path}", str(test)],
            env=os.environ | own,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    assert ran().returncode == 0
    entries = [path for path in (tmp_path / "cache").iterdir() if "-cache" in path.name]
    assert entries
    for path in entries:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    # A control: half an entry is told, which else would be an error.
    told = ran("-Werror:Error reading persistent compilation cache entry:UserWarning")
    assert told.returncode == 1 and "Error reading persistent" in told.stdout
    after = ran()
    assert after.returncode == 0, after.stdout
