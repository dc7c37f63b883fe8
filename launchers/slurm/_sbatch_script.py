"""Settings of the Slurm launcher, and the sbatch script (#SBATCH) and srun options of a job.

Every value of the user is quoted as one argument, or rejected.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlat.config.bounds import bounded, find_bounds_violations
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.jobs import slurm_commands
from hlat.jobs.submission import Submission

from .._job_spec import MAX_OPEN_FILES, JobSpec
from .._pruning_settings import PruningConfig

_TIME_LIMIT = re.compile(r"\d+|(\d+-)?\d+(:\d+){1,2}|\d+-\d+")
"""Format of sbatch: minutes, minutes:seconds, days-hours:minutes ..."""
_OPTION_NAME = re.compile(r"[a-z][a-z0-9-]*")
_RESERVED_OPTIONS = {
    "array": "points with equal resources are an array; set hydra.launcher.jobs",
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
    """Seconds before the time limit at which the run saves a checkpoint; longer than a save and
    shorter than the time limit. Slurm may be a minute early. A run that has not stopped after 80%
    of this time is requeued."""
    constraint: str | None = None
    """Required node features."""
    exclusive: bool = True
    """Allocate whole nodes with all of their memory."""
    container_image: str | None = None
    """Container image of the run (Pyxis, or another plugin that adds the option to srun)."""
    jobs: int | None = bounded(None, min=1)
    """Maximum number of concurrent jobs of a job array, which has the points of a sweep with equal
    resources; null: no limit."""
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
    after: Any = None
    """Directories of runs or commands, one or a list. Their jobs must succeed before this one
    starts. An evaluation with step=N of the same run starts when that checkpoint exists."""
    dry_run: bool = False
    """Write and print the batch scripts, and submit nothing. Needs no Slurm."""

    def format_array(self, tasks: Sequence[int]) -> str:
        """Return the value of `sbatch --array` for sorted tasks."""
        return slurm_commands.format_array(tasks, self.jobs)


def parse_time_limit(text: str) -> int:
    """Return a time limit in sbatch's format in seconds; 0: no limit."""
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # One or two parts begin with hours after days, and with minutes otherwise
    aligned = parts if dash or len(parts) == 3 else [0, *parts]
    hours, minutes, seconds = [*aligned, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def validate_slurm_settings(settings: SlurmLauncherConfig) -> None:
    """Raise ConfigError if Slurm would reject or misread the settings."""
    problems = [*find_bounds_violations(settings, "hydra.launcher.")]
    if settings.time is not None and not _TIME_LIMIT.fullmatch(settings.time):
        problems.append(
            f"hydra.launcher.time={settings.time!r} is not a time limit; write minutes, or "
            "2-12:00:00"
        )
    elif settings.time is not None and 0 < parse_time_limit(settings.time) <= settings.signal_s:
        problems.append(
            f"hydra.launcher.time={settings.time} is {parse_time_limit(settings.time)} s, and the "
            f"run stops hydra.launcher.signal_s={settings.signal_s} s before it: no step would be "
            "trained; increase time or reduce signal_s"
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
    raise_config_errors(problems)


def build_sbatch_parameters(
    job: JobSpec, settings: SlurmLauncherConfig, log: Path, working_directory: Path
) -> dict[str, Any]:
    """Return submitit's parameters of a job with one task per node.

    Raises:
        ConfigError: A value contains control characters, such as line breaks.
    """
    options: dict[str, Any] = {
        "chdir": str(working_directory),
        "output": _format_output(log.parent, log.name),
        "requeue": True,
        "signal": f"B:USR2@{settings.signal_s}",  # to the batch script only
    }
    if settings.exclusive:
        options["mem"] = 0
    if job.num_gpus and not {"gres", "gpus", "gpus-per-node"} & settings.options.keys():
        options["gpus_per_node"] = job.num_gpus
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


def build_array_parameters(
    parameters: dict[str, Any], array_dir: Path, name: str
) -> dict[str, Any]:
    """Return submitit's parameters of a job array from those of one of its tasks.

    Each task writes its log to its submission directory, by a link in `array_dir`.
    """
    output = _format_output(array_dir, "%a/%A_%a.log")
    options = parameters["additional_parameters"] | {"output": output}
    return parameters | {"job_name": name, "additional_parameters": options}


def _format_output(directory: Path, pattern: str) -> str:
    return str(directory).replace("%", "%%") + f"/{pattern}"


def build_command(program: Sequence[str], submission_dir: Path) -> str:
    """Return the command of a batch script; `program` runs a module of the code archive."""
    return f"exec {shlex.join([*program, 'hlat.jobs.attempt', str(submission_dir)])}"


def build_array_command(program: Sequence[str], array_dir: Path) -> str:
    """Return the command of the batch script of a job array."""
    return f'{build_command(program, array_dir)}/"${slurm_commands.ARRAY_TASK_ENV}"'


def build_sbatch_script(parameters: dict[str, Any], directory: Path, command: str) -> str:
    """Return the text of the sbatch script; submitit formats its options."""
    from submitit.slurm.slurm import _make_sbatch_string

    text: str = _make_sbatch_string(command, directory, **parameters)
    return text


def build_submission(
    job: JobSpec,
    settings: SlurmLauncherConfig,
    commands: list[list[str]],
    *,
    trains: bool = False,
    scores: Path | None = None,
    after: str | None = None,
    verb: str = "compiles",
) -> Submission:
    """Return the commands and srun options of an attempt; see `Submission` for the last four."""
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
        signal_s=settings.signal_s,
        after=after,
        scores=None if scores is None else str(scores),
        verb="trains" if trains else verb,
    )
