"""The line that a run with memo starts on."""

from megatron_memo.plan.ratio import Link
from megatron_memo.training.start_line import StartLine


def test_the_link_is_that_of_the_slowest_rank_and_measured_before_the_line_is_said():
    order = []

    def probe():
        order.append("probe")
        return Link(4 * 2**30, 2**30)

    def gather(mine):
        return [mine, Link(2**30, 2**29), Link(8 * 2**30, 8 * 2**30)]

    StartLine(["a", "b"], probe, gather, lambda: order.append("release"), order.append).begin([])
    assert order == [
        "probe",
        "release",
        "a; b; link: 1 GiB/s to the host, 512 MiB/s back with all ranks of a node copying",
    ]


def test_a_run_that_measures_its_link_later_asks_nobody():
    lines = []
    StartLine(["a"], None, None, lambda: None, lines.append).begin([])
    assert lines == ["a"]
