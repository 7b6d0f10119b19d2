"""Where a GPU is, and memory that comes from there."""

import mmap

import pytest
import torch

from megatron_memo.swap.host import HostBlock
from megatron_memo.swap.numa import node_of, prefer


@pytest.mark.parametrize(("text", "node"), [("3\n", 3), ("0\n", 0), ("-1\n", None), ("", None)])
def test_the_node_of_a_gpu_is_what_its_pci_slot_says(tmp_path, text, node):
    slot = tmp_path / "sys/bus/pci/devices/0001:8a:00.0"
    slot.mkdir(parents=True)
    (slot / "numa_node").write_text(text)
    assert node_of(1, 0x8A, 0, root=tmp_path) == node


def test_a_gpu_that_the_kernel_does_not_know_has_no_node(tmp_path):
    assert node_of(0, 1, 0, root=tmp_path) is None


def policy_of(address):
    """The kernel's word on a mapping's policy."""
    with open("/proc/self/numa_maps") as file:
        for line in file:
            words = line.split()
            if int(words[0], 16) == address:
                return words[1]
    return None


def test_a_mapping_prefers_the_node_that_it_was_told():
    block = HostBlock(64 * mmap.PAGESIZE)
    refused = prefer(block.tensor.data_ptr(), block.nbytes, 0)
    if refused is not None:
        pytest.skip(f"this machine forbids it: {refused}")
    try:
        policy = policy_of(block.tensor.data_ptr())
    except FileNotFoundError:
        pytest.skip("this kernel has no NUMA")
    assert policy == "prefer:0"
    block.array[:] = 7
    assert torch.all(block.tensor == 7)


def test_a_node_that_there_is_not_is_answered_in_words():
    block = HostBlock(mmap.PAGESIZE)
    assert prefer(block.tensor.data_ptr(), block.nbytes, 999)
