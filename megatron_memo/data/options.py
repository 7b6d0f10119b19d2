"""What decides the bytes of a dataset."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_memo.data.parts import ReadOptions
from megatron_memo.data.tokenizer import TokenizerSpec


@dataclass(frozen=True)
class BuildOptions:
    """What decides the bytes of the result, and ``workers``, which does not.

    ``document_tokens``: join pieces until a document has this many tokens (None: do not join).
    ``min_document_tokens``: leave out documents with fewer. ``part_bytes``: input a part reads.
    """

    prefix: str
    tokenizer: TokenizerSpec = field(default_factory=TokenizerSpec)
    read: ReadOptions = field(default_factory=ReadOptions)
    document_tokens: int | None = None
    min_document_tokens: int = 1
    part_bytes: int = 8 << 20
    workers: int = 1
    overwrite: bool = False
