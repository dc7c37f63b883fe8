"""Result of the translation of one NxDT key."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from hlat.plan.nxdt.nxdt_config import NxdtConfig

REMOVE_KEY = object()
"""Value of an override that removes a key."""


class TranslationStatus(Enum):
    """Status of a translated key."""

    mapped = "mapped"
    """Expressed by overrides."""
    redundant = "redundant"
    """Default behavior of hlat, or not read by NxDT."""
    unsupported = "unsupported"
    """Without an equivalent."""


class KeyTranslation(NamedTuple):
    """Translation of a key and its value.

    Attributes:
        status: Status of the key.
        overrides: hlat's keys and values; `REMOVE_KEY` removes a key.
        reason: Reason for the lack of overrides, or a note about them.
    """

    status: TranslationStatus
    overrides: Mapping[str, Any]
    reason: str = ""


TranslationRule = Callable[[NxdtConfig, Any], KeyTranslation]
"""Function of the configuration and the value of a key."""


def map_to(overrides: Mapping[str, Any], note: str = "") -> KeyTranslation:
    """Return equivalent overrides with an optional note."""
    return KeyTranslation(TranslationStatus.mapped, overrides, note)


def mark_redundant(reason: str) -> KeyTranslation:
    """Return no overrides for a key that needs none."""
    return KeyTranslation(TranslationStatus.redundant, {}, reason)


def mark_unsupported(reason: str = "no equivalent") -> KeyTranslation:
    """Return no overrides for a key that changes the run."""
    return KeyTranslation(TranslationStatus.unsupported, {}, reason)


def copy_to(key: str, value: Any) -> KeyTranslation:
    """Return an override of a key of hlat with the same value."""
    return mark_unsupported("it is not set") if value is None else map_to({key: value})
