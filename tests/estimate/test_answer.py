"""Ways of training side by side: what fits, which ratio is chosen, what a change would buy."""

from dataclasses import replace

import pytest

from megatron_memo.estimate import changes, sweep
from megatron_memo.estimate.answer import answer, best_ratio, plain
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import GIB, TIB, Machine, faster_link, gpu
from megatron_memo.estimate.parts import Parts
from megatron_memo.estimate.strategies import FullRecompute, Memo, Stock
from megatron_memo.estimate.ways import all_ways, beside, best_memo

RESERVE = 2 * GIB


def machine_with(host=2 * TIB, device=80 * GIB, link=1.0):
    a800 = faster_link(gpu("a800-80g"), link)
    return Machine(replace(a800, memory=device), gpus=8, host_memory=host)


@pytest.fixture
def costs(seven_b):
    """A model of 4 layers at 128K tokens: quick to simulate."""
    return Costs(replace(seven_b, layers=4, sequence=1 << 17), machine_with())


def test_what_does_not_fit_says_by_how_much(costs):
    tight = Costs(costs.job, machine_with(device=8 * GIB, host=GIB))
    one = answer(tight, Memo(ratio=1.0, resident=0), reserve=RESERVE)
    assert not one.fits
    device, host = one.problems
    over = (one.peak.parts.total - 6 * GIB) / GIB
    assert device == f"device: {over:.4g} GiB too much"
    assert host.startswith("host: ") and host.endswith("too much for each GPU")
    assert answer(costs, Memo(ratio=1.0), reserve=RESERVE).fits


def test_the_best_ratio_is_the_best_of_a_grid(costs):
    for link, host in ((1.0, 2 * TIB), (0.2, 2 * TIB), (0.02, 2 * TIB), (1.0, 24 * GIB)):
        there = Costs(costs.job, machine_with(host=host, link=link))
        memo = Memo(resident=0)
        best = answer(there, best_ratio(there, memo, reserve=RESERVE), reserve=RESERVE)
        assert best.fits
        grid = [answer(there, replace(memo, ratio=k / 16), reserve=RESERVE) for k in range(17)]
        least = min(one.result.seconds for one in grid if one.fits)
        assert best.result.seconds <= least * 1.001, (link, host)


def test_a_slower_link_lowers_the_ratio_and_less_host_memory_bounds_it(costs):
    def ratio(**kind):
        return best_ratio(Costs(costs.job, machine_with(**kind)), Memo(resident=0)).ratio

    assert ratio(link=4.0) == 1.0
    assert ratio(link=0.01) < ratio(link=0.2)
    there = Costs(costs.job, machine_with(host=32 * GIB, link=4.0))
    bound = best_ratio(there, Memo(resident=0))
    held = answer(there, bound, reserve=RESERVE).host_bytes
    assert 0.99 * 4 * GIB < held <= 4 * GIB


def test_where_no_ratio_fits_the_nearest_is_given(costs):
    there = Costs(costs.job, machine_with(device=4 * GIB))
    assert best_ratio(there, Memo()).ratio == 0.0
    assert not answer(there, best_memo(there, RESERVE), reserve=RESERVE).fits


def test_memo_spares_memory_where_its_defaults_do_not_fit(costs):
    assert best_memo(costs, RESERVE).resident == 2
    for device in range(40, 4, -1):
        tight = Costs(costs.job, machine_with(device=device * GIB))
        frugal = best_memo(tight, RESERVE)
        if frugal.resident == 0:
            break
        assert answer(tight, frugal, reserve=RESERVE).fits
    assert frugal.resident == 0 and answer(tight, frugal, reserve=RESERVE).fits


