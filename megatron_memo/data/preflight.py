"""Refusals before any work is done."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_memo.data.options import BuildOptions
from megatron_memo.data.sources import Source


def check_prefix(prefix: str) -> None:
    """Refuse the name of a folder, whose dataset would be the hidden files ``.bin`` and ``.idx``.

    Raises:
        ValueError: with a prefix that would do.
    """
    if os.path.basename(prefix) in ("", ".", ".."):
        raise ValueError(
            f"--output-prefix {prefix}: names a folder, and the dataset needs a name in it. Give "
            f"one such as {os.path.join(prefix, 'data')}, for data.bin and data.idx."
        )


def check_output(prefix: str, *, overwrite: bool) -> None:
    """Refuse to replace a dataset, or to write where no folder can be.

    Raises:
        ValueError: with the flag to change.
    """
    if not overwrite and os.path.exists(prefix + ".idx"):
        raise ValueError(
            f"--output-prefix {prefix}: {prefix}.idx exists already, and this command did not make "
            "it: its input or settings differ. Choose another prefix, or add --overwrite to "
            "replace it."
        )
    folder = os.path.dirname(os.path.abspath(prefix))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(
            f"--output-prefix {prefix}: {folder} is not a folder that can be written to."
        )


def check_space(sources: Sequence[Source], options: BuildOptions) -> None:
    """Refuse a run that can not fit the disk, before it begins.

    Bytes take two bytes a token, in the parts and again in the dataset. What another tokenizer
    makes of a text is not known before; it is taken to shrink it to a third of its bytes in
    tokens, of four bytes at most.

    Raises:
        ValueError: with the space needed and the space there is.
    """
    size = sum(source.size for source in sources)
    needed = size * 4 if not options.tokenizer.values else size * 8 // 3
    folder = Path(options.prefix).absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    already = sum(
        entry.stat().st_size for entry in Path(options.prefix + ".parts").glob("*.tokens")
    )
    if needed > free + already:
        raise ValueError(
            f"--output-prefix {options.prefix}: about {needed / 1e9:.2f} GB are needed (the parts "
            f"and the dataset made from {size / 1e9:.2f} GB of text), and {free / 1e9:.2f} GB are "
            "free there. Make room, or choose a prefix on another disk."
        )
