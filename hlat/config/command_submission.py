"""Submission of averages and reports with the launcher that the command line selects."""

from collections.abc import Sequence
from pathlib import Path

from hlat.config import extensions
from hlat.config.command_job import CommandJob, build_job_dir
from hlat.config.compose import compose_config, instantiate_launcher
from hlat.config.resolve import resolve_config


def submit_command(
    command: str, base_dir: Path, arguments: Sequence[str], launcher_overrides: Sequence[str]
) -> bool:
    """Submit a command as a job on one node; return False if it runs on this machine.

    Args:
        command: Name of the command.
        base_dir: Directory of the run or campaign, for the files of the job.
        arguments: Arguments of the command.
        launcher_overrides: Overrides such as `hydra/launcher=slurm`.

    Raises:
        ConfigError: Unknown launcher or setting, the scheduler rejects the job, or its machine does
            not have the extensions.
    """
    if not launcher_overrides or (chosen := instantiate_launcher(launcher_overrides)) is None:
        return False
    launcher, directory = chosen
    extensions.validate_job_files(arguments, launcher.shares_file_system)
    job_dir = build_job_dir(base_dir, command, arguments)
    config = resolve_config(compose_config([f"run.name={command}"]))
    job = CommandJob(command, job_dir.name, str(base_dir), job_dir, tuple(arguments), config)
    launcher.submit_command(job, directory)
    return True
