"""Launcher that submits every point of a sweep to Slurm as a task of a job array.

All points are composed, validated, planned, and checked by Slurm before the first submission. A job
consists of files: the composed configuration, an archive of the code, and a script that submitit
writes and submits. It therefore does not depend on this process or on this checkout
(docs/adr/0025-jobs-are-files.md). Points with equal resources are one job array
(docs/adr/0043-sweeps-are-job-arrays.md). A single run or a command is one job.
"""

import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from hlat.config import entry_point, frozen_config
from hlat.config.command_job import CommandJob
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.extensions import copy_to_submission
from hlat.jobs.job_table import JobRow, load_job_rows
from hlat.jobs.submission import Submission, SubmissionDir, lock_submissions

from .._job_spec import JobSpec, build_command_job, build_job, get_compiled_graphs_dir
from .._scheduler_launcher import SchedulerLauncher
from .._sweep_points import (
    SweepPoint,
    build_group_environment,
    build_job_return,
    record_point,
    validate_points,
)
from ._job_dependencies import resolve_dependencies
from ._prepared_job import PreparedTask, SubmissionFiles, prepare_jobs, submit_tasks, write_scripts
from ._sbatch_script import (
    SlurmLauncherConfig,
    build_sbatch_parameters,
    build_submission,
    validate_slurm_settings,
)

ConfigStore.instance().store(
    group="hydra/launcher", name="slurm", node=SlurmLauncherConfig, provider="hlat"
)


