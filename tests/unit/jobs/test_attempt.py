"""Which endings of an attempt are followed by another one, and how a run is started."""

import pytest

from hlat.config.errors import Exit
from hlat.jobs.attempt import Ending, again, srun
from hlat.jobs.submission import Submission


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
