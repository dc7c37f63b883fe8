"""Sweeps on a real Slurm: each point is an array task that fails and resumes independently."""

import shlex
from pathlib import Path
from textwrap import indent

import pytest

from tests.slurm.conftest import Login
from tests.slurm.test_jobs import WAIT_IN_FIRST_ATTEMPT, WRONG_IN_FIRST_ATTEMPT

KILL_AND_WAIT = f"""
import sys
name = sys.orig_argv[-1]  # the submission directory
if "/runs/wait/" in name:
{indent(WAIT_IN_FIRST_ATTEMPT, "    ")}
if "/runs/killed/" in name and "hlat.train" in sys.orig_argv:
    import os
    if "SLURM_RESTART_COUNT" not in os.environ and "RANK" not in os.environ:
        import threading, time
        def kill_after_step_6():
            metrics = os.path.join(name.split("/submissions/")[0], "metrics.jsonl")
            while not os.path.exists(metrics) or open(metrics).read().count("\\n") < 6:
                time.sleep(0.02)
            os.kill(os.getpid(), 9)
        threading.Thread(target=kill_after_step_6, daemon=True).start()
"""
"""Run `wait` waits in its first attempt; the supervisor of the first attempt of `killed` is killed."""
ONE_FAULT_PER_POINT = f"""
import sys
name = sys.orig_argv[-1]  # the submission directory
if "/runs/unhealthy/" in name:
{indent(WRONG_IN_FIRST_ATTEMPT, "    ")}
if "/runs/preempted/" in name or "/runs/limited/" in name:
{indent(WAIT_IN_FIRST_ATTEMPT, "    ")}
"""
SLOW_WITH_SMALL_RATE = """
import os, time
if "RANK" in os.environ:
    from hlat.engine.native.native_engine import NativeEngine
    step = NativeEngine.train_step
    def train_step(self, *arguments):
        time.sleep(0.1 if self.config.optimizer.lr > 1.5e-3 else 2)
        return step(self, *arguments)
    NativeEngine.train_step = train_step
"""
LIMITED = """
case "$*" in *--test-only*) ;; *)
    total=$(cat total 2> /dev/null || echo 0)
    for word; do case $word in --array=*)
        total=$(echo "${word#*=}" | tr , '\\n' |
            awk -F- -v n="$total" '{n += NF == 2 ? $2 - $1 + 1 : 1} END {print n}')
    esac; done
    [ "$total" -gt "$(cat limit)" ] && { echo "sbatch: error: job limit" >&2; exit 1; }
    echo "$total" > total
esac
"""
"""Rejects an array if it has more tasks than are left of a limit of submitted jobs."""


def read_states(login: Login, directory: str) -> dict[str, str]:
    """Return the states by run in `hlat jobs`."""
    rows = [line.split() for line in login.jobs(directory).splitlines()[1:]]
    return {row[0]: row[2] for row in rows}


def count_most_running(login: Login, names: list[str]) -> int:
    """Return the largest number of attempts that ran at the same time.

    An attempt that Slurm has killed has no end and is not counted, because its end is unknown.
    """
    attempts = [
        {row["event"]: row["time"] for row in rows if row["attempt"] == number}
        for rows in (login.rows(name, "submissions/1/attempts.jsonl") for name in names)
        for number in range(1, rows[-1]["attempt"] + 1)
    ]
    known = [attempt for attempt in attempts if "end" in attempt]
    return max(
        sum(other["start"] <= attempt["start"] < other["end"] for other in known)
        for attempt in known
    )


