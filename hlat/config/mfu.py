"""Model FLOPs utilization, link bandwidth and cost, given the configured hardware.

Results are None if a peak or a price is unknown.
"""

from collections.abc import Iterable

from hlat.config.hardware import HardwareConfig
from hlat.config.precision import Dtype


def compute_peak_flops(hardware: HardwareConfig, num_processes: int, dtype: Dtype) -> float | None:
    """Return the dense peak of all devices of the run in FLOP/s; None if unknown for the dtype."""
    peak = hardware.peak_tflops.get(dtype.value)
    return None if peak is None else peak * 1e12 * num_processes


def compute_link_bandwidth(hardware: HardwareConfig, ranks: Iterable[int]) -> float | None:
    """Return the bytes/s per rank for communication among ranks; None if unknown.

    On one node it is the bandwidth of the links between devices; across nodes it is that of the
    node's network, divided by its processes.
    """
    per_node = hardware.processes_per_node
    if per_node is None or len({rank // per_node for rank in ranks}) == 1:
        return None if hardware.link_gb_per_s is None else hardware.link_gb_per_s * 1e9
    network = hardware.network_gbit_per_s
    return None if network is None else network * 1e9 / 8 / per_node


def compute_mfu(
    tokens_per_second: float,
    flops_per_token: float,
    hardware: HardwareConfig,
    num_processes: int,
    dtype: Dtype,
) -> float | None:
    """Return the model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B) between 0 and 1.

    `flops_per_token` is that of hlat.model.decoder_spec.compute_flops_per_token, `dtype` that
    of matmuls. Returns None if the peak is unknown.
    """
    peak = compute_peak_flops(hardware, num_processes, dtype)
    return None if peak is None else tokens_per_second * flops_per_token / peak


def compute_cost_per_4m_tokens(hardware: HardwareConfig, tokens_per_second: float) -> float | None:
    """Return the cost of 4 million tokens in USD; None if the price is unknown.

    CPT = C / (3600 T) x 4e6 (HLAT paper, section V-F), with the price C of all nodes per hour and
    the tokens per second T of the run.
    """
    if hardware.price_usd_per_hour is None:
        return None
    usd_per_second = hardware.nodes * hardware.price_usd_per_hour / 3600
    return usd_per_second / tokens_per_second * 4e6
