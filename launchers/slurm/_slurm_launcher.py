"""Launcher that submits every point of a sweep to Slurm as a separate job.

All points are composed, validated, planned, and checked by Slurm before the first submission. A job
consists of files: the composed configuration, a snapshot of the code, and a script that submitit
writes and submits. It therefore does not depend on this process or on this checkout
(docs/adr/0025-jobs-are-files.md). An evaluation is one job.
"""

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from hlat.config import frozen_config
from hlat.config.config_errors import ConfigError
from hlat.jobs import slurm_commands
from hlat.jobs.evaluation_job import EvaluationJob
from hlat.jobs.job_table import load_job_rows
from hlat.jobs.submission import Submission, SubmissionDir, create_submission_dir

from .._job_spec import JobSpec, build_evaluation_job, build_job, get_compiled_graphs_dir
from .._scheduler_launcher import SchedulerLauncher
from .._sweep_points import (
    SweepPoint,
    build_group_environment,
    build_job_return,
    record_point,
    validate_points,
)
from ._code_snapshot import copy_code
from ._sbatch_script import (
    SlurmLauncherConfig,
    build_sbatch_parameters,
    build_sbatch_script,
    build_script_command,
    build_submission,
    validate_slurm_settings,
)

if TYPE_CHECKING:
    from submitit import SlurmExecutor

ConfigStore.instance().store(
    group="hydra/launcher", name="slurm", node=SlurmLauncherConfig, provider="hlat"
)


