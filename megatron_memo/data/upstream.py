"""Megatron's dataset files and tokenizers, imported when they are needed and without its noise."""

from __future__ import annotations

import logging
import warnings
from types import ModuleType


def load_indexed_dataset() -> ModuleType:
    """``megatron.core.datasets.indexed_dataset``.

    The import takes seconds and, on a machine without a GPU, warns several times of kernels that
    training may miss. Files and tokenizers miss nothing, so those warnings are not shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*not installed.*")
        torch_log = logging.getLogger("torch.utils.cpp_extension")
        level = torch_log.level
        torch_log.setLevel(logging.ERROR)
        try:
            from megatron.core.datasets import indexed_dataset
        finally:
            torch_log.setLevel(level)
    return indexed_dataset
