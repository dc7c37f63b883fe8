"""Object collectives over host memory, independent of the library that connects the ranks."""

import json
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol


class ObjectGroup(Protocol):
    """Object collectives of a group of ranks: all ranks call a method at the same time."""

    rank: int
    """Index of this process in the group."""
    size: int
    """Number of ranks."""

    @property
    def is_rank0(self) -> bool:
        """True on the first rank of the group."""
        return self.rank == 0

    def broadcast(self, message: bytes | None) -> bytes:
        """Return rank 0's message on all ranks; the other ranks pass None."""

    def reduce_object(self, value: Any, merge: Callable[[list[Any]], Any]) -> Any:
        """Merge the JSON values of all ranks; return the result on rank 0, None on the others.

        `merge` is called with values in rank order, on several ranks, and again with its results,
        so that no rank receives the values of all ranks.
        """

    def gather_object(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks in rank order on rank 0, [] on the others."""
        return self.reduce_object([value], lambda lists: [*chain.from_iterable(lists)]) or []

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank."""


class SingleRankGroup(ObjectGroup):
    """A group of one rank."""

    rank, size = 0, 1

    def broadcast(self, message: bytes | None) -> bytes:
        """Return the message."""
        assert message is not None
        return message

    def reduce_object(self, value: Any, merge: Callable[[list[Any]], Any]) -> Any:
        """Return the value."""
        return value

    def any(self, flag: bool) -> bool:
        """Return the flag."""
        return flag


def broadcast_object(group: ObjectGroup, value: Any) -> Any:
    """Return rank 0's JSON value on all ranks."""
    message = group.broadcast(json.dumps(value).encode() if group.is_rank0 else None)
    return json.loads(message)


def run_on_all(group: ObjectGroup, action: Callable[[], Any]) -> list[Any]:
    """Run `action` on all ranks, wait for all, and return `gather_object` of the results.

    Raises:
        OSError: On all ranks, if any rank raised it.
    """
    results = run_and_reduce(group, lambda: [action()], lambda lists: [*chain.from_iterable(lists)])
    return results if group.is_rank0 else []


def run_on_rank0(group: ObjectGroup, action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 and return its JSON value on all ranks.

    Raises:
        OSError: On all ranks, if rank 0 raised it.
    """
    result = None

    def run() -> None:
        nonlocal result
        result = action() if group.is_rank0 else None

    run_on_all(group, run)
    return broadcast_object(group, result)


def run_and_reduce(
    group: ObjectGroup, action: Callable[[], Any], merge: Callable[[list[Any]], Any]
) -> Any:
    """Run `action` on all ranks, wait for all, and return `reduce_object` of the results.

    Results that are None are skipped; the return value is None without any other.

    Raises:
        OSError: On all ranks, if any rank raised it.
    """
    result, error = None, None
    try:
        result = action()
    except OSError as raised:
        error = raised

    def merge_outcomes(outcomes: list[Any]) -> Any:
        results = [result for result, _ in outcomes if result is not None]
        messages = [message for _, message in outcomes if message is not None]
        return [merge(results) if results else None, messages[0] if messages else None]

    outcome = group.reduce_object([result, None if error is None else str(error)], merge_outcomes)
    first_message = broadcast_object(group, outcome and outcome[1])
    if error is not None:
        raise error
    if first_message is not None:
        raise OSError(first_message)
    return outcome[0] if outcome else None
