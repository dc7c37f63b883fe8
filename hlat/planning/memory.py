"""Memory of one device, term by term.

The terms follow from the shape, the layout and the precision recipe alone, so a login node can ask
before a node is booked. docs/planning.md works each out by hand, and shows what was measured.
"""

import os
from dataclasses import dataclass

from hlat.config.engine import Backend
from hlat.config.parallelism import ActivationCheckpointing, PipelineSchedule
from hlat.config.precision import Operator
from hlat.config.run import Config
from hlat.model.canonical import rows_at_once
from hlat.parallelism.mesh import Degrees, degrees
from hlat.planning.disk import saved_per_parameter
from hlat.planning.efficiency import RESERVES_GIB, planned_engine
from hlat.planning.shards import Stage, stages
from hlat.precision import bytes_of, bytes_per_parameter

_NXD_BUCKET_BYTES = 130 * 10**6
"""ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB of NxD 0.9, as its ZeRO-1 optimizer joins gradients."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device, by term.

    Attributes:
        weights: As the forward pass reads them.
        gradients: The backward pass's own, where it is not what is summed.
        accumulation: Sums of gradients over micro batches.
        master_weights: The copy that the optimizer updates.
        moments: Both of Adam's.
        activations: What layers keep for the backward pass, of all micro batches under way.
        logits: What the head makes at once, and the gradient of its weights.
        working: What the backward pass of a layer makes and drops, beyond what the head did.
        collectives: What is sent and received.
        saving: The copy that is written while training goes on, where it lies on the device.
        reserve: Of the runtime and its programs.
    """

    weights: float
    gradients: float
    accumulation: float
    master_weights: float
    moments: float
    activations: float
    logits: float
    working: float
    collectives: float
    saving: float
    reserve: float

    @property
    def total(self) -> float:
        """Bytes of all terms."""
        return sum(float(term) for term in vars(self).values())


def estimate(config: Config) -> Memory:
    """Return what the fullest device must hold at the height of the backward pass, term by term.

    A step of a single micro batch needs less: its activations go while its gradients come.
    """
    mesh = degrees(config.parallelism, config.num_processes)
    ranks = enumerate(stages(config.model, mesh))
    return max((_of_stage(config, mesh, rank, stage) for rank, stage in ranks), key=_total)


def device_memory(config: Config) -> float:
    """Return the bytes of one device: as configured, or a process's share of this machine's."""
    hardware = config.hardware
    if hardware.memory_gib is not None:
        return hardware.memory_gib * 2**30
    whole = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return whole * hardware.nodes / config.num_processes


def kept_elements(config: Config, mesh: Degrees, stage: Stage) -> float:
    """Elements that a layer keeps of each token without checkpointing.

    The inputs of both norms, 2 h, cut over ranks by sequence parallelism; the inputs of q/k/v and
    gate/up, 2 h, which NxD cuts too and gathers again, while PyTorch keeps what was gathered; that
    of the output projection, h, and q, k and v before and after rotation, 2 h + 3 h_kv (v is a view
    that keeps them alive); gate, up and their product, 3 I. (After Korthikanti et al.,
    arXiv 2205.05198, section 4, for SwiGLU without dropout.)
    """
    model, tp = config.model, mesh.tp
    sharded = config.parallelism.sequence_parallel
    share = 1 / tp if sharded else 1.0
    gathered = share if planned_engine(config) is Backend.nxd else 1.0
    key_value = stage.kv_heads * model.head_dim
    inside = (3 * model.hidden_size + 3 * model.intermediate_size) / tp + 3 * key_value
    return 2 * model.hidden_size * (share + gathered) + inside


def micro_batches_kept(config: Config, mesh: Degrees, rank: int) -> float:
    """Micro batches whose activations a pipeline rank keeps at once.

    Under 1F1B one for each rank from it on; with v stages a rank (p - 1)/(p v) as many more
    (arXiv 2205.05198, section 4.2.3).
    """
    kept = float(mesh.pp - rank)
    if config.parallelism.pipeline_schedule is not PipelineSchedule.one_f_one_b:
        kept += (mesh.pp - 1) / config.parallelism.stages_per_rank
    return min(config.num_micro_batches, kept)


def _of_stage(config: Config, mesh: Degrees, rank: int, stage: Stage) -> Memory:
    """Bytes of a rank of a stage."""
    cost = bytes_per_parameter(config.precision)
    zero = config.parallelism.zero if mesh.dp > 1 else 0
    held = stage.numel
    own, joined = held / mesh.dp, float(held)
    if zero > 2:  # FSDP2 joins the next layer while one computes
        joined -= stage.layer * max(0, stage.num_layers - 2)
    # The rows that a rank keeps beside what is joined may be the master weights themselves
    kept = own if zero > 1 and config.precision.master_weights is None else 0.0
    updated = own if zero else held
    logits = _logits(config, mesh) if stage.is_last else 0.0
    at_once = float(held if planned_engine(config) is Backend.nxd else stage.largest)
    return Memory(
        weights=(joined + kept) * cost.weights,
        gradients=at_once * cost.transient_gradients,
        accumulation=(own if zero > 1 else held) * cost.gradients,
        master_weights=updated * cost.master_weights,
        moments=updated * cost.moments,
        activations=_activations(config, mesh, rank, stage),
        logits=logits,
        working=max(0.0, _working(config, mesh, stage) - logits),
        collectives=_collectives(config, mesh, stage, zero),
        saving=_saving(config, updated),
        reserve=RESERVES_GIB.get(config.hardware.name, 0.0) * 2**30,
    )


