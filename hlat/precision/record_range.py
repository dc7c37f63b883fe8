"""Ranges of the trace of a profiled step, by which its account selects the class of an operator.

A range of torch.profiler costs several microseconds also without a profiler. Functions that run for
every parameter therefore record their range only within `record_ranges`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

RANGE_PREFIX = "hlat::"
"""Start of the names of ranges, after which the class follows."""
_P = ParamSpec("_P")
_R = TypeVar("_R")
_is_recording = False
"""A global variable, since autograd calls hooks in other threads."""


@contextmanager
def record_ranges() -> Iterator[None]:
    """Record the ranges of decorated functions within the context."""
    global _is_recording
    _is_recording = True
    try:
        yield
    finally:
        _is_recording = False


def record_range(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that records the calls of a function as a range with a name."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def record(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not _is_recording:
                return function(*args, **kwargs)
            from torch.profiler import record_function

            with record_function(RANGE_PREFIX + name):
                return function(*args, **kwargs)

        return record

    return decorate