class SlurmLauncher(SchedulerLauncher):
    """Hydra launcher that submits Slurm jobs without waiting for them."""

    name, schema, shares_file_system = "slurm", SlurmLauncherConfig, True
    settings: SlurmLauncherConfig

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Validate all points, submit them, and print and return a receipt for each.

        Raises:
            ConfigError: A point is invalid, or Slurm rejects its job. Nothing is submitted then.
        """
        validate_slurm_settings(self.settings)
        points = validate_points(self.context, self.config, job_overrides, self.settings.prune)
        run_dirs = (point.run_dir for point in points)
        _validate_not_active({f"run.name={run_dir.name}": run_dir for run_dir in run_dirs})
        sweep_dir, job_returns = Path(self.config.hydra.sweep.dir), []
        environment = build_group_environment(sweep_dir, points)
        with _create_submission_dirs() as create_dir:
            jobs = [
                _prepare_job(point, create_dir, self.settings, self.hydra_flags, environment)
                for point in points
            ]
            for number, (point, job) in enumerate(zip(points, jobs, strict=True), initial_job_idx):
                receipt = job.submit()
                record_point(sweep_dir, number, point, point.run_dir, receipt["job"])
                after = f" after compilation by job {receipt['after']}" if job.dependency else ""
                suffix = f"{after}  {' '.join(point.overrides)}"
                text = _format_receipt(receipt, "trains", point.run_dir, suffix)
                print(f"[{number}] {text}", flush=True)
                job_returns.append(build_job_return(point, number, receipt["job"], receipt))
        print(f"all jobs:  hlat jobs {shlex.quote(str(sweep_dir))}")
        return job_returns

    def submit_evaluation(self, evaluation: EvaluationJob, directory: Path) -> None:
        """Submit an evaluation after Slurm has checked its script, and print its receipt."""
        validate_slurm_settings(self.settings)
        self.validate_no_pruning()
        _validate_not_active({evaluation.model: evaluation.job_dir})
        with _create_submission_dirs() as create_dir:
            submission_dir = create_dir(evaluation.job_dir)
            program = [self.settings.python or sys.executable, str(submission_dir.code_dir)]
            command = [*program, "hlat.evaluate", *evaluation.arguments]
            spec = build_evaluation_job(evaluation, (*command,), Path.cwd())
            scores = Path.cwd() / evaluation.scores_dir
            submission = build_submission(spec, self.settings, [command], scores=scores)
            job = _write_job(
                f"{evaluation.model}:", submission_dir, spec, submission, self.settings, program
            )
            copy_code(submission_dir.code_dir)
            receipt = job.submit()
        print(_format_receipt(receipt, "evaluates", evaluation.job_dir, f" for {evaluation.model}"))


@contextmanager
def _create_submission_dirs() -> Iterator[Callable[[Path], SubmissionDir]]:
    """Yield a function that creates submission directories; remove those not submitted."""
    submission_dirs: list[SubmissionDir] = []

    def create(run_dir: Path) -> SubmissionDir:
        submission_dirs.append(create_submission_dir(Path.cwd() / run_dir))
        return submission_dirs[-1]

    try:
        yield create
    finally:
        for submission_dir in submission_dirs:
            if submission_dir.last_job_id is None:
                shutil.rmtree(submission_dir.path)


@dataclass(frozen=True)
class PreparedJob:
    """A job with all files written, and the job that must succeed before it, if any."""

    submission_dir: SubmissionDir
    executor: "SlurmExecutor"
    script_command: str
    dependency: "PreparedJob | None" = None

    def submit(self) -> dict[str, Any]:
        """Submit the job after its dependency and return its receipt, if Slurm accepts it."""
        receipt = {"run_folder": str(self.submission_dir.run_dir)}
        if self.dependency is not None:
            receipt["after"] = self.dependency.submit()["job"]
            options = self.executor.parameters["additional_parameters"] | {
                "dependency": slurm_commands.format_dependency(receipt["after"]),
                "kill-on-invalid-dep": "yes",
            }
            self.executor.update_parameters(additional_parameters=options)
        try:
            job = self._run_sbatch()
        except ConfigError:
            if self.dependency is not None:
                slurm_commands.cancel_jobs([receipt["after"]])
            raise
        return {"job": job, **receipt, "log": str(self.submission_dir.build_log_path(job))}

    def _run_sbatch(self) -> str:
        from submitit.core.utils import FailedJobError

        try:
            job: str = self.executor._submit_command(self.script_command).job_id
        except FailedJobError as error:
            raise ConfigError(f"sbatch rejects {self.submission_dir.path}: {error}") from error
        self.submission_dir.receipts.append({"job": job, "time": time.time()})
        return job


def _validate_not_active(job_dirs: dict[str, Path]) -> None:
    """Raise ConfigError if a job of one of the directories is active, or Slurm does not answer."""
    problems = [
        f"{label}: job {row.job_id} is {row.state}; cancel it with "
        f"hlat jobs cancel {shlex.quote(str(row.submission_dir.run_dir))}"
        for label, job_dir in job_dirs.items()
        for row in load_job_rows([job_dir])
        if row.is_active
    ]
    if problems:
        raise ConfigError(*problems)


def _prepare_job(
    point: SweepPoint,
    create_dir: Callable[[Path], SubmissionDir],
    settings: SlurmLauncherConfig,
    hydra_flags: list[str],
    environment: dict[str, str],
) -> PreparedJob:
    """Write the files of a run's job, and of its compilation job if there is one."""
    graphs_dir = get_compiled_graphs_dir(point.config, Path.cwd()) if settings.precompile else None
    compile_dir = create_dir(point.run_dir) if graphs_dir else None
    submission_dir = create_dir(point.run_dir)
    program = [settings.python or sys.executable, str(submission_dir.code_dir)]
    frozen = [frozen_config.FROZEN_FLAG, str(submission_dir.path)]
    train = [*program, "hlat.train", *frozen]
    spec = build_job(point.config, (*train,), Path.cwd())
    spec = replace(spec, environment=environment | spec.environment)
    commands, dependency, label = [train], None, f"[{' '.join(point.overrides)}]"
    if compile_dir is not None:
        submission = build_submission(spec, settings, [[*program, "hlat.precompile", *frozen]])
        compile_spec = replace(spec, name=f"{spec.name}.compile")
        dependency = _write_job(label, compile_dir, compile_spec, submission, settings, program)
        commands = [[*program, "hlat.precompile", "merge", str(graphs_dir)], train]
    after = None if compile_dir is None else compile_dir.path.name
    submission = build_submission(spec, settings, commands, trains=True, after=after)
    job = _write_job(label, submission_dir, spec, submission, settings, program)
    frozen_config.save_frozen_config(
        submission_dir.path,
        point.composed,
        frozen_config.CommandLine([*point.overrides], hydra_flags),
    )
    copy_code(submission_dir.code_dir)
    return replace(job, dependency=dependency)


def _write_job(
    label: str,
    submission_dir: SubmissionDir,
    job: JobSpec,
    submission: Submission,
    settings: SlurmLauncherConfig,
    program: list[str],
) -> PreparedJob:
    """Write the files of one job after Slurm has checked its script.

    Raises:
        ConfigError: Slurm rejects the job; `label` starts the message.
    """
    from submitit import SlurmExecutor

    log = submission_dir.build_log_path("%j")
    parameters = build_sbatch_parameters(job, settings, log, Path.cwd())
    script = build_sbatch_script(parameters, submission_dir, program)
    if (reason := slurm_commands.find_rejection_reason(script)) is not None:
        raise ConfigError(f"{label} Slurm rejects the job: {reason}")
    submission_dir.save(submission)
    try:
        executor = SlurmExecutor(submission_dir.path)
    except RuntimeError as error:  # submitit finds no srun
        raise ConfigError(f"this machine is not a login node of Slurm: {error}") from error
    executor.update_parameters(**parameters)
    return PreparedJob(submission_dir, executor, build_script_command(submission_dir, program))


def _format_receipt(receipt: dict[str, Any], action: str, directory: Path, suffix: str) -> str:
    return (
        f"job {receipt['job']} {action} {directory}{suffix}\n"
        f"    log:  hlat jobs logs {shlex.quote(str(directory))} follow=true"
    )
