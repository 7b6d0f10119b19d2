"""patches/README.md names every function that leans on upstream, and no other."""

import inspect
import re

import pytest

from megatron_memo import compat, compat_older, compat_versions
from tests.versions.conftest import ROOT

MODULES = {module.__name__.split(".")[1]: module for module in (compat, compat_versions)} | {
    "compat_older": compat_older
}
# What serves the others, or upstream not at all.
HELPERS = {"compat.install_import_hooks", "compat.share_name"}
TABLE = (ROOT / "patches/README.md").read_text().split("## Changes at run time")[1]


def public(name):
    return {
        f"{name}.{function}"
        for function, value in vars(MODULES[name]).items()
        if callable(value)
        and not function.startswith("_")
        and inspect.getmodule(value) is MODULES[name]
    }


@pytest.mark.parametrize("name", MODULES)
def test_every_seam_is_in_the_table_and_nothing_else(name):
    in_table = set(re.findall(rf"`({name}\.\w+)`", TABLE))
    assert public(name) - HELPERS == in_table


def test_every_row_says_which_versions_and_when_it_goes():
    rows = [line for line in TABLE.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for row in rows:
        _, what, upstream, versions, goes, _ = row.split("|")
        assert what.strip() and upstream.strip() and goes.strip()
        assert re.fullmatch(r"all|0\.1\d(, 0\.1\d|–0\.1\d)?", versions.strip()), row
