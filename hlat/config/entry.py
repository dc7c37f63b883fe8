"""Runs an entry's task on the composed configuration, and tells every mistake kindly.

Hydra prints its errors in its own words and exits with 1. Launchers rely on exit code 2 for what
must never be retried, so its errors are caught here and told in ours.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hlat.config import compose
from hlat.config.errors import ConfigError, Exit
from hlat.config.explain import explain
from hlat.config.folders import folder

_FULL_ERROR = "HYDRA_FULL_ERROR"
_SET_BY_USER = {key: value for key, value in os.environ.items() if key == _FULL_ERROR}


def run(task: Callable[[DictConfig], None]) -> None:
    """Compose the configuration from the command line and run `task` on it.

    Exits with 2 after any mistake in the configuration, with 130 when interrupted before there is
    anything to save.
    HYDRA_FULL_ERROR=1 shows the traceback instead of the message.
    """
    show_traceback = _SET_BY_USER.get(_FULL_ERROR, "0") not in ("", "0")
    composed = False

    @functools.wraps(task)  # Hydra names the job after the innermost function's file
    def guarded(config: DictConfig) -> None:
        nonlocal composed
        composed = True
        try:
            task(config)
        except ConfigError as error:  # stop here, before Hydra announces a failed job in its words
            if show_traceback:
                raise
            _refuse(error)

    compose.register()
    main = hydra.main(version_base="1.3", config_path=str(folder("conf")), config_name="config")
    try:
        with _raising():
            main(guarded)()
    except KeyboardInterrupt:
        print("\nhlat: interrupted; nothing new was saved", file=sys.stderr)
        sys.exit(130)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if show_traceback or composed:
            raise
        _refuse(explain(error))


@contextmanager
def _raising() -> Iterator[None]:
    """Make Hydra raise its errors instead of printing them and exiting with 1."""
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FULL_ERROR)
        os.environ.update(_SET_BY_USER)


def users_environment() -> dict[str, str]:
    """Return the environment for a process that the user could have started."""
    return {key: value for key, value in os.environ.items() if key != _FULL_ERROR} | _SET_BY_USER


def overrides() -> list[str]:
    """Return what the user typed after the entry's name."""
    return list(HydraConfig.get().overrides.task)


def _refuse(error: ConfigError) -> None:
    for problem in error.problems:
        print(f"hlat: {problem}", file=sys.stderr)
    sys.exit(Exit.CONFIGURATION)
