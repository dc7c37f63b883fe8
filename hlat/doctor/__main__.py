"""Check the numerics of a configuration: `hlat doctor`.

    compose -> reduce the model -> start the layout's processes -> device checks -> numerical checks

The command takes the overrides of `hlat train` and checks that layout, precision recipe, engine and
device with a smaller model, in about a minute, before the run.
"""

import sys
from collections.abc import Sequence

from omegaconf import DictConfig

from hlat.config import entry_point
from hlat.config.argument_parser import run_and_exit
from hlat.config.config_errors import ExitCode, raise_config_errors
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.distributed import exit_record, rank_environment
from hlat.doctor.reduced_config import reduce_config, to_single_process
from hlat.engine.neuron import neuron_packages
from hlat.tracking import run_directory

_SIGINT_EXIT_CODE = 130
_CHECKS_PREFIX = "checks="
_SINGLE_PROCESS_CHECKS = {"coordinates"}

_HELP = """\
usage: hlat doctor [OVERRIDE ...]

Check the numerics of a configuration: its layout, recipe, engine and device, with a small model.

examples:
  hlat doctor
  hlat doctor parallelism.tp=2 parallelism.pp=2 precision=mixed
  hlat doctor checks=[gradients,optimizer] model=qwen3_tiny
  hlat doctor checks=coordinates parametrization=mup model.parametrization.base_width=256
  torchrun --nproc-per-node=8 -m hlat.doctor parallelism.tp=8

Overrides are those of hlat train. checks= selects checks (docs/doctor.md); coordinates, the check
of a parametrization over widths and depths, runs only if it is named. The result is printed and
written to <run.root>/doctor/<run.name>/doctor.json. Exit codes: 0 healthy; 2 configuration error;
3 a check failed; 4 this machine is unhealthy. See docs/doctor.md."""


def main() -> None:
    """Check the configuration of the command line, and exit."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(_HELP)
        return
    names = _take_check_names()
    entry_point.run_entry_point(lambda composed: run_doctor(composed, names))


def _take_check_names() -> list[str]:
    """Remove `checks=` from the command line, and return the names of its value."""
    words = [word for word in sys.argv[1:] if word.startswith(_CHECKS_PREFIX)]
    sys.argv[1:] = [word for word in sys.argv[1:] if word not in words]
    values = words[-1].removeprefix(_CHECKS_PREFIX).strip("[]") if words else ""
    return [name.strip() for name in values.split(",") if name.strip()]


def _validate_check_names(names: Sequence[str]) -> None:
    """Raise ConfigError for names of no check."""
    from hlat.doctor.check_runner import CHECKS, OPTIONAL_CHECKS

    known = [*CHECKS, *OPTIONAL_CHECKS]
    problems = [
        f"checks={name}: there is no such check; use one of {', '.join(known)}"
        for name in names
        if name not in known
    ]
    raise_config_errors(problems)


def run_doctor(composed: DictConfig, names: Sequence[str] = ()) -> ExitCode:
    """Check the composed configuration; return the exit code."""
    neuron_packages.validate_torch_release()
    _validate_check_names(names)
    config = reduce_config(resolve_config(composed), rank_environment.read_rank_info().world_size)
    if names and {*names} <= _SINGLE_PROCESS_CHECKS:
        config = to_single_process(config)
    if not rank_environment.must_launch_workers(config):
        return exit_record.run_with_exit_record(lambda: run_worker(config, names))
    from hlat.recovery import supervisor

    code = supervisor.launch_workers(
        config,
        [
            *entry_point.build_command(entry_point.get_task_overrides(), "hlat.doctor"),
            *([f"{_CHECKS_PREFIX}[{','.join(names)}]"] if names else []),
        ],
    )
    if code is ExitCode.PREEMPTED:  # by a signal; the doctor has no state to save
        sys.exit(_SIGINT_EXIT_CODE)
    return code


def run_worker(config: Config, names: Sequence[str] = ()) -> ExitCode:
    """Run the named checks, or the default ones, on this rank; return the exit code."""
    from hlat.doctor import check_runner
    from hlat.engine.engine_factory import create_engine

    with run_directory.acquire_run_dir(
        config.run, rank_environment.read_rank_info().is_rank0
    ) as run_dir:
        return check_runner.run_all_checks(config, run_dir, create_engine(config), names)


if __name__ == "__main__":
    run_and_exit(main)
