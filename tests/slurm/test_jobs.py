"""Jobs on a real Slurm: complete ones, and those that are preempted, cancelled or lose a node."""

import json
import shlex
import sys
from collections.abc import Iterator

import pytest

from tests.run.test_processes import WAIT_IN_STEP_7
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import TWO_NODES, USER, Login

FIRST_ATTEMPT = 'if "RANK" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:'
WAIT_IN_FIRST_ATTEMPT = WAIT_IN_STEP_7.replace('if "RANK" in os.environ:', FIRST_ATTEMPT)
HANG_IN_FIRST_ATTEMPT = WAIT_IN_FIRST_ATTEMPT.replace(" and handlers[-1].signal_name is None", "")
WRONG_IN_FIRST_ATTEMPT = f"""
import os
{FIRST_ATTEMPT}
    from hlat.engine import device_checks
    multiply = device_checks._matmul
    device_checks._matmul = lambda one, other: multiply(one, other).clamp(max=3)
"""
BACKGROUND = "hydra.launcher.partition=background"


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory, small) -> Iterator[Login]:
    """Yield the user of run x; its first attempt trains until its time limit."""
    login = Login(cluster, tmp_path_factory.mktemp("limited"), small)
    login.inject(WAIT_IN_FIRST_ATTEMPT)
    login.environment["WANDB_MODE"] = "offline"
    # The signal arrives 30 to 60 seconds after the start
    limit = ("hydra.launcher.time=2", "hydra.launcher.signal_s=60")
    done = login.send("run.name=x", "tracking=wandb", *limit, BACKGROUND)
    assert done.returncode == 0, done.stderr
    yield login
    login.cancel_jobs()


@pytest.fixture(scope="module")
def unhealthy(cluster: Cluster, tmp_path_factory, small) -> Iterator[Login]:
    """Yield the user of run x; the first node computes wrong matmuls."""
    login = Login(cluster, tmp_path_factory.mktemp("unhealthy"), small)
    login.inject(WRONG_IN_FIRST_ATTEMPT)
    done = login.send("run.name=x", BACKGROUND)
    assert done.returncode == 0, done.stderr
    yield login
    login.cancel_jobs()


@pytest.fixture(scope="module")
def excluded(cluster: Cluster, tmp_path_factory, small) -> Iterator[Login]:
    """Yield the user of run x; the first node computes wrong matmuls and is not drained.

    scontrol is slow, so Slurm's SIGTERM arrives while it runs.
    """
    login = Login(cluster, tmp_path_factory.mktemp("excluded"), small)
    login.inject(WRONG_IN_FIRST_ATTEMPT)
    login.wrap("scontrol", 'case "$*" in *NodeName=*) exit 1;; *ExcNodeList=*) sleep 2;; esac')
    done = login.send("run.name=x", BACKGROUND)
    assert done.returncode == 0, done.stderr
    yield login
    login.cancel_jobs()


@pytest.fixture(scope="module", autouse=True)
def background_runs(request: pytest.FixtureRequest) -> None:
    """Start the runs that wait for Slurm for most of their time before the first test."""
    used = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in ("limited", "unhealthy", "excluded"):
        if name in used:
            request.getfixturevalue(name)


@pytest.mark.slow  # two nodes train below, after one was lost
def test_train_on_two_nodes_bitwise_as_in_two_processes(two_node_run, login):
    shown = two_node_run.shown("whole")
    assert (shown["JobState"], shown["NumNodes"], shown["Restarts"]) == ("COMPLETED", "2", "0")
    here = login.python("hlat.train", *login.small, "run.name=here", "parallelism.tp=2")
    assert here.returncode == 0, here.stderr
    assert two_node_run.losses("whole") == login.losses("here")


