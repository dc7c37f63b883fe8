"""A scheduler's signals, and processes that hang: what is saved, and how long until it is known?

Usage: PYTHONPATH=. python tests/faults/signals.py --forks --output FILE

SIGTERM and SIGUSR2 at random moments to the command that the user started; a random process that
trains is stopped, or hangs by itself in one of several ways; and runs in which something is slow
and nothing hangs.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import spread
from tests.faults import trials

STEPS, EVERY_STEPS = 60, 20
RUN = (*trials.build_run_overrides(STEPS, EVERY_STEPS), "evaluation.every_steps=null")
KINDS = {
    "one process": (),
    "one process, supervised": trials.SUPERVISED,
    "tp 2, supervised": (*trials.SUPERVISED, "parallelism.tp=2"),
}
TIMEOUT_S, DUMP_S = 2.0, 2.0
"""Of a step; and what the supervisor gives to processes for writing where they are."""
TIMEOUTS = (f"recovery.step_timeout_s={TIMEOUT_S:g}", "recovery.start_timeout_s=60")
STOPPED = "SIGSTOP"
HANGS = (
    ("one process, supervised", STOPPED),
    ("tp 2, supervised", STOPPED),
    ("tp 2, supervised", "waits for peers that do not come"),
    ("tp 2, supervised", "holds the GIL"),
    ("one process, supervised", "data worker stopped"),
)
"""Kinds of runs, and what happens to a rank: all but the first is injected."""
SLOW = {
    "first step": {"first_step_s": 3 * TIMEOUT_S},
    "save": {"save_s": 3 * TIMEOUT_S},
    "evaluation": {"evaluation_s": 3 * TIMEOUT_S},
}


@dataclass
class Interrupted:
    """What became of signals to a kind of run."""

    signals: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    before_training: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    steps_until_saved: list[int] = field(default_factory=list)
    steps_run_again: int = 0
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For the result."""
        return {
            **vars(self),
            "seconds": spread(self.seconds) if self.seconds else None,
            "steps_until_saved": dict(Counter(map(str, self.steps_until_saved))),
        }


