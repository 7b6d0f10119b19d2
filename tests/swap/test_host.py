"""Host memory: one exact slab, its blocks, its limit."""

import os
import random

import pytest

from megatron_memo.config import HostSettings, MemoConfig
from megatron_memo.swap.engine import get_engine, set_engine
from megatron_memo.swap.extents import Extents
from megatron_memo.swap.host import HostBlock, HostPool

GIB = 1 << 30
PAGE = os.sysconf("SC_PAGE_SIZE")


class Counted(HostBlock):
    """A size without memory, that knows how many there are."""

    made = 0

    def __init__(self, nbytes):
        self.nbytes = nbytes
        Counted.made += 1

    def close(self):
        pass


@pytest.fixture
def pool():
    Counted.made = 0
    return HostPool(Counted, quiesce=lambda: None)


def one_pass(pool, sizes):
    """Forward takes, backward gives back in reverse; where the blocks were."""
    blocks = [pool.take(size) for size in sizes]
    for block in reversed(blocks):
        pool.give_back(block)
    return [(id(block.slab), block.start) for block in blocks]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def test_half_a_gib_and_a_sixteenth_asked_for_takes_no_more_than_that():
    """torch's pinned allocator would take a whole GiB for it."""
    asked, count = GIB * 9 // 16, 36
    pool = HostPool(HostBlock, quiesce=lambda: None)
    before = resident_bytes()
    for _ in range(3):  # in mappings of their own, then in one slab
        blocks = [pool.take(asked // count) for _ in range(count)]
        for block in blocks:
            block.array[:] = 1
        grown = resident_bytes() - before
        assert 0.98 * asked <= grown <= 1.02 * asked
        for block in blocks:
            pool.give_back(block)
        assert pool.total_bytes == asked
    pool.give_up_idle()
    del blocks, block
    assert resident_bytes() - before <= 0.02 * asked


def test_after_the_first_pass_there_is_one_slab_and_every_place_is_as_it_was(pool):
    sizes = [5000, 300, 70000, 12] * 5
    one_pass(pool, sizes)
    assert pool.total_bytes == sum(sizes)
    second = one_pass(pool, sizes)
    assert len({slab for slab, _ in second}) == 1
    made = Counted.made
    assert all(one_pass(pool, sizes) == second for _ in range(5))
    assert Counted.made == made
    assert pool.total_bytes == sum(sizes)


def test_blocks_of_a_slab_share_no_byte():
    pool = HostPool(HostBlock, quiesce=lambda: None)
    one_pass(pool, [4096] * 20)
    blocks = [pool.take(4096) for _ in range(20)]
    for number, block in enumerate(blocks):
        block.array[:] = number
        assert block.tensor.numel() == block.array.size == block.nbytes == 4096
    assert all((block.array == number).all() for number, block in enumerate(blocks))


def test_micro_batches_in_flight_settle_in_one_slab_as_well(pool):
    """1F1B: the oldest micro-batch's blocks come back while newer ones have theirs."""
    layer = [700, 90, 90, 4000]

    def iteration():
        flying = []
        for _ in range(8):
            flying.append([pool.take(size) for _ in range(3) for size in layer])
            if len(flying) == 3:
                for block in reversed(flying.pop(0)):
                    pool.give_back(block)
        for blocks in flying:
            for block in reversed(blocks):
                pool.give_back(block)

    for _ in range(3):
        iteration()
    made = Counted.made
    for _ in range(10):
        iteration()
    assert Counted.made == made
    assert pool.total_bytes <= 1.02 * 3 * 3 * sum(layer)


def test_changing_lengths_need_what_the_longest_needs_and_seldom_a_new_slab(pool):
    rng = random.Random(4)
    longest = 0
    for _ in range(300):
        size = rng.randrange(1000, 4000)
        longest = max(longest, size)
        one_pass(pool, [size] * 30)
        assert pool.total_bytes <= 1.2 * 30 * longest
    assert Counted.made < 200


def test_random_takers_get_disjoint_pieces_and_all_comes_back():
    rng = random.Random(1)
    extents, taken = Extents(10000), {}
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            start = rng.choice(list(taken))
            extents.give_back(start, taken.pop(start))
        else:
            nbytes = rng.randrange(1, 900)
            start = extents.take(nbytes)
            if start is None:
                continue
            for other, length in taken.items():
                assert start + nbytes <= other or other + length <= start
            assert 0 <= start <= 10000 - nbytes
            taken[start] = nbytes
        assert extents.taken == sum(taken.values())
    for start, nbytes in taken.items():
        extents.give_back(start, nbytes)
    assert extents.take(10000) == 0


def test_the_budget_is_a_limit_that_names_the_flags(pool):
    pool = HostPool(Counted, quiesce=lambda: None, limit=10000)
    kept = pool.take(9000)
    with pytest.raises(MemoryError, match=r"the budget is 9.766 KiB.*--memo-host-budget"):
        pool.take(1001)
    pool.give_back(kept)
    pool.take(10000)  # what is idle makes room
    assert pool.total_bytes == 10000


def test_the_engine_keeps_to_the_budget_of_its_settings():
    set_engine(None)
    try:
        engine = get_engine(MemoConfig(0.5, host=HostSettings(budget=5000)))
        engine.host.take(5000)
        with pytest.raises(MemoryError, match="budget"):
            engine.host.take(1)
        assert get_engine(MemoConfig(0.5, host=HostSettings(budget=5000))) is engine
        assert get_engine(MemoConfig(0.5)) is not engine
    finally:
        set_engine(None)
