"""When memo's norm and attention stand in for upstream's local ones."""

import argparse
import sys

import pytest

from megatron_memo.config import MemoConfig
from megatron_memo.training import command_line, modules

MEMO = MemoConfig(swap_ratio=0.5)


@pytest.fixture(autouse=True)
def no_apex(monkeypatch):
    monkeypatch.setattr(modules, "_have_apex_norm", lambda: False)


def args(**changes):
    plain = dict(
        memo_modules="auto",
        transformer_impl="local",
        normalization="LayerNorm",
        sequence_parallel=False,
        tensor_model_parallel_size=1,
        no_persist_layer_norm=True,
    )
    return argparse.Namespace(**plain | changes)


SPLIT = {"sequence_parallel": True, "tensor_model_parallel_size": 2}


def test_without_memo_flags_upstreams_modules_stay():
    assert modules.choose(args(), None) == modules.ModuleChoice(False)


def test_a_ratio_always_uses_ours():
    assert modules.choose(args(), MEMO).replace
    assert modules.choose(args(transformer_impl="transformer_engine"), MEMO).replace


def test_sequence_parallelism_that_upstreams_norm_refuses_uses_ours_and_says_why():
    choice = modules.choose(args(**SPLIT), None)
    assert choice.replace
    assert "refuses --sequence-parallel" in choice.why


def test_one_rank_is_never_sequence_parallel():
    assert not modules.choose(args(sequence_parallel=True), None).replace


def test_persistent_norm_that_upstreams_norm_refuses_uses_ours_and_says_why():
    choice = modules.choose(args(no_persist_layer_norm=False), None)
    assert choice.replace
    assert "--no-persist-layer-norm" in choice.why


def test_transformer_engines_modules_stay():
    assert not modules.choose(args(transformer_impl="transformer_engine", **SPLIT), None).replace


def test_apexs_layer_norm_stays_and_its_missing_rms_norm_does_not(monkeypatch):
    monkeypatch.setattr(modules, "_have_apex_norm", lambda: True)
    assert not modules.choose(args(**SPLIT), None).replace
    assert modules.choose(args(normalization="RMSNorm", **SPLIT), None).replace


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"sft": True}, "--sft"),
        ({"dataloader_inter_document_masking": True}, "--dataloader-inter-document-masking"),
    ],
)
def test_sequences_that_upstreams_attention_refuses_use_ours_and_say_why(
    monkeypatch, changes, flag
):
    monkeypatch.setattr(modules, "_have_apex_norm", lambda: True)  # a reason of its own
    choice = modules.choose(args(**changes), None)
    assert choice.replace
    assert flag in choice.why


def test_a_spec_of_the_users_stays():
    assert not modules.choose(args(spec=["some.module", "spec"], **SPLIT), None).replace


def test_upstream_is_never_replaced_when_asked_not_to():
    assert not modules.choose(args(memo_modules="upstream", **SPLIT), None).replace


def test_memo_modules_are_used_when_asked_for():
    choice = modules.choose(args(memo_modules="memo"), None)
    assert choice.replace
    assert "--memo-modules memo" in choice.why


def test_upstreams_local_attention_with_a_ratio_is_refused():
    with pytest.raises(ValueError, match=r"--memo-modules upstream: with --memo-swap-ratio 0\.5"):
        modules.choose(args(memo_modules="upstream"), MEMO)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("given", [[], ["--cp-comm-type", "p2p"], ["--cp-comm-type=p2p"]])
def test_megatrons_default_way_to_share_contexts_is_ours_unless_it_was_asked_for(
    monkeypatch, impl, given
):
    monkeypatch.setattr(sys, "argv", ["script", *given])
    flags = args(transformer_impl=impl, context_parallel_size=2, cp_comm_type=["p2p"])
    command_line._share_contexts_our_way(flags)
    ours = impl == "local" and not given
    assert flags.cp_comm_type == (["a2a"] if ours else ["p2p"])
    assert sys.argv == ["script", *(["--cp-comm-type", "a2a"] if ours else given)]
