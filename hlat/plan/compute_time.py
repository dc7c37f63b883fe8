"""Time of computation on one rank for one micro batch: matmuls, attention and other operators.

Other operators, such as norms, activations and the softmax of the loss, are limited by memory
bandwidth. They transfer each activation of a layer several times, fewer if they are compiled.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.model import decoder_spec
from hlat.model.attention_spec import get_attention_spec, get_window
from hlat.plan.achieved_speed import AchievedSpeed
from hlat.plan.framework_traits import FrameworkTraits
from hlat.plan.matmul_time import Matmul, MatmulSpeed, compute_matmul_time
from hlat.plan.pipeline_stage_shards import (
    PipelineStageShard,
    build_execution_settings,
    count_micro_batch_tokens,
)
from hlat.precision.precision_bytes import get_itemsize

_FLOAT8_CONVERSION_BYTES = 4
"""Bytes per element of a bf16 operand of a float8 matmul: two are read, one is written, and one for
the transposed operand of the backward pass (TransformerEngine's fused cast and transpose)."""
_FORWARD_SHARE = 1 / 3
"""Share of the forward pass in the transfers of an activation: the forward pass writes it and the
backward pass reads it and writes its gradient."""


@dataclass(frozen=True)
class ComputeTime:
    """Seconds of the computation of a micro batch, forward and backward."""

    matmuls: float
    attention: float
    elementwise: float

    @property
    def total(self) -> float:
        """Seconds of all operators."""
        return self.matmuls + self.attention + self.elementwise


def compute_stage_time(
    config: Config,
    mesh: ParallelDegrees,
    stage: PipelineStageShard,
    speed: AchievedSpeed,
    traits: FrameworkTraits,
) -> ComputeTime:
    """Return the time of a rank of a pipeline stage."""
    matmuls = _compute_head_time(config, mesh, speed) if stage.is_last else 0.0
    attention = 0.0
    for layer, count in stage.layers:
        matrices = list_layer_matmuls(config, stage, layer)
        matmuls += count * _compute_layer_time(config, matrices, speed, traits)
        attention += count * _compute_attention_time(config, mesh, layer, speed, traits)
    num_bytes = speed.passes * compute_activation_bytes(config, mesh, stage, traits)
    if stage.is_last:
        passes = speed.efficiency.compiled_passes if traits.has_fused_loss else speed.passes
        num_bytes += passes * compute_logit_bytes(config, mesh)
    factor, elementwise = traits.compute_factor, num_bytes / speed.memory
    if speed.operator_s:
        elementwise += speed.operator_s * count_operators(config, mesh, stage)
    return ComputeTime(factor * matmuls, factor * attention, factor * elementwise)


def list_layer_matmuls(config: Config, stage: PipelineStageShard, layer: int) -> list[Matmul]:
    """Return the matmuls of a micro batch in the forward pass of a layer on one rank."""
    matmuls, num_tokens = [], count_micro_batch_tokens(config)
    for matrix, count in stage.matrices[layer].items():
        num_rows = max(1, round(num_tokens * matrix.num_sources * matrix.token_fraction))
        matmuls.append(Matmul(num_rows, matrix.num_inputs, matrix.num_outputs, count))
    return matmuls


def compute_activation_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard, traits: FrameworkTraits
) -> float:
    """Return the bytes of the activations of layers for a micro batch, and of those computed again.

    They are those that a layer saves without checkpointing: each is the output of an operator and
    the input of another one.
    """
    settings = build_execution_settings(config, mesh)
    saves_all = replace(settings, checkpointing=ActivationCheckpointing.none)
    num_bytes = 0.0
    for layer, count in stage.layers:
        activations = decoder_spec.list_layer_activations(config.model, layer, settings)
        written = saves_all.compute_saved_bytes(activations)
        recomputed = written - settings.compute_saved_bytes(activations)
        if traits.recomputed_matmuls is not None:
            recomputed = written
        num_bytes += count * (written + _FORWARD_SHARE * recomputed)
    return count_micro_batch_tokens(config) * num_bytes


