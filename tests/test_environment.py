"""The folder of compiled programs: code, so that nobody else may put any there."""

import os
import pathlib

import pytest

import environment


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
