"""Norms that sequence parallelism can use."""

from types import SimpleNamespace

import pytest
import torch

from megatron_memo.ops.norm import norm


def config(**other):
    defaults = dict(
        normalization="RMSNorm", sequence_parallel=True, layernorm_zero_centered_gamma=False
    )
    return SimpleNamespace(**(defaults | other))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_parameter_says_whether_its_gradient_is_partial(kind, sequence_parallel):
    built = norm(config(normalization=kind, sequence_parallel=sequence_parallel), 16, eps=1e-6)
    marks = [p.sequence_parallel for p in built.parameters()]
    assert marks == [sequence_parallel] * (2 if kind == "LayerNorm" else 1)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_it_is_torchs_norm_bit_for_bit(kind):
    built = norm(config(normalization=kind), 16, eps=1e-6)
    theirs = getattr(torch.nn, kind)(16, eps=1e-6)
    x = torch.randn(5, 1, 16)
    assert torch.equal(built(x), theirs(x))
    assert built.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize(
    ("other", "flag"),
    [
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
        ({"normalization": "L2Norm"}, "--normalization L2Norm"),
    ],
)
def test_what_it_does_not_have_is_refused_by_flag(other, flag):
    with pytest.raises(ValueError, match=flag):
        norm(config(**other), 16)
