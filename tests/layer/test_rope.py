"""A chunk's rows of the RoPE table, where tokens are packed sequences."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_memo.layer.rope import rope_rows
from megatron_memo.layer.rows import Rows


def described(*ends):
    ends = torch.tensor(ends, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)


def test_a_chunk_is_turned_by_its_tokens_positions():
    params, table = described(0, 3, 8), torch.arange(5.0).view(5, 1, 1, 1)
    # Of each of two ranks' four tokens the last two: tokens 2, 3 and 6, 7.
    rows = rope_rows((table, None), Rows(2, 4, 2, 4), params)
    assert rows[0].flatten().tolist() == [2, 0, 3, 4] and rows[1] is None


def test_a_table_of_all_tokens_is_taken_in_their_order():
    table = torch.arange(8.0).view(8, 1, 1, 1)
    rows = rope_rows(table, Rows(1, 8, 2, 6), described(0, 3, 8))
    assert rows.flatten().tolist() == [2, 3, 4, 5]


def test_layers_share_a_chunks_rows():
    params, table = described(0, 3, 8), torch.arange(5.0).view(5, 1, 1, 1)
    first = rope_rows(table, Rows(1, 8, 0, 4), params)
    assert rope_rows(table, Rows(1, 8, 0, 4), params) is first
    assert rope_rows(table.clone(), Rows(1, 8, 0, 4), params) is not first


def test_a_sequence_longer_than_the_table_is_refused():
    table = torch.arange(4.0).view(4, 1, 1, 1)
    with pytest.raises(ValueError, match=r"one has 5 tokens, .* more than 4"):
        rope_rows(table, Rows(1, 8, 0, 8), described(0, 3, 8))
