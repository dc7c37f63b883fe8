"""Jobs with all files written: single jobs, and job arrays of points with equal resources."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.jobs import slurm_commands
from hlat.jobs.job_array import ARRAYS_DIR, SCRIPT_FILE, JobArray, create_numbered_dir
from hlat.jobs.submission import (
    Submission,
    SubmissionDir,
    create_submission_dir,
    submit_after_prerequisites,
)

from ._code_archive import CodeArchive
from ._sbatch_script import (
    SlurmLauncherConfig,
    build_array_command,
    build_array_parameters,
    build_command,
    build_sbatch_script,
)

SCRIPTS_DIR = "dry_run"
"""Directory in the sweep directory for the scripts of dry runs."""
_MAX_TASKS = 1000
"""Maximum number of tasks of an array with Slurm's default MaxArraySize."""


@dataclass(frozen=True)
class PreparedTask:
    """A job, or a task of a job array, with its parameters of sbatch.

    Attributes:
        label: Beginning of error messages.
        program: Command that runs a module of the code archive.
        prerequisite: Job that must succeed first, if any.
    """

    label: str
    submission_dir: SubmissionDir
    submission: Submission
    parameters: dict[str, Any]
    program: list[str]
    prerequisite: "PreparedTask | None" = None

    @property
    def job_id(self) -> str | None:
        """Job id; None before the submission."""
        return self.submission_dir.last_job_id

    @property
    def resources(self) -> str:
        """Text that is equal for tasks that can be in one array."""
        distinct = ("job_name", "additional_parameters")
        shared = {key: value for key, value in self.parameters.items() if key not in distinct}
        options = self.parameters["additional_parameters"] | {"output": None}
        has_prerequisite = self.prerequisite is not None
        return json.dumps([shared, options, self.program, has_prerequisite], sort_keys=True)

    def build_receipt(self) -> dict[str, Any]:
        """Return job id, run directory and log of a submitted job, and the job before it."""
        assert self.job_id is not None, "submitted before"
        receipt = {"job": self.job_id, "run_folder": str(self.submission_dir.run_dir)}
        if self.prerequisite is not None:
            receipt["after"] = str(self.prerequisite.job_id)
        return receipt | {"log": str(self.submission_dir.build_log_path(self.job_id))}


