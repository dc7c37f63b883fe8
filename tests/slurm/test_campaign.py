"""A campaign on a real Slurm: kills in every stage, an edit while it runs, and a failed stage."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hlat[evaluation]'")

from tests.run.conftest import Runner
from tests.run.questions import write
from tests.run.test_processes import WAIT_IN_STEP_7
from tests.slurm.conftest import Login
from tests.slurm.test_jobs import FIRST_ATTEMPT

WAIT_IN_FIRST_ATTEMPT = f"""
{WAIT_IN_STEP_7.replace('if "RANK" in os.environ:', FIRST_ATTEMPT)}
import pathlib, sys
command = next((word for word in sys.orig_argv if word.startswith("hlat.")), "")
if "SLURM_PROCID" in os.environ and command in ("hlat.average", "hlat.evaluate", "hlat.report"):
    if command == "hlat.average" and pathlib.Path("broken").exists():
        sys.exit("a broken stage")
    if "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(600)
"""
"""The first attempt of a run waits in its seventh step, that of another command at its start."""
WAIT_TWICE = WAIT_IN_STEP_7.replace(
    "        while len",
    "        while len(steps) == 3 and not os.path.exists('go'):\n"
    "            time.sleep(0.05)\n        while len",
)
"""The run waits in its third step for a file, and in its seventh for a signal."""
STAGES = ("pretrain", "upsample", "average", "scores", "report")


class CampaignUser:
    """User of a campaign with the five types of stages."""

    def __init__(self, login: Login, stages: str) -> None:
        self.login, self.file = login, login.folder / "chain.yaml"
        arguments = json.dumps([*login.small, "checkpoint.milestone_tokens=2048"])
        self.file.write_text(f"train: {arguments}\nstages:\n{stages}")

    def run(self, *arguments: str) -> str:
        """Run the command and return its output."""
        done = self.login.python("hlat.jobs.campaign", "chain.yaml", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def edit(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))

    def statuses(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in json.loads(self.run("status=true", "json=true"))}

    def job(self, name: str) -> str:
        """Return the newest job of a stage."""
        directory = self.login.folder / self.statuses()[name]["directory"]
        newest = max(directory.glob("submissions/*"), key=lambda path: (path.is_dir(), path.name))
        return json.loads((newest / "receipts.jsonl").read_text().splitlines()[-1])["job"]

    def wait_for(self, job: str, *states: str) -> None:
        cluster = self.login.cluster

        def there() -> bool:
            return cluster.show_job(job)["JobState"] in states

        cluster.wait_until(300, f"job {job} is {states}", there)

    def kill(self, name: str, requeue: bool = False) -> None:
        """Kill the first attempt of a stage, and wait until the stage has finished.

        The processes of the job step are killed, or the whole job is requeued.
        """
        job, cluster = self.job(name), self.login.cluster
        self.wait_for(job, "RUNNING")
        cluster.wait_until(60, f"job {job} has processes", lambda: find_first_attempt(job))
        if requeue:
            cluster.run("scontrol", "requeue", job)
        else:  # scancel may repeat its request, which would kill the second attempt too
            for pid in find_first_attempt(job):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait_for(job, "COMPLETED", "FAILED")
        shown = cluster.show_job(job)
        assert shown["JobState"] == "COMPLETED", self.login.jobs("logs", "runs/chain")
        assert int(shown["Restarts"]) == 1


def find_first_attempt(job: str) -> list[int]:
    """Return the processes in the step of the first attempt of a job."""
    pids = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            variables = dict(
                entry.split(b"=", 1)
                for entry in (directory / "environ").read_bytes().split(b"\0")
                if b"=" in entry
            )
            is_in_step = variables.get(b"SLURM_JOB_ID") == job.encode()
            is_in_step &= b"SLURM_STEP_ID" in variables
            if is_in_step and b"SLURM_RESTART_COUNT" not in variables:
                pids.append(int(directory.name))
    return pids


def submitted(printed: str) -> list[str]:
    """Return the stages that a command has submitted."""
    return [line.split()[1] for line in printed.splitlines() if line.startswith("submitted ")]


CHAIN = """\
  pretrain: {train: [run.steps=10]}
  upsample: {train: [], start_from: pretrain}
  average: {average: upsample, last: 2}
  scores: {evaluate: average, tasks: [boolq], data: data, limit: 2}
  report: {report: all}
