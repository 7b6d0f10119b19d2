"""Functions that a compiler makes one kernel of on CUDA, where they run operator by operator.

On CUDA, upstream's jit fuser (``torch.compile``) turns a pointwise function into one kernel, whose
intermediate results never reach memory. A profile runs the function as it is and lets whoever
listens know where it begins and ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_listener: Callable[[str], None] | None = None
_depth = 0


def inside() -> bool:
    """Whether a fused function is running and somebody listens."""
    return _depth > 0 and _listener is not None


@contextmanager
def listening(at_end: Callable[[str], None]) -> Iterator[None]:
    """Calls `at_end(name)` when the outermost fused function returns, inside the body."""
    global _listener
    assert _listener is None
    _listener = at_end
    try:
        yield
    finally:
        _listener = None


def compile_as_region(function: Any = None, **options: Any) -> Any:
    """Stands for ``torch.compile``: the function itself, with its begin and end told."""
    if function is None:
        return lambda function: compile_as_region(function, **options)

    @functools.wraps(function)
    def region(*args: Any, **kwargs: Any) -> Any:
        global _depth
        _depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1
            if _depth == 0 and _listener is not None:
                _listener(getattr(function, "__name__", "compiled"))

    return region
