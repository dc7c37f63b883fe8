"""One attempt of a Slurm job, on its first node: starts its program on all nodes, and ends it well.

    python <submission>/code hlat.jobs.attempt <submission>

It passes the early signal on, reads how the run ended, and starts the job again where the exit code
says so (hlat.config.errors.Exit). It trains and evaluates nothing, and needs no torch.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hlat.config.errors import ConfigError, Exit
from hlat.engine import processes
from hlat.jobs import slurm
from hlat.jobs.evaluation import scores
from hlat.jobs.submission import Place, Submission
from hlat.tracking.journal import Journal

_SECONDS_TO_BE_ENDED = 120
"""After it was requeued, until Slurm ends this process."""
_NEVER_AGAIN = (Exit.FINISHED, Exit.CONFIGURATION, Exit.DIVERGED)


@dataclass(frozen=True)
class Ending:
    """How an attempt ended, as far as it decides whether there is another one.

    Attributes:
        exit: Code of the run, or of what else the job does.
        step: The last that was logged; of an evaluation how many scores there are.
        asked: Whether it ended because its time was up, or because it has to give way to another
            job; and not because somebody cancelled it.
        bad_nodes: Nodes that it found unhealthy.
        counted: What `step` counts.
    """

    exit: int
    step: int
    asked: bool
    bad_nodes: tuple[str, ...] = ()
    counted: str = "step"


def again(ending: Ending, earlier: list[int], attempts_left: int) -> str | None:
    """Why the job is to be started again; None: it is not.

    Args:
        ending: Of this attempt.
        earlier: Last step of each attempt before that failed, none of which was told to stop.
        attempts_left: How many more there may be.
    """
    if ending.exit in _NEVER_AGAIN or attempts_left <= 0:
        return None
    if ending.exit == Exit.PREEMPTED:
        return "it was asked to save and end" if ending.asked else None
    if ending.exit == Exit.UNHEALTHY_NODE and ending.bad_nodes:
        return f"unhealthy: {', '.join(ending.bad_nodes)}"
    if earlier and ending.step <= earlier[-1]:
        return None
    return f"it failed at {ending.counted} {ending.step}"


class Attempt:
    """One start of a job."""

    def __init__(self, place: Place, environment: Mapping[str, str]) -> None:
        """Read what to start, and where Slurm says that this is."""
        self._place, self._submission = place, place.load()
        self._environment = environment
        self._job = environment["SLURM_JOB_ID"]
        self._number = int(environment.get("SLURM_RESTART_COUNT", 0)) + 1
        self._stop = place.folder / f"stop.{self._job}.{self._number}"
        self._began = time.time()
        self._ended_by_slurm = False

    def run(self) -> int:
        """Start the run on all nodes, wait, and start the job again if need be; return the code."""
        self._stop.unlink(missing_ok=True)
        nodes = self._environment["SLURM_JOB_NODELIST"]
        self._note("start", nodes=nodes)
        print(f"hlat: job {self._job}, attempt {self._number} on {nodes}", flush=True)
        _allow_open_files(self._submission.open_files)
        for number, handler in ((signal.SIGUSR2, self._ask), (signal.SIGTERM, self._remember)):
            signal.signal(number, handler)
        ending = self._ending(self._steps())
        reason = self._reason(ending)
        self._note("end", exit=ending.exit, step=ending.step, again=reason)
        if reason is not None:
            self._requeue(ending, reason)
        return ending.exit

    def _steps(self) -> int:
        """Run the commands on all nodes, one after the other; return the code of the last."""
        for command in self._submission.commands:
            words = srun(self._submission, command, self._environment)
            if code := subprocess.Popen(words, env=self._variables()).wait():
                return code
        return Exit.FINISHED

    def _variables(self) -> dict[str, str]:
        port = 20000 + int(self._job) % 10000  # below those that Linux gives to clients
        first = processes.first_host(self._environment["SLURM_JOB_NODELIST"])
        return {
            **self._environment,
            **self._submission.environment,
            processes.NODES: str(self._submission.nodes),
            processes.MEETING: f"{first}:{port}",
            processes.STOP: str(self._stop),
        }

    def _ending(self, code: int) -> Ending:
        """How it ended; srun says 0 also of tasks that a signal has ended."""
        if not self._submission.trains:
            return self._ending_of_others(code)
        events = Journal(self._place.run_folder / "events.jsonl").rows()
        done = any(row["event"] == "finish" for row in events)
        if code not in [*Exit] or (code == Exit.FINISHED and not done):
            code = Exit.FAILED
        now = [row for row in events if row["time"] >= self._began]
        bad = {str(row["host"]): None for row in now if row["event"] == "exclude"}
        rows = Journal(self._place.run_folder / "metrics.jsonl").rows()
        step = int(rows[-1]["step"]) if rows else 0
        return Ending(int(code), step, self._was_asked(code), tuple(bad))

    def _ending_of_others(self, code: int) -> Ending:
        """The same of an evaluation, and of what compiles, which hears of nobody's asking."""
        if code not in [*Exit] or (code == Exit.FINISHED and self._ended_by_slurm):
            code = Exit.FAILED
        if self._submission.scores is None:
            return Ending(int(code), 0, asked=False)
        known = scores(Path(self._submission.scores))
        done = sum(len(row["tasks"]) for row in known)
        return Ending(int(code), done, self._was_asked(code), counted="score")

    def _was_asked(self, code: int) -> bool:
        """Whether it was to end by then, and may go on later."""
        return self._stop.exists() or (code == Exit.PREEMPTED and slurm.is_preempted(self._job))

    def _reason(self, ending: Ending) -> str | None:
        if self._ended_by_slurm and not ending.asked:
            return None
        ends = [row for row in self._place.attempts.rows() if row["event"] == "end"]
        earlier = [row["step"] for row in ends if row["job"] == self._job and _failed(row["exit"])]
        return again(ending, earlier, self._submission.max_attempts - self._number)

    def _requeue(self, ending: Ending, reason: str) -> None:
        print(f"hlat: job {self._job} is started again: {reason}", flush=True)
        drained = [node for node in ending.bad_nodes if slurm.drain(node, "hlat: unhealthy")]
        without = [node for node in ending.bad_nodes if node not in drained]
        earlier = [row.get("without", []) for row in self._place.attempts.rows()]
        without += [node for nodes in earlier for node in nodes if node not in without]
        if without:
            self._note("exclude", without=without)
        slurm.requeue(self._job, without)
        time.sleep(_SECONDS_TO_BE_ENDED)

    def _note(self, event: str, **fields: object) -> None:
        row = {"event": event, "job": self._job, "attempt": self._number, "time": time.time()}
        self._place.attempts.append(row | fields)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Ask the run to save and to end; its supervisors look for the file."""
        self._stop.touch()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        """Slurm ends the job; it comes back only if Slurm itself starts it again."""
        self._ended_by_slurm = True


def srun(submission: Submission, command: list[str], environment: Mapping[str, str]) -> list[str]:
    """The words that start a command once on every node, with all that the node has.

    One that fails does not end the others: supervisors agree, and each exits with what they agreed
    on. A node whose supervisor does not answer is waited for a minute.
    """
    cpus = environment.get("SLURM_CPUS_ON_NODE", "1")
    return [
        "srun",
        f"--nodes={submission.nodes}",
        f"--ntasks={submission.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        "--cpu-bind=none",
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--wait=60",
        *submission.options,
        *command,
    ]


def _failed(code: int) -> bool:
    return code not in (*_NEVER_AGAIN, Exit.PREEMPTED, Exit.UNHEALTHY_NODE)


def _allow_open_files(wanted: int) -> None:
    """Raise the soft limit, which Slurm takes over from the login node, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def main(words: list[str]) -> int:
    """Run the attempt whose submission lies in the folder that is named; return the exit code."""
    try:
        return Attempt(Place(Path(words[0])), os.environ).run()
    except ConfigError as error:
        print(f"hlat: {error}", file=sys.stderr)
        return Exit.FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
