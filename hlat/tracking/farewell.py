"""The last lines that a run prints: what it reached, where it lies, how it goes on."""

import shlex
from pathlib import Path

from hlat.config.errors import Exit
from hlat.tracking.journal import Journal

_HEADLINES = {
    Exit.FINISHED: "complete at step {step}",
    Exit.PREEMPTED: "interrupted and saved at step {step}; the same command goes on from there",
    Exit.DIVERGED: "stopped at step {step}: loss or gradient norm is not finite; nothing was saved",
}


def farewell(folder: Path, exit_code: Exit, overrides: list[str]) -> None:
    """Print the last lines; the very last is the command that resumes the run."""
    events = Journal(folder / "events.jsonl").rows()
    print(f"\n{_HEADLINES[exit_code].format(step=events[-1]['step'])}")
    measured = [row["bits_per_byte"]["mean"] for row in events if row["event"] == "evaluate"]
    if measured:
        first_and_last = measured[:: max(1, len(measured) - 1)]
        print(f"held-out bits per byte: {' -> '.join(f'{bits:.3f}' for bits in first_and_last)}")
    print(f"run folder: {folder}")
    print(f"report:     {folder / 'report.html'}")
    print(f"resume:     {_command(exit_code, overrides)}", flush=True)


def _command(exit_code: Exit, overrides: list[str]) -> str:
    """Return what to type; a run that reached run.steps goes on without it."""
    kept = [
        o for o in overrides if exit_code is not Exit.FINISHED or not o.startswith("run.steps=")
    ]
    return shlex.join(["python", "-m", "hlat.train", *kept])
