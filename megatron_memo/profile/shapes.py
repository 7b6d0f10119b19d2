"""Results of operators on tensors without data, remembered by the shapes of their arguments.

Layers ask for the same few hundred shapes again and again, and torch works each out in Python.

NOTE: what may be remembered
----------------------------
* An operator whose schema says that it neither changes nor returns its arguments gives fresh
  tensors, which depend on the shapes, strides and types of its arguments and on its other arguments
  only. Results in a storage of another size than their own, or in an argument's in spite of the
  schema (`_unsafe_view`), are not remembered.
* An operator that fills or changes one argument in place does nothing to a tensor without data.
  Those that may resize it are not among `_IN_PLACE`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

_IN_PLACE_NAMES = """
    add_ addcdiv_ addcmul_ bernoulli_ bitwise_and_ bitwise_or_ clamp_ clamp_max_ clamp_min_ copy_
    div_ exp_ fill_ index_put_ lerp_ log_ masked_fill_ mul_ neg_ normal_ pow_ random_ reciprocal_
    rsqrt_ sqrt_ sub_ uniform_ zero_
"""
_IN_PLACE = frozenset(_IN_PLACE_NAMES.split())


class ShapeCache:
    """Calls operators on meta tensors; see the NOTE above."""

    def __init__(self) -> None:
        # key -> (a single tensor was returned, size, stride and type of each)
        self._known: dict[Any, tuple[bool, list[Any]]] = {}
        # By identity, since an operator's own hash is computed in Python: whether its results may
        # be remembered, whether it does nothing.
        self._kinds: dict[int, tuple[bool, bool]] = {}

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`, all of whose tensors should be without data."""
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = self._kinds[id(func)] = _kind_of(func)
        fresh, nothing = kind
        if nothing and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return args[0]
        if not fresh:
            return func(*args, **kwargs)
        key = _key((id(func), args, kwargs) if kwargs else (id(func), args))
        if key is None:
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is not None:
            single, likes = known
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device="meta")
                for size, stride, dtype in likes
            ]
            return made[0] if single else tuple(made)
        out = func(*args, **kwargs)
        single = isinstance(out, Tensor)
        results = [out] if single else out
        if isinstance(results, (list, tuple)) and results and all(map(_plain, results)):
            taken = {t.untyped_storage()._cdata for t in tree_iter(args) if isinstance(t, Tensor)}
            if any(t.untyped_storage()._cdata in taken for t in results):
                return out
            likes = [(t.size(), t.stride(), t.dtype) for t in results]
            self._known[key] = single, likes
        return out


def _kind_of(func: Any) -> tuple[bool, bool]:
    """Whether the operator's results may be remembered, and whether it does nothing."""
    schema = func._schema
    aliases = any(v.alias_info is not None for v in (*schema.arguments, *schema.returns))
    aten = func.namespace == "aten"
    fresh = aten and not aliases and bool(schema.returns)
    return fresh, aten and schema.name.removeprefix("aten::") in _IN_PLACE


def _plain(t: Any) -> bool:
    """A result that `empty_strided` makes again."""
    if not isinstance(t, Tensor) or not t.is_meta or t.layout is not torch.strided:
        return False
    if t.storage_offset() or t.numel() == 0:
        return False
    last = sum((n - 1) * step for n, step in zip(t.size(), t.stride(), strict=True))
    return t.untyped_storage().nbytes() == (last + 1) * t.element_size()


def _key(value: Any) -> Any:
    """What decides the result, hashable; None where a tensor has data."""
    kind = type(value)
    if kind is tuple or kind is list:
        parts = []
        for item in value:
            part = _key(item)
            if part is None and item is not None:
                return None
            parts.append(part)
        return tuple(parts)
    if isinstance(value, Tensor):
        if not value.is_meta:
            return None
        return value.size(), value.stride(), value.dtype
    if kind is dict:
        items = _key(tuple(value.values()))
        return None if items is None else (tuple(value), items)
    if kind is bool or kind is float:  # equal to an int, and not the same
        return kind, value
    return value