class SlurmLauncher(SchedulerLauncher):
    """Hydra launcher that submits Slurm jobs without waiting for them."""

    name, schema, shares_file_system = "slurm", SlurmLauncherConfig, True
    settings: SlurmLauncherConfig

    @property
    def waits(self) -> bool:
        """True if jobs start after other jobs, so that their inputs may not exist yet."""
        return bool(self.settings.after)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Validate all points, submit them, and print and return a receipt for each.

        A point of a sweep is skipped if its job is active or complete, so a repeated command
        completes an interrupted submission.

        Raises:
            ConfigError: A point is invalid, or Slurm rejects its script. Nothing is submitted then.
                Or sbatch fails; the message contains the command that submits the other points.
        """
        validate_slurm_settings(self.settings)
        self.settings, _ = resolve_dependencies(self.settings)
        points = validate_points(self.context, self.config, job_overrides, self.settings.prune)
        with lock_submissions(Path.cwd() / point.run_dir for point in points):
            return self._submit_points(points, initial_job_idx)

    def _submit_points(
        self, points: Sequence[SweepPoint], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Submit the points without a job, and return the receipts of all."""
        existing = _find_existing_jobs(points)
        sweep_dir = Path(self.config.hydra.sweep.dir)
        job_returns: list[JobReturn] = []
        with SubmissionFiles(sweep_dir) as files:
            tasks = self._prepare_points(points, existing, files)
            if self.settings.dry_run:
                _print_scripts(write_scripts([*tasks.values()], files, self.settings))
                return []
            jobs = prepare_jobs([*tasks.values()], files, self.settings)
            try:
                with _explain_interruption(tasks.values(), sweep_dir):
                    for job in jobs:
                        submit_tasks(job)
            finally:  # a closed pipe or terminal must not interrupt the submission
                receipts = _build_receipts(points, existing, tasks)
                lines = []
                for number, point in enumerate(points, initial_job_idx):
                    if (receipt := receipts.get(point.run_dir)) is None:
                        continue
                    record_point(sweep_dir, number, point, point.run_dir, receipt["job"])
                    lines.append(f"[{number}] {_format_point(point, receipt, existing)}")
                    job_returns.append(build_job_return(point, number, receipt["job"], receipt))
                if lines:
                    print("\n".join(lines), flush=True)
        if existing:
            print(f"submitted {len(tasks)} of {len(points)} jobs; {len(existing)} exist")
        print(f"all jobs:  hlat jobs {shlex.quote(str(sweep_dir))}")
        return job_returns

    def _prepare_points(
        self,
        points: Sequence[SweepPoint],
        existing: Mapping[Path, JobRow],
        files: SubmissionFiles,
    ) -> dict[Path, PreparedTask]:
        """Write the files of the points without a job; return their tasks by run directory."""
        environment = build_group_environment(files.directory, points)
        is_shared = len(points) > 1 or (files.directory / files.code.name).exists()
        code_dir = files.directory if is_shared else None
        tasks = {}
        for point in points:
            if point.run_dir not in existing:
                tasks[point.run_dir] = self._prepare_point(point, files, code_dir, environment)
        return tasks

    def _prepare_point(
        self,
        point: SweepPoint,
        files: SubmissionFiles,
        code_dir: Path | None,
        environment: dict[str, str],
    ) -> PreparedTask:
        """Write the configuration of a run; return its job, after its compile job if needed.

        The code archive is in `code_dir`, by default in the submission directory.
        """
        settings, prerequisite, after = self.settings, None, None
        graphs_dir = None
        if settings.precompile:
            graphs_dir = get_compiled_graphs_dir(point.config, Path.cwd())
        compile_dir = files.create_submission_dir(point.run_dir) if graphs_dir else None
        submission_dir = files.create_submission_dir(point.run_dir)
        archive = (code_dir or submission_dir.path) / files.code.name
        program = [settings.python or sys.executable, str(archive)]
        frozen = [frozen_config.FROZEN_FLAG, str(submission_dir.path)]
        train = [*program, "hlat.train", *frozen]
        spec = build_job(point.config, (*train,), Path.cwd())
        spec = replace(spec, environment=environment | spec.environment)
        commands, label = [train], f"[{' '.join(point.overrides)}]"
        if compile_dir is not None:
            submission = build_submission(spec, settings, [[*program, "hlat.precompile", *frozen]])
            compile_spec = replace(spec, name=f"{spec.name}.compile")
            prerequisite = self._build_task(label, compile_dir, compile_spec, submission, program)
            commands = [[*program, "hlat.precompile", "merge", str(graphs_dir)], train]
            after = compile_dir.path.name
        submission = build_submission(spec, settings, commands, trains=True, after=after)
        submission = replace(submission, sweep=None if code_dir is None else str(code_dir))
        command_line = frozen_config.CommandLine([*point.overrides], self.hydra_flags)
        point.save_configuration(submission_dir.path, command_line)
        task = self._build_task(label, submission_dir, spec, submission, program)
        return replace(task, prerequisite=prerequisite)

    def _build_task(
        self,
        label: str,
        submission_dir: SubmissionDir,
        spec: JobSpec,
        submission: Submission,
        program: list[str],
    ) -> PreparedTask:
        log = submission_dir.build_log_path("%j")
        parameters = build_sbatch_parameters(spec, self.settings, log, Path.cwd())
        return PreparedTask(label, submission_dir, submission, parameters, program)

    def submit_command(self, job: CommandJob, directory: Path) -> None:
        """Submit a command after Slurm has checked its script, and print its receipt."""
        validate_slurm_settings(self.settings)
        self.validate_no_pruning()
        with lock_submissions([job.job_dir.absolute()]):
            self._submit_command(job, directory)

    def _submit_command(self, job: CommandJob, directory: Path) -> None:
        _validate_not_active([(job.subject, row) for row in load_job_rows([job.job_dir])])
        self.settings, held_jobs = resolve_dependencies(self.settings, job)
        with SubmissionFiles(directory) as files:
            submission_dir = files.create_submission_dir(job.job_dir)
            archive = submission_dir.path / files.code.name
            program = [self.settings.python or sys.executable, str(archive)]
            arguments = [copy_to_submission(submission_dir.path, word) for word in job.arguments]
            command = [*program, f"hlat.{job.command}", *arguments]
            spec = build_command_job(job, (*command,), Path.cwd())
            scores = None if job.scores_dir is None else Path.cwd() / job.scores_dir
            submission = build_submission(
                spec, self.settings, [command], scores=scores, verb=job.verb
            )
            task = self._build_task(f"{job.subject}:", submission_dir, spec, submission, program)
            if self.settings.dry_run:
                _print_scripts(write_scripts([task], files, self.settings))
                return
            prepare_jobs([task], files, self.settings)
            submit_tasks([task])
            receipt = task.build_receipt()
            if held_jobs is not None:
                assert job.step is not None
                held_jobs.append(receipt["job"], job.step)
        print(_format_receipt(receipt, job.verb, job.job_dir, f" for {job.subject}"))


