"""The machine a run is meant for: how many, how large, how fast, at what price.

Every figure comes with its source, because plans and costs are only as good as these numbers.
"""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class Hardware:
    """One kind of node.

    A device is what one process drives: a GPU, a NeuronCore, or this machine's CPU.
    Memory and peaks are read by the feasibility check and by MFU; bandwidths, host and price are
    recorded with their sources for plans and costs.
    """

    name: str = MISSING
    """Instance type or a name of the kind."""
    nodes: int = 1
    """Nodes of the run."""
    processes_per_node: int | None = MISSING
    """Training processes (devices) per node; null: one node with as many as the layout asks for."""
    memory_gib: float | None = None
    """Memory of one device in GiB; null: read from the machine."""
    memory_bandwidth_gb_per_s: float | None = None
    """Memory bandwidth of one device in 10^9 bytes/s."""
    peak_tflops: dict[str, float] = field(default_factory=dict)
    """Dense peak of one device in 10^12 FLOP/s by dtype (bf16, fp32); a missing dtype means no MFU,
    never a guess."""
    link_gb_per_s: float | None = None
    """Bandwidth between the chips of a node, per chip, in 10^9 bytes/s."""
    network_gbit_per_s: float | None = None
    """Network bandwidth of a node in 10^9 bit/s."""
    host_memory_gib: float | None = None
    """Main memory of a node in GiB."""
    vcpus: int | None = None
    """Virtual CPUs of a node."""
    price_usd_per_hour: float | None = None
    """Price of a node; null: not known, so no cost is reported."""
    price_date: str | None = None
    """When the price was valid."""
    source: str | None = None
    """Where the figures stand."""
