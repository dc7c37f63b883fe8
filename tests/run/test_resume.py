"""Runs that are killed, interrupted or damaged resume with the results of an uninterrupted run."""

import itertools
import json
import shlex
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from hlat.checkpoint import checkpoint_store

SLOW = pytest.mark.slow


def test_write_the_files_of_a_run(uninterrupted):
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


@pytest.mark.parametrize("step", [pytest.param(3, marks=SLOW), pytest.param(10, marks=SLOW), 12])
def test_resume_after_sigkill_is_bit_identical(runner, uninterrupted, step):
    killed = runner.run_until(step, signal.SIGKILL, "run.name=x")
    assert killed.returncode == -signal.SIGKILL
    again = runner.run("run.name=x")
    assert again.returncode == 0, again.stderr
    assert runner.losses("x") == uninterrupted.losses("whole")
    assert runner.weights("x", 20) == uninterrupted.weights("whole", 20)
    assert [row["event"] for row in runner.rows("x", "events.jsonl")].count("finish") == 1


@pytest.mark.slow
def test_save_after_a_signal_and_print_the_resume_command(runner, uninterrupted):
    """`test_signals.py` sends the other signals."""
    stopped = runner.run_until(7, signal.SIGUSR1, "run.name=x")
    assert stopped.returncode == 75, stopped.stderr
    last = runner.rows("x", "events.jsonl")[-1]
    assert (last["event"], last["signal"]) == ("interrupt", "SIGUSR1")
    assert f"interrupted and saved at step {last['step']}" in stopped.stdout
    printed = stopped.stdout.rstrip().splitlines()[-1]
    command = shlex.split(printed.removeprefix("resume:"))
    assert runner.run(*command[command.index("train") + 1 :], small=False).returncode == 0
    assert runner.losses("x") == uninterrupted.losses("whole")


@pytest.mark.slow
def test_stop_early_and_extend_the_same_schedule(runner, uninterrupted):
    first = runner.run("run.name=x", "run.steps=8")
    assert first.returncode == 0, first.stderr
    assert first.stdout.rstrip().splitlines()[-1].endswith(" run.name=x run.steps=16")
    assert runner.losses("x") == uninterrupted.losses("whole")[:8]
    before = runner.rows("x", "metrics.jsonl")
    again = runner.run("run.name=x", "run.steps=8")
    assert again.returncode == 0, again.stderr
    assert "nothing to do: at step 8" in again.stdout
    assert runner.rows("x", "metrics.jsonl") == before
    assert runner.run("run.name=x").returncode == 0
    assert runner.losses("x") == uninterrupted.losses("whole")


def test_resume_from_the_checkpoint_before_a_damaged_one(runner_at_step_10, uninterrupted):
    runner = runner_at_step_10
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


@pytest.mark.slow
def test_refuse_another_model_or_other_data_under_the_same_name(runner_at_step_2, refused):
    runner = runner_at_step_2
    before = (runner.folder / "runs/x/config.yaml").read_text()
    refused(runner.run("run.name=x", "model.num_layers=3"), "model.num_layers was 2, is 3")
    refused(runner.run("run.name=x", "run.seed=1"), "run.seed")
    refused(runner.run("run.name=x", "data.heldout_documents=9"), "data.heldout_documents")
    assert (runner.folder / "runs/x/config.yaml").read_text() == before
    assert "name: x" in before


@pytest.mark.slow  # one or more whole processes
def test_report_another_learning_rate_under_the_same_name(runner_at_step_2):
    runner = runner_at_step_2
    again = runner.run("run.name=x", "run.steps=3", "optimizer.lr=1e-4")
    assert again.returncode == 0, again.stderr
    assert "optimizer.lr was 0.002, is 0.0001" in again.stdout


@pytest.mark.slow  # one or more whole processes
def test_branch_from_a_checkpoint_and_resume_the_branch(runner, uninterrupted):
    source = uninterrupted.folder / "runs/whole/checkpoints/step_00000015"
    branch = ("run.name=branch", f"checkpoint.start_from={source}")
    first = runner.run(*branch, "run.steps=17")
    assert first.returncode == 0, first.stderr
    assert [step for step, _ in runner.losses("branch")] == [16, 17]
    assert runner.run(*branch).returncode == 0
    assert runner.losses("branch") == uninterrupted.losses("whole")[15:]


