"""Faults in an unattended run: the decision, the events, and the lost time."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from hlat.checkpoint.checkpointer import Checkpointer
from hlat.engine.native.native_engine import NativeEngine
from hlat.evaluate import heldout_evaluation
from hlat.recovery.step_watchdog import StepWatchdog
from hlat.study.run_record import load_run_record
from tests.run.test_processes import broken, inject
from tests.support.sealed_checkpoint import seal_checkpoint

SUPERVISED = ("recovery.max_restarts=9", "recovery.max_same_failures=5")


def events(runner, *kinds):
    return [row for row in runner.rows("x", "events.jsonl") if row["event"] in kinds]


def steps(runner):
    return [row["step"] for row in runner.rows("x", "metrics.jsonl")]


@pytest.fixture
def spoil(monkeypatch):
    """Increase the losses of some batches, by their order in training."""
    real_step, real_read = NativeEngine.train_step, NativeEngine.read_metrics

    def install(is_bad):
        trained = []

        def step(self, sequences, *arguments):
            trained.append(sequences.tokens.tobytes())
            return real_step(self, sequences, *arguments)

        def read(self, pending):
            numbers = real_read(self, pending)
            high = "grad_norm" in pending and is_bad(trained)
            return numbers if not high else type(numbers)(
                numbers.loss, numbers.grad_norm + 10.0 * len(trained), numbers.param_norm
            )  # fmt: skip

        monkeypatch.setattr(NativeEngine, "train_step", step)
        monkeypatch.setattr(NativeEngine, "read_metrics", read)
        return trained

    return install


FLIP = """
import os
from pathlib import Path
once = Path({once!r})
if os.environ.get("RANK") == "1":
    import torch
    from hlat.engine.native.native_engine import NativeEngine
    train_step, steps = NativeEngine.train_step, []
    def flip(self, *arguments):
        pending = train_step(self, *arguments)
        steps.append(pending)
        if len(steps) == 12 and not once.exists():
            once.touch()
            weight = self.params.optimizer_params["layers.0.mlp.down_proj.weight"]
            weight.detach().view(torch.int32)[3, 5] ^= 1 << 20
        return pending
    NativeEngine.train_step = flip
"""
HUNGRY = """
import os
from pathlib import Path
once, group = Path({once!r}), Path({group!r})
if os.environ.get("RANK") == "0":
    from hlat.engine.native.native_engine import NativeEngine
    train_step, steps = NativeEngine.train_step, []
    def eat(self, *arguments):
        steps.append(arguments)
        if len(steps) == 7 and not once.exists():
            once.touch()
            (group / "cgroup.procs").write_text(str(os.getpid()))
            eaten = [bytearray(1 << 24) for _ in range(100)]
        return train_step(self, *arguments)
    NativeEngine.train_step = eat
"""
SIGNAL_IN_STEP_8 = """
import os
if os.environ.get("RANK") == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import time
    from pathlib import Path
    from hlat.engine.native.native_engine import NativeEngine
    train_step, steps = NativeEngine.train_step, []
    def send_signal(self, *arguments):
        steps.append(1)
        if len(steps) == 8:
            while not Path("runs/x/checkpoints/step_00000005/manifest.json").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), {number})
        return train_step(self, *arguments)
    NativeEngine.train_step = send_signal
