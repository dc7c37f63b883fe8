"""What compiles the model: TorchInductor, or an accelerator's compiler under a pinned SDK."""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class Compiler:
    """Compiler and runtime settings; `none` runs operator by operator and tells nothing."""

    name: str = MISSING
    """The preset's name."""
    neuron_sdk: str | None = None
    """Pinned Neuron SDK release, e.g. "2.28"; it decides which variables exist. Null: no Neuron."""
    cc_flags: list[str] = field(default_factory=list)
    """Flags for neuronx-cc, joined into NEURON_CC_FLAGS."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the compiler, runtime and network."""
    inductor: bool = False
    """Compile decoder layers, a bf16 loss and stochastic rounding; needs a C++ compiler on a CPU,
    else Triton."""
