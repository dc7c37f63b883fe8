"""Trials with values that are wrong: NaN, spikes, batches of noise, a flipped bit, an exception."""

import random
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.faults import trials

STEPS = 40
RUN = (
    f"schedule.total_steps={STEPS}",
    "evaluation.every_steps=null",
    "checkpoint.keep_last=100",
)
STRICT = ("recovery.spike_window=8", "recovery.rollback_after=3", "recovery.spike_margin=1")
DIVERGED = 3


def skip_step(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Set all gradients of one rank to NaN in one step: the state must not change in this step."""
    step, rank = rng.randrange(2, STEPS), rng.randrange(1 if layout == "single" else 2)
    run = workspace.new_run(*RUN, *trials.LAYOUTS[layout], "checkpoint.every_steps=1")
    steps_file = workspace.folder / f"{run.name}.steps"
    steps_file.write_text(f"{step}\n")
    run.inject(nan=str(steps_file), rank=rank)
    code = run.finish()
    events = [(row["step"], row["count"]) for row in run.events("skip")]
    return _format_failures(
        run,
        {
            "exit code": code == 0,
            "one event": events == [(step, 1)],
            "message": f"step {step}: gradients are not finite" in run.output(),
            "weights and moments unchanged": _are_equal(run, step - 1, step),
            "changed by the next step": step == STEPS or not _are_equal(run, step, step + 1),
            "all rows": [row["step"] for row in run.stable_rows()] == [*range(1, STEPS + 1)],
        },
    )


def _are_equal(run: trials.Run, one: int, other: int) -> bool:
    """Return True if all tensors of two checkpoints are bitwise equal."""
    folders = [run.checkpoints() / f"step_{step:08}" for step in (one, other)]
    files = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in folders]
    if not files[0] or files[0] != files[1]:
        return False
    for name in files[0]:
        first, second = (load_file(folder / name) for folder in folders)
        if any(not np.array_equal(first[key], second[key]) for key in first):
            return False
    return True


def pass_spike(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Report high gradient norms three times in a row, and good ones after the rollback."""
    return _roll_back(workspace, layout, "spike", rng, once=True)


def add_noise(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Replace three batches by random tokens."""
    return _roll_back(workspace, layout, "garbage", rng)


def _roll_back(
    workspace: trials.Workspace, layout: str, fault: str, rng: random.Random, **options: Any
) -> list[str]:
    """Inject three bad steps in a row: the run must roll back once and skip their batches."""
    first = rng.randrange(20, STEPS - 5)
    overrides = (*RUN, *STRICT, *trials.LAYOUTS[layout], "checkpoint.every_steps=5")
    run = workspace.new_run(*overrides)
    run.inject(**{fault: [first, first + 2]}, **options)
    code = run.finish()
    rollbacks = run.events("rollback")
    return _format_failures(
        run,
        {
            "exit code": code == 0,
            "one rollback": len(rollbacks) == 1,
            "skipped batches": [r["left_out"] for r in rollbacks] == [[first - 1, first + 2]],
            "to a step before them": all(row["to"] < first for row in rollbacks),
            "all rows": [row["step"] for row in run.stable_rows()] == [*range(1, STEPS + 1)],
        },
    )


def keep_spike(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Report high gradient norms from one step on: the run must end as diverged."""
    first = rng.randrange(20, STEPS - 5)
    overrides = (*RUN, *STRICT, *trials.SUPERVISED, *trials.LAYOUTS[layout])
    run = workspace.new_run(*overrides, "checkpoint.every_steps=5", "recovery.max_same_failures=3")
    run.inject(spike=[first, STEPS])
    code = run.finish()
    return _format_failures(
        run,
        {
            "exit code": code == DIVERGED,
            "two rollbacks": len(run.events("rollback")) == 2,
            "one event": len(run.events("diverge")) == 1,
            "no restart": not run.events("restart"),
        },
    )


def raise_error(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Raise an exception on a rank once, or at one step of every attempt."""
    overrides = (*RUN, *trials.LAYOUTS[layout], "checkpoint.every_steps=3")
    overrides += ("recovery.max_restarts=9", "recovery.max_same_failures=3")
    reference, _ = workspace.reference(*overrides)
    run, is_transient = workspace.new_run(*overrides), rng.random() < 0.5
    once = [str(workspace.folder / f"{run.name}.raised")] if is_transient else []
    run.inject(**{"raise": [rng.randrange(2), rng.randrange(1, STEPS), *once]})
    run.start()
    problems = trials.finish_and_compare(run, reference) if is_transient else []
    code = run.wait()
    reasons = [row["reason"].partition(" ")[2].partition(" ")[2] for row in run.events("restart")]
    checks = {
        "exit code": code == (0 if is_transient else 1),
        "restarts": len(reasons) == (1 if is_transient else 2),
        "reason": {*reasons} == {"raised RuntimeError: injected"},
        "given up": len(run.events("give_up")) == (0 if is_transient else 1),
    }
    return ["; ".join(filter(None, [*problems, *_format_failures(run, checks)]))]


def flip_bit(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Flip a bit of a weight on one rank: nothing must be saved, and the run must restart."""
    overrides = (*RUN, *trials.SUPERVISED, *trials.LAYOUTS[layout], "checkpoint.every_steps=3")
    reference, _ = workspace.reference(*overrides)
    run = workspace.new_run(*overrides)
    once = workspace.folder / f"{run.name}.flipped"
    run.inject(flip=[rng.randrange(2), rng.randrange(2, STEPS), str(once)])
    run.start()
    problems = trials.finish_and_compare(run, reference)
    reasons = [row["reason"] for row in run.events("restart")]
    if len(reasons) != 1 or "have different replicas of" not in reasons[0]:
        problems.append(f"{run.name}: restarts because of {reasons}")
    return ["; ".join(problems)]


def _format_failures(run: trials.Run, checks: dict[str, bool]) -> list[str]:
    """Return the names of the checks that are False as the problem of one trial."""
    wrong = [name for name, is_right in checks.items() if not is_right]
    return [f"{run.name}: {', '.join(wrong)}: {run.output()[-300:]}" if wrong else ""]
