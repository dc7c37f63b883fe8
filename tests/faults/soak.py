"""An hour of one run under faults that come at random: does the ledger close, and was it foreseen?

Usage: PYTHONPATH=. python tests/faults/soak.py --minutes 60 --output FILE

One process trains under hlat's supervisor. Faults come as a
Poisson process, whatever the run does at that moment, each drawn from `FAULTS`. A command that has
ended is given again at once. Each step idles for a while, as if a device worked, so that its length
does not hang on who else uses the machine.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import spread
from hlat.recovery.goodput import TimeLedger
from hlat.report.run_record import load_run_record
from tests.faults.trials import (
    REPOSITORY,
    SUPERVISED,
    Keeper,
    Place,
    arguments,
    conclude,
    descendants,
    differing,
    gone,
    say,
    somewhere,
)

EVERY_STEPS, STEP_S, TIMEOUT_S = 5, 0.1, 2.0
OVERRIDES = (
    *SUPERVISED,
    "schedule.total_steps=1000000",
    f"checkpoint.every_steps={EVERY_STEPS}",
    "evaluation.every_steps=null",
    "optimizer.lr=1e-4",
    "recovery.spike_margin=1000",
    f"recovery.step_timeout_s={TIMEOUT_S:g}",
    "recovery.start_timeout_s=60",
    "tracking.console=lines",
)
FAULTS = ("kill a rank", "stop a rank", "terminate the command", "kill the supervisor", "NaN")
ENDING = FAULTS[:4]
"""Faults that end an attempt."""
NAN_STEPS_AHEAD = 15


@dataclass
class Fault:
    """What was done to the run, and when.

    Attributes:
        kind: One of `FAULTS`.
        time: Unix time.
        training: Whether steps were being run, rather than a start or an end.
        saving: Whether a save was under way.
        noticed: Unix time at which somebody could have begun to start again.
        ready: Unix time at which the next step could run; None: another fault came first.
    """

    kind: str
    time: float
    training: bool
    saving: bool = False
    noticed: float | None = None
    ready: float | None = None


class Soak:
    """The run, what is done to it, and what is seen from outside.

    Args:
        place: Where.
        mean_s: Mean time between faults.
        seed: Of their times and kinds.
    """

    def __init__(self, place: Place, mean_s: float, seed: int) -> None:
        self.run, self.nan = place.run("soak", *OVERRIDES), place.folder / "nan"
        self.run.inject(step_s=STEP_S, nan=str(self.nan))
        self.keeper = Keeper(self.run.folder / "checkpoints")
        self.lot, self.mean_s = random.Random(seed), mean_s
        self.faults: list[Fault] = []
        self.orphans: list[int] = []
        self.commands, self.codes = 0, dict[str, int]()
        self.leftovers_most = 0

    def go(self, seconds: float) -> None:
        """Let faults come for so long, then end the run with a signal."""
        began = time.time()
        self._command()
        due = began + self.lot.expovariate(1 / self.mean_s)
        while time.time() < began + seconds:
            if self.run.process.poll() is not None:
                self._ended()
                self._command()
            if time.time() >= due:
                self._strike(self.lot.choice(FAULTS))
                due += self.lot.expovariate(1 / self.mean_s)
            time.sleep(0.02)
        self._until_training()
        self.run.process.send_signal(signal.SIGTERM)
        self.run.wait()
        self._ended()

    def _command(self) -> None:
        self.commands += 1
        self.run.start()

    def _ended(self) -> None:
        code = str(self.run.process.returncode)
        self.codes[code] = self.codes.get(code, 0) + 1
        if self.faults and self.faults[-1].noticed is None and self.faults[-1].kind in ENDING:
            self.faults[-1].noticed = time.time()

    def _until_training(self) -> None:
        while not self._training():
            if self.run.process.poll() is not None:
                self._ended()
                self._command()
            time.sleep(0.05)

    def _training(self) -> bool:
        """Whether the newest event says that steps are being run."""
        told = self.run.rows("events.jsonl")[-1:]
        over = ("restart", "interrupt", "start", "resume", "finish", "give_up", "fail")
        return bool(told) and told[0]["event"] not in over and self.run.process.poll() is None

    def _strike(self, kind: str) -> None:
        run, before = self.run, self.keeper.committed()
        ranks = run.ranks()
        if kind in FAULTS[:2] and not ranks:
            kind = "kill the supervisor"  # it has not started any yet
        fault = Fault(kind, time.time(), self._training())
        if kind == "kill a rank":
            os.kill(ranks[self.lot.choice([*ranks])], signal.SIGKILL)
        elif kind == "stop a rank":
            os.kill(ranks[self.lot.choice([*ranks])], signal.SIGSTOP)
        elif kind == "terminate the command":
            run.process.send_signal(signal.SIGTERM)
        elif kind == "kill the supervisor":
            others = descendants(run.process.pid)
            run.process.kill()
            run.process.wait()
            self.orphans += gone(others)
        else:
            with self.nan.open("a") as file:
                file.write(f"{run.last_step() + NAN_STEPS_AHEAD}\n")
        fault.saving = self.keeper.was_writing()
        self.faults.append(fault)
        self.keeper.check(before)
        self.leftovers_most = max(self.leftovers_most, len(run.place.leftovers()))
        if len(self.faults) % 10 == 0:
            problems = len(self.keeper.problems) + len(self.orphans)
            say(f"{len(self.faults)} faults, step {run.last_step()}, {problems} problems")


def book(faults: list[Fault], events: list[dict[str, Any]]) -> None:
    """Note for each fault that ended an attempt when that was noticed and when steps ran again."""
    ending = [fault for fault in faults if fault.kind in ENDING]
    for fault, following in zip(ending, [*ending[1:], None], strict=True):
        until = following.time if following else float("inf")
        for row in events:
            if not fault.time < row["time"] < until:
                continue
            if row["event"] == "restart" and fault.noticed is None:
                fault.noticed = row["time"]
            if row["event"] == "ready" and fault.noticed and row["time"] > fault.noticed:
                fault.ready = fault.ready or row["time"]


def measure(soak: Soak, ledger: TimeLedger) -> dict[str, float]:
    """What the prediction asks for, measured in this run."""
    book(soak.faults, soak.run.rows("events.jsonl"))
    ending = [fault for fault in soak.faults if fault.kind in ENDING]
    found = [fault for fault in ending if fault.noticed and fault.training]
    again = [fault.ready - fault.noticed for fault in found if fault.ready and fault.noticed]
    saves = soak.run.events("checkpoint")
    steps = soak.run.last_step()
    compile_s = ledger.seconds["compile"] / max(1, len(ledger.attempts))
    return {
        "mtbf_h": ledger.wall_seconds / len(ending) / 3600,
        "detect_s": statistics.mean(fault.noticed - fault.time for fault in found),
        "response_s": 0.0,
        "restart_s": statistics.mean(again) + compile_s,
        "load_s": 0.0,
        "save_stall_s": statistics.mean(row["stall_seconds"] for row in saves),
        "save_write_s": statistics.mean(row["seconds"] for row in saves),
        "step_s": (ledger.seconds["steps"] + ledger.seconds["data_wait"]) / steps,
        "every_steps": EVERY_STEPS,
        "steps": steps,
    }


def predict(measured: dict[str, float]) -> dict[str, Any]:
    """What `python -m hlat.plan failures` says of a run with such numbers."""
    words = [f"{key}={value:.6g}" for key, value in measured.items()]
    command = [sys.executable, "-m", "hlat.plan", "failures", "nodes=1", *words, "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return {"command": " ".join(command[1:]), **json.loads(done.stdout)}


def compare(soak: Soak, steps: int) -> str:
    """How the first losses differ from those of a run that only had the NaNs; empty: not at all."""
    whole = soak.run.place.run("whole", *OVERRIDES, f"run.steps={steps}")
    whole.inject(nan=str(soak.nan))
    code = whole.finish(timeout_s=1800)
    return differing(soak.run.losses()[:steps], whole.losses()) or f"exit {code}" * bool(code)


def by_kind(faults: list[Fault]) -> dict[str, Any]:
    """How many there were of each kind, and how long they took to be noticed and mended."""
    result = {}
    for kind in FAULTS:
        alike = [fault for fault in faults if fault.kind == kind]
        trained = [fault for fault in alike if fault.training]
        noticed = [fault.noticed - fault.time for fault in trained if fault.noticed]
        ready = [f.ready - f.noticed for f in trained if f.ready and f.noticed]
        result[kind] = {
            "number": len(alike),
            "in_training": len(trained),
            "in_a_save": sum(fault.saving for fault in alike),
            "detect_s": spread(noticed) if noticed else None,
            "restart_s": spread(ready) if ready else None,
        }
    return result


def tell(soak: Soak, compared_steps: int) -> dict[str, Any]:
    """Everything that was found."""
    run = soak.run
    ledger = load_run_record(run.folder).time_ledger
    measured = measure(soak, ledger)
    steps = [row["step"] for row in run.rows("metrics.jsonl")]
    lost = [row["lost_steps"] for row in run.events("start", "resume") if "lost_steps" in row]
    compared_steps = min(compared_steps, steps[-1])
    say(f"an uninterrupted run of {compared_steps} steps, to compare with")
    return {
        "faults": by_kind(soak.faults),
        "number_of_faults": len(soak.faults),
        "commands": soak.commands,
        "exit_codes": soak.codes,
        "ledger": {
            "wall_s": ledger.wall_seconds,
            "attempts": len(ledger.attempts),
            "seconds": ledger.seconds,
            "unaccounted_s": ledger.unaccounted_seconds,
            "unaccounted_share": ledger.unaccounted_seconds / ledger.wall_seconds,
            "largest_unaccounted_of_an_attempt_s": max(
                abs(one.unaccounted_seconds) for one in ledger.attempts
            ),
            "is_closed": ledger.is_fully_accounted,
            "goodput": ledger.goodput,
            "goodput_with_data_wait": ledger.goodput
            + ledger.seconds["data_wait"] / ledger.wall_seconds,
            "uptime": ledger.uptime,
        },
        "measured": measured,
        "prediction": predict(measured),
        "steps": steps[-1],
        "steps_without_gaps_or_duplicates": steps == [*range(1, steps[-1] + 1)],
        "steps_run_again": {"total": sum(lost), "most_at_once": max(lost, default=0)},
        "nan_steps_told": sorted({row["step"] for row in run.events("skip")}),
        "checkpoints_verified": soak.keeper.verified,
        "checkpoints_lost_or_damaged": soak.keeper.problems,
        "orphans": soak.orphans,
        "leftovers_at_end": [Path(name).name for name in run.place.leftovers()],
        "leftovers_most": soak.leftovers_most,
        "losses_compared_at_steps": compared_steps,
        "losses_differ": compare(soak, compared_steps),
    }


def main() -> None:
    parser = arguments("Faults at random times for an hour, one run.", 0)
    parser.add_argument("--minutes", type=float, default=60, help="default: %(default)s")
    parser.add_argument("--mean-s", type=float, default=20, help="mean time between faults")
    parser.add_argument("--compare-steps", type=int, default=1000, help="default: %(default)s")
    asked = parser.parse_args()
    with somewhere(asked.folder) as place:
        soak = Soak(place, asked.mean_s, asked.seed)
        try:
            soak.go(60 * asked.minutes)
            conclude(tell(soak, asked.compare_steps), asked.output)
        finally:
            soak.run.kill_all()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