@pytest.mark.slow
def test_branch_from_the_newest_checkpoint_of_a_run_directory(runner, uninterrupted, refused):
    source = uninterrupted.folder / "runs/whole"
    arguments = ("run.name=x", f"checkpoint.start_from={source}", "schedule.total_steps=21")
    done = runner.run(*arguments)
    assert done.returncode == 0, done.stderr
    newest = source / "checkpoints/step_00000020"
    assert f"starting from checkpoint.start_from={newest}\n" in done.stdout
    assert "\ndata: code 50.0%, data 20.0%, prose 30.0% of tokens\n" in done.stdout
    assert [step for step, _ in runner.losses("x")] == [21]
    missing = source / "checkpoints/step_00000019"
    done = runner.run("run.name=y", f"checkpoint.start_from={missing}")
    refused(done, f"checkpoint.start_from={missing}: ")
    assert f"{missing.parent} has the steps 10, 15, 20" in done.stderr
    done = runner.run("run.name=y", f"checkpoint.start_from={source}", "model.hidden_size=32")
    refused(done, f"cannot start from checkpoint.start_from at {newest}: model.hidden_size was 64")


@pytest.mark.slow  # one or more whole processes
def test_resume_with_another_layout_of_the_same_batch(runner_at_step_10, uninterrupted):
    runner = runner_at_step_10
    done = runner.run("run.name=x", "batch.micro_batch_size=2", "data.prefetch=0")
    assert done.returncode == 0, done.stderr
    ours, whole = dict(runner.losses("x")), dict(uninterrupted.losses("whole"))
    assert list(ours) == list(whole)
    assert list(ours.values()) == pytest.approx(list(whole.values()), rel=1e-5)


@pytest.mark.slow
def test_stop_with_exit_code_3_at_a_loss_that_is_not_finite(runner):
    done = runner.run("run.name=x", "optimizer.lr=1e30", "optimizer.grad_clip=0")
    assert done.returncode == 3, done.stderr
    last = runner.rows("x", "events.jsonl")[-1]
    assert last["event"] == "diverge"
    saved = [path.name for path in (runner.folder / "runs/x/checkpoints").glob("step_*")]
    assert all(int(name.removeprefix("step_")) < last["step"] for name in saved)
    assert f"diverged at step {last['step']}, not saved: {last['reason']}" in done.stdout
    assert "not finite" in last["reason"]
    assert "resume:" not in done.stdout


@pytest.mark.slow
def test_stop_with_exit_code_3_at_a_held_out_loss_above_that_of_initial_weights(runner):
    done = runner.run("run.name=x", "optimizer.lr=50", "run.steps=2", "schedule.warmup_steps=0")
    assert done.returncode == 3, done.stderr
    assert runner.rows("x", "events.jsonl")[-1]["event"] == "diverge"
    assert "diverged at step 2, not saved: the held-out loss rose from 8.3" in done.stdout
    assert "resume:" not in done.stdout
    assert not any((runner.folder / "runs/x").glob("checkpoints/step_*"))


@pytest.mark.slow
def test_a_branch_with_a_higher_held_out_loss_is_saved_and_not_complete(runner, uninterrupted):
    source = uninterrupted.folder / "runs/whole/checkpoints/step_00000015"
    arguments = ("run.name=x", f"checkpoint.start_from={source}", "run.steps=17")
    done = runner.run(*arguments, "optimizer.lr=0.5", "schedule=constant")
    assert done.returncode == 0, done.stderr
    assert "ended at step 17 with a higher held-out loss than at the start" in done.stdout
    assert "complete" not in done.stdout


@pytest.mark.slow
def test_the_printed_command_extends_a_run_without_a_name(runner):
    done = runner.run("run.steps=1")
    command = shlex.split(done.stdout.splitlines()[-1])
    assert command[0] == "extend:"
    assert command[-1] == "run.steps=2"
    (run_dir,) = (runner.folder / "runs").glob("[!.]*")
    assert command[-2] == f"run.name={run_dir.name}"
    assert f"new run in runs/{run_dir.name}\n" in done.stdout
    done = runner.run(*command[command.index("train") + 1 :], small=False)
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in runner.losses(run_dir.name)] == [1, 2]
    assert "new run" not in done.stdout


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_do(runner_at_step_2):
    done = runner_at_step_2.run("run.name=x", "run.steps=1")
    assert done.returncode == 0, done.stderr
    assert "nothing to do: at step 2" in done.stdout
    assert "complete" not in done.stdout
    assert "resuming" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith("run.steps=4")


