"""Terms of the step time against manual examples, and FLOPs against the model."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.config.mfu import compute_mfu
from hlat.distributed.mesh_coordinates import compute_parallel_degrees
from hlat.model.decoder_spec import compute_flops_per_token
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw_spec import AdamWSpec
from hlat.plan import step_time
from hlat.plan.hardware_efficiency import HardwareEfficiency
from hlat.plan.pipeline_stage_shards import PipelineStageShard, build_stage_shards

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
        stage = PipelineStageShard(((0, 2),), 450, 2, 100, (), 200, True, True)
        return _evaluate(run, "compute_data_parallel_bytes", stage)

    # 1,000 weights of 2 bytes, 900 of them in layers, sums of 4; 3/4 of each; two micro batches
    assert [count_bytes(zero) for zero in range(4)] == [6000, 4500, 9000, 11700]


def test_optimizer_bytes_include_every_copy(config):
    def count_optimizer_bytes(*overrides):
        roles = ((ParameterRole.embedding, 400), (ParameterRole.matrix, 600))
        stage = PipelineStageShard(((0, 1),), 600, 1, 400, roles, 600, True, True)
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
