"""What is asked of Slurm, as commands of separate words: no shell sees any of it."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.config.errors import ConfigError

_FIELDS = "%i|%T|%N|%r"
"""Of squeue: number, state, nodes, reason."""
_SECONDS = 60


@dataclass(frozen=True)
class State:
    """What Slurm knows of a job.

    Attributes:
        name: Such as PENDING or RUNNING.
        nodes: Where it runs, as Slurm abbreviates it.
        reason: Why it does not.
    """

    name: str
    nodes: str
    reason: str


def states(jobs: Sequence[str]) -> dict[str, State]:
    """What Slurm still knows of some jobs; those that ended some minutes ago are forgotten.

    Raises:
        ConfigError: Slurm is not here, or does not answer.
    """
    if not jobs:
        return {}
    # Asked for by number, squeue fails for all once it has forgotten a single one
    told = _ask("squeue", "--noheader", "--states=all", f"--format={_FIELDS}", "--me")
    rows = [line.strip().split("|", 3) for line in told.splitlines()]
    return {row[0]: State(*row[1:]) for row in rows if row[0] in jobs}


def cancel(jobs: Sequence[str]) -> None:
    """End jobs.

    Raises:
        ConfigError: Slurm refuses.
    """
    _ask("scancel", *jobs)


def submit(script: Path, after: str | None) -> str:
    """Send a script and return the number of the job.

    Args:
        script: What `sbatch` takes.
        after: Number of the job that must have succeeded before; None: of none.

    Raises:
        ConfigError: Slurm refuses.
    """
    # Without one too: an older job stands in the script
    words = ("--parsable", f"--dependency={dependency(after) if after else ''}", str(script))
    return _ask("sbatch", *words).strip().partition(";")[0]


def dependency(job: str) -> str:
    """What `sbatch --dependency` calls the success of a job."""
    return f"afterok:{job}"


def refusal(script: str) -> str | None:
    """Why Slurm would not take a script; None: it would."""
    done = _run(["sbatch", "--test-only"], script)
    return None if done.returncode == 0 else _last_line(done.stderr)


def is_preempted(job: str) -> bool:
    """Whether Slurm has told a job to give way to another one.

    Raises:
        ConfigError: Slurm does not answer.
    """
    # As "PreemptEligibleTime=... PreemptTime=None", which is a time from then on
    words = _ask("scontrol", "show", "job", job).split()
    times = [word for word in words if word.startswith("PreemptTime=")]
    return bool(times) and times != ["PreemptTime=None"]


def requeue(job: str, without: Sequence[str]) -> None:
    """Start a job again, on other nodes than some. Only the job itself may; it ends thereby.

    Raises:
        ConfigError: Slurm refuses.
    """
    if not without:
        _ask("scontrol", "requeue", job)
        return
    # Nodes can be ruled out while a job waits only
    _ask("scontrol", "requeuehold", job)
    _ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(without)}")
    _ask("scontrol", "release", job)


def drain(node: str, reason: str) -> bool:
    """Give a node no more jobs; returns whether this user may say so."""
    words = ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"]
    return _run(words).returncode == 0


def _ask(*words: str) -> str:
    done = _run(list(words))
    if done.returncode != 0:
        raise ConfigError(f"{words[0]} {words[1]}: {_last_line(done.stderr)}")
    return done.stdout


def _run(words: list[str], text: str | None = None) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(words, input=text, capture_output=True, text=True, timeout=_SECONDS)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{words[0]} is not on the PATH; start this where Slurm is, on a login node"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{words[0]} has not answered for {_SECONDS} seconds") from error


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it failed without a word"
