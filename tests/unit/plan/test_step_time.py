"""Parts of the step time against manual examples."""

import re
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.config.mfu import compute_mfu
from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.model.decoder_spec import compute_flops_per_token
from hlat.plan import communication_bytes, step_time
from hlat.plan.achieved_speed import compute_achieved_speed
from hlat.plan.forecast import forecast_run
from hlat.plan.hardware_efficiency import HardwareEfficiency
from hlat.plan.pipeline_stage_shards import build_stage_shards
from hlat.plan.plan_text import format_plan
from tests.support.planned_stages import count_flops

PAPER = ("experiment=hlat_70b",)
ALL = HardwareEfficiency(1, 1, 1, "the data sheet")


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


def test_step_time_of_hlat_70b_at_data_sheet_speeds(config):
    run = config(*PAPER)
    step = step_time.compute_step_time(run, compute_achieved_speed(run, ALL))
    mesh = compute_parallel_degrees(run.parallelism, run.num_processes)
    first, *_, last = build_stage_shards(run.model, mesh)
    flops = count_flops(run, mesh, last)
    assert step.compute + step.attention == pytest.approx(32 * flops / 95e12)
    num_bytes = communication_bytes.compute_tensor_parallel_bytes(run, mesh, last)
    assert step.tensor_parallel == pytest.approx(32 * num_bytes / 384e9)
    # Stages are on different nodes: 100 GB/s per node over 32 ranks
    send_s = 2 * 4096 * 8192 * 2 / 32 / (100e9 / 32)
    assert step.sends == pytest.approx(32 * send_s)
    middle = count_flops(run, mesh, first) / 95e12 + send_s
    inner = 100 * 4096 * 8192 * 2 * 31 / 32 / 384e9
    ends = 2 * 4096 * 8192 * 2 * 31 / 32 / 384e9
    assert step.bubble == pytest.approx(7 * (middle + inner) + ends)
    assert step.reduction == pytest.approx(
        max(first.numel, last.numel) * 6 * 31 / 32 / (100e9 / 32)
    )
    assert step.hidden == 0  # NxD reduces after the backward pass
    assert step.total == pytest.approx(
        step.compute
        + step.attention
        + step.tensor_parallel
        + step.sends
        + step.bubble
        + step.reduction
        + step.optimizer
    )


def test_native_engine_overlaps_data_parallel_collectives_with_computation(config):
    """ZeRO 1 with the last backward pass, ZeRO 3 with all micro batches."""
    args = ("model=7b", "hardware=trn2_48xl", "hardware.nodes=4", "precision=mixed")
    constants = replace(ALL, overlap=0.75, network=1e-3)

    def step(zero):
        run = config(*args, "parallelism.tp=4", f"parallelism.zero={zero}")
        return step_time.compute_step_time(run, compute_achieved_speed(run, constants))

    one = step(1)
    backward = (one.compute + one.attention + one.tensor_parallel) / 16 * 2 / 3
    assert one.hidden == pytest.approx(0.75 * backward)
    assert one.reduction + one.hidden > backward
    three = step(3)
    assert three.hidden == pytest.approx(
        0.75 * (three.compute + three.attention + three.tensor_parallel)
    )


def test_sums_over_replicas_overlap_with_the_last_backward_pass(config):
    """ZeRO 1 sums after it."""
    args = ("model=7b", "hardware=trn2_48xl", "hardware.nodes=4", "precision=mixed")
    constants = replace(ALL, overlap=0.75, network=1e-3)

    def step(*overrides):
        run = config(*args, "parallelism.tp=4", "parallelism.dp_replicate=4", *overrides)
        return step_time.compute_step_time(run, compute_achieved_speed(run, constants))

    three = step("parallelism.zero=3")
    computation = three.compute + three.attention + three.tensor_parallel
    assert three.reduction > computation
    alone = step("parallelism.zero=3", "parallelism.dp_replicate=1")
    assert three.hidden < 0.75 * computation
    micro_batch = computation / 16
    within = three.hidden - 0.75 * micro_batch * 2 / 3
    assert 0 < within < alone.hidden
    assert step("parallelism.zero=1").hidden < three.hidden


