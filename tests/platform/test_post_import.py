"""The import hook: called once, after the module, whoever imports it."""

import importlib
import sys

import pytest

from megatron_memo.platform.post_import import when_imported


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "hooked_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "hooked_module"
    sys.modules.pop("hooked_module", None)


def test_callback_sees_the_finished_module_before_the_importer(package):
    when_imported(package, lambda module: setattr(module, "VALUE", module.VALUE + 1))
    assert importlib.import_module(package).VALUE == 2


def test_callback_runs_once(package):
    calls = []
    when_imported(package, calls.append)
    finders = len(sys.meta_path)
    module = importlib.import_module(package)
    importlib.import_module(package)
    assert calls == [module]
    assert len(sys.meta_path) == finders - 1


def test_module_that_is_there_already_is_handed_over_at_once(package):
    module = importlib.import_module(package)
    calls = []
    when_imported(package, calls.append)
    assert calls == [module]


def test_two_callbacks_for_one_module_both_run(package):
    calls = []
    when_imported(package, lambda module: calls.append("a"))
    when_imported(package, lambda module: calls.append("b"))
    importlib.import_module(package)
    assert sorted(calls) == ["a", "b"]
