"""Comparison of the data of a run with the data of the checkpoint it resumes from.

With changed data, a saved position would repeat some documents and skip others without an error.
Each difference is therefore an error with both values, unless data.allow_changed lists its key. An
accepted change skips the rest of the affected open documents.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.run_identity import compare_data_settings, list_allowed_keys
from hlat.data.batch_reader import StreamStates
from hlat.data.data_mixture import MixtureStage
from hlat.data.token_streams import NUM_CURSOR_FIELDS

STATE_VERSION = 2

_SOURCES_PREFIX = "data.sources."
_GLOBAL_KEYS = (
    *("run.seed", "data.tokenizer", "data.eos_token", "data.bos_token"),
    "data.heldout_documents",
)
"""Keys that affect the documents or tokens of every source."""
_DOCUMENT, _CHUNK, _OFFSET = 0, 1, 2
"""Indices of fields of `SourceCursor`."""


def compare_fingerprints(
    current: Mapping[str, Any],
    state: Mapping[str, Any],
    row_indices: Sequence[int],
    allowed_keys: Sequence[str],
) -> dict[str, str]:
    """Compare the fingerprint of a data loader with that of a saved state.

    Returns:
        A message for each allowed difference, by key.

    Raises:
        ConfigError: With all other differences, or if the state is malformed.
    """
    validate_state(state)
    saved = state["fingerprint"]
    accepted, problems = compare_data_settings(current, saved, allowed_keys)
    problems += [
        f"data.allow_changed: {key} is no key that a checkpoint could differ in; these are: "
        f"{', '.join(list_allowed_keys(current, saved))}"
        for key in allowed_keys
        if key not in current and key not in saved
    ]
    if missing := [str(n) for n in row_indices if str(n) not in state["streams"]]:
        problems.append(
            f"the checkpoint's data state lacks streams {', '.join(missing)} of this rank; "
            "merge the states of all ranks that wrote it"
        )
    raise_config_errors(problems)
    return accepted


def validate_same_fingerprint(current: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ConfigError if a worker's data differ from the data that its trainer opened."""
    raise_config_errors(
        f"{key}: has changed since the run began, from {expected.get(key, 'none')} to "
        f"{current.get(key, 'none')}; put back what it was and start again"
        for key in sorted({*current, *expected})
        if current.get(key) != expected.get(key)
    )


def adapt_states(
    states: StreamStates,
    saved_sources: Sequence[str],
    current_sources: Sequence[str],
    changed_keys: Collection[str],
) -> StreamStates:
    """Return the stream states after accepted changes.

    A new source starts at its first document. A source with changed documents or tokens, named by
    the changed keys of the fingerprint, continues at the document after the open one.
    """
    if not changed_keys:
        return states
    cursors = states[:, 2:].reshape(len(states), len(saved_sources), NUM_CURSOR_FIELDS)
    adapted = np.zeros((len(states), len(current_sources), NUM_CURSOR_FIELDS), np.int64)
    for index, name in enumerate(current_sources):
        if name in saved_sources:
            adapted[:, index] = cursors[:, saved_sources.index(name)]
        if any(key in (_SOURCES_PREFIX + name, *_GLOBAL_KEYS) for key in changed_keys):
            is_open = (adapted[:, index, _CHUNK] > 0) | (adapted[:, index, _OFFSET] > 0)
            adapted[:, index, _DOCUMENT] += is_open
            adapted[:, index, [_CHUNK, _OFFSET]] = 0
    segments = np.full((len(states), 2), (-1, 0), np.int64)
    return np.concatenate([segments, adapted.reshape(len(states), -1)], axis=1)


def validate_state(state: Mapping[str, Any]) -> None:
    """Raise ConfigError if the state of a loader is of another version or malformed."""
    if state.get("version") != STATE_VERSION:
        raise ConfigError(
            f"the checkpoint's data state has version {state.get('version')}, not "
            f"{STATE_VERSION}; resume it with the hlat that wrote it"
        )
    try:
        num_sources = len(state["sources"])
        shape = len(state["streams"]), 2 + NUM_CURSOR_FIELDS * num_sources
        if np.array([*state["streams"].values()], np.int64).shape != shape:
            raise ValueError("streams")
        for _, end_step, totals in state["chapters"]:
            np.array([end_step, *np.array(totals, np.int64).reshape(2 * num_sources)], np.int64)
        MixtureStage.from_json(state["stage"])
        dict(state["fingerprint"])
        range(state["step"])
        for start, stop in state.get("skipped", []):
            if start < 0 or not len(range(start, stop)):
                raise ValueError("skipped")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the checkpoint's data state was not written by hlat ({error!r}); resume from another "
            "checkpoint"
        ) from error
