"""Pieces joined into documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

# The index file stores a document's length as a signed 32-bit number.
MAX_DOCUMENT_TOKENS = 2**31 - 1


def join_pieces(
    pieces: Iterable[npt.NDArray[Any]], *, eod: int, at_least: int = 1
) -> Iterator[npt.NDArray[Any]]:
    """Documents of at least ``at_least`` tokens, each with ``eod`` as its last token.

    Neighbouring pieces are put together until a document is long enough; with 1, each piece is a
    document. What is left at the end joins the last document, so a short one is only made if all
    there is falls short.

    Args:
        pieces: arrays of ids (``[tokens]``), one type, none empty.
        eod: id of the end of a document; counts as one of its tokens.

    Raises:
        ValueError: a document is longer than an index file can say.
    """
    finished: list[npt.NDArray[Any]] = []
    growing: list[npt.NDArray[Any]] = []
    count = 1
    for piece in pieces:
        growing.append(piece)
        count += piece.size
        if count >= at_least:
            if finished:
                yield _document(finished, eod)
            finished, growing, count = growing, [], 1
    if finished or growing:
        yield _document(finished + growing, eod)


def _document(pieces: list[npt.NDArray[Any]], eod: int) -> npt.NDArray[Any]:
    tokens = sum(piece.size for piece in pieces) + 1
    if tokens > MAX_DOCUMENT_TOKENS:
        raise ValueError(
            f"A document of {tokens:,} tokens is longer than Megatron's index can store "
            f"({MAX_DOCUMENT_TOKENS:,}). Split the file it comes from, or lower --document-tokens."
        )
    return np.concatenate([*pieces, np.asarray([eod], dtype=pieces[0].dtype)])
