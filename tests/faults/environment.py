"""Trials with clocks that jump and files without permission."""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.faults import trials

STEPS, EVERY_STEPS, MAX_JUMPS = 40, 4, 3
RUN = trials.build_run_overrides(STEPS, EVERY_STEPS)
DAY_S = 86400.0
OFFSETS_S = (-3650 * DAY_S, -DAY_S, -3600.0, 3600.0, DAY_S, 3650 * DAY_S)
FILE_TIMES_S = (0.0, 1e9, 2.5e9)
"""1970, 2001 and 2049."""


def jump_clock(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Shift the time within steps and between attempts, and set the times of all files."""
    overrides = trials.LAYOUTS[layout]
    reference, seconds = workspace.reference(*RUN, *overrides)
    run, num_jumps = workspace.new_run(*RUN, *overrides), 0
    try:
        while num_jumps < workspace.limit(MAX_JUMPS):
            run.inject(clock=[rng.randrange(1, STEPS), rng.choice(OFFSETS_S)], step_s=0.01)
            run.start()
            num_jumps += 1
            if not run.is_alive_after(rng.uniform(seconds / 2, seconds)):
                break
            run.kill_all()
            _set_times(run.folder, rng.choice(FILE_TIMES_S))
        if run.process.poll() != 0:
            run.start()
        problems = trials.finish_and_compare(run, reference)
    finally:
        run.kill_all()
    problems += [f"{run.name}: traceback"] * ("Traceback" in run.output())
    return ["; ".join(problems)] * num_jumps


def _set_times(folder: Path, time_s: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time_s, time_s), follow_symlinks=False)


Select = Callable[[trials.Run], Path]
CASES: dict[str, tuple[Select, int, int, bool]] = {
    "run directory read-only": (lambda run: run.folder, 0o500, 2, True),
    "metrics.jsonl not readable": (lambda run: run.folder / "metrics.jsonl", 0, 2, True),
    "events.jsonl not readable": (lambda run: run.folder / "events.jsonl", 0, 2, True),
    "checkpoints read-only": (lambda run: run.checkpoints(), 0o500, 1, True),
    "checkpoints not readable": (lambda run: run.checkpoints(), 0, 2, True),
    "newest checkpoint not readable": (lambda run: _find_newest(run), 0, 0, True),
    "file of tensors not readable": (
        lambda run: _find_newest(run) / "rank_00000.safetensors", 0, 0, True
    ),
    "data not readable": (lambda run: run.workspace.folder / "corpus/code.arrow", 0, 2, True),
}  # fmt: skip
"""Path, its mode, the exit code of a resume, and True if the output names the path."""


def remove_permission(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Resume without permission for a path, then with it."""
    overrides = trials.LAYOUTS[layout]
    reference, _ = workspace.reference(*RUN, *overrides)
    name = rng.choice([*CASES])
    select, mode, expected_code, is_named = CASES[name]
    run = workspace.new_run(*RUN, *overrides)
    run.inject(uncapable=True)  # root ignores permissions
    if code := run.finish("run.steps=12"):
        return [f"{run.name}: exit code {code}: {run.output()[-300:]}"]
    path, length = select(run), len(run.output())
    previous_mode = path.stat().st_mode
    path.chmod(mode)
    try:
        code, output = run.finish(), run.output()[length:]
    finally:
        with suppress(FileNotFoundError):  # a rejected checkpoint was renamed
            path.chmod(previous_mode)
    problems = [f"exit code {code}"] if code != expected_code else []
    problems += ["traceback"] * ("Traceback" in output)
    problems += ["no file name"] * (is_named and path.name not in output)
    if problems:
        return [f"{run.name}: {name}: {', '.join(problems)}: {output[-300:]}"]
    run.start()
    return ["; ".join(trials.finish_and_compare(run, reference))]


def _find_newest(run: trials.Run) -> Path:
    return max(run.checkpoints().glob("step_*"))