@pytest.mark.slow
def test_submit_a_sweep_and_resubmit_its_failed_point(login):
    added = login.folder / "own/experiment/own.yaml"
    added.parent.mkdir(parents=True)
    added.write_text("# @package _global_\ncheckpoint:\n  keep_last: 1\n")
    comment = 'it\'s $(touch x) `touch y` "#SBATCH --hold" ; touch z & 100%'
    quoted = comment.replace("\\", "\\\\").replace("'", "\\'")
    done = login.send(
        *("-m", f"--config-dir={added.parent.parent}", "experiment=own"),
        *("optimizer.lr=1e-3,1e9", f"+hydra.launcher.options.comment='{quoted}'"),
    )
    assert done.returncode == 0, done.stderr
    added.unlink()
    assert done.stdout.count("log:  hlat jobs logs runs/tiny-") == 2
    (command,) = [line for line in done.stdout.splitlines() if line.startswith("all jobs:")]
    (sweep,) = shlex.split(command)[-1:]

    def rows():
        return [line.split() for line in login.jobs(sweep).splitlines()[1:]]

    def states():
        return [row[2] for row in rows()]

    login.cluster.wait_until(300, "both end", lambda: states() == ["COMPLETED", "DIVERGED"])
    complete, diverged = (row[1] for row in rows())
    printed = login.cluster.run("scontrol", "show", "job", complete)
    assert f"Comment={comment}" in printed
    assert not [name for name in "xyz" if (login.folder / name).exists()]
    shown = login.cluster.show_job(diverged)
    assert (shown["ExitCode"], shown["Restarts"]) == ("3:0", "0")
    (log,) = (login.folder / "runs").rglob(f"{complete}.log")
    assert "complete at step 20" in log.read_text()
    extend = next(line for line in log.read_text().splitlines() if line.startswith("extend: "))
    assert {"--config-dir", "hydra/launcher=slurm", "experiment=own"} <= {*shlex.split(extend)}
    checkpoints = [path.name for path in log.parents[2].glob("checkpoints/step_*")]
    assert checkpoints == ["step_00000020"], "the experiment was deleted after the submission"
    assert "complete at step 20" in login.jobs("logs", sweep)
    assert "complete at step 20" in login.jobs("logs", "--follow", str(log.parents[2]))
    assert "is DIVERGED; to submit it again" in login.jobs("resubmit", "--failed", sweep)
    login.jobs("resubmit", str(login.folder / "runs" / rows()[1][0]))
    again = rows()
    assert (again[0][1], again[1][1] == diverged) == (complete, False)
    assert "cancelled job" in login.jobs("cancel", sweep)


@pytest.mark.slow
def test_submit_nothing_if_slurm_rejects_a_point(login):
    done = login.send("-m", "run.name=x,y", "hardware.processes_per_node=1", "hardware.nodes=99")
    assert done.returncode == 2, done.stdout
    done = login.send("run.name=x", "hydra.launcher.partition=nowhere")
    assert done.returncode == 2
    assert "Slurm rejects the job" in done.stderr
    assert "nowhere" in done.stderr or "partition" in done.stderr
    assert not (login.folder / "runs/x").exists()


@pytest.mark.slow  # tests/unit/jobs has the message
def test_name_the_option_that_slurm_rejects(login):
    done = login.send("run.name=x", "+hydra.launcher.options.foo=1")
    assert done.returncode == 2
    assert "Slurm rejects the job: sbatch: unrecognized option '--foo=1'" in done.stderr


@pytest.mark.slow
def test_a_closed_pipe_does_not_interrupt_a_submission(login):
    arguments = [sys.executable, "-m", "hlat.train", "-m", "hydra/launcher=slurm", *login.small]
    arguments += ["run.name=a,b,c", "+hydra.launcher.options.hold=true"]
    login.shell(f"{shlex.join(arguments)} | head -n 1")
    assert len(login.jobs().splitlines()) == 4


@pytest.mark.slow  # a run is requeued at its time limit below
def test_resume_a_preempted_run_and_save_a_cancelled_one(login, uninterrupted):
    login.inject(WAIT_IN_STEP_7)  # of each attempt
    assert login.send("run.name=x").returncode == 0
    login.wait_for_step("x", 6)
    again = login.send("run.name=x")
    assert again.returncode == 2
    assert "is RUNNING; cancel it with hlat jobs cancel" in again.stderr
    urgent = ("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 1", "--output=urgent")
    login.cluster.run("sbatch", f"--chdir={login.folder}", *urgent)
    login.wait_for_step("x", 13)
    assert "cancelled job" in login.jobs("cancel", "runs/x")
    shown = login.wait_for("x", "CANCELLED", "FAILED", "COMPLETED")
    assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "1")
    assert login.jobs("runs/x").splitlines()[1].split()[2] == "CANCELLED"

    def interruptions():
        events = login.rows("x", "events.jsonl")
        return [row["step"] for row in events if row["event"] == "interrupt"]

    login.cluster.wait_until(60, "it has saved twice", lambda: interruptions() == [7, 14])
    assert login.losses("x") == uninterrupted.losses("whole")[:14]


