"""What becomes of a key of NxDT: overrides of hlat, nothing, or nothing to be had."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from hlat.planning.nxdt.file import File


class Kind(Enum):
    """What becomes of a key."""

    mapped = "mapped"
    """Overrides say the same."""
    needless = "needless"
    """hlat does this anyway, or NxDT does not read it."""
    left = "left"
    """hlat has nothing for it."""


class Outcome(NamedTuple):
    """What becomes of a key and its value.

    Attributes:
        kind: Which of the three.
        overrides: hlat's keys and values; `REMOVED` takes a key away.
        reason: Why there are none, or what to know about them.
    """

    kind: Kind
    overrides: Mapping[str, Any]
    reason: str = ""


Rule = Callable[[File, Any], Outcome]
"""From the file and a key's value to what becomes of it."""
REMOVED = object()
NO_EQUIVALENT = "no equivalent"


def mapped(overrides: Mapping[str, Any], note: str = "") -> Outcome:
    """Overrides that say the same, and what to know about them."""
    return Outcome(Kind.mapped, overrides, note)


def needless(reason: str) -> Outcome:
    """No override, and nothing is lost."""
    return Outcome(Kind.needless, {}, reason)


def left(reason: str = NO_EQUIVALENT) -> Outcome:
    """No override, and the run is another one for it."""
    return Outcome(Kind.left, {}, reason)


def copied_to(key: str, value: Any) -> Outcome:
    """The same value under a key of hlat."""
    return left("it is not set") if value is None else mapped({key: value})
