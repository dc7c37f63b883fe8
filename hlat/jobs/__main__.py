"""List, follow, cancel and resubmit jobs that were sent to Slurm: `hlat jobs`."""

import argparse
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from hlat.config.argument_parser import CommandLineParser, run_and_exit, run_command
from hlat.config.config_errors import ConfigError, ExitCode, raise_config_errors
from hlat.jobs.job_table import (
    JobRow,
    cancel_job_rows,
    format_job_json,
    format_job_table,
    load_job_rows,
)
from hlat.jobs.submission import (
    find_submitted_runs,
    lock_submissions,
    submit_after_prerequisites,
    submit_jobs,
)

_EXAMPLES = """\
examples:
  hlat jobs                                     jobs of all runs in runs/
  hlat jobs runs/sweeps/2026-11-22_09-30-00     jobs of a sweep
  hlat jobs runs/hlat_7b/evaluations            evaluation jobs of a run
  hlat jobs runs/hlat_7b wait=true              wait until the job ends
  hlat jobs json=true                           the same table as JSON
  hlat jobs logs runs/hlat_7b follow=true       print the log until the job ends
  hlat jobs cancel runs/hlat_7b
  hlat jobs cancel 'runs/beta2-*'               cancel the runs that match a pattern
  hlat jobs resubmit runs failed=true           submit failed runs again

See docs/launchers.md."""
_DEFAULT_DIR = Path("runs")
_PATTERN = re.compile(r"[*?[]")
_SETTINGS_OF = {
    "list": ("json", "wait"),
    "logs": ("follow",),
    "cancel": (),
    "resubmit": ("failed",),
}
"""Settings of each action."""
_POLL_INTERVAL_S, _WAIT_INTERVAL_S = 1.0, 5.0
"""Intervals of reading a log, and of asking Slurm for the states of all jobs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the action; return the exit code."""
    parser = CommandLineParser(
        "jobs", "List jobs that were sent to Slurm, print logs, cancel or resubmit them.", _EXAMPLES
    )
    add = parser.add_argument
    words = (
        "list (default), logs, cancel or resubmit; then directories (default: runs) or patterns of "
        "run names"
    )
    add("words", nargs="*", metavar="ACTION|DIR|PATTERN", help=words)
    add("--json", action="store_true", help="list: print JSON")
    help_text = "list: wait until all jobs have ended; exit with 1 unless all are complete"
    add("--wait", action="store_true", help=help_text)
    add("--follow", action="store_true", help="logs: print until the job ends")
    add(
        "--failed",
        action="store_true",
        help="resubmit: only failed runs, not diverged or cancelled ones",
    )
    arguments = parser.parse(argv)
    has_action = arguments.words[:1] and arguments.words[0] in _SETTINGS_OF
    action = arguments.words.pop(0) if has_action else "list"
    for name in ("json", "wait", "follow", "failed"):
        if getattr(arguments, name) and name not in _SETTINGS_OF[action]:
            parser.error(f"{name}= is not a setting of {action}")
    return run_command(lambda: _dispatch(action, arguments), None)


def _dispatch(action: str, arguments: argparse.Namespace) -> int:
    words = arguments.words or [str(_DEFAULT_DIR)]
    run_dirs = [*dict.fromkeys(run for word in words for run in _find_runs(word))]
    rows = load_job_rows(run_dirs)
    if not rows:
        raise ConfigError(f"no job was submitted from {', '.join(words)}")
    if action == "logs":
        return _print_logs(rows, arguments.follow)
    if action == "cancel":
        return _cancel([row for row in rows if row.active_job_ids])
    if action == "resubmit":
        chosen = _select_failed(rows) if arguments.failed else rows
        run_dirs = [row.submission_dir.run_dir for row in chosen]
        with lock_submissions(run_dirs):  # another command may have submitted them
            rows = load_job_rows(run_dirs)
            return _resubmit(_select_failed(rows) if arguments.failed else rows)
    while arguments.wait and any(row.active_job_ids for row in rows):
        time.sleep(_WAIT_INTERVAL_S)
        rows = load_job_rows(run_dirs, retry=True)
    print(format_job_json(rows) if arguments.json else format_job_table(rows))
    is_success = all(row.is_complete for row in rows) or not arguments.wait
    return ExitCode.FINISHED if is_success else ExitCode.FAILED


def _find_runs(word: str) -> Iterator[Path]:
    """Yield the submitted runs in a directory, or those with a name that matches a pattern."""
    path = Path(word)
    if path.exists() or not _PATTERN.search(word):
        yield from find_submitted_runs(path)
        return
    directory = _DEFAULT_DIR if path.parent == Path() else path.parent
    found = [run for run in find_submitted_runs(directory) if fnmatch(run.name, path.name)]
    if not found:
        raise ConfigError(f"no submitted run in {directory} matches {path.name}")
    yield from found


def _cancel(active_rows: list[JobRow]) -> int:
    if not active_rows:
        print("no job is pending or running")
        return ExitCode.FINISHED
    cancel_job_rows(active_rows)
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
    raise_config_errors(active)
    groups: dict[tuple[Path, bool], list[JobRow]] = {}
    for row in job_rows:
        submission = row.submission_dir.load()
        directory = Path(submission.array or row.submission_dir.path)
        groups.setdefault((directory, _needs_prerequisite(row)), []).append(row)
    lines = []
    try:
        for rows in groups.values():
            lines += _resubmit_together(rows)
    finally:  # a closed pipe must not interrupt the submission
        print("\n".join(lines or ["no run was submitted"]))
    return ExitCode.FINISHED


def _needs_prerequisite(row: JobRow) -> bool:
    return row.prerequisite is not None and not row.prerequisite.is_complete


def _resubmit_together(job_rows: list[JobRow]) -> list[str]:
    """Submit a job, or tasks of one array, after their prerequisites; return a line for each."""
    submission_dirs, after = [row.submission_dir for row in job_rows], ""
    if _needs_prerequisite(job_rows[0]):
        after = f", after its compile job {submit_after_prerequisites(submission_dirs)}"
    else:  # a complete prerequisite has waited for the dependency in the script
        submit_jobs(submission_dirs, None if job_rows[0].prerequisite is None else "")
    lines = []
    for row in job_rows:
        run_dir, job = row.submission_dir.run_dir, row.submission_dir.last_job_id
        lines.append(f"job {job} {row.action} {run_dir}{after}")
    return lines


def _select_failed(job_rows: list[JobRow]) -> list[JobRow]:
    """Return the failed rows without diverged and cancelled runs, and print the latter."""
    for row in job_rows:
        if row.ended_on_purpose:
            run_dir = row.submission_dir.run_dir
            print(
                f"{run_dir} is {row.state}; to submit it again: "
                f"hlat jobs resubmit {shlex.quote(str(run_dir))}"
            )
    return [row for row in job_rows if row.has_failed and not row.ended_on_purpose]


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
