"""kill -9 at random moments of a run: is a checkpoint lost, a step counted twice, a process left?

Usage: PYTHONPATH=. python tests/faults/kills.py --trials 100 --output FILE

Half of the moments are uniform from the start of a command, or of its restart, over the time that a
whole run takes; the others lie in a save, the first one after such a moment. A run is killed until
it ends.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.faults import trials

STEPS, EVERY_STEPS = 60, 3
IN_A_SAVE_S = 0.03
"""Kills that are meant for a save come at most so long after its beginning."""
RUN = trials.build_run_overrides(STEPS, EVERY_STEPS)


@dataclass(frozen=True)
class Arm:
    """A kind of trials: overrides, and what may be killed."""

    overrides: tuple[str, ...]
    targets: tuple[str, ...]


TWO = ("parallelism.tp=2",)
WORKER = ("data.workers=1",)
ARMS = {
    "one process, same command": Arm((), ("command",)),
    "one process, supervised": Arm(trials.SUPERVISED, ("rank 0", "all", "command")),
    "tp 2, same command": Arm(TWO, ("rank 0", "rank 1", "all", "command")),
    "tp 2, supervised": Arm((*TWO, *trials.SUPERVISED), ("rank 0", "rank 1", "all", "command")),
    "data worker, supervised": Arm((*WORKER, *trials.SUPERVISED), ("data worker",)),
}
"""`command` is the process that the user started: the supervisor, where there is one."""


@dataclass
class Found:
    """What became of the kills of an arm."""

    kills: Counter[str] = field(default_factory=Counter)
    in_startup: int = 0
    in_a_save: int = 0
    runs: int = 0
    problems: list[str] = field(default_factory=list)
    steps_run_again: list[int] = field(default_factory=list)
    verified: int = 0

    def to_json(self) -> dict[str, Any]:
        """For the result."""
        number, again = self.kills.total(), self.steps_run_again
        return {
            "kills": number,
            "killed": dict(self.kills),
            "runs": self.runs,
            "in_startup": self.in_startup,
            "in_a_save": self.in_a_save,
            "share_in_a_save": round(self.in_a_save / max(1, number), 3),
            "checkpoints_verified": self.verified,
            "problems": self.problems,
            "steps_run_again": {str(k): v for k, v in sorted(Counter(again).items())},
            "most_steps_run_again": max(again, default=0),
        }


class Trial:
    """One run that is killed until it ends.

    Args:
        run: Not started.
        arm: What is killed.
        seconds: That a whole run takes.
        lot: Draws moments and targets.
        found: Where results go.
    """

    def __init__(
        self, run: trials.Run, arm: Arm, seconds: float, lot: random.Random, found: Found
    ) -> None:
        self._run, self._arm, self._seconds, self._lot, self._found = run, arm, seconds, lot, found
        self._keeper, self._readied = trials.Keeper(run.folder / "checkpoints"), 0

    def go(self, kills: int, expected: list[tuple[int, float]]) -> None:
        """Kill the run at most so often, then let it end; compare it with the uninterrupted one."""
        run, found = self._run, self._found
        run.start()
        while found.kills.total() < kills and self._alive_after(
            self._lot.uniform(0, self._seconds)
        ):
            if not self._kill(in_a_save=self._lot.random() < 0.5):
                break
            if run.process.poll() is not None:
                run.start()
        code = run.wait()
        problem = f"exit code {code}" if code else trials.differing(run.losses(), expected)
        if problem:
            found.problems.append(f"{run.name}: {problem}")
        found.problems += self._keeper.problems
        found.verified += self._keeper.verified
        found.problems += [f"{run.name}: left {name}" for name in run.place.leftovers()]
        begun = run.events("start", "resume")
        found.steps_run_again += [row["lost_steps"] for row in begun if "lost_steps" in row]
        found.runs += 1

    def _alive_after(self, seconds: float) -> bool:
        """Wait; returns whether the run goes on. A command that ended too early is given again."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._run.process.poll() is not None:
                if self._run.process.returncode == 0:
                    return False
                self._found.problems.append(f"{self._run.name}: ended by itself")
                self._run.start()
            time.sleep(min(left, 0.02))
        return self._run.process.poll() is None

    def _kill(self, in_a_save: bool) -> bool:
        """Kill something, at once or in the next save; returns whether the run had not ended."""
        run, found = self._run, self._found
        while in_a_save and len(run.events("ready")) == self._readied:
            if not self._alive_after(0.02):
                return False
        ranks, family = run.ranks(), [run.process.pid, *trials.descendants(run.process.pid)]
        if in_a_save and not self._wait_for_save():
            return False
        before, readied = self._keeper.committed(), len(run.events("ready"))
        target, victims = self._choose(ranks, family)
        for number in victims:
            if number in family[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            else:
                run.process.kill()
        found.in_a_save += self._keeper.was_writing()
        found.in_startup += readied == self._readied
        self._readied = readied
        found.kills[target] += 1
        self._keeper.check(before)
        self._end(target, family)
        return True

    def _wait_for_save(self) -> bool:
        """Wait until the next save has begun; returns whether one has."""
        left = self._keeper.unfinished()
        while not self._keeper.unfinished() - left:
            time.sleep(0.001)
            if self._run.process.poll() is not None:
                return False
        time.sleep(self._lot.uniform(0, IN_A_SAVE_S))
        return True

    def _choose(self, ranks: dict[int, int], family: list[int]) -> tuple[str, list[int]]:
        """What is killed, and its processes: the command where the target is not there yet."""
        target = self._lot.choice(self._arm.targets)
        if target == "all":
            return target, family
        if target == "data worker":
            workers = [number for number in family[1:] if number not in ranks.values()]
            return (target, workers) if workers else ("command", family[:1])
        if target.startswith("rank") and int(target[5:]) in ranks:
            return target, [ranks[int(target[5:])]]
        return "command", family[:1]

    def _end(self, target: str, family: list[int]) -> None:
        """See to it that what should end does."""
        run, supervised = self._run, trials.SUPERVISED[0] in self._arm.overrides
        if supervised and target not in ("all", "command"):
            return
        run.wait(timeout_s=60)
        if left := trials.gone(family):
            self._found.problems.append(
                f"{run.name}: processes left after killing {target}: {left}"
            )


def run_arm(place: trials.Place, name: str, kills: int, seed: int) -> Iterator[dict[str, Any]]:
    """Kill runs of an arm until so many kills have been done; tell what was found after each."""
    arm, lot, found = ARMS[name], random.Random(f"{seed} {name}"), Found()
    whole = place.run(f"whole-{name.replace(' ', '-').replace(',', '')}", *RUN, *arm.overrides)
    began = time.monotonic()
    if code := whole.finish():
        raise RuntimeError(f"the uninterrupted run ended with {code}: {whole.printed}")
    seconds, expected = time.monotonic() - began, whole.losses()
    trials.say(f"{name}: a whole run takes {seconds:.1f} s")
    while found.kills.total() < kills:
        began, before = time.monotonic(), found.kills.total()
        run = place.run(f"{whole.name}-{found.runs}", *RUN, *arm.overrides)
        try:
            Trial(run, arm, seconds, lot, found).go(kills, expected)
        finally:
            run.kill_all()
        if found.kills.total() == before:
            seconds = min(seconds, time.monotonic() - began)
        trials.say(f"{name}: {found.kills.total()} kills, {len(found.problems)} problems")
        for problem in found.problems[-3:]:
            trials.say(f"    {problem}")
        run.remove()
        yield {
            "forked": place.forks,
            "whole_run_s": round(seconds, 2),
            "whole_run_steps": STEPS,
            **found.to_json(),
        }


def main() -> None:
    parser = trials.arguments("kill -9 at random moments; --trials kills of each arm.", 100)
    parser.add_argument("--arms", nargs="*", default=[*ARMS], choices=[*ARMS], metavar="ARM")
    asked = parser.parse_args()
    earlier = json.loads(asked.output.read_text()) if asked.output and asked.output.exists() else {}
    result = earlier.get("arms", {})
    for name in asked.arms:
        folder = asked.folder and asked.folder / name.replace(",", "").replace(" ", "-")
        with trials.somewhere(folder, asked.forks) as place:
            for found in run_arm(place, name, asked.trials, asked.seed):
                result[name] = found
                trials.note({"every_steps": EVERY_STEPS, "arms": result}, asked.output)
    trials.conclude({"every_steps": EVERY_STEPS, "arms": result}, asked.output)


if __name__ == "__main__":
    trials.run_script(main)