@pytest.mark.slow
def test_refuse_a_run_directory_that_is_in_use_and_train_without_a_reader(
    runner, refused, uninterrupted
):
    """Close the stdout of the first process, which must continue."""
    first = runner.start("run.name=x")
    first.stdout.close()
    while not runner.rows("x", "metrics.jsonl") and first.poll() is None:
        time.sleep(0.02)
    first.send_signal(signal.SIGSTOP)
    refused(runner.run("run.name=x"), "run.name=x: another process is training in runs/x")
    first.send_signal(signal.SIGCONT)
    assert first.wait() == 0, first.stderr.read()
    first.stderr.close()
    assert runner.losses("x") == uninterrupted.losses("whole")


def test_refuse_to_train_when_every_checkpoint_is_damaged(runner_at_step_2, refused):
    runner = runner_at_step_2
    (runner.folder / "runs/x/checkpoints/step_00000002/manifest.json").write_text("{}")
    refused(runner.run("run.name=x"), "has no valid checkpoint; move runs/x/checkpoints away")
    assert len(runner.losses("x")) == 2


@pytest.mark.slow
def test_a_run_whose_checkpoints_cannot_be_written_is_not_complete(runner, monkeypatch):
    real = checkpoint_store.save_checkpoint
    with monkeypatch.context() as full:

        def refuse(*arguments):
            raise OSError(28, "No space left on device")

        full.setattr(checkpoint_store, "save_checkpoint", refuse)
        done = runner.run("run.name=x", "run.steps=10")
    assert done.returncode == 1
    assert done.stdout.count("WARNING: no checkpoint at step") == 2
    assert "could not be saved" in done.stdout
    assert checkpoint_store.save_checkpoint is real
    assert runner.run("run.name=x", "run.steps=10").returncode == 0


@pytest.mark.slow
def test_resume_with_a_damaged_line_in_a_log(runner_at_step_2):
    runner = runner_at_step_2
    with (runner.folder / "runs/x/events.jsonl").open("a") as file:
        file.write("garbage\n")
    again = runner.run("run.name=x", "run.steps=3")
    assert again.returncode == 0, again.stderr
    assert "damaged line" in again.stderr


@pytest.mark.slow
def test_write_interpolations_of_the_environment_unresolved(runner, corpus, monkeypatch):
    monkeypatch.setenv("CANARY", str(corpus))
    done = runner.run("run.name=x", "run.steps=1", "data.root=${oc.env:CANARY}")
    assert done.returncode == 0, done.stderr
    for name in ("config.yaml", "overrides.yaml", "report.html"):
        assert str(corpus) not in (runner.folder / "runs/x" / name).read_text(), name
    assert "oc.env:CANARY" in done.stdout.splitlines()[-1]


@pytest.mark.slow  # one or more whole processes
def test_resume_in_the_second_phase_of_a_timeline(runner, uninterrupted):
    second = "{name: second, weights: {code: 1}, lr: 1e-3, end_lr: 0}"
    phases = ("run.name=x", f"phase.timeline=[{{name: first, tokens: 5120}}, {second}]")
    assert runner.run(*phases, "run.steps=13").returncode == 0
    assert runner.run(*phases).returncode == 0
    events = [row for row in runner.rows("x", "events.jsonl") if row["event"] == "phase"]
    assert [(row["step"], row["name"]) for row in events] == [(10, "second")]
    rows = runner.rows("x", "metrics.jsonl")
    assert [row["phase"] for row in rows] == ["first"] * 10 + ["second"] * 10
    assert runner.losses("x")[:10] == uninterrupted.losses("whole")[:10]
    assert runner.losses("x")[10:] != uninterrupted.losses("whole")[10:]
    rates = [row["learning_rate"] for row in rows]
    whole = [row["learning_rate"] for row in uninterrupted.rows("whole", "metrics.jsonl")]
    assert rates[:10] == whole[:10]
    assert rates[10:] == pytest.approx([1e-3 * (1 - done / 10) for done in range(10)])
    norms = [row["param_norm"] for row in rows]
    steps = [abs(after - before) for before, after in itertools.pairwise(norms)]
    assert steps[-1] < steps[10] / 4


