"""Compiler of the model: torch.compile, and the compiler of a pinned Neuron SDK."""

import re
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
    """Further environment variables of the compiler, runtime and network: NEURON_*, XLA_*, FI_*,
    NCCL_*, MALLOC_ARENA_MAX. glibc reads the last at the start of a process, so that it affects
    processes that hlat starts only. Variables that name libraries or programs are refused."""
    torch_compile: bool = False
    """Compile decoder layers, a bf16 loss and stochastic rounding with torch.compile. The backend
    follows from the device: TorchInductor on a CPU, which needs a C++ compiler, and on a GPU, which
    needs Triton; TorchNeuron's on trn2 and trn3."""

    @property
    def neuron_release(self) -> list[int] | None:
        """Major and minor of the pinned SDK; None if there is none, or if it is not a release."""
        match = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)?", self.neuron_sdk or "")
        return match and [*map(int, match.groups())]
