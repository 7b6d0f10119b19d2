"""The wrapper around torch's CPU allocator: every way memory comes and goes, in every mode."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.allocator.face import PlanEntry, get_allocator

ROOT = Path(__file__).parents[2]
MODES = ["off", "record", "replay"]
KIB = 1024


def in_mode(allocator, mode, sizes=()):
    """Inside an iteration's phase 0, in a mode; replay plans `sizes` side by side."""
    allocator.set_filter(1)
    if mode == "replay":
        entries, top = [], 0
        for size in sizes:
            entries.append(PlanEntry(0, size, 0, top))
            top += -(-size // 64) * 64
        allocator.load_plan(entries, top)
        allocator.replay()
    elif mode == "record":
        allocator.start_recording()
    allocator.begin_iteration()
    allocator.enter(0)
    allocator.reset_stats()


def in_new_process(script):
    """Runs a script in a process that has not installed the allocator yet; its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mode", MODES)
def test_the_profiler_sees_every_block_come_and_go_once(allocator, mode):
    sizes = [4096, 64, 100_000, 64]
    in_mode(allocator, mode, sizes[:3])
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        blocks = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        blocks.append(torch.empty(0))
        blocks.clear()
    allocator.off()
    changes = [e.nbytes() for e in profile.kineto_results.events() if e.name() == "[memory]"]
    assert changes[:4] == sizes
    assert sorted(changes[4:]) == sorted(-size for size in sizes)
    assert allocator.stats().hits == (3 if mode == "replay" else 0)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_something_that_can_be_asked_for_and_freed(allocator, mode):
    in_mode(allocator, mode)
    empty = torch.empty(0)
    assert empty.untyped_storage().nbytes() == 0
    empty.resize_(10).fill_(1)
    empty.untyped_storage().resize_(0)
    del empty
    assert allocator.stats().unknown_frees == 0


@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("ended", MODES)
def test_a_block_may_be_resized_and_freed_in_any_mode_after_it_was_made(allocator, made, ended):
    in_mode(allocator, made, [4 * KIB])
    before = allocator.stats().device_used
    block = torch.arange(KIB, dtype=torch.int32)
    twin = block.clone()
    if ended == "record":
        allocator.start_recording()
    elif ended == "replay":
        allocator.replay()
    else:
        allocator.off()
    block.resize_(2 * KIB)
    assert torch.equal(block[:KIB], twin)
    del block, twin
    allocator.off()
    stats = allocator.stats()
    assert (stats.arena_blocks, stats.unknown_frees) == (0, 0)
    assert stats.device_used == before


def test_planned_memory_is_ordinary_memory_to_torch(allocator):
    size = 64 * KIB
    in_mode(allocator, "replay", [size] * 4)
    block = torch.arange(size // 8)
    assert block.data_ptr() % 64 == 0
    lazy = torch._lazy_clone(block)  # copy-on-write takes simple pointers only
    lazy.add_(1)
    assert torch.equal(lazy - 1, block)
    assert torch.equal(torch.from_numpy(block.numpy()), block)
    assert torch.equal(block.clone().share_memory_(), block)
    assert allocator.stats().hits >= 2


def test_tensors_made_before_the_wrapper_can_be_used_resized_and_freed_after():
    said = in_new_process("""
        import torch
        old = [torch.arange(5000) for _ in range(4)]
        grown, freed, viewed, cloned = old
        del old
        view = viewed[10:20]
        from megatron_memo.allocator.face import PlanEntry, get_allocator
        allocator = get_allocator("cpu")
        allocator.set_filter(1)
        allocator.load_plan([PlanEntry(0, 40000, 0, 0)], 1 << 20)
        allocator.replay()
        allocator.begin_iteration()
        allocator.enter(0)
        del freed, viewed
        grown.resize_(9000)
        assert torch.equal(grown[:5000], cloned)
        new = cloned.clone()
        assert torch.equal(new, cloned) and view.tolist() == list(range(10, 20))
        del grown, view, cloned, new
        stats = allocator.stats()
        print(stats.hits, stats.arena_blocks, stats.unknown_frees, stats.device_used - (1 << 20))
    """)
    assert said.split() == ["1", "0", "0", "0"]


def test_planned_tensors_may_live_until_the_process_ends():
    said = in_new_process("""
        import torch
        from megatron_memo.allocator.face import PlanEntry, get_allocator
        allocator = get_allocator("cpu")
        allocator.load_plan([PlanEntry(0, 40000, 0, 0)], 1 << 20)
        allocator.replay()
        allocator.begin_iteration()
        allocator.enter(0)
        torch.kept = torch.arange(5000)
        print(allocator.stats().hits)
    """)
    assert said.split() == ["1"]


def test_it_is_installed_once(allocator):
    assert get_allocator("cpu") is allocator
    assert allocator._library.memo_install() == 0
    torch.empty(1000)
    assert allocator.stats().unknown_frees == 0


def test_threads_on_a_plan_of_random_places_never_see_each_others_data(allocator):
    random = np.random.default_rng(0)
    sizes = [256, 4096, 65536]
    arena = 1 << 20
    entries = [
        PlanEntry(phase, size, 0, int(random.integers(0, (arena - size) // 64 + 1)) * 64)
        for phase in range(8)
        for size in random.choice(sizes, 200).tolist()
    ]
    allocator.set_filter(1)
    allocator.load_plan(entries, arena)
    allocator.replay()
    allocator.begin_iteration()
    failures = []

    def work(seed):
        mine = np.random.default_rng(seed)
        alive = []
        for turn in range(3000):
            if turn % 40 == 0:
                allocator.enter(int(mine.integers(8)))
            if seed == 0 and turn % 200 == 0:
                allocator.begin_iteration()
                allocator.enter(0)
            value = int(mine.integers(1 << 40))
            alive.append((torch.full((int(mine.choice(sizes)) // 8,), value), value))
            if len(alive) > 15:
                tensor, value = alive.pop(int(mine.integers(15)))
                if not bool((tensor == value).all()):
                    failures.append(value)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = allocator.stats()
    assert failures == []
    assert stats.hits > 500 and stats.miss_occupied > 500
    assert (stats.unknown_frees, stats.arena_blocks) == (0, 0)


# ---- the device budget


def test_beyond_the_budget_torch_raises_out_of_memory_and_names_the_holders(allocator):
    used = allocator.stats().device_used
    allocator.name_phases({3: "layer 3 forward"})
    allocator.set_budget(used + (64 << 20))
    kept = [torch.empty(8 << 20, dtype=torch.uint8) for _ in range(3)]
    allocator.begin_iteration()
    allocator.enter(3)
    kept.append(torch.empty(30 << 20, dtype=torch.uint8))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(20 << 20, dtype=torch.uint8)
    said = str(caught.value)
    assert "out of memory. Tried to allocate 20.00 MiB. The device budget is" in said
    assert "1 x 30.00 MiB (layer 3 forward), 3 x 8.00 MiB (outside an iteration)" in said
    kept.clear()  # as a caller that frees something and tries again
    torch.empty(60 << 20, dtype=torch.uint8)
    allocator.set_budget(None)
    torch.empty(80 << 20, dtype=torch.uint8)


def test_the_arena_counts_whole_and_its_blocks_do_not_count_again(allocator):
    allocator.load_plan([], 0)
    used = allocator.stats().device_used
    allocator.set_budget(used + (10 << 20))
    with pytest.raises(AllocatorError, match=r"Tried to allocate 11\.00 MiB"):
        allocator.load_plan([], 11 << 20)
    allocator.load_plan([PlanEntry(0, 8 << 20, 0, 0)], 8 << 20)
    allocator.replay()
    allocator.begin_iteration()
    allocator.enter(0)
    planned = torch.empty(8 << 20, dtype=torch.uint8)
    assert allocator.stats().device_used == used + (8 << 20)
    with pytest.raises(torch.OutOfMemoryError, match=r"the arena has 8\.00 MiB of that"):
        torch.empty(3 << 20, dtype=torch.uint8)
    del planned
    allocator.load_plan([], 0)
    assert allocator.stats().device_used == used


def test_a_request_that_the_system_refuses_is_not_counted(allocator):
    used = allocator.stats().device_used
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert allocator.stats().device_used == used


def test_an_arena_the_system_refuses_is_said(allocator):
    with pytest.raises(AllocatorError, match=r"no arena of .* TiB: the system gives no"):
        allocator.load_plan([], 1 << 60)
    allocator.load_plan([PlanEntry(0, 64, 0, 0)], 64)
