"""The last lines that a run prints."""

from pathlib import Path

from hlat.config.config_errors import ExitCode
from hlat.tracking.console_logger import print_line
from hlat.tracking.jsonl_log import JsonlLog

_HEADLINES = {
    ExitCode.FINISHED: "complete at step {step}",
    ExitCode.FAILED: "ended at step {step}; this state could not be saved",
    ExitCode.UNHEALTHY_NODE: "ended at step {step} because of an unhealthy node; not saved",
    ExitCode.PREEMPTED: "interrupted and saved at step {step}; the same command resumes the run",
    ExitCode.DIVERGED: "diverged at step {step}, not saved; see events.jsonl for the reason",
}


def print_summary(
    run_dir: Path, exit_code: ExitCode, step: int, resume_command: str, uptime: str
) -> None:
    """Print the result of a run; the last line is the command that resumes it.

    `uptime` is a line on all attempts, and may be empty.
    """
    print_line(f"\n{_HEADLINES[exit_code].format(step=step)}")
    events = JsonlLog(run_dir / "events.jsonl").read_rows()
    bits = [row["bits_per_byte"]["mean"] for row in events if row["event"] == "evaluate"]
    if None not in bits and len(bits) > 1:
        print_line(f"held-out bits per byte: {bits[0]:.3f} -> {bits[-1]:.3f}")
    if uptime:
        print_line(uptime)
    print_line(f"run directory: {run_dir}")
    print_line(f"report:        {run_dir / 'report.html'}")
    print_line(f"resume:        {resume_command}")