@pytest.mark.slow  # waits for Slurm
def test_each_point_of_an_array_is_restarted_for_itself(login, uninterrupted):
    login.inject(KILL_AND_WAIT)
    disk = login.folder / "disk"
    disk.mkdir(mode=0o777)
    disk.chmod(0o777)
    login.environment["TMPDIR"] = str(disk)
    names = ["plain", "diverged", "killed", "wait", "last"]
    (login.folder / "mine/experiment").mkdir(parents=True)
    for name in names:
        value = "1e9" if name == "diverged" else "2e-3"
        # Equal runs, which hlat trains once otherwise
        run = f"run:\n  name: {name}\n  repeat: true\n"
        text = f"# @package _global_\n{run}optimizer:\n  lr: {value}\n"
        (login.folder / f"mine/experiment/{name}.yaml").write_text(text)
    done = login.send(
        *("-m", f"--config-dir={login.folder}/mine", f"experiment={','.join(names)}"),
        *("hydra.launcher.jobs=2", "hydra.launcher.exclusive=false"),
    )
    assert done.returncode == 0, done.stderr
    (array,) = (login.folder / "runs/sweeps").glob("*/arrays/*")
    job = shlex.split(done.stdout)[2].partition("_")[0]
    login.wait_for_step("wait", 6)
    login.cluster.run("scontrol", "requeue", f"{job}_3")
    ended = {"plain": "COMPLETED", "diverged": "DIVERGED", **dict.fromkeys(names[2:], "COMPLETED")}
    sweep = str(array.parent.parent)
    login.cluster.wait_until(300, "all end", lambda: read_states(login, sweep) == ended)
    attempts = {name: login.rows(name, "submissions/1/attempts.jsonl") for name in names}
    assert {name: rows[-1]["attempt"] for name, rows in attempts.items()} == {
        **dict.fromkeys(names, 1),
        "killed": 2,
        "wait": 2,
    }
    assert {row["job"] for row in attempts["wait"]} == {f"{job}_3"}
    for name in ("plain", "killed", "wait", "last"):
        assert login.losses(name) == uninterrupted.losses("whole")
    assert count_most_running(login, names) == 2
    # Of the killed process, and on a loaded machine of the one that Slurm kills before its requeue
    assert 1 <= len([*disk.glob("hlat-code-*")]) <= 2
    page = login.folder / sweep / "comparison.html"
    login.cluster.wait_until(120, "the last job compares the runs", page.exists)
    again = login.jobs("resubmit", sweep, "failed=true")
    assert "diverged is DIVERGED; to submit it again" in again
    assert "no run was submitted" in again
    (archive,) = (login.folder / "runs").rglob("*.zip")
    assert archive.parent == Path(sweep)


@pytest.mark.slow  # waits for the time limit
def test_a_bad_node_a_preemption_and_a_time_limit_concern_one_point(login, uninterrupted):
    login.inject(ONE_FAULT_PER_POINT)
    login.wrap("scontrol", 'case "$*" in *NodeName=*) exit 1;; esac')  # may not drain a node
    names = ["unhealthy", "preempted", "limited"]
    # The signal arrives 30 to 60 seconds after the start
    limit = ("hydra.launcher.time=2", "hydra.launcher.signal_s=60")
    done = login.send("-m", f"run.name={','.join(names)}", "hydra.launcher.jobs=3", *limit)
    assert done.returncode == 0, done.stderr
    login.wait_for_step("preempted", 6)
    file = "submissions/1/attempts.jsonl"
    urgent = ("--partition=urgent", "--exclusive", "--wrap=sleep 1", "--output=urgent")
    node = f"--nodelist={login.rows('preempted', file)[0]['nodes']}"
    login.cluster.run("sbatch", f"--chdir={login.folder}", *urgent, node)
    (sweep,) = (login.folder / "runs/sweeps").glob("*")
    ended = dict.fromkeys(names, "COMPLETED")
    login.cluster.wait_until(400, "all end", lambda: read_states(login, str(sweep)) == ended)
    attempts = {name: login.rows(name, file) for name in names}
    exits = {
        name: [row["exit"] for row in rows if row["event"] == "end"]
        for name, rows in attempts.items()
    }
    for name, first in {"unhealthy": 4, "preempted": 75, "limited": 75}.items():
        # On a loaded machine, later attempts may reach the time limit too
        assert exits[name] == [first] + [75] * (len(exits[name]) - 2) + [0]
    shown, *others = (login.cluster.show_job(attempts[name][-1]["job"]) for name in names)
    assert [other["ExcNodeList"] for other in others] == ["(null)", "(null)"]
    assert shown["ExcNodeList"] == attempts["unhealthy"][0]["nodes"] != shown["NodeList"]
    for name in names:
        assert login.losses(name) == uninterrupted.losses("whole")


