"""Process groups over host memory, independent of the library that connects the ranks."""

import json
from collections.abc import Callable
from typing import Any, Protocol


class ProcessGroup(Protocol):
    """A group of ranks. Every method is a collective: all ranks call it at the same time."""

    is_rank0: bool
    """True on the first rank of the group."""

    def broadcast(self, message: bytes | None) -> bytes:
        """Return rank 0's message on all ranks; the other ranks pass None."""

    def gather_object(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks in rank order on rank 0, [] on the others."""

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank."""


class SingleProcessGroup:
    """A process group of one rank."""

    is_rank0 = True

    def broadcast(self, message: bytes | None) -> bytes:
        """Return the message."""
        assert message is not None
        return message

    def gather_object(self, value: Any) -> list[Any]:
        """Return the value in a list."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Return the flag."""
        return flag


def broadcast_object(group: ProcessGroup, value: Any) -> Any:
    """Return rank 0's JSON value on all ranks."""
    message = group.broadcast(json.dumps(value).encode() if group.is_rank0 else None)
    return json.loads(message)


def run_on_all(group: ProcessGroup, action: Callable[[], Any]) -> list[Any]:
    """Run `action` on all ranks, wait for all, and return `gather_object` of the results.

    Raises:
        OSError: On all ranks, if any rank raised it.
    """
    result, error = None, None
    try:
        result = action()
    except OSError as raised:
        error = raised
    outcomes = group.gather_object([result, None if error is None else str(error)])
    messages = [message for _, message in outcomes if message is not None]
    first_message = broadcast_object(group, messages[:1])
    if error is not None:
        raise error
    if first_message:
        raise OSError(first_message[0])
    return [value for value, _ in outcomes]
