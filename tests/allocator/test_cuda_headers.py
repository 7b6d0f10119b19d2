"""Which CUDA headers the front-end is compiled with."""

import pytest

from megatron_memo.allocator import cuda_headers
from megatron_memo.allocator.cuda_headers import include_flags
from megatron_memo.allocator.errors import AllocatorError


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A site-packages folder with a torch that has CUDA, and no CUDA anywhere."""
    (tmp_path / "torch" / "include" / "c10" / "cuda").mkdir(parents=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    monkeypatch.setattr(cuda_headers, "SYSTEM", tmp_path / "nowhere")
    return tmp_path


def headers(folder, version, whole=True):
    folder.mkdir(parents=True)
    (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    if whole:
        (folder / "crt").mkdir()
        (folder / "crt" / "host_defines.h").write_text("")
    return folder


def chosen(packages, cuda="13.0"):
    return include_flags(packages / "torch", cuda)


@pytest.mark.parametrize(
    ("place", "version", "cuda"),
    [("nvidia/cu13", 13000, "13.0"), ("nvidia/cuda_runtime", 12080, "12.8")],
)
def test_those_that_came_with_torch_are_taken(packages, place, version, cuda):
    folder = headers(packages / place / "include", version)
    assert chosen(packages, cuda)[:2] == ("-isystem", str(folder))


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkits_are_taken_where_torch_brought_none(packages, monkeypatch, variable):
    folder = headers(packages / "toolkit" / "include", 13010)
    monkeypatch.setenv(variable, str(packages / "toolkit"))
    assert chosen(packages)[:2] == ("-isystem", str(folder))


def test_the_compilers_part_that_the_wheel_lacks_comes_from_triton(packages, monkeypatch):
    folder = headers(packages / "nvidia" / "cu13" / "include", 13000, whole=False)
    parts = packages / "triton"
    monkeypatch.setattr(cuda_headers, "_from_triton", lambda: parts)
    assert chosen(packages) == ("-isystem", str(folder), "-idirafter", str(parts))


def test_headers_that_lack_a_part_that_nobody_has_are_passed_over(packages, monkeypatch):
    headers(packages / "nvidia" / "cu13" / "include", 13000, whole=False)
    monkeypatch.setattr(cuda_headers, "_from_triton", lambda: None)
    whole = headers(packages / "toolkit" / "include", 13010)
    monkeypatch.setenv("CUDA_HOME", str(packages / "toolkit"))
    assert chosen(packages)[1] == str(whole)


def test_those_of_another_cuda_are_not_taken(packages, monkeypatch):
    headers(packages / "toolkit" / "include", 12080)
    monkeypatch.setenv("CUDA_HOME", str(packages / "toolkit"))
    with pytest.raises(AllocatorError, match=r"no cuda_runtime_api.h of CUDA 13; .* CUDA_HOME"):
        chosen(packages)


def test_a_torch_without_cuda_is_named(packages):
    with pytest.raises(AllocatorError, match="built without CUDA"):
        chosen(packages, None)
