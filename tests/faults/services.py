"""Trials with services that fail: W&B, TensorBoard, Slurm's controller and an object store."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.faults import trials

RUN = (*trials.build_run_overrides(60, 3), "evaluation.every_steps=null")
MAX_OUTAGES = 3
STORE_VARIABLES = {"HLAT_STORAGE_PROTOCOLS": "failing"}
SBATCH = """#!/bin/sh
if [ -e {outage} ]; then
    echo "sbatch: error: Batch job submission failed: Unable to contact slurm controller" >&2
    exit 1
fi
echo 4711
"""


def kill_wandb(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Kill W&B's process at a random moment."""
    return _track(workspace, layout, "wandb", _kill_wandb_core, rng)


def remove_tensorboard(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Remove the directory of TensorBoard at a random moment, and put a file in its place."""
    return _track(workspace, layout, "tensorboard", _replace_log_dir, rng)


def _track(
    workspace: trials.Workspace,
    layout: str,
    service: str,
    break_service: Callable[[trials.Run], bool],
    rng: random.Random,
) -> list[str]:
    """Break a service once it runs and after a random step."""
    overrides = trials.LAYOUTS[layout]
    reference, _ = workspace.reference(*RUN, *overrides)
    run, step = workspace.new_run(*RUN, *overrides, f"tracking={service}"), rng.randrange(2, 40)
    run.variables |= {"WANDB_MODE": "offline"}
    run.inject(step_s=0.05)
    run.start()
    try:
        is_broken = False
        while not is_broken and run.is_alive_after(0.02):
            is_broken = run.last_step() >= step and break_service(run)
        problems = trials.finish_and_compare(run, reference)
    finally:
        run.kill_all()
    problems += [f"{run.name}: traceback"] * ("Traceback" in run.output())
    problems += [f"{run.name}: {service} did not run"] * (not is_broken)
    return ["; ".join(problems)]


def _kill_wandb_core(run: trials.Run) -> bool:
    """Kill W&B's process; return True if there was one."""
    is_killed = False
    for pid in trials.descendants(run.process.pid):
        with suppress(OSError):
            if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
                is_killed = True
    return is_killed


def _replace_log_dir(run: trials.Run) -> bool:
    """Replace the directory by a file; return True if there was one."""
    if not (run.folder / "tensorboard").is_dir():
        return False
    shutil.rmtree(run.folder / "tensorboard")
    (run.folder / "tensorboard").write_text("no directory")
    return True


def fail_store(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Fail all requests to the checkpoint store at random moments."""
    overrides = trials.LAYOUTS[layout]
    reference, _ = workspace.reference(*RUN, *overrides)
    run, outage = workspace.new_run(*RUN, *overrides), workspace.folder / "store-fails"
    store = workspace.folder / f"store-{run.name}"
    run.arguments.append(f"checkpoint.destination=failing://{store}")
    run.variables |= STORE_VARIABLES
    run.checkpoint_root = store / run.name
    run.inject(store=str(outage), step_s=0.05)
    num_outages = 0
    outage.touch()
    if (code := run.finish()) != 2 or f"failing://{store}" not in run.output():
        return [f"{run.name}: exit code {code}: {run.output()[-300:]}"]
    outage.unlink()
    run.start()
    try:
        while num_outages < workspace.limit(MAX_OUTAGES) and run.is_alive_after(rng.uniform(0, 1)):
            if not 0 < run.last_step() < 45:
                continue
            outage.touch()
            run.is_alive_after(rng.uniform(0.2, 0.8))
            outage.unlink()
            num_outages += 1
        problems = trials.finish_and_compare(run, reference)
    finally:
        run.kill_all()
        outage.unlink(missing_ok=True)
    num_failed = len(run.events("checkpoint_failed"))
    if run.output().count("WARNING: no checkpoint at step") != num_failed:
        problems.append(f"{run.name}: a failed save was not reported")
    return ["; ".join(problems)] * (num_outages + 1)


def fail_slurm(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Submit while Slurm's controller does not respond, then again."""
    programs, outage = workspace.folder / "programs", workspace.folder / "slurm-fails"
    programs.mkdir(exist_ok=True)
    (programs / "sbatch").write_text(SBATCH.format(outage=outage))
    (programs / "sbatch").chmod(0o755)
    run = workspace.new_run(*RUN, *trials.LAYOUTS[layout])
    run.arguments = ["--multirun", "hydra/launcher=slurm", *run.arguments]
    run.arguments.append(f"hydra.sweep.dir=sweep-{run.name}")
    run.variables |= {"PATH": f"{programs}:{os.environ['PATH']}"}
    outage.touch()
    code, output = run.finish(), run.output()
    outage.unlink()
    problems = [] if code else [f"{run.name}: exit code 0 without a job"]
    if "Unable to contact slurm controller" not in output or "Traceback" in output:
        problems.append(f"{run.name}: {output[-300:]}")
    code, output = run.finish(), run.output()[len(output) :]
    if code or "4711" not in output:
        problems.append(f"{run.name}: exit code {code} on the second attempt: {output[-300:]}")
    return ["; ".join(problems)]
