"""What data sheets do not tell of a machine: one set of constants for each kind of hardware.

Data sheets say what could be at best. What training gets of it depends on compiler, libraries and
shapes, and is fitted to published runs (hlat.planning.published); docs/planning.md has the error of
each row. Hardware without constants has no predicted time: a guess would look like a measurement.
"""

from dataclasses import dataclass

from hlat.config.engine import Backend
from hlat.config.run import Config


@dataclass(frozen=True)
class Efficiency:
    """Shares of what `hardware` claims that a step gets.

    Attributes:
        compute: Of hardware.peak_tflops.
        link: Of hardware.link_gb_per_s.
        network: Of hardware.network_gbit_per_s.
        source: Where the shares come from.
    """

    compute: float
    link: float
    network: float
    source: str


_TRN1 = Efficiency(0.490, 0.177, 0.311, "fitted to 4 of 11 published rows, docs/planning.md")

EFFICIENCIES = {
    "trn1.32xlarge": _TRN1,
    "trn1n.32xlarge": Efficiency(
        _TRN1.compute, _TRN1.link, _TRN1.network, "those of trn1.32xlarge; no published row"
    ),
    "p4d.24xlarge": Efficiency(
        0.5, 0.5, _TRN1.network, "fitted to the 43% MFU that HLAT's figure 5 implies"
    ),
}
"""By hardware.name."""

RESERVES_GIB = {"trn1.32xlarge": 3.0, "trn1n.32xlarge": 3.0, "cpu": 0.025}
"""Memory of a device that runtime, programs and the compiler's scratch take, by hardware.name. Of
trn1 assumed, so that 70B on four nodes, which ran out of memory (HLAT paper, figure 5), does: from
2.4 to 6.0 GiB say the same of all published runs. Of a CPU what a first step loads into a process,
measured (benchmarks/planning)."""

_XLA_ONLY = ("trn1.32xlarge", "trn1n.32xlarge")
"""TorchNeuron, and so engine=native, needs trn2 or newer (its documentation)."""


def planned_engine(config: Config) -> Backend:
    """Return the engine that a plan is for: the only one of the hardware, or the run's."""
    return Backend.nxd if config.hardware.name in _XLA_ONLY else config.engine.name
