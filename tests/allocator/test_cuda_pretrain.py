"""Megatron's pretrain with memo layers and a memory plan as it runs on a GPU: CUDA streams, CUDA's
allocator, autograd's device thread; on the stubbed driver, so no number means anything."""

import json
import socket

import pytest

from megatron_memo import platform
from tests.launch.conftest import LAUNCHER, PLAIN_KERNELS, TINY
from tests.stub_cuda.stubbed import stubbed_python

pytestmark = pytest.mark.skipif(not platform.is_active(), reason="there is a GPU to run it on")

STEPS = 7
FLAGS = [
    *("--train-iters", str(STEPS), "--hidden-dropout", "0", "--no-check-for-nan-in-loss-and-grad"),
    *("--num-layers", "4", "--memo-swap-ratio", "0.5", "--memo-resident-layers", "0"),
    *("--memo-chunks", "4", "--memo-poison", "--memo-plan", "auto"),
    "--fake-process-group",  # gloo lacks a collective for CUDA tensors that Megatron uses
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "report.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    one_rank = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    variables = {
        **one_rank,
        **dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # a compiler for kernels would look for the real driver
    }
    words = [LAUNCHER, *TINY["llama"], *PLAIN_KERNELS, *FLAGS, "--memo-report", str(file)]
    done = stubbed_python(words, variables)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return json.loads(file.read_text())


def test_activations_are_swapped_by_the_cuda_backend(report):
    assert report["device"] == "stubbed GPU"
    assert report["swap"]["d2h_bytes"] > 0 and report["swap"]["h2d_bytes"] > 0


def test_every_request_of_a_step_is_served_by_the_plan(report):
    planned = [step for step in report["plan"]["steps"] if step["requests"]]
    assert len(planned) >= 2 and planned[-1]["iteration"] == STEPS
    for step in planned:
        assert step["hits"] == step["requests"] - step["native_entries"] > 100
        assert step["native_mallocs"] == step["native_entries"]
        assert step["arena_peak"] <= step["arena_size"] == report["plan"]["arena_bytes"]
        assert step["unknown_frees"] == 0
