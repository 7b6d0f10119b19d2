"""Environments with other versions of megatron-core, in a folder that git does not see."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path):
    """A module of the scripts, which are no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


version_env = load(ROOT / "scripts/lib/version_env.py")


@pytest.fixture(scope="session")
def python():
    """python(version) -> the interpreter of its environment; skips where none can be made."""

    def path(version):
        try:
            return version_env.make(version, ROOT / ".venv-versions" / version)
        except version_env.NoRegistry as error:
            pytest.skip(f"needs a package registry: {error}")

    return path


@pytest.fixture(scope="session")
def run(python):
    """run(version, *words) -> a finished process of that version's Python, the repo importable."""

    path = os.pathsep.join((str(ROOT), str(ROOT / "tests/layer")))

    def start(version, *words, **variables):
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
        return subprocess.run(
            [python(version), *map(str, words)], env=env, capture_output=True, text=True, cwd="/"
        )

    return start


@pytest.fixture(scope="session")
def last_line():
    """last_line(process) -> its last line, which is JSON; the process must have succeeded."""

    def value(done):
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return value
