"""Rounding of stages to steps."""

from hlat.config.batch import BatchConfig
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.config.phase_steps import (
    compute_phase_steps,
    compute_stage_starts,
    find_stage,
    find_stage_span,
)

HLAT = BatchConfig(global_batch_size=1024, micro_batch_size=1, sequence_length=4096)
SMALL = BatchConfig(global_batch_size=2, micro_batch_size=1, sequence_length=5)


def phase(*tokens: int | None) -> PhaseConfig:
    return PhaseConfig(
        "test", [PhaseStage(str(index), length) for index, length in enumerate(tokens)]
    )


def test_hlat_70b() -> None:
    upsample = phase(int(1.4e12), int(400e9))
    assert compute_stage_starts(upsample, HLAT) == (0, 333_787)
    assert compute_phase_steps(upsample, HLAT) == 429_154
    assert find_stage(333_786, upsample, HLAT).name == "0"
    assert find_stage(333_787, upsample, HLAT).name == "1"


def test_hlat_7b_of_one_stage() -> None:
    assert compute_stage_starts(phase(int(1.8e12)), HLAT) == (0,)
    assert compute_phase_steps(phase(int(1.8e12)), HLAT) == 429_154


def test_open_end() -> None:
    assert compute_phase_steps(phase(None), SMALL) is None
    assert compute_phase_steps(phase(30, None), SMALL) is None
    assert compute_stage_starts(phase(30, None), SMALL) == (0, 3)
    assert find_stage(10**9, phase(30, None), SMALL).name == "1"


def test_running_sum_is_rounded_up() -> None:
    assert compute_stage_starts(phase(14, 14, 14), SMALL) == (0, 2, 3)
    assert compute_phase_steps(phase(14, 14, 14), SMALL) == 5


def test_exact_multiple_needs_no_further_step() -> None:
    assert compute_stage_starts(phase(20, 10), SMALL) == (0, 2)
    assert compute_phase_steps(phase(20, 10), SMALL) == 3


def test_a_stage_without_a_step() -> None:
    swallowed = phase(11, 3, 20)
    assert compute_stage_starts(swallowed, SMALL) == (0, 2, 2)
    assert [find_stage(step, swallowed, SMALL).name for step in range(4)] == ["0", "0", "2", "2"]


def test_span_of_a_stage() -> None:
    known, open_ended = phase(14, 14, 14), phase(30, None)
    assert [find_stage_span(step, known, SMALL) for step in (0, 1, 2, 4, 99)] == [
        (0, 2), (0, 2), (2, 3), (3, 5), (3, 5)
    ]  # fmt: skip
    assert find_stage_span(2, open_ended, SMALL) == (0, 3)
    assert find_stage_span(3, open_ended, SMALL) == (3, None)
    assert find_stage_span(2, phase(11, 3, 20), SMALL) == (2, 4)
