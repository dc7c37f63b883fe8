"""How long a step takes, part by part, on the slowest rank.

    step = micro batches x (compute + tensor-parallel traffic + sends) + bubble
           + data-parallel reduction that nothing hides + optimizer

Parts that run one after the other are added. The native engine starts to sum a gradient when it is
complete, so its reduction hides behind the backward pass of the last micro batch; NxD's begins
after it. docs/planning.md works each through by hand.

Sources: Megatron-LM, arXiv 2104.04473, section 2.2 (bubble); 2205.05198, section 4.2 (sequence
parallelism); ZeRO, 1910.02054, section 7 (traffic of its stages); zero bubble, 2401.10241.
"""

from dataclasses import dataclass

from hlat import hardware
from hlat.config.engine import Backend
from hlat.config.errors import ConfigError
from hlat.config.parallelism import ActivationCheckpointing, PipelineSchedule
from hlat.config.run import Config
from hlat.parallelism.mesh import Degrees, degrees
from hlat.planning.efficiency import EFFICIENCIES, Efficiency, planned_engine
from hlat.planning.shards import Stage, stages
from hlat.precision import bytes_of, bytes_per_parameter

_BUBBLE_LEFT = {PipelineSchedule.zero_bubble: 1 / 3}
"""Of 1F1B's bubble: gradients of weights, a third of the work, fill the rest."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, on the rank that has most to do.

    Attributes:
        compute: Arithmetic of all micro batches, what is recomputed included.
        tensor_parallel: Collectives inside of layers.
        sends: Activations and their gradients between pipeline stages.
        bubble: Waiting for other stages.
        reduction: Data-parallel collectives that nothing hides.
        optimizer: Reading and writing its states.
        hidden: The rest of the data-parallel collectives, which is not in the total.
    """

    compute: float
    tensor_parallel: float
    sends: float
    bubble: float
    reduction: float
    optimizer: float
    hidden: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(float(part) for part in vars(self).values()) - self.hidden


@dataclass(frozen=True)
class Speed:
    """What a rank of a run achieves, in units per second; link and network in bytes."""

    flops: float
    memory: float
    link: float
    network: float


def predict(config: Config) -> StepTime:
    """Return how long a step takes.

    Raises:
        ConfigError: Something of the hardware is not known.
    """
    return step_time(config, speed(config, efficiency(config)))


def efficiency(config: Config) -> Efficiency:
    """Return the constants of the run's hardware.

    Raises:
        ConfigError: There are none.
    """
    name = config.hardware.name
    if name not in EFFICIENCIES:
        raise ConfigError(
            f"hardware={name} has no constants in hlat/planning/efficiency.py, so no time can be "
            f"told; those of {', '.join(EFFICIENCIES)} are known"
        )
    return EFFICIENCIES[name]


def speed(config: Config, constants: Efficiency) -> Speed:
    """Return what a rank achieves of what its hardware claims.

    Raises:
        ConfigError: The hardware does not claim it.
    """
    machine, dtype = config.hardware, config.precision.compute
    peak = hardware.peak_flops(machine, 1, dtype)
    claims = {
        f"peak_tflops.{dtype.value}": peak,
        "memory_bandwidth_gb_per_s": machine.memory_bandwidth_gb_per_s,
        "link_gb_per_s": machine.link_gb_per_s,
        "network_gbit_per_s": machine.network_gbit_per_s,
    }
    flops, memory, link, network = (claim or 0.0 for claim in claims.values())
    if missing := [f"hardware.{key}" for key, claim in claims.items() if claim is None]:
        raise ConfigError(*(f"{key} is not known, so no time can be told" for key in missing))
    return Speed(
        flops=flops * constants.compute,
        memory=memory * 1e9,
        link=link * 1e9 * constants.link,
        network=network * 1e9 / 8 * constants.network,
    )


def step_time(config: Config, speed: Speed) -> StepTime:
    """Return how long a step takes at a speed."""
    mesh = degrees(config.parallelism, config.num_processes)
    parts = stages(config.model, mesh)
    computing = [forward_and_backward(config, mesh, stage) / speed.flops for stage in parts]
    together = _rate(config, mesh.tp - 1, speed)
    talking = [tp_bytes(config, mesh, stage) / together for stage in parts]
    passing = sent_bytes(config, mesh) / _rate(config, mesh.dp * mesh.tp, speed)
    slots = [sum(both) + passing for both in zip(computing, talking, strict=True)]
    slowest = slots.index(max(slots))
    count, layout = config.num_micro_batches, config.parallelism
    left = _BUBBLE_LEFT.get(layout.pipeline_schedule, 1.0) / layout.stages_per_rank
    fullest = max(stage.numel for stage in parts)
    reduction = _reduction(config, mesh, fullest, speed)
    backward = (computing[slowest] + talking[slowest]) * 2 / 3
    hidden = min(reduction, backward) if planned_engine(config) is Backend.native else 0.0
    return StepTime(
        compute=count * computing[slowest],
        tensor_parallel=count * talking[slowest],
        sends=count * passing,
        bubble=(sum(slots) - slots[slowest]) * left,
        reduction=reduction - hidden,
        optimizer=optimizer_bytes(config, mesh, fullest) / speed.memory,
        hidden=hidden,
    )


