"""The chunk policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_memo.config import MemoConfig
from megatron_memo.layer.chunks import Fate, chosen_chunks, plan_chunks

ratios = st.floats(0, 1)
rows = st.integers(1, 500)


@given(ratio=ratios, n=rows, count=st.integers(1, 20), keep=st.booleans())
def test_chunks_cover_every_row_once_and_alpha_decides_their_fate(ratio, n, count, keep):
    if count > n:
        return
    chunks = plan_chunks(MemoConfig(ratio, count), n, 1, keep=keep)
    assert [c.start for c in chunks] == [0, *(c.stop for c in chunks[:-1])]
    assert chunks[-1].stop == n
    assert all(c.stop > c.start for c in chunks)
    swapped = sum(c.stop - c.start for c in chunks if c.fate is Fate.SWAP)
    recomputed = sum(c.stop - c.start for c in chunks if c.fate is Fate.RECOMPUTE)
    if keep:
        assert swapped == recomputed == 0
    else:
        assert swapped == round(ratio * n)
        assert recomputed == n - swapped


@given(ratio=ratios, n=rows, count=st.integers(1, 20))
def test_there_are_as_many_chunks_as_asked_for_or_two_where_alpha_needs_two(ratio, n, count):
    if count > n:
        return
    chunks = plan_chunks(MemoConfig(ratio, count), n, 1, keep=False)
    both_sides = 0 < round(ratio * n) < n
    assert len(chunks) == (max(count, 2) if both_sides else count)


@given(ratio=ratios, n=rows, count=st.integers(1, 20))
def test_chunks_of_one_side_differ_by_one_row_at_most(ratio, n, count):
    if count > n:
        return
    chunks = plan_chunks(MemoConfig(ratio, count), n, 1, keep=False)
    for fate in (Fate.SWAP, Fate.RECOMPUTE):
        lengths = [c.stop - c.start for c in chunks if c.fate is fate]
        assert not lengths or max(lengths) - min(lengths) <= 1


def test_more_chunks_than_tokens_is_refused_by_flag():
    with pytest.raises(ValueError, match=r"--memo-chunks 9: more than the 8 tokens .* at most 8"):
        plan_chunks(MemoConfig(0.5, 9), 8, 1, keep=False)


def test_a_chosen_number_grows_with_the_sequence_up_to_a_limit():
    assert [chosen_chunks(n) for n in (1, 2047, 8192, 1 << 20)] == [1, 1, 4, 8]


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"swap_ratio": -0.1}, "--memo-swap-ratio -0.1"),
        ({"swap_ratio": 1.5}, "--memo-swap-ratio 1.5"),
        ({"swap_ratio": float("nan")}, "--memo-swap-ratio nan"),
        ({"swap_ratio": 0.5, "chunks": 0}, "--memo-chunks 0"),
        ({"swap_ratio": 0.5, "resident_layers": -1}, "--memo-resident-layers -1"),
        ({"swap_ratio": 0.5, "prefetch_depth": 0}, "--memo-prefetch-depth 0"),
        ({"swap_ratio": 0.5, "prefetch_depth": "many"}, "--memo-prefetch-depth many"),
    ],
)
def test_settings_out_of_range_are_refused_by_flag(arguments, flag):
    with pytest.raises(ValueError, match=flag):
        MemoConfig(**arguments)


def test_settings_come_from_the_environment_for_scripts_without_the_flags():
    env = {"MEMO_SWAP_RATIO": "0.25", "MEMO_CHUNKS": "3", "MEMO_POISON": "1"}
    assert MemoConfig.from_env(env) == MemoConfig(0.25, chunks=3, poison=True)
    assert MemoConfig.from_env({"MEMO_PREFETCH_DEPTH": "5"}) == MemoConfig(0.5, prefetch_depth=5)
    assert MemoConfig.from_env({}) == MemoConfig(0.5)
    with pytest.raises(ValueError, match="MEMO_CHUNKS='many': must be an integer"):
        MemoConfig.from_env({"MEMO_CHUNKS": "many"})
