"""Built once for all ranks, refused by name where it does not fit."""

import dataclasses
import multiprocessing
import os
import stat

import pytest

from megatron_memo import native_build
from megatron_memo.allocator import build as allocator_build
from megatron_memo.allocator.build import build, recipe
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.allocator.face import get_allocator, load_and_install


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron_memo"


def needs_compiler():
    try:
        return native_build.find_compiler()[0]
    except native_build.NativeError as error:
        pytest.skip(str(error))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_eight_ranks_that_start_together_build_it_once(cache, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    counting = tmp_path / "counting-cxx"
    counting.write_text(f'#!/bin/sh\necho x >> {calls}\nexec {needs_compiler()} "$@"\n')
    counting.chmod(counting.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(counting))
    with multiprocessing.get_context("fork").Pool(8) as pool:
        paths = set(pool.map(build, ["cpu"] * 8))
    assert len(paths) == 1
    assert build("cpu") in paths
    assert calls.read_text().count("x") == 1


def test_a_library_for_another_torch_is_refused_by_name():
    needs_compiler()
    right = recipe("cpu")
    flags = [f for f in right.flags if "MEMO_TORCH_VERSION" not in f]
    other = dataclasses.replace(right, flags=(*flags, '-DMEMO_TORCH_VERSION="1.2.3"'))
    path = native_build.build(other)
    with pytest.raises(AllocatorError, match=r"was built for torch 1\.2\.3, but torch is"):
        load_and_install(path)


def test_another_torch_has_another_file(monkeypatch):
    import torch

    needs_compiler()
    digest = native_build._digest
    here = digest(["/bin/sh"], recipe("cpu"))
    monkeypatch.setattr(torch, "__version__", "1.2.3")
    assert digest(["/bin/sh"], recipe("cpu")) != here


def test_a_changed_header_of_the_core_builds_anew(tmp_path):
    header = tmp_path / "core.h"
    made = dataclasses.replace(recipe("cpu"), headers=(header,))
    header.write_text("// one")
    first = native_build._digest(["/bin/sh"], made)
    header.write_text("// two")
    assert native_build._digest(["/bin/sh"], made) != first


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_a_file_that_is_no_library_is_said(tmp_path, content):
    path = tmp_path / "broken.so"
    path.write_bytes(content)
    with pytest.raises(AllocatorError, match="can't be loaded"):
        load_and_install(path)


def test_a_library_of_something_else_is_said(alone_library):
    with pytest.raises(AllocatorError, match=r"can't be loaded.*memo_torch_version"):
        load_and_install(alone_library._name)


def test_no_compiler_is_one_line_that_says_what_to_do(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(AllocatorError, match=r"no C\+\+ compiler .* install one or set CXX") as e:
        build("cpu")
    assert "\n" not in str(e.value)


def test_a_device_without_a_front_end_is_named():
    with pytest.raises(AllocatorError, match="no front-end for 'abacus'"):
        get_allocator("abacus")


def test_a_torch_without_headers_is_named(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "__file__", os.fspath(tmp_path / "__init__.py"))
    with pytest.raises(AllocatorError, match=r"without its C\+\+ headers"):
        build("cpu")


def test_every_front_end_has_its_source_in_the_package():
    for front_end in allocator_build.FRONT_ENDS.values():
        assert (allocator_build.CSRC / front_end.source).is_file()