def forward_and_backward(config: Config, mesh: Degrees, stage: Stage) -> float:
    """FLOPs of one rank for one micro batch.

    Three times the forward pass (hlat.model.canonical.flops_per_token counts the same), on the
    weights that the rank really holds: copies of key/value heads are computed as well. Selective
    checkpointing computes attention once more, full checkpointing the whole layer.
    """
    model, tokens = config.model, config.micro_batch_size * config.batch.sequence_length
    attention = 2 * config.batch.sequence_length * model.hidden_size / mesh.tp
    layer = 2 * (stage.layer - stage.vectors) + attention
    again = {
        ActivationCheckpointing.none: 0.0,
        ActivationCheckpointing.selective: attention,
        ActivationCheckpointing.full: layer,
    }[config.parallelism.activation_checkpointing]
    head = 2 * -(-model.vocab_size // mesh.tp) * model.hidden_size if stage.is_last else 0
    return tokens * (stage.num_layers * (3 * layer + again) + 3 * head)


def tp_bytes(config: Config, mesh: Degrees, stage: Stage) -> float:
    """Bytes that a rank sends to its tensor-parallel peers for one micro batch.

    A layer gathers its input and scatters the sum of its output twice on the way forth and twice on
    the way back, (tp - 1)/tp of the activations each time; without sequence parallelism an
    all-reduce is one of each. NxD keeps only its share of what was gathered, and gathers it again
    for the gradients of weights. Embedding and head talk once each way.
    """
    layout = config.parallelism
    tokens = config.micro_batch_size * config.batch.sequence_length
    size = tokens * config.model.hidden_size * bytes_of(config.precision.compute)
    a_layer = 8
    if layout.sequence_parallel and planned_engine(config) is Backend.nxd:
        a_layer += 2
    if layout.activation_checkpointing is ActivationCheckpointing.full:
        a_layer += 4
    at_ends = 2 * (stage.is_first + stage.is_last)
    return size * (mesh.tp - 1) / mesh.tp * (a_layer * stage.num_layers + at_ends)


def sent_bytes(config: Config, mesh: Degrees) -> float:
    """Bytes that a rank sends to its neighbours in the pipeline for one micro batch, both ways."""
    if mesh.pp == 1:
        return 0.0
    layout = config.parallelism
    tokens = config.micro_batch_size * config.batch.sequence_length
    size = tokens * config.model.hidden_size * bytes_of(config.precision.compute)
    share = mesh.tp if layout.sequence_parallel else 1
    return 2 * size / share * layout.stages_per_rank


def reduced_bytes(config: Config, mesh: Degrees, numel: int) -> float:
    """Bytes that a rank sends along a ring of its data-parallel peers in a step.

    A sum over n ranks is scattered and gathered, (n - 1)/n of it each time (ZeRO stage 0). From
    stage 1 on weights are gathered in its place; from stage 2 on sums are scattered, and in stage 3
    weights are gathered twice, for each micro batch.
    """
    precision, count = config.precision, config.num_micro_batches
    sums, weights = numel * bytes_of(precision.reduction), numel * bytes_of(precision.weights)
    sent = {
        0: 2 * sums,
        1: sums + weights,
        2: count * sums + weights,
        3: count * (sums + 2 * weights),
    }[config.parallelism.zero]
    return sent * (mesh.dp - 1) / mesh.dp


def optimizer_bytes(config: Config, mesh: Degrees, numel: int) -> float:
    """Bytes that the update of a rank's rows reads and writes.

    It reads the sum of gradients, reads and writes what it updates and both moments, and with
    master weights writes the weights.
    """
    cost = bytes_per_parameter(config.precision)
    updated = cost.master_weights or cost.weights
    copied = cost.weights if cost.master_weights else 0
    rows = numel / mesh.dp if config.parallelism.zero else numel
    return rows * (cost.gradients + 2 * updated + 2 * cost.moments + copied)


def rings_per_node(config: Config, mesh: Degrees) -> int:
    """Rings of data-parallel peers that share a node's network.

    Ranks of a node that belong to one ring stand next to each other in it, so it leaves the node
    once.
    """
    per_node = config.hardware.processes_per_node or config.num_processes
    together = max(1, min(mesh.dp, per_node // mesh.tp))
    return max(1, per_node // together)


def _reduction(config: Config, mesh: Degrees, numel: int, speed: Speed) -> float:
    """Seconds of all data-parallel collectives of a step."""
    sent = reduced_bytes(config, mesh, numel)
    per_node = config.hardware.processes_per_node or config.num_processes
    if mesh.dp * mesh.tp <= per_node:
        return sent / speed.link
    return sent / (speed.network / rings_per_node(config, mesh))


def _rate(config: Config, distance: int, speed: Speed) -> float:
    """Bytes per second between ranks that stand apart: over links, or a share of the network."""
    per_node = config.hardware.processes_per_node
    if per_node is None or distance < per_node:
        return speed.link
    return speed.network / per_node
