"""The table of GPUs and how it is asked."""

import pytest

from megatron_memo.estimate.flags import host_left_free
from megatron_memo.estimate.hardware import GPUS, TIB, Machine, gpu


@pytest.mark.parametrize("name", ["a800-80g", "A800-80GB", " a800_80gib", "a800"])
def test_a_gpu_is_found_however_it_is_written(name):
    assert gpu(name) is GPUS["a800-80g"]


def test_an_unknown_gpu_is_refused_with_the_nearest_ones():
    with pytest.raises(ValueError, match=r"--gpu a810-80g: .*Nearest: .*a800-80g"):
        gpu("a810-80g")
    with pytest.raises(ValueError, match="All: a100-40g"):
        gpu("tpu")


def test_gpus_that_share_a_link_get_their_share_of_it():
    assert GPUS["a800-80g"].host_bandwidth == pytest.approx(12.6e9)
    assert GPUS["h100-80g"].host_bandwidth == pytest.approx(50.4e9)


def test_every_entry_is_achievable_and_has_a_source():
    for one in GPUS.values():
        assert one.host_link <= one.host_link_spec
        assert one.source


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"gpus": 0}, "--gpus-per-node 0"),
        ({"host_memory": -1}, "--host-memory -1"),
        ({"disk": -5}, "--memo-nvme-budget -5"),
        ({"network": 0}, "network 0"),
    ],
)
def test_machines_that_cannot_be_are_refused(wrong, part):
    with pytest.raises(ValueError, match=part):
        Machine(gpu("h100"), **wrong)


def test_a_node_s_memory_is_shared_by_its_gpus():
    assert Machine(gpu("a800"), gpus=8, host_memory=8 << 30).host_memory_of_gpu == 1 << 30


def test_a_run_leaves_a_twentieth_of_host_memory_or_what_its_budget_does_not_take():
    assert host_left_free([], 2 * TIB) == 2 * TIB // 20
    assert host_left_free(["--memo-host-budget", "auto"], 2 * TIB) == 2 * TIB // 20
    assert host_left_free(["--memo-host-budget=1.5TiB"], 2 * TIB) == TIB // 2
    node = Machine(gpu("a800"), gpus=8, host_memory=2 * TIB, host_free=TIB // 2)
    assert node.host_memory_of_gpu == 3 * TIB // 16


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("much", "--memo-host-budget much: must be a size"),
        ("3TiB", "--memo-host-budget 3TiB: is more than --host-memory 2 TiB"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        host_left_free(["--memo-host-budget", given], 2 * TIB)
