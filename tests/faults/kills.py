"""Trials with SIGKILL at random moments of a run.

Half of the moments are uniform over the start-up and the first steps of an attempt, half are within
its first save. A run is killed several times, then ends; all its kills failed if it has a problem.
"""

import contextlib
import os
import random
import signal
import time

from tests.faults import trials

STEPS, EVERY_STEPS, MAX_KILLS = 60, 3, 20
MAX_WAIT_S = 2.5
"""Maximum time from the start of an attempt to a kill outside of a save."""
IN_A_SAVE_S = 0.03
"""Maximum time from the start of a save to a kill within it."""
RUN = trials.build_run_overrides(STEPS, EVERY_STEPS)
WORKER = "data worker"


def kill_supervised(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Kill a rank, all processes or the command of a supervised run."""
    targets = ("rank 0", "rank 1", "all", "command")
    return _kill_run(workspace, (*trials.SUPERVISED, *trials.LAYOUTS[layout]), targets, rng)


def kill_unsupervised(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Kill a run and repeat its command."""
    targets = ("command",) if layout == "single" else ("rank 0", "rank 1", "all", "command")
    return _kill_run(workspace, trials.LAYOUTS[layout], targets, rng)


def kill_data_worker(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Kill the process that prepares batches."""
    overrides = ("data.workers=1", *trials.SUPERVISED, *trials.LAYOUTS[layout])
    return _kill_run(workspace, overrides, (WORKER,), rng)


def _kill_run(
    workspace: trials.Workspace,
    overrides: tuple[str, ...],
    targets: tuple[str, ...],
    rng: random.Random,
) -> list[str]:
    reference, _ = workspace.reference(*RUN, *overrides)
    run = workspace.new_run(*RUN, *overrides)
    killer = Killer(run, targets, rng)
    try:
        num_kills = killer.kill_often()
        killer.problems += trials.finish_and_compare(run, reference)
    finally:
        run.kill_all()
    killer.problems += killer.checker.problems
    resumes = run.events("start", "resume")
    repeated = max((row.get("lost_steps", 0) for row in resumes), default=0)
    if repeated > 2 * EVERY_STEPS:
        killer.problems.append(f"{run.name}: a resume repeated {repeated} steps")
    return ["; ".join(killer.problems)] * num_kills


class Killer:
    """Kills processes of one run at random moments.

    Args:
        run: Run that has not been started.
        targets: `rank N`, `all`, `command` (the process that the user started) or `data worker`.
        rng: Generator of moments and targets.
    """

    def __init__(self, run: trials.Run, targets: tuple[str, ...], rng: random.Random) -> None:
        self._run, self._targets, self._lot = run, targets, rng
        self._num_ready = 0
        self.checker = trials.CheckpointChecker(run.checkpoints())
        self.problems: list[str] = []

    def kill_often(self) -> int:
        """Kill the run until it ends or the maximum is reached; return the number of kills."""
        run, num_kills = self._run, 0
        run.start()
        while num_kills < run.workspace.limit(MAX_KILLS):
            in_a_save = self._lot.random() < 0.5
            if not self._is_alive_after(0 if in_a_save else self._lot.uniform(0, MAX_WAIT_S)):
                break
            if not self._kill(in_a_save):
                break
            num_kills += 1
            if run.process.poll() is not None:
                run.start()
        return num_kills

    def _is_alive_after(self, seconds: float) -> bool:
        """Wait; return True if the run is active. Repeat a command that ended too early."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._run.process.poll() is not None:
                if self._run.process.returncode == 0:
                    return False
                self.problems.append(f"{self._run.name}: ended by itself")
                self._run.start()
            time.sleep(min(left, 0.02))
        return self._run.process.poll() is None

    def _kill(self, in_a_save: bool) -> bool:
        """Kill a target, now or in the next save; return False if the run had ended."""
        run = self._run
        while in_a_save and len(run.events("ready")) == self._num_ready:
            if not self._is_alive_after(0.02):
                return False
        ranks, family = run.ranks(), [run.process.pid, *trials.descendants(run.process.pid)]
        if in_a_save and not self._wait_for_save():
            return False
        before, self._num_ready = self.checker.committed(), len(run.events("ready"))
        target, victims = self._choose(ranks, family)
        for number in victims:
            if number == run.process.pid:
                run.process.kill()
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.checker.check(before)
        if trials.SUPERVISED[0] not in run.arguments or target in ("all", "command"):
            run.wait(timeout_s=60)
            left = trials.find_survivors(family)
            self.problems += [f"{run.name}: killed {target}, left process {pid}" for pid in left]
        return True

    def _wait_for_save(self) -> bool:
        """Wait for the start of the next save; return False if the run ends before."""
        left = self.checker.unfinished()
        while not self.checker.unfinished() - left:
            time.sleep(0.001)
            if self._run.process.poll() is not None:
                return False
        time.sleep(self._lot.uniform(0, IN_A_SAVE_S))
        return True

    def _choose(self, ranks: dict[int, int], family: list[int]) -> tuple[str, list[int]]:
        """Return a target and its processes: the command if the target does not exist yet."""
        target = self._lot.choice(self._targets)
        if target == "all":
            return target, family
        if target == WORKER:
            workers = [pid for pid in family[1:] if pid not in ranks.values()]
            return (target, workers) if workers else ("command", family[:1])
        if target.startswith("rank") and int(target[5:]) in ranks:
            return target, [ranks[int(target[5:])]]
        return "command", family[:1]
