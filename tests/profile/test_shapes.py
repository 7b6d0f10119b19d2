"""Remembered results are those that torch works out, and aliases are never remembered."""

import pytest
import torch

from megatron_memo.profile.shapes import ShapeCache

aten = torch.ops.aten


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def likes(out):
    tensors = [out] if isinstance(out, torch.Tensor) else out
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in tensors]


CALLS = {
    "product": (aten.mm.default, (on_meta(4, 8), on_meta(8, 2))),
    "sum of two types": (aten.add.Tensor, (on_meta(4, 1), on_meta(3, dtype=torch.bfloat16))),
    "number": (aten.mul.Tensor, (on_meta(4, dtype=torch.int64), 2.5)),
    "integer of the same value": (aten.mul.Tensor, (on_meta(4, dtype=torch.int64), 2)),
    "transposed": (aten.clone.default, (on_meta(4, 8).t(),)),
    "several results": (
        aten.native_layer_norm.default,
        (on_meta(4, 8), [8], on_meta(8), on_meta(8), 1e-5),
    ),
    "list": (aten.cat.default, ([on_meta(2, 3), on_meta(4, 3)],)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_remembered_result_is_like_the_first(name):
    cache, (func, args) = ShapeCache(), CALLS[name]
    for _ in range(3):
        assert likes(cache.call(func, args, {})) == likes(func(*args))


def test_numbers_of_other_types_are_other_calls():
    cache, x = ShapeCache(), on_meta(4, dtype=torch.int64)
    assert cache.call(aten.mul.Tensor, (x, 2), {}).dtype == torch.int64
    assert cache.call(aten.mul.Tensor, (x, 2.0), {}).dtype == torch.float32
    assert cache.call(aten.mul.Tensor, (x, 2), {}).dtype == torch.int64


@pytest.mark.parametrize("func", [aten.view.default, aten._unsafe_view.default])
def test_a_view_stays_a_view(func):
    cache, x = ShapeCache(), on_meta(4, 8)
    for _ in range(2):
        out = cache.call(func, (x, [32]), {})
        assert out.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_a_change_in_place_returns_its_argument():
    cache, x = ShapeCache(), on_meta(4, 8)
    assert cache.call(aten.add_.Tensor, (x, 1), {}) is x


def test_what_resizes_is_done():
    cache, x = ShapeCache(), on_meta(4)
    cache.call(aten.resize_.default, (x, [9]), {})
    assert x.shape == (9,) and x.untyped_storage().nbytes() == 36


def test_tensors_with_data_are_computed():
    cache, x = ShapeCache(), torch.ones(3)
    for _ in range(2):
        assert cache.call(aten.add.Tensor, (x, 1), {}).tolist() == [2, 2, 2]
    assert cache.call(aten.add_.Tensor, (x, 1), {}).tolist() == [2, 2, 2]
