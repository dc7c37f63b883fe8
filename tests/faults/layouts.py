"""kill -9 and go on under another layout, again and again: are data and losses the same?

Usage: PYTHONPATH=. python tests/faults/layouts.py --forks --output FILE

The losses are compared with those of an uninterrupted run of one process, and the position in the
data after every save with its. Layouts add up gradients in other orders, so losses may differ by
rounding; a run that is killed as often and keeps its layout must not differ at all.
"""

import itertools
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.faults import trials

STEPS, EVERY_STEPS, TOLERANCE = 60, 3, 1e-6
RUN = trials.build_run_overrides(STEPS, EVERY_STEPS)
LAYOUTS = {
    "one process": (),
    "dp 2": ("parallelism.dp=2",),
    "dp 2, zero 1": ("parallelism.dp=2", "parallelism.zero=1"),
    "tp 2": ("parallelism.tp=2",),
    "pp 2": ("parallelism.pp=2",),
}


@dataclass
class Found:
    """What was seen."""

    kills: int = 0
    attempts: Counter[str] = field(default_factory=Counter)
    largest: list[float] = field(default_factory=list)
    by_layout: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def positions(run: trials.Run) -> dict[int, Any]:
    """What has been read of each source, by the step of the save; the newest of each step."""
    return {row["step"]: row["stages"] for row in run.events("ledger")}


def kill_and_change(
    run: trials.Run, seconds: float, kills: int, lot: random.Random, found: Found
) -> None:
    """Kill a run at random moments until it ends or was killed so often."""
    keeper, before = trials.Keeper(run.folder / "checkpoints"), ""
    while True:
        layout = lot.choice([name for name in LAYOUTS if name != before])
        run.start(*LAYOUTS[layout])
        found.attempts[layout] += 1
        before = layout
        if found.kills >= kills:
            break
        deadline = time.monotonic() + lot.uniform(0, seconds)
        while time.monotonic() < deadline and run.process.poll() is None:
            time.sleep(0.01)
        if run.process.poll() is not None:
            break
        committed, family = keeper.committed(), trials.descendants(run.process.pid)
        run.kill_all()
        found.kills += 1
        found.problems += [f"{run.name}: left {number}" for number in trials.gone(family)]
        keeper.check(committed)
    if code := run.wait():
        found.problems.append(f"{run.name}: exit code {code} with {before}")
    found.problems += keeper.problems


def compare(run: trials.Run, whole: trials.Run, found: Found) -> None:
    """Compare a run with the uninterrupted one."""
    ours, theirs = run.losses(), whole.losses()
    if [step for step, _ in ours] != [step for step, _ in theirs]:
        found.problems.append(f"{run.name}: steps {[step for step, _ in ours]}")
        return
    apart = [abs(a - b) / abs(b) for (_, a), (_, b) in zip(ours, theirs, strict=True)]
    found.largest.append(max(apart))
    if max(apart) > TOLERANCE:
        found.problems.append(f"{run.name}: losses are {max(apart):.2g} apart")
    there, expected = positions(run), positions(whole)
    moved = [step for step in there if there[step] != expected.get(step)]
    found.problems += [f"{run.name}: data differ at steps {moved}"] * bool(moved)


def uninterrupted(place: trials.Place, found: Found) -> tuple[trials.Run, float]:
    """The run to compare with, and how long the longest of the layouts takes."""
    seconds, whole = 0.0, None
    for layout, overrides in LAYOUTS.items():
        run = place.run("whole-" + layout.replace(" ", "").replace(",", "-"), *RUN, *overrides)
        began = time.monotonic()
        if code := run.finish():
            raise RuntimeError(f"{layout} ended with {code}: {run.printed}")
        seconds = max(seconds, time.monotonic() - began)
        whole = whole or run
        pairs = zip(run.losses(), whole.losses(), strict=True)
        found.by_layout[layout] = max(abs(a - b) / abs(b) for (_, a), (_, b) in pairs)
    assert whole is not None
    return whole, seconds


def main() -> None:
    parser = trials.arguments("Layouts that change at every kill.", 50)
    asked = parser.parse_args()
    lot, found, same = random.Random(asked.seed), Found(), ""
    with trials.somewhere(asked.folder, asked.forks) as place:
        whole, seconds = uninterrupted(place, found)
        trials.say(f"the slowest layout takes {seconds:.1f} s; they differ by {found.by_layout}")
        for number in itertools.count():
            if found.kills >= asked.trials:
                break
            run = place.run(f"changing-{number}", *RUN)
            try:
                kill_and_change(run, seconds, asked.trials, lot, found)
                compare(run, whole, found)
            finally:
                run.kill_all()
            trials.say(f"{found.kills} kills, {json.dumps(found.problems[-3:])}")
        again = place.run("again", *RUN)
        again.finish()
        same = trials.differing(again.losses(), whole.losses())
    told = {"runs": len(found.largest), "same_layout_differs": same, "tolerance": TOLERANCE}
    trials.conclude({**told, "forked": asked.forks, **vars(found)}, asked.output)


if __name__ == "__main__":
    trials.run_script(main)
