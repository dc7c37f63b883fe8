"""Hardware of a run: number, size, speed and price of its nodes."""

from dataclasses import dataclass

from omegaconf import MISSING

from hlat.config.bounds import bounded


@dataclass
class HardwareConfig:
    """One type of node, with the source of each figure.

    A device is the unit that one process uses: a GPU, a NeuronCore, or this machine's CPU. The
    feasibility check and MFU use memory and peaks; plans and costs use bandwidths, host and price.
    """

    name: str = MISSING
    """Instance type, or another name."""
    device: str | None = None
    """Class of devices with constants of the planner in hlat/plan/device_efficiency.yaml, such as
    h100; null: step time and cost are unknown without a calibration."""
    calibration: str | None = None
    """File of `hlat plan calibrate`: its constants replace those of the device."""
    nodes: int = bounded(1, min=1)
    """Nodes of the run."""
    processes_per_node: int | None = bounded(min=1)
    """Training processes (devices) per node; null: one node with as many as the layout needs."""
    memory_gib: float | None = bounded(None, above=0, below=float("inf"))
    """Memory of one device in GiB; null: read from the machine."""
    memory_bandwidth_gb_per_s: float | None = None
    """Memory bandwidth of one device in 10^9 bytes/s."""
    peak_tflops: dict[str, float] = bounded({}, above=0, below=float("inf"))  # noqa: RUF009 (a field)
    """Dense peak of one device in 10^12 FLOP/s by dtype (bf16, fp32); without an entry for the
    compute dtype, MFU is not reported."""
    link_gb_per_s: float | None = None
    """Bandwidth between the chips of a node, per chip, in 10^9 bytes/s."""
    network_gbit_per_s: float | None = None
    """Network bandwidth of a node in 10^9 bit/s."""
    host_memory_gib: float | None = None
    """Main memory of a node in GiB."""
    vcpus: int | None = None
    """Virtual CPUs of a node."""
    price_usd_per_hour: float | None = bounded(None, above=0, below=float("inf"))
    """Price of a node; null: unknown, and no cost is reported."""
    price_date: str | None = None
    """Date of the price."""
    price_source: str | None = None
    """Kind of the price (on-demand or capacity block), region, and page with the price."""
    source: str | None = None
    """Sources of the other figures."""
