"""Layers with multi-latent attention against stock; queries and keys are wider than values."""

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test that asks runs the scenarios


@pytest.fixture(params=[1, 2], ids=lambda ranks: f"tp{ranks}")
def variants(request, answers):
    return [item for rank in answers("latent_attention", request.param) for item in rank.items()]


def test_one_chunk_is_bitwise_stock(variants):
    assert variants
    for name, row in variants:
        assert row["one_chunk"] == [[], []], name


def test_in_several_chunks_swapping_and_recomputing_change_no_bit(variants):
    for name, row in variants:
        assert row["several"] == [], name


def test_a_chunks_tokens_are_rotated_by_their_own_positions(variants):
    """Outputs bitwise stock's, and weight gradients a sum over the tokens in another order."""
    for name, row in variants:
        assert row["outputs"] == 0, name
        assert 0 < row["error"] < 1e-6, name
