"""Last lines of a run on the console: its result, its files, and the command that continues it."""

import os
from pathlib import Path

from hlat.config import entry_point
from hlat.config.config_errors import ExitCode
from hlat.config.redaction import redact_text
from hlat.config.run import Config
from hlat.config.run_steps import compute_extension
from hlat.storage.progress_bar import print_line
from hlat.tracking.heldout_rows import find_worse_sources, get_loop_row
from hlat.tracking.jsonl_log import open_events_log
from hlat.tracking.lost_work import START_EVENTS
from hlat.tracking.row_validation import Row, get_mean
from hlat.tracking.sweep_log import SWEEP_POINT_VARIABLE

_HEADLINES = {
    ExitCode.FINISHED: "complete at step {step}",
    ExitCode.FAILED: "ended at step {step}; this state could not be saved",
    ExitCode.UNHEALTHY_NODE: "ended at step {step} because of an unhealthy node; not saved",
    ExitCode.PREEMPTED: "interrupted and saved at step {step}; the same command resumes the run",
    ExitCode.DIVERGED: "diverged at step {step}, not saved: {reason}",
}


def print_summary(
    run_dir: Path,
    config: Config,
    overrides: list[str],
    exit_code: ExitCode,
    step: int,
    uptime: str,
) -> None:
    """Print the result of a run and the command that resumes or extends it.

    `overrides` are those of the user. `uptime` is a line on all attempts, and may be empty.
    """
    events = open_events_log(run_dir).read_rows()
    rows = [row for row in events if row["event"] == "evaluate"]
    means = [get_mean(get_loop_row(row), "bits_per_byte") for row in rows]
    bits = [mean for mean in means if mean is not None] if len(means) > 1 else []
    bits = bits if len(bits) == len(means) else []
    print_line(f"\n{_format_headline(exit_code, step, events, bits)}")
    if bits:
        print_line(
            f"held-out bits per byte: {bits[0]:.3f} -> {bits[-1]:.3f}{_format_all(rows[-1])}"
        )
        if worse := find_worse_sources(rows[0], rows[-1]):
            print_line(f"worse than at the start of the run: held-out text of {', '.join(worse)}")
    if uptime:
        print_line(uptime)
    print_line(f"run directory: {run_dir}")
    page = run_dir / "report.html"
    is_written = writes_report(config) and page.exists()
    print_line(f"report:        {page if is_written else f'hlat report {run_dir}'}")
    if exit_code is ExitCode.FINISHED:
        if changes := compute_extension(config, step):
            name = redact_text(str(config.run.name))
            command = entry_point.format_extend_command(overrides, name, changes)
            print_line(f"extend:        {command}")
    elif exit_code is not ExitCode.DIVERGED:
        print_line(f"resume:        {entry_point.format_resume_command(overrides)}")


def writes_report(config: Config) -> bool:
    """Return True if the run writes a report at its end."""
    is_requested = config.tracking.report
    return SWEEP_POINT_VARIABLE not in os.environ if is_requested is None else is_requested


def _format_all(last: Row) -> str:
    """Return the bits per byte of the last evaluation if it had more text than the others."""
    mean = get_mean(last, "bits_per_byte")
    if get_loop_row(last) is last or mean is None:
        return ""
    error = get_mean(last, "stderr")
    tokens = sum(last["tokens"].values())
    return f"; {mean:.3f}{'' if error is None else f' ± {error:.3f}'} on all {tokens:,} tokens"


def _format_headline(exit_code: ExitCode, step: int, events: list[Row], bits: list[float]) -> str:
    """Return the result; a run with a higher held-out loss than at its start is not complete."""
    if exit_code is ExitCode.FINISHED:
        start = next((row for row in reversed(events) if row["event"] in START_EVENTS), None)
        if start is not None and start["step"] >= step:
            return f"nothing to do: at step {step}"
        if bits and bits[-1] > bits[0]:
            return f"ended at step {step} with a higher held-out loss than at the start"
    reasons = [row.get("reason") for row in events if row["event"] == "diverge"]
    return _HEADLINES[exit_code].format(step=step, reason=reasons[-1] if reasons else "see above")
