"""Dependencies of a Slurm job on the jobs of other runs: `hydra.launcher.after`.

A run or command is named by its directory, so that the dependency is on its newest job.
"""

import difflib
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hlat.config.command_job import CommandJob
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.jobs import slurm_commands
from hlat.jobs.held_jobs import HeldJobs, has_checkpoint
from hlat.jobs.job_table import load_job_rows
from hlat.jobs.submission import find_latest_submission
from hlat.tracking.jsonl_log import open_events_log

from ._sbatch_script import SlurmLauncherConfig


def resolve_dependencies(
    settings: SlurmLauncherConfig, job: CommandJob | None = None
) -> tuple[SlurmLauncherConfig, HeldJobs | None]:
    """Return the settings with Slurm's options for `after`.

    The second element is set for an evaluation of a checkpoint that does not exist yet: the job is
    held, and must be added to these held jobs of the run.

    Raises:
        ConfigError: A run has no job, or its job has failed.
    """
    paths, problems, job_ids = _list_paths(settings), [], []
    held_jobs = None
    for path in paths:
        step = None if job is None or Path(job.subject) != path else job.step
        if step is not None and has_checkpoint(path, step):
            continue
        try:
            job_id = _find_active_job(path)
        except ConfigError as error:
            problems += error.problems
            continue
        if job_id is not None and step is not None:
            held_jobs = HeldJobs(Path.cwd() / path)
        elif job_id is not None:
            job_ids.append(job_id)
    raise_config_errors(problems)
    options = {**settings.options, **({} if held_jobs is None else {"hold": True})}
    if job_ids:
        given = options.get("dependency")
        dependency = slurm_commands.format_dependency(":".join(job_ids))
        options["dependency"] = dependency if given is None else f"{dependency},{given}"
        # A job waits until its failed predecessor is submitted again, instead of being deleted
        options["kill-on-invalid-dep"] = "no"
    return replace(settings, options=options), held_jobs


def _list_paths(settings: SlurmLauncherConfig) -> list[Path]:
    after = settings.after
    return [Path(str(path)) for path in ([after] if isinstance(after, str) else after or [])]


def _find_active_job(path: Path) -> str | None:
    """Return the active job of a run or command; None if it is complete."""
    directory = Path.cwd() / path
    submission = find_latest_submission(directory)
    if submission is None or submission.last_job_id is None:
        from hlat.tracking import lost_work  # numpy slows composition

        if lost_work.is_finished(open_events_log(directory).read_rows()):
            return None  # trained without Slurm
        problem = "was not submitted to Slurm" if directory.is_dir() else "does not exist"
        hint = "".join(f"; did you mean {near}?" for near in _find_similar(path))
        raise ConfigError(
            f"hydra.launcher.after={path} {problem}; give the directory of a submitted run{hint}"
        )
    (row,) = load_job_rows([directory])
    if row.is_active:
        return row.job_id
    if row.is_complete:
        return None
    raise ConfigError(
        f"hydra.launcher.after={path}: job {row.job_id} is {row.state}; submit it again first: "
        f"hlat jobs resubmit {shlex.quote(str(path))}"
    )


def _find_similar(path: Path) -> Iterator[Path]:
    """Yield the submitted run of the parent directory with the most similar name."""
    parent = Path.cwd() / path.parent
    names = [child.name for child in parent.iterdir()] if parent.is_dir() else []
    names = [name for name in names if find_latest_submission(parent / name) is not None]
    for name in difflib.get_close_matches(path.name, names, 1):
        yield path.parent / name
