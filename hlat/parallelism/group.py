"""Ranks that act as one, as those see it who do not know what connects them."""

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
