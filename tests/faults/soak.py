"""Inject faults into one run at random times and compare its ledger with the prediction.

Usage: PYTHONPATH=. python tests/faults/soak.py --minutes 60 --output FILE

One process trains under hlat's supervisor. Fault times are a Poisson process, independent of the
state of the run; each fault is a random choice from `FAULTS`. A command that has ended is restarted
at once. Each step sleeps, as if a device worked, so its duration does not depend on the load of the
machine.
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
from hlat.study.run_record import load_run_record
from hlat.tracking.goodput import TimeLedger
from tests.faults.trials import (
    REPOSITORY,
    SUPERVISED,
    CheckpointChecker,
    Workspace,
    build_parser,
    descendants,
    find_loss_difference,
    find_survivors,
    open_workspace,
    print_progress,
    write_result,
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
ATTEMPT_ENDING_FAULTS = FAULTS[:4]
"""Faults that end an attempt."""
NAN_STEPS_AHEAD = 15


@dataclass
class Fault:
    """Injected fault and its times.

    Attributes:
        name: One of `FAULTS`.
        time: Unix time.
        training: True during steps, False during a start or an end.
        saving: True during a save.
        noticed: Unix time from which a restart was possible.
        ready: Unix time before the first step after the restart; None if another fault was earlier.
    """

    name: str
    time: float
    training: bool
    saving: bool = False
    noticed: float | None = None
    ready: float | None = None


class Soak:
    """Run, its faults, and measurements from outside.

    Args:
        workspace: Folder of the run.
        mean_s: Mean time between faults.
        seed: Seed of their times and choices.
    """

    def __init__(self, workspace: Workspace, mean_s: float, seed: int) -> None:
        self.run, self.nan = workspace.run("soak", *OVERRIDES), workspace.folder / "nan"
        self.run.inject(step_s=STEP_S, nan=str(self.nan))
        self.checker = CheckpointChecker(self.run.folder / "checkpoints")
        self.rng, self.mean_s = random.Random(seed), mean_s
        self.faults: list[Fault] = []
        self.orphans: list[int] = []
        self.commands, self.codes = 0, dict[str, int]()
        self.leftovers_most = 0

    def run_for(self, seconds: float) -> None:
        """Inject faults for this time, then end the run with a signal."""
        began = time.time()
        self._command()
        due = began + self.rng.expovariate(1 / self.mean_s)
        while time.time() < began + seconds:
            if self.run.process.poll() is not None:
                self._ended()
                self._command()
            if time.time() >= due:
                self._strike(self.rng.choice(FAULTS))
                due += self.rng.expovariate(1 / self.mean_s)
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
        if (
            self.faults
            and self.faults[-1].noticed is None
            and self.faults[-1].name in ATTEMPT_ENDING_FAULTS
        ):
            self.faults[-1].noticed = time.time()

    def _until_training(self) -> None:
        while not self._training():
            if self.run.process.poll() is not None:
                self._ended()
                self._command()
            time.sleep(0.05)

    def _training(self) -> bool:
        """Return True if the newest event is one of a run during its steps."""
        newest = self.run.rows("events.jsonl")[-1:]
        over = ("restart", "interrupt", "start", "resume", "finish", "give_up", "fail")
        return bool(newest) and newest[0]["event"] not in over and self.run.process.poll() is None

    def _strike(self, name: str) -> None:
        run, before = self.run, self.checker.committed()
        ranks = run.ranks()
        if name in FAULTS[:2] and not ranks:
            name = "kill the supervisor"  # it has not started any yet
        fault = Fault(name, time.time(), self._training())
        if name == "kill a rank":
            os.kill(ranks[self.rng.choice([*ranks])], signal.SIGKILL)
        elif name == "stop a rank":
            os.kill(ranks[self.rng.choice([*ranks])], signal.SIGSTOP)
        elif name == "terminate the command":
            run.process.send_signal(signal.SIGTERM)
        elif name == "kill the supervisor":
            others = descendants(run.process.pid)
            run.process.kill()
            run.process.wait()
            self.orphans += find_survivors(others)
        else:
            with self.nan.open("a") as file:
                file.write(f"{run.last_step() + NAN_STEPS_AHEAD}\n")
        fault.saving = self.checker.was_writing()
        self.faults.append(fault)
        self.checker.check(before)
        self.leftovers_most = max(self.leftovers_most, len(run.workspace.leftovers()))
        if len(self.faults) % 10 == 0:
            problems = len(self.checker.problems) + len(self.orphans)
            print_progress(
                f"{len(self.faults)} faults, step {run.last_step()}, {problems} problems"
            )


def set_restart_times(faults: list[Fault], events: list[dict[str, Any]]) -> None:
    """Set `noticed` and `ready` of the faults that ended an attempt."""
    ended = [fault for fault in faults if fault.name in ATTEMPT_ENDING_FAULTS]
    for fault, following in zip(ended, [*ended[1:], None], strict=True):
        until = following.time if following else float("inf")
        for row in events:
            if not fault.time < row["time"] < until:
                continue
            if row["event"] == "restart" and fault.noticed is None:
                fault.noticed = row["time"]
            if row["event"] == "ready" and fault.noticed and row["time"] > fault.noticed:
                fault.ready = fault.ready or row["time"]


def measure(soak: Soak, ledger: TimeLedger) -> dict[str, float]:
    """Return the measured arguments of the prediction."""
    set_restart_times(soak.faults, soak.run.rows("events.jsonl"))
    ended = [fault for fault in soak.faults if fault.name in ATTEMPT_ENDING_FAULTS]
    found = [fault for fault in ended if fault.noticed and fault.training]
    again = [fault.ready - fault.noticed for fault in found if fault.ready and fault.noticed]
    saves = soak.run.events("checkpoint")
    steps = soak.run.last_step()
    compile_s = ledger.seconds["compile"] / max(1, len(ledger.attempts))
    return {
        "mtbf_h": ledger.wall_seconds / len(ended) / 3600,
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
    """Return the result of `python -m hlat.plan failures` with these arguments."""
    arguments = [f"{key}={value:.6g}" for key, value in measured.items()]
    command = [sys.executable, "-m", "hlat.plan", "failures", "nodes=1", *arguments, "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return {"command": " ".join(command[1:]), **json.loads(done.stdout)}


def compare(soak: Soak, steps: int) -> str:
    """Compare the first losses with a run that only has the NaNs; return "" if they are equal."""
    reference = soak.run.workspace.run("whole", *OVERRIDES, f"run.steps={steps}")
    reference.inject(nan=str(soak.nan))
    code = reference.finish(timeout_s=1800)
    return find_loss_difference(
        soak.run.losses()[:steps], reference.losses()
    ) or f"exit {code}" * bool(code)


def summarize_faults(faults: list[Fault]) -> dict[str, Any]:
    """Return the number of each fault, and the times until it was noticed and steps ran again."""
    result = {}
    for name in FAULTS:
        matching = [fault for fault in faults if fault.name == name]
        trained = [fault for fault in matching if fault.training]
        noticed = [fault.noticed - fault.time for fault in trained if fault.noticed]
        ready = [f.ready - f.noticed for f in trained if f.ready and f.noticed]
        result[name] = {
            "number": len(matching),
            "in_training": len(trained),
            "in_a_save": sum(fault.saving for fault in matching),
            "detect_s": spread(noticed) if noticed else None,
            "restart_s": spread(ready) if ready else None,
        }
    return result


def build_result(soak: Soak, compared_steps: int) -> dict[str, Any]:
    """Return all results as JSON values."""
    run = soak.run
    ledger = load_run_record(run.folder).time_ledger
    measured = measure(soak, ledger)
    steps = [row["step"] for row in run.rows("metrics.jsonl")]
    lost = [row["lost_steps"] for row in run.events("start", "resume") if "lost_steps" in row]
    compared_steps = min(compared_steps, steps[-1])
    print_progress(f"an uninterrupted run of {compared_steps} steps, to compare with")
    return {
        "faults": summarize_faults(soak.faults),
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
        "checkpoints_verified": soak.checker.verified,
        "checkpoints_lost_or_damaged": soak.checker.problems,
        "orphans": soak.orphans,
        "leftovers_at_end": [Path(name).name for name in run.workspace.leftovers()],
        "leftovers_most": soak.leftovers_most,
        "losses_compared_at_steps": compared_steps,
        "losses_differ": compare(soak, compared_steps),
    }


def main() -> None:
    parser = build_parser("Faults at random times for an hour, one run.", 0)
    parser.add_argument("--minutes", type=float, default=60, help="default: %(default)s")
    parser.add_argument("--mean-s", type=float, default=20, help="mean time between faults")
    parser.add_argument("--compare-steps", type=int, default=1000, help="default: %(default)s")
    arguments = parser.parse_args()
    with open_workspace(arguments.folder) as workspace:
        soak = Soak(workspace, arguments.mean_s, arguments.seed)
        try:
            soak.run_for(60 * arguments.minutes)
            write_result(build_result(soak, arguments.compare_steps), arguments.output)
        finally:
            soak.run.kill_all()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
