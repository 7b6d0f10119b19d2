"""When the CPU platform may be switched on, seen in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **env},
    )


def test_second_call_changes_nothing_and_says_nothing():
    done = run(
        "import torch\n"
        "from megatron_memo import platform\n"
        "assert not platform.is_active()\n"
        "platform.activate()\n"
        "first = (torch.cuda.Stream, torch.Tensor.type, torch.compile, torch.Tensor.cuda)\n"
        "depth = len(torch.overrides._get_current_function_mode_stack())\n"
        "platform.activate()\n"
        "assert platform.is_active()\n"
        "assert first == (torch.cuda.Stream, torch.Tensor.type, torch.compile, torch.Tensor.cuda)\n"
        "assert len(torch.overrides._get_current_function_mode_stack()) == depth == 1\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no CUDA on this machine") == 1


def test_other_ranks_say_nothing():
    done = run("from megatron_memo import platform\nplatform.activate()\n", RANK="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_refused_where_cuda_works():
    done = run(
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.device_count = lambda: 1\n"
        "stream = torch.cuda.Stream\n"
        "from megatron_memo import platform\n"
        "try:\n"
        "    platform.activate()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "assert not platform.is_active()\n"
        "assert torch.cuda.Stream is stream\n"
    )
    assert done.returncode == 0, done.stderr
    assert "on a machine where CUDA works (1 device(s))" in done.stdout
    assert "CUDA_VISIBLE_DEVICES=" in done.stdout


def test_refused_after_megatron_was_imported():
    done = run(
        "import sys, types\n"
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from megatron_memo import platform\n"
        "try:\n"
        "    platform.activate()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "megatron is already imported (megatron.core, 1 module(s))" in done.stdout
    assert "python -m megatron_memo.platform SCRIPT" in done.stdout


def test_runner_runs_a_script_with_its_arguments_and_its_own_folder(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\n"
        "from megatron_memo import platform\n"
        "print(__name__, sys.argv[1:], beside.NAME, platform.is_active())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "megatron_memo.platform", str(script), "--flag", "7"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "__main__ ['--flag', '7'] beside True" in done.stdout


def test_runner_names_a_script_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_memo.platform", "/nowhere/script.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert "/nowhere/script.py: no such file" in done.stderr
    assert "Traceback" not in done.stderr
