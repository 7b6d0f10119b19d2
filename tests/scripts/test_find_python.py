"""The search for a Python, on PATHs made for it."""

import shutil
import sys

import pytest

from tests.scripts.shell import bash


@pytest.fixture
def machine(tmp_path):
    """A machine with nothing but ``cat``: returns functions that add to it, and search it."""

    class Machine:
        def __init__(self):
            self.bin = tmp_path / "bin"
            self.bin.mkdir()
            (self.bin / "cat").symlink_to(shutil.which("cat"))
            self.env = {"PATH": str(self.bin), "HOME": str(tmp_path)}

        def add(self, name, body, folder=None):
            path = (folder or self.bin) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(0o755)
            return path

        def good(self, name, folder=None):
            """A Python of today, which says that it is the file at this path."""
            return self.add(name, f'cat >/dev/null; echo "ok {folder or self.bin}/{name}"', folder)

        def find(self, **extra):
            program = 'memo_find_python "$1"'
            return bash(program, tmp_path, env={**self.env, **extra})

    return Machine()


def test_a_python_of_this_version_passes_and_is_named_behind_its_link(tmp_path):
    link = tmp_path / "python3.12"
    link.symlink_to(sys.executable)
    run = bash('memo_python_verdict "$1"', link)
    assert run.stdout.startswith("ok /")


def test_python_3_12_is_preferred_to_newer_ones_and_to_python3(machine):
    machine.good("python3")
    machine.good("python3.13")
    expected = machine.good("python3.12")
    assert machine.find().stdout.strip() == str(expected)


def test_a_newer_python_is_taken_where_there_is_no_3_12(machine):
    machine.add("python3", "cat >/dev/null; echo old")
    expected = machine.good("python3.13")
    assert machine.find().stdout.strip() == str(expected)


def test_a_shim_that_refuses_does_not_hide_the_same_name_further_down_path(machine, tmp_path):
    machine.add("python3.12", "echo 'not installed' >&2; exit 127")
    later = tmp_path / "later"
    expected = machine.good("python3.12", later)
    path = f"{machine.env['PATH']}:{later}"
    assert machine.find(PATH=path).stdout.strip() == str(expected)


def test_what_pyenv_selects_comes_first(machine, tmp_path):
    machine.good("python3.12")
    chosen = machine.good("python", tmp_path / "versions")
    machine.add("pyenv", f'[ "$1 $2" = "which python" ] && echo {chosen}')
    assert machine.find().stdout.strip() == str(chosen)


def test_versions_that_pyenv_has_but_does_not_select_are_found(machine, tmp_path):
    machine.add("pyenv", "exit 1")
    machine.add("python3", "exit 127")
    folder = tmp_path / ".pyenv" / "versions" / "3.12.7" / "bin"
    expected = machine.good("python3", folder)
    assert machine.find().stdout.strip() == str(expected)


def test_a_path_with_a_space_is_kept_whole(machine, tmp_path):
    folder = tmp_path / "with space"
    expected = machine.good("python3.12", folder)
    path = f"{machine.env['PATH']}:{folder}"
    assert machine.find(PATH=path).stdout.strip() == str(expected)


def test_a_machine_without_a_python_is_told_how_to_get_one(machine):
    machine.add("python3", "cat >/dev/null; echo old")
    machine.add("python3.13", "cat >/dev/null; echo novenv")
    run = machine.find()
    assert run.returncode == 1
    assert run.stdout == ""
    assert "No Python 3.12 or newer" in run.stderr
    assert f"Too old: {machine.bin}/python3." in run.stderr
    assert f"Without the venv module: {machine.bin}/python3.13" in run.stderr
    assert "pyenv install 3.12" in run.stderr
    assert "MEMO_PYTHON=" in run.stderr


def test_a_python_named_by_the_user_is_taken(machine, tmp_path):
    machine.good("python3.12")
    mine = machine.good("mine", tmp_path / "elsewhere")
    assert machine.find(MEMO_PYTHON=str(mine)).stdout.strip() == str(mine)


def test_a_python_named_by_the_user_is_refused_rather_than_replaced(machine):
    machine.good("python3.12")
    run = machine.find(MEMO_PYTHON="/no/such/python")
    assert run.returncode == 1
    assert run.stdout == ""
    assert "MEMO_PYTHON=/no/such/python" in run.stderr
