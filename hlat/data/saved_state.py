"""Whether a saved state of the data is one, before anything is read from it.

It comes from a file, which anybody may have written: one sentence, not a traceback, answers a state
of another shape, and no number of it reaches an index unchecked.
"""

from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any

from hlat.config.errors import ConfigError
from hlat.data.streams import NUM_FIELDS

_MOST = 2**63 - 1

_Check = Callable[[Any], bool]


def refuse_malformed(state: Any) -> None:
    """Return if a state has the shape that `Loader.state` gives it.

    Raises:
        ConfigError: It has not; every part of it is named.
    """
    wrong = list(_wrong(state)) if isinstance(state, Mapping) else ["it"]
    if wrong:
        raise ConfigError(
            f"the checkpoint's data state was not written by hlat: {', '.join(wrong)} cannot be "
            "understood; resume from another checkpoint"
        )


def _wrong(state: Mapping[str, Any]) -> Iterator[str]:
    sources: Any = state.get("sources")
    if not _is_list(sources, _is_text):
        yield "sources"
        return
    width = 2 + NUM_FIELDS * len(sources)
    checks: dict[str, _Check] = {
        "fingerprint": _is_mapping,
        "step": _is_count,
        "stage": _is_stage,
        "chapters": lambda chapters: _is_list(chapters, lambda c: _is_chapter(c, len(sources))),
        "streams": lambda streams: (
            _is_mapping(streams) and all(_is_row(row, width) for row in streams.values())
        ),
    }
    yield from (name for name, check in checks.items() if not check(state.get(name)))


def _is_stage(stage: Any) -> bool:
    return (
        _is_mapping(stage)
        and stage.keys() == {"name", "start", "shares"}
        and _is_text(stage["name"])
        and _is_count(stage["start"])
        and _is_mapping(stage["shares"])
        and all(map(_is_share, stage["shares"].values()))
    )


def _is_chapter(chapter: Any, num_sources: int) -> bool:
    return (
        isinstance(chapter, (list, tuple))
        and len(chapter) == 3
        and _is_text(chapter[0])
        and _is_count(chapter[1])
        and _is_list(chapter[2], lambda pair: _is_list(pair, _is_count) and len(pair) == 2)
        and len(chapter[2]) == num_sources
    )


def _is_row(row: Any, width: int) -> bool:
    return _is_list(row, _is_integer) and len(row) == width


def _is_list(value: Any, check: _Check) -> bool:
    return isinstance(value, list) and all(map(check, value))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MOST


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value) and value >= 0
