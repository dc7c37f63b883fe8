"""What sbatch and srun are told of a job: settings, the text of a script, what each attempt starts.

Whatever a user has written is one word of a line, or refused.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlat.config.errors import ConfigError
from hlat.jobs.submission import Place, Submission

from ._job import OPEN_FILES, Job
from ._points import Pruning

_TIME = re.compile(r"\d+|(\d+-)?\d+(:\d+){1,2}|\d+-\d+")
"""As sbatch takes it: minutes, minutes:seconds, days-hours:minutes ..."""
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_OWNED = {
    "array": "each point is a job of its own",
    "chdir": "the job runs where it was sent from",
    "nodes": "set hardware.nodes",
    "ntasks": "one a node, which starts hardware.processes_per_node others",
    "ntasks-per-node": "one, which starts hardware.processes_per_node others",
    "output": "it goes to the folder of the submission, where hlat.jobs finds it",
    "signal": "set hydra.launcher.signal_s",
    "no-requeue": "set hydra.launcher.max_attempts=1",
}
"""Options that something else decides."""


@dataclass
class SlurmLauncherConfig(Pruning):
    """How jobs are sent to Slurm."""

    _target_: str = "hydra_plugins.hlat_launchers._slurm.SlurmLauncher"
    partition: str | None = None
    """Where the nodes are; null: the cluster's default."""
    account: str | None = None
    """Who pays."""
    time: str | None = None
    """Limit of one attempt, as sbatch takes it; a run that takes longer is started again and goes
    on. null: the partition's."""
    signal_s: int = 300
    """Seconds before the limit at which the run is asked to save; more than a save takes. Slurm may
    be a minute early."""
    constraint: str | None = None
    """Features that nodes must have."""
    exclusive: bool = True
    """Take whole nodes, with all of their memory."""
    container_image: str | None = None
    """Image in which the run is started (Pyxis, or another plugin that gives srun the option)."""
    max_attempts: int = 100
    """Times that a job may be started (HLAT's own agent: 100)."""
    precompile: bool = True
    """Compile what engine=nxd executes on Trainium in a job before, which the run's waits for."""
    python: str | None = None
    """Python on the nodes; null: the one that runs this."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch by their long names; true for those that take no value."""
    srun_options: dict[str, Any] = field(default_factory=dict)
    """The same of srun."""


def refuse_settings(settings: SlurmLauncherConfig) -> None:
    """Return if the settings are such that Slurm reads them as they are meant.

    Raises:
        ConfigError: They are not.
    """
    problems = []
    if settings.time is not None and not _TIME.fullmatch(settings.time):
        problems.append(
            f"hydra.launcher.time={settings.time!r} is no limit; write minutes, or 2-12:00:00"
        )
    for key, least in (("signal_s", 1), ("max_attempts", 1)):
        if (number := getattr(settings, key)) < least:
            problems.append(f"hydra.launcher.{key}={number} is too small; use {least} or more")
    for name in ("options", "srun_options"):
        for key, value in getattr(settings, name).items():
            full = f"hydra.launcher.{name}.{key}"
            if not _OPTION.fullmatch(key):
                problems.append(f"{full} is not the long name of an option, such as mail-user")
            elif key in _OWNED:
                problems.append(f"{full}: {_OWNED[key]}")
            elif not isinstance(value, (str, int, float)):
                problems.append(f"{full}={value} is no text or number; or true, if it takes none")
    if problems:
        raise ConfigError(*problems)


def parameters(
    job: Job, settings: SlurmLauncherConfig, log: Path, working_directory: Path
) -> dict[str, Any]:
    """What submitit is told of a job: one task a node, which starts and watches all others.

    Raises:
        ConfigError: A value has line breaks or the like, which would end the line that it is in.
    """
    options: dict[str, Any] = {
        "chdir": str(working_directory),
        "output": str(log.parent).replace("%", "%%") + f"/{log.name}",
        "requeue": True,
        "signal": f"B:USR2@{settings.signal_s}",  # to the script alone, which knows what to do
        **({"mem": 0} if settings.exclusive else {}),
        **{_submitits(key): value for key, value in settings.options.items() if value is not False},
    }
    found: dict[str, Any] = {
        "job_name": job.name,
        "nodes": job.nodes,
        "ntasks_per_node": 1,
        "partition": settings.partition,
        "account": settings.account,
        "time": settings.time,
        "constraint": settings.constraint,
        "exclusive": settings.exclusive or None,
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": ["trap '' USR2  # until the program below takes care of it"],
        "additional_parameters": options,
    }
    for key, value in (found | options).items():
        if isinstance(value, str) and not value.isprintable():
            raise ConfigError(f"{key}={value!r} has characters that an sbatch script cannot have")
    return found


def body(place: Place, program: Sequence[str]) -> str:
    """The line of the script that does it all.

    Args:
        place: What is sent.
        program: Words that run a module of the copy.
    """
    return f"exec {shlex.join([*program, 'hlat.jobs.attempt', str(place.folder)])}"


def script(parameters: dict[str, Any], place: Place, program: Sequence[str]) -> str:
    """The text that sbatch is given."""
    from submitit.slurm.slurm import _make_sbatch_string

    text: str = _make_sbatch_string(body(place, program), place.folder, **parameters)
    return text


def submission(
    job: Job,
    settings: SlurmLauncherConfig,
    commands: list[list[str]],
    *,
    trains: bool = False,
    scores: Path | None = None,
    after: str | None = None,
) -> Submission:
    """What each attempt of a job starts; the last three are as of `Submission`."""
    image = settings.container_image
    options = {} if image is None else {"container-image": image}
    options |= settings.srun_options
    return Submission(
        nodes=job.nodes,
        commands=commands,
        trains=trains,
        environment=job.environment,
        options=[*map(_flag, options.items())],
        max_attempts=settings.max_attempts,
        open_files=OPEN_FILES,
        after=after,
        scores=None if scores is None else str(scores),
    )


def _flag(option: tuple[str, Any]) -> str:
    name, value = option
    return f"--{name}" if value is True else f"--{name}={value}"


def _submitits(key: str) -> str:
    """The name by which submitit knows an option of sbatch, so that it is not given twice."""
    return key if key == "open-mode" else key.replace("-", "_")