def _print_scripts(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"{path}:\n{path.read_text()}")
    print("dry run: nothing was submitted")


@contextmanager
def _explain_interruption(tasks: Collection[PreparedTask], sweep_dir: Path) -> Iterator[None]:
    """Print the command that submits the other jobs if some are submitted at an interruption."""
    try:
        yield
    except BaseException as error:
        num_submitted = sum(task.job_id is not None for task in tasks)
        if num_submitted == 0:
            raise
        command = entry_point.format_repeat_command("hydra.sweep.dir", str(sweep_dir))
        advice = (
            f"submitted {num_submitted} of {len(tasks)} jobs; submit the others with\n{command}"
        )
        if isinstance(error, ConfigError):
            raise ConfigError(*error.problems, advice) from error
        print(f"hlat: {advice}", file=sys.stderr)
        raise


def _build_receipts(
    points: Sequence[SweepPoint],
    existing: Mapping[Path, JobRow],
    tasks: Mapping[Path, PreparedTask],
) -> dict[Path, dict[str, Any]]:
    """Return the receipts of all points with a job by run directory."""
    receipts = {run_dir: {"job": row.job_id} for run_dir, row in existing.items()}
    submitted = {run_dir: task for run_dir, task in tasks.items() if task.job_id is not None}
    return receipts | {run_dir: task.build_receipt() for run_dir, task in submitted.items()}


def _format_point(
    point: SweepPoint, receipt: dict[str, Any], existing: Mapping[Path, JobRow]
) -> str:
    if (row := existing.get(point.run_dir)) is not None:
        return f"job {row.job_id} of {point.run_dir} exists: {row.state}"
    return _format_training_receipt(receipt, point)


def _find_existing_jobs(points: Sequence[SweepPoint]) -> dict[Path, JobRow]:
    """Return the jobs of a sweep that are active or complete, by run directory.

    Raises:
        ConfigError: A run with another configuration is active, or the only point is.
    """
    by_path = {Path.cwd() / point.run_dir: point for point in points}
    existing, conflicts = {}, []
    for row in load_job_rows([*by_path]):
        point = by_path[row.submission_dir.run_dir]
        is_same = len(points) > 1 and frozen_config.contains_config(
            row.submission_dir.path, point.yaml
        )
        if is_same and (row.is_active or row.is_complete):
            existing[point.run_dir] = row
        elif row.is_active:
            conflicts.append((f"run.name={point.run_dir.name}", row))
    _validate_not_active(conflicts)
    return existing


def _validate_not_active(rows: Sequence[tuple[str, JobRow]]) -> None:
    """Raise ConfigError if a job is active; the first element of each pair starts the message."""
    problems = [
        f"{label}: job {row.job_id} is {row.state}; cancel it with "
        f"hlat jobs cancel {shlex.quote(str(row.submission_dir.run_dir))}"
        for label, row in rows
        if row.is_active
    ]
    raise_config_errors(problems)


def _format_training_receipt(receipt: dict[str, Any], point: SweepPoint) -> str:
    after = f" after compilation by job {receipt['after']}" if "after" in receipt else ""
    suffix = f"{after}  {' '.join(point.overrides)}"
    return _format_receipt(receipt, "trains", point.run_dir, suffix)


def _format_receipt(receipt: dict[str, Any], action: str, directory: Path, suffix: str) -> str:
    return (
        f"job {receipt['job']} {action} {directory}{suffix}\n"
        f"    log:  hlat jobs logs {shlex.quote(str(directory))} follow=true"
    )
