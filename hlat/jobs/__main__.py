"""List, follow, cancel and resubmit jobs that were sent to Slurm: `hlat jobs`."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from hlat.config.argument_parser import CommandLineParser, run_and_exit, run_command
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.jobs import slurm_commands
from hlat.jobs.job_table import JobRow, format_job_table, load_job_rows
from hlat.jobs.submission import SubmissionDir, find_submitted_runs

_EXAMPLES = """\
examples:
  hlat jobs                                     jobs of all runs in runs/
  hlat jobs runs/sweeps/2026-11-22_09-30-00     jobs of a sweep
  hlat jobs runs/hlat_7b/evaluations            evaluation jobs of a run
  hlat jobs logs runs/hlat_7b follow=true       print the log until the job ends
  hlat jobs cancel runs/hlat_7b
  hlat jobs resubmit runs failed=true           submit incomplete runs again

See docs/launchers.md."""
_SETTINGS_OF = {"list": "", "logs": "follow", "cancel": "", "resubmit": "failed"}
"""Setting of each action."""
_POLL_INTERVAL_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the action; return the exit code."""
    parser = CommandLineParser(
        "jobs", "List jobs that were sent to Slurm, print logs, cancel or resubmit them.", _EXAMPLES
    )
    add = parser.add_argument
    words = "list (default), logs, cancel or resubmit; then directories (default: runs)"
    add("words", nargs="*", metavar="ACTION|DIR", help=words)
    add("--follow", action="store_true", help="logs: print until the job ends")
    add("--failed", action="store_true", help="resubmit: only runs that are not complete")
    arguments = parser.parse(argv)
    has_action = arguments.words[:1] and arguments.words[0] in _SETTINGS_OF
    action = arguments.words.pop(0) if has_action else "list"
    for name in ("follow", "failed"):
        if getattr(arguments, name) and _SETTINGS_OF[action] != name:
            parser.error(f"{name}= is not a setting of {action}")
    return run_command(lambda: _dispatch(action, arguments), None)


def _dispatch(action: str, arguments: argparse.Namespace) -> int:
    directories = [Path(word) for word in arguments.words] or [Path("runs")]
    rows = load_job_rows([run for path in directories for run in find_submitted_runs(path)])
    if not rows:
        raise ConfigError(f"no job was submitted from {', '.join(map(str, directories))}")
    if action == "logs":
        return _print_logs(rows, arguments.follow)
    if action == "cancel":
        return _cancel([row for row in rows if row.active_job_ids])
    if action == "resubmit":
        return _resubmit([row for row in rows if row.has_failed or not arguments.failed])
    print(format_job_table(rows))
    return ExitCode.FINISHED


def _cancel(active_rows: list[JobRow]) -> int:
    if not active_rows:
        print("no job is pending or running")
        return ExitCode.FINISHED
    slurm_commands.cancel_jobs([job for row in active_rows for job in row.active_job_ids])
    for row in active_rows:
        print(f"cancelled job {' and '.join(row.active_job_ids)} of {row.submission_dir.run_dir}")
    return ExitCode.FINISHED


def _resubmit(job_rows: list[JobRow]) -> int:
    """Submit the same scripts again, unless one of the jobs is pending or running."""
    active = [
        f"job {row.active_job_ids[-1]} of {row.submission_dir.run_dir} is pending or running"
        for row in job_rows
        if row.active_job_ids
    ]
    if active:
        raise ConfigError(*active)
    for row in job_rows:
        first = None
        if row.prerequisite is not None and not row.prerequisite.is_complete:
            first = _submit(row.prerequisite.submission_dir, None)
        job = _submit(row.submission_dir, first)
        after = "" if first is None else f", after its compile job {first}"
        print(f"job {job} {row.action} {row.submission_dir.run_dir}{after}")
    if not job_rows:
        print("no run has failed")
    return ExitCode.FINISHED


def _submit(submission_dir: SubmissionDir, after_job: str | None) -> str:
    job = slurm_commands.submit_script(submission_dir.script_path, after_job)
    submission_dir.receipts.append({"job": job, "time": time.time()})
    return job


def _print_logs(job_rows: list[JobRow], follow: bool) -> int:
    """Print the logs of jobs, each with a header if there are several."""
    if follow and len(job_rows) > 1:
        raise ConfigError(f"follow=true prints the log of one run, but {len(job_rows)} are given")
    for row in job_rows:
        if len(job_rows) > 1:
            print(f"==> {row.submission_dir.run_dir} <==")
        jobs = [job for job in (row.prerequisite, row) if job is not None]
        logs = [job.submission_dir.build_log_path(job.job_id) for job in jobs]
        offsets = {log: _print_log(log, 0) for log in logs}
    while follow:
        has_ended = not load_job_rows([job_rows[0].submission_dir.run_dir])[0].active_job_ids
        offsets = {log: _print_log(log, offset) for log, offset in offsets.items()}
        if has_ended:
            break
        time.sleep(_POLL_INTERVAL_S)
    return ExitCode.FINISHED


def _print_log(log: Path, offset: int) -> int:
    """Print a log from byte `offset`; return the offset of its end."""
    if not log.exists():
        return offset
    with log.open("rb") as file:
        file.seek(offset)
        text = file.read()
    print(text.decode(errors="replace"), end="", flush=True)
    return offset + len(text)


if __name__ == "__main__":
    run_and_exit(main)