def _activations(config: Config, mesh: Degrees, rank: int, stage: Stage) -> float:
    """Bytes that the layers of a stage keep for the backward pass.

    Selective checkpointing recomputes attention and the product of gate and up, full checkpointing
    keeps a layer's input. Attention that is not fused keeps its probabilities. With
    data.document_mask, the layers share a bias of s elements per token.
    """
    model, layout = config.model, config.parallelism
    share = mesh.tp if layout.sequence_parallel else 1
    whole = kept_elements(config, mesh, stage)
    elements = {
        ActivationCheckpointing.none: whole + _scores(config, mesh),
        ActivationCheckpointing.selective: whole - model.intermediate_size / mesh.tp,
        ActivationCheckpointing.full: model.hidden_size / share,
    }[layout.activation_checkpointing]
    bias = config.batch.sequence_length if config.data.document_mask else 0
    per_token = stage.num_layers * elements + bias
    kept = micro_batches_kept(config, mesh, rank)
    return _tokens(config) * kept * per_token * bytes_of(config.precision.compute)


def _working(config: Config, mesh: Degrees, stage: Stage) -> float:
    """Bytes that the backward pass of one layer makes and drops.

    The gradient of the product, of gate and of up, copies of gate and of its silu, and the two
    gradients joined: 7 I; what the layer computes once more; probabilities that are not fused and
    their gradient, in fp32 if the softmax is.
    """
    model, precision = config.model, config.precision
    inner, compute = model.intermediate_size / mesh.tp, bytes_of(precision.compute)
    again = {
        ActivationCheckpointing.none: 0.0,
        ActivationCheckpointing.selective: inner,
        ActivationCheckpointing.full: kept_elements(config, mesh, stage),
    }[config.parallelism.activation_checkpointing]
    softmax = 4 if Operator.softmax in precision.fp32_operators else compute
    scores = _scores(config, mesh) * (compute + 2 * softmax)
    return _tokens(config) * ((7 * inner + again) * compute + scores)


def _scores(config: Config, mesh: Degrees) -> float:
    """Attention probabilities of a token on one rank, where they are made at all."""
    if planned_engine(config) is not Backend.nxd:
        return 0.0
    return config.model.num_attention_heads / mesh.tp * config.batch.sequence_length


def _collectives(config: Config, mesh: Degrees, stage: Stage, zero: int) -> float:
    """Bytes of what is sent and received: a region's tokens, joined, and as they arrive.

    NxD's ZeRO-1 sends gradients in buckets; FSDP2 sends those of a layer while the next computes.
    """
    precision = config.precision
    tokens = _tokens(config) * config.model.hidden_size * bytes_of(precision.compute)
    sent = 2.0 * tokens if mesh.tp > 1 else 0.0
    if zero == 1 and planned_engine(config) is Backend.nxd:
        sent += 2 * _NXD_BUCKET_BYTES
    if zero > 1:
        sent += stage.layer * (bytes_of(precision.gradients) + bytes_of(precision.reduction))
    if mesh.pp > 1:
        share = mesh.tp if config.parallelism.sequence_parallel else 1
        sent += 4 * tokens / share  # activations and gradients, to and from the next
    return sent


def _saving(config: Config, parameters: float) -> float:
    """Bytes of the copy that is written while training goes on, where it lies on the device."""
    on_device = config.hardware.memory_gib is None and config.checkpoint.asynchronous
    return parameters * saved_per_parameter(config.precision) if on_device else 0.0


def _logits(config: Config, mesh: Degrees) -> float:
    """Bytes of the logits that the loss makes at once, and of the head's gradient.

    A chunk of logits becomes its gradient in place, or by way of a copy in fp32. Sums of the head's
    gradient over chunks are in that dtype, too, and are then rounded. NxD makes all logits, keeps
    them in the dtype of the loss, and makes their gradient.
    """
    model, precision = config.model, config.precision
    compute = bytes_of(precision.compute)
    softmax = 4 if Operator.loss in precision.fp32_operators else compute
    tokens, width = _tokens(config), model.vocab_size / mesh.tp
    head = model.vocab_size * model.hidden_size / mesh.tp
    if planned_engine(config) is Backend.nxd:
        return tokens * width * (compute + 2 * softmax) + head * compute
    widened = softmax if softmax > compute else 0
    return (min(tokens, rows_at_once(int(width))) * width + head) * (compute + widened)


def _tokens(config: Config) -> int:
    """Tokens of a micro batch."""
    return config.micro_batch_size * config.batch.sequence_length


def _total(memory: Memory) -> float:
    return memory.total
