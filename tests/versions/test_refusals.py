"""What an older or incomplete Megatron cannot do is refused by name, with the remedy."""

from argparse import Namespace
from importlib import metadata

import pytest

from megatron_memo import compat_versions
from megatron_memo.training.loss_head import head_of
from megatron_memo.training.older_checks import check_older


@pytest.fixture
def installed(monkeypatch):
    """installed(minor, patch): what the package says that it is."""

    def change(minor, patch):
        info = {"MAJOR": 0, "MINOR": minor, "VERSION": (0, minor, patch, "")}
        monkeypatch.setattr(compat_versions, "_package_info", lambda: info)

    return change


@pytest.fixture
def older(monkeypatch):
    """Upstream as before 0.19 and 0.18 to those who ask for features."""
    monkeypatch.setattr(compat_versions, "describes_models", lambda: False)
    monkeypatch.setattr(compat_versions, "takes_output_processor", lambda: False)


def test_a_version_below_the_oldest_is_refused_with_the_one_to_install(installed):
    installed(15, 3)
    with pytest.raises(
        ValueError, match=r"megatron-core 0\.15\.3: memo works with 0\.16 and newer"
    ):
        compat_versions.check_version(training=False)


def test_no_megatron_at_all_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(compat_versions, "_package_info", lambda: None)
    with pytest.raises(ValueError, match=r"megatron\.core: not found .*pip install -r"):
        compat_versions.check_version(training=False)


def test_the_version_is_the_packages_own():
    assert compat_versions.version() == metadata.version("megatron-core")


def test_a_newer_version_is_tried(installed):
    installed(20, 0)
    compat_versions.check_version(training=True)


def test_a_wheel_without_training_serves_the_layer_alone(installed, monkeypatch):
    installed(16, 1)
    monkeypatch.setattr(compat_versions, "_folder", lambda package: None)
    compat_versions.check_version(training=False)
    with pytest.raises(ValueError, match=r"comes without megatron\.training"):
        compat_versions.check_version(training=True)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"sft": True}, "--sft"),
        ({"yaml_cfg": "model.yaml"}, "--yaml-cfg"),
        ({"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized"),
    ],
)
def test_flags_that_need_the_script_of_an_older_version_are_refused_there_only(
    given, flag, monkeypatch
):
    check_older(Namespace(**given))
    monkeypatch.setattr(compat_versions, "describes_models", lambda: False)
    with pytest.raises(ValueError, match=f"{flag}: memo's launcher knows this from .* 0.19 on"):
        check_older(Namespace(**given))


def test_a_loss_head_in_chunks_needs_an_upstream_that_takes_one(older):
    args = Namespace(memo_swap_ratio="0.5", memo_loss_chunks=None)
    assert head_of(args, 1 << 30) is None
    args.memo_loss_chunks = "4"
    with pytest.raises(ValueError, match=r"--memo-loss-chunks 4: .* since core 0\.18"):
        head_of(args, 1 << 30)
