"""Runs an entry's task on the composed configuration, and tells every mistake kindly.

Hydra prints its errors in its own words and exits with 1. Launchers rely on exit code 2 for what
must never be retried, so its errors are caught here and told in ours.
"""

import functools
import os
import sys
from collections.abc import Callable

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hlat.config import compose
from hlat.config.errors import ConfigError, Exit
from hlat.config.explain import explain
from hlat.config.folders import folder


def run(task: Callable[[DictConfig], None]) -> None:
    """Compose the configuration from the command line and run `task` on it.

    Exits with 2 after any mistake in the configuration, with 130 when interrupted before there is
    anything to save.
    HYDRA_FULL_ERROR=1 shows the traceback instead of the message.
    """
    show_traceback = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing and exiting with 1
    composed = False

    @functools.wraps(task)  # Hydra names the job after the innermost function's file
    def guarded(config: DictConfig) -> None:
        nonlocal composed
        composed = True
        try:
            task(config)
        except (
            ConfigError
        ) as error:  # stop here, before Hydra announces a failed job in its own words
            if show_traceback:
                raise
            _refuse(error)

    compose.register()
    main = hydra.main(version_base="1.3", config_path=str(folder("conf")), config_name="config")
    try:
        main(guarded)()
    except KeyboardInterrupt:
        print(
            "\nhlat: interrupted before the first step; there is nothing to save", file=sys.stderr
        )
        sys.exit(130)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if show_traceback or composed:
            raise
        _refuse(explain(error))


def overrides() -> list[str]:
    """Return what the user typed after the entry's name."""
    return list(HydraConfig.get().overrides.task)


def _refuse(error: ConfigError) -> None:
    for problem in error.problems:
        print(f"hlat: {problem}", file=sys.stderr)
    sys.exit(Exit.CONFIGURATION)