"""


@pytest.mark.slow
def test_continue_a_chain_after_kills_an_edit_and_a_failure(login: Login, tmp_path: Path) -> None:
    write(tmp_path / "data")
    login.environment["HF_DATASETS_CACHE"] = str(tmp_path / "hugging_face")
    (tmp_path / "broken").touch()
    login.inject(WAIT_IN_FIRST_ATTEMPT)
    user = CampaignUser(login, CHAIN)
    printed = user.run("hydra/launcher=slurm")
    assert submitted(printed) == [*STAGES]
    jobs = {name: user.job(name) for name in STAGES}
    assert submitted(user.run()) == []

    login.wait_for_step("chain/pretrain", 6)
    user.edit("limit: 2", "limit: 1")
    user.edit("run.steps=10", "run.steps=10, run.log_every=2")
    printed = user.run()
    assert "pretrain ran with other settings; it is kept" in printed
    for name in ("scores", "report"):
        assert f"cancelled job {jobs[name]} of {name}, to submit it again" in printed
        assert user.job(name) != jobs[name]
    assert [user.job(name) for name in STAGES[:3]] == [jobs[name] for name in STAGES[:3]]

    user.kill("pretrain")
    login.wait_for_step("chain/upsample", 16)
    user.kill("upsample", requeue=True)
    user.wait_for(jobs["average"], "FAILED")
    statuses = user.statuses()
    assert [statuses[name]["state"] for name in STAGES] == [
        *("finished", "finished", "failed", "submitted", "submitted")
    ]
    assert "DependencyNeverSatisfied" in statuses["scores"]["detail"]

    (tmp_path / "broken").unlink()
    printed = user.run()
    assert user.job("average") != jobs["average"]
    assert printed.count("to submit it again") == 2
    for name in STAGES[2:]:
        user.kill(name)
    assert {row["state"] for row in user.statuses().values()} == {"finished"}
    assert submitted(user.run()) == []

    reference = Runner(tmp_path, login.small).run("run.name=whole")
    assert reference.returncode == 0, reference.stderr
    losses = login.losses("chain/pretrain") + login.losses("chain/upsample")
    assert losses == login.losses("whole")
    (scores,) = (tmp_path / "runs/chain/upsample/evaluations").glob("average.json")
    assert json.loads(scores.read_text())["tasks"]["boolq"]["questions"] == 1
    assert (
        "average: finished, after upsample" in (tmp_path / "runs/chain/campaign.html").read_text()
    )


@pytest.mark.slow
def test_evaluate_a_milestone_while_the_run_trains(login: Login, tmp_path: Path) -> None:
    write(tmp_path / "data")
    login.environment["HF_DATASETS_CACHE"] = str(tmp_path / "hugging_face")
    login.inject(WAIT_TWICE)  # step 4 is a milestone
    stages = "  a: {train: []}\n  b: {evaluate: a, tokens: [2048], tasks: [boolq], data: data}\n"
    user = CampaignUser(login, stages)
    user.run("hydra/launcher=slurm")
    job = user.job("b@4")
    assert login.cluster.show_job(job)["Reason"] == "JobHeldUser"
    (tmp_path / "go").touch()
    user.wait_for(job, "COMPLETED", "FAILED")
    assert login.cluster.show_job(job)["JobState"] == "COMPLETED", login.jobs("logs", "runs/chain")
    assert login.cluster.show_job(user.job("a"))["JobState"] == "RUNNING"
    assert user.statuses()["b@4"]["state"] == "finished"


@pytest.mark.slow
def test_refuse_to_wait_for_a_run_without_a_job(login: Login) -> None:
    done = login.send("run.name=x", "hydra.launcher.after=runs/missing")
    assert done.returncode == 2
    assert "hydra.launcher.after=runs/missing does not exist" in done.stderr
    assert not (login.folder / "runs/x").exists()
