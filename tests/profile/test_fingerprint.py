"""Differences between two runs in plain words."""

from megatron_memo.profile.fingerprint import differences


def test_the_same_run_differs_in_nothing():
    run = {"hidden_size": 64, "memo swap_ratio": 0.5, "bf16": True}
    assert differences(run, dict(run)) == []


def test_what_differs_is_said_with_both_values():
    there = {"micro_batch_size": 1, "bf16": True, "torch": "2.14.1"}
    here = {"micro_batch_size": 2, "torch": "2.14.1", "memo chunks": 4}
    assert differences(there, here) == [
        "micro batch size is 1 there and 2 here",
        "bf16 is on there and off here",
        "memo chunks is off there and 4 here",
    ]
