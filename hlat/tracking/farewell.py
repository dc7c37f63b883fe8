"""The last lines that a run prints: what it reached, where it lies, how it goes on."""

from pathlib import Path

from hlat.config.errors import Exit
from hlat.tracking.console import tell
from hlat.tracking.journal import Journal

_HEADLINES = {
    Exit.FINISHED: "complete at step {step}",
    Exit.FAILED: "ended at step {step}, and that state could not be saved",
    Exit.UNHEALTHY_NODE: "ended at step {step}, which was not saved, because of a node",
    Exit.PREEMPTED: "interrupted and saved at step {step}; the same command goes on from there",
    Exit.DIVERGED: "diverged at step {step}, which was not saved; events.jsonl says by what",
}


def farewell(folder: Path, exit_code: Exit, step: int, resume_command: str, uptime: str) -> None:
    """Print the last lines; the very last is the command that resumes the run.

    Args:
        folder: The run folder.
        exit_code: How the run ended.
        step: Where.
        resume_command: What to type to go on.
        uptime: What to tell of earlier attempts; empty if there is nothing to tell.
    """
    tell(f"\n{_HEADLINES[exit_code].format(step=step)}")
    events = Journal(folder / "events.jsonl").rows()
    measured = [row["bits_per_byte"]["mean"] for row in events if row["event"] == "evaluate"]
    if None not in measured and len(measured) > 1:
        tell(f"held-out bits per byte: {measured[0]:.3f} -> {measured[-1]:.3f}")
    if uptime:
        tell(uptime)
    tell(f"run folder: {folder}")
    tell(f"report:     {folder / 'report.html'}")
    tell(f"resume:     {resume_command}")