@pytest.mark.slow  # the run above is preempted, but not completed
def test_complete_a_preempted_run_on_two_nodes(login, two_node_run):
    login.inject(WAIT_IN_FIRST_ATTEMPT)
    assert login.send("run.name=x", *TWO_NODES).returncode == 0
    login.wait_for_step("x", 6)
    urgent = ("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 1", "--output=urgent")
    login.cluster.run("sbatch", f"--chdir={login.folder}", *urgent)
    assert "complete at step 20" in login.jobs("logs", "--follow", "runs/x")
    shown = login.wait_for("x", "COMPLETED", "FAILED", "PREEMPTED")
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1")
    assert login.losses("x") == two_node_run.losses("whole")
    events = [row["event"] for row in login.rows("x", "events.jsonl")]
    assert events.count("interrupt") == 1


@pytest.mark.slow  # a run on one node is cancelled above
def test_save_a_cancelled_run_on_two_nodes(login):
    login.inject(WAIT_IN_STEP_7)
    assert login.send("run.name=x", *TWO_NODES).returncode == 0
    login.wait_for_step("x", 6)
    login.jobs("cancel", "runs/x")
    shown = login.wait_for("x", "CANCELLED", "FAILED", "COMPLETED")
    assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "0")
    login.cluster.wait_until(
        60, "it has saved", lambda: login.rows("x", "events.jsonl")[-1]["event"] == "interrupt"
    )


