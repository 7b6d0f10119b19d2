"""The embedding in token chunks against Megatron's own, at tp 1 and at tp 2 with and without SP.

53 tokens a rank (odd: most chunks are uneven), two sequences; see embedding_worker for what runs.
"""

import math

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test of each layout runs the worker

TOKENS, BATCH = 53, 2


@pytest.fixture(scope="module", params=(1, 2), ids=lambda ranks: f"tp{ranks}")
def answers(request, answers_of):
    return answers_of("embedding_worker", request.param)


@pytest.fixture
def modules(answers):
    """Of every rank."""
    return [row for rank in answers["modules"] for row in rank]


@pytest.fixture
def models(answers):
    return [row for rank in answers["models"] for row in rank]


def test_every_layout_ran_in_every_number_of_chunks(answers, modules):
    assert {(r["dtype"], r["positions"]) for r in modules} == {
        (dtype, positions)
        for dtype in ("fp32", "bf16")
        for positions in ("rope", "learned_absolute")
    }
    assert {r["shards"] for r in modules} == ({False, True} if answers["ranks"] > 1 else {False})
    assert {r["chunks"] for r in modules} == {1, 2, 7, TOKENS}


def test_values_and_the_dropout_after_them_are_bitwise_stock(modules):
    assert all(r["same_values"] for r in modules)


def test_one_chunk_is_bitwise_stock_in_gradients_too(modules):
    assert all(r["same_words"] for r in modules if r["chunks"] == 1)


def test_a_words_gradient_is_rounded_as_often_as_it_is_added_to(modules):
    """Against the sum in fp64: n terms of a word are n - 1 additions, in any order, a rounding of
    each by dropout's scale and one of the whole. The bound is of every element by itself."""
    assert all(r["within"] for r in modules)


def test_chunks_of_a_16_bit_gradient_are_added_in_fp32(answers):
    """In bf16 a sum of ones ends at 256, and one of twos at 512."""
    first, *others = answers["one_word"]
    assert first == {"first": [512 * answers["ranks"]], "rest": False}
    assert all(rank == {"first": [0], "rest": False} for rank in others)


def test_the_comparison_sees_a_difference(modules, models):
    """A gradient a tenth off is beyond the bound; and sums in another order are other bits."""
    assert not any(r["beyond"] for r in modules)
    assert not any(r["same_words"] for r in modules if r["chunks"] in (7, TOKENS))
    assert not any(r["same_words"] for r in models)


def test_position_embeddings_have_stocks_gradient(modules):
    assert not any(r["others"] for r in modules)


def test_nothing_is_left_in_the_module(modules):
    assert not any(r["left"] for r in modules)


def test_losses_and_all_other_gradients_of_a_model_are_bitwise_stock(models):
    """Tied and untied, with and without further tokens, the loss whole and in chunks."""
    assert len({(r["tied"], r["further"], r["head"]) for r in models}) == 8
    assert all(r["same_losses"] and r["others"] == [] for r in models)


def test_a_models_embedding_gradient_is_within_the_rounding_of_one_sum(answers, models):
    """The bound of tests/layer/test_exactness for a sum over T tokens in another order; tied
    weights have the head's T terms as well, and each further prediction as many again."""
    for row in models:
        terms = (1 + row["further"]) * (1 + row["tied"]) * TOKENS * answers["ranks"] * BATCH
        assert row["error"] <= 4 / math.pi * terms**1.5 * 2.0**-24, row


def test_hooks_of_every_parameter_run_once_a_pass(modules, models):
    """Megatron's data parallelism counts them."""
    assert all(r["calls"] == [1] for r in modules + models)


def test_a_whole_sequences_gradient_never_exists_under_sequence_parallelism(answers):
    """Stock's gathers it and copies it; k chunks have a k-th of both beside the values."""
    for rank in answers["peaks"]:
        whole, found = answers["ranks"] * rank["local"], rank["found"]
        if answers["ranks"] == 1:
            # Nothing is gathered: one chunk beside the values, in forward, is all that it costs.
            assert found["8"] <= found["None"] + 1.2 * whole / 8
        else:
            assert found["None"] >= 2 * whole
            assert found["8"] <= found["None"] - 1.4 * whole


def test_evaluation_and_a_frozen_embedding_have_the_values_and_no_gradient(answers):
    for rank in answers["without_gradients"]:
        assert rank == {"same": True, "wants": [False, False]}
