"""The platform of profiles: tensors without data, read and addressed as in a healthy run."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

START = "import torch\nfrom megatron_memo import platform\nplatform.activate_meta()\n"


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )


def test_cuda_means_meta_and_values_are_healthy():
    done = run(
        START + "x = torch.ones(3, device='cuda')\n"
        "assert x.is_meta and torch.cuda.current_device().type == 'meta'\n"
        "assert torch.ones(2).cuda().is_meta and not torch.ones(2).is_meta\n"
        "assert torch.nn.Linear(2, 2).cuda().weight.is_meta\n"
        "assert not torch.isnan(x).any() and bool(x.sum().isfinite()) is False\n"
        "assert x.sum().item() == 1.0 and x.tolist() == [1.0] * 3\n"
        "assert int(torch.ones((), dtype=torch.int64, device='cuda')) == 1\n"
        "assert torch.ones(2).tolist() == [1.0, 1.0] and torch.ones(()).item() == 1.0\n"
        "assert x.cpu().tolist() == [0.0] * 3\n"
        "assert torch.cuda.FloatTensor([0.0]).is_meta\n"
    )
    assert done.returncode == 0, done.stderr


def test_flags_that_stop_a_run_are_down_and_gradients_are_clipped():
    done = run(
        START + "one = torch.ones(1, device='cuda')\n"
        "def get_grad_norm_fp32(): return one.item()\n"
        "def _reduce_any(): return one.int().item()\n"
        "def _unscale_main_grads_and_check_for_nan(): return one.item()\n"
        "assert get_grad_norm_fp32() == 1e6\n"
        "assert _reduce_any() == 0 and _unscale_main_grads_and_check_for_nan() == 0.0\n"
    )
    assert done.returncode == 0, done.stderr


def test_every_storage_has_an_address_and_views_are_inside():
    done = run(
        START + "x, y = (torch.empty(1 << 40, device='cuda') for _ in range(2))\n"
        "assert x.data_ptr() != y.data_ptr() and x.untyped_storage().data_ptr() == x.data_ptr()\n"
        "assert x[3:].data_ptr() == x.data_ptr() + 12\n"
        "assert x.view(2, -1).data_ptr() == x.data_ptr()\n"
        "assert x.untyped_storage().nbytes() < abs(x.data_ptr() - y.data_ptr())\n"
        "assert torch.ones(2).data_ptr() % 4 == 0\n"
    )
    assert done.returncode == 0, done.stderr


def test_collectives_of_a_rank_among_many_use_their_callers_buffers():
    done = run(
        START + "import torch.distributed as dist\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "dist.init_process_group('fake', rank=3, world_size=8, store=FakeStore())\n"
        "small, big = torch.empty(2, device='cuda'), torch.empty(16, device='cuda')\n"
        "dist.all_reduce(small)\n"
        "dist.all_gather_into_tensor(big, small)\n"
        "dist.reduce_scatter_tensor(small, big)\n"
        "ops = [dist.P2POp(dist.isend, small, 2), dist.P2POp(dist.irecv, big, 4)]\n"
        "[work.wait() for work in dist.batch_isend_irecv(ops)]\n"
        "with dist._coalescing_manager(async_ops=True) as many:\n"
        "    dist.all_gather_into_tensor(big, small)\n"
        "    dist.all_gather_into_tensor(big, small)\n"
        "many.wait()\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_process_that_trains_on_its_cpu_cannot_profile():
    done = run(
        "from megatron_memo import platform\n"
        "platform.activate()\n"
        "try:\n"
        "    platform.activate_meta()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert "a profile needs a fresh one" in done.stdout


def test_a_profile_of_cuda_is_not_bound_by_the_cpus_kernels():
    done = run(
        "from megatron_memo import platform\n"
        "assert not platform.on_cpu()\n"
        "platform.activate_meta(plays_cuda=True)\n"
        "assert platform.is_active() and not platform.on_cpu()\n"
    )
    assert done.returncode == 0, done.stderr


def test_functions_and_compiler_are_replaced_as_told():
    done = run(
        "import torch\n"
        "from megatron_memo import platform\n"
        "from megatron_memo.ops.as_on_cuda import FUNCTIONS\n"
        "platform.activate_meta(instead=FUNCTIONS, compile_with=lambda f=None, **k: 'compiled')\n"
        "from torch.nn import functional as F\n"
        "x = torch.empty(4, 8, device='cuda', dtype=torch.bfloat16, requires_grad=True)\n"
        "saved = F.dropout(x, 0.5).grad_fn._saved_result1\n"
        "assert saved.dtype == torch.bool\n"
        "w = torch.empty(8, device='cuda', dtype=torch.bfloat16, requires_grad=True)\n"
        "y = F.rms_norm(x, (8,), w)\n"
        "y.sum().backward()\n"
        "assert y.shape == x.shape and w.grad.shape == w.shape and x.grad.shape == x.shape\n"
        "assert torch.compile(print) == 'compiled'\n"
    )
    assert done.returncode == 0, done.stderr
