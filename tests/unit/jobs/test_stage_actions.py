"""Decisions about the jobs of a campaign when its command is repeated."""

from hlat.jobs.campaign_execution import can_continue
from hlat.jobs.campaign_state import StageState, StageStatus
from hlat.jobs.slurm_commands import NEVER_SATISFIED
from hlat.jobs.stage_job import StageJob, find_dependents
from hlat.jobs.submitted_stages import StageAction, decide_actions


def job(name: str, *after: str) -> StageJob:
    return StageJob(name, name, "train", after, (), {}, name, name)


JOBS = [job("a"), job("b", "a"), job("c", "b"), job("d", "a")]


def decide(**states: StageStatus) -> str:
    """Return the first letter of the action of each job."""
    actions = decide_actions(JOBS, states)
    return "".join(actions[job.name].value[0] for job in JOBS)


def status(state: str, is_changed: bool = False) -> StageStatus:
    return StageStatus(StageState(state), is_changed)


FINISHED, RUNNING, SUBMITTED = status("finished"), status("running"), status("submitted")
FAILED, WAITING = status("failed"), status("waiting")


def test_unchanged_active_jobs_continue() -> None:
    assert decide(a=FINISHED, b=RUNNING, c=SUBMITTED, d=SUBMITTED) == "kkkk"


def test_a_failed_job_is_started_again_with_its_dependents() -> None:
    assert decide(a=FINISHED, b=FAILED, c=SUBMITTED, d=SUBMITTED) == "ksrk"
    assert decide(a=FAILED, b=SUBMITTED, c=SUBMITTED, d=FINISHED) == "srrk"


def test_a_changed_job_that_has_not_started_is_replaced_with_its_dependents() -> None:
    assert decide(a=RUNNING, b=status("submitted", True), c=SUBMITTED, d=SUBMITTED) == "krrk"


def test_a_changed_job_that_has_started_continues_and_is_reported() -> None:
    states = {"a": status("finished", True), "b": status("running", True)}
    states |= {"c": status("submitted", True), "d": status("failed", True)}
    assert decide(**states) == "kkrs"
    assert [name for name, one in states.items() if one.is_unchangeable] == ["a", "b"]


def test_a_job_whose_dependency_has_finished_after_all_is_replaced() -> None:
    stuck = StageStatus(StageState.submitted, detail=f"waits: {NEVER_SATISFIED}")
    assert decide(a=FINISHED, b=stuck, c=stuck, d=SUBMITTED) == "krrk"
    assert decide(a=RUNNING, b=stuck, c=SUBMITTED, d=SUBMITTED) == "kkkk"


def test_jobs_without_a_state_are_started() -> None:
    assert decide(a=RUNNING, b=WAITING, c=WAITING, d=SUBMITTED) == "kssk"
    assert {action.value for action in StageAction} == {"keep", "start", "replace"}


def test_wait_ends_when_no_job_can_start() -> None:
    stuck = StageStatus(StageState.submitted, detail="waits: DependencyNeverSatisfied")
    held = StageStatus(StageState.submitted, detail="waits: JobHeldUser")
    assert not can_continue({"a": FAILED, "b": stuck, "c": held, "d": FINISHED})
    assert can_continue({"a": RUNNING, "b": held, "c": WAITING, "d": FINISHED})
    assert can_continue({"a": FINISHED, "b": SUBMITTED, "c": stuck, "d": FINISHED})


def test_dependents_include_indirect_ones() -> None:
    assert find_dependents(JOBS, {"b"}) == {"c"}
    assert find_dependents(JOBS, {"a"}) == {"b", "c", "d"}


def test_dependents_are_searched_in_the_jobs_before_them() -> None:
    """No set of all dependents is copied for each job."""

    class Names(set):
        def union(self, *others):
            raise AssertionError("a set is copied")

    assert find_dependents(JOBS, Names({"b"})) == {"c"}
    assert find_dependents(JOBS, Names({"a"})) == {"b", "c", "d"}
    assert find_dependents(JOBS, Names()) == set()
