"""Patches that plant a bug for the duration of a context."""

from collections.abc import Callable
from typing import Any
from unittest import mock

Plant = Callable[[], Any]
"""Function that returns the context of a bug."""


def patched(target: Any, **functions: Any) -> Plant:
    """Replace attributes of a module or a class."""
    return lambda: mock.patch.multiple(target, **functions)


def around(target: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Replace a function by `make(function)`."""
    return lambda: mock.patch.object(target, name, make(getattr(target, name)))
