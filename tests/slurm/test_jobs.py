"""What becomes of jobs on a real Slurm: whole ones, and those that something happens to."""

import shlex
import sys

import pytest

from tests.slurm.conftest import REPOSITORY, TWO_NODES

STOP_AT_STEP_7 = """
    if "SLURM_RESTART_COUNT" not in os.environ:
        import time
        from hlat.engine.native.native_engine import NativeEngine
        whole, steps = NativeEngine.train_step, []
        def slow(self, *arguments):
            steps.append(1)
            time.sleep(60 if len(steps) == 7 else 0)
            return whole(self, *arguments)
        NativeEngine.train_step = slow
"""
SLOW = STOP_AT_STEP_7.replace("60 if len(steps) == 7 else 0", "4")
LESS_SLOW = SLOW.replace("sleep(4)", "sleep(1)")
WRONG_ON_N1 = """
    if os.environ["SLURMD_NODENAME"] == "n1":
        from hlat.engine import device_checks
        multiply = device_checks._matmul
        device_checks._matmul = lambda one, other: multiply(one, other).clamp(max=3)
"""


def test_two_nodes_train_as_one_machine_does(whole, login):
    shown = whole.shown("whole")
    assert (shown["JobState"], shown["NumNodes"], shown["Restarts"]) == ("COMPLETED", "2", "0")
    here = login.python("hlat.train", *login.small, "run.name=here", "parallelism.tp=2")
    assert here.returncode == 0, here.stderr
    assert whole.losses("whole") == login.losses("here")
    assert "resume:        python -m hlat.train hydra/launcher=slurm " in whole.log("whole")


def test_a_sweep_returns_receipts_and_ends_complete(login):
    mine = login.folder / "mine/experiment/own.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# @package _global_\nrun:\n  steps: 2\n")
    words = ("-m", f"--config-dir={mine.parent.parent}", "experiment=own")
    done = login.send(*words, "optimizer.lr=1e-3,2e-3,3e-3")
    assert done.returncode == 0, done.stderr
    mine.unlink()
    assert done.stdout.count("log:  hlat jobs logs runs/tiny-") == 3
    (command,) = [line for line in done.stdout.splitlines() if line.startswith("all jobs:")]
    (sweep,) = shlex.split(command)[-1:]

    def states():
        return [line.split()[2] for line in login.jobs(sweep).splitlines()[1:]]

    login.cluster.wait_until(120, "three are complete", lambda: states() == ["COMPLETED"] * 3)
    assert login.jobs("resubmit", "--failed", sweep) == "no run has failed\n"
    assert login.jobs("logs", sweep).count("complete at step 2") == 3


def test_nothing_is_sent_if_slurm_refuses_a_point(login):
    done = login.send("-m", "run.name=x,y", "hardware.processes_per_node=1", "hardware.nodes=99")
    assert done.returncode == 2, done.stdout
    done = login.send("run.name=x", "hydra.launcher.partition=nowhere")
    assert done.returncode == 2
    assert "Slurm rejects the job" in done.stderr
    assert "nowhere" in done.stderr or "partition" in done.stderr
    assert not list(login.folder.glob("runs/x/submissions/*"))


def test_what_a_user_writes_reaches_slurm_as_it_is(login):
    comment = 'it\'s $(touch x) `touch y` "#SBATCH --hold" ; touch z & 100%'
    quoted = comment.replace("\\", "\\\\").replace("'", "\\'")
    option = f"+hydra.launcher.options.comment='{quoted}'"
    done = login.send("run.name=x", "run.steps=1", option)
    assert done.returncode == 0, done.stderr
    login.wait_for("x", "COMPLETED", "FAILED")
    told = login.cluster.run("scontrol", "show", "job", login.shown("x")["JobId"])
    assert f"Comment={comment}" in told
    assert not [name for name in "xyz" if (login.folder / name).exists()]


def test_a_cancelled_job_stays_cancelled_and_is_saved(login):
    login.inject(LESS_SLOW)
    assert login.send("run.name=x", *TWO_NODES).returncode == 0
    login.wait_for_step("x", 1)
    again = login.send("run.name=x", *TWO_NODES)
    assert again.returncode == 2
    assert "is RUNNING; cancel it with hlat jobs cancel" in again.stderr
    assert "cancelled job" in login.jobs("cancel", "runs/x")
    shown = login.wait_for("x", "CANCELLED", "FAILED", "COMPLETED")
    assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "0")
    listed = login.jobs("runs/x").splitlines()[1].split()
    assert listed[2] == "CANCELLED"
    login.cluster.wait_until(
        30, "it has saved", lambda: login.rows("x", "events.jsonl")[-1]["event"] == "interrupt"
    )