@pytest.mark.slow  # a preempted run is requeued above
@pytest.mark.parametrize("reported", [True, False], ids=["reported", "timeout"])
def test_resume_on_other_nodes_after_a_node_has_failed(login, uninterrupted, reported):
    """Switch a node off, and report it as ParallelCluster does or wait for SlurmdTimeout."""
    login.inject(WAIT_IN_FIRST_ATTEMPT)
    assert login.send("run.name=x", *TWO_NODES).returncode == 0
    login.wait_for_step("x", 6)
    assert login.shown("x")["NodeList"] == "n[1-2]"
    login.cluster.power_off("n2")
    if reported:
        login.cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    shown = login.wait_for("x", "COMPLETED", "FAILED", "NODE_FAIL")
    login.cluster.power_on("n2")
    if reported:
        login.cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    login.cluster.wait_until_idle("n2")
    assert (shown["JobState"], shown["NodeList"]) == ("COMPLETED", "n[1,3]")
    for row, expected in zip(login.losses("x"), uninterrupted.losses("whole"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow  # tests/unit/jobs resubmits without Slurm
def test_resubmit_a_run_with_its_dependency(login):
    arguments = ("sbatch", "--parsable", "--hold", "--wrap=true", f"--chdir={login.folder}")
    first = login.cluster.run(*arguments).strip()
    login.send("run.name=x", f"+hydra.launcher.options.dependency='afterok:{first}'")
    assert login.shown("x")["Dependency"] == f"afterok:{first}(unfulfilled)"
    login.jobs("cancel", "runs/x")
    login.wait_for("x", "CANCELLED")
    login.wrap("squeue", "exit")  # as if Slurm had deleted its record
    assert login.jobs("runs/x").splitlines()[1].split()[2] == "CANCELLED"
    assert "runs/x is CANCELLED" in login.jobs("resubmit", "--failed", "runs/x")
    login.jobs("resubmit", "runs/x")
    assert len(login.rows("x", "submissions/1/receipts.jsonl")) == 2
    assert login.shown("x")["Dependency"] == f"afterok:{first}(unfulfilled)"


@pytest.mark.slow  # the sweep resubmits a run that diverged
def test_do_not_restart_a_refused_run_and_resubmit_it(login):
    assert login.send("run.name=x", "data.eos_token=nowhere").returncode == 0
    shown = login.wait_for("x", "COMPLETED", "FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("2:0", "0")
    assert login.jobs("runs/x").splitlines()[1].split()[2] == "REFUSED"
    login.jobs("resubmit", "--failed", "runs/x")
    login.wait_for("x", "FAILED")
    assert len(login.rows("x", "submissions/1/receipts.jsonl")) == 2


def first_nodes(login: Login) -> str:
    rows = login.rows("x", "submissions/1/attempts.jsonl")
    return next(row["nodes"] for row in rows if row["event"] == "start")


@pytest.mark.slow  # waits for Slurm; tests/unit/jobs has the timeout
def test_requeue_a_run_that_hangs_at_its_time_limit(login, uninterrupted):
    login.inject(HANG_IN_FIRST_ATTEMPT)
    assert login.send("run.name=x", "hydra.launcher.signal_s=5").returncode == 0
    login.wait_for_step("x", 6)
    login.cluster.run("scancel", "--batch", "--signal=USR2", login.shown("x")["JobId"])
    shown = login.wait_for("x", "COMPLETED", "FAILED", seconds=120)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1")
    assert "has not stopped before its time limit" in login.log("x")
    assert login.losses("x") == uninterrupted.losses("whole")


@pytest.mark.slow  # waits for Slurm; tests/unit/jobs has the intervals
def test_restart_after_slurmctld_was_unavailable(login, uninterrupted):
    login.inject(WAIT_IN_FIRST_ATTEMPT)
    assert login.send("run.name=x").returncode == 0
    login.wait_for_step("x", 6)
    login.cluster.stop_controller()
    try:
        attempt = f"hlat.jobs.attempt {login.folder}/runs/x/"
        login.cluster.run("pkill", "-USR2", "-f", attempt)
        login.cluster.wait_until(180, "a retry", lambda: "trying again in" in login.log("x"))
    finally:
        login.cluster.start_controller()
    shown = login.wait_for("x", "COMPLETED", "FAILED")
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1")
    assert login.losses("x") == uninterrupted.losses("whole")


@pytest.mark.slow  # waits for Slurm
def test_exclude_an_unhealthy_node_without_permission_to_drain_it(excluded, uninterrupted):
    shown = excluded.wait_for("x", "COMPLETED", "FAILED")
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1")
    assert shown["ExcNodeList"] == first_nodes(excluded) != shown["NodeList"]
    assert excluded.losses("x") == uninterrupted.losses("whole")


@pytest.mark.slow  # waits for Slurm
@pytest.mark.skipif(USER is not None, reason="an ordinary user cannot drain nodes")
def test_drain_an_unhealthy_node_and_train_on_another(unhealthy, uninterrupted):
    (row,) = json.loads(unhealthy.jobs("runs/x", "--wait", "--json"))
    shown = unhealthy.shown("x")
    assert (row["state"], row["attempt"], row["step"]) == ("COMPLETED", 2, 20)
    first = first_nodes(unhealthy)
    assert "Reason=hlat: unhealthy" in unhealthy.cluster.run("scontrol", "show", "node", first)
    unhealthy.cluster.run("scontrol", "update", f"NodeName={first}", "State=RESUME")
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1")
    assert shown["NodeList"] != first
    assert unhealthy.losses("x") == uninterrupted.losses("whole")


@pytest.mark.slow  # waits for Slurm; tests/unit/jobs has the rule
def test_end_a_run_that_stops_twice_before_its_first_step(login):
    login.inject('import os, time\nif "RANK" in os.environ: time.sleep(600)')
    assert login.send("run.name=x").returncode == 0
    for attempt in (1, 2):

        def has_started(attempt=attempt) -> bool:
            rows = login.rows("x", "submissions/1/attempts.jsonl")
            return bool(rows) and (rows[-1]["event"], rows[-1]["attempt"]) == ("start", attempt)

        login.cluster.wait_until(60, f"attempt {attempt} has started", has_started)
        login.cluster.run("scancel", "--batch", "--signal=USR2", login.shown("x")["JobId"])
    shown = login.wait_for("x", "FAILED", "COMPLETED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("75:0", "1")
    assert "is not restarted: two attempts in a row made no progress" in login.log("x")
    assert login.jobs("runs/x").splitlines()[1].split()[2] == "INTERRUPTED"


@pytest.mark.slow  # waits for the time limit
def test_save_at_the_time_limit_and_resume(limited, uninterrupted):
    shown = limited.wait_for("x", "COMPLETED", "FAILED", "TIMEOUT")
    restarts = int(shown["Restarts"])
    assert (shown["JobState"], restarts > 0) == ("COMPLETED", True)
    assert limited.losses("x") == uninterrupted.losses("whole")
    rows = limited.rows("x", "submissions/1/attempts.jsonl")
    exits = [row["exit"] for row in rows if row["event"] == "end"]
    # On a loaded machine, later attempts may reach the time limit too
    assert exits == [75] * restarts + [0]
    assert "interrupted and saved at step" in limited.log("x")
    attempts = [*(limited.folder / "runs/x/wandb").glob("offline-run-*")]
    assert len(attempts) >= 2
    assert len({path.name.rpartition("-")[2] for path in attempts}) == 1, "one run of W&B"
