"""Time of computation against manual examples, and FLOPs against the model."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from hlat.config.parallelism import ActivationCheckpointing
from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.model.decoder_spec import compute_flops_per_token
from hlat.plan.compute_time import (
    compute_activation_bytes,
    compute_logit_bytes,
    compute_stage_time,
    list_layer_matmuls,
)
from hlat.plan.framework_traits import HLAT, FrameworkTraits
from hlat.plan.hardware_efficiency import HardwareEfficiency
from hlat.plan.matmul_time import Matmul
from hlat.plan.pipeline_stage_shards import build_stage_shards
from tests.support.planned_stages import UNIT_SPEED, count_flops

PAPER = ("experiment=hlat_70b",)
SINGLE = ("model=7b", "parallelism=single", "batch.micro_batch_size=1")


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


def _build_first(config):
    mesh = compute_parallel_degrees(config.parallelism, config.num_processes)
    return mesh, build_stage_shards(config.model, mesh)[0]


def _list_matmuls(config, mesh):
    return list_layer_matmuls(config, build_stage_shards(config.model, mesh)[0], 0)


def _count_flops(config):
    return count_flops(config, *_build_first(config))


def test_flops_of_one_rank_equal_those_of_mfu(config):
    for model in ("7b", "70b"):
        run = config(f"model={model}", "parallelism=single")
        one = _count_flops(run)
        assert one == 4096 * compute_flops_per_token(run.model, 4096)


def test_recomputed_flops_are_those_of_attention_or_the_layer(config):
    def flops(mode):
        mode = f"parallelism.activation_checkpointing={mode}"
        return _count_flops(config("model=7b", "parallelism=single", mode))

    attention = 4096 * 32 * 2 * 4096 * 4096
    assert flops("selective") - flops("none") == attention
    matrices = 4096 * 32 * 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    assert flops("full") - flops("none") == attention + matrices


def test_replicated_heads_are_computed_on_each_rank(config):
    # 70b, tp 32: q and o 2 x 8192 x 256, one kv head 2 x 8192 x 128, the MLP 3 x 8192 x 896
    matrices = 8192 * (2 * 256 + 2 * 128 + 3 * 896)
    attention = 2 * 4096 * 8192 / 32
    assert _count_flops(config(*PAPER)) == 4096 * 10 * (3 * (2 * matrices + attention) + attention)


def test_matmuls_of_a_layer_join_weights_with_the_same_input(config):
    run = config("model=llama3_8b", "parallelism.tp=2", "batch.micro_batch_size=1")
    rows = run.batch.sequence_length
    assert _list_matmuls(run, ParallelDegrees(tp=2)) == [
        Matmul(rows, 4096, 16 * 128 + 2 * 4 * 128),
        Matmul(rows, 2048, 4096),
        Matmul(rows, 4096, 14336),
        Matmul(rows, 7168, 4096),
    ]


def test_matmuls_of_experts_have_the_tokens_of_all_ranks(config):
    """Two of eight experts are local; each has a quarter of the tokens of four ranks."""
    run = config("model=mixtral_8x7b", "batch.micro_batch_size=1")
    rows = run.batch.sequence_length
    found = _list_matmuls(run, ParallelDegrees(dp=4, ep=4))
    assert found[2:] == [
        Matmul(rows, 4096, 8),
        Matmul(rows, 4096, 2 * 14336, 2),
        Matmul(rows, 14336, 4096, 2),
    ]


def _evaluate(config, traits=HLAT, speed=UNIT_SPEED):
    return compute_stage_time(config, *_build_first(config), speed, traits)


def test_attention_is_slower_in_short_sequences_and_in_the_backward_pass(config):
    run = config(*SINGLE)
    forward = 4096 * 32 * 2 * 4096 * 4096
    constants = HardwareEfficiency(
        1, 1, 1, "a test", attention_half_length=1024, attention_backward=2.5
    )
    speed = replace(UNIT_SPEED, attention_flops=2.0, efficiency=constants)
    found = _evaluate(run, speed=speed)
    assert found.attention == pytest.approx(3.5 * forward / 2 * (1 + 1024 / 4096))
    assert found.matmuls == _evaluate(run).matmuls
    window = ("model.attention.sliding_window=1024", "model.attention.layer_pattern=[sliding]")
    local = 4 * (1024 - 1024**2 / 8192) * 4096 * 32 * 4096
    found = _evaluate(config(*SINGLE, *window), speed=speed)
    assert found.attention == pytest.approx(3.5 * local / 2 * 2)


def test_context_parallel_ranks_attend_to_the_whole_sequence(config):
    whole = _evaluate(config(*SINGLE))
    half = config(*SINGLE, "batch.sequence_length=2048")
    found = _evaluate(half, FrameworkTraits(context_parallel=2))
    assert found.attention == whole.attention / 2
    assert found.matmuls == whole.matmuls / 2


def test_bytes_of_other_operators_are_those_of_saved_activations(config):
    run = config(*SINGLE, "precision=bf16", "parallelism.activation_checkpointing=none")
    # docs/planning.md: 7 h + 3 I + 3 h_kv elements of a layer
    per_layer = 7 * 4096 + 3 * 11008 + 3 * 4096
    found = compute_activation_bytes(run, *_build_first(run), HLAT) / 4096 / 2
    assert found == pytest.approx(32 * per_layer, rel=0.02)
    full = ActivationCheckpointing.full
    run.parallelism.activation_checkpointing = full
    again = compute_activation_bytes(run, *_build_first(run), HLAT) / 4096 / 2 - found
    assert again == pytest.approx((found - 32 * 4096) / 3)  # all but the inputs of layers
    assert compute_logit_bytes(run, ParallelDegrees(tp=4)) == 4096 * 8000 * 2


def test_traits_of_frameworks_change_the_time(config):
    run = config(*SINGLE)
    speed = replace(UNIT_SPEED, passes=2.0, layer_flops=2.0)
    one = _evaluate(run, speed=speed)
    layers = compute_activation_bytes(run, *_build_first(run), HLAT)
    logits = compute_logit_bytes(run, ParallelDegrees())
    assert one.elementwise == 2 * (layers + logits)
    constants = HardwareEfficiency(1, 1, 1, "a test", compiled_passes=0.5)
    fused = _evaluate(
        run, FrameworkTraits(has_fused_loss=True), replace(speed, efficiency=constants)
    )
    assert fused.elementwise == 2 * layers + 0.5 * logits
    slower = _evaluate(run, FrameworkTraits(compute_factor=1.5), speed)
    assert slower.total == pytest.approx(1.5 * one.total)
    repeated = _evaluate(run, FrameworkTraits(recomputed_matmuls=0.5), speed)
    matmuls = _list_matmuls(run, ParallelDegrees())
    layers = sum(one.flops for one in matmuls) * 32
    assert repeated.matmuls - one.matmuls == pytest.approx(layers / 2 / 2)
    converted = _evaluate(run, FrameworkTraits(matmul_dtype="fp8"), speed)
    rows = sum(one.num_elements - one.num_weights for one in matmuls) * 32
    weights = sum(one.num_weights for one in matmuls) * 32
    expected = 4 * (rows + weights / run.num_micro_batches)
    assert converted.matmuls - one.matmuls == pytest.approx(expected)
