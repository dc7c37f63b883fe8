"""Jobs with all files written: single jobs, and job arrays of points with equal resources."""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config.config_errors import ConfigError
from hlat.jobs import slurm_commands
from hlat.jobs.job_array import ARRAYS_DIR, JobArray, create_numbered_dir
from hlat.jobs.submission import Submission, SubmissionDir, create_submission_dir

from ._code_archive import CodeArchive
from ._sbatch_script import (
    SlurmLauncherConfig,
    build_array_command,
    build_array_parameters,
    build_command,
    build_sbatch_script,
)

if TYPE_CHECKING:
    from submitit import SlurmExecutor

SCRIPTS_DIR = "dry_run"
"""Directory in the sweep directory for the scripts of dry runs."""
_MAX_TASKS = 1000
"""Maximum number of tasks of an array with Slurm's default MaxArraySize."""


class _UnknownJobError(ConfigError):
    """sbatch may have accepted a job, but printed no job id."""


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


@dataclass(frozen=True)
class PreparedJob:
    """A job, or an array of jobs, and the one that must succeed before it, if any."""

    tasks: list[PreparedTask]
    array: JobArray | None
    executor: "SlurmExecutor"
    command: str
    settings: SlurmLauncherConfig
    prerequisite: "PreparedJob | None"

    def submit(self, tasks: Sequence[int] | None = None) -> None:
        """Submit the given tasks, by default all.

        If sbatch fails for an array, submit each half, as there may be a limit on the number of
        jobs.

        Raises:
            ConfigError: sbatch fails for a single job; earlier ones are submitted.
        """
        tasks = range(len(self.tasks)) if tasks is None else tasks
        try:
            self._submit_together(tasks)
        except _UnknownJobError:
            raise  # a second submission could start the tasks twice
        except ConfigError:
            if len(tasks) == 1:
                raise
            middle = (len(tasks) + 1) // 2
            self.submit(tasks[:middle])
            self.submit(tasks[middle:])

    def _submit_together(self, tasks: Sequence[int]) -> str:
        """Submit tasks after their prerequisites, and return the job id."""
        options = dict(self.executor.parameters["additional_parameters"])
        if self.array is not None:
            options["array"] = self.settings.format_array(tasks)
        if self.prerequisite is None:
            return self._run_sbatch(tasks, options)
        first = self.prerequisite._submit_together(tasks)
        dependency = slurm_commands.format_dependency(first, is_array=self.array is not None)
        options |= {"dependency": dependency, "kill-on-invalid-dep": "yes"}
        try:
            return self._run_sbatch(tasks, options)
        except ConfigError:
            slurm_commands.cancel_jobs([first])
            raise

    def _run_sbatch(self, tasks: Sequence[int], options: dict[str, Any]) -> str:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        self.executor.update_parameters(additional_parameters=options)
        try:
            job: str = self.executor._submit_command(self.command).job_id
        except FailedJobError as error:
            raise ConfigError(f"sbatch rejects {self.executor.folder}: {error}") from error
        except FailedSubmissionError as error:
            raise _UnknownJobError(
                f"sbatch printed no job id for {self.executor.folder} ({error}); look for the job "
                "with squeue --me before you submit it again"
            ) from error
        except OSError as error:
            raise ConfigError(f"sbatch cannot be started ({error.strerror})") from error
        if self.array is not None:
            self.array.log_receipt(job, tasks)
        else:
            receipts = self.tasks[0].submission_dir.receipts
            receipts.append({"job": job, "time": time.time()})
        return job


def prepare_jobs(
    tasks: Sequence[PreparedTask], files: SubmissionFiles, settings: SlurmLauncherConfig
) -> list[PreparedJob]:
    """Return one job array for all tasks with equal resources, and jobs of the other tasks.

    Raises:
        ConfigError: Slurm rejects a job.
    """
    return [_prepare_job(group, files, settings) for group in _group_tasks(tasks)]


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
    """The batch script of a job or job array, and how it is submitted."""

    array: JobArray | None
    directory: Path
    parameters: dict[str, Any]
    command: str
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
    text = build_sbatch_script(parameters, directory, command)
    return _Script(array, directory, parameters, command, text)


def _prepare_job(
    tasks: list[PreparedTask], files: SubmissionFiles, settings: SlurmLauncherConfig
) -> PreparedJob:
    """Write the files of a job or job array after Slurm has checked its script."""
    from submitit import SlurmExecutor

    prerequisites = [task.prerequisite for task in tasks if task.prerequisite is not None]
    prerequisite = _prepare_job(prerequisites, files, settings) if prerequisites else None
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
    files.write_code(Path(tasks[0].program[1]))
    try:
        executor = SlurmExecutor(script.directory)
    except RuntimeError as error:  # submitit finds no srun
        raise ConfigError(f"this machine is not a login node of Slurm: {error}") from error
    executor.update_parameters(**script.parameters)
    return PreparedJob(tasks, array, executor, script.command, settings, prerequisite)
