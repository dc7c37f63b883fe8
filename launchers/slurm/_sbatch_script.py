"""Settings of the Slurm launcher, and the sbatch script and srun options of a job.

Every value of the user is quoted as one argument, or rejected.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlat.config.bounds import bounded, find_bounds_violations
from hlat.config.config_errors import ConfigError
from hlat.jobs.submission import Submission, SubmissionDir

from .._job_spec import MAX_OPEN_FILES, JobSpec
from .._sweep_points import PruningConfig

_TIME_LIMIT = re.compile(r"\d+|(\d+-)?\d+(:\d+){1,2}|\d+-\d+")
"""Format of sbatch: minutes, minutes:seconds, days-hours:minutes ..."""
_OPTION_NAME = re.compile(r"[a-z][a-z0-9-]*")
_RESERVED_OPTIONS = {
    "array": "each point is a separate job",
    "chdir": "the job runs in the directory of the submission command",
    "nodes": "set hardware.nodes",
    "ntasks": "one per node, which starts hardware.processes_per_node processes",
    "ntasks-per-node": "one, which starts hardware.processes_per_node processes",
    "output": "the log is in the submission directory, where hlat jobs finds it",
    "signal": "set hydra.launcher.signal_s",
    "no-requeue": "set hydra.launcher.max_attempts=1",
}
"""Options that the launcher sets, with the reason or the setting to use."""


@dataclass
class SlurmLauncherConfig(PruningConfig):
    """Settings of Slurm jobs."""

    _target_: str = "hydra_plugins.hlat_launchers.slurm._slurm_launcher.SlurmLauncher"
    partition: str | None = None
    """Partition of the nodes; null: the cluster's default."""
    account: str | None = None
    """Account to charge."""
    time: str | None = None
    """Time limit of one attempt, in sbatch's format; a longer run is requeued and resumes. null:
    the partition's."""
    signal_s: int = bounded(300, min=1)
    """Seconds before the time limit at which the run saves a checkpoint; longer than a save takes.
    Slurm may be a minute early."""
    constraint: str | None = None
    """Required node features."""
    exclusive: bool = True
    """Allocate whole nodes with all of their memory."""
    container_image: str | None = None
    """Container image of the run (Pyxis, or another plugin that adds the option to srun)."""
    max_attempts: int = bounded(100, min=1)
    """Maximum number of attempts of a job (HLAT's own agent: 100)."""
    precompile: bool = True
    """Compile the graphs of engine=nxd on Trainium in a separate job before the run."""
    python: str | None = None
    """Python on the nodes; null: the current one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further sbatch options by long name; true for options without a value."""
    srun_options: dict[str, Any] = field(default_factory=dict)
    """Further srun options, in the same format."""


def validate_slurm_settings(settings: SlurmLauncherConfig) -> None:
    """Raise ConfigError if Slurm would reject or misread the settings."""
    problems = [*find_bounds_violations(settings, "hydra.launcher.")]
    if settings.time is not None and not _TIME_LIMIT.fullmatch(settings.time):
        problems.append(
            f"hydra.launcher.time={settings.time!r} is not a time limit; write minutes, or "
            "2-12:00:00"
        )
    for name in ("options", "srun_options"):
        for option, value in getattr(settings, name).items():
            key = f"hydra.launcher.{name}.{option}"
            if not _OPTION_NAME.fullmatch(option):
                problems.append(f"{key} is not the long name of an option, such as mail-user")
            elif option in _RESERVED_OPTIONS:
                problems.append(f"{key}: {_RESERVED_OPTIONS[option]}")
            elif not isinstance(value, (str, int, float)):
                problems.append(
                    f"{key}={value} is neither text nor a number; use true for an option without "
                    "a value"
                )
    if problems:
        raise ConfigError(*problems)


def build_sbatch_parameters(
    job: JobSpec, settings: SlurmLauncherConfig, log: Path, working_directory: Path
) -> dict[str, Any]:
    """Return submitit's parameters of a job with one task per node.

    Raises:
        ConfigError: A value contains control characters, such as line breaks.
    """
    options: dict[str, Any] = {
        "chdir": str(working_directory),
        "output": str(log.parent).replace("%", "%%") + f"/{log.name}",
        "requeue": True,
        "signal": f"B:USR2@{settings.signal_s}",  # to the batch script only
    }
    if settings.exclusive:
        options["mem"] = 0
    for name, value in settings.options.items():
        if value is not False:  # submitit's names, so that no option is given twice
            options[name if name == "open-mode" else name.replace("-", "_")] = value
    parameters: dict[str, Any] = {
        "job_name": job.name,
        "nodes": job.num_nodes,
        "ntasks_per_node": 1,
        "partition": settings.partition,
        "account": settings.account,
        "time": settings.time,
        "constraint": settings.constraint,
        "exclusive": settings.exclusive or None,
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": ["trap '' USR2  # until hlat.jobs.attempt installs its handler"],
        "additional_parameters": options,
    }
    for key, value in (parameters | options).items():
        if isinstance(value, str) and not value.isprintable():
            raise ConfigError(f"{key}={value!r} has characters that an sbatch script cannot have")
    return parameters


def build_script_command(submission_dir: SubmissionDir, program: Sequence[str]) -> str:
    """Return the command of the batch script; `program` runs a module of the code snapshot."""
    return f"exec {shlex.join([*program, 'hlat.jobs.attempt', str(submission_dir.path)])}"


def build_sbatch_script(
    parameters: dict[str, Any], submission_dir: SubmissionDir, program: Sequence[str]
) -> str:
    """Return the text of the sbatch script for Slurm's test; submitit writes and submits it."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = build_script_command(submission_dir, program)
    text: str = _make_sbatch_string(command, submission_dir.path, **parameters)
    return text


def build_submission(
    job: JobSpec,
    settings: SlurmLauncherConfig,
    commands: list[list[str]],
    *,
    trains: bool = False,
    scores: Path | None = None,
    after: str | None = None,
) -> Submission:
    """Return the commands and srun options of an attempt; see `Submission` for the last three."""
    image = settings.container_image
    options = {} if image is None else {"container-image": image}
    options |= settings.srun_options
    return Submission(
        nodes=job.num_nodes,
        commands=commands,
        trains=trains,
        environment=job.environment,
        options=[f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items()],
        max_attempts=settings.max_attempts,
        open_files=MAX_OPEN_FILES,
        after=after,
        scores=None if scores is None else str(scores),
    )