def test_schedules_reduce_the_bubble(config):
    def bubble(*overrides):
        args = ("hardware=trn2_48xl", "hardware.processes_per_node=4", "precision=bf16")
        layout = ("parallelism.pp=4", "model.num_layers=8", "batch.micro_batch_size=1")
        run = config(*args, *layout, *overrides)
        return step_time.compute_step_time(run, compute_achieved_speed(run, ALL)).bubble

    once = bubble()
    twice = ("parallelism.stages_per_rank=2",)
    sends = 2 * 256 * 128 * 2 / 1280e9 * 3
    interleaved = bubble("parallelism.pipeline_schedule=interleaved", *twice)
    assert interleaved == pytest.approx(once / 2 + sends / 2)
    zero = bubble("parallelism.pipeline_schedule=zero_bubble", *twice)
    assert zero == pytest.approx(interleaved / 3)


def test_errors_contain_unknown_hardware_constants(config):
    with pytest.raises(
        ConfigError,
        match=r"hardware=cpu has no constants .*; assume one with mfu=0.4, fit constants with hlat "
        "plan calibrate, or set hardware.device",
    ):
        step_time.predict_step_time(config())
    unknown = config("hardware=trn1_32xl", "parallelism.tp=4")  # fp32 has no peak there
    with pytest.raises(
        ConfigError, match=r"hardware\.peak_tflops\.fp32 is unknown, so is the step time"
    ):
        step_time.predict_step_time(unknown)


def test_mfu_of_a_plan_equals_that_of_the_tracker(config):
    from hlat.plan.forecast import forecast_run

    run = config("experiment=hlat_7b")
    throughput = forecast_run(run).throughput
    flops = compute_flops_per_token(run.model, 4096)
    assert throughput.mfu == compute_mfu(
        4_194_304 / throughput.step.total, flops, run.hardware, 2048, run.precision.compute_dtype
    )


MOE = ("model=mixtral_8x7b", "parallelism=single", "parallelism.dp=8", "parallelism.ep=4")


def test_experts_on_four_ranks_need_a_quarter_of_the_memory(config):
    run = config(*MOE, "parallelism.zero=1")
    mesh = compute_parallel_degrees(run.parallelism, 8)
    (stage,) = build_stage_shards(run.model, mesh)
    (full,) = build_stage_shards(run.model, replace(mesh, ep=1))
    assert stage.expert_numel == full.expert_numel / 4
    assert full.numel - stage.numel == full.expert_numel - stage.expert_numel
    # Shards of ZeRO have the same size: 8 ranks share all experts, or 2 ranks a quarter of them
    assert stage.compute_shard_numel(mesh) == full.numel / 8
    updated = dict(stage.iter_updated(run, mesh))
    assert updated == dict(full.iter_updated(run, replace(mesh, ep=1)))
    assert sum(updated.values()) == full.numel / 8


def test_plan_of_five_experts_on_two_ranks_is_that_of_the_larger_part(config):
    run = config("model=mixtral_tiny", "model.mlp.moe.num_experts=5")
    (stage,) = build_stage_shards(run.model, ParallelDegrees(dp=2, ep=2))
    assert stage.expert_numel == run.model.num_layers * 3 * 3 * 128 * 176


def test_text_of_a_plan_contains_experts_and_their_traffic(config):
    run = config(*MOE, "hardware=a100_p4d", "precision=mixed", "parallelism.zero=1")
    text = "\n".join(format_plan(run, forecast_run(run)))
    assert "tp 1, pp 1, dp 8, ep 4, zero 1" in text
    assert "46.7B parameters, 12.88B of them active for a token" in text
    assert re.search(r"^expert-parallel traffic +\d", text, re.MULTILINE)
    dense = config("model=7b", "hardware=a100_p4d", "parallelism=single", "parallelism.dp=8")
    text = "\n".join(format_plan(dense, forecast_run(dense)))
    assert "expert" not in text
    assert "active" not in text