def test_the_own_way_takes_the_place_of_its_kind(costs):
    own = answer(costs, Memo(ratio=0.25), reserve=RESERVE)
    ways = beside(own, costs, RESERVE)
    assert [type(one.strategy) for one in ways] == [type(way) for way in all_ways(costs, RESERVE)]
    assert ways[-1] is own
    content = plain(own)
    assert content["device_bytes"] == sum(content["device_parts"].values())
    assert set(content["device_parts"]) == set(Parts().by_name())


def test_a_run_that_does_not_fit_is_told_what_makes_it_fit(costs):
    stock = answer(costs, Stock(), reserve=RESERVE)
    tight = Costs(costs.job, machine_with(device=stock.peak.parts.total - GIB))
    now = answer(tight, Stock(), reserve=RESERVE)
    found = changes.best_changes(tight, now, auto=False, reserve=RESERVE)
    assert 1 <= len(found) <= 3 and found[0].then.fits
    assert found[0].gain(now).endswith("then it fits")
    assert any(change.what.startswith("--memo-swap-ratio") for change in found)


def test_changes_help_and_come_in_the_order_of_their_gain(costs):
    now = answer(costs, FullRecompute(), reserve=RESERVE)
    found = changes.best_changes(costs, now, auto=False, reserve=RESERVE)
    rates = [change.then.result.tokens_per_second for change in found]
    faster = [rate for rate in rates if rate > 1.005 * now.result.tokens_per_second]
    assert faster == sorted(faster, reverse=True) == rates[: len(faster)] and faster
    assert all(change.then.fits for change in found)


def test_another_layout_keeps_gpus_and_batch(seven_b):
    job = replace(seven_b, tp=4, dp=2, micro_batches=4)
    other = changes.relaid(job, 2, 2, 1)
    assert other.ranks == job.ranks and other.dp == 2
    assert other.iteration_tokens == job.iteration_tokens
    assert changes.relaid(job, 3, 1, 1) is None and changes.relaid(job, 8, 2, 2) is None
    assert changes.layout_words(job, other) == (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    )


def test_a_custom_layout_is_of_its_own_number_of_stages(seven_b):
    job = replace(seven_b, tp=4, pp=2, layout=((10,), (22,)))
    assert changes.relaid(job, 8, 1, 1).layers_of(0) == range(1, 33)
    assert changes.relaid(job, 2, 2, 2).layout == job.layout
    assert changes.layout_words(job, changes.relaid(job, 8, 1, 1)) == (
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 "
        "without --pipeline-model-parallel-layout"
    )


def test_a_search_covers_every_layout_that_the_model_divides(seven_b):
    found = {(job.tp, job.pp, job.cp, job.dp) for job in sweep.layouts(seven_b, gpus=8)}
    assert (8, 1, 1, 1) in found and (4, 2, 1, 1) in found and (1, 8, 1, 1) in found
    assert all(tp * pp * cp * dp == 8 for tp, pp, cp, dp in found)
    assert not any(dp > 1 for *_, dp in found)  # one sequence cannot be spread
    assert all(job.tp <= 2 for job in sweep.layouts(seven_b, gpus=2))


def test_lengths_are_a_list_or_double():
    assert sweep.lengths("seq-length=64K..256K", 0) == [65536, 131072, 262144]
    assert sweep.lengths("seq-length=1000,1M", 0) == [1000, 1 << 20]
    assert sweep.lengths("seq-length", 8192) == [1024 << k for k in range(7)]


@pytest.mark.parametrize("text", ["depth", "seq-length=x", "seq-length=2M..1M", "seq-length=0"])
def test_other_sweeps_are_refused(text):
    with pytest.raises(ValueError, match=f"--sweep {text}"):
        sweep.lengths(text, 8192)


def test_a_sweep_has_every_way_at_every_length(costs):
    found = dict(sweep.sweep(costs, [1 << 15, 1 << 16], RESERVE))
    assert list(found) == [1 << 15, 1 << 16]
    for one, other in zip(*found.values(), strict=True):
        assert type(one.strategy) is type(other.strategy)
        assert one.result.seconds < other.result.seconds
