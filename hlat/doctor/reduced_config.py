"""Reduction of a configuration to a model that is checked in minutes with the same code paths.

Layout, precision recipe, engine, optimizer and schedule do not change. Layers, heads, vocabulary
and batch are reduced, with their relations to one another and to the layout: replicas of key/value
heads, a smaller vocabulary shard on the last rank, unequal pipeline stages.
"""

import math
from dataclasses import replace
from typing import Any

from hlat.config.batch import BatchConfig
from hlat.config.config_errors import ConfigError
from hlat.config.engine import EngineBackend
from hlat.config.model import ModelConfig
from hlat.config.parallelism import ParallelismConfig, PipelineSchedule
from hlat.config.run import Config

_MAX_LOCAL_PROCESSES = 16
"""Processes that the doctor starts itself; each imports torch and needs about 0.3 GiB."""
_HEAD_DIM, _NARROW_HEAD_DIM, _MANY_HEADS = 16, 4, 16
_VOCAB_SIZE, _SEQUENCE_LENGTH = 128, 32
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
    two data-parallel ranks, which show the same faults as more. Raise ConfigError if there are too
    many.
    """
    layout = config.parallelism
    replica_size = layout.tp * layout.pp
    if num_started_processes == 1:
        dp = min(config.num_processes // replica_size, 2)
    else:
        dp = max(1, num_started_processes // replica_size)
    if num_started_processes == 1 and replica_size * dp > _MAX_LOCAL_PROCESSES:
        raise ConfigError(
            f"parallelism.tp={layout.tp} x pp={layout.pp} x dp={dp} needs {replica_size * dp} "
            f"processes, and the doctor starts at most {_MAX_LOCAL_PROCESSES} on one machine; run "
            "it on the machines of the run, once per process, with srun or torchrun, or choose a "
            "smaller layout with the same axes"
        )
    is_nxd = config.engine.name is EngineBackend.nxd
    return replace(
        config,
        run=replace(config.run, root=f"{config.run.root}/doctor"),
        model=_reduce_model(config.model, layout),
        batch=_reduce_batch(config, dp),
        parallelism=replace(layout, dp=dp),
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
    without_axes = _WITHOUT_AXIS["tp"] | _WITHOUT_AXIS["pp"] | {"dp": 1, "zero": 0}
    return replace(config, parallelism=replace(config.parallelism, **without_axes))


def move_axis_to_dp(config: Config, axis: str) -> Config:
    """Return the same run and number of processes with an axis replaced by data parallelism."""
    layout, size = config.parallelism, getattr(config.parallelism, axis)
    layout = replace(layout, dp=(layout.dp or 1) * size, **_WITHOUT_AXIS[axis])
    batch = replace(config.batch, global_batch_size=config.batch.global_batch_size * size)
    return replace(config, parallelism=layout, batch=batch)


def _reduce_model(model: ModelConfig, layout: ParallelismConfig) -> ModelConfig:
    num_kv_heads, queries_per_group = _reduce_heads(model, layout.tp)
    heads = num_kv_heads * queries_per_group
    head_dim = _HEAD_DIM if heads < _MANY_HEADS else _NARROW_HEAD_DIM
    is_divisible = model.intermediate_size % model.num_attention_heads == 0
    stages = layout.pp * layout.stages_per_rank
    is_unequal = model.num_layers % stages > 0
    return replace(
        model,
        num_layers=min(model.num_layers, max(2, stages + is_unequal)),
        hidden_size=heads * head_dim,
        intermediate_size=24 * heads if is_divisible else 25 * layout.tp * (heads // layout.tp + 1),
        num_attention_heads=heads,
        num_key_value_heads=num_kv_heads,
        vocab_size=-(-_VOCAB_SIZE // layout.tp) * layout.tp + model.vocab_size % layout.tp,
        init_from=None,
    )


def _reduce_heads(model: ModelConfig, tp: int) -> tuple[int, int]:
    """Return the key/value heads and the query heads of each; at most two of either per rank."""
    num_kv_heads, queries_per_group = model.num_key_value_heads, model.num_key_value_groups
    if tp <= num_kv_heads:
        return tp * min(2, num_kv_heads // tp), min(2, queries_per_group)
    num_replicas = tp // num_kv_heads
    return num_kv_heads, num_replicas * min(2, queries_per_group // num_replicas)


def _reduce_batch(config: Config, dp: int) -> BatchConfig:
    """Return two sequences per micro batch, and enough micro batches for the pipeline schedule."""
    tp, pp = config.parallelism.tp, config.parallelism.pp
    num_micro_batches = min(config.num_micro_batches, 2 * pp)
    micro_batch_size = min(2, config.micro_batch_size)
    length = math.lcm(2 * tp, _SEQUENCE_LENGTH) if tp > 1 else _SEQUENCE_LENGTH
    return BatchConfig(num_micro_batches * micro_batch_size * dp, micro_batch_size, length)
