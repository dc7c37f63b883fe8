"""Check the numerics of a configuration: `hlat doctor`.

    compose -> reduce the model -> start the layout's processes -> device checks -> numerical checks

The command takes the overrides of `hlat train` and checks that layout, precision recipe, engine and
device with a smaller model, in about a minute, before the run.
"""

import sys

from omegaconf import DictConfig

from hlat.config import entry_point
from hlat.config.argument_parser import run_and_exit
from hlat.config.config_errors import ExitCode
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.distributed import exit_record, rank_environment
from hlat.doctor.reduced_config import reduce_config
from hlat.engine.neuron import neuron_packages
from hlat.tracking import run_directory

_SIGINT_EXIT_CODE = 130

_HELP = """\
usage: hlat doctor [OVERRIDE ...]

Check the numerics of a configuration: its layout, recipe, engine and device, with a small model.

examples:
  hlat doctor
  hlat doctor parallelism.tp=2 parallelism.pp=2 precision=mixed
  torchrun --nproc-per-node=8 -m hlat.doctor parallelism.tp=8

Overrides are those of hlat train. The result is printed and written to
<run.root>/doctor/<run.name>/doctor.json. Exit codes: 0 healthy; 2 configuration error; 3 a check
failed; 4 this machine is unhealthy. See docs/doctor.md."""


def main() -> None:
    """Check the configuration of the command line, and exit."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(_HELP)
        return
    entry_point.run_entry_point(run_doctor)


def run_doctor(composed: DictConfig) -> ExitCode:
    """Check the composed configuration; return the exit code."""
    neuron_packages.validate_torch_release()
    config = reduce_config(resolve_config(composed), rank_environment.read_rank_info().world_size)
    if not rank_environment.must_launch_workers(config):
        return exit_record.run_with_exit_record(lambda: run_worker(config))
    from hlat.recovery import supervisor

    code = supervisor.launch_workers(
        config,
        entry_point.build_command(sys.executable, entry_point.get_task_overrides(), "hlat.doctor"),
    )
    if code is ExitCode.PREEMPTED:  # by a signal; the doctor has no state to save
        sys.exit(_SIGINT_EXIT_CODE)
    return code


def run_worker(config: Config) -> ExitCode:
    """Run all checks on this rank; return the exit code."""
    from hlat.doctor import check_runner
    from hlat.engine.engine_factory import create_engine

    with run_directory.acquire_run_dir(
        config.run, rank_environment.read_rank_info().is_rank0
    ) as run_dir:
        return check_runner.run_all_checks(config, run_dir, create_engine(config))


if __name__ == "__main__":
    run_and_exit(main)
