"""What became of jobs: a row per run or evaluation, from its folder and what Slurm still knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.errors import Exit
from hlat.jobs import slurm
from hlat.jobs.evaluation import scores
from hlat.jobs.submission import Place, Submission, newest
from hlat.tracking.journal import Journal

ALIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD")
"""States of a job that goes on, or may."""
_ENDS = {
    Exit.FINISHED: "COMPLETED",
    Exit.CONFIGURATION: "REFUSED",
    Exit.DIVERGED: "DIVERGED",
    Exit.PREEMPTED: "INTERRUPTED",
}
_HEADINGS = ("run", "job", "state", "attempt", "nodes", "step", "loss", "last event")


@dataclass(frozen=True)
class Before:
    """A job that makes what the run's job needs.

    Attributes:
        place: Its submission.
        job: Its number.
        state: As of a row.
    """

    place: Place
    job: str
    state: str

    @property
    def alive(self) -> bool:
        """Whether the job runs, or will."""
        return self.state in ALIVE

    @property
    def complete(self) -> bool:
        """Whether it made it."""
        return self.state == _ENDS[Exit.FINISHED]


@dataclass(frozen=True)
class Row:
    """A run or an evaluation that was sent.

    Attributes:
        place: Its newest submission.
        does: What the job does, in a word.
        job: The number of its job.
        state: Slurm's word for it while it has one, then ours for how it ended.
        attempt: Times that the job was started.
        nodes: Where it runs, or ran last.
        step: The last that was logged, or that has scores; None: none has.
        loss: Its loss.
        event: The last of its events, with what it tells, or those scores; why it waits, if it
            does.
        before: The job that it waits for, or whose success it missed.
    """

    place: Place
    does: str
    job: str
    state: str
    attempt: int
    nodes: str
    step: int | None
    loss: float | None
    event: str
    before: "Before | None"

    @property
    def alive(self) -> bool:
        """Whether the job runs, or will."""
        return self.state in ALIVE

    @property
    def jobs(self) -> list[str]:
        """The numbers of its jobs that run, or will."""
        first = [self.before.job] if self.before is not None and self.before.alive else []
        return [*first, self.job] if self.alive else first

    @property
    def failed(self) -> bool:
        """Whether it ended, and not because the run was complete."""
        return not self.alive and self.state != _ENDS[Exit.FINISHED]


def rows(folders: Sequence[Path]) -> list[Row]:
    """What became of the newest job of each run or evaluation.

    Raises:
        ConfigError: Slurm does not answer.
    """
    places = [place for folder in folders if (place := newest(folder)) is not None]
    jobs = {place: place.job for place in places}
    before = {place: place.before for place in places}
    first = [place.job for place in before.values() if place is not None]
    known = slurm.states([job for job in (*jobs.values(), *first) if job is not None])
    return [
        _row(place, job, known, before[place]) for place, job in jobs.items() if job is not None
    ]


def table(found: Sequence[Row]) -> str:
    """The rows as text, in columns."""
    lines = [_HEADINGS, *map(_cells, found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in padded)


def _row(place: Place, job: str, known: dict[str, slurm.State], first: Place | None) -> Row:
    state = known.get(job)
    attempts = _attempts(place, job)
    before = None
    if first is not None and first.job is not None:
        told = _state(known.get(first.job), _attempts(first, first.job))
        before = Before(first, first.job, told)
    starts = [row for row in attempts if row["event"] == "start"]
    submission = place.load()
    last, told = _progress(place, submission)
    return Row(
        place=place,
        does=submission.does,
        job=job,
        state=_state(state, attempts),
        attempt=starts[-1]["attempt"] if starts else 0,
        nodes=(state.nodes if state else "") or (starts[-1]["nodes"] if starts else ""),
        step=last.get("step"),
        loss=last.get("loss"),
        event=_event(state, told, None if attempts else before),
        before=before,
    )


def _progress(place: Place, submission: Submission) -> tuple[dict[str, Any], str]:
    """How far it is, by step, and what it has told of last."""
    if submission.scores is not None:
        known = scores(Path(submission.scores))
        last = known[-1] if known else {"scores": {}}
        told = ", ".join(f"{name} {value:.1f}" for name, value in last["scores"].items())
        return last, told
    metrics = Journal(place.run_folder / "metrics.jsonl").rows()
    events = Journal(place.run_folder / "events.jsonl").rows()
    last = metrics[-1] if metrics else {}
    if not events:
        return last, ""
    reason = events[-1].get("reason") or events[-1].get("reasons") or ""
    return last, f"{events[-1]['event']} {reason}".rstrip()


def _attempts(place: Place, job: str) -> list[dict[str, Any]]:
    return [row for row in place.attempts.rows() if row["job"] == job]


def _state(state: slurm.State | None, attempts: list[dict[str, Any]]) -> str:
    """Slurm's word, or ours where it says less: its FAILED is any exit code but 0."""
    if state is not None and state.name not in ("FAILED", "COMPLETED"):
        return state.name
    if attempts and attempts[-1]["event"] == "end":
        return _ENDS.get(attempts[-1]["exit"], "FAILED")
    return "LOST" if state is None else state.name


def _event(state: slurm.State | None, told: str, before: Before | None) -> str:
    if before is not None and not before.complete:
        return f"job {before.job} compiles before: {before.state}"
    if state is not None and state.name == "PENDING":
        return f"waits: {state.reason}"
    return told


def _cells(row: Row) -> tuple[str, ...]:
    folder = row.place.run_folder
    of_model = f"{folder.parent.parent.name}: " if row.does == "evaluates" else ""
    return (
        f"{of_model}{folder.name}",
        row.job,
        row.state,
        str(row.attempt),
        row.nodes,
        "" if row.step is None else str(row.step),
        "" if row.loss is None else f"{row.loss:.4f}",
        row.event,
    )
