"""Achieved efficiency of each class of devices.

The fraction of a data sheet's peak that training achieves depends on compiler, libraries and
shapes. device_efficiency.yaml has the constants, with their sources; docs/planning.md lists the
errors of predictions. The step time of hardware without constants is unknown.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hlat.config.engine import EngineBackend
from hlat.config.run import Config
from hlat.config.untrusted_files import load_untrusted_yaml
from hlat.model.activation_spec import KernelBackend

UNCALIBRATED_INTERVAL = (0.71, 1.41)
"""Range of a step time, relative to the predicted one, of devices and components without fitted
rows: 80% of a normal distribution with the standard deviations of the priors of matmuls (0.10) and
of frameworks (0.15) in benchmarks/planning, and 0.20 for the component, assumed."""


ASSUMED_PEAKS = {
    "peak_tflops": 1.0,
    "memory_bandwidth_gb_per_s": 10.0,
    "link_gb_per_s": 1.0,
    "network_gbit_per_s": 10.0,
}
"""Units of the constants of hardware without peaks, in those of its settings."""


@dataclass(frozen=True)
class HardwareEfficiency:
    """Constants of a class of devices.

    The defaults are for devices of which only the first three are known: all FLOPs have the same
    speed, and operators other than matmuls are part of it.

    Attributes:
        compute: Achieved fraction of peak_tflops in large matmuls.
        link: Achieved fraction of link_gb_per_s.
        network: Achieved fraction of network_gbit_per_s.
        source: Origin of the constants.
        float8: Achieved fraction of peak_tflops.fp8 in large matmuls.
        attention: Achieved fraction of peak_tflops in attention over long sequences; None: compute.
        attention_half_length: Positions for which attention achieves half of it.
        attention_backward: FLOPs of the backward pass of attention relative to the forward pass.
        num_multiprocessors: Tiles of a matmul that are computed at a time; None: no tiles.
        compiled_passes: Times that operators other than matmuls transfer an activation to or from
            memory, with torch.compile.
        eager_passes: The same without.
        overlap: Share of the shorter of computation and data-parallel collectives that the longer
            one hides.
        collective_s: Time of a collective of no bytes.
        link_hop_s: Further time of each hop over links.
        network_hop_s: Further time of each hop over the network.
        operator_s: Time of an operator besides its FLOPs and bytes, with all cores of a CPU.
        assumes_peaks: True if the fractions are those of `ASSUMED_PEAKS`, where the hardware has no
            peak.
        interval: 80% interval of a step time relative to the predicted one; an estimate if
            `is_calibrated` is False.
        layout_interval: The same for comparisons of layouts, without the errors that all layouts
            have in common.
        is_calibrated: True if at least five published rows determine the constants.
    """

    compute: float
    link: float
    network: float
    source: str
    float8: float | None = None
    attention: float | None = None
    attention_half_length: float = 0.0
    attention_backward: float = 2.0
    num_multiprocessors: int | None = None
    compiled_passes: float = 0.0
    eager_passes: float = 0.0
    overlap: float = 1.0
    collective_s: float = 0.0
    link_hop_s: float = 0.0
    network_hop_s: float = 0.0
    operator_s: float = 0.0
    assumes_peaks: bool = False
    interval: tuple[float, float] = UNCALIBRATED_INTERVAL
    layout_interval: tuple[float, float] = UNCALIBRATED_INTERVAL
    is_calibrated: bool = False


UNKNOWN_HARDWARE = HardwareEfficiency(
    compute=0.163,
    link=2.1,
    network=2.1,
    source="assumed",
    attention=0.12,
    attention_half_length=256,
    attention_backward=2.5,
    compiled_passes=2.0,
    eager_passes=3.9,
    overlap=0.0,
    collective_s=2.9e-3,
    operator_s=3.6e-4,
    assumes_peaks=True,
)
"""Constants from which the calibration of hardware without constants starts: those of two cores of
an AMD EPYC with AVX-512. Those of attention are of its kernel alone, at 256, 512 and 1,024
positions; the others are fitted to 30 layouts and sizes (benchmarks/planning), except for network
and compilation. Computation and collectives share the cores, so that they do not overlap."""


@cache
def load_efficiencies() -> dict[str, HardwareEfficiency]:
    """Return the efficiencies by hardware.device."""
    file = load_untrusted_yaml(Path(__file__).with_name("device_efficiency.yaml"))
    return {name: _build_efficiency(file, values) for name, values in file["devices"].items()}


def _build_efficiency(file: dict[str, Any], values: dict[str, Any]) -> HardwareEfficiency:
    """Return the constants of a device; GPUs have those of the section gpu, unless overridden."""
    fields = dict(values)
    if fields.pop("is_gpu", False):
        fields = file["gpu"] | fields
    intervals = ("interval", "layout_interval")
    return HardwareEfficiency(
        **(fields | {key: tuple(fields[key]) for key in intervals if key in fields})
    )


_TRAINIUM = ("trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge", "trn2u.48xlarge", "trn3")
RESERVED_MEMORY_GIB = {"cpu": 0.025} | dict.fromkeys(_TRAINIUM, 3.0)
"""Device memory of runtime, programs and compiler scratch, by hardware.name. The value of trn1 is
assumed such that 70B on four nodes runs out of memory as in the HLAT paper, figure 5; 2.4 to 6.0
GiB are consistent with all published runs; trn2 and trn3 are assumed to be like it. That of a CPU
process is measured (benchmarks/planning)."""

CUDA_CONTEXT_GIB = 0.5
"""Memory of the CUDA context and kernels of a process: about 0.3 GiB with lazy loading
(pytorch/pytorch issue 107667), and libraries; assumed."""
NCCL_GROUP_GIB = 0.67
"""Memory of the buffers of a process group on a GPU: 688 MiB (NVIDIA/nccl issue 964, A100)."""
NCCL_ALL_TO_ALL_GIB = 3.2
"""Further memory of the first all-to-all of eight GPUs (NVIDIA/nccl issue 1685, H100)."""

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