def wait_until(run: trials.Run, seconds: float) -> bool:
    """Wait; returns whether the command is still running."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and run.process.poll() is None:
        time.sleep(0.005)
    return run.process.poll() is None


def interrupt(run: trials.Run, number: signal.Signals, found: Interrupted) -> None:
    """Send a signal to a running command, and see what it leaves."""
    events = run.rows("events.jsonl")
    training = bool(events) and events[-1]["event"] not in ("interrupt", "finish")
    family, began, at = trials.descendants(run.process.pid), time.monotonic(), time.time()
    run.process.send_signal(number)
    code = run.wait(120)
    found.signals += 1
    found.problems += [f"{run.name}: left process {one}" for one in trials.gone(family)]
    if code == 0:
        return found.codes.update(["0, as it was about to finish"])
    if not training or run.rows("events.jsonl")[-1]["event"] != "interrupt":
        return found.before_training.update([str(code)])
    found.codes[str(code)] += 1
    found.seconds.append(time.monotonic() - began)
    told = run.events("interrupt")[-1]
    rows = run.rows("metrics.jsonl")
    found.steps_until_saved.append(sum(row["time"] > at for row in rows))
    if told["step"] not in trials.Keeper(run.folder / "checkpoints").committed():
        found.problems.append(f"{run.name}: step {told['step']} was not saved")
    if code != 75:
        found.problems.append(f"{run.name}: exit code {code} after {number.name}")
    return None


def terminations(
    place: trials.Place, kind: str, num_trials: int, lot: random.Random
) -> Interrupted:
    """Interrupt runs of a kind at random moments until each has ended."""
    found = Interrupted()
    whole, seconds = reference(place, kind, *KINDS[kind])
    number = 0
    while found.signals < num_trials:
        run = place.run(f"{whole.name}-{number}", *RUN, *KINDS[kind])
        number += 1
        run.start()
        while found.signals < num_trials and wait_until(run, lot.uniform(0, seconds)):
            interrupt(run, lot.choice([signal.SIGTERM, signal.SIGUSR2]), found)
            run.start()
        finish(run, whole, found.problems)
        begun = run.events("resume")
        found.steps_run_again += sum(row.get("lost_steps", 0) for row in begun)
        trials.say(f"{kind}: {found.signals} signals, {found.problems[-3:]}")
        run.remove()
    return found


def finish(run: trials.Run, whole: trials.Run, problems: list[str]) -> None:
    """Wait for a run and compare it with the one that nothing happened to."""
    try:
        problem = f"exit code {code}" if (code := run.wait()) else ""
        problem = problem or trials.differing(run.losses(), whole.losses())
        problems += [f"{run.name}: {problem}"] * bool(problem)
        problems += [f"{run.name}: left {name}" for name in run.place.leftovers()]
    finally:
        run.kill_all()


def reference(place: trials.Place, name: str, *overrides: str) -> tuple[trials.Run, float]:
    """A run that nothing happens to, and how long it took."""
    run = place.run("whole-" + name.replace(" ", "-").replace(",", ""), *RUN, *overrides)
    began = time.monotonic()
    if code := run.finish():
        raise RuntimeError(f"{name} ended with {code}: {run.printed}")
    return run, time.monotonic() - began


def hangs(
    place: trials.Place, kind: str, way: str, num_trials: int, lot: random.Random
) -> dict[str, Any]:
    """Let a process that trains hang at a random moment of each run."""
    noticed: list[float] = []
    problems: list[str] = []
    overrides = (*KINDS[kind], *TIMEOUTS)
    if way.startswith("data worker"):
        overrides += ("data.workers=1",)
    whole, _ = reference(place, f"{kind} {way}", *overrides)
    trained = [row["time"] for row in whole.rows("metrics.jsonl")]
    for number in range(num_trials):
        run = place.run(f"{whole.name}-{number}", *RUN, *overrides)
        if way == STOPPED:
            run.start()
            while run.last_step() < 2:
                time.sleep(0.01)
            wait_until(run, lot.uniform(0, 0.8 * (trained[-1] - trained[2])))
            at, num_ranks = stop(run, lot)
        else:
            num_ranks = 2 if kind.startswith("tp 2") else 1
            once = place.folder / f"{run.name}.hung"
            run.inject(
                hang=[lot.randrange(num_ranks), lot.randrange(3, STEPS - 10), way, str(once)]
            )
            run.start()
            while run.process.poll() is None and not once.exists():
                time.sleep(0.01)
            at = once.stat().st_mtime if once.exists() else None
        seconds = None if at is None else until_restart(run, at, num_ranks, problems)
        noticed += [] if seconds is None else [seconds]
        finish(run, whole, problems)
        trials.say(f"{kind}, {way}: {len(noticed)} of {number + 1} hangs noticed, {problems[-3:]}")
        run.remove()
    late = [seconds for seconds in noticed if seconds > TIMEOUT_S + DUMP_S + 1]
    return {
        "hung": len(noticed),
        "step_timeout_s": TIMEOUT_S,
        "seconds_until_restart": spread(noticed),
        "over_timeout_dump_and_1_s": len(late),
        "problems": problems,
    }


def stop(run: trials.Run, lot: random.Random) -> tuple[float | None, int]:
    """Stop a rank; returns when, None if the run was over, and how many ranks there are."""
    there = run.ranks()
    if not there or run.events("finish"):
        return None, 0
    at, rank = time.time(), lot.choice([*there])
    os.kill(there[rank], signal.SIGSTOP)
    return at, len(there)


def until_restart(run: trials.Run, at: float, num_ranks: int, problems: list[str]) -> float | None:
    """Wait for the restart; returns the seconds since a time, None if the run ended by itself."""
    while run.process.poll() is None and not run.events("restart"):
        time.sleep(0.01)
    restarts = run.events("restart")
    if run.process.returncode == 0 and not restarts:
        return None  # it had ended when it was to hang
    if not restarts:
        problems.append(f"{run.name}: exit code {run.process.returncode} instead of a restart")
        return None
    stacks = (run.folder / "logs/node_0.stacks").read_text()
    missing = [rank for rank in range(num_ranks) if f"rank {rank}:\nno stacks" in stacks]
    if missing or stacks.count("rank ") < num_ranks:
        problems.append(f"{run.name}: no stacks of ranks {missing}")
    if "no heartbeat" not in restarts[0]["reason"]:
        problems.append(f"{run.name}: {restarts[0]['reason']}")
    return float(restarts[0]["time"] - at)


def patience(place: trials.Place) -> dict[str, Any]:
    """Runs in which one thing takes three times as long as a step may."""
    result = {}
    for name, fault in SLOW.items():
        for saves in ("true", "false"):
            overrides = (*KINDS["tp 2, supervised"], *TIMEOUTS, "evaluation.every_steps=30")
            title = f"slow {name}, asynchronous={saves}"
            run = place.run(title.replace(" ", "-").replace(",", "").replace("=", "-"), *RUN)
            run.words += [*overrides, f"checkpoint.asynchronous={saves}"]
            run.inject(**fault)
            code = run.finish()
            result[title] = {"exit_code": code, "restarts": len(run.events("restart"))}
            trials.say(f"{title}: {result[title]}")
            run.remove()
    return result


def main() -> None:
    parser = trials.arguments("Signals at random moments, and hangs.", 100)
    parser.add_argument("--hangs", type=int, default=25, help="of each kind")
    asked = parser.parse_args()
    lot, share = random.Random(asked.seed), -(-asked.trials // len(KINDS))
    earlier = json.loads(asked.output.read_text()) if asked.output and asked.output.exists() else {}
    told: dict[str, Any] = {"signals": {}, "hangs": {}, **earlier, "forked": asked.forks}
    told |= {"steps": STEPS, "every_steps": EVERY_STEPS}
    with trials.somewhere(asked.folder, asked.forks) as place:
        for kind in KINDS if share else ():
            told["signals"][kind] = terminations(place, kind, share, lot).to_json()
            trials.conclude(told, asked.output)
        for kind, way in HANGS if asked.hangs else ():
            told["hangs"][f"{kind}: {way}"] = hangs(place, kind, way, asked.hangs, lot)
            trials.conclude(told, asked.output)
        told["nothing_hangs"] = patience(place)
    trials.conclude(told, asked.output)


if __name__ == "__main__":
    trials.run_script(main)
