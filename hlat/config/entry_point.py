"""Compose the configuration from the command line and run a command on it.

Hydra prints configuration errors itself and exits with code 1. Launchers rely on exit code 2 for
errors that must not be retried, so this module catches Hydra's errors and reports them.
"""

import functools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hlat.config import (
    compose,
    extensions,
    frozen_config,
    hydra_config_security,
    launcher_plugins,
)
from hlat.config.components import format_kinds
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.hydra_errors import convert_hydra_error
from hlat.config.override_keys import validate_distinct_keys
from hlat.config.package_dirs import find_code_snapshot, find_package_dir

_FULL_ERROR_VARIABLE = "HYDRA_FULL_ERROR"
_USER_FULL_ERROR = {key: value for key, value in os.environ.items() if key == _FULL_ERROR_VARIABLE}


def run_entry_point(task: Callable[[DictConfig], ExitCode]) -> None:
    """Compose the configuration from the command line, run `task` on it, and exit with its code.

    With `--frozen DIR`, which a launcher writes, load the configuration from DIR instead. Exit with
    code 2 after a configuration error and with 130 after an uncaught Ctrl-C. HYDRA_FULL_ERROR=1
    shows the traceback instead of the message.
    """
    if _get_frozen_config_dir() is not None:
        sys.exit(_run_frozen_config(task))
    show_traceback = _USER_FULL_ERROR.get(_FULL_ERROR_VARIABLE, "0") not in ("", "0")
    codes: list[ExitCode] = []
    is_submitted = False

    @functools.wraps(task)  # Hydra names the job after the innermost function's file
    def run_task(config: DictConfig) -> None:
        nonlocal is_submitted
        codes.append(ExitCode.FAILED)
        try:
            _validate_multirun()
            if _is_submitted_by_launcher():
                codes.pop()
                is_submitted = True
                return
            codes[-1] = task(config)
        except (ConfigError, OmegaConfBaseException) as error:
            if show_traceback:
                raise
            codes[-1] = _print_errors(error)

    _limit_openmp_waiting()
    try:
        extensions.load_from_command_line(sys.argv[1:])
    except ConfigError as error:
        if show_traceback:
            raise
        sys.exit(_print_errors(error))
    compose.register_configs()
    main = hydra.main(
        version_base="1.3", config_path=str(find_package_dir("conf")), config_name="config"
    )
    try:
        hydra_config_security.refuse_rerun(sys.argv[1:])
        if {"-m", "--multirun"} & {*sys.argv}:
            validate_distinct_keys(sys.argv[1:])
        if any(word == "-i" or word.startswith("--info") for word in sys.argv[1:]):
            launcher_plugins.register_launchers()  # Hydra lists its plugins
        sys.argv[1:] = select_help_text(sys.argv[1:])
        with _raise_hydra_errors():
            main(run_task)()
            if is_submitted:
                sys.argv.append("hydra.mode=MULTIRUN")
                main(run_task)()
    except KeyboardInterrupt:
        print("\nhlat: interrupted; complete checkpoints are kept", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if show_traceback or codes:
            raise
        sys.exit(_print_errors(error))  # composition has failed
    if any(codes):
        sys.exit(next(code for code in codes if code))


def select_help_text(arguments: list[str]) -> list[str]:
    """Return the arguments of a command line; those with --help select the help text of hlat.

    Hydra accepts overrides in one place only, before or after its flags.
    """
    if not {"-h", "--help"} & {*arguments}:
        return arguments
    OmegaConf.register_new_resolver("component_kinds", format_kinds, replace=True)
    is_override = ["=" in word and not word.startswith("-") for word in arguments]
    start = is_override.index(True) if True in is_override else len(arguments)
    return [*arguments[:start], "hydra/help=hlat", *arguments[start:]]


def get_task_overrides() -> list[str]:
    """Return the overrides that the user typed, with interpolations unresolved."""
    if (directory := _get_frozen_config_dir()) is not None:
        return frozen_config.load_command_line(directory).overrides
    typed = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(typed, list)
    return [str(override) for override in typed]


def format_extend_command(overrides: list[str], run_name: str, changes: dict[str, int]) -> str:
    """Return the command that continues a finished run with `changes`, under its own name.

    The name is given, since a default name depends on the schedule.
    """
    kept = [word for word in overrides if word.lstrip("+").partition("=")[0] not in changes]
    if not any(word.startswith("run.name=") for word in kept):
        simple = re.fullmatch(r"[\w.-]+", run_name)
        kept.append(f"run.name={run_name}" if simple else f"run.name={json.dumps(run_name)}")
    return format_resume_command([*kept, *(f"{key}={value}" for key, value in changes.items())])


def format_resume_command(overrides: list[str]) -> str:
    """Return the command that resumes the run."""
    if (directory := _get_frozen_config_dir()) is not None:
        flags = frozen_config.load_command_line(directory).flags
        return shlex.join(["hlat", "train", *flags, *overrides])
    return shlex.join([*_find_command(), "train", *_get_config_dir_flags(), *overrides])


def format_repeat_command(key: str, value: str) -> str:
    """Return the command line of this process, with a value for a key that has a default."""
    words = sys.argv[1:]
    if not any(word.startswith(f"{key}=") for word in words):
        words = [*words, f"{key}={value}"]
    return shlex.join([*_find_command(), "train", *words])


def build_command(overrides: list[str], module: str = "hlat.train") -> list[str]:
    """Return the command that runs `module` with the configuration of this process."""
    if (directory := _get_frozen_config_dir()) is not None:
        return build_frozen_command(sys.executable, directory, module)
    return [sys.executable, "-m", module, *_get_config_dir_flags(), *overrides]


def build_config_dir_flags(hydra_config: HydraConf | DictConfig) -> list[str]:
    """Return the `--config-dir` flags of the command line."""
    sources = hydra_config.runtime.config_sources
    paths = [source.path for source in sources if source.provider == "command-line"]
    return [word for path in paths for word in ("--config-dir", path)]


def build_frozen_command(python: str, directory: Path, module: str = "hlat.train") -> list[str]:
    """Return the command that runs `module` with the configuration frozen in `directory`."""
    return [*build_module_command(python, module), frozen_config.FROZEN_FLAG, str(directory)]


def build_module_command(python: str, module: str) -> list[str]:
    """Return the command that runs `module`, from the code snapshot if this process runs one."""
    snapshot = find_code_snapshot()
    return [python, "-m", module] if snapshot is None else [python, str(snapshot), module]


def get_user_environment() -> dict[str, str]:
    """Return the environment without the change that this module made for Hydra."""
    environment = {k: value for k, value in os.environ.items() if k != _FULL_ERROR_VARIABLE}
    return environment | _USER_FULL_ERROR


def _get_frozen_config_dir() -> Path | None:
    """Return the directory of `--frozen DIR`, or None if the configuration is composed."""
    is_frozen = sys.argv[1:2] == [frozen_config.FROZEN_FLAG] and len(sys.argv) == 3
    return Path(sys.argv[2]) if is_frozen else None


def _limit_openmp_waiting() -> None:
    """Limit the spinning of waiting OpenMP threads to 10 us, unless the user has set a policy.

    OpenMP reads the variables once, when it is loaded. Threads that spin longer slow a process that
    shares their cores, by up to ten times; threads that sleep at once delay each operator
    (benchmarks/step/README.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _run_frozen_config(task: Callable[[DictConfig], ExitCode]) -> ExitCode:
    directory = _get_frozen_config_dir()
    assert directory is not None
    _limit_openmp_waiting()
    try:
        return task(frozen_config.load_frozen_config(directory))
    except (ConfigError, OmegaConfBaseException) as error:
        return _print_errors(error)


def _is_submitted_by_launcher() -> bool:
    """Return True if a launcher is set for a single run, which Hydra itself would ignore."""
    composed = HydraConfig.get()
    return (
        composed.mode is RunMode.RUN
        and composed.runtime.choices["hydra/launcher"] not in compose.LOCAL_LAUNCHERS
    )


def _validate_multirun() -> None:
    """Raise ConfigError for a sweep without `-m`, which would train one ordinary run."""
    composed = HydraConfig.get()
    if composed.mode is RunMode.RUN and (missing := find_missing_axes(composed)):
        raise ConfigError(
            f"the sweep's parameters {', '.join(missing)} are not set; add -m to sweep them"
        )


def find_missing_axes(hydra_config: HydraConf | DictConfig) -> list[str]:
    """Return the axes of a study that the overrides of a run do not set."""
    axes = getattr(hydra_config.sweeper, "params", None) or {}
    given = {override.partition("=")[0] for override in hydra_config.overrides.task}
    return sorted(set(axes) - given)


def _print_errors(error: Exception) -> ExitCode:
    for problem in convert_hydra_error(error).problems:
        print(f"hlat: {problem}", file=sys.stderr)
    return ExitCode.CONFIGURATION


def _get_config_dir_flags() -> list[str]:
    return build_config_dir_flags(HydraConfig.get()) if HydraConfig.initialized() else []


def _find_command() -> list[str]:
    """Return `hlat` if it is the program of this interpreter, else a path that starts it."""
    program = Path(sys.executable).with_name("hlat")
    found = shutil.which("hlat")
    if found is not None and Path(found).resolve() == program.resolve():
        return ["hlat"]
    path = program if program.is_file() else Path(sys.executable)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return [str(path)] if path.name == "hlat" else [str(path), "-m", "hlat"]


@contextmanager
def _raise_hydra_errors() -> Iterator[None]:
    """Make Hydra raise its errors instead of printing them and exiting with 1."""
    os.environ[_FULL_ERROR_VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FULL_ERROR_VARIABLE)
        os.environ.update(_USER_FULL_ERROR)
