"""Patches go into a checkout, out of it, or leave it alone: on a stand-in for a checkout.

With MEGATRON_LM naming a real one (several, parted by colons), a copy of each is patched, trains
with memo, and is as it was when the patch is out again.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import TINY
from tests.scripts.shell import ROOT

SCRIPT = '''# Copyright

"""Pretrain and SFT GPT."""

# Capture the true program start time BEFORE any heavy imports.
import time

print("as before")
'''
CHECKOUTS = [Path(name) for name in os.environ.get("MEGATRON_LM", "").split(":") if name]


def patches(action, checkout):
    """Status and output of apply_patches.sh."""
    done = subprocess.run(
        [ROOT / "scripts/apply_patches.sh", action, checkout], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def version(checkout, minor):
    info = checkout / "megatron/core/package_info.py"
    info.parent.mkdir(parents=True, exist_ok=True)
    info.write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 1\n")


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "a checkout"
    version(folder, 19)
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    return folder


def test_patches_go_in_and_out_and_a_second_time_changes_nothing(checkout):
    script = checkout / "pretrain_gpt.py"
    assert patches("check", checkout) == (0, "pretrain_gpt-memo-flags.patch: fits, not in\n")
    assert patches("apply", checkout)[0] == 0
    patched = script.read_text()
    assert patched != SCRIPT and patched.replace(SCRIPT[:37], "").count("hand_over()") == 1
    for action in ("apply", "check"):
        assert patches(action, checkout) == (0, "pretrain_gpt-memo-flags.patch: is in\n")
    assert script.read_text() == patched
    assert patches("revert", checkout)[0] == 0
    assert script.read_text() == SCRIPT
    assert patches("revert", checkout) == (0, "pretrain_gpt-memo-flags.patch: is not in\n")


def test_a_checkout_inside_of_another_repository_is_patched_all_the_same(checkout):
    subprocess.run(["git", "init", "-q", checkout.parent], check=True)
    assert patches("apply", checkout)[0] == 0
    assert "hand_over" in (checkout / "pretrain_gpt.py").read_text()


def test_lines_that_moved_do_not_matter_and_changed_ones_stop_everything(checkout):
    script = checkout / "pretrain_gpt.py"
    script.write_text("# more\n" * 30 + SCRIPT)
    assert patches("check", checkout)[0] == 0
    script.write_text(SCRIPT.replace("SFT", "finetune"))
    status, said = patches("apply", checkout)
    assert status == 1
    assert "does not fit this checkout (core 0.19)" in said and "nothing was changed" in said
    assert "hand_over" not in script.read_text()


def test_the_oldest_version_takes_them_and_an_older_one_is_refused(checkout):
    version(checkout, 16)
    assert patches("check", checkout)[0] == 0
    version(checkout, 15)
    status, said = patches("apply", checkout)
    assert status == 1
    assert "is Megatron core 0.15, and memo works with 0.16 and newer. Take branch" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("apply", "/none"), "there is no such folder"),
        (("apply", "/"), "is no Megatron-LM checkout"),
        (("put", "/"), "give check, apply or revert"),
    ],
)
def test_a_wrong_call_is_a_sentence_and_status_2(words, sentence):
    status, said = patches(*words)
    assert status == 2
    assert sentence in said and said.count("\n") == 1


def test_only_memos_flags_are_handed_over(checkout, tmp_path):
    patches("apply", checkout)
    stand_in = tmp_path / "megatron_memo/training/hand_over.py"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text("def hand_over():\n    raise SystemExit('handed over')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for flag, said in (("--memo-swap-ratio=0.5", "handed over"), ("--lr", "as before")):
        run = subprocess.run(
            ["python3", checkout / "pretrain_gpt.py", flag], env=env, capture_output=True, text=True
        )
        assert (run.stdout + run.stderr).strip() == said


def copy_of(checkout, folder):
    """The parts of a checkout that a run needs, with a dataset helper that needs no compiler."""
    shutil.copytree(checkout / "megatron", folder / "megatron")
    for script in checkout.glob("*.py"):
        shutil.copy(script, folder)
    datasets = folder / "megatron/core/datasets"
    (datasets / "Makefile").unlink()
    helper = Path(importlib.util.find_spec("megatron.core.datasets.helpers_cpp").origin)
    shutil.copy(helper, datasets)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "as it was"]):
        subprocess.run([*git, *words], cwd=folder, check=True)


@pytest.mark.skipif(not CHECKOUTS, reason="MEGATRON_LM names no checkout")
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_a_real_checkout_takes_memos_flags_and_is_as_it_was_afterwards(checkout, tmp_path):
    copy_of(checkout, tmp_path)
    assert patches("apply", tmp_path)[0] == 0
    words = ["-m", "torch.distributed.run", "--standalone", tmp_path / "pretrain_gpt.py"]
    words += [*TINY["llama"], "--train-iters", "2"]
    words += ["--memo-swap-ratio", "0.5", "--memo-resident-layers", "0"]
    run = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    assert "memo's launcher runs this checkout's pretrain" in run.stdout
    assert "megatron_memo: swapped" in run.stdout and "iteration        2/" in run.stdout
    assert patches("revert", tmp_path)[0] == 0
    left = subprocess.run(["git", "status", "--short"], cwd=tmp_path, capture_output=True)
    assert left.stdout == b""
