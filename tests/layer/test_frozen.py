"""Parameters that are not trained: a frozen embedding, frozen layers, low-rank adapters."""

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test that asks runs the scenarios

SETTINGS = ("0.0 1", "1.0 1", "0.5 3")


@pytest.fixture
def cases(answers):
    (by_case,) = answers("frozen", 1)
    return by_case


def test_gradients_of_what_is_trained_are_bitwise_stocks(cases):
    """In one chunk; in several, those of the same chunks with everything kept."""
    assert len(cases) == 6
    for name, row in cases.items():
        assert row["trained"] > 0
        for settings in SETTINGS:
            assert row[settings]["differing"] == [], (name, settings)


def test_no_weight_gradient_is_computed_for_a_frozen_weight(cases):
    """Swapped, nothing is computed twice: stock's matrix products, and no more. Where the model's
    input has no gradient, stock's frozen weights, unlike its others, leave out the input's gradient
    in the lowest layer, and memo's do not."""
    for name, row in cases.items():
        more = row["of the first input"] if name == "all but adapters" else 0
        assert row["1.0 1"]["more_gemm_flops"] == more, name


def test_nothing_is_left_behind(cases):
    for name, row in cases.items():
        assert all(row[settings]["flat"] for settings in SETTINGS), name


def test_layers_below_the_lowest_trained_one_move_nothing(cases):
    """One of four layers is trained; the others have no backward to save for."""
    for settings in SETTINGS:
        moved = cases["first layers"][settings]["moved"], cases["embedding"][settings]["moved"]
        assert 0 < 3.5 * moved[0] < moved[1]
