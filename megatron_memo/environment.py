"""``megatron-memo env``: what is installed here, and whether training can run."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform as machine
from collections.abc import Iterator

from megatron_memo.exit_status import Exit

HELP = "Show versions, the device that training would use, and whether anything is missing."

_EPILOG = """\
examples: before a first run, and in a job script that should not start in vain

  megatron-memo env
  megatron-memo env || exit 1

Exit status: 0 training can run here, 1 something is missing, and how to get it was said."""

_ADVICE = {
    "torch": "install it with: pip install -r requirements.txt",
    "megatron-core": "install it with: pip install -r requirements.txt",
    "megatron.training": "pip install 'megatron-core[training]' (0.17 or newer, Python 3.12), or "
    "put a Megatron-LM checkout on PYTHONPATH",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    """Print one line a fact and a verdict; status 0 where training can run, else 1."""
    missing = []
    for name, value in _facts():
        if value is None and name in _ADVICE:
            missing.append(name)
        print(f"{name:<20} {'not found' if value is None else value}")
    if missing:
        for name in missing:
            print(f"{name}: {_ADVICE[name]}")
        print(f"Not ready: {', '.join(missing)} missing.")
        return Exit.NO
    print(f"Ready to train on {_device()}.")
    return 0


def _facts() -> Iterator[tuple[str, str | None]]:
    yield "megatron-memo", _version("megatron-memo") or _own_version()
    yield "python", machine.python_version()
    yield "torch", _version("torch")
    yield "megatron-core", _version("megatron-core") or _checkout_version()
    yield "megatron.training", _location("megatron.training")
    yield "transformer-engine", _version("transformer-engine")
    yield "flash-attn", _version("flash-attn")
    # PyPI's package named apex is another project: only the module tells.
    yield "apex (NVIDIA)", _location("apex.normalization")
    yield "device", _device() if _version("torch") else None
    yield "CPU cores", str(os.cpu_count())


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "the CPU (no CUDA: megatron_memo.platform stands in)"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _own_version() -> str:
    from megatron_memo import __version__

    return __version__


def _checkout_version() -> str | None:
    """Version of a Megatron-LM checkout on PYTHONPATH, which no package manager knows."""
    if _location("megatron.core") is None:
        return None
    from megatron.core.package_info import __version__

    return f"{__version__} (checkout)"


def _location(module: str) -> str | None:
    """Where a module would be imported from, without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(spec.submodule_search_locations))
