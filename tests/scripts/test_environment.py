"""The environment: made once, reused while it is up to date, safe against being cut off."""

import os
import subprocess
import sys
import time

import pytest

from tests.scripts.shell import BASH, LIB, bash

# In place of an install: note the call, and make what a real one would leave.
FAKE_INSTALL = f"""
memo_find_python() {{ echo "{sys.executable}"; }}
memo_fill() {{
    echo installed >>"$1/calls"
    mkdir -p "$2/bin"
    ln -sf "{sys.executable}" "$2/bin/python"
}}
"""

# What decides an environment.
FILES = [
    "requirements.txt",
    "requirements-dev.txt",
    "requirements-docs.txt",
    "pyproject.toml",
]


@pytest.fixture
def repo(tmp_path):
    """A repo of these files, in a folder with a space in its name."""
    root = tmp_path / "my repo"
    root.mkdir()
    for name in FILES:
        (root / name).write_text(f"# {name}\n")
    return root


def _ensure(repo, before="", after="", **env):
    program = f'{FAKE_INSTALL}\n{before}\nmemo_ensure_env "$1"\n{after}'
    environment = {key: value for key, value in os.environ.items() if key != "MEMO_VENV"}
    return bash(program, repo, env={**environment, **env})


def _calls(repo):
    path = repo / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_it_is_made_in_the_repo_and_then_reused(repo):
    first = _ensure(repo, after='echo "python is $MEMO_VENV_PYTHON"')
    assert first.returncode == 0, first.stderr
    assert f"python is {repo}/.venv/bin/python" in first.stdout
    assert "is ready" in first.stdout
    second = _ensure(repo)
    assert "is up to date" in second.stdout
    assert _calls(repo) == 1


@pytest.mark.parametrize("name", FILES)
def test_it_is_updated_when_a_file_that_decides_it_changes(repo, name):
    _ensure(repo)
    (repo / name).write_text("something else\n")
    assert "is ready" in _ensure(repo).stdout
    assert "is up to date" in _ensure(repo).stdout
    assert _calls(repo) == 2


def test_it_is_made_anew_where_an_install_was_cut_off(repo):
    killed = _ensure(repo, before='memo_fill() { : >"$2/half"; kill -KILL $$; sleep 5; }')
    assert killed.returncode != 0
    assert (repo / ".venv" / "half").exists()
    again = _ensure(repo)
    assert "cut off; making the environment anew" in again.stdout
    assert "is ready" in again.stdout
    assert not (repo / ".venv" / "half").exists()


def test_a_failed_install_is_reported_and_tried_again_in_place(repo):
    failed = _ensure(repo, before='memo_fill() { : >"$2/kept"; return 7; }')
    assert failed.returncode == 1
    assert f"The environment {repo}/.venv could not be made" in failed.stderr
    again = _ensure(repo)
    assert "is ready" in again.stdout
    assert "cut off" not in again.stdout


def test_it_is_made_anew_for_another_python(repo):
    _ensure(repo)
    (repo / ".venv" / "old").write_text("")
    (repo / "pyproject.toml").write_text("changed\n")
    run = _ensure(repo, before="memo_same_python() { return 1; }")
    assert "another Python; making it anew" in run.stdout
    assert not (repo / ".venv" / "old").exists()


def test_an_environment_of_the_users_own_is_left_alone(repo):
    (repo / ".venv").mkdir()
    (repo / ".venv" / "mine").write_text("precious")
    run = _ensure(repo)
    assert run.returncode == 1
    assert "was not made by these scripts" in run.stderr
    assert "MEMO_VENV=" in run.stderr
    assert (repo / ".venv" / "mine").read_text() == "precious"
    elsewhere = repo.parent / "other" / "venv"
    assert _ensure(repo, MEMO_VENV=str(elsewhere)).returncode == 0
    assert (elsewhere / "bin" / "python").exists()


def test_a_moved_repo_does_not_trust_the_environment_it_brought(repo):
    _ensure(repo)
    moved = repo.rename(repo.parent / "moved")
    assert "is ready" in _ensure(moved).stdout
    assert _calls(moved) == 2


def test_two_runs_at_once_install_once(repo):
    slow = FAKE_INSTALL.replace("echo installed", "sleep 3; echo installed")
    program = f'set -euo pipefail; for f in progress python env; do source "{LIB}/$f.sh"; done\n'
    program += f'{slow}\nmemo_ensure_env "$1"'
    runs = [
        subprocess.Popen(
            [BASH, "-c", program, "test", str(repo)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert _calls(repo) == 1
    # On a busy machine the second may come when the first is done; it never installs as well.
    assert sum("waiting for it" in output for output in outputs) <= 1
    assert all("is ready" in output or "is up to date" in output for output in outputs)


def test_the_install_is_one_of_all_requirement_files_and_the_package(repo):
    """The real steps with pip replaced: what would be installed, and where."""
    program = f"""
    memo_find_python() {{ echo "{sys.executable}"; }}
    memo_pip() {{ printf '%s\\n' "$*" >>"{repo}/pip"; }}
    memo_ensure_env "$1"
    """
    environment = {key: value for key, value in os.environ.items() if key != "MEMO_VENV"}
    run = bash(program, repo, env=environment)
    assert run.returncode == 0, run.stderr
    first, second = (repo / "pip").read_text().splitlines()
    assert first.startswith(f"{repo}/.venv/bin/python install")
    for name in FILES[:-1]:
        assert f"-r {repo}/{name}" in first
    assert second.endswith(f"--no-deps --no-build-isolation -e {repo}")
    version = [str(repo / ".venv/bin/python"), "-c", "import sys; print(sys.version)"]
    assert subprocess.run(version, capture_output=True, text=True).stdout.strip() == sys.version


def test_a_long_step_shows_that_it_goes_on_and_a_failed_one_shows_why(tmp_path):
    log = tmp_path / "log"
    program = 'memo_watch "$1" working bash -c "echo half way; sleep 2.5; echo oh no; exit 3"'
    run = bash(program, log, env={**os.environ, "MEMO_WATCH_SECONDS": "1"})
    assert run.returncode == 3
    assert "working, 1s: half way" in run.stdout
    assert f"working failed with status 3; the end of {log}:" in run.stderr
    assert "   | oh no" in run.stderr


def test_a_step_ends_with_the_script_that_watches_it(tmp_path):
    log, pid_file = tmp_path / "log", tmp_path / "pid"
    program = f'source "{LIB}/progress.sh"; '
    program += 'memo_watch "$1" working bash -c "echo \\$\\$ >\\"$2\\"; sleep 60 & wait"'
    run = subprocess.Popen([BASH, "-c", program, "test", str(log), str(pid_file)])
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.05)
    run.terminate()
    assert run.wait(timeout=20) == 143
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _is_alive(pid):
        time.sleep(0.05)
    assert not _is_alive(pid)


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
