"""Table of the jobs of a campaign."""

from hlat.jobs.campaign_state import StageState, StageStatus
from hlat.jobs.campaign_table import format_statuses
from hlat.jobs.stage_job import StageJob


def format_chain(length: int) -> list[str]:
    names = [f"s{number:03d}" for number in range(length)]
    after = [(), *((name,) for name in names[:-1])]
    jobs = [
        StageJob(name, name, "train", before, (), {}, name, name)
        for name, before in zip(names, after, strict=True)
    ]
    return format_statuses(jobs, {name: StageStatus(StageState.waiting) for name in names})


def test_jobs_are_indented_by_their_depth() -> None:
    assert [line.partition("s0")[0] for line in format_chain(4)[1:]] == ["", "  ", "    ", "      "]


def test_lines_of_a_long_chain_have_a_bounded_length() -> None:
    assert max(map(len, format_chain(20))) == max(map(len, format_chain(500)))