"""
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
QUICK = ("recovery.spike_window=4", "recovery.rollback_after=3", "recovery.spike_margin=2")


def test_roll_back_after_lasting_spikes_and_skip_their_batches(runner, spoil):
    bad = set()

    def is_bad(trained):
        if len(trained) in (12, 13, 14):
            bad.add(trained[-1])
        return trained[-1] in bad

    trained = spoil(is_bad)
    done = runner.run("run.name=x", *QUICK)
    assert done.returncode == 0, done.stderr
    (rollback,) = events(runner, "rollback")
    assert (rollback["step"], rollback["to"], rollback["left_out"]) == (14, 10, [11, 14])
    assert "rolling back to step 10 and skipping the last 3 batches" in done.stdout
    assert steps(runner) == [*range(1, 21)]
    assert trained[14] == trained[10]  # step 11 is run again on its batch
    assert bad.isdisjoint(trained[14:])
    assert len(trained) == 14 + 10


@pytest.mark.slow
def test_resume_a_run_of_an_earlier_version_killed_after_a_rollback(runner, spoil, monkeypatch):
    bad = set()

    def is_bad(trained):
        if len(trained) in (12, 13, 14):
            bad.add(trained[-1])
        return trained[-1] in bad

    spoil(is_bad)
    runner.run("run.name=x", *QUICK)
    whole = runner.losses("x")
    (runner.folder / "runs/x").rename(runner.folder / "runs/whole")
    runner.run("run.name=x", *QUICK, "run.steps=10")
    for path in (runner.folder / "runs/x/checkpoints").iterdir():
        state = json.loads((path / "state.json").read_text())
        assert state["data"].pop("skipped") == []
        (path / "state.json").write_text(json.dumps(state))
        seal_checkpoint(path)
    # The record after a kill between the rollback and the next save
    lines = (runner.folder / "runs/whole/events.jsonl").read_text().splitlines()
    (line,) = [line for line in lines if json.loads(line)["event"] == "rollback"]
    with (runner.folder / "runs/x/events.jsonl").open("a") as file:
        file.write(line + "\n")
    monkeypatch.undo()
    done = runner.run("run.name=x", *QUICK)
    assert done.returncode == 0, done.stderr
    assert runner.losses("x") == whole


@pytest.mark.slow
def test_end_the_run_if_a_rollback_does_not_help(runner, spoil):
    spoil(lambda trained: len(trained) > 11)
    done = runner.run("run.name=x", *QUICK)
    assert done.returncode == 3, done.stderr
    assert len(events(runner, "rollback")) == 1
    assert events(runner, "diverge")
    assert "recovery.max_same_failures=2" in done.stdout
    kept = sorted(path.name for path in (runner.folder / "runs/x/checkpoints").iterdir())
    assert kept == ["rollbacks.json", "step_00000005", "step_00000010"]


@pytest.mark.slow
def test_rename_checkpoints_saved_while_diverging(runner, spoil):
    bad = set()

    def is_bad(trained):
        if len(trained) in (9, 10, 11):
            bad.add(trained[-1])
        return trained[-1] in bad

    spoil(is_bad)
    done = runner.run("run.name=x", *QUICK, "checkpoint.keep_last=1")
    assert done.returncode == 0, done.stderr
    (rollback,) = events(runner, "rollback")
    assert (rollback["to"], rollback["left_out"]) == (5, [8, 11])
    kept = sorted(path.name for path in (runner.folder / "runs/x/checkpoints").iterdir())
    assert kept == ["rollbacks.json", "step_00000010_diverged_1", "step_00000020"]


def test_skip_and_log_a_step_with_nonfinite_gradients(runner, monkeypatch):
    from hlat.engine.native.trainable_parameters import TrainableParameters

    real, calls = TrainableParameters.collect_gradients, []

    def gradients(self):
        found = real(self)
        calls.append(0)
        if len(calls) == 7:
            next(iter(found.values())).view(-1)[0] = float("nan")
        return found

    monkeypatch.setattr(TrainableParameters, "collect_gradients", gradients)
    done = runner.run("run.name=x")
    assert done.returncode == 0, done.stderr
    (skip,) = events(runner, "skip")
    assert (skip["step"], skip["count"]) == (7, 1)
    assert steps(runner) == [*range(1, 21)]
    assert runner.rows("x", "metrics.jsonl")[6]["grad_norm"] is None
    assert "step 7: gradients are not finite" in done.stdout


@pytest.mark.slow
def test_end_as_diverged_if_the_last_steps_are_not_finite(runner, monkeypatch):
    from hlat.engine.native.trainable_parameters import TrainableParameters

    real, calls = TrainableParameters.collect_gradients, []

    def gradients(self):
        found = real(self)
        calls.append(0)
        if len(calls) > 2:
            next(iter(found.values())).view(-1)[0] = float("nan")
        return found

    monkeypatch.setattr(TrainableParameters, "collect_gradients", gradients)
    done = runner.run("run.name=x", "run.steps=4")
    assert done.returncode == 3, done.stderr
    assert "diverged at step 4, not saved: loss, grad_norm" in done.stdout
    assert not any((runner.folder / "runs/x").glob("checkpoints/step_*"))


@pytest.mark.slow
def test_train_bitwise_the_same_with_periodic_checks(runner, uninterrupted):
    done = runner.run("run.name=x", "recovery.check_replicas_every_steps=3")
    assert done.returncode == 0, done.stderr
    assert runner.losses("x") == uninterrupted.losses("whole")


@pytest.mark.slow
def test_end_the_run_if_attention_is_not_causal(runner, monkeypatch):
    from hlat.model.attention import CoreAttention

    def forward(self, q, k, v, key_range=None, sinks=None):
        every = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, every, enable_gqa=True)

    monkeypatch.setattr(CoreAttention, "forward", forward)
    done = runner.run("run.name=x", "recovery.check_replicas_every_steps=5")
    assert done.returncode == 3, done.stderr
    (leak,) = events(runner, "diverge")
    assert leak["step"] == 5
    assert not [*(runner.folder / "runs/x/checkpoints").glob("step_*")]
    assert "attention is not causal; run hlat doctor to find the layer" in done.stdout
    assert runner.run("run.name=y").returncode == 0


@pytest.fixture
def memory_group():
    """Create a control group with a limit of 600 MB for all its processes."""
    group = MEMORY_GROUPS / f"hlat-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    (group / "memory.limit_in_bytes").write_text(str(600 << 20))
    yield group
    group.rmdir()


def run_and_signal(runner, number, *overrides):
    """Train under a supervisor; rank 0 receives a signal in step 8 of the first attempt."""
    inject(runner, runner.folder, SIGNAL_IN_STEP_8.format(number=int(number)))
    return runner.run_process("run.name=x", *SUPERVISED, *overrides)


@pytest.mark.distributed
@pytest.mark.xdist_group("processes")
class TestSupervised:
    @pytest.fixture(autouse=True)
    def skip_figures(self, runner):
        inject(runner, runner.folder, "")

    @pytest.mark.slow  # test_nodes.py kills one of two processes
    def test_restart_a_killed_process_and_account_for_the_time(self, runner, uninterrupted):
        began = time.time()
        done = run_and_signal(runner, signal.SIGKILL)
        assert done.returncode == 0, done.stderr
        (restart,) = events(runner, "restart")
        assert restart["reason"] == "rank 0 was killed by SIGKILL"
        assert "restarting from the newest checkpoint (restart 1 of 9)" in done.stderr
        assert runner.losses("x") == uninterrupted.losses("whole")
        assert done.stdout.count("complete at step 20") == 1
        ledger = load_run_record(runner.folder / "runs/x").time_ledger
        assert abs(ledger.unaccounted_seconds) < 0.05 * ledger.wall_seconds, ledger
        first, second = ledger.attempts
        assert first.start_time == pytest.approx(began, abs=2)
        assert second.start_time >= restart["time"]
        assert second.start_time - restart["time"] == pytest.approx(first.seconds["down"])
        assert first.seconds["lost"] > 0

    @pytest.mark.slow  # a run without a supervisor hangs below
    def test_restart_a_stopped_process_after_writing_its_stack(self, runner, uninterrupted):
        timeouts = ("recovery.step_timeout_s=5", "recovery.start_timeout_s=300")
        done = run_and_signal(runner, signal.SIGSTOP, *timeouts)
        assert done.returncode == 0, done.stderr
        (restart,) = events(runner, "restart")
        assert "no heartbeat from rank 0" in restart["reason"]
        assert "train.py" in (runner.folder / "runs/x/logs/node_0.stacks").read_text()
        assert runner.losses("x") == uninterrupted.losses("whole")

    @pytest.mark.slow  # test_resume.py: SIGTERM of a run without a supervisor
    def test_save_and_end_with_exit_code_75_on_sigterm(self, runner, uninterrupted):
        done = run_and_signal(runner, signal.SIGTERM)
        assert done.returncode == 75, done.stderr
        assert not events(runner, "restart")
        again = runner.run("run.name=x")
        assert again.returncode == 0, again.stderr
        assert runner.losses("x") == uninterrupted.losses("whole")

    @pytest.mark.slow  # starts a failing worker twice
    def test_end_the_run_after_the_same_exception_at_the_same_step(self, runner, tmp_path):
        broken(runner, tmp_path, 0, "NativeEngine.read_metrics = lambda *_: 1 / 0")
        done = runner.run_process("run.name=x", "recovery.max_restarts=9")
        assert done.returncode == 1
        assert len(events(runner, "restart")) == 1
        assert len(events(runner, "give_up")) == 1
        assert "failed 2 times at step 0" in done.stderr
        assert "rank 0 failed:\nTraceback" in done.stderr

    @pytest.mark.slow  # starts a supervised run
    def test_do_not_restart_after_a_configuration_error(self, runner):
        done = runner.run_process("run.name=x", "recovery.max_restarts=9", "data.root=nowhere")
        assert done.returncode == 2
        assert not events(runner, "restart")

    @pytest.mark.slow  # test_nodes.py kills one of two as well
    def test_restart_both_ranks_after_one_is_killed(self, runner):
        done = run_and_signal(runner, signal.SIGKILL, "parallelism.dp=2")
        assert done.returncode == 0, done.stderr
        assert len(events(runner, "restart")) == 1
        assert steps(runner) == [*range(1, 21)]

    @pytest.mark.slow  # tests/distributed/test_copies.py compares replicas
    def test_restart_instead_of_saving_a_flipped_bit(self, runner, tmp_path, uninterrupted):
        inject(runner, tmp_path, FLIP.format(once=str(tmp_path / "once")))
        done = runner.run_process("run.name=x", *SUPERVISED, "parallelism.dp=2")
        assert done.returncode == 0, done.stderr
        (restart,) = events(runner, "restart")
        assert restart["reason"].endswith(
            "ranks 0, 1 have different replicas of weights/model.layers.0.mlp.down_proj.weight; "
            "step 15 was not saved"
        )
        for found, expected in zip(runner.losses("x"), uninterrupted.losses("whole"), strict=True):
            assert found == pytest.approx(expected, rel=1e-5)

    @pytest.mark.slow  # the same with the losses of two processes, bit for bit
    def test_train_bitwise_the_same_after_a_flipped_bit(self, runner, tmp_path):
        layout = ("parallelism.dp=2", "precision=fp32")
        assert runner.run_process("run.name=whole", *layout).returncode == 0
        inject(runner, tmp_path, FLIP.format(once=str(tmp_path / "once")))
        assert runner.run_process("run.name=x", *SUPERVISED, *layout).returncode == 0
        assert len(events(runner, "restart")) == 1
        assert runner.losses("x") == runner.losses("whole")

    @pytest.mark.slow  # a killed process restarts above
    def test_report_a_kill_because_of_memory(self, runner, uninterrupted, memory_group, tmp_path):
        code = HUNGRY.format(once=str(tmp_path / "once"), group=str(memory_group))
        inject(runner, tmp_path, code)
        done = runner.run_process("run.name=x", *SUPERVISED)
        assert done.returncode == 0, done.stderr
        (restart,) = events(runner, "restart")
        assert restart["reason"] == "rank 0 was killed by SIGKILL (out of memory)"
        assert runner.losses("x") == uninterrupted.losses("whole")

    @pytest.mark.slow  # two replicas that differ restart above
    @pytest.mark.parametrize(("copies", "every", "found"), [(4, "null", 15), (3, "4", 12)])
    def test_exclude_the_node_of_the_replica_that_differs_from_the_others(
        self, runner, tmp_path, copies, every, found
    ):
        inject(runner, tmp_path, FLIP.format(once=str(tmp_path / "once")))
        layout = (f"parallelism.dp={copies}", "precision=fp32", "batch.micro_batch_size=1")
        layout += (f"batch.global_batch_size={2 * copies}",)
        layout += (f"recovery.check_replicas_every_steps={every}",)
        done = runner.run_process("run.name=x", *SUPERVISED, *layout)
        assert done.returncode == 4, done.stderr
        (exclude,) = events(runner, "exclude")
        assert (exclude["step"], exclude["ranks"]) == (found, [1])
        assert not events(runner, "restart")
        assert f"ended at step {found} because of an unhealthy node; not saved" in done.stdout
        again = runner.run_process("run.name=x", *SUPERVISED, *layout)
        assert again.returncode == 0, again.stderr
        assert steps(runner) == [*range(1, 21)]


@pytest.mark.slow
def test_allow_more_time_for_evaluations_and_saves_than_for_steps(runner, monkeypatch):
    timeouts, found = [], {}
    set_deadline = StepWatchdog._set_deadline

    def record_timeout(watchdog, timeout_s):
        timeouts.append(timeout_s)
        set_deadline(watchdog, timeout_s)

    def record_calls(owner, name):
        function = getattr(owner, name)

        def call(*arguments, **options):
            found.setdefault(name, []).append(timeouts[-1])
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(StepWatchdog, "_set_deadline", record_timeout)
    record_calls(NativeEngine, "train_step")
    record_calls(heldout_evaluation, "evaluate_heldout")
    record_calls(Checkpointer, "save")
    limits = ("recovery.step_timeout_s=1000", "recovery.start_timeout_s=2000")
    done = runner.run("run.name=x", *limits, "evaluation.every_steps=10")
    assert done.returncode == 0, done.stderr
    assert found["train_step"] == [2000] * 2 + [1000] * 18
    assert found["evaluate_heldout"] == [2000] * 3
    assert found["save"] == [2000] * 4


@pytest.mark.slow  # the timeouts in force are compared above
@pytest.mark.parametrize(
    "slow",
    [
        "import hlat.evaluate.heldout_evaluation as m; name = 'evaluate_heldout'",
        "import hlat.checkpoint.checkpointer as c; m = c.Checkpointer; name = 'save'",
    ],
)
def test_evaluations_and_saves_may_exceed_the_step_timeout(runner, tmp_path, slow):
    inject(
        runner,
        tmp_path,
        f"import time\n{slow}\n"
        "real, calls = getattr(m, name), []\n"
        "def late(*a, **k):\n"
        "    calls.append(0)\n"
        "    time.sleep(8 if len(calls) == 2 else 0)\n"
        "    return real(*a, **k)\n"
        "setattr(m, name, late)\n",
    )
    timeout, every = "recovery.step_timeout_s=5", "evaluation.every_steps=10"
    done = runner.run_process("run.name=x", timeout, every)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # waits for timeouts
def test_end_an_unsupervised_run_that_hangs_in_the_step_after_a_save(runner, tmp_path):
    inject(
        runner,
        tmp_path,
        "import time\n"
        "from hlat.engine.native.native_engine import NativeEngine\n"
        "real, calls = NativeEngine.train_step, []\n"
        "NativeEngine.train_step = lambda *a: (calls.append(0), len(calls) == 11 and time.sleep(999), real(*a))[2]\n",
    )
    done = runner.run_process("run.name=x", "recovery.step_timeout_s=5")
    assert done.returncode == 1
    assert steps(runner) == [*range(1, 11)]
    assert "sitecustomize" in (runner.folder / "runs/x/logs/rank_0.stacks").read_text()


@pytest.mark.slow
def test_keep_milestones_with_weights(runner):
    done = runner.run("run.name=x", "checkpoint.milestone_tokens=3000", "checkpoint.keep_last=1")
    assert done.returncode == 0, done.stderr
    folder = runner.folder / "runs/x/milestones"
    kept = sorted(int(path.name.removeprefix("step_")) for path in folder.iterdir())
    assert kept == [6, 12, 18]  # of 512 tokens each
    manifest = json.loads((folder / "step_00000012/manifest.json").read_text())
    assert {name.partition("/")[0] for name in manifest["tensors"]} == {"weights"}
