"""Trials that kill a run and continue it under another layout.

Layouts add gradients in other orders, so losses are compared within a tolerance. The position in
the data after each save is compared exactly.
"""

import random
from typing import Any

from tests.faults import trials

STEPS, EVERY_STEPS, MAX_KILLS, TOLERANCE = 60, 3, 6, 1e-6
RUN = trials.build_run_overrides(STEPS, EVERY_STEPS)


def kill_and_change_layout(
    workspace: trials.Workspace, layout: str, rng: random.Random
) -> list[str]:
    """Kill a run at random moments, each time followed by another layout."""
    reference, _ = workspace.reference(*RUN)
    run, previous = workspace.new_run(*RUN), ""
    checker = trials.CheckpointChecker(run.checkpoints())
    _, seconds = workspace.reference(*RUN, *trials.LAYOUTS["zero3"])
    problems: list[str] = []
    num_kills, max_kills = 0, workspace.limit(MAX_KILLS)
    try:
        while num_kills < max_kills:
            previous = rng.choice([name for name in trials.LAYOUTS if name != previous])
            run.start(*trials.LAYOUTS[previous])
            if not run.is_alive_after(rng.uniform(0, seconds)):
                break
            committed, family = checker.committed(), trials.descendants(run.process.pid)
            run.kill_all()
            num_kills += 1
            problems += [f"{run.name}: left process {pid}" for pid in trials.find_survivors(family)]
            checker.check(committed)
        if num_kills == max_kills:
            run.start()
        code = run.wait()
    finally:
        run.kill_all()
    problems += [f"{run.name}: exit code {code} with {previous}"] * bool(code)
    problems += checker.problems + _compare(run, reference)
    return ["; ".join(problems)] * num_kills


def _compare(run: trials.Run, reference: trials.Run) -> list[str]:
    """Return how a run differs from the uninterrupted one."""
    losses, expected = run.losses(), reference.losses()
    if [step for step, _ in losses] != [step for step, _ in expected]:
        return [f"{run.name}: metrics.jsonl has the steps {[step for step, _ in losses]}"]
    pairs = zip(losses, expected, strict=True)
    largest = max(abs(a - b) / abs(b) for (_, a), (_, b) in pairs)
    problems = [f"{run.name}: losses differ by {largest:.2g}"] if largest > TOLERANCE else []
    positions, expected_positions = _positions(run), _positions(reference)
    moved = [step for step in positions if positions[step] != expected_positions.get(step)]
    return problems + [f"{run.name}: data differ at the steps {moved}"] * bool(moved)


def _positions(run: trials.Run) -> dict[int, Any]:
    """Return the amounts read of each source by the step of the save."""
    return {row["step"]: row["stages"] for row in run.events("ledger")}
