"""A slow link, simulated: copies take what it takes, and what cannot be hidden is reported."""

import time

import pytest
import torch

from megatron_memo.config import MemoConfig
from megatron_memo.plan.ratio import paper_program
from megatron_memo.swap.cpu import HostThreadBackend
from megatron_memo.swap.engine import SwapEngine, get_engine, set_engine
from megatron_memo.training.link_probe import measure_link

LINK = 20 << 20
LAYER_SECONDS = 0.15
CPU = torch.device("cpu")


def forward(nbytes, layers=4):
    """Layers that compute for a while and offload so many bytes; the engine, seconds of each."""
    engine, seconds, kept = SwapEngine(HostThreadBackend(LINK)), [], []
    for layer in range(layers):
        context = engine.begin_layer(first=layer == 0, swaps=True, device=CPU).own
        start = time.perf_counter()
        time.sleep(LAYER_SECONDS)
        context.put(torch.zeros(nbytes, dtype=torch.uint8))
        context.flush()
        kept.append(context)
        seconds.append(time.perf_counter() - start)
    exposed = engine.stats()["exposed_d2h_s"]
    engine.backend.synchronize()
    return exposed, seconds


def expected(nbytes, seconds):
    """What compute waits, if a layer begins when the copy of the one two before it has ended."""
    now = waited = 0.0
    ends = []
    for layer, compute in enumerate(seconds):
        wait = max(ends[layer - 2] - now, 0.0) if layer >= 2 else 0.0
        waited += wait
        now += wait + compute
        ends.append(max(now, ends[-1] if ends else 0.0) + nbytes / LINK)
    return waited


def test_the_exposed_time_is_what_the_link_cannot_hide():
    nbytes = int(3 * LAYER_SECONDS * LINK)
    exposed, seconds = forward(nbytes)
    least = expected(nbytes, seconds)
    assert least > 2 * LAYER_SECONDS
    # Sleeps are never too short; on a busy machine they may be too long.
    assert 0.9 * least <= exposed <= 1.1 * least + 0.5


def test_the_ratio_that_hides_the_copies_is_the_formulas():
    always, others = LINK // 50, LINK // 4
    formula = paper_program(
        always=always,
        others=others,
        layers=4,
        resident=0,
        host=1e12,
        bandwidth=LINK,
        layer_seconds=LAYER_SECONDS,
    )
    assert formula.binds == "D2H" and 0.4 < formula.ratio < 0.6

    def waits(ratio):
        nbytes = int(always + ratio * others)
        exposed, seconds = forward(nbytes)
        return exposed, expected(nbytes, seconds)

    # On a busy machine sleeps are too long, and so is what compute waits: the least of some counts.
    hidden = min(waits(formula.ratio)[0] for _ in range(3))
    more, least = waits(2 * formula.ratio)
    assert more >= 0.9 * least > 0
    assert hidden < more / 2


def test_the_slow_link_comes_from_the_settings():
    set_engine(None)
    try:
        fast = get_engine(MemoConfig(0.5))
        slow = get_engine(MemoConfig(0.5, link_bandwidth=LINK))
        assert slow is not fast and get_engine(MemoConfig(0.5, link_bandwidth=LINK)) is slow
    finally:
        set_engine(None)


@pytest.mark.parametrize("link", [LINK * 8])
def test_the_probe_finds_the_links_bandwidth(link):
    barriers = []
    found = measure_link(HostThreadBackend(link), CPU, lambda: barriers.append(1), seconds=0.01)
    assert len(barriers) == 4
    for rate in (found.d2h, found.h2d, found.d2h_both, found.h2d_both):
        assert link / 20 < rate <= link * 1.001
