"""What the requirement files and the project file promise."""

import re
import tomllib

import pytest

from tests.scripts.shell import ROOT

FILES = [
    "requirements.txt",
    "requirements-dev.txt",
    "requirements-docs.txt",
    "requirements-gpu.txt",
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _requirements(name):
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("name", FILES)
def test_every_requirement_is_a_range_with_a_reason_above_it(name):
    blocks = (ROOT / name).read_text().strip().split("\n\n")
    for block in blocks[1:]:
        lines = block.splitlines()
        assert lines[0].startswith("# "), block
        for line in lines:
            assert line.startswith("#") or re.fullmatch(
                r"[a-z0-9-]+(\[[a-z]+\])?>=[\d.]+(,<[\d.]+)?", line
            ), line


@pytest.mark.parametrize("name", FILES)
def test_the_package_index_is_never_asked_for_apex(name):
    assert not any(re.match(r"apex\b", line) for line in _requirements(name))


def test_the_project_reads_its_requirements_from_these_files():
    dynamic = PROJECT["tool"]["setuptools"]["dynamic"]
    assert dynamic["dependencies"] == {"file": ["requirements.txt"]}
    assert dynamic["optional-dependencies"] == {
        "dev": {"file": ["requirements-dev.txt", "requirements-docs.txt"]},
        "gpu": {"file": ["requirements-gpu.txt"]},
    }


def test_the_python_that_is_asked_for_is_the_one_that_the_scripts_look_for():
    assert PROJECT["project"]["requires-python"] == ">=3.12"
    assert (ROOT / ".python-version").read_text() == "3.12\n"
    assert "MEMO_PYTHON_MINOR=12\n" in (ROOT / "scripts/lib/python.sh").read_text()
