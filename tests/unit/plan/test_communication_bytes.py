"""Bytes of collectives against manual examples."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from hlat.config.parallelism import ActivationCheckpointing
from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.model.decoder_spec import count_parameters
from hlat.plan import communication_bytes
from hlat.plan.pipeline_stage_shards import PipelineStageShard, build_stage_shards
from tests.support.planned_stages import evaluate_stage

TINY = ("parallelism.dp=1",)
PAPER = ("experiment=hlat_70b",)
MOE = ("model=mixtral_8x7b", "parallelism=single", "parallelism.dp=8", "parallelism.ep=4")


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


def _evaluate(config, name, *stage):
    return evaluate_stage(getattr(communication_bytes, name), config, *stage)


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
    assert communication_bytes.compute_pipeline_bytes(run, mesh) == 2 * 4096 * 8192 * 2 / 32
    assert (
        communication_bytes.compute_pipeline_bytes(
            config(), compute_parallel_degrees(config().parallelism, 1)
        )
        == 0
    )


def test_data_parallel_bytes_of_zero_stages(config):
    stage = PipelineStageShard(((0, 2),), (450, 450), 4, 1.0, 100, (), 200, True, True)

    def build(zero, *overrides):
        run = config(f"parallelism.zero={zero}", "precision=mixed", *overrides)
        run = replace(run, batch=replace(run.batch, micro_batch_size=1))
        return run, compute_parallel_degrees(run.parallelism, run.num_processes), stage

    def count_bytes(zero, **settings):
        run = build(zero, "parallelism.dp=4")
        return communication_bytes.compute_data_parallel_bytes(*run, **settings)

    # 1,000 weights of 2 bytes, 900 of them in layers, sums of 4; 3/4 of each; two micro batches
    assert [count_bytes(zero) for zero in range(4)] == [6000, 4500, 9000, 11700]
    # A framework that reduces gradients after the last micro batch only
    assert count_bytes(3, reduces_once=True) == 11700 - 3000
    # Two replicas of four ranks: two micro batches as before, and the sums of 250 weights
    replicas = build(3, "parallelism.dp=8", "parallelism.dp_replicate=2")
    assert communication_bytes.compute_data_parallel_bytes(*replicas) == 11700 / 2
    assert communication_bytes.compute_replica_bytes(*replicas) == 2 * 250 * 4 / 2
    assert communication_bytes.compute_replica_bytes(*build(3, "parallelism.dp=4")) == 0


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
    assert communication_bytes.count_rings_per_node(run, mesh) == rings


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


def test_expert_parallel_traffic_counts_layers_with_experts_only(config):
    """Layers 1 and 3 of four have experts."""
    mesh, plans = ParallelDegrees(dp=2, ep=2), []
    for every in (1, 2):
        overrides = ["parallelism.dp=2", "parallelism.ep=2", f"model.mlp.moe.every={every}"]
        run = config("model=qwen3_moe_tiny", "parallelism=single", *overrides)
        (stage,) = build_stage_shards(run.model, mesh)
        traffic = communication_bytes.compute_expert_parallel_bytes(run, mesh, stage)
        plans.append((traffic, stage.expert_numel))
    assert plans[0] == (2 * plans[1][0], 2 * plans[1][1])
    assert plans[1][0] > 0


def test_fsdp_copies_gathered_weights_and_gradients(config):
    """Weights are read and written in bf16; gradients are read in bf16 and written in fp32."""
    run = config("parallelism.dp=2", "parallelism.zero=3", "precision=mixed")
    mesh = compute_parallel_degrees(run.parallelism, 2)
    (stage,) = build_stage_shards(run.model, mesh)
    copied = communication_bytes.compute_copied_bytes
    assert copied(run, stage) == run.num_micro_batches * stage.numel * (2 * 4 + 6)
    run.parallelism.zero = 2
    assert copied(run, stage) == run.num_micro_batches * stage.numel * (4 + 6)
    run.parallelism.zero = 1
    assert copied(run, stage) == 0
