"""What the cost model predicts, beside what the paper published; nothing here is calibrated on."""

import pytest

from megatron_memo.estimate import paper
from megatron_memo.estimate.calibration import Calibration
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.strategies import FullRecompute, Memo, PaperMemo, paper_alpha
from megatron_memo.estimate.timeline import simulate


def paper_costs(name, tokens, host_gib=2048, **layout):
    return Costs(paper.job(name, tokens, **layout), paper.machine(host_gib))


def test_7b_at_1m_on_8_gpus_is_within_three_points_of_the_paper():
    result = simulate(paper_costs("7B", paper.K * paper.K), PaperMemo())
    assert result.mfu_causal == pytest.approx(paper.MFU_7B_AT_1M, abs=0.03)


def test_65b_on_64_gpus_at_1408k_is_near_the_paper():
    result = simulate(paper_costs("65B", 1408 * paper.K, cp=8), PaperMemo())
    assert result.mfu_causal == pytest.approx(paper.MFU_65B_AT_1408K, abs=0.03)


def test_full_swap_hides_and_attention_dominates_from_where_the_paper_says():
    # The defaults are rounded from numbers derived from these two.
    hides = paper.swap_hides_from(Calibration())
    assert hides == pytest.approx(paper.SWAP_HIDES_FROM, rel=0.2)
    dominates = paper.attention_dominates_from(Calibration())
    assert dominates == pytest.approx(paper.ATTENTION_SHARE_FROM, rel=0.1)


def test_in_the_timeline_too_full_swap_hides_from_192k():
    for tokens, hides in ((160 * paper.K, False), (230 * paper.K, True)):
        result = simulate(paper_costs("7B", tokens), PaperMemo(1.0))
        assert (result.exposed["D2H"] < 0.001 * result.seconds) == hides


@pytest.mark.parametrize(("host_gib", "alpha"), paper.ALPHA_BY_HOST_GIB.items())
def test_alpha_is_the_paper_s_for_its_host_memory(host_gib, alpha):
    costs = paper_costs("7B", paper.K * paper.K, host_gib)
    assert paper_alpha(costs) == pytest.approx(alpha, abs=6e-4)


def test_below_480_gib_of_host_memory_not_even_alpha_0_fits():
    enough = paper_costs("7B", paper.K * paper.K, paper.LEAST_HOST_GIB)
    assert paper_alpha(enough) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="need 480 GiB a node, 479 GiB are there"):
        paper_alpha(paper_costs("7B", paper.K * paper.K, paper.LEAST_HOST_GIB - 1))


def test_swapping_beats_full_recompute_by_about_the_attention_that_it_saves():
    costs = paper_costs("7B", paper.K * paper.K)
    ours, full = (simulate(costs, way) for way in (Memo(0.45), FullRecompute()))
    # A forward of three and a half: attention's backward is 2.5 times its forward.
    assert full.seconds / ours.seconds == pytest.approx(4.5 / 3.5, rel=0.05)
