"""Memory of one device, term by term.

The terms follow from the shape, the layout and the precision recipe alone, so a login node can ask
before a node is booked.
"""

import os
from dataclasses import dataclass

from hlat.config.model import Model
from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.precision import Operator
from hlat.config.run import Config
from hlat.model.canonical import LOGITS_AT_ONCE, parameters
from hlat.parallelism.mesh import Degrees, degrees
from hlat.parallelism.plan import local_numel, stage_layers
from hlat.planning.disk import saved_per_parameter
from hlat.precision import bytes_of, bytes_per_parameter


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device, by term."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    saving: float

    @property
    def total(self) -> float:
        """Bytes of all terms."""
        return sum(float(term) for term in vars(self).values())


def estimate(config: Config) -> Memory:
    """Return what a device must hold at the height of the backward pass, term by term.

    Each term is that of the stage where it is largest, so a pipeline's sum is slightly high. The
    gradients that FSDP2 is about to send, a layer's at a time, are not among them.
    """
    mesh = degrees(config.parallelism, config.num_processes)
    held = max(_stage_parameters(config.model, mesh))
    cost = bytes_per_parameter(config.precision)
    zero = config.parallelism.zero if mesh.dp > 1 else 0
    own, joined = held / mesh.dp, held
    if zero > 2:  # FSDP2 joins the next layer while one computes
        layer = _layer_parameters(config.model, mesh)
        joined -= layer * max(0, config.model.num_layers // mesh.pp - 2)
    # The rows that a rank keeps beside what is joined may be the master weights themselves
    kept = own if zero > 1 and config.precision.master_weights is None else 0
    return Memory(
        weights=(joined + kept) * cost.weights,
        gradients=(own if zero > 1 else held) * cost.gradients,
        optimizer=(own if zero else held) * cost.optimizer,
        activations=_activations(config, mesh),
        logits=_logits(config),
        saving=_saving(config, own if zero else held),
    )


def device_memory(config: Config) -> float:
    """Return the bytes of one device: as configured, or a process's share of this machine's."""
    hardware = config.hardware
    if hardware.memory_gib is not None:
        return hardware.memory_gib * 2**30
    whole = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return whole * hardware.nodes / config.num_processes


def _stage_parameters(model: Model, mesh: Degrees) -> list[int]:
    """Weights that one rank of each pipeline stage holds."""
    counts = [0] * mesh.pp
    stages = stage_layers(model.num_layers, mesh.pp)
    stage_of_layer = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    for parameter in parameters(model):
        numel = local_numel(parameter.name, parameter.shape, model, mesh.tp)
        if parameter.layer is not None:
            counts[stage_of_layer[parameter.layer]] += numel
        else:
            counts[0 if parameter.name.startswith("model.embed_tokens") else -1] += numel
    return counts


def _layer_parameters(model: Model, mesh: Degrees) -> int:
    """Weights of one layer that one rank holds."""
    return sum(
        local_numel(parameter.name, parameter.shape, model, mesh.tp)
        for parameter in parameters(model)
        if parameter.layer == 0
    )


def _activations(config: Config, mesh: Degrees) -> float:
    """Bytes that the layers of a stage keep for the backward pass.

    Per token and layer, in elements: the inputs of both norms, of q/k/v, of the output projection
    and of gate/up, 5 h; q, k and v before and after rotation (v is a view that keeps them alive),
    2 h + 3 h_kv; gate, up and the product, 3 I. Selective checkpointing recomputes the last, full
    checkpointing keeps a layer's input. (After Korthikanti et al., arXiv 2205.05198,
    section 4, for SwiGLU without dropout and with fused attention.) A 1F1B pipeline keeps
    min(micro batches, pp) micro batches on its first stage. With data.document_mask, the layers
    share a bias of s elements per token.
    """
    model, batch = config.model, config.batch
    attention = 7 * model.hidden_size + 3 * model.num_key_value_heads * model.head_dim
    elements = {
        ActivationCheckpointing.none: attention + 3 * model.intermediate_size,
        ActivationCheckpointing.selective: attention + 2 * model.intermediate_size,
        ActivationCheckpointing.full: model.hidden_size,
    }[config.parallelism.activation_checkpointing]
    layers = max(len(stage) for stage in stage_layers(model.num_layers, mesh.pp))
    bias = batch.sequence_length if config.data.document_mask else 0
    kept = min(config.num_micro_batches, mesh.pp)
    tokens = config.micro_batch_size * batch.sequence_length
    per_token = layers * elements / mesh.tp + bias
    return tokens * kept * per_token * bytes_of(config.precision.compute)


def _saving(config: Config, parameters: float) -> float:
    """Bytes of the copy that is written while training goes on, where it lies on the device."""
    on_device = config.hardware.memory_gib is None and config.checkpoint.asynchronous
    return parameters * saved_per_parameter(config.precision) if on_device else 0.0


def _logits(config: Config) -> float:
    """Bytes of the logits that the loss makes at once, and of the head's gradient that it sums.

    A chunk of logits becomes its gradient in place, or by way of a copy in fp32. Sums of the head's
    gradient in fp32 come on top of that gradient.
    """
    model, precision = config.model, config.precision
    tokens = config.micro_batch_size * config.batch.sequence_length
    compute = bytes_of(precision.compute)
    softmax = 4 if Operator.loss in precision.fp32_operators else compute
    chunk = min(tokens * model.vocab_size, LOGITS_AT_ONCE)
    widened = softmax if softmax > compute else 0
    head = model.vocab_size * model.hidden_size * widened
    return (chunk * (compute + widened) + head) / config.parallelism.tp
