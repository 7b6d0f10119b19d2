"""Losses and gradients against stock: the same modules, upstream's TransformerLayer.

Styles, dtypes and dropout in every combination at tp 1, and each two of their values together at
tp 2 with sequence parallelism; with one and several micro-batches, ratios 0, 0.3 and 1 and 1 to 5
chunks; 97 tokens a rank (odd: no split is even).
"""

import itertools
import math

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test of each layout runs the scenario

RANKS = (1, 2)
TOKENS = 97
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-9}  # rounding unit: half a unit in the last place


@pytest.fixture(params=RANKS, ids=lambda ranks: f"tp{ranks}")
def rows(request, answers):
    per_rank = answers("exactness", request.param)
    assert len(per_rank) == request.param
    return [row | {"ranks": request.param} for rank_rows in per_rank for row in rank_rows]


def failures(rows, wrong):
    return [row for row in rows if wrong(row)]


def test_every_combination_ran(rows):
    seen = {
        (r["style"], r["dtype"], r["dropout"], r["micro_batches"], r["ratio"], r["chunks"])
        for r in rows
    }
    (several,) = {r["micro_batches"] for r in rows} - {1}
    combinations = {
        1: ((0.0, 5), (0.3, 3), (1.0, 2)),
        several: ((0.0, 1), (0.0, 4), (0.3, 1), (0.3, 2), (0.3, 5), (1.0, 1), (1.0, 3)),
    }
    models = {model[:3] for model in seen}
    values = [*itertools.product(("gpt", "llama"), ("fp32", "bf16"), (0.0, 0.1))]
    if rows[0]["ranks"] == 1:
        assert models == set(values)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert {(m[one], m[other]) for m in models} == {(m[one], m[other]) for m in values}
    assert seen == {
        (*model, micro_batches, *pair)
        for model in models
        for micro_batches, pairs in combinations.items()
        for pair in pairs
    }


def test_swapping_and_recomputing_change_no_bit(rows):
    """Against the same chunks with everything kept: outputs, input and weight gradients, also with
    dropout (the random stream is replayed). It is also what shows that a chunk's recompute equals
    its forward bit by bit."""
    assert not failures(rows, lambda r: r["differs_from_kept"])


def test_one_chunk_is_bitwise_stock(rows):
    """No GEMM is split, so every loss and gradient is the same, with dropout as well."""
    one = [r for r in rows if r["cuts"] == 1]
    assert one
    assert not failures(one, lambda r: r["differs_from_stock"])


def test_outputs_and_input_gradients_are_bitwise_stock_in_any_number_of_chunks(rows):
    """Rows of a GEMM are computed alike whatever the number of rows, and a row's gradients are
    added in stock's order; only sums over tokens (weight gradients) can differ."""
    without_dropout = [r for r in rows if r["dropout"] == 0]
    assert not failures(
        without_dropout,
        lambda r: any(n.startswith(("output", "input grad")) for n in r["differs_from_stock"]),
    )


def test_weight_gradients_of_several_chunks_are_within_fp32_rounding(rows):
    """A weight gradient is a sum over T tokens that chunks add up in another order.

    Two orders of one sum differ by at most 2 T u sum|a_t|; for products of independent signs
    sum|a_t| is about (2/pi) sqrt(T) times the sum's norm: 4/pi T^1.5 u, relative.
    """
    several = [r for r in rows if r["cuts"] > 1 and r["dropout"] == 0 and r["dtype"] == "fp32"]
    assert several
    for row in several:
        tokens = TOKENS * row["ranks"] * row["micro_batches"]
        assert row["weight_grad_error"] <= 4 / math.pi * tokens**1.5 * UNIT["fp32"], row


def test_bf16_weight_gradients_of_several_chunks_are_as_near_to_fp32s_as_stocks(rows):
    """In bf16 without gradient-accumulation fusion each of k chunk sums is rounded to bf16 once,
    they are added in fp32, and the sum is rounded once: for independent chunks at most
    (sqrt(k) + 1) u of the whole's norm more than stock's own distance from fp32's gradient.
    """
    several = [r for r in rows if r["cuts"] > 1 and r["dropout"] == 0 and r["dtype"] == "bf16"]
    assert several
    for row in several:
        assert row["further_from_fp32"] <= (math.sqrt(row["cuts"]) + 1) * UNIT["bf16"], row


def test_the_comparison_sees_a_difference(rows):
    """With dropout and several chunks the random stream is consumed in another order than stock's;
    a comparison that found no difference here would find none anywhere."""
    other_order = [r for r in rows if r["dropout"] and r["cuts"] > 1]
    assert other_order
    assert all("output 0" in r["differs_from_stock"] for r in other_order)