class SubmissionFiles:
    """Directories of a submission command; those without a submitted job are removed at the end.

    Attributes:
        directory: Sweep directory, for the job arrays.
        code: Archive of the program.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.code = Path.cwd() / directory, CodeArchive()
        self._submission_dirs: list[SubmissionDir] = []
        self._arrays: list[JobArray] = []
        self._archives: list[Path] = []

    def __enter__(self) -> "SubmissionFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        unused = [d for d in self._submission_dirs if d.last_job_id is None]
        for submission_dir in unused:
            shutil.rmtree(submission_dir.path)
            with suppress(OSError):  # not empty
                submission_dir.path.parent.rmdir()
                submission_dir.run_dir.rmdir()
        for array in self._arrays:
            if not array.receipts.read_rows():
                shutil.rmtree(array.path)
                with suppress(OSError):  # not empty
                    array.path.parent.rmdir()
        if len(unused) == len(self._submission_dirs):
            for path in self._archives:
                path.unlink(missing_ok=True)

    def create_submission_dir(self, run_dir: Path) -> SubmissionDir:
        """Create a submission directory of a run."""
        self._submission_dirs.append(create_submission_dir(Path.cwd() / run_dir))
        return self._submission_dirs[-1]

    def create_array(self) -> JobArray:
        """Create the directory of a job array."""
        self._arrays.append(JobArray(create_numbered_dir(self.directory / ARRAYS_DIR)))
        return self._arrays[-1]

    def write_code(self, path: Path) -> None:
        """Write the archive of the program, if it does not exist."""
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.code.write(path)
            self._archives.append(path)


def submit_tasks(tasks: Sequence[PreparedTask]) -> None:
    """Submit prepared tasks of one job array, or a single job, after their prerequisites.

    If sbatch fails for an array, submit each half, as there may be a limit on the number of jobs.

    Raises:
        ConfigError: sbatch fails for a single job; earlier ones are submitted.
    """
    try:
        submit_after_prerequisites([task.submission_dir for task in tasks])
    except slurm_commands.UnknownJobError:
        raise  # a second submission could start the tasks twice
    except ConfigError:
        if len(tasks) == 1:
            raise
        middle = (len(tasks) + 1) // 2
        submit_tasks(tasks[:middle])
        submit_tasks(tasks[middle:])


def prepare_jobs(
    tasks: Sequence[PreparedTask], files: SubmissionFiles, settings: SlurmLauncherConfig
) -> list[list[PreparedTask]]:
    """Write the files of one job array for all tasks with equal resources, and of single jobs.

    Returns:
        The tasks of each array, and a list of one task for each single job.

    Raises:
        ConfigError: Slurm rejects a job.
    """
    groups = [*_group_tasks(tasks)]
    for group in groups:
        _prepare_job(group, files, settings)
    return groups


def _group_tasks(tasks: Sequence[PreparedTask]) -> Iterator[list[PreparedTask]]:
    groups: dict[str, list[PreparedTask]] = {}
    for task in tasks:
        groups.setdefault(task.resources, []).append(task)
    for group in groups.values():
        for first in range(0, len(group), _MAX_TASKS):
            yield group[first : first + _MAX_TASKS]


def write_scripts(
    tasks: Sequence[PreparedTask], files: SubmissionFiles, settings: SlurmLauncherConfig
) -> list[Path]:
    """Write the batch scripts of all jobs to the sweep directory, each after its prerequisite.

    `sbatch` is not called. The scripts refer to files that only a submission writes.
    """
    directory = create_numbered_dir(files.directory / SCRIPTS_DIR)
    paths = []
    for group in _group_tasks(tasks):
        prerequisites = [task.prerequisite for task in group if task.prerequisite is not None]
        for jobs in (prerequisites, group):
            if jobs:
                paths.append(directory / f"{len(paths)}.sh")
                paths[-1].write_text(_build_script(jobs, files, settings).text)
    return paths


@dataclass(frozen=True)
class _Script:
    """The batch script of a job or job array, and its directory."""

    array: JobArray | None
    directory: Path
    text: str


def _build_script(
    tasks: Sequence[PreparedTask], files: SubmissionFiles, settings: SlurmLauncherConfig
) -> _Script:
    first, array = tasks[0], None
    directory, parameters = first.submission_dir.path, first.parameters
    command = build_command(first.program, directory)
    if len(tasks) > 1:
        array = files.create_array()
        directory = array.path
        parameters = build_array_parameters(parameters, directory, files.directory.name)
        parameters["additional_parameters"]["array"] = settings.format_array(range(len(tasks)))
        command = build_array_command(first.program, directory)
    if first.prerequisite is not None:
        options = {"kill_on_invalid_dep": "yes"} | parameters["additional_parameters"]
        parameters = parameters | {"additional_parameters": options}
    return _Script(array, directory, build_sbatch_script(parameters, directory, command))


def _prepare_job(
    tasks: Sequence[PreparedTask], files: SubmissionFiles, settings: SlurmLauncherConfig
) -> None:
    """Write the files of a job or job array after Slurm has checked its script."""
    prerequisites = [task.prerequisite for task in tasks if task.prerequisite is not None]
    if prerequisites:
        _prepare_job(prerequisites, files, settings)
    script = _build_script(tasks, files, settings)
    if (reason := slurm_commands.find_rejection_reason(script.text)) is not None:
        others = f" and {len(tasks) - 1} others:" if len(tasks) > 1 else ""
        raise ConfigError(f"{tasks[0].label}{others} Slurm rejects the job: {reason}")
    array = script.array
    for index, task in enumerate(tasks):
        in_array = {} if array is None else {"array": str(array.path), "task": index}
        task.submission_dir.save(replace(task.submission, **in_array))
    if array is not None:
        array.link_tasks([task.submission_dir for task in tasks])
    (script.directory / SCRIPT_FILE).write_text(script.text)
    files.write_code(Path(tasks[0].program[1]))
