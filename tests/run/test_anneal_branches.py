"""Anneals that branch from the checkpoints of a trunk, as a campaign trains them."""

import json
from pathlib import Path

import pytest

from hlat.jobs.campaign_file import load_campaign
from hlat.jobs.stage_expansion import expand_campaign
from hlat.jobs.stage_job import save_jobs
from tests.run.conftest import Runner

ANNEALS = """\
train: {overrides}
stages:
  trunk: {{train: [schedule=constant, checkpoint.keep_every_steps=5]}}
  short: {{train: [schedule=wsd, schedule.decay_steps=5], start_from: trunk, at_step: 15}}
  long: {{train: [schedule=wsd, schedule.decay_steps=10], start_from: trunk, at_step: 10}}
"""


def train(runner: Runner, name: str) -> list[str]:
    """Train the stages of a campaign in this process; return their output."""
    file = runner.folder / f"{name}.yaml"
    file.write_text(ANNEALS.format(overrides=json.dumps(runner.small)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(runner.folder)
        expanded = expand_campaign(load_campaign(file))
        expanded.directory.mkdir(parents=True)
        save_jobs(expanded.directory, expanded.jobs)
    runs = [runner.run(*job.arguments, small=False) for job in expanded.jobs]
    assert [done.returncode for done in runs] == [0, 0, 0], runs
    return [done.stdout for done in runs]


@pytest.mark.slow  # trains five runs
def test_branches_equal_a_whole_wsd_run_and_are_reused(runner: Runner, refused) -> None:
    train(runner, "first")
    done = runner.run("run.name=whole", "schedule=wsd", "schedule.decay_steps=10")
    assert done.returncode == 0, done.stderr
    whole = runner.losses("whole")
    assert runner.losses("first/trunk")[:10] == whole[:10]
    assert runner.losses("first/long") == whole[10:]
    assert runner.weights("first/long", 20) == runner.weights("whole", 20)
    assert runner.losses("first/short") != whole[15:]
    (event,) = [row for row in runner.rows("first/long", "events.jsonl") if "began" in row]
    marker = Path("runs/first/trunk/checkpoints/step_00000010/COMMITTED")
    assert event["manifest_sha256"] == (runner.folder / marker).read_text()

    for name, out in zip(("trunk", "short", "long"), train(runner, "second"), strict=True):
        assert f"nothing to do: runs/first/{name} has finished" in out
        assert runner.losses(f"second/{name}") == runner.losses(f"first/{name}")

    trunk = runner.folder / "runs/second/trunk"
    trunk.rename(trunk.with_name("former"))
    root, step = "run.root=runs/second", "run.steps=5"
    assert (
        runner.run(root, "run.name=trunk", step, "schedule=constant", "run.seed=1").returncode == 0
    )
    checkpoint = trunk / "checkpoints/step_00000005"
    checkpoint.rename(checkpoint.with_name("step_00000015"))  # another trunk at the same path
    start = "checkpoint.start_from=runs/second/trunk/checkpoints/step_00000015"
    done = runner.run(root, "run.name=short", "schedule=wsd", "schedule.decay_steps=5", start)
    refused(done, "runs/second/short started from a checkpoint with manifest SHA-256 ")
