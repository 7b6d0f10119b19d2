"""Pieces joined into documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_memo.data import pack
from megatron_memo.data.pack import join_pieces

EOD = 256


def _pieces(lengths):
    return [np.full(n, index % 256, np.uint16) for index, n in enumerate(lengths)]


@given(lengths=st.lists(st.integers(1, 50), max_size=40), at_least=st.integers(1, 120))
def test_documents_are_long_enough_and_lose_nothing(lengths, at_least):
    pieces = _pieces(lengths)
    documents = list(join_pieces(pieces, eod=EOD, at_least=at_least))
    joined = [token for document in documents for token in document if token != EOD]
    assert joined == [token for piece in pieces for token in piece]
    assert all(document[-1] == EOD for document in documents)
    assert all(np.count_nonzero(document == EOD) == 1 for document in documents)
    if sum(lengths) + 1 >= at_least:
        assert all(document.size >= at_least for document in documents)
    else:
        assert len(documents) == bool(lengths)


def test_without_a_least_length_each_piece_is_a_document():
    documents = list(join_pieces(_pieces([3, 1, 7]), eod=EOD))
    assert [document.size for document in documents] == [4, 2, 8]
    assert documents[0].dtype == np.uint16


def test_the_end_of_the_document_counts_as_a_token():
    sizes = [document.size for document in join_pieces(_pieces([4, 4, 5]), eod=EOD, at_least=5)]
    assert sizes == [5, 5, 6]


def test_a_document_beyond_the_index_format_is_refused(monkeypatch):
    monkeypatch.setattr(pack, "MAX_DOCUMENT_TOKENS", 10)
    with pytest.raises(ValueError, match=r"11 tokens is longer.*--document-tokens"):
        list(join_pieces(_pieces([10]), eod=EOD))
