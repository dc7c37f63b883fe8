"""Compiler of the model: TorchInductor, or an accelerator's compiler under a pinned SDK."""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class CompilerConfig:
    """Compiler and runtime settings; `none` runs eagerly and sets no environment variable."""

    name: str = MISSING
    """The preset's name."""
    neuron_sdk: str | None = None
    """Pinned Neuron SDK release, e.g. "2.28", which determines the supported environment variables.
    Null: no Neuron."""
    cc_flags: list[str] = field(default_factory=list)
    """Flags for neuronx-cc, joined into NEURON_CC_FLAGS."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the compiler, runtime and network."""
    inductor: bool = False
    """Compile decoder layers, a bf16 loss and stochastic rounding; needs a C++ compiler on a CPU
    and Triton on other devices."""
