"""Which machinery trains the model, and on which device."""

from dataclasses import dataclass
from enum import Enum


class Backend(Enum):
    """Engines behind the seam of hlat/engine/interface.py."""

    native = "native"
    """PyTorch alone: cpu, cuda, neuron (TorchNeuron)."""
    nxd = "nxd"
    """neuronx-distributed on PyTorch/XLA, for trn1 and SDKs up to 2.31."""


@dataclass
class Engine:
    """The engine and its device."""

    name: Backend = Backend.native
    """The engine."""
    device: str = "auto"
    """torch device type; auto: the machine's accelerator if it has one, else the cpu."""
    deterministic: bool = True
    """Only algorithms that give the same bits every time."""
