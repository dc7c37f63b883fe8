"""Whether a saved state and the data at hand belong together, and what to do if they do not.

A position in other data is worse than none: a run would go on without a word and read some
documents twice and others never. So a difference is refused with both values, unless the user
accepts it by name; then the documents that stood open are left, and the position counts on.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hlat.config.errors import ConfigError
from hlat.data.rows import States
from hlat.data.saved_state import refuse_malformed
from hlat.data.streams import NUM_FIELDS

STATE_VERSION = 2

_SOURCES = "data.sources."
_FIXED = ("batch.global_batch_size", "batch.sequence_length")
"""Streams are rows of the global batch, and other rows have no position to take over; stages begin
at steps, which tokens per step count."""
_DOCUMENT, _PIECE, _OFFSET = 0, 1, 2
"""Places of fields of `Cursor`."""


def compare(
    here: Mapping[str, Any],
    state: Mapping[str, Any],
    numbers: Sequence[int],
    allowed: Sequence[str],
) -> dict[str, str]:
    """Compare a loader's fingerprint with that of a saved state.

    Args:
        here: The loader's.
        state: A saved state of a loader.
        numbers: The rows that the loader draws.
        allowed: Keys that may differ.

    Returns:
        For each key that differs and may, a line that tells so.

    Raises:
        ConfigError: With every other difference at once; or the state is none.
    """
    if state.get("version") != STATE_VERSION:
        raise ConfigError(
            f"the checkpoint's data state has version {state.get('version')}, not "
            f"{STATE_VERSION}; resume it with the hlat that wrote it"
        )
    refuse_malformed(state)
    there = state["fingerprint"]
    changed = [key for key in sorted({*here, *there}) if here.get(key) != there.get(key)]
    lines = {
        key: f"{key}: the checkpoint was written with {there.get(key, 'none')}, this run has "
        f"{here.get(key, 'none')}"
        for key in changed
    }
    accepted = {key: lines.pop(key) for key in changed if key in allowed and key not in _FIXED}
    problems = [f"{line}; {_remedy(key)}" for key, line in lines.items()]
    problems += [
        f"data.allow_changed: {key} is no key that a checkpoint could differ in; these are: "
        f"{', '.join(sorted({*here, *there} - {*_FIXED}))}"
        for key in allowed
        if key not in here and key not in there
    ]
    if missing := [str(n) for n in numbers if str(n) not in state["streams"]]:
        problems.append(
            f"the checkpoint's data state lacks streams {', '.join(missing)} of this rank; "
            "merge the states of all ranks that wrote it"
        )
    if problems:
        raise ConfigError(*problems)
    return accepted


def refuse_changed(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Refuse to draw for a trainer that opened other data.

    Args:
        here: The fingerprint of what a worker opened.
        there: That of what its trainer opened.

    Raises:
        ConfigError: If they differ.
    """
    changed = [key for key in sorted({*here, *there}) if here.get(key) != there.get(key)]
    if changed:
        raise ConfigError(
            *(
                f"{key}: has changed since the run began, from {there.get(key, 'none')} to "
                f"{here.get(key, 'none')}; put back what it was and start again"
                for key in changed
            )
        )


def _remedy(key: str) -> str:
    if key in _FIXED:
        return "restore the former, or start a new run"
    return f"restore the former, start a new run, or accept it with 'data.allow_changed=[{key}]'"


def adapt(
    states: States, before: Sequence[str], now: Sequence[str], changed: Collection[str]
) -> States:
    """Streams' states after accepted changes.

    A source that is new begins at its first document. Where a source's documents or their tokens
    are not what they were, the one that stands open is left for the next.

    Args:
        states: As saved, [rows, width].
        before: Names of the sources that they count, in order.
        now: Names of the loader's.
        changed: Keys of the fingerprint that differ.
    """
    if not changed:
        return states
    cursors = states[:, 2:].reshape(len(states), len(before), NUM_FIELDS)
    adapted = np.zeros((len(states), len(now), NUM_FIELDS), np.int64)
    for place, name in enumerate(now):
        if name in before:
            adapted[:, place] = cursors[:, before.index(name)]
        if any(key in (_SOURCES + name, *_OF_ALL) for key in changed):
            _leave_open_documents(adapted[:, place])
    segments = np.full((len(states), 2), (-1, 0), np.int64)
    return np.concatenate([segments, adapted.reshape(len(states), -1)], axis=1)


_OF_ALL = ("run.seed", "data.tokenizer", "data.eos_token", "data.heldout_documents")
"""Keys that bear on every source's documents or their tokens."""


def _leave_open_documents(cursors: States) -> None:
    is_open = (cursors[:, _PIECE] > 0) | (cursors[:, _OFFSET] > 0)
    cursors[:, _DOCUMENT] += is_open
    cursors[:, _PIECE] = cursors[:, _OFFSET] = 0
