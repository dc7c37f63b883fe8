"""Points of a sweep that are forked from a prepared process (docs/adr/0081-prepared-process.md)."""

import sys
from collections.abc import Mapping, Sequence

from hlat.config.engine import EngineBackend
from hlat.config.entry_point import get_user_environment
from hlat.config.run import Config
from hlat.recovery.prepared_process import start_server

from .._sweep_points import SweepPoint

_MAX_COMPOSED = 64
"""Number of configurations that the prepared process composes."""


def can_fork(config: Config) -> bool:
    """Return True if a run is one process, without environment variables of its own."""
    return (
        sys.platform == "linux"
        and config.num_processes == 1
        and config.engine.name is EngineBackend.native
        and not config.compiler.environment
    )


def start_prepared_process(
    points: Sequence[SweepPoint], hydra_flags: Sequence[str], variables: Mapping[str, str]
) -> bool:
    """Start the process that forks points; return False if points are not to be forked.

    `variables` are environment variables of all points that can be. Configurations with files of
    the user are not composed ahead, since such files may change.
    """
    if not any(can_fork(point.config) for point in points):
        return False
    choices = {tuple(filter(_is_choice, point.overrides)) for point in points}
    overrides = [[*hydra_flags, *words] for words in sorted(choices)[:_MAX_COMPOSED]]
    has_user_files = any(flag.startswith("--") for flag in hydra_flags)
    return start_server(get_user_environment(), variables, [] if has_user_files else overrides)


def _is_choice(override: str) -> bool:
    """Return True for an override of a group, such as `optimizer=lion`: its key has no dot."""
    return "." not in override.partition("=")[0]
