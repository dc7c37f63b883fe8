"""Restarts after each result of an attempt, and the srun command."""

import json
import signal

import pytest

from hlat.config.config_errors import ExitCode
from hlat.jobs import slurm_commands
from hlat.jobs.attempt import AttemptResult, JobAttempt, build_srun_command, find_restart_reason
from hlat.jobs.submission import Submission, create_submission_dir


def build_result(
    code: int, step: int = 5, stopped: bool = False, nodes: tuple[str, ...] = ()
) -> AttemptResult:
    return AttemptResult(int(code), step, stopped, nodes)


@pytest.mark.parametrize("code", [ExitCode.FINISHED, ExitCode.CONFIGURATION, ExitCode.DIVERGED])
def test_final_exit_codes_are_not_restarted(code):
    assert find_restart_reason(build_result(code), [], 9) is None
    assert find_restart_reason(build_result(code, stopped=True, nodes=("n1",)), [], 9) is None


def test_preempted_run_restarts_and_cancelled_run_does_not():
    assert (
        find_restart_reason(build_result(ExitCode.PREEMPTED, stopped=True), [], 1)
        == "it was stopped to save its state"
    )
    assert find_restart_reason(build_result(ExitCode.PREEMPTED), [], 9) is None


def test_unhealthy_nodes_are_named():
    assert (
        find_restart_reason(build_result(ExitCode.UNHEALTHY_NODE, nodes=("n1", "n3")), [], 1)
        == "unhealthy: n1, n3"
    )


@pytest.mark.parametrize("code", [ExitCode.FAILED, ExitCode.UNHEALTHY_NODE])
def test_failed_run_restarts_while_it_progresses(code):
    assert find_restart_reason(build_result(code), [], 9) == "it failed at step 5"
    assert find_restart_reason(build_result(code), [3, 4], 9) == "it failed at step 5"
    assert find_restart_reason(build_result(code), [3, 5], 9) is None


@pytest.mark.parametrize("code", [ExitCode.FAILED, ExitCode.UNHEALTHY_NODE, ExitCode.PREEMPTED])
def test_attempts_are_limited(code):
    assert find_restart_reason(build_result(code, stopped=True, nodes=("n1",)), [], 0) is None


def test_srun_starts_one_task_per_node():
    submission = Submission(2, [], True, {}, ["--container-image=x y"], 9, 1)
    args = build_srun_command(submission, ["python", "a b"], {"SLURM_CPUS_ON_NODE": "64"})
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
        monkeypatch.setattr("time.sleep", lambda seconds: None)

    def save_scores(self, *tasks: str) -> None:
        row = {"scores": {}, "tasks": dict.fromkeys(tasks)}
        (self.scores / "step_00000010.json").write_text(json.dumps(row))

    def attempt(self, code: int, *signals: signal.Signals) -> bool:
        """Run an attempt that ends with a code after signals; return True if it is requeued."""

        def run_commands(attempt: JobAttempt) -> int:
            for number in signals:
                signal.raise_signal(number)
            return code

        self._patch.setattr(JobAttempt, "_run_commands", run_commands)
        handlers = {n: signal.getsignal(n) for n in (signal.SIGUSR2, signal.SIGTERM)}
        self.requeued.clear()
        try:
            JobAttempt(self.submission_dir, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}).run()
        finally:
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
    assert evaluation.attempt(ExitCode.PREEMPTED, signal.SIGUSR2, signal.SIGTERM)
    assert not evaluation.attempt(ExitCode.PREEMPTED, signal.SIGTERM)
    assert not evaluation.attempt(ExitCode.FINISHED)
    assert evaluation.ends == [(75, 1), (75, 1), (75, 1), (0, 1)]


def test_terminated_evaluation_is_incomplete(evaluation):
    assert not evaluation.attempt(0, signal.SIGTERM)
    assert evaluation.ends == [(1, 0)]


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
