"""What the CPU platform answers, and that behind it real things happen."""

import threading
import types

import pytest
import torch

from megatron_memo import platform

pytestmark = pytest.mark.skipif(not platform.is_active(), reason="runs on the CPU platform")


def in_module(name: str, expression: str, **values):
    """Evaluate ``expression`` as code of the module ``name``."""
    module = types.ModuleType(name)
    module.__dict__.update(torch=torch, **values)
    exec(f"def ask():\n    return {expression}", module.__dict__)
    return module.ask()


# ---- who is told what


@pytest.mark.parametrize("name", ["megatron.core.some", "megatron.training.training"])
def test_megatron_is_told_that_there_is_a_device(name):
    assert in_module(name, "torch.cuda.is_available()") is True
    assert in_module(name, "torch.cuda.device_count()") >= 1


@pytest.mark.parametrize("name", ["__main__", "megatron_memo.swap.engine", "transformers.utils"])
def test_everyone_else_is_told_the_truth(name):
    assert in_module(name, "torch.cuda.is_available()") is False
    assert in_module(name, "torch.cuda.device_count()") == 0
    assert torch.accelerator.is_available() is False


def test_type_names_are_cudas_for_megatron_only():
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert in_module("megatron.core.optimizer", "x.type()", x=x) == "torch.cuda.BFloat16Tensor"
    assert x.type() == "torch.BFloat16Tensor"


def test_type_conversion_by_cuda_names_works():
    assert torch.zeros(2).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.zeros(2).type(torch.int64).dtype == torch.int64


# ---- devices


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_tensors_for_a_cuda_device_are_made_on_the_cpu(device):
    assert torch.zeros(3, device=device).device.type == "cpu"
    assert torch.rand(3, device=device, dtype=torch.float64).device.type == "cpu"
    assert torch.empty_like(torch.zeros(2), device=device).device.type == "cpu"


def test_cuda_devices_are_the_cpu_however_they_are_made():
    index = torch.cuda.current_device()
    for device in (
        torch.device("cuda"),
        torch.device("cuda", 1),
        torch.device(f"cuda:{index}"),
        torch.device(0),
    ):
        assert torch.zeros(3, device=device).device.type == "cpu"
    assert torch.device("meta").type == "meta"


def test_moving_to_cuda_keeps_the_tensor():
    x = torch.arange(3)
    assert x.to("cuda") is x
    assert x.cuda(non_blocking=True) is x
    assert x.to(torch.device("cuda"), torch.float32).dtype == torch.float32
    assert torch.nn.Linear(2, 2).cuda(torch.cuda.current_device()).weight.device.type == "cpu"


def test_other_devices_stay_what_they_are():
    assert torch.zeros(3, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.zeros(3).device.type == "meta"


def test_strings_that_are_no_device_pass_through():
    assert torch.einsum("ij,jk->ik", torch.eye(2), torch.eye(2)).equal(torch.eye(2))


def test_pinned_memory_is_not_asked_for():
    assert torch.empty(4, pin_memory=True).is_pinned() is False


def test_typed_constructors_make_cpu_tensors():
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
    assert isinstance(torch.zeros(1), torch.cuda.FloatTensor)
    assert not isinstance(torch.zeros(1), torch.cuda.HalfTensor)


def test_backward_sees_the_platform_as_forward_does():
    class MakesCudaGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad + torch.ones(grad.shape, device="cuda")

    x = torch.ones(2, requires_grad=True)
    MakesCudaGradient.apply(x).sum().backward()
    torch.autograd.backward(MakesCudaGradient.apply(x).sum())
    assert x.grad.tolist() == [4.0, 4.0]
    assert torch.autograd.grad(MakesCudaGradient.apply(x).sum(), x)[0].tolist() == [2.0, 2.0]


# ---- random streams


def test_tracker_forks_and_restores_real_streams():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("model", 123)
    torch.manual_seed(7)
    outer = torch.rand(4), torch.rand(4)

    torch.manual_seed(7)
    first = torch.rand(4)
    with tracker.fork("model"):
        inner = torch.rand(4)
    second = torch.rand(4)
    assert torch.equal(first, outer[0])
    assert torch.equal(second, outer[1])  # the fork took nothing from the outer stream

    with tracker.fork("model"):
        later = torch.rand(4)
    both = torch.rand(8, generator=torch.Generator().manual_seed(123))
    assert torch.equal(torch.cat([inner, later]), both)  # and its own stream went on


def test_state_that_was_saved_repeats_the_draws():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(64), 0.5)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64), 0.5), first)


def test_data_loaders_take_nothing_from_the_devices_stream():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    list(torch.utils.data.DataLoader(range(4), shuffle=True))
    assert torch.equal(torch.rand(3), expected)


# ---- streams and events


def test_streams_and_events_are_harmless_and_times_are_real():
    side = torch.cuda.Stream(priority=-1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(side):
        torch.ones(3).record_stream(side)
        threading.Event().wait(0.02)
    side.wait_stream(torch.cuda.current_stream())
    end.record(side)
    side.wait_event(end)
    end.synchronize()
    assert end.query() and side.query()
    assert 15 < start.elapsed_time(end) < 10_000


def test_elapsed_time_of_an_event_that_never_happened_is_refused():
    with pytest.raises(RuntimeError, match="recorded"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())


# ---- the rest


def test_compile_gives_the_function_back():
    def double(x):
        return x * 2

    assert torch.compile(double) is double
    assert torch.compile(mode="max-autotune")(double) is double


def test_memory_statistics_answer_zero():
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0


def test_device_properties_are_the_machines():
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory > 1 << 28
    assert properties.major == torch.cuda.get_device_capability()[0]


def test_dataset_helper_of_the_wheel_is_not_built_again():
    from megatron.core.datasets import utils

    utils.compile_helpers()  # upstream's would end the process: the wheel has no Makefile
