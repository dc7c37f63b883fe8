"""Training engine and its device."""

from dataclasses import dataclass
from enum import Enum


class EngineBackend(Enum):
    """Implementations of hlat/engine/interface.py."""

    native = "native"
    """PyTorch alone: cpu, cuda, neuron (TorchNeuron)."""
    nxd = "nxd"
    """neuronx-distributed on PyTorch/XLA, for trn1 and SDKs up to 2.31."""


@dataclass
class EngineConfig:
    """The engine and its device."""

    name: EngineBackend = EngineBackend.native
    """The engine."""
    device: str = "auto"
    """torch device type; auto: the machine's accelerator if it has one, else the cpu."""
    deterministic: bool = True
    """Use only algorithms with bitwise reproducible results. On trn2 and trn3 it disables
    TorchNeuron's Adaptive Eager Execution."""
