"""Ranks that act as one, as those see it who do not know what connects them."""

import json
from collections.abc import Callable
from typing import Any, Protocol


class Group(Protocol):
    """Some ranks; all of them call the same method at the same time."""

    leads: bool
    """Whether this rank is the one that acts for all."""

    def broadcast(self, message: bytes | None) -> bytes:
        """Send the leader's message to all ranks, and return it; the others pass None."""

    def collect(self, value: Any) -> list[Any]:
        """The values of all ranks in their order, as JSON knows them, on the leader; else []."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""


class Alone:
    """The group of a single rank."""

    leads = True

    def broadcast(self, message: bytes | None) -> bytes:
        """Its own message."""
        assert message is not None
        return message

    def collect(self, value: Any) -> list[Any]:
        """Its own value."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Its own flag."""
        return flag


def tell(group: Group, value: Any) -> Any:
    """The leader's value, as JSON knows it, on all ranks."""
    message = group.broadcast(json.dumps(value).encode() if group.leads else None)
    return json.loads(message)


def together(group: Group, action: Callable[[], Any]) -> list[Any]:
    """Let all ranks act, and wait for them; returns what `collect` does of their results.

    Raises:
        OSError: On all ranks, if any of them raised it.
    """
    result, own = None, None
    try:
        result = action()
    except OSError as error:
        own = error
    outcomes = group.collect([result, None if own is None else str(own)])
    problems = [problem for _, problem in outcomes if problem is not None]
    problem = tell(group, problems[:1])
    if own is not None:
        raise own
    if problem:
        raise OSError(problem[0])
    return [found for found, _ in outcomes]
