"""Terms of the step time against manual examples, and FLOPs against the model."""

import re
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.config.mfu import compute_mfu
from hlat.config.parallelism import ActivationCheckpointing
from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.model.decoder_spec import compute_flops_per_token, count_parameters
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw_spec import AdamWSpec
from hlat.plan import step_time
from hlat.plan.forecast import forecast_run
from hlat.plan.hardware_efficiency import HardwareEfficiency
from hlat.plan.pipeline_stage_shards import PipelineStageShard, build_stage_shards
from hlat.plan.plan_text import format_plan

TINY = ("parallelism.dp=1",)
PAPER = ("experiment=hlat_70b",)
ALL = HardwareEfficiency(1, 1, 1, "the data sheet")


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


def _evaluate(config, name, *rest):
    """Evaluate a formula for the first stage."""
    mesh = compute_parallel_degrees(config.parallelism, config.num_processes)
    first = build_stage_shards(config.model, mesh)[0]
    return getattr(step_time, name)(config, mesh, *(rest or (first,)))


def test_flops_of_one_rank_equal_those_of_mfu(config):
    for model in ("7b", "70b"):
        run = config(f"model={model}", "parallelism=single")
        one = _evaluate(run, "compute_forward_backward_flops")
        assert one == 4096 * compute_flops_per_token(run.model, 4096)


def test_recomputed_flops_are_those_of_attention_or_the_layer(config):
    def flops(mode):
        return _evaluate(
            config(
                "model=7b", "parallelism=single", f"parallelism.activation_checkpointing={mode}"
            ),
            "compute_forward_backward_flops",
        )

    attention = 4096 * 32 * 2 * 4096 * 4096
    assert flops("selective") - flops("none") == attention
    matrices = 4096 * 32 * 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    assert flops("full") - flops("none") == attention + matrices


def test_replicated_heads_are_computed_on_each_rank(config):
    # 70b, tp 32: q and o 2 x 8192 x 256, one kv head 2 x 8192 x 128, the MLP 3 x 8192 x 896
    matrices = 8192 * (2 * 256 + 2 * 128 + 3 * 896)
    attention = 2 * 4096 * 8192 / 32
    assert _evaluate(config(*PAPER), "compute_forward_backward_flops") == 4096 * 10 * (
        3 * (2 * matrices + attention) + attention
    )


def test_tensor_parallel_bytes_of_four_collectives_per_layer(config):
    activations = 8 * 256 * 128 * 4
    plain = config("parallelism.tp=2", *TINY)
    assert _evaluate(plain, "compute_tensor_parallel_bytes") == activations / 2 * (4 * 8 + 2 * 2)
    full = config("parallelism.tp=2", "parallelism.activation_checkpointing=full", *TINY)
    assert _evaluate(full, "compute_tensor_parallel_bytes") == activations / 2 * (4 * 12 + 2 * 2)
    # NxD gathers twice more; the first of eight stages has no head
    assert _evaluate(
        config(*PAPER), "compute_tensor_parallel_bytes"
    ) == 4096 * 8192 * 2 * 31 / 32 * (10 * 10 + 2)


def test_pipeline_bytes_are_those_of_the_sequence_shard(config):
    run = config(*PAPER)
    mesh = compute_parallel_degrees(run.parallelism, run.num_processes)
    assert step_time.compute_pipeline_bytes(run, mesh) == 2 * 4096 * 8192 * 2 / 32
    assert (
        step_time.compute_pipeline_bytes(
            config(), compute_parallel_degrees(config().parallelism, 1)
        )
        == 0
    )


def test_data_parallel_bytes_of_zero_stages(config):
    def count_bytes(zero):
        run = config("parallelism.dp=4", f"parallelism.zero={zero}", "precision=mixed")
        run = replace(run, batch=replace(run.batch, micro_batch_size=1))
        stage = PipelineStageShard(((0, 2),), (450, 450), 4, 1.0, 100, (), 200, True, True)
        return _evaluate(run, "compute_data_parallel_bytes", stage)

    # 1,000 weights of 2 bytes, 900 of them in layers, sums of 4; 3/4 of each; two micro batches
    assert [count_bytes(zero) for zero in range(4)] == [6000, 4500, 9000, 11700]


def test_optimizer_bytes_include_every_copy(config):
    def count_optimizer_bytes(*overrides):
        roles = ((ParameterRole.embedding, 400), (ParameterRole.matrix, 600))
        stage = PipelineStageShard(((0, 1),), (600,), 1, 1.0, 400, roles, 600, True, True)
        return _evaluate(config(*overrides), "compute_optimizer_bytes", stage)

    assert count_optimizer_bytes("precision=bf16_sr") == 1000 * (2 + 2 * 2 + 2 * 4)
    assert count_optimizer_bytes("precision=mixed") == 1000 * (4 + 2 * 4 + 2 * 8 + 2)
    assert (
        count_optimizer_bytes("precision=mixed", "parallelism.dp=4", "parallelism.zero=1")
        == 250 * 30
    )


def test_update_takes_the_longer_of_flops_and_memory_traffic(config, monkeypatch):
    args = ("model=7b", "hardware=a100_p4d", "precision=mixed", "parallelism.zero=1")
    run = config(*args, "hardware.nodes=4", "parallelism.tp=4")
    numel = _evaluate(run, "compute_optimizer_bytes") / 30  # of a data-parallel rank
    assert step_time.predict_step_time(run).optimizer == pytest.approx(30 * numel / 1555e9)
    monkeypatch.setattr(AdamWSpec, "get_update_flops", lambda self, role: 10_000)
    assert step_time.predict_step_time(run).optimizer == pytest.approx(10_000 * numel / 19.5e12)
    trn1 = config("experiment=hlat_7b")  # the peak of element-wise operations is unknown
    num_bytes = _evaluate(trn1, "compute_optimizer_bytes")
    assert step_time.predict_step_time(trn1).optimizer == pytest.approx(num_bytes / 440e9)


