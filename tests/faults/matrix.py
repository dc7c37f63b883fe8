"""Inject faults into runs and print what passed.

    python -m tests.faults.matrix [--fault NAME ...] [--minutes N]

A fault is injected into runs of every layout. A trial passes if rows and tensors are bitwise equal
to those of an uninterrupted run, or if the damage is reported with the name of the file and the
previous checkpoint is used. Results are added to matrix.json after each run, so repeating the
command continues an interrupted matrix, and it ends when every fault has been tried often enough.
README.md has the table.
"""

import argparse
import fcntl
import json
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch: a fork would lose the threads
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import describe_machine, machine, table, write_between
from tests.faults import (
    bad_numbers,
    damage,
    disk,
    environment,
    kills,
    layouts,
    round_trips,
    services,
    signals,
)
from tests.faults.trials import (
    TWO_RANKS,
    Row,
    Trial,
    Workspace,
    open_workspace,
    print_progress,
    run_script,
)

HERE = Path(__file__).resolve().parent
RESULT = HERE / "matrix.json"
PAGE = HERE / "README.md"
ALL_LAYOUTS = ("single", *TWO_RANKS)
MANY_TRIALS = 500
COMMAND = "python -m tests.faults.matrix"


@dataclass(frozen=True)
class Fault:
    """A fault, how to inject it, and how often.

    Attributes:
        inject: Trial function.
        num_trials: Number of trials over all layouts, at least.
        layouts: Layouts of the runs.
        find_problem: Returns why this machine cannot inject it; empty if it can.
    """

    inject: Trial
    num_trials: int
    layouts: tuple[str, ...] = TWO_RANKS
    find_problem: Callable[[], str] = str


FAULTS = {
    "kill -9, supervised": Fault(kills.kill_supervised, 500),
    "kill -9, command repeated": Fault(kills.kill_unsupervised, 40, ("single", "tp2")),
    "kill -9 of a data worker": Fault(kills.kill_data_worker, 20, ("single", "dp2")),
    "kill -9, then another layout": Fault(layouts.kill_and_change_layout, 24, ("all",)),
    "signal": Fault(signals.interrupt, 40, ALL_LAYOUTS),
    "stopped process": Fault(signals.stop_ranks, 24, ALL_LAYOUTS),
    "hang: peers do not come": Fault(signals.hang(signals.PEERS), 8),
    "hang: holds the GIL": Fault(signals.hang(signals.GIL), 8),
    "hang: data worker stopped": Fault(signals.hang(signals.STOPPED_WORKER), 4, ("single",)),
    "slow, no hang": Fault(signals.be_slow, 4),
    "damaged checkpoint, rejected": Fault(damage.reject_damage, 1000),
    "damaged checkpoint, run resumed": Fault(damage.resume_after_damage, 40, ALL_LAYOUTS),
    "disk call fails: ENOSPC": Fault(disk.fail_calls("ENOSPC"), 24, ("single", "dp2")),
    "disk call fails: EIO": Fault(disk.fail_calls("EIO"), 24, ("single", "dp2")),
    "disk call fails: EROFS": Fault(disk.fail_calls("EROFS"), 24, ("single", "dp2")),
    "disk full at times": Fault(disk.fill_at_times, 16, ALL_LAYOUTS, disk.find_mount_problem),
    "no room at the start": Fault(
        disk.start_without_room, 6, ("single", "dp2"), disk.find_mount_problem
    ),
    "power failure (ext4 shutdown)": Fault(
        disk.fail_power, 40, ALL_LAYOUTS, disk.find_ext4_problem
    ),
    "disk read-only at times": Fault(
        disk.make_read_only, 12, ("single", "dp2"), disk.find_mount_problem
    ),
    "permission missing": Fault(environment.remove_permission, 16, ("single", "tp2")),
    "clock and file times jump": Fault(environment.jump_clock, 24, ALL_LAYOUTS),
    "W&B killed": Fault(services.kill_wandb, 2, ("single", "dp2")),
    "TensorBoard directory removed": Fault(services.remove_tensorboard, 4, ("single", "dp2")),
    "Slurm controller fails": Fault(services.fail_slurm, 2, ("single", "dp2")),
    "object store fails": Fault(services.fail_store, 16, ("single", "dp2", "zero3")),
    "bit flip in a replica": Fault(bad_numbers.flip_bit, 8, ("dp2",)),
    "NaN gradients": Fault(bad_numbers.skip_step, 10, ALL_LAYOUTS),
    "spike that passes": Fault(bad_numbers.pass_spike, 4, ("single", "tp2")),
    "spike that stays": Fault(bad_numbers.keep_spike, 4, ("single", "tp2")),
    "batches of noise": Fault(bad_numbers.add_noise, 4, ("single", "tp2")),
    "a rank raises": Fault(bad_numbers.raise_error, 8),
    "state moved to another engine": Fault(round_trips.move_state, 60, round_trips.RECIPES),
}


