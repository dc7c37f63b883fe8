"""Kill it, interrupt it, damage its files: the numbers are those of the run that nothing happened to."""

import json
import signal

import pytest


def test_a_run_writes_its_folder(uninterrupted):
    folder = uninterrupted.folder / "runs/whole"
    written = {path.name for path in folder.iterdir()}
    assert written == {
        "config.yaml", "overrides.yaml", "provenance.json", "metrics.jsonl", "events.jsonl",
        "checkpoints", "report.html", "figures",
    }  # fmt: skip
    row = uninterrupted.rows("whole", "metrics.jsonl")[-1]
    assert list(row) == [
        "step", "tokens", "learning_rate", "loss", "grad_norm", "param_norm", "tokens_per_second", "step_seconds",
        "data_wait_seconds", "mfu", "phase", "attempt", "time",
    ]  # fmt: skip
    assert row["step"] == 20
    assert row["tokens"] == 20 * 8 * 64
    assert row["mfu"] is None
    events = [row["event"] for row in uninterrupted.rows("whole", "events.jsonl")]
    assert events[:2] == ["start", "evaluate"]
    assert events[-1] == "finish"
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["packages"]["torch"]
    assert provenance["data"]["run.seed"] == 12349


@pytest.mark.parametrize("step", [3, 10, 12])
def test_kill_9_and_the_same_command_again_is_bit_identical(runner, uninterrupted, step):
    killed = runner.run_until(step, signal.SIGKILL, "run.name=x")
    assert killed.returncode == -signal.SIGKILL
    again = runner.run("run.name=x")
    assert again.returncode == 0, again.stderr
    assert runner.losses("x") == uninterrupted.losses("whole")
    assert runner.weights("x", 20) == uninterrupted.weights("whole", 20)
    assert [row["event"] for row in runner.rows("x", "events.jsonl")].count("finish") == 1


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_signal_saves_and_says_so(runner, uninterrupted, number, name):
    stopped = runner.run_until(7, number, "run.name=x")
    assert stopped.returncode == 75, stopped.stderr
    last = runner.rows("x", "events.jsonl")[-1]
    assert (last["event"], last["signal"]) == ("interrupt", name)
    assert f"interrupted and saved at step {last['step']}" in stopped.stdout
    assert stopped.stdout.rstrip().splitlines()[-1].startswith("resume:     python -m hlat.train ")
    assert runner.run("run.name=x").returncode == 0
    assert runner.losses("x") == uninterrupted.losses("whole")


def test_stopping_early_keeps_the_schedule_and_the_printed_command_goes_on(runner, uninterrupted):
    first = runner.run("run.name=x", "run.steps=8")
    assert first.returncode == 0, first.stderr
    assert "run.steps" not in first.stdout.rstrip().splitlines()[-1]
    assert runner.losses("x") == uninterrupted.losses("whole")[:8]
    assert runner.run("run.name=x").returncode == 0
    assert runner.losses("x") == uninterrupted.losses("whole")


def test_a_complete_run_says_so_and_trains_no_further(runner):
    runner.run("run.name=x", "run.steps=2")
    before = runner.rows("x", "metrics.jsonl")
    again = runner.run("run.name=x", "run.steps=2")
    assert again.returncode == 0, again.stderr
    assert "complete" in again.stdout
    assert runner.rows("x", "metrics.jsonl") == before


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(runner, uninterrupted):
    runner.run("run.name=x", "run.steps=10")
    newest = runner.folder / "runs/x/checkpoints/step_00000010/rank_00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    again = runner.run("run.name=x")
    assert again.returncode == 0, again.stderr
    assert "WARNING" in again.stdout
    assert "step_00000010" in again.stdout
    assert runner.rows("x", "events.jsonl")[-1]["event"] == "finish"
    assert runner.losses("x") == uninterrupted.losses("whole")


def test_another_model_under_the_same_name_is_refused(runner, refused):
    runner.run("run.name=x", "run.steps=2")
    refused(runner.run("run.name=x", "model.num_layers=3"), "model.num_layers was 2, is 3")


def test_other_data_under_the_same_name_is_refused(runner, refused):
    runner.run("run.name=x", "run.steps=2")
    refused(runner.run("run.name=x", "run.seed=1"), "run.seed")
    refused(runner.run("run.name=x", "data.heldout_documents=9"), "data.heldout_documents")


def test_another_rate_under_the_same_name_is_told(runner):
    runner.run("run.name=x", "run.steps=2")
    again = runner.run("run.name=x", "run.steps=4", "optimizer.lr=1e-4")
    assert again.returncode == 0, again.stderr
    assert "optimizer.lr was 0.003, is 0.0001" in again.stdout


def test_start_from_branches_off_and_own_checkpoints_come_first(runner, uninterrupted):
    source = uninterrupted.folder / "runs/whole/checkpoints/step_00000015"
    branch = ("run.name=branch", f"checkpoint.start_from={source}")
    first = runner.run(*branch, "run.steps=17")
    assert first.returncode == 0, first.stderr
    assert [step for step, _ in runner.losses("branch")] == [16, 17]
    assert runner.run(*branch).returncode == 0
    assert runner.losses("branch") == uninterrupted.losses("whole")[15:]


def test_another_layout_of_the_same_batch_goes_on_in_the_same_folder(runner, uninterrupted):
    runner.run("run.name=x", "run.steps=10")
    done = runner.run("run.name=x", "batch.micro_batch_size=2", "data.prefetch=0")
    assert done.returncode == 0, done.stderr
    ours, whole = dict(runner.losses("x")), dict(uninterrupted.losses("whole"))
    assert list(ours) == list(whole)
    assert list(ours.values()) == pytest.approx(list(whole.values()), rel=1e-5)


def test_not_a_number_stops_with_3_and_saves_nothing_of_it(runner):
    done = runner.run("run.name=x", "optimizer.lr=1e30", "optimizer.grad_clip=0")
    assert done.returncode == 3, done.stderr
    last = runner.rows("x", "events.jsonl")[-1]
    assert last["event"] == "diverge"
    saved = [path.name for path in (runner.folder / "runs/x/checkpoints").glob("step_*")]
    assert all(int(name.removeprefix("step_")) < last["step"] for name in saved)
    assert "not finite" in done.stdout
