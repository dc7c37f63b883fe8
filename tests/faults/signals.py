"""Trials with signals of a scheduler, and with processes that hang."""

import os
import random
import signal
import time

from hlat.distributed.process_signals import STOP_SIGNALS
from tests.faults import trials

STEPS, EVERY_STEPS, MAX_SIGNALS, MAX_STOPS = 60, 20, 4, 4
RUN = (*trials.build_run_overrides(STEPS, EVERY_STEPS), "evaluation.every_steps=null")
TIMEOUT_S, DUMP_S = 2.0, 2.0
"""recovery.step_timeout_s, and the time of the supervisor for writing stacks."""
TIMEOUTS = (f"recovery.step_timeout_s={TIMEOUT_S:g}", "recovery.start_timeout_s=30")
MAX_NOTICE_S = 90
"""Maximum time until a restart: recovery.start_timeout_s, and a minute for a busy machine."""
PEERS, GIL, STOPPED_WORKER = (
    "waits for peers that do not come",
    "holds the GIL",
    "data worker stopped",
)
"""Ways to hang, defined in injected/sitecustomize.py."""
SLOW = ("first_step_s", "save_s", "evaluation_s")


def interrupt(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Send signals to the command at random moments and repeat the command."""
    overrides = trials.LAYOUTS[layout]
    if layout != "single":
        overrides += trials.SUPERVISED
    reference, seconds = workspace.reference(*RUN, *overrides)
    run, outcomes = workspace.new_run(*RUN, *overrides), list[str]()
    run.start()
    try:
        while len(outcomes) < workspace.limit(MAX_SIGNALS) and run.is_alive_after(
            rng.uniform(0, seconds)
        ):
            outcomes.append(_interrupt_once(run, rng.choice(STOP_SIGNALS)))
            run.start()
        problems = trials.finish_and_compare(run, reference)
    finally:
        run.kill_all()
    if sum(row.get("lost_steps", 0) for row in run.events("resume")):
        problems.append(f"{run.name}: a resume repeated steps")
    return ["; ".join([outcome, *problems]).strip("; ") for outcome in outcomes]


def _interrupt_once(run: trials.Run, signum: signal.Signals) -> str:
    """Send a signal to the running command and return what is wrong with its end."""
    events = run.rows("events.jsonl")
    is_training = bool(events) and events[-1]["event"] not in ("interrupt", "finish")
    family = trials.descendants(run.process.pid)
    run.process.send_signal(signum)
    code = run.wait(120)
    if left := trials.find_survivors(family):
        return f"{run.name}: left processes {left} after {signum.name}"
    if code == 0 or not is_training:
        return ""
    if code != 75:
        return f"{run.name}: exit code {code} after {signum.name}"
    last = run.rows("events.jsonl")[-1]
    if last["event"] != "interrupt":
        return ""  # it ended before the first step
    if last["step"] not in trials.CheckpointChecker(run.checkpoints()).committed():
        return f"{run.name}: step {last['step']} was not saved after {signum.name}"
    return ""


def stop_ranks(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Stop random ranks of a supervised run with SIGSTOP."""
    overrides = (*trials.SUPERVISED, *trials.LAYOUTS[layout], *TIMEOUTS)
    reference, _ = workspace.reference(*RUN, *overrides)
    run, outcomes = workspace.new_run(*RUN, *overrides), list[str]()
    run.inject(step_s=0.05)
    run.start()
    try:
        while len(outcomes) < workspace.limit(MAX_STOPS):
            if not _wait_for_event(run, "ready", len(outcomes)):
                break
            if not run.is_alive_after(rng.uniform(0, 1)) or not (ranks := run.ranks()):
                break
            try:
                os.kill(ranks[rng.choice([*ranks])], signal.SIGSTOP)
            except ProcessLookupError:
                break  # the run has ended
            outcomes.append(_find_restart_problem(run, len(outcomes), len(ranks)))
        problems = trials.finish_and_compare(run, reference)
    finally:
        run.kill_all()
    return ["; ".join([outcome, *problems]).strip("; ") for outcome in outcomes]


def hang(way: str) -> trials.Trial:
    """Return the trial in which a rank hangs in this way once."""

    def hang_once(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
        overrides = (*trials.SUPERVISED, *trials.LAYOUTS[layout], *TIMEOUTS)
        if way == STOPPED_WORKER:
            overrides += ("data.workers=1",)
        reference, _ = workspace.reference(*RUN, *overrides)
        run = workspace.new_run(*RUN, *overrides)
        once, num_ranks = workspace.folder / f"{run.name}.hung", 1 if layout == "single" else 2
        step = rng.randrange(3, STEPS - 10)
        run.inject(hang=[rng.randrange(num_ranks), step, way, str(once)])
        run.start()
        try:
            problem = _find_restart_problem(run, 0, num_ranks)
            problems = trials.finish_and_compare(run, reference)
        finally:
            run.kill_all()
        return ["; ".join([problem, *problems]).strip("; ")]

    return hang_once


def be_slow(workspace: trials.Workspace, layout: str, rng: random.Random) -> list[str]:
    """Delay the first step, a save or an evaluation by three times the step timeout."""
    asynchronous = rng.choice(["true", "false"])
    overrides = (
        *trials.SUPERVISED,
        *trials.LAYOUTS[layout],
        *TIMEOUTS,
        f"checkpoint.asynchronous={asynchronous}",
    )
    reference, _ = workspace.reference(*RUN, *overrides)
    run = workspace.new_run(*RUN, *overrides)
    run.inject(**{rng.choice(SLOW): 3 * TIMEOUT_S})
    run.start()
    try:
        problems = trials.finish_and_compare(run, reference)
    finally:
        run.kill_all()
    problems += [f"{run.name}: restarted"] * bool(run.events("restart"))
    return ["; ".join(problems)]


def _wait_for_event(run: trials.Run, event: str, num_before: int) -> bool:
    """Wait for another event of this name; return False if the run ends before."""
    while len(run.events(event)) <= num_before:
        if not run.is_alive_after(0.02):
            return False
    return True


def _find_restart_problem(run: trials.Run, num_before: int, num_ranks: int) -> str:
    """Wait for another restart; return what is wrong with it."""
    start = time.monotonic()
    if not _wait_for_event(run, "restart", num_before):
        return f"{run.name}: exit code {run.process.returncode} instead of a restart"
    seconds, reason = time.monotonic() - start, run.events("restart")[num_before]["reason"]
    if "no heartbeat" not in reason:
        return f"{run.name}: {reason}"
    if seconds > MAX_NOTICE_S:
        return f"{run.name}: the restart took {seconds:.0f} s"
    stacks = (run.folder / "logs/node_0.stacks").read_text()
    missing = [rank for rank in range(num_ranks) if f"rank {rank}:\nno stacks" in stacks]
    return f"{run.name}: no stacks of ranks {missing}" if missing else ""