class Results:
    """Results of trials by fault and layout, in a JSON file that several commands may extend."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._update():
            pass

    def count(self, fault: str, layout: str) -> int:
        """Return the number of trials."""
        cell = self._get(fault, layout)
        return int(cell["passed"]) + len(cell["failed"])

    def add(self, fault: str, layout: str, outcomes: Sequence[str]) -> None:
        """Add trials."""
        with self._update():
            cell = self.document["faults"].setdefault(fault, {}).setdefault(layout, _new_cell())
            cell["passed"] += sum(not outcome for outcome in outcomes)
            cell["failed"] += [outcome for outcome in outcomes if outcome]
            cell["runs"] += 1

    def skip(self, fault: str, reason: str) -> None:
        """Record that this machine cannot inject a fault, for a reason that may be empty."""
        with self._update():
            self.document["skipped"].pop(fault, None)
            if reason:
                self.document["skipped"][fault] = reason

    def get_num_runs(self, fault: str, layout: str) -> int:
        """Return the number of calls of the trial function, which seeds the next one."""
        return int(self._get(fault, layout)["runs"])

    @contextmanager
    def _update(self) -> Iterator[None]:
        """Read the file, and write it after the changes in the context."""
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            self.document: Row = {"faults": {}, "skipped": {}}
            if self._path.exists():
                self.document = json.loads(self._path.read_text())
            yield
            self.document["machine"] = describe_machine(["torch"])
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.document, indent=1) + "\n")
            temporary.replace(self._path)
        finally:
            os.close(directory)

    def _get(self, fault: str, layout: str) -> Row:
        cell: Row = self.document["faults"].get(fault, {}).get(layout, _new_cell())
        return cell


def _new_cell() -> Row:
    return {"runs": 0, "passed": 0, "failed": []}


def run_matrix(
    workspace: Workspace, names: Sequence[str], results: Results, deadline: float
) -> None:
    """Try faults in turn until each has its number of trials, or the deadline."""
    names = _find_possible(names, results)
    while time.monotonic() < deadline and (cell := _select(names, results)) is not None:
        run_once(workspace, *cell, results)


def run_reduced_matrix(workspace: Workspace, names: Sequence[str], results: Results) -> None:
    """Try each fault once, with another layout each time."""
    for number, name in enumerate(_find_possible(names, results)):
        layouts_of_fault = FAULTS[name].layouts
        run_once(workspace, name, layouts_of_fault[number % len(layouts_of_fault)], results)


def _find_possible(names: Sequence[str], results: Results) -> list[str]:
    """Return the faults that this machine can inject; record the others."""
    problems = {name: FAULTS[name].find_problem() for name in names}
    for name, problem in problems.items():
        results.skip(name, problem)
    return [name for name in names if not problems[name]]


def run_once(workspace: Workspace, name: str, layout: str, results: Results) -> None:
    """Call the trial function of a fault once."""
    rng = random.Random(f"{name} {layout} {results.get_num_runs(name, layout)}")
    try:
        outcomes = FAULTS[name].inject(workspace, layout, rng)
    except Exception as error:  # a trial that cannot be judged has failed
        outcomes = [f"{type(error).__name__}: {error}"[-500:]]
    workspace.clear_tmp()
    results.add(name, layout, outcomes)
    failed = [outcome for outcome in outcomes if outcome]
    print_progress(
        f"{name}, {layout}: {len(outcomes) - len(failed)} of {len(outcomes)} passed {failed[:1]}"
    )


def _select(names: Sequence[str], results: Results) -> tuple[str, str] | None:
    """Return the fault and layout with the smallest part of their trials; None: all are done.

    Faults with many trials come first, then one layout of each fault.
    """
    parts = {
        (name, layout): (
            results.count(name, layout) / fault.num_trials * len(fault.layouts),
            fault.num_trials < MANY_TRIALS,
            index,
        )
        for name in names
        for fault in [FAULTS[name]]
        for index, layout in enumerate(fault.layouts)
    }
    cell = min(parts, key=lambda one: parts[one], default=None)
    return None if cell is None or parts[cell][0] >= 1 else cell


def render(document: Row) -> str:
    """Return the table of a result."""
    rows, totals, num_by_fault = [], [0, 0], {"kill": 0, "damaged": 0}
    for name, cells in document["faults"].items():
        counts = {layout: [c["passed"], len(c["failed"])] for layout, c in cells.items()}
        passed, failed = (sum(count[i] for count in counts.values()) for i in (0, 1))
        by_layout = ", ".join(f"{layout} {sum(count)}" for layout, count in counts.items())
        rows.append([name, by_layout, str(passed + failed), str(passed), str(failed)])
        totals = [totals[0] + passed, totals[1] + failed]
        num_by_fault[name.split()[0]] = num_by_fault.get(name.split()[0], 0) + passed + failed
    rows.append(["all", "", str(sum(totals)), *map(str, totals)])
    lines = [table(["fault", "tried by layout", "tried", "passed", "failed"], rows)]
    skipped = document["skipped"]
    lines += [f"Not tried: {name}, because {reason}." for name, reason in skipped.items()]
    lines.append(f"{num_by_fault['kill']} kills and {num_by_fault['damaged']} damaged checkpoints.")
    return "\n\n".join([*lines, f"`{COMMAND}` on {machine(document)}"])


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--fault", nargs="*", choices=FAULTS, metavar="FAULT", help="only these")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this time")
    parser.add_argument("--reduced", action="store_true", help="each fault once or twice")
    parser.add_argument("--output", type=Path, default=RESULT, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="keep the runs in this new directory")
    arguments = parser.parse_args()
    results = Results(arguments.output)
    deadline = time.monotonic() + 60 * arguments.minutes
    names = arguments.fault or [*FAULTS]
    with open_workspace(arguments.folder, forks=True, reduced=arguments.reduced) as workspace:
        if arguments.reduced:
            run_reduced_matrix(workspace, names, results)
        else:
            run_matrix(workspace, names, results, deadline)
    print(render(results.document))
    if arguments.output == RESULT:
        write_between(PAGE, "matrix", render(results.document))
    failed = any(
        c["failed"] for cells in results.document["faults"].values() for c in cells.values()
    )
    sys.exit(failed)


if __name__ == "__main__":
    run_script(main)
