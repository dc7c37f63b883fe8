"""Seeds of a run, which pair the runs of a study instead of being factors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

SEED_KEYS = ("run.seed", "run.init_seed", "run.data_seed")


def pop_seeds(axes: dict[str, list[str]]) -> list[str]:
    """Remove the seeds from axes, and return the seeds of each run; empty if all runs share them.

    `axes` are the values of each setting that differs, in the order of the runs.
    """
    seeds = [axes.pop(key) for key in SEED_KEYS if key in axes]
    return ["/".join(values) for values in zip(*seeds, strict=True)]


def format_seeds(settings: Mapping[str, Any]) -> str:
    """Return the seeds of a run, given its settings by full key."""
    return "/".join(str(settings.get(key)) for key in SEED_KEYS)


def count_seeds(axes: Mapping[str, Sequence[str]]) -> int:
    """Return the number of seeds of each point of a sweep."""
    return math.prod(len(axes[key]) for key in SEED_KEYS if key in axes)


def is_seed_override(word: str) -> bool:
    """Return True for an override of a seed."""
    return word.partition("=")[0] in SEED_KEYS
