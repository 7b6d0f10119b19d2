"""Building the compiled solvers: cached, locked, and done without where there is no compiler."""

import concurrent.futures
import os
import stat
import subprocess
import sys

import pytest

from megatron_memo import native_build
from megatron_memo.plan import native

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no compiler here")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron_memo"


def script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@needs_compiler
def test_the_library_is_built_once_and_then_taken_from_the_cache(cache, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    real = native_build.find_compiler()[0]
    wrapper = script(tmp_path / "counting-cxx", f'echo x >> {calls}\nexec {real} "$@"\n')
    monkeypatch.setenv("CXX", str(wrapper))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: native.build(), range(4)))
    assert len(paths) == 1
    assert native.build() in paths
    assert calls.read_text().count("x") == 1
    assert sorted(p.suffix for p in cache.iterdir()) == [".lock", ".so"]


def test_a_compiler_that_fails_is_named_with_its_first_error(cache, tmp_path, monkeypatch):
    wrapper = script(tmp_path / "cxx", "echo 'x.cc:1: error: no such thing' >&2\nexit 1\n")
    monkeypatch.setenv("CXX", str(wrapper))
    with pytest.raises(native.NativeError, match=r"cxx failed: x\.cc:1: error: no such thing"):
        native.build()
    assert [p.suffix for p in cache.iterdir()] == [".lock"]


def test_a_compiler_that_is_not_there_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(native.NativeError, match="no-such-compiler"):
        native.build()


def test_no_compiler_at_all_says_what_to_install(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(native.NativeError, match="install one or set CXX"):
        native.build()


def test_a_cache_folder_that_cannot_be_made_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(native.NativeError, match=r"no cache folder|no C\+\+ compiler"):
        native.build()


def test_the_command_solves_without_a_compiler_and_says_so(tmp_path):
    (tmp_path / "in.csv").write_text("id,lower,upper,size\na,0,2,3\nb,1,3,4\n")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_memo.plan.solve_cli", str(tmp_path / "in.csv")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0
    assert "peak 7" in done.stdout
    assert "slow Python solvers in use" in done.stderr
    assert "no-such-compiler" in done.stderr
