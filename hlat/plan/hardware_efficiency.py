"""Fitted efficiency of each kind of hardware.

The fraction of a data sheet's peak that training achieves depends on compiler, libraries and
shapes. The constants are fitted to published runs (published_throughput.yaml);
docs/planning.md lists the error of each. The step time of hardware without constants is unknown.
"""

from dataclasses import dataclass

from hlat.config.engine import EngineBackend
from hlat.config.run import Config
from hlat.model.activation_spec import KernelBackend


@dataclass(frozen=True)
class HardwareEfficiency:
    """Achieved fractions of peak_tflops, link_gb_per_s and network_gbit_per_s of `hardware`."""

    compute: float
    link: float
    network: float
    source: str


_TRN1 = HardwareEfficiency(
    0.490, 0.177, 0.311, "fitted to 4 of 11 published rows, docs/planning.md"
)

EFFICIENCIES = {
    "trn1.32xlarge": _TRN1,
    "trn1n.32xlarge": HardwareEfficiency(
        _TRN1.compute, _TRN1.link, _TRN1.network, "as trn1.32xlarge; no published row"
    ),
    "p4d.24xlarge": HardwareEfficiency(
        0.5, 0.5, _TRN1.network, "fitted to the 43% MFU that HLAT's figure 5 implies"
    ),
}
"""Efficiencies by hardware.name."""

RESERVED_MEMORY_GIB = {"trn1.32xlarge": 3.0, "trn1n.32xlarge": 3.0, "cpu": 0.025}
"""Device memory of runtime, programs and compiler scratch, by hardware.name. The value of trn1 is
assumed such that 70B on four nodes runs out of memory as in the HLAT paper, figure 5; 2.4 to 6.0
GiB are consistent with all published runs. That of a CPU process is measured
(benchmarks/planning)."""

PROCESS_MEMORY_GIB = {"cpu": 0.34}
"""Memory of a process besides its tensors, where devices share it with the host, by hardware.name:
interpreter, libraries, tokenizer, and memory that the allocator does not return. Measured on runs
of the default configuration with torch 2.13.0+cpu; tests/run/test_planned_memory.py."""
COMPILER_MEMORY_GIB = {"cpu": 0.1}
"""Memory of torch.compile, which FSDP2 and pipelining import too, measured in the same way."""

_NXD_ONLY_HARDWARE = ("trn1.32xlarge", "trn1n.32xlarge")
"""Hardware without engine=native: TorchNeuron requires trn2 or newer (its documentation)."""


def get_planned_engine(config: Config) -> EngineBackend:
    """Return the only engine that the hardware supports, or the engine of the run."""
    return EngineBackend.nxd if config.hardware.name in _NXD_ONLY_HARDWARE else config.engine.name


def get_kernel_backend(config: Config) -> KernelBackend:
    """Return the kernels that the planned engine uses on the hardware."""
    if get_planned_engine(config) is EngineBackend.nxd:
        return KernelBackend.xla
    if config.hardware.name == "cpu":
        return KernelBackend.cpu
    return KernelBackend.masked if config.hardware.name.startswith("trn") else KernelBackend.gpu
