"""Memory of one device, term by term.

The terms follow from the shape, the layout and the precision recipe alone, so a login node can ask
before a node is booked.
"""

import os
from dataclasses import dataclass

from hlat.config.hardware import Hardware
from hlat.config.run import Config
from hlat.model.canonical import num_parameters
from hlat.precision import bytes_of, bytes_per_parameter


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device, by term."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """Bytes of all terms."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def estimate(config: Config) -> Memory:
    """Return what a device must hold at the height of the backward pass.

    Weights, gradients and optimizer states are divided by tp x pp, the states also by dp under
    ZeRO-1; what single ranks hold besides (norms, the embedding on the first stage) is left out, so
    the estimate is a lower bound.
    """
    layout = config.parallelism
    parameters = num_parameters(config.model) / (layout.tp * layout.pp)
    replicas = config.hardware.num_processes // (layout.tp * layout.pp)
    cost = bytes_per_parameter(config.precision)
    return Memory(
        weights=parameters * cost.weights,
        gradients=parameters * cost.gradients,
        optimizer=parameters * cost.optimizer / (replicas if layout.zero1 else 1),
        activations=_activations(config, replicas),
        logits=_logits(config),
    )


def device_memory(hardware: Hardware) -> float:
    """Return the bytes of one device: as configured, or the machine's main memory."""
    if hardware.memory_gib is not None:
        return hardware.memory_gib * 2**30
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _activations(config: Config, replicas: int) -> float:
    """Bytes that the layers of a stage keep for the backward pass, without recomputation.

    Per token and layer: the inputs of both norms and both coalesced projections, q, k, v, the
    attention's output, gate, up and their product: 6 h + 2 h_kv + 3 I elements (after Korthikanti
    et al., arXiv 2205.05198, section 4, for SwiGLU without dropout and with fused attention).
    A 1F1B pipeline keeps min(micro batches, pp) micro batches on its first stage.
    """
    model, batch, layout = config.model, config.batch, config.parallelism
    kv_size = model.num_key_value_heads * model.head_dim
    elements = 6 * model.hidden_size + 2 * kv_size + 3 * model.intermediate_size
    layers = -(-model.num_layers // layout.pp)
    micro_batches = batch.global_batch_size // (batch.micro_batch_size * replicas)
    kept = min(micro_batches, layout.pp)
    tokens = batch.micro_batch_size * batch.sequence_length
    return tokens * kept * layers * elements * bytes_of(config.precision.compute) / layout.tp


def _logits(config: Config) -> float:
    """Bytes of the logits in the compute dtype, and in fp32 with their gradient, for the loss."""
    tokens = config.batch.micro_batch_size * config.batch.sequence_length
    return (
        tokens
        * config.model.vocab_size
        * (bytes_of(config.precision.compute) + 8)
        / config.parallelism.tp
    )
