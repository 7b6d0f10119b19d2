"""Patches go into a checkout, out of it, or leave it alone: on a stand-in for a checkout.

With MEGATRON_LM naming a real one, a copy of its files is patched as well.
"""

import os
import shutil
import subprocess

import pytest

from tests.scripts.shell import ROOT

SCRIPT = '''# Copyright

"""Pretrain and SFT GPT."""

# Capture the true program start time BEFORE any heavy imports.
import time

print("as before")
'''
FILES = ("pretrain_gpt.py", "megatron/core/package_info.py")


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


def test_an_older_version_is_refused_with_the_one_to_take(checkout):
    version(checkout, 18)
    status, said = patches("apply", checkout)
    assert status == 1
    assert "is Megatron core 0.18, and memo's launcher needs 0.19" in said


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


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout")
def test_they_go_into_a_real_checkout(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.join(os.environ["MEGATRON_LM"], name), tmp_path / name)
    before = (tmp_path / "pretrain_gpt.py").read_text()
    assert patches("apply", tmp_path)[0] == 0
    assert (tmp_path / "pretrain_gpt.py").read_text() != before
    assert patches("revert", tmp_path)[0] == 0
    assert (tmp_path / "pretrain_gpt.py").read_text() == before