@pytest.mark.slow  # waits for Slurm
def test_cancel_and_resubmit_one_task(login):
    done = login.send("-m", "run.name=a,b,c", "+hydra.launcher.options.hold=true")
    assert done.returncode == 0, done.stderr
    job = shlex.split(done.stdout)[2].partition("_")[0]
    assert [line.split()[1] for line in login.jobs().splitlines()[1:]] == [
        f"{job}_{task}" for task in range(3)
    ]
    assert f"cancelled job {job}_1 of runs/b" in login.jobs("cancel", "runs/b")
    assert read_states(login, "runs") == {"a": "PENDING", "b": "CANCELLED", "c": "PENDING"}
    again = login.jobs("resubmit", "runs/b")
    assert read_states(login, "runs")["b"] == "PENDING"
    assert f"job {job}_1 " not in again


@pytest.mark.slow  # tests/run/test_sweep.py completes a submission without Slurm
def test_complete_an_interrupted_submission(login):
    limit = login.folder / "limit"
    limit.write_text("2")
    login.wrap("sbatch", LIMITED)
    sweep = ("-m", "run.name=a,b,c", "+hydra.launcher.options.hold=true")
    done = login.send(*sweep)
    assert done.returncode == 2
    assert "job limit" in done.stderr
    assert "submitted 2 of 3 jobs; submit the others with" in done.stderr
    assert done.stdout.count(" trains runs/") == 2
    limit.write_text("9")
    completed = login.python("hlat", *shlex.split(done.stderr.splitlines()[-1])[1:])
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("exists: PENDING") == 2
    assert "submitted 1 of 3 jobs; 2 exist" in completed.stdout
    (command,) = [line for line in completed.stdout.splitlines() if line.startswith("all jobs:")]
    assert [*read_states(login, shlex.split(command)[-1]).values()] == ["PENDING"] * 3
    assert "submitted 0 of 3 jobs; 3 exist" in login.send(*sweep).stdout


@pytest.mark.slow  # an sbatch that fails is above
def test_complete_the_submission_of_a_killed_launcher(login):
    """Kill the launcher between the arrays for one and for two nodes."""
    login.wrap(
        "sbatch",
        'case "$*" in *--test-only*) ;; *) echo >> count\n'
        "[ $(wc -l < count) -ne 2 ] || { kill -9 $PPID; exit 1; }\nesac",
    )
    nodes = ("hardware.processes_per_node=1", "hardware.nodes=1,2", "parallelism.tp=1")
    names = "run.name='s${run.seed}-${hardware.nodes}'"
    hold = "+hydra.launcher.options.hold=true"
    sweep = ("-m", names, "run.seed=1,2", *nodes, hold, "hydra.sweep.dir=runs/sweeps/x")
    assert login.send(*sweep).returncode == -9
    completed = login.send(*sweep)
    assert completed.returncode == 0, completed.stderr
    assert "submitted 2 of 4 jobs; 2 exist" in completed.stdout
    assert [*read_states(login, "runs/sweeps/x").values()] == ["PENDING"] * 4
    shown = login.cluster.run("squeue", "--array", "--noheader", "--format=%i %D")
    assert sorted(line.split()[1] for line in shown.splitlines()) == ["1", "1", "2", "2"]


@pytest.mark.slow  # tests/unit/launchers searches without Slurm
def test_search_with_jobs_of_which_asha_stops_some(login):
    login.inject(SLOW_WITH_SMALL_RATE)
    arguments = ("-m", "hydra/sweeper=search", "hydra.sweep.dir=found", "hydra.launcher.jobs=3")
    asha = ("hydra.sweeper.asha_min_steps=5", "hydra.sweeper.asha_reduction_factor=2")
    done = login.send(
        *arguments,
        *asha,
        *("hydra.sweeper.trials=4", "hydra.sweeper.poll_s=0.5", "evaluation.every_steps=5"),
        *("optimizer.lr=interval(1e-5,3e-3)", "hydra.launcher.exclusive=false"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    last = done.stdout.splitlines()[-1]
    assert "held-out bits per byte" in last
    stopped = done.stdout.count(" stopped at step ")
    assert stopped > 0, done.stdout
    states = ["CANCELLED"] * stopped + ["COMPLETED"] * (4 - stopped)

    def has_ended() -> bool:
        lines = login.jobs("found").splitlines()[1:]
        return sorted(line.split()[2] for line in lines) == states

    login.cluster.wait_until(120, "all jobs have ended", has_ended)
