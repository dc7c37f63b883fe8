"""Runs an entry's task on the composed configuration, and tells every mistake kindly.

Hydra prints its errors in its own words and exits with 1. Launchers rely on exit code 2 for what
must never be retried, so its errors are caught here and told in ours.
"""

import functools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hlat.config import compose, frozen
from hlat.config.errors import ConfigError, Exit
from hlat.config.explain import explain
from hlat.config.folders import copy, folder

_FULL_ERROR = "HYDRA_FULL_ERROR"
_SET_BY_USER = {key: value for key, value in os.environ.items() if key == _FULL_ERROR}


def run(task: Callable[[DictConfig], Exit]) -> None:
    """Compose the configuration from the command line, run `task` on it, and exit with its code.

    What a launcher has frozen is not composed again: `--frozen FOLDER` says where it lies. Exits
    with 2 after any mistake in the configuration, with 130 after Ctrl-C that nothing caught.
    HYDRA_FULL_ERROR=1 shows the traceback instead of the message.
    """
    if _frozen_folder() is not None:
        sys.exit(_run_frozen(task))
    show_traceback = _SET_BY_USER.get(_FULL_ERROR, "0") not in ("", "0")
    codes: list[Exit] = []
    sent: list[Exit] = []

    @functools.wraps(task)  # Hydra names the job after the innermost function's file
    def guarded(config: DictConfig) -> None:
        codes.append(Exit.FAILED)
        try:
            _refuse_sweep_without_multirun()
            if _is_to_be_sent():
                sent.append(codes.pop())
                return
            codes[-1] = task(config)
        except (ConfigError, OmegaConfBaseException) as error:
            if show_traceback:
                raise
            codes[-1] = _tell(error)  # here, before Hydra announces a failed job in its words

    # Read once, when a library loads OpenMP: threads that wait for each other must not spin, or two
    # processes that share cores slow each other tenfold (docs/log.md)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    compose.register()
    main = hydra.main(version_base="1.3", config_path=str(folder("conf")), config_name="config")
    try:
        with _raising():
            main(guarded)()
            if sent:
                sys.argv.append("hydra.mode=MULTIRUN")
                main(guarded)()
    except KeyboardInterrupt:
        print("\nhlat: interrupted; nothing more was saved", file=sys.stderr)
        sys.exit(130)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if show_traceback or codes:
            raise
        sys.exit(_tell(error))
    if any(codes):
        sys.exit(next(code for code in codes if code))


def overrides() -> list[str]:
    """Return what the user typed after the entry's name, interpolations unresolved."""
    if (folder := _frozen_folder()) is not None:
        return frozen.words(folder).overrides
    typed = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(typed, list)
    return [str(override) for override in typed]


def resume_command(exit_code: Exit, overrides: list[str]) -> str:
    """Return what to type to go on; a run that reached run.steps goes on without it."""
    kept = [
        o for o in overrides if exit_code is not Exit.FINISHED or not o.startswith("run.steps=")
    ]
    if (folder := _frozen_folder()) is not None:
        return shlex.join(["python", "-m", "hlat.train", *frozen.words(folder).flags, *kept])
    return shlex.join(command(_python(), kept))


def command(python: str, overrides: list[str], name: str = "hlat.train") -> list[str]:
    """Return the words of a command whose entry, `name`, composes what this one composes."""
    if (folder := _frozen_folder()) is not None:
        return frozen_command(python, folder, name)
    flags = config_dir_flags(HydraConfig.get()) if HydraConfig.initialized() else []
    return [python, "-m", name, *flags, *overrides]


def config_dir_flags(hydra_config: HydraConf | DictConfig) -> list[str]:
    """Return the `--config-dir` that the user named, for a command that composes alike."""
    sources = hydra_config.runtime.config_sources
    return [
        word for s in sources if s.provider == "command-line" for word in ("--config-dir", s.path)
    ]


def frozen_command(python: str, folder: Path, name: str = "hlat.train") -> list[str]:
    """Return the words of a command whose entry takes what was frozen in a folder, as this does."""
    return [*module_command(python, name), frozen.FLAG, str(folder)]


def module_command(python: str, name: str) -> list[str]:
    """Return the words that start a module, of the copy if this program is one."""
    found = copy()
    return [python, "-m", name] if found is None else [python, str(found), name]


def users_environment() -> dict[str, str]:
    """Return the environment for a process that the user could have started."""
    return {key: value for key, value in os.environ.items() if key != _FULL_ERROR} | _SET_BY_USER


def _frozen_folder() -> Path | None:
    """Where what this process runs was frozen; None: it is to be composed."""
    return Path(sys.argv[2]) if sys.argv[1:2] == [frozen.FLAG] and len(sys.argv) == 3 else None


def _run_frozen(task: Callable[[DictConfig], Exit]) -> Exit:
    folder = _frozen_folder()
    assert folder is not None
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as below
    try:
        return task(frozen.load(folder))
    except (ConfigError, OmegaConfBaseException) as error:
        return _tell(error)


def _is_to_be_sent() -> bool:
    """Whether a launcher was chosen for a single run; Hydra asks none unless it sweeps."""
    composed = HydraConfig.get()
    return (
        composed.mode is RunMode.RUN
        and composed.runtime.choices["hydra/launcher"] not in compose.HERE
    )


def _refuse_sweep_without_multirun() -> None:
    """A study whose axes nobody set would train one ordinary run and say nothing."""
    composed = HydraConfig.get()
    axes = getattr(composed.sweeper, "params", None) or {}
    given = {override.partition("=")[0] for override in overrides()}
    if composed.mode is RunMode.RUN and (missing := sorted(set(axes) - given)):
        raise ConfigError(
            f"the study's axes {', '.join(missing)} are not set; add -m to sweep them"
        )


def _tell(error: Exception) -> Exit:
    problems = error.problems if isinstance(error, ConfigError) else explain(error).problems
    for problem in problems:
        print(f"hlat: {problem}", file=sys.stderr)
    return Exit.CONFIGURATION


def _python() -> str:
    """Return the shortest word that starts this very Python."""
    here = Path(sys.executable)
    found = shutil.which("python")
    if found is not None and Path(found) == here:
        return "python"
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)


@contextmanager
def _raising() -> Iterator[None]:
    """Make Hydra raise its errors instead of printing them and exiting with 1."""
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FULL_ERROR)
        os.environ.update(_SET_BY_USER)
