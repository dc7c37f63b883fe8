"""Reduction of a configuration to a model that is checked in minutes with the same code paths.

Layout, precision recipe, engine, optimizer and schedule do not change, and the stages of a phase
have about as many steps. Layers, heads, vocabulary
and batch are reduced, with their relations to one another and to the layout: replicas of key/value
heads, a smaller vocabulary shard on the last rank, unequal pipeline stages. The components of the
model do not change. Lengths and limits, such as the sliding window, are reduced so that each still
affects the loss.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hlat.config.batch import BatchConfig, BatchRampConfig, LengthWarmupConfig
from hlat.config.components import list_base_kinds
from hlat.config.config_errors import ConfigError
from hlat.config.engine import EngineBackend
from hlat.config.model import ModelConfig
from hlat.config.parallelism import ParallelismConfig, PipelineSchedule
from hlat.config.phase import PhaseConfig
from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.model.attention_spec import AttentionConfig, LayerType
from hlat.model.mlp_spec import BalanceScope, MoEConfig
from hlat.model.parametrization_spec import ParametrizationConfig
from hlat.model.rope_spec import RopeScaling

_MAX_LOCAL_PROCESSES = 16
"""Processes that the doctor starts itself; each imports torch and needs about 0.3 GiB."""
_HEAD_DIM, _NARROW_HEAD_DIM, _MANY_HEADS = 16, 4, 16
_MIN_HIDDEN_SIZE = 64
_VOCAB_SIZE, _SEQUENCE_LENGTH = 128, 32
_MAX_WINDOW, _MAX_LOGIT_SOFTCAP, _MAX_PATTERN_LENGTH = 5, 2.0, 8
_MIN_ROTARY_DIM, _MAX_EXPERTS = 4, 8
"""Dynamic scaling has no definition for two elements."""
_MAX_CAPACITY_FACTOR = 0.75
"""Limit of tokens of an expert that balanced experts exceed."""
_MAX_THETA_PER_POSITION = 64.0
"""With scaling by wavelength: maximum rope_theta over original_max_positions, so that some
frequencies of a small head are scaled, and others are not."""
_CHECK_TIMEOUT_S = 900.0
"""Timeout of the supervisor for one check."""
_WITHOUT_AXIS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 1, "sequence_parallel": False},
    "pp": {"pp": 1, "pipeline_schedule": PipelineSchedule.one_f_one_b, "stages_per_rank": 1},
}
"""Settings of a layout without an axis."""


def reduce_config(config: Config, num_started_processes: int = 1) -> Config:
    """Return a small configuration with the same code paths.

    Unless torchrun or Slurm has started several processes, the doctor starts its own with at most
    two data-parallel ranks, or four if two of them divide experts that others replicate, and with
    at most two replicas. More show the same faults. Raise ConfigError if there are too many.
    """
    layout = config.parallelism
    replica_size = layout.tp * layout.pp
    num_replicas = min(2, layout.dp_replicate)
    if num_started_processes == 1:
        dp_shard = config.num_processes // (replica_size * layout.dp_replicate)
        dp = num_replicas * _reduce_dp(dp_shard, layout.ep)
    else:
        dp = max(1, num_started_processes // replica_size)
        num_replicas = num_replicas if dp % 2 == 0 and dp > 2 else 1
    if num_started_processes == 1 and replica_size * dp > _MAX_LOCAL_PROCESSES:
        raise ConfigError(
            f"parallelism.tp={layout.tp} x pp={layout.pp} x dp={dp} needs {replica_size * dp} "
            f"processes, and the doctor starts at most {_MAX_LOCAL_PROCESSES} on one machine; run "
            "it on the machines of the run, once per process, with srun or torchrun, or choose a "
            "smaller layout with the same axes"
        )
    is_nxd = config.engine.name is EngineBackend.nxd
    batch = _reduce_batch(config, dp)
    return replace(
        config,
        run=replace(config.run, root=f"{config.run.root}/doctor"),
        model=_reduce_model(config, batch.sequence_length),
        batch=batch,
        phase=_reduce_phase(config, batch),
        parallelism=replace(
            layout,
            dp=dp,
            ep=math.gcd(dp // num_replicas, 2) if layout.ep > 1 else 1,
            dp_replicate=num_replicas,
        ),
        # NxD builds one model per process, and the causality check needs a loss mask
        data=replace(config.data, loss_mask=config.data.loss_mask or is_nxd),
        hardware=replace(config.hardware, nodes=1, processes_per_node=None),
        checkpoint=replace(config.checkpoint, destination=None, start_from=None),
        recovery=replace(
            config.recovery,
            max_restarts=0,
            step_timeout_s=_CHECK_TIMEOUT_S,
            start_timeout_s=_CHECK_TIMEOUT_S,
        ),
    )


def to_single_process(config: Config) -> Config:
    """Return the same run on one process, with the micro batches of all ranks in turn."""
    without_axes = _WITHOUT_AXIS["tp"] | _WITHOUT_AXIS["pp"]
    without_axes |= {"dp": 1, "ep": 1, "zero": 0, "dp_replicate": 1}
    return replace(config, parallelism=replace(config.parallelism, **without_axes))


def move_axis_to_dp(config: Config, axis: str) -> Config:
    """Return the same run and number of processes with an axis replaced by data parallelism."""
    layout, size = config.parallelism, getattr(config.parallelism, axis)
    layout = replace(layout, dp=(layout.dp or 1) * size, **_WITHOUT_AXIS[axis])
    batch = replace(config.batch, global_batch_size=config.batch.global_batch_size * size)
    return replace(config, parallelism=layout, batch=batch)


def _reduce_dp(dp: int, ep: int) -> int:
    """Return at most two data-parallel ranks; with experts on two ranks each and replicas, four."""
    return min(dp, 4 if dp > ep > 1 else 2)


def _reduce_model(config: Config, length: int) -> ModelConfig:
    model, layout = config.model, config.parallelism
    num_kv_heads, queries_per_group = _reduce_heads(model, layout.tp)
    heads = num_kv_heads * queries_per_group
    intermediate_size = max(96, 24 * heads)
    if model.intermediate_size % model.num_attention_heads:
        intermediate_size = 25 * layout.tp * (heads // layout.tp + 1)
    hidden_size, head_dim = _reduce_sizes(model, heads)
    rotary_dim = 2 * round(head_dim * model.rope.partial_rotary_factor / 2)
    model = _shorten_patterns(model)
    num_layers = _reduce_layers(model, layout)
    return replace(
        model,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=num_kv_heads,
        vocab_size=-(-_VOCAB_SIZE // layout.tp) * layout.tp + model.vocab_size % layout.tp,
        attention=_reduce_attention(model, head_dim, num_layers, length),
        mlp=replace(model.mlp, moe=_reduce_moe(config, intermediate_size)),
        head=replace(model.head, logit_softcap=_reduce_limit(model.head.logit_softcap)),
        init_from=None,
        parametrization=_reduce_base(model, hidden_size, num_layers, head_dim),
        **_reduce_rope(model, max(_MIN_ROTARY_DIM, rotary_dim) / head_dim, length),
    )


def _reduce_sizes(model: ModelConfig, heads: int) -> tuple[int, int]:
    """Return a hidden size and head size of which the heads are as wide, wider or narrower.

    With few heads they are larger, since norms of few elements amplify rounding errors.
    """
    head_dim = max(_HEAD_DIM, _MIN_HIDDEN_SIZE // heads)
    if heads >= _MANY_HEADS:
        head_dim = _NARROW_HEAD_DIM * (1 + (model.rope.partial_rotary_factor < 1))
    projected_size = model.num_attention_heads * model.head_dim
    if model.hidden_size > projected_size:
        return 2 * heads * head_dim, head_dim
    return heads * head_dim, head_dim * (1 + (model.hidden_size < projected_size))


def _reduce_base(
    model: ModelConfig, hidden_size: int, num_layers: int, head_dim: int
) -> ParametrizationConfig:
    """Return a base whose size relative to the reduced model is as near as possible to the ratio.

    A model that is not its base remains another one.
    """

    def reduce(base: int | None, size: int, reduced: int) -> int | None:
        if base is None or base == size:
            return None if base is None else reduced
        nearest = max(1, round(base * reduced / size))
        return nearest + (nearest == reduced)

    base = model.parametrization
    return replace(
        base,
        base_width=reduce(base.base_width, model.hidden_size, hidden_size),
        base_depth=reduce(base.base_depth, model.num_layers, num_layers),
        base_head_dim=reduce(base.base_head_dim, model.head_dim, head_dim),
    )


def _shorten_patterns(model: ModelConfig) -> ModelConfig:
    """Return a model of which a long pattern of layers has each kind of layer once."""
    types: Sequence[LayerType | None] = model.attention.layer_pattern or [None]
    rotated = model.rope.layer_pattern or [True]
    if math.lcm(len(types), len(rotated)) <= _MAX_PATTERN_LENGTH:
        return model
    layers = range(model.num_layers)
    kinds = dict.fromkeys((types[n % len(types)], rotated[n % len(rotated)]) for n in layers)
    attention_pattern = [layer_type for layer_type, _ in kinds if layer_type is not None]
    return replace(
        model,
        attention=replace(model.attention, layer_pattern=attention_pattern),
        rope=replace(model.rope, layer_pattern=[is_rotated for _, is_rotated in kinds]),
    )


def _reduce_layers(model: ModelConfig, layout: ParallelismConfig) -> int:
    """Return a number of layers with a full period of the patterns and as unequal stages."""
    stages = layout.pp * layout.stages_per_rank
    is_unequal = model.num_layers % stages > 0
    patterns = (model.attention.layer_pattern, model.rope.layer_pattern)
    period = math.lcm(*(len(pattern) or 1 for pattern in patterns))
    minimum = max(2, period, 1 + _find_sparse_layer(model))
    layers_per_stage = max(1, -(-(minimum - is_unequal) // stages))
    return min(model.num_layers, layers_per_stage * stages + is_unequal)


def _find_sparse_layer(model: ModelConfig) -> int:
    """Return the first layer with experts of the reduced model; 0 without dense layers."""
    moe = _reduce_sparse_layers(model.mlp.moe)
    return (moe.num_dense_layers // moe.every + 1) * moe.every - 1 if _has_experts(model) else 0


def _has_experts(model: ModelConfig) -> bool:
    """Return True if the kind of network uses the settings of a mixture of experts."""
    return "moe" in list_base_kinds("model.mlp", model.mlp.kind)


def _reduce_sparse_layers(moe: MoEConfig) -> MoEConfig:
    """Return the fewest dense layers with the same settings in effect."""
    every = min(moe.every, 2)
    num_dense_layers = every if moe.num_dense_layers >= moe.every else 0
    return replace(moe, every=every, num_dense_layers=num_dense_layers)


def _reduce_attention(
    model: ModelConfig, head_dim: int, num_layers: int, length: int
) -> AttentionConfig:
    """Return attention with a window that all layers together do not extend to the sequence."""
    settings = model.attention
    max_window = max(2, min(_MAX_WINDOW, 1 + length // (2 * num_layers)))
    scale, window = settings.scale, settings.sliding_window
    return replace(
        settings,
        head_dim=head_dim if settings.head_dim is not None else None,
        scale=None if scale is None else scale * math.sqrt(model.head_dim / head_dim),
        sliding_window=None if window is None else min(window, max_window),
        logit_softcap=_reduce_limit(settings.logit_softcap),
    )


def _reduce_moe(config: Config, intermediate_size: int) -> MoEConfig:
    """Return few experts in two groups or one, all or some of which the router selects.

    It selects all unless matmuls are in fp32, as rounding of its input changes the selection.
    """
    moe, is_fp32 = config.model.mlp.moe, config.precision.compute_dtype is Dtype.fp32
    if not _has_experts(config.model):
        return moe
    num_experts = min(moe.num_experts, _MAX_EXPERTS)
    selects_all = moe.experts_per_token >= moe.num_experts or not is_fp32
    num_groups = 2 if moe.num_groups > 1 and num_experts >= 4 and num_experts % 2 == 0 else 1
    return replace(
        _reduce_sparse_layers(moe),
        num_experts=num_experts,
        experts_per_token=num_experts if selects_all else min(moe.experts_per_token, 2),
        num_groups=num_groups,
        groups_per_token=1 if is_fp32 and moe.groups_per_token < moe.num_groups else num_groups,
        capacity_factor=moe.capacity_factor and min(moe.capacity_factor, _MAX_CAPACITY_FACTOR),
        intermediate_size=None if moe.intermediate_size is None else intermediate_size,
        shared_size=None if moe.shared_size is None else intermediate_size,
        upcycling_noise=None,
    )


def _reduce_limit(limit: float | None) -> float | None:
    """Return a limit of values of about 1 that affects them."""
    return None if limit is None else min(limit, _MAX_LOGIT_SOFTCAP)


def _reduce_rope(model: ModelConfig, partial_rotary_factor: float, length: int) -> dict[str, Any]:
    """Return a rotary embedding of which the scaling affects a short sequence."""
    rope, theta = replace(model.rope, partial_rotary_factor=partial_rotary_factor), model.rope_theta
    if rope.original_max_positions is not None:
        is_dynamic = rope.scaling is RopeScaling.dynamic
        positions = min(rope.original_max_positions, length // 2 if is_dynamic else length)
        rope = replace(rope, original_max_positions=positions)
        theta = theta if is_dynamic else min(theta, _MAX_THETA_PER_POSITION * positions)
    return {"rope": rope, "rope_theta": theta}


def _reduce_heads(model: ModelConfig, tp: int) -> tuple[int, int]:
    """Return the key/value heads and the query heads of each; at most two of either per rank."""
    num_kv_heads, queries_per_group = model.num_key_value_heads, model.num_key_value_groups
    if tp <= num_kv_heads:
        return tp * min(2, num_kv_heads // tp), min(2, queries_per_group)
    num_replicas = tp // num_kv_heads
    return num_kv_heads, num_replicas * min(2, queries_per_group // num_replicas)


def _reduce_phase(config: Config, batch: BatchConfig) -> PhaseConfig:
    """Return a timeline of which each stage has about as many steps of fewer tokens."""
    timeline = [
        replace(
            stage,
            tokens=None if stage.tokens is None else _reduce_tokens(stage.tokens, config, batch),
        )
        for stage in config.phase.timeline
    ]
    return replace(config.phase, timeline=timeline)


def _reduce_batch(config: Config, dp: int) -> BatchConfig:
    """Return at most two sequences per micro batch, and micro batches for the schedule."""
    tp, pp = config.parallelism.tp, config.parallelism.pp
    num_micro_batches = min(config.num_micro_batches, 2 * pp)
    micro_batch_size = min(2, config.micro_batch_size)
    if config.model.mlp.moe.balance_scope is BalanceScope.micro_batch:
        micro_batch_size = 1  # the reference has the loss of a sequence
    length = math.lcm(2 * tp, _SEQUENCE_LENGTH) if tp > 1 else _SEQUENCE_LENGTH
    batch = BatchConfig(num_micro_batches * micro_batch_size * dp, micro_batch_size, length)
    is_interleaved = config.parallelism.pipeline_schedule is not PipelineSchedule.one_f_one_b
    smallest = micro_batch_size * dp * (pp if is_interleaved else 1)
    ramp, warmup = config.batch.ramp, config.batch.length_warmup
    if ramp.tokens is not None and smallest < batch.global_batch_size:
        tokens = _reduce_tokens(ramp.tokens, config, batch)
        batch = replace(batch, ramp=BatchRampConfig(smallest, None, tokens))
    if warmup.tokens is not None:
        tokens = _reduce_tokens(warmup.tokens, config, batch)
        batch = replace(batch, length_warmup=LengthWarmupConfig(length // 2, tokens))
    return batch


def _reduce_tokens(tokens: int, config: Config, batch: BatchConfig) -> int:
    """Return the tokens of about as many steps of a smaller batch, at least those of one."""
    new, old = batch.tokens_per_step, config.batch.tokens_per_step
    return max(new, tokens * new // old)
