"""The chunked loss head in Megatron's GPT against stock's, at tp 1 and at tp 2 with SP.

53 tokens a rank (odd: most chunks are uneven), two sequences, a random gradient for each token of
which some are masked; see loss_worker for what runs.
"""

import math

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test of each layout runs the worker

TOKENS, BATCH = 53, 2
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8}


@pytest.fixture(scope="module", params=(1, 2), ids=lambda ranks: f"tp{ranks}")
def answers(request, answers_of):
    return answers_of("loss_worker", request.param)


@pytest.fixture
def rows(answers):
    """Of every rank."""
    return [r | {"ranks": answers["ranks"]} for rank in answers["equality"] for r in rank]


def failures(rows, wrong):
    return [row for row in rows if wrong(row)]


def test_every_model_ran_in_every_number_of_chunks(rows):
    seen = {(r["dtype"], r["tied"], r["fusion"]) for r in rows}
    assert {d for d, _, _ in seen} == {"fp32", "bf16"}
    assert {t for _, t, _ in seen} == {f for _, _, f in seen} == {False, True}
    assert {r["chunks"] for r in rows} == {1, 2, 7, TOKENS}
    assert {r["shards"] for r in rows} == ({False, True} if rows[0]["ranks"] > 1 else {False})
    assert all(r["compared"] >= 7 for r in rows)


def test_one_chunk_is_bitwise_stock_in_everything(rows):
    one = [r for r in rows if r["chunks"] == 1]
    assert one
    assert not failures(one, lambda r: not (r["same_losses"] and r["same_head"]) or r["others"])


def test_losses_and_hidden_gradients_are_bitwise_stock_in_chunks_of_several_tokens(rows):
    """The gradients of all other parameters come from those of the hidden states."""
    several = [r for r in rows if r["chunks"] != TOKENS]
    assert not failures(several, lambda r: not r["same_losses"] or r["others"])


def test_chunks_of_one_token_are_within_rounding(rows):
    """Matrix libraries take other kernels for one or two rows: sums of 64 products in another
    order, and softmax sums of the vocabulary of which each term moves by as much."""
    single = [r for r in rows if r["chunks"] == TOKENS]
    assert single
    for row in single:
        assert row["loss_error"] <= 2 * 64 * UNIT["fp32"], row
        assert row["hidden_error"] <= 2 * 64 * UNIT[row["dtype"]], row


def test_fp32_weight_gradients_are_within_the_rounding_of_one_sum(rows):
    """The bound of tests/layer/test_exactness for a sum over T tokens in another order."""
    for row in (r for r in rows if r["dtype"] == "fp32"):
        terms = TOKENS * row["ranks"] * BATCH
        assert row["head_error"] <= 4 / math.pi * terms**1.5 * UNIT["fp32"], row


def test_bf16_weight_gradients_are_rounded_once_a_chunk_and_once_in_the_end(rows):
    """Independent chunks: sqrt(k) units for k of them in all, one for the end, one for stock's own
    rounding, each of the whole's norm; a tied weight's embedding part adds one to each."""
    for row in (r for r in rows if r["dtype"] == "bf16"):
        assert row["head_error"] <= (math.sqrt(row["chunks"]) + 4) * UNIT["bf16"], row


def test_the_comparison_sees_a_difference(rows):
    """Sums in another order are not the same bits; where nothing differed nothing was compared."""
    assert all(not r["same_head"] for r in rows if r["chunks"] in (2, 7))


def test_losses_of_further_tokens_are_stocks_in_any_number_of_chunks(answers):
    """One chunk bitwise in everything; in several a weight gradient is a sum in another order, and
    the loss that is logged a sum over the same values."""
    for rank in answers["further_tokens"]:
        for tied in (False, True):
            stock, one, several = (row for row in rank if row["tied"] is tied)
            assert [row["chunks"] for row in (stock, one, several)] == [None, 1, 7]
            assert min(stock["logged"]["correct_values"]) > 0
            assert max(stock["logged"]["correct_values"]) < min(stock["logged"]["total_values"])
            assert one["logged"] == several["logged"] == stock["logged"]
            assert one["same_losses"] and several["same_losses"]
            assert one["differing"] == []
            terms = 3 * TOKENS * answers["ranks"] * BATCH
            assert several["error"] <= 4 / math.pi * terms**1.5 * UNIT["fp32"]
            assert several["differing"]  # the comparison sees a difference


def test_logits_of_further_tokens_never_exist_whole(answers):
    for rank in answers["further_tokens"]:
        for tied in (False, True):
            stock, _, several = (row for row in rank if row["tied"] is tied)
            logits = 4 * 8192 * TOKENS * BATCH  # fp32, a rank's share of the vocabulary and tokens
            assert several["peak"] < stock["peak"] - 1.5 * logits


def test_hooks_of_every_parameter_run_once_a_pass(answers):
    """Megatron's data parallelism counts them."""
    for scenario in ("equality", "further_tokens", "fused_weight_gradient"):
        assert all(r["calls"] == [1] for rank in answers[scenario] for r in rank)


def test_the_fused_weight_gradient_goes_to_main_grad(answers):
    """As stock's: the flag is set, and what is left for autograd is the embedding's part alone."""
    for row in (r for rank in answers["fused_weight_gradient"] for r in rank):
        assert row["flags"] == [True, True] and row["same_rest"], row
        terms = TOKENS * answers["ranks"] * BATCH
        limit = 0 if row["chunks"] == 1 else 4 / math.pi * terms**1.5 * UNIT["fp32"]
        assert row["error"] <= limit, row


def test_the_peak_of_the_head_falls_as_one_over_the_chunks(answers):
    for rank in answers["peaks"]:
        peaks, fixed = {int(k): v for k, v in rank["peaks"].items()}, rank["fixed"]
        assert peaks[1] <= 1.02 * rank["stock"]
        shares = [(peaks[k] - fixed) * k for k in (2, 4, 8)]
        assert max(shares) <= 1.05 * min(shares)
        # One chunk has no sum beside its own weight gradient.
        assert shares[0] == pytest.approx(peaks[1] - fixed, rel=0.2)


def test_evaluation_has_the_same_losses_and_no_gradient(answers):
    assert all(rank == {"same": True, "grad": False} for rank in answers["evaluation"])
