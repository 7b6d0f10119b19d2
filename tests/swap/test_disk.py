"""Blocks on disk: the same bytes come back, no name is left behind, no error loses data."""

import errno
import fcntl
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_memo.config import HostSettings
from megatron_memo.swap.backend import Copy
from megatron_memo.swap.cpu import HostThreadBackend
from megatron_memo.swap.disk import DiskBlock, DiskTier
from megatron_memo.swap.disk_budget import disk_budget
from megatron_memo.swap.disk_file import SECTOR, SpillFile
from megatron_memo.swap.engine import SwapEngine

ROOT = str(Path(__file__).resolve().parents[2])
MIB = 1 << 20


@pytest.fixture
def tier(tmp_path):
    tier = DiskTier(HostThreadBackend(), SpillFile(str(tmp_path), 64 * MIB), budget=1 << 19)
    assert tier.segment == 2 * SECTOR  # small, so that blocks have many
    yield tier
    tier.synchronize()
    tier.close()


@pytest.fixture
def engine(tmp_path):
    """Everything goes to disk."""
    settings = HostSettings(0, str(tmp_path), 64 * MIB, need=MIB, spill=MIB)
    return SwapEngine(HostThreadBackend(), poison=True, host=settings)


def new_context(engine):
    return engine.begin_layer(first=True, swaps=True, device=torch.device("cpu")).own


def noise(nbytes, seed=0):
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def copies_of(block, tensors, offsets):
    return [Copy(t, block, at) for t, at in zip(tensors, offsets, strict=True)]


# ---- bytes


