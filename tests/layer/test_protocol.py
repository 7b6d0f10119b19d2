"""The swap protocol under schedules chosen to break it, and with each of its waits taken out."""

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test that asks runs the scenarios


@pytest.mark.parametrize("schedule", ["Late", "Early"])
def test_the_worst_legal_schedule_changes_no_bit(answers, schedule):
    (by_schedule,) = answers("protocol_mutations", 1)
    assert by_schedule[schedule]["whole"] == []


@pytest.mark.parametrize(
    ("wait", "schedule"),
    [
        ("d2h_after_compute", "Early"),
        ("retire_after_d2h", "Late"),
        ("buffer_is_free", "Early"),
        ("read_after_h2d", "Late"),
    ],
)
def test_no_wait_of_the_protocol_can_be_left_out(answers, wait, schedule):
    """The fifth wait, free_after_h2d, is tests/swap/test_context.py's."""
    (by_schedule,) = answers("protocol_mutations", 1)
    assert by_schedule[schedule][wait], f"without {wait} nothing went wrong: it is not tested"


@pytest.mark.parametrize(
    "schedule", ["slow D2H", "slow H2D", "both slow", "late", "early", "sync", "slow compute"]
)
def test_slow_late_or_early_copies_change_no_bit_from_iteration_0_on(answers, schedule):
    (by_schedule,) = answers("forced_delays", 1)
    assert by_schedule[schedule] == [[], []]


def test_no_depth_changes_a_bit_under_any_schedule(answers):
    (differing,) = answers("depths", 1)
    assert len(differing) == 18
    wrong = {name: names for name, names in differing.items() if names != [[], []]}
    assert not wrong


def test_time_that_compute_stands_still_for_copies_is_counted(answers):
    (by_schedule,) = answers("forced_delays", 1)
    assert by_schedule["exposed_h2d_s"] > 0.01
