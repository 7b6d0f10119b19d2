"""Sequences that context-parallel ranks share, and sequences that share a row of tokens.

Against stock with the same modules on the same ranks, and stock against the plain case: one rank
that has the whole sequence, each sequence by itself.
"""

import math

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test of each layout runs the scenario

UNIT = 2.0**-24  # fp32's rounding unit

# Four ranks: two share each sequence, and two each rank's tokens (tensor and sequence parallel).
LAYOUTS = {"context parallel": ("context_parallel", 4, 2), "packed": ("packed", 1, 1)}
LAYOUTS["packed, tp 2"] = ("packed", 2, 1)


@pytest.fixture(params=LAYOUTS)
def results(request, answers):
    """Style's results on each rank."""
    scenario, ranks, cp = LAYOUTS[request.param]
    per_rank = answers(scenario, ranks, cp)
    assert len(per_rank) == ranks
    found = [result for rank in per_rank for result in rank.values()]
    assert len(found) == 2 * ranks
    return found


def bound(tokens):
    """Relative error of a weight gradient that is summed over the tokens in another order.

    As in test_exactness: 4/pi T^1.5 u.
    """
    return 4 / math.pi * tokens**1.5 * UNIT


def test_one_chunk_is_bitwise_stock(results):
    rows = [row for result in results for row in result["memo"] if row["chunks"] == 1]
    assert {row["ratio"] for row in rows} == {0.0, 1.0}
    assert all(row["differs_from_stock"] == [] for row in rows), rows


def test_swapping_and_recomputing_change_no_bit(results):
    rows = [row for result in results for row in result["memo"]]
    assert {row["chunks"] for row in rows} == {1, 3}
    assert all(row["differs_from_kept"] == [] for row in rows), rows


def test_only_input_output_and_log_sum_exp_leave_where_all_tokens_are_recomputed(results):
    """q, k and v that the kernel saves are this rank's own, so that the layer knows them again."""
    rows = [row for result in results for row in result["memo"] if row["ratio"] == 0]
    assert rows and all(row["copied"] == row["floor"] for row in rows), rows


def test_several_chunks_change_the_order_of_weight_gradients_sums_only(results):
    for result in results:
        for row in (row for row in result["memo"] if row["chunks"] > 1):
            names = row["differs_from_stock"]
            assert names and not [n for n in names if n.startswith(("output", "input grad"))]
            assert row["weight_grad_error"] <= bound(result["tokens"]), row


def test_ranks_that_share_a_sequence_compute_what_one_rank_with_all_of_it_does(answers):
    """Each head sees all tokens in order, so that outputs and input gradients have the same bits;
    weight gradients are sums over tokens, of which each rank has its own."""
    for rank in answers(*LAYOUTS["context parallel"]):
        for style, result in rank.items():
            assert result["outputs_of_one_rank"], style
            assert result["input_grads_of_one_rank"], style
            assert 0 < result["weight_grad_error"] <= bound(result["tokens"]), style


def test_packed_sequences_are_each_what_they_are_by_themselves(answers):
    (result,) = answers(*LAYOUTS["packed"])
    for style in ("gpt", "llama"):
        equal = result[style]["each_by_itself"]
        assert len(equal) == 8 and all(equal), style