def test_a_run_that_is_longer_than_its_limit_goes_on(whole, login):
    login.inject(SLOW)
    limit = ("hydra.launcher.time=2", "hydra.launcher.signal_s=60")
    login.environment["WANDB_MODE"] = "offline"
    assert login.send("run.name=x", "tracking=wandb", *limit, *TWO_NODES).returncode == 0
    shown = login.wait_for("x", "COMPLETED", "FAILED", "TIMEOUT", seconds=240)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1")
    assert login.losses("x") == whole.losses("whole")
    ends = [row for row in login.rows("x", "submissions/1/attempts.jsonl") if row["event"] == "end"]
    assert [row["exit"] for row in ends] == [75, 0]
    assert "interrupted and saved at step" in login.log("x")
    attempts = [*(login.folder / "runs/x/wandb").glob("offline-run-*")]
    assert len(attempts) == 2
    assert len({path.name.rpartition("-")[2] for path in attempts}) == 1, "one run of W&B's"


def test_a_preempted_run_saves_gives_way_and_goes_on(whole, login):
    login.inject(LESS_SLOW)
    assert login.send("run.name=x", *TWO_NODES).returncode == 0
    login.wait_for_step("x", 3)
    urgent = ("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 1", "--output=urgent")
    login.cluster.run("sbatch", f"--chdir={login.folder}", *urgent)
    assert "complete at step 20" in login.jobs("logs", "--follow", "runs/x")
    shown = login.wait_for("x", "COMPLETED", "FAILED", "PREEMPTED")
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1")
    assert login.losses("x") == whole.losses("whole")
    events = [row["event"] for row in login.rows("x", "events.jsonl")]
    assert events.count("interrupt") == 1


def test_a_run_whose_node_is_lost_goes_on_on_another(whole, login):
    login.inject(STOP_AT_STEP_7)
    assert login.send("run.name=x", *TWO_NODES).returncode == 0
    login.wait_for_step("x", 6)
    lost = login.cluster.run("squeue", "--noheader", "--format=%N")
    assert lost.strip() == "n[1-2]"
    login.cluster.unplug("n2")
    shown = login.wait_for("x", "COMPLETED", "FAILED", "NODE_FAIL", seconds=180)
    login.cluster.plug_in("n2")
    assert (shown["JobState"], shown["NodeList"]) == ("COMPLETED", "n[1,3]")
    assert login.losses("x") == whole.losses("whole")


def test_an_unhealthy_node_is_left_out(whole, login):
    login.inject(WRONG_ON_N1)
    assert login.send("run.name=x", *TWO_NODES).returncode == 0
    shown = login.wait_for("x", "COMPLETED", "FAILED")
    assert "Reason=hlat: unhealthy" in login.cluster.run("scontrol", "show", "node", "n1")
    login.cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    assert (shown["JobState"], shown["NodeList"]) == ("COMPLETED", "n[2-3]")
    assert login.losses("x") == whole.losses("whole")


def test_a_job_can_rule_out_nodes_for_its_next_attempt(login):
    """As an attempt does where its user may not drain nodes."""
    python = (
        "import os; from hlat.jobs import slurm_commands; "
        "slurm_commands.requeue_job(os.environ['SLURM_JOB_ID'], [os.environ['SLURMD_NODENAME']])"
    )
    script = login.folder / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        "#SBATCH --output=out --error=err --open-mode=append --requeue\n"
        "echo $SLURMD_NODENAME\n"
        f'[ -n "$SLURM_RESTART_COUNT" ] || {{ trap "" TERM; {sys.executable} -c "{python}"; sleep 60; }}\n'
    )
    login.cluster.run(
        "sbatch", f"--chdir={login.folder}", f"--export=ALL,PYTHONPATH={REPOSITORY}", str(script)
    )
    out = login.folder / "out"

    def nodes() -> list[str]:
        return out.read_text().split() if out.exists() else []

    login.cluster.wait_until(60, "it ran twice", lambda: len(nodes()) == 2)
    assert len({*nodes()}) == 2


@pytest.mark.parametrize(
    ("overrides", "code", "state"),
    [(["data.eos_token=nowhere"], 2, "REFUSED"), (["optimizer.lr=1e9"], 3, "DIVERGED")],
)
def test_what_cannot_work_is_not_tried_again(login, overrides, code, state):
    assert login.send("run.name=x", *overrides).returncode == 0
    shown = login.wait_for("x", "COMPLETED", "FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == (f"{code}:0", "0")
    assert login.jobs("runs/x").splitlines()[1].split()[2] == state
    login.jobs("resubmit", "--failed", "runs/x")
    login.wait_for("x", "FAILED")
    assert len(login.rows("x", "submissions/1/receipts.jsonl")) == 2
