"""Kill it, interrupt it, damage its files: the numbers are those of the run that nothing happened to."""

import itertools
import json
import shlex
import signal
import subprocess
import time

import pytest

from hlat.checkpoint import checkpoint_store


def test_a_run_writes_its_folder(uninterrupted):
    folder = uninterrupted.folder / "runs/whole"
    written = {path.name for path in folder.iterdir()}
    assert written == {
        "config.yaml", "overrides.yaml", "provenance.json", "metrics.jsonl", "events.jsonl",
        "checkpoints", "report.html", "figures", ".lock",
    }  # fmt: skip
    row = uninterrupted.rows("whole", "metrics.jsonl")[-1]
    assert list(row) == [
        "step", "tokens", "learning_rate", "loss", "grad_norm", "param_norm", "memory_bytes", "tokens_per_second",
        "step_seconds", "data_wait_seconds", "mfu", "cost_usd", "cpt_usd", "phase", "attempt", "time",
    ]  # fmt: skip
    assert row["step"] == 20
    assert row["tokens"] == 20 * 8 * 64
    assert row["mfu"] is row["cost_usd"] is row["cpt_usd"] is None
    assert 50e6 < row["memory_bytes"] < 5e9
    events = [row["event"] for row in uninterrupted.rows("whole", "events.jsonl")]
    assert events[:4] == ["preflight", "start", "ready", "evaluate"]
    assert events[-1] == "finish"
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["packages"]["torch"]
    assert provenance["data"]["run.seed"] == 12349


@pytest.mark.parametrize("step", [3, 10, pytest.param(12, marks=pytest.mark.slow)])
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
    printed = stopped.stdout.rstrip().splitlines()[-1]
    command = shlex.split(printed.removeprefix("resume:"))
    assert subprocess.run(command, cwd=runner.folder, env=runner.environment).returncode == 0
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


def test_a_run_folder_belongs_to_one_process(runner, refused):
    first = runner.start("run.name=x")
    while not runner.rows("x", "metrics.jsonl") and first.poll() is None:
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    refused(runner.run("run.name=x"), "run.name=x: another process is training in runs/x")
    first.send_signal(signal.SIGCONT)
    first.communicate()
    assert first.returncode == 0


def test_a_refused_command_leaves_the_record_of_the_run_alone(runner, refused):
    runner.run("run.name=x", "run.steps=2")
    before = (runner.folder / "runs/x/config.yaml").read_text()
    refused(runner.run("run.name=x", "model.num_layers=3"), "model.num_layers was 2, is 3")
    assert (runner.folder / "runs/x/config.yaml").read_text() == before
    assert "name: x" in before


def test_when_every_checkpoint_is_damaged_nothing_is_trained_over_them(runner, refused):
    runner.run("run.name=x", "run.steps=2")
    (runner.folder / "runs/x/checkpoints/step_00000002/manifest.json").write_text("{}")
    refused(runner.run("run.name=x"), "has no valid checkpoint; move runs/x/checkpoints away")
    assert len(runner.losses("x")) == 2


def test_a_disk_that_takes_no_checkpoint_is_told_and_the_run_does_not_count_as_complete(
    runner, monkeypatch
):
    real = checkpoint_store.save_checkpoint
    with monkeypatch.context() as full:

        def refuse(*arguments):
            raise OSError(28, "No space left on device")

        full.setattr(checkpoint_store, "save_checkpoint", refuse)
        done = runner.run("run.name=x")
    assert done.returncode == 1
    assert done.stdout.count("WARNING: no checkpoint at step") == 4
    assert "could not be saved" in done.stdout
    assert checkpoint_store.save_checkpoint is real
    assert runner.run("run.name=x").returncode == 0


def test_a_log_with_a_damaged_line_does_not_bar_the_run(runner):
    runner.run("run.name=x", "run.steps=2")
    with (runner.folder / "runs/x/events.jsonl").open("a") as file:
        file.write("garbage\n")
    again = runner.run("run.name=x", "run.steps=3")
    assert again.returncode == 0, again.stderr
    assert "damaged line" in again.stderr


def test_a_reader_that_leaves_does_not_end_the_run(runner):
    process = runner.start("run.name=x")
    process.stdout.close()
    assert process.wait() == 0, process.stderr.read()
    process.stderr.close()
    assert len(runner.losses("x")) == 20


def test_secrets_of_the_environment_are_not_written(runner, corpus, monkeypatch):
    monkeypatch.setenv("CANARY", str(corpus))
    done = runner.run("run.name=x", "run.steps=1", "data.root=${oc.env:CANARY}")
    assert done.returncode == 0, done.stderr
    for name in ("config.yaml", "overrides.yaml", "report.html"):
        text = (runner.folder / "runs/x" / name).read_text()
        # The frozen corpus' folder is also named by the fixture itself, before the override
        assert text.count(str(corpus)) == (1 if name == "overrides.yaml" else 0), name
    assert "oc.env:CANARY" in done.stdout.splitlines()[-1]


def test_a_change_of_mixture_is_an_event_and_survives_a_resume(runner):
    timeline = "[{name: first, tokens: 5120}, {name: second, weights: {code: 1}}]"
    phases = ("run.name=x", f"phase.timeline={timeline}")
    assert runner.run(*phases, "run.steps=8").returncode == 0
    assert runner.run(*phases).returncode == 0
    events = [
        (row["step"], row["name"])
        for row in runner.rows("x", "events.jsonl")
        if row["event"] == "phase"
    ]
    assert events == [(10, "second")]
    stages = [row["phase"] for row in runner.rows("x", "metrics.jsonl")]
    assert stages == ["first"] * 10 + ["second"] * 10


def test_a_stages_own_rate_is_the_one_that_is_used_also_after_a_resume(runner, uninterrupted):
    timeline = "[{name: first, tokens: 5120}, {name: anneal, lr: 1e-3, end_lr: 0}]"
    phases = ("run.name=x", f"phase.timeline={timeline}")
    assert runner.run(*phases, "run.steps=13").returncode == 0
    assert runner.run(*phases).returncode == 0
    rates = [row["learning_rate"] for row in runner.rows("x", "metrics.jsonl")]
    whole = [row["learning_rate"] for row in uninterrupted.rows("whole", "metrics.jsonl")]
    assert rates[:10] == whole[:10]
    assert rates[10:] == pytest.approx([1e-3 * (1 - done / 10) for done in range(10)])
    norms = [row["param_norm"] for row in runner.rows("x", "metrics.jsonl")]
    steps = [abs(after - before) for before, after in itertools.pairwise(norms)]
    assert steps[-1] < steps[10] / 4


def test_every_nth_checkpoint_is_kept_beside_the_newest(runner):
    keep = ("checkpoint.keep_last=1", "checkpoint.keep_every_steps=10", "checkpoint.every_steps=5")
    done = runner.run("run.name=x", "run.steps=15", *keep)
    assert done.returncode == 0, done.stderr
    kept = (runner.folder / "runs/x/checkpoints").iterdir()
    assert sorted(path.name for path in kept) == ["step_00000010", "step_00000015"]


def test_a_checkpoint_says_what_made_it(uninterrupted, monkeypatch):
    folder = uninterrupted.folder / "runs/whole/checkpoints/step_00000020"
    state = json.loads((folder / "state.json").read_text())
    assert (state["step"], state["tokens"]) == (20, 20 * 8 * 64)
    assert "hidden_size: 64" in state["config"]
    assert state["data"]["fingerprint"]
    known = json.loads((uninterrupted.folder / "runs/whole/provenance.json").read_text())
    assert state["code_revision"] == (known["git_revision"] or "")