@pytest.mark.slow  # one or more whole processes
def test_keep_every_nth_checkpoint_and_the_newest(runner):
    keep = ("checkpoint.keep_last=1", "checkpoint.keep_every_steps=10", "checkpoint.every_steps=5")
    done = runner.run("run.name=x", "run.steps=15", *keep)
    assert done.returncode == 0, done.stderr
    kept = (runner.folder / "runs/x/checkpoints").iterdir()
    assert sorted(path.name for path in kept) == ["step_00000010", "step_00000015"]


def test_a_checkpoint_contains_its_configuration_and_code_revision(uninterrupted):
    folder = uninterrupted.folder / "runs/whole/checkpoints/step_00000020"
    state = json.loads((folder / "state.json").read_text())
    assert (state["step"], state["tokens"]) == (20, 20 * 8 * 64)
    assert "hidden_size: 64" in state["config"]
    assert state["data"]["fingerprint"]
    known = json.loads((uninterrupted.folder / "runs/whole/provenance.json").read_text())
    assert state["code_revision"] == (known["git_revision"] or "")


def test_another_optimizer_continues_with_the_weights(runner):
    options = ("run.name=x", "schedule.total_steps=20", "optimizer.lr=1e-3")
    assert runner.run(*options, "run.steps=10").returncode == 0
    done = runner.run(*options, "run.steps=15", "optimizer.name=muon")
    assert done.returncode == 0, done.stderr
    assert "optimizer.name was adamw, is muon" in done.stdout
    assert (
        "momentum_buffer of 14 parameters starts at zero, as the checkpoint has none for these settings"
        in done.stdout
    )
    assert "exp_avg" not in done.stdout
    losses = dict(runner.losses("x"))
    assert abs(losses[11] - losses[10]) < 0.2 < losses[1] - losses[10]
    (event,) = [row for row in runner.rows("x", "events.jsonl") if row["event"] == "resume"]
    assert any("momentum_buffer" in line for line in event["changed"])
    back = runner.run(*options, "run.steps=20")
    assert back.returncode == 0, back.stderr
    assert "exp_avg of 14 parameters starts at zero" in back.stdout
    assert len(runner.losses("x")) == 20


@pytest.mark.slow  # 7 s
def test_a_moving_average_starts_as_the_weights_and_continues(runner):
    options = ("run.name=x", "schedule.total_steps=20", "checkpoint.every_steps=5")
    assert runner.run(*options, "run.steps=5").returncode == 0
    ema = (*options, "optimizer.ema_decay=0.9")
    done = runner.run(*ema, "run.steps=10")
    assert done.returncode == 0, done.stderr
    assert "optimizer.ema_decay was None, is 0.9" in done.stdout
    assert (
        "ema of 21 parameters starts as the weights, as the checkpoint has none for these settings"
        in done.stdout
    )
    shutil.copytree(runner.folder / "runs/x", runner.folder / "runs/y")
    tensors = load_tensors(runner, "x", 10)
    assert tensors["updates/lm_head.weight"] == 10  # moments continue
    assert not torch.equal(tensors["ema/lm_head.weight"], tensors["weights/lm_head.weight"])
    assert runner.run(*ema, "run.steps=20").returncode == 0
    for steps in (12, 20):
        assert runner.run(*ema, f"run.steps={steps}", "run.name=y").returncode == 0
    expected, found = load_tensors(runner, "x", 20), load_tensors(runner, "y", 20)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    (*_, last) = [row for row in runner.rows("x", "events.jsonl") if row["event"] == "evaluate"]
    assert last["ema"]["text"] == last["text"]
    assert last["ema"]["bits_per_byte"]["mean"] > last["bits_per_byte"]["mean"]


def load_tensors(runner, name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(
        runner.folder / f"runs/{name}/checkpoints/step_{step:08}/rank_00000.safetensors"
    )