def count_operators(config: Config, mesh: ParallelDegrees, stage: PipelineStageShard) -> float:
    """Return the operators of layers for a micro batch, forward, backward and recomputed.

    Each activation that a layer saves without checkpointing is the output of one of the forward
    pass, which has two in the backward pass.
    """
    settings = build_execution_settings(config, mesh)
    saves_all = replace(settings, checkpointing=ActivationCheckpointing.none)
    num_operators = 0
    for layer, count in stage.layers:
        activations = decoder_spec.list_layer_activations(config.model, layer, settings)
        num_recomputed = saves_all.count_saved(activations) - settings.count_saved(activations)
        num_operators += count * (3 * saves_all.count_saved(activations) + num_recomputed)
    return num_operators


def compute_logit_bytes(config: Config, mesh: ParallelDegrees) -> float:
    """Return the bytes of the logits of a micro batch."""
    itemsize = get_itemsize(config.precision.compute_dtype)
    return count_micro_batch_tokens(config) * config.model.vocab_size / mesh.tp * itemsize


def _compute_head_time(config: Config, mesh: ParallelDegrees, speed: AchievedSpeed) -> float:
    """Return the seconds of the matmuls of the output head, forward and backward."""
    model, num_tokens = config.model, count_micro_batch_tokens(config)
    head = Matmul(num_tokens, model.hidden_size, -(-model.vocab_size // mesh.tp))
    matmul_speed = _build_matmul_speed(
        speed, speed.flops, get_itemsize(config.precision.compute_dtype)
    )
    return sum(compute_matmul_time(one, matmul_speed) for one in (head, *head.gradients))


def _compute_layer_time(
    config: Config, matmuls: Iterable[Matmul], speed: AchievedSpeed, traits: FrameworkTraits
) -> float:
    """Return the seconds of the matmuls of a layer, forward, backward and recomputed."""
    repeated = traits.recomputed_matmuls
    if repeated is None:
        mode = config.parallelism.activation_checkpointing
        repeated = float(mode is ActivationCheckpointing.full)
    is_float8 = traits.matmul_dtype is not None
    itemsize = 1 if is_float8 else get_itemsize(config.precision.compute_dtype)
    matmul_speed, seconds = _build_matmul_speed(speed, speed.layer_flops, itemsize), 0.0
    for matmul in matmuls:
        seconds += (1 + repeated) * compute_matmul_time(matmul, matmul_speed)
        seconds += sum(compute_matmul_time(one, matmul_speed) for one in matmul.gradients)
        if is_float8:
            # Converted weights are kept for all micro batches
            num_weights = matmul.num_weights / config.num_micro_batches
            num_elements = matmul.num_elements - matmul.num_weights + num_weights
            seconds += _FLOAT8_CONVERSION_BYTES * num_elements / speed.memory
    return seconds


def _compute_attention_time(
    config: Config,
    mesh: ParallelDegrees,
    layer: int,
    speed: AchievedSpeed,
    traits: FrameworkTraits,
) -> float:
    """Return the seconds of the scores and weighted values of a layer."""
    efficiency, length = speed.efficiency, config.batch.sequence_length * traits.context_parallel
    attention = get_attention_spec(config.model)
    scores = attention.compute_score_flops_per_token(config.model, layer, length) / mesh.tp
    is_recomputed = config.parallelism.activation_checkpointing is not ActivationCheckpointing.none
    flops = scores * (1 + efficiency.attention_backward + is_recomputed)
    num_keys = min(get_window(config.model, layer) or length, length)
    saturation = num_keys / (num_keys + efficiency.attention_half_length)
    seconds = flops / (speed.attention_flops * saturation)
    return traits.attention_factor * count_micro_batch_tokens(config) * seconds


def _build_matmul_speed(speed: AchievedSpeed, flops: float, itemsize: int) -> MatmulSpeed:
    return MatmulSpeed(flops, speed.memory, itemsize, speed.efficiency.num_multiprocessors)
