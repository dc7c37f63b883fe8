"""Restarts after each result of an attempt, and the srun command."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.distributed.process_signals import DUMP_SIGNAL, STOP_SIGNALS
from hlat.jobs import slurm_commands
from hlat.jobs.attempt import AttemptResult, JobAttempt, find_restart_reason
from hlat.jobs.submission import Submission, create_submission_dir
from hlat.tracking.jsonl_log import open_events_log


def build_result(
    code: int, step: int = 5, stopped: bool = False, nodes: tuple[str, ...] = ()
) -> AttemptResult:
    return AttemptResult(int(code), step, stopped, nodes)


@pytest.mark.parametrize("code", [ExitCode.FINISHED, ExitCode.CONFIGURATION, ExitCode.DIVERGED])
def test_final_exit_codes_are_not_restarted(code):
    assert find_restart_reason(build_result(code), [], 9, True) is None
    assert find_restart_reason(build_result(code, stopped=True, nodes=("n1",)), [], 9, True) is None


def test_preempted_run_restarts_and_cancelled_run_does_not():
    assert (
        find_restart_reason(build_result(ExitCode.PREEMPTED, stopped=True), [], 1, True)
        == "it was stopped to save its state"
    )
    assert find_restart_reason(build_result(ExitCode.PREEMPTED), [], 9, True) is None


@pytest.mark.parametrize(
    ("progressed", "before", "restarts"),
    [(True, False, True), (False, True, True), (False, False, False)],
)
def test_stop_after_two_attempts_without_progress(progressed, before, restarts):
    result = AttemptResult(75, 0, stop_requested=True, has_progressed=progressed)
    assert (find_restart_reason(result, [], 9, before) is not None) is restarts


def test_unhealthy_nodes_are_named():
    assert (
        find_restart_reason(build_result(ExitCode.UNHEALTHY_NODE, nodes=("n1", "n3")), [], 1, True)
        == "unhealthy: n1, n3"
    )


@pytest.mark.parametrize("code", [ExitCode.FAILED, ExitCode.UNHEALTHY_NODE])
def test_failed_run_restarts_while_it_progresses(code):
    assert find_restart_reason(build_result(code), [], 9, True) == "it failed at step 5"
    assert find_restart_reason(build_result(code), [3, 4], 9, True) == "it failed at step 5"
    assert find_restart_reason(build_result(code), [3, 5], 9, True) is None


@pytest.mark.parametrize("code", [ExitCode.FAILED, ExitCode.UNHEALTHY_NODE, ExitCode.PREEMPTED])
def test_attempts_are_limited(code):
    assert find_restart_reason(build_result(code, stopped=True, nodes=("n1",)), [], 0, True) is None


def test_srun_starts_one_task_per_node():
    args = slurm_commands.build_srun_command(
        ["python", "a b"], 2, ["--container-image=x y"], {"SLURM_CPUS_ON_NODE": "64"}
    )
    assert args[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=64"} < {*args}
    assert args[-3:] == ["--container-image=x y", "python", "a b"]


class FakeEvaluation:
    """Submitted evaluation without a scheduler."""

    def __init__(self, directory, monkeypatch) -> None:
        self.scores, self.requeued, self._patch = directory, [], monkeypatch
        self.submission_dir = create_submission_dir(directory / "evaluation")
        self.submission_dir.save(Submission(1, [["x"]], False, {}, [], 9, 1, scores=str(directory)))
        monkeypatch.setattr(slurm_commands, "is_preempted", lambda job: False)
        monkeypatch.setattr(
            slurm_commands, "requeue_job", lambda job, excluded_nodes: self.requeued.append(job)
        )

    def save_scores(self, *tasks: str) -> None:
        row = {"scores": {}, "tasks": dict.fromkeys(tasks)}
        (self.scores / "step_00000010.json").write_text(json.dumps(row))

    def attempt(
        self,
        code: int,
        *signals: signal.Signals,
        tasks: tuple[str, ...] = (),
        run_commands: Callable[[JobAttempt], int] | None = None,
    ) -> bool:
        """Run an attempt that saves scores of `tasks` and ends with a code after signals.

        Return True if it is requeued.
        """

        def end(attempt: JobAttempt) -> int:
            if tasks:
                self.save_scores(*tasks)
            for number in signals:
                signal.raise_signal(number)
            return code

        self._patch.setattr(JobAttempt, "_run_commands", run_commands or end)
        handled = (*STOP_SIGNALS, DUMP_SIGNAL, signal.SIGALRM)
        handlers = {number: signal.getsignal(number) for number in handled}
        self.requeued.clear()
        try:
            job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
            JobAttempt(self.submission_dir, os.environ | job).run()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return bool(self.requeued)

    @property
    def ends(self) -> list[tuple[int, int]]:
        rows = self.submission_dir.attempts.read_rows()
        return [(row["exit"], row["step"]) for row in rows if row["event"] == "end"]


@pytest.fixture
def evaluation(tmp_path, monkeypatch) -> FakeEvaluation:
    return FakeEvaluation(tmp_path, monkeypatch)


def test_preempted_evaluation_restarts_and_cancelled_evaluation_does_not(evaluation):
    evaluation.save_scores("piqa")
    assert evaluation.attempt(ExitCode.PREEMPTED, signal.SIGUSR2)
    tasks = ("piqa", "boolq")
    assert evaluation.attempt(ExitCode.PREEMPTED, signal.SIGUSR2, signal.SIGTERM, tasks=tasks)
    assert not evaluation.attempt(ExitCode.PREEMPTED, signal.SIGTERM)
    assert not evaluation.attempt(ExitCode.FINISHED)
    assert evaluation.ends == [(75, 1), (75, 2), (75, 2), (0, 2)]


@pytest.mark.parametrize(
    "number", [n for n in STOP_SIGNALS if n not in (signal.SIGUSR2, signal.SIGTERM)]
)
def test_another_stop_signal_ends_the_job(evaluation, tmp_path, monkeypatch, number):
    """Save the state without a restart; DUMP_SIGNAL has no effect."""
    run_commands = JobAttempt._run_commands
    stop_file = evaluation.submission_dir.path / "stop.7.1"
    send = f"kill -{DUMP_SIGNAL.value} $PPID; kill -{number.value} $PPID"
    script = f"until [ -e {stop_file} ]; do {send}; sleep 0.01; done; exit 75"
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert not evaluation.attempt(1, run_commands=run_commands)
    assert evaluation.ends == [(75, 0)]


def test_evaluation_without_progress_is_stopped_twice_and_preempted_often(evaluation, monkeypatch):
    assert evaluation.attempt(ExitCode.PREEMPTED, signal.SIGUSR2)
    assert not evaluation.attempt(ExitCode.PREEMPTED, signal.SIGUSR2)
    monkeypatch.setattr(slurm_commands, "is_preempted", lambda job: True)
    assert evaluation.attempt(ExitCode.PREEMPTED)
    assert evaluation.attempt(ExitCode.PREEMPTED)


def test_terminated_evaluation_is_incomplete(evaluation):
    assert not evaluation.attempt(0, signal.SIGTERM)
    assert evaluation.ends == [(1, 0)]


def test_requeue_ignores_the_signal_of_slurm(evaluation, tmp_path, monkeypatch):
    monkeypatch.undo()
    log, scontrol = tmp_path / "log", tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\nkill -TERM $$\necho "$@" >> {log}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    evaluation.submission_dir.attempts.append({"event": "exclude", "job": "7", "without": ["n1"]})
    evaluation.attempt(1)
    assert log.read_text() == "requeue 7\nupdate JobId=7 ExcNodeList=n1\n"


@pytest.mark.slow
def test_requeue_a_run_that_has_not_stopped_before_its_time_limit(
    evaluation, tmp_path, monkeypatch, capsys
):
    run_commands = JobAttempt._run_commands
    evaluation.submission_dir.save(replace(evaluation.submission_dir.load(), signal_s=1))
    (tmp_path / "srun").write_text("#!/bin/sh\nkill -USR2 $PPID\nexec sleep 60\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert evaluation.attempt(1, run_commands=run_commands)
    assert "has not stopped before its time limit" in capsys.readouterr().out
    assert evaluation.ends == [(1, 0)]


def test_requeue_waits_for_slurmctld(evaluation, tmp_path, monkeypatch):
    monkeypatch.undo()
    intervals = []
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ -e up ] || { echo "no controller" >&2; exit 1; }\n')
    scontrol.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def sleep(seconds: float) -> None:
        if seconds >= 1:  # not those of subprocess
            intervals.append(seconds)
        if len(intervals) == 7:
            (tmp_path / "up").touch()

    monkeypatch.setattr("time.sleep", sleep)
    evaluation.attempt(1)
    assert intervals == [1, 2, 4, 8, 16, 30, 30]
    (tmp_path / "up").unlink()
    monkeypatch.setattr(slurm_commands, "_RETRY_S", -1)
    with pytest.raises(ConfigError, match="scontrol requeue: no controller"):
        evaluation.attempt(1, tasks=("piqa",))
    assert evaluation.submission_dir.attempts.read_rows()[-1]["event"] == "requeue_failed"


def test_failed_evaluation_restarts_while_it_progresses(evaluation):
    (evaluation.scores / "notes.json").write_text("{half")
    assert evaluation.attempt(1)
    evaluation.save_scores("piqa")
    assert evaluation.attempt(137)
    assert not evaluation.attempt(1)
    assert not evaluation.attempt(ExitCode.CONFIGURATION)
    assert evaluation.ends == [(1, 0), (1, 1), (1, 1), (2, 1)]
    reasons = [
        row["again"]
        for row in evaluation.submission_dir.attempts.read_rows()
        if row["event"] == "end"
    ]
    assert reasons[1] == "it failed at score 1"


@pytest.mark.parametrize(
    ("events", "code"),
    [
        (["start", "finish"], ExitCode.FINISHED),
        (["start", "finish", "resume"], ExitCode.FAILED),
        ([], ExitCode.FAILED),
    ],
)
def test_training_needs_a_finish_event_of_its_last_attempt(
    tmp_path, monkeypatch, capsys, events, code
):
    """srun returns 0 for tasks that a signal has ended."""
    directory = create_submission_dir(tmp_path / "run")
    directory.save(Submission(1, [["x"]], True, {}, [], 1, 1))
    log = open_events_log(tmp_path / "run")
    for name in events:
        log.append({"event": name, "step": 4, "attempt": 1, "time": 1.0})
    monkeypatch.setattr(JobAttempt, "_run_commands", lambda _: ExitCode.FINISHED)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    assert JobAttempt(directory, environment).run() == code
    has_reason = "has no finish event" in capsys.readouterr().out
    assert has_reason is (code == ExitCode.FAILED)
