"""Layers with a mixture of experts, in turn with a dense one, against stock."""

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test that asks runs the scenarios

POLICIES = ("keep", "swap", "recompute")
FP32 = 1e-6  # a sum of some hundred terms in another order, relative


@pytest.fixture(params=[("experts", 1), ("experts_over_ranks", 2)], ids=["one rank", "two ranks"])
def variants(request, answers):
    scenario, ranks = request.param
    return [item for rank in answers(scenario, ranks) for item in rank.items()]


def test_one_chunk_is_bitwise_stock_under_every_policy(variants):
    """Losses, routing, gradients of experts and router: with auxiliary losses, capacities, shared
    experts, dropout."""
    for name, rows in variants:
        one_chunk = [case for case in rows if case.split()[1] == "1"]
        assert len(one_chunk) == (6 if name == "alltoall" else 1)
        assert all(rows[case] == [] for case in one_chunk), name


def test_in_several_chunks_swapping_and_recomputing_change_no_bit(variants):
    for name, rows in variants:
        several = [case for case in rows if case.split()[1] == "3"]
        assert len(several) == (3 if name == "alltoall" else 1)
        assert all(rows[case] == [] for case in several), name


def test_several_chunks_differ_from_stock_by_rounding_only(variants):
    """Chunks of attention must not show in the routing or its losses, which they would at once."""
    exact = [rows for name, rows in variants if name not in ("bf16", "dropout")]
    assert exact
    for rows in exact:
        assert rows["several chunks' error"] < FP32


def test_routers_run_once_for_each_forward(answers):
    (by_policy,) = answers("experts_memory", 1)
    for policy in POLICIES:
        assert by_policy[policy]["routed"] == 2 * 4 + 2  # 2 layers, 4 iterations, an evaluation


def test_keep_moves_less_than_recompute_and_that_less_than_swap(answers):
    (by_policy,) = answers("experts_memory", 1)
    moved = [by_policy[policy]["moved"] for policy in ("keep", "recompute", "swap")]
    assert moved == sorted(moved) and len(set(moved)) == 3
    assert all(by_policy[policy]["moved_in_evaluation"] == 0 for policy in POLICIES)


def test_nothing_of_the_experts_is_left_behind(answers):
    (by_policy,) = answers("experts_memory", 1)
    for policy in POLICIES:
        first, *others = by_policy[policy]["counts"][1:]
        assert all(other == first for other in others), policy
        assert by_policy[policy]["left"] == 0, policy
