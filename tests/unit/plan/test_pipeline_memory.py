"""Activations in flight are those of torch's schedules."""

import pytest
from torch.distributed.pipelining import schedules

from hlat.config.parallelism import PipelineSchedule
from hlat.config.resolve import resolve_config
from hlat.distributed.mesh_coordinates import compute_parallel_degrees
from hlat.plan.memory_estimate import (
    compute_activation_bytes,
    count_micro_batches_in_flight,
    estimate_memory,
)

SCHEDULES = {
    PipelineSchedule.interleaved: schedules.ScheduleInterleaved1F1B,
    PipelineSchedule.zero_bubble: schedules.ScheduleInterleavedZeroBubble,
}


def count_in_flight(
    schedule: PipelineSchedule, pp: int, stages_per_rank: int, num_micro_batches: int, rank: int
) -> tuple[int, int]:
    """Return the most passes with stored activations, and with delayed gradients of weights."""
    torch_schedule = object.__new__(SCHEDULES[schedule])  # its constructor needs process groups
    torch_schedule.n_local_stages, torch_schedule.pp_group_size = stages_per_rank, pp
    torch_schedule._n_microbatches, torch_schedule.rank = num_micro_batches, rank
    torch_schedule.number_of_rounds = max(1, num_micro_batches // pp)
    torch_schedule.microbatches_per_round = num_micro_batches // torch_schedule.number_of_rounds
    stored = delayed = max_stored = max_delayed = 0
    for action in torch_schedule._calculate_single_rank_operations(rank):
        if action is None:
            continue
        kind = action.computation_type
        stored += kind == schedules.FORWARD
        stored -= kind in (schedules.FULL_BACKWARD, schedules.BACKWARD_WEIGHT)
        delayed += kind == schedules.BACKWARD_INPUT
        delayed -= kind == schedules.BACKWARD_WEIGHT
        max_stored, max_delayed = max(max_stored, stored), max(max_delayed, delayed)
    return max_stored, max_delayed


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "stages_per_rank"), [(2, 2), (4, 2), (4, 3)])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_activations_in_flight_are_those_of_the_schedule(
    compose, schedule, pp, stages_per_rank, rounds
) -> None:
    config = resolve_config(
        compose(
            f"parallelism.pp={pp}",
            f"parallelism.stages_per_rank={stages_per_rank}",
            f"parallelism.pipeline_schedule={schedule.name}",
            f"model.num_layers={pp * stages_per_rank}",
            "batch.micro_batch_size=1",
            f"batch.global_batch_size={pp * rounds}",
        )
    )
    mesh = compute_parallel_degrees(config.parallelism, pp)
    for rank in range(pp):
        stored, delayed = count_in_flight(schedule, pp, stages_per_rank, pp * rounds, rank)
        planned = count_micro_batches_in_flight(config, mesh, rank)
        assert planned * stages_per_rank == pytest.approx(stored)
        if schedule is PipelineSchedule.zero_bubble:
            assert delayed == rank + 1  # that of the current pass is not delayed


def test_last_rank_of_a_zero_bubble_schedule_stores_delayed_passes(compose) -> None:
    config = resolve_config(
        compose(
            *("parallelism.pp=4", "parallelism.stages_per_rank=2", "batch.micro_batch_size=1"),
            *("parallelism.pipeline_schedule=zero_bubble", "model.num_layers=8"),
            "batch.global_batch_size=16",
        )
    )
    layer = compute_activation_bytes(config, compute_parallel_degrees(config.parallelism, 4))
    # Four micro batches through two layers, and three passes of a layer with all temporaries
    expected = 4 * 2 * layer.saved[0] + 3 * layer.temporary[0]
    assert estimate_memory(config).activations == pytest.approx(expected)
