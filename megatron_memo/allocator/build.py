"""Builds the allocator of a device against the torch that is installed: g++, c10 headers, libc10.

Needs no CUDA toolkit compiler and no torch extension machinery (which takes minutes); a few
seconds, once for each torch, compiler and version of the sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_memo import native_build
from megatron_memo.allocator.cuda_headers import include_flags
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.native_build import NativeError, Recipe

CSRC = Path(__file__).parent / "csrc"


@dataclass(frozen=True)
class FrontEnd:
    """What one device's library is made of beyond the core.

    Attributes:
        source: relative to csrc.
        libraries: of torch's lib folder, for the linker.
        uses_cuda: whether it includes headers of the CUDA runtime.
    """

    source: str
    libraries: tuple[str, ...]
    uses_cuda: bool = False


FRONT_ENDS = {
    "cpu": FrontEnd("cpu/allocator.cpp", ("c10",)),
    "cuda": FrontEnd("cuda/allocator.cpp", ("c10", "c10_cuda"), uses_cuda=True),
}


def build(device: str) -> Path:
    """Path of the device's library; compiles it unless the user's cache has it.

    Raises:
        AllocatorError: no such front-end, no compiler, no headers of torch, or the compiler fails.
    """
    if device not in FRONT_ENDS:
        known = ", ".join(FRONT_ENDS)
        raise AllocatorError(f"the planned allocator has no front-end for {device!r} (has {known})")
    try:
        return native_build.build(recipe(device))
    except NativeError as error:
        raise AllocatorError(f"the planned allocator can't be built: {error}") from error


def recipe(device: str) -> Recipe:
    """How the device's library is built. Raises AllocatorError where headers are missing."""
    import torch

    front_end = FRONT_ENDS[device]
    folder = Path(torch.__file__).parent
    if not (folder / "include" / "c10" / "core" / "Allocator.h").exists():
        raise AllocatorError(
            f"the planned allocator can't be built: torch in {folder} comes without its C++ headers"
        )
    source = CSRC / front_end.source
    folders = (CSRC / "core", source.parent)
    return Recipe(
        name=f"allocator-{device}",
        what="the planned allocator",
        sources=(source,),
        headers=tuple(sorted(header for part in folders for header in part.glob("*.h"))),
        flags=(
            *("-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f'-DMEMO_TORCH_VERSION="{torch.__version__}"',
            *("-isystem", str(folder / "include")),
            *(include_flags(folder, torch.version.cuda) if front_end.uses_cuda else ()),
        ),
        libraries=(
            f"-L{folder / 'lib'}",
            *(f"-l{name}" for name in front_end.libraries),
            f"-Wl,-rpath,{folder / 'lib'}",
        ),
        depends=(torch.__version__,),
    )
