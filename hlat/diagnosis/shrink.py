"""A run made small enough to be checked in minutes, with everything kept that decides its code.

Layout, recipe, engine, optimizer and schedule are the run's own. Layers, heads, vocabulary and
batch become few, in the relations to one another and to the layout that the run has: which ranks
hold copies of a key/value head, whether the last rank has fewer tokens of the vocabulary, whether
stages are unequal.
"""

import math
from dataclasses import replace

from hlat.config.batch import Batch
from hlat.config.engine import Backend
from hlat.config.errors import ConfigError
from hlat.config.model import Model
from hlat.config.parallelism import Parallelism, PipelineSchedule
from hlat.config.run import Config

_MOST_PROCESSES_HERE = 16
"""That the doctor starts by itself; each imports torch and takes about 0.3 GiB."""
_HEAD_DIM, _NARROW_HEAD_DIM, _MANY_HEADS = 16, 4, 16
_ROWS_OF_VOCABULARY = 128
_TOKENS = 32
_SECONDS_TO_A_CHECK = 900.0
"""Silence after which processes hang, if they are supervised."""


def shrink(config: Config, num_started: int = 1) -> Config:
    """The small run that stands for a configuration.

    Args:
        config: A resolved configuration.
        num_started: Processes that torchrun or Slurm has started; 1: the doctor starts its own, two
            data-parallel ranks at most, since two show whatever any number does.

    Raises:
        ConfigError: They would be more than one machine should have.
    """
    layout = config.parallelism
    replica = layout.tp * layout.pp
    wanted = config.num_processes // replica
    dp = min(wanted, 2) if num_started == 1 else max(1, num_started // replica)
    if num_started == 1 and replica * dp > _MOST_PROCESSES_HERE:
        raise ConfigError(
            f"parallelism.tp={layout.tp} x pp={layout.pp} x dp={dp} needs {replica * dp} processes,"
            f" and the doctor starts at most {_MOST_PROCESSES_HERE} on one machine; start it where "
            "the run is to train, once for each process, with srun or torchrun, or choose a "
            "smaller layout with the same axes"
        )
    model, nxd = _model(config.model, layout), config.engine.name is Backend.nxd
    return replace(
        config,
        run=replace(config.run, root=f"{config.run.root}/doctor"),
        model=model,
        batch=_batch(config, dp),
        parallelism=replace(layout, dp=dp),
        # NxD builds one model a process, and what looks for leaks needs a loss of some targets only
        data=replace(config.data, loss_mask=config.data.loss_mask or nxd),
        hardware=replace(config.hardware, nodes=1, processes_per_node=None),
        checkpoint=replace(config.checkpoint, destination=None, start_from=None),
        recovery=replace(
            config.recovery,
            max_restarts=0,
            step_timeout_s=_SECONDS_TO_A_CHECK,
            start_timeout_s=_SECONDS_TO_A_CHECK,
        ),
    )


def alone(config: Config) -> Config:
    """The same run on one process, which computes each micro batch of every rank in turn."""
    layout = replace(
        config.parallelism,
        tp=1,
        pp=1,
        dp=1,
        zero=0,
        sequence_parallel=False,
        pipeline_schedule=PipelineSchedule.one_f_one_b,
        stages_per_rank=1,
    )
    return replace(config, parallelism=layout)


def without(config: Config, axis: str) -> Config:
    """The same run where ranks along an axis are data-parallel ranks, with as many processes."""
    layout = config.parallelism
    size = {"tp": layout.tp, "pp": layout.pp}[axis]
    layout = replace(layout, dp=(layout.dp or 1) * size)
    if axis == "tp":
        layout = replace(layout, tp=1, sequence_parallel=False)
    else:
        one = PipelineSchedule.one_f_one_b
        layout = replace(layout, pp=1, pipeline_schedule=one, stages_per_rank=1)
    batch = replace(config.batch, global_batch_size=config.batch.global_batch_size * size)
    return replace(config, parallelism=layout, batch=batch)


def _model(model: Model, layout: Parallelism) -> Model:
    groups, queries = _heads(model, layout.tp)
    heads = groups * queries
    head_dim = _HEAD_DIM if heads < _MANY_HEADS else _NARROW_HEAD_DIM
    even = model.intermediate_size % model.num_attention_heads == 0
    stages = layout.pp * layout.stages_per_rank
    unequal = model.num_layers % stages > 0
    return replace(
        model,
        num_layers=min(model.num_layers, max(2, stages + unequal)),
        hidden_size=heads * head_dim,
        intermediate_size=24 * heads if even else 25 * layout.tp * (heads // layout.tp + 1),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=-(-_ROWS_OF_VOCABULARY // layout.tp) * layout.tp + model.vocab_size % layout.tp,
        init_from=None,
    )


def _heads(model: Model, tp: int) -> tuple[int, int]:
    """Key/value heads and the query heads of each; at most two of either on a rank."""
    groups, queries = model.num_key_value_heads, model.queries_per_group
    if tp <= groups:
        return tp * min(2, groups // tp), min(2, queries)
    copies = tp // groups
    return groups, copies * min(2, queries // copies)


def _batch(config: Config, dp: int) -> Batch:
    """Two sequences a micro batch, and enough micro batches for the order of the schedule."""
    pp, many = config.parallelism.pp, config.num_micro_batches
    few = many if many <= 2 * pp else 2 * pp
    size = min(2, config.micro_batch_size)
    length = math.lcm(2 * config.parallelism.tp, _TOKENS) if config.parallelism.tp > 1 else _TOKENS
    return Batch(few * size * dp, size, length)
