"""Keys that lists of overrides set: repeated keys, and lists that take precedence over others.

Hydra uses the last of several values for a key without a message.
"""

from collections.abc import Mapping, Sequence

from hlat.config.config_errors import raise_config_errors


def parse_override_key(argument: str) -> str | None:
    """Return the key that an override sets; None for flags, deletions and other arguments."""
    key, equals, _ = argument.partition("=")
    return key.lstrip("+") if equals and not key.startswith(("-", "~")) else None


def find_repeated_keys(arguments: Sequence[str]) -> list[str]:
    """Return a problem for each key that is set more than once."""
    by_key: dict[str | None, list[str]] = {}
    for argument in arguments:
        by_key.setdefault(parse_override_key(argument), []).append(argument)
    return [
        f"{key} is set {len(given)} times: {' and '.join(given)}; keep one of them"
        for key, given in by_key.items()
        if key is not None and len(given) > 1
    ]


def validate_distinct_keys(arguments: Sequence[str]) -> None:
    """Raise ConfigError if arguments set a key more than once."""
    raise_config_errors(find_repeated_keys(arguments))


def merge_overrides(defaults: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return `overrides` after those of `defaults` with other keys."""
    keys = {parse_override_key(override) for override in overrides} - {None}
    kept = [override for override in defaults if parse_override_key(override) not in keys]
    return [*kept, *overrides]


def list_replaced_axes(axes: Mapping[str, object], overrides: Sequence[str]) -> list[str]:
    """Return a message for each override of the command line that replaces an axis of a study."""
    keys = map(parse_override_key, overrides)
    return [
        f"hlat: {override} replaces the axis {key}={axes[key]} of the study"
        for override, key in zip(overrides, keys, strict=True)
        if key is not None and key in axes
    ]