@pytest.mark.parametrize(
    ("overrides", "rings"),
    [
        (("experiment=hlat_7b",), 8),  # four ranks of a node in each
        (PAPER, 32),
        (("experiment=hlat_7b", "hardware.nodes=8", "parallelism.pp=16"), 16),
    ],
)
def test_number_of_rings_per_node(config, overrides, rings):
    run = config(*overrides)
    mesh = compute_parallel_degrees(run.parallelism, run.num_processes)
    assert step_time.count_rings_per_node(run, mesh) == rings


def test_step_time_of_hlat_70b_at_data_sheet_speeds(config):
    run = config(*PAPER)
    step = step_time.compute_step_time(run, step_time.compute_achieved_speed(run, ALL))
    mesh = compute_parallel_degrees(run.parallelism, run.num_processes)
    first, *_, last = build_stage_shards(run.model, mesh)
    flops = step_time.compute_forward_backward_flops(run, mesh, last)
    assert step.compute == pytest.approx(32 * flops / 95e12)
    num_bytes = step_time.compute_tensor_parallel_bytes(run, mesh, last)
    assert step.tensor_parallel == pytest.approx(32 * num_bytes / 384e9)
    # Stages are on different nodes: 100 GB/s per node over 32 ranks
    send_s = 2 * 4096 * 8192 * 2 / 32 / (100e9 / 32)
    assert step.sends == pytest.approx(32 * send_s)
    middle = step_time.compute_forward_backward_flops(run, mesh, first) / 95e12 + send_s
    inner = 100 * 4096 * 8192 * 2 * 31 / 32 / 384e9
    ends = 2 * 4096 * 8192 * 2 * 31 / 32 / 384e9
    assert step.bubble == pytest.approx(7 * (middle + inner) + ends)
    assert step.reduction == pytest.approx(
        max(first.numel, last.numel) * 6 * 31 / 32 / (100e9 / 32)
    )
    assert step.hidden == 0  # NxD reduces after the backward pass
    assert step.total == pytest.approx(
        step.compute
        + step.tensor_parallel
        + step.sends
        + step.bubble
        + step.reduction
        + step.optimizer
    )


def test_native_engine_overlaps_the_reduction_with_the_backward_pass(config):
    def step(nodes):
        args = ("model=7b", "hardware=a100_p4d", f"hardware.nodes={nodes}", "parallelism.tp=4")
        return step_time.predict_step_time(config(*args, "precision=mixed", "parallelism.zero=1"))

    few = step(4)
    backward = (few.compute + few.tensor_parallel) / 128 * 2 / 3
    assert few.hidden == pytest.approx(backward)
    assert few.reduction > 0
    assert step(1).reduction == pytest.approx(0, abs=0.1)


def test_schedules_reduce_the_bubble(config):
    def bubble(*overrides):
        args = ("hardware=trn2_48xl", "hardware.processes_per_node=4", "precision=bf16")
        layout = ("parallelism.pp=4", "model.num_layers=8", "batch.micro_batch_size=1")
        run = config(*args, *layout, *overrides)
        return step_time.compute_step_time(run, step_time.compute_achieved_speed(run, ALL)).bubble

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
        match=r"hardware=cpu has no constants in .*; assume one with mfu=0.4, or use trn1",
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


def test_expert_parallel_bytes_of_two_all_to_alls_in_each_direction(config):
    sizes = ("precision=mixed", "batch.micro_batch_size=2", "batch.global_batch_size=16")
    run = config(*MOE, *sizes)
    rows = 2 * 4096 * 2 * 4096 * 2  # two experts of each of 2 x 4096 tokens, 4096 elements of bf16
    assert _evaluate(run, "compute_expert_parallel_bytes") == 32 * 4 * rows * 3 / 4
    run.parallelism.activation_checkpointing = ActivationCheckpointing.full
    assert _evaluate(run, "compute_expert_parallel_bytes") == 32 * 6 * rows * 3 / 4
    assert _evaluate(config("parallelism.dp=2"), "compute_expert_parallel_bytes") == 0


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_of_experts_are_reduced_over_their_replicas(config, zero):
    run = config(*MOE, f"parallelism.zero={zero}", "precision=fp32")
    experts = 32 * 2 * 3 * 4096 * 14336  # two of eight experts of each layer
    others = count_parameters(run.model) - 4 * experts
    in_layers = others - 2 * 32000 * 4096 - 4096
    num_all = {
        0: (2 * experts, 2 * others),
        1: (2 * experts, 2 * others),
        3: (3 * experts, 2 * others + in_layers),
    }[zero]
    num_micro_batches = run.num_micro_batches if zero > 1 else 1
    sent = 4 * num_micro_batches * (num_all[0] / 2 + num_all[1] * 7 / 8)
    assert _evaluate(run, "compute_data_parallel_bytes") == pytest.approx(sent, rel=1e-12)


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


def test_expert_parallel_traffic_counts_layers_with_experts_only(config):
    """Layers 1 and 3 of four have experts."""
    mesh, plans = ParallelDegrees(dp=2, ep=2), []
    for every in (1, 2):
        overrides = ["parallelism.dp=2", "parallelism.ep=2", f"model.mlp.moe.every={every}"]
        run = config("model=qwen3_moe_tiny", "parallelism=single", *overrides)
        (stage,) = build_stage_shards(run.model, mesh)
        traffic = step_time.compute_expert_parallel_bytes(run, mesh, stage)
        plans.append((traffic, stage.expert_numel))
    assert plans[0] == (2 * plans[1][0], 2 * plans[1][1])
    assert plans[1][0] > 0
