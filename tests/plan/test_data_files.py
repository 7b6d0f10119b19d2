"""Public data sets, where they lie next to the checkout: MEGATRON_MEMO_DSA_DATA names the folder.

The folder holds MiniMalloc's challenging files as `minimalloc/*.1048576.csv` (the number is the
capacity) and traces as `traces/*.csv`. `benchmarks/dsa.py` measures the same files.
"""

import os
from pathlib import Path

import pytest

from megatron_memo.plan import native
from megatron_memo.plan.minimalloc_csv import read_problem
from megatron_memo.plan.portfolio import Status, solve

FOLDER = Path(os.environ.get("MEGATRON_MEMO_DSA_DATA", "no such folder"))
pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="MEGATRON_MEMO_DSA_DATA names no folder"),
    pytest.mark.skipif(native.library() is None, reason="no compiler on this machine"),
]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("minimalloc/*.csv")), ids=lambda p: p.name)
def test_minimalloc_files_fit_their_capacity(path):
    capacity = int(path.name.split(".")[1])
    solution = solve(read_problem(path, capacity), use_cp_sat=False)
    assert solution.status is Status.SOLVED and solution.best.peak <= capacity
    if solution.bound == capacity:
        assert solution.gap == 0
    assert solution.cpu_seconds < 2


@pytest.mark.parametrize("path", sorted(FOLDER.glob("traces/*.csv")), ids=lambda p: p.name)
def test_traces_meet_their_bound(path):
    assert solve(read_problem(path), use_cp_sat=False).gap == 0
