"""The seam through which upstream's own forward code runs piecewise.

A layer half is upstream's code with some of its submodules stood in for: so every variant that
upstream's code handles (query-key norms, RoPE flavours, biases, residual dtypes) is handled here
as well, and a change upstream reaches us without being copied.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class StandIn(nn.Module):
    """A module that is only a function, and owns nothing."""

    def __init__(self, call: Callable[..., Any]):
        super().__init__()
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


@contextmanager
def standing_in(owner: nn.Module, **calls: Callable[..., Any]) -> Iterator[None]:
    """Replaces the named submodules of `owner` by functions while the body runs."""
    originals = {name: owner._modules[name] for name in calls}
    for name, call in calls.items():
        owner._modules[name] = StandIn(call)
    try:
        yield
    finally:
        owner._modules.update(originals)
