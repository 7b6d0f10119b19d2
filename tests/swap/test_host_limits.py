"""What limits host memory, read from made-up trees of control groups, and from this machine."""

import os
from pathlib import Path

import pytest

from megatron_memo.swap.host_limits import local_ranks, tightest

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000


@pytest.fixture
def tree(tmp_path):
    """tree(path=content, ...): writes files; `/proc/meminfo` leaves 100 GiB unless it is given."""

    def write(files: dict[str, object]) -> Path:
        meminfo = f"MemTotal: 999999999 kB\nMemAvailable: {100 * GIB // 1024} kB\n"
        for name, content in {"proc/meminfo": meminfo, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n" if isinstance(content, int) else str(content))
        return tmp_path

    return write


def test_without_a_limit_it_is_what_the_machine_has_left(tree):
    found = tightest(tree({}), {})
    assert found.free == 100 * GIB
    assert "MemAvailable" in found.origin


def test_max_is_no_limit(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/job/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.high": "max\n",
        }
    )
    assert "MemAvailable" in tightest(root, {}).origin


def test_the_tightest_of_nested_groups_counts_and_is_named(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/slice/job/step\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/slice/memory.max": 64 * GIB,
            "sys/fs/cgroup/slice/memory.current": 0,
            "sys/fs/cgroup/slice/job/memory.max": 32 * GIB,
            "sys/fs/cgroup/slice/job/memory.current": 2 * GIB,
            "sys/fs/cgroup/slice/job/step/memory.max": "max\n",
        }
    )
    found = tightest(root, {})
    assert found.free == 30 * GIB
    assert "limit of 32 GiB in /sys/fs/cgroup/slice/job/memory.max" in found.origin


def test_page_cache_of_a_group_can_be_had_and_other_memory_cannot(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": 40 * GIB,
            "sys/fs/cgroup/memory.current": 35 * GIB,
            "sys/fs/cgroup/memory.stat": (
                f"anon {5 * GIB}\nfile {30 * GIB}\nshmem {2 * GIB}\n"
                f"inactive_file {20 * GIB}\nactive_file {8 * GIB}\n"
            ),
        }
    )
    assert tightest(root, {}).free == 33 * GIB


def test_a_high_watermark_is_a_limit_as_well(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": 40 * GIB,
            "sys/fs/cgroup/memory.high": 20 * GIB,
        }
    )
    assert tightest(root, {}).origin.endswith("/sys/fs/cgroup/memory.high")


def test_a_group_that_is_full_leaves_nothing(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.current": GIB + 4096,
        }
    )
    assert tightest(root, {}).free == 0


def test_version_1_nested_with_its_number_for_none(tree):
    root = tree(
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/job/step\n0::/unified\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 48 * GIB,
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 20 * GIB,
            "sys/fs/cgroup/memory/job/memory.stat": (
                f"inactive_file 1\ntotal_inactive_file {6 * GIB}\ntotal_active_file {4 * GIB}\n"
            ),
            "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": UNLIMITED_V1,
        }
    )
    found = tightest(root, {})
    assert found.free == 38 * GIB
    assert found.origin.endswith("/sys/fs/cgroup/memory/job/memory.limit_in_bytes")


def test_a_container_that_sees_only_its_own_part_of_the_tree(tree):
    """The process's group is named from the host's top, and mounted as the top."""
    mount = "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    for own in ("0::/docker/abc\n", "0::/docker/abc/inner\n", "0::/\n", "0::/../elsewhere\n"):
        root = tree(
            {
                "proc/self/cgroup": own,
                "proc/self/mountinfo": mount,
                "sys/fs/cgroup/memory.max": 12 * GIB,
                "sys/fs/cgroup/inner/memory.max": 13 * GIB,
            }
        )
        assert tightest(root, {}).free == 12 * GIB, own


@pytest.mark.parametrize(
    ("env", "gib"),
    [
        ({"SLURM_MEM_PER_NODE": "16384"}, 16),
        ({"SLURM_MEM_PER_NODE": "16G"}, 16),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "6"}, 12),
        ({"SLURM_MEM_PER_GPU": "4096", "SLURM_GPUS_ON_NODE": "8"}, 32),
        ({"SLURM_MEM_PER_NODE": "0"}, 100),  # all that the node has
        ({"SLURM_MEM_PER_CPU": "2048"}, 100),  # of how many?
    ],
)
def test_what_slurm_gave_to_the_job(tree, env, gib):
    assert tightest(tree({}), env).free == gib * GIB


def test_what_the_jobs_ranks_hold_already_counts_against_slurms_limit(tree):
    root = tree({"proc/self/statm": f"999999 {GIB // os.sysconf('SC_PAGE_SIZE')} 5 5 0 5 0\n"})
    env = {"SLURM_MEM_PER_NODE": "16384", "LOCAL_WORLD_SIZE": "4"}
    assert tightest(root, env).free == 12 * GIB


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, 4),
    ],
)
def test_ranks_that_share_a_node(env, ranks):
    assert local_ranks(env) == ranks


def test_this_machines_own_files_can_be_read():
    found = tightest()
    assert 0 <= found.free < 1 << 50
    assert found.origin
