"""Which endings of an attempt are followed by another one, and how a run is started."""

import json
import signal

import pytest

from hlat.config.errors import Exit
from hlat.jobs import slurm
from hlat.jobs.attempt import Attempt, Ending, again, srun
from hlat.jobs.submission import Submission, make


def ending(code: int, step: int = 5, asked: bool = False, bad: tuple[str, ...] = ()) -> Ending:
    return Ending(int(code), step, asked, bad)


@pytest.mark.parametrize("code", [Exit.FINISHED, Exit.CONFIGURATION, Exit.DIVERGED])
def test_what_another_attempt_cannot_mend_has_none(code):
    assert again(ending(code), [], 9) is None
    assert again(ending(code, asked=True, bad=("n1",)), [], 9) is None


def test_a_run_whose_time_was_up_goes_on_and_a_cancelled_one_does_not():
    assert again(ending(Exit.PREEMPTED, asked=True), [], 1) == "it was asked to save and end"
    assert again(ending(Exit.PREEMPTED), [], 9) is None


def test_an_unhealthy_node_is_named():
    assert again(ending(Exit.UNHEALTHY_NODE, bad=("n1", "n3")), [], 1) == "unhealthy: n1, n3"


@pytest.mark.parametrize("code", [Exit.FAILED, Exit.UNHEALTHY_NODE])
def test_a_failure_is_tried_again_while_it_gets_further(code):
    assert again(ending(code), [], 9) == "it failed at step 5"
    assert again(ending(code), [3, 4], 9) == "it failed at step 5"
    assert again(ending(code), [3, 5], 9) is None


@pytest.mark.parametrize("code", [Exit.FAILED, Exit.UNHEALTHY_NODE, Exit.PREEMPTED])
def test_attempts_are_bounded(code):
    assert again(ending(code, asked=True, bad=("n1",)), [], 0) is None


def test_one_task_a_node_gets_all_of_it():
    sent = Submission(2, [], True, {}, ["--container-image=x y"], 9, 1)
    words = srun(sent, ["python", "a b"], {"SLURM_CPUS_ON_NODE": "64"})
    assert words[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=64"} < {*words}
    assert words[-3:] == ["--container-image=x y", "python", "a b"]


class Sent:
    """An evaluation, and what becomes of the job when its program ends."""

    def __init__(self, folder, monkeypatch) -> None:
        self.scores, self.requeued, self._patch = folder, [], monkeypatch
        self.place = make(folder / "asked")
        self.place.save(Submission(1, [["x"]], False, {}, [], 9, 1, scores=str(folder)))
        monkeypatch.setattr(slurm, "is_preempted", lambda job: False)
        monkeypatch.setattr(slurm, "requeue", lambda job, without: self.requeued.append(job))
        monkeypatch.setattr("time.sleep", lambda seconds: None)

    def keep(self, *tasks: str) -> None:
        row = {"scores": {}, "tasks": dict.fromkeys(tasks)}
        (self.scores / "step_00000010.json").write_text(json.dumps(row))

    def attempt(self, code: int, *signals: signal.Signals) -> bool:
        """End with a code after some signals; returns whether the job is started again."""

        def steps(attempt: Attempt) -> int:
            for number in signals:
                signal.raise_signal(number)
            return code

        self._patch.setattr(Attempt, "_steps", steps)
        before = {n: signal.getsignal(n) for n in (signal.SIGUSR2, signal.SIGTERM)}
        self.requeued.clear()
        try:
            Attempt(self.place, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}).run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return bool(self.requeued)

    @property
    def ends(self) -> list[tuple[int, int]]:
        rows = self.place.attempts.rows()
        return [(row["exit"], row["step"]) for row in rows if row["event"] == "end"]


@pytest.fixture
def sent(tmp_path, monkeypatch) -> Sent:
    return Sent(tmp_path, monkeypatch)


def test_an_evaluation_whose_time_was_up_goes_on_and_a_cancelled_one_does_not(sent):
    sent.keep("piqa")
    assert sent.attempt(Exit.PREEMPTED, signal.SIGUSR2)
    assert sent.attempt(Exit.PREEMPTED, signal.SIGUSR2, signal.SIGTERM)
    assert not sent.attempt(Exit.PREEMPTED, signal.SIGTERM)
    assert not sent.attempt(Exit.FINISHED)
    assert sent.ends == [(75, 1), (75, 1), (75, 1), (0, 1)]


def test_an_evaluation_that_slurm_ended_is_not_complete_whatever_srun_says(sent):
    assert not sent.attempt(0, signal.SIGTERM)
    assert sent.ends == [(1, 0)]


def test_an_evaluation_that_fails_is_tried_again_while_there_are_further_scores(sent):
    (sent.scores / "notes.json").write_text("{half")
    assert sent.attempt(1)
    sent.keep("piqa")
    assert sent.attempt(137)
    assert not sent.attempt(1)
    assert not sent.attempt(Exit.CONFIGURATION)
    assert sent.ends == [(1, 0), (1, 1), (1, 1), (2, 1)]
    told = [row["again"] for row in sent.place.attempts.rows() if row["event"] == "end"]
    assert told[1] == "it failed at score 1"
