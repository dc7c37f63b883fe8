"""Validation of the types and sizes of a saved data state before it is used."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.data.token_streams import NUM_CURSOR_FIELDS

_MAX_INT64 = 2**63 - 1


def validate_saved_state(state: Any) -> None:
    """Raise ConfigError with the malformed keys if a state is not a `DataLoader.state_dict`."""
    malformed = list(_find_malformed_keys(state)) if isinstance(state, Mapping) else ["it"]
    if malformed:
        raise ConfigError(
            f"the checkpoint's data state was not written by hlat: {', '.join(malformed)} cannot "
            "be understood; resume from another checkpoint"
        )


def _find_malformed_keys(state: Mapping[str, Any]) -> Iterator[str]:
    sources: Any = state.get("sources")
    streams: Any = state.get("streams")
    entries, stage = state.get("chapters"), state.get("stage")
    if not isinstance(sources, list) or not all(isinstance(name, str) for name in sources):
        yield "sources"
        return
    if not _is_mapping(state.get("fingerprint")):
        yield "fingerprint"
    if not _is_count(state.get("step")):
        yield "step"
    if not _is_stage(stage):
        yield "stage"
    if not isinstance(entries, list) or not all(_is_ledger_entry(e, len(sources)) for e in entries):
        yield "chapters"
    width = 2 + NUM_CURSOR_FIELDS * len(sources)
    if not _is_mapping(streams) or not all(_is_row(row, width) for row in streams.values()):
        yield "streams"


def _is_stage(stage: Any) -> bool:
    return (
        _is_mapping(stage)
        and stage.keys() == {"name", "start", "shares"}
        and isinstance(stage["name"], str)
        and _is_count(stage["start"])
        and _is_mapping(stage["shares"])
        and all(
            type(value) in (int, float) and isfinite(value) and value >= 0
            for value in stage["shares"].values()
        )
    )


def _is_ledger_entry(entry: Any, num_sources: int) -> bool:
    return (
        isinstance(entry, Sequence)
        and len(entry) == 3
        and isinstance(entry[0], str)
        and _is_count(entry[1])
        and isinstance(entry[2], list)
        and len(entry[2]) == num_sources
        and all(_is_row(pair, 2) and min(pair) >= 0 for pair in entry[2])
    )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_row(value: Any, width: int) -> bool:
    return isinstance(value, list) and len(value) == width and all(map(_is_integer, value))


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MAX_INT64


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0
