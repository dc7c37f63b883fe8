"""Short labels of settings, for the names of runs and the legends of figures."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

_MAX_NAME_LENGTH = 120
"""Characters of a run's name in W&B, which accepts 128."""
_GENERATED_NAME = re.compile(r".+-[0-9a-f]{8}")
"""Default names: the model and a digest (`hlat.config.run_identity`)."""
_OMITTED = re.compile(
    r"[+~]*(run\.(name|root|log_every|force)=|model=|(tracking|hydra|paths)[./=])"
)
"""Overrides that do not describe an experiment, or that the name of the run contains."""


def shorten_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the shortest end of each key that is distinct.

    `precision.name` becomes `precision`, as in an override.
    """
    parts = {key: key.removesuffix(".name").split(".") for key in keys}
    lengths = dict.fromkeys(parts, 1)
    while True:
        short = {key: ".".join(names[-lengths[key] :]) for key, names in parts.items()}
        counts = Counter(short.values())
        longer = [k for k in parts if counts[short[k]] > 1 and lengths[k] < len(parts[k])]
        if not longer:
            return short
        for key in longer:
            lengths[key] += 1


def format_settings(settings: Mapping[str, str]) -> str:
    """Return settings with short keys in one line, such as `lr=0.1, seed=2`."""
    short = shorten_keys(settings)
    return ", ".join(f"{short[key]}={value}" for key, value in settings.items())


def is_generated_name(run_name: str) -> bool:
    """Return True if a run has a default name, which contains a digest."""
    return _GENERATED_NAME.fullmatch(run_name) is not None


def build_display_name(run_name: str, overrides: Sequence[str]) -> str:
    """Return the name of a run in tracking services.

    A generated name gets the user's overrides, such as `tiny-1b2c3d4e: lr=0.1, seed=2`; a name that
    the user has chosen is unchanged.
    """
    if not is_generated_name(run_name):
        return run_name
    settings = dict(
        word.lstrip("+").split("=", 1)
        for word in overrides
        if "=" in word and "${" not in word and not _OMITTED.match(word)
    )
    name = f"{run_name}: {format_settings(settings)}" if settings else run_name
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[: _MAX_NAME_LENGTH - 1]}…"