@pytest.mark.parametrize("nbytes", [1, SECTOR - 1, SECTOR, 2 * SECTOR + 1, 123_457])
def test_a_block_comes_back_bitwise(tier, nbytes):
    block, data, back = tier.take(nbytes), noise(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    tier.d2h([Copy(data, block, 0)], None).synchronize()
    tier.h2d([Copy(back, block, 0)], None).synchronize()
    assert torch.equal(back, data)


def test_pieces_at_any_offset_are_cut_where_segments_meet(tier):
    rng = random.Random(3)
    for seed in range(20):
        lengths = [rng.randrange(1, 20_000) for _ in range(6)]
        offsets, at = [], 0
        for length in lengths:
            offsets.append(at)
            at += length + rng.randrange(0, 300)
        block = tier.take(at + 300)
        data = [noise(length, seed) for length in lengths]
        tier.d2h(copies_of(block, data, offsets), None).synchronize()
        back = [torch.zeros_like(t) for t in data]
        tier.h2d(copies_of(block, back, offsets), None).synchronize()
        assert all(torch.equal(a, b) for a, b in zip(data, back, strict=True))
        # A part of the block, to another place.
        piece = torch.zeros(lengths[2] // 2 + 1, dtype=torch.uint8)
        tier.h2d([Copy(piece, block, offsets[2] + lengths[2] // 3)], None).synchronize()
        want = data[2][lengths[2] // 3 :][: piece.numel()]
        assert torch.equal(piece[: want.numel()], want)
        tier.give_back(block)


def test_many_blocks_under_way_at_once_do_not_mix(tier):
    blocks = [tier.take(30_000) for _ in range(40)]
    data = [noise(30_000, seed) for seed in range(40)]
    back = [torch.zeros_like(t) for t in data]
    written = [tier.d2h([Copy(t, b, 0)], None) for t, b in zip(data, blocks, strict=True)]
    read = [tier.h2d([Copy(t, b, 0)], None) for t, b in zip(back, blocks, strict=True)]
    for event in (*written, *read):
        event.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(data, back, strict=True))


def test_a_read_waits_for_the_write_of_its_block(tier, monkeypatch):
    write = SpillFile.write

    def slow(self, data, offset):
        time.sleep(0.02)
        write(self, data, offset)

    monkeypatch.setattr(SpillFile, "write", slow)
    block, data = tier.take(20_000), noise(20_000)
    back = torch.zeros_like(data)
    tier.d2h([Copy(data, block, 0)], None)
    tier.h2d([Copy(back, block, 0)], None).synchronize()
    assert torch.equal(back, data)


def test_copies_wait_for_the_point_that_they_were_told(tier):
    reached, block = threading.Event(), tier.take(9000)

    class Point:
        def synchronize(self):
            reached.wait()

    data = torch.zeros(9000, dtype=torch.uint8)
    event = tier.d2h([Copy(data, block, 0)], Point())
    time.sleep(0.05)
    data.copy_(noise(9000))  # compute writes it before the point
    reached.set()
    event.synchronize()
    back = torch.zeros_like(data)
    tier.h2d([Copy(back, block, 0)], None).synchronize()
    assert torch.equal(back, data)


def test_a_layers_tensors_come_back_from_disk_and_their_memory_was_given_up(engine):
    for seed in range(3):
        original = noise(50_000, seed)
        kept, storage = original.clone(), weakref.ref(original.untyped_storage())
        context = new_context(engine)
        handle = context.put(original)
        context.flush()
        del original
        context.retire()
        assert storage() is None
        context.prefetch()
        assert torch.equal(context.get(handle), kept)
        context.release()
    assert engine.stats()["disk_bytes"] >= 50_000
    assert engine.stats()["host_bytes"] == 8 * SECTOR  # what the copies go through


def test_an_engine_that_is_replaced_gives_its_threads_and_its_file_back(tmp_path):
    settings = HostSettings(0, str(tmp_path), MIB, need=9000, spill=9000)
    engine = SwapEngine(HostThreadBackend(), host=settings)
    context = new_context(engine)
    context.put(noise(9000))
    context.flush()
    context.retire()
    context.release()
    engine.backend.synchronize()
    file, before = weakref.ref(engine.host._tier.file), threading.active_count()
    del engine, context
    deadline = time.monotonic() + 60
    while file() is not None or threading.active_count() >= before:
        gc.collect()
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


# ---- which blocks


def test_what_spills_is_spread_evenly_and_the_same_in_every_pass(tmp_path):
    settings = HostSettings(MIB, str(tmp_path), 64 * MIB, need=400_000, spill=100_000)
    pool = SwapEngine(HostThreadBackend(), host=settings).host
    for _ in range(2):
        blocks = [pool.take(10_000) for _ in range(40)]
        on_disk = [i for i, block in enumerate(blocks) if isinstance(block, DiskBlock)]
        assert on_disk == list(range(1, 40, 4))
        for block in reversed(blocks):
            pool.give_back(block)
    assert pool.taken == 0


def test_what_was_not_foreseen_goes_where_there_is_room(tmp_path):
    settings = HostSettings(MIB // 2, str(tmp_path), MIB, need=0, spill=0)
    pool = SwapEngine(HostThreadBackend(), host=settings).host
    blocks = [pool.take(100_000) for _ in range(12)]
    on_disk = [isinstance(block, DiskBlock) for block in blocks]
    assert on_disk == [False] * 4 + [True] * 8
    with pytest.raises(MemoryError, match=r"--memo-nvme-path .*--memo-nvme-budget"):
        pool.take(300_000)


# ---- the file


@pytest.fixture(params=["nameless from the start", "unlinked"])
def way(request, monkeypatch):
    """File systems that make files without a name, and those that do not."""
    if request.param == "unlinked":
        really_open = os.open

        def no_nameless(path, flags, *mode, **other):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "not supported")
            return really_open(path, flags, *mode, **other)

        monkeypatch.setattr(os, "open", no_nameless)
    return request.param


def test_the_file_has_no_name_while_it_is_used(tmp_path, way):
    file = SpillFile(str(tmp_path), MIB)
    at = file.take(SECTOR)
    file.write(page(b"x"), at)
    assert os.listdir(tmp_path) == []
    assert os.fstat(file._fd).st_nlink == 0
    file.close()


def page(byte):
    """A page-aligned page, as direct access wants it."""
    mapping = mmap.mmap(-1, SECTOR)
    mapping[:] = byte * SECTOR
    return memoryview(mapping)


def test_a_process_that_is_killed_leaves_nothing_behind(tmp_path):
    script = f"""
import sys, torch
from megatron_memo.config import HostSettings
from megatron_memo.swap.cpu import HostThreadBackend
from megatron_memo.swap.engine import SwapEngine
engine = SwapEngine(
    HostThreadBackend(),
    host=HostSettings(0, {str(tmp_path)!r}, 1 << 28, need=1 << 24, spill=1 << 24),
)
while True:
    context = engine.begin_layer(first=True, swaps=True, device=torch.device("cpu")).own
    context.put(torch.ones(1 << 20))
    context.flush()
    print("writing", flush=True)
"""
    env = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        for _ in range(3):
            assert process.stdout.readline() == "writing\n"
        assert any(
            str(tmp_path) in os.readlink(entry.path)
            for entry in os.scandir(f"/proc/{process.pid}/fd")
        )
        process.send_signal(signal.SIGKILL)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_said_before_anything_is_promised(tmp_path, monkeypatch):
    file = SpillFile(str(tmp_path), 64 * MIB)

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError) as error:
        file.take(8 * SECTOR)
    text = str(error.value)
    assert text.startswith(f"--memo-nvme-path {tmp_path}: memo has 4 KiB there")
    assert "32 KiB (No space left on device)" in text
    monkeypatch.undo()
    assert file.take(8 * SECTOR) == SECTOR  # and nothing is lost by it


def test_a_full_disk_leaves_a_layers_tensors_where_they_were(engine, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    context = new_context(engine)
    kept = noise(2 * MIB)
    handle = context.put(kept.clone())
    with pytest.raises(MemoryError, match="No space left on device"):
        context.flush()
    monkeypatch.undo()
    context.flush()
    context.retire()
    assert torch.equal(context.get(handle), kept)


@pytest.mark.parametrize("fault", ["short", "EIO"])
def test_a_write_that_fails_is_an_error_while_the_tensors_are_still_there(
    engine, monkeypatch, fault
):
    really_write = os.pwrite

    def pwrite(fd, data, offset):
        if fault == "EIO":
            raise OSError(errno.EIO, "Input/output error")
        return really_write(fd, data, offset) // 2

    monkeypatch.setattr(os, "pwrite", pwrite)
    context = new_context(engine)
    kept = noise(20_000)
    handle = context.put(kept.clone())
    context.flush()
    with pytest.raises(RuntimeError, match="could not be moved to or from disk"):
        context.retire()
    sources = [stored.source for group in context._groups for stored in group.stored]
    assert all(source is not None for source in sources)
    assert torch.equal(sources[0][:20_000], kept)
    assert handle.stored.source is not None


@pytest.mark.parametrize("fault", ["short", "EIO"])
def test_a_read_that_fails_is_an_error_and_not_a_wrong_number(engine, monkeypatch, fault):
    def preadv(fd, buffers, offset):
        if fault == "EIO":
            raise OSError(errno.EIO, "Input/output error")
        return len(buffers[0]) // 2

    context = new_context(engine)
    handle = context.put(noise(20_000))
    context.flush()
    context.retire()
    monkeypatch.setattr(os, "preadv", preadv)
    context.prefetch()
    with pytest.raises(RuntimeError, match="could not be moved to or from disk"):
        context.get(handle)


def test_a_file_system_without_direct_access_does_as_well(tmp_path, monkeypatch):
    really = fcntl.fcntl

    def no_direct(fd, command, *value):
        if command == fcntl.F_SETFL and value[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(fd, command, *value)

    monkeypatch.setattr(fcntl, "fcntl", no_direct)
    file = SpillFile(str(tmp_path), MIB)
    assert not file.direct
    file.write(page(b"a"), file.take(SECTOR))
    monkeypatch.undo()
    found = disk_budget(Namespace(memo_nvme_path=str(tmp_path)), {})
    assert "directly" in found.access or "page cache" in found.access


# ---- the flags


def flags(path=None, budget=None):
    return Namespace(memo_nvme_path=path, memo_nvme_budget=budget)


def test_a_disks_budget_is_shared_by_the_ranks_of_a_node(tmp_path):
    assert disk_budget(flags(), {}) is None
    found = disk_budget(flags(str(tmp_path), "1MiB"), {"LOCAL_WORLD_SIZE": "4"})
    assert (found.bytes, found.folder) == (MIB // 4, str(tmp_path))
    assert disk_budget(flags(str(tmp_path)), {}).bytes > MIB


@pytest.mark.parametrize(
    ("path", "budget", "sentence"),
    [
        (None, "1GiB", "--memo-nvme-budget 1GiB: has no effect without --memo-nvme-path"),
        ("nowhere", None, "--memo-nvme-path .*nowhere: is no folder"),
        ("", "much", "--memo-nvme-budget much: must be a size"),
        ("", "9999999TiB", "--memo-nvme-budget 9999999TiB: .* left. Give less"),
    ],
)
def test_a_wrong_value_gets_one_sentence(tmp_path, path, budget, sentence):
    with pytest.raises(ValueError, match=sentence):
        disk_budget(flags(None if path is None else str(tmp_path / path), budget), {})


def test_a_folder_that_takes_no_files_is_said_to_take_none():
    with pytest.raises(ValueError, match=r"--memo-nvme-path /proc/self: takes no files \("):
        disk_budget(flags("/proc/self"), {})
