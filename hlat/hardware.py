"""Speed, links and price of the machine a run is meant for, and what throughput says of them.

An unknown peak or price gives None, never a guess: a wrong MFU is worse than none.
"""

from collections.abc import Iterable

from hlat.config.hardware import Hardware
from hlat.config.precision import Dtype


def peak_flops(hardware: Hardware, num_processes: int, dtype: Dtype) -> float | None:
    """Dense peak of all devices of the run in FLOP/s; None when that of this dtype is not known."""
    peak = hardware.peak_tflops.get(dtype.value)
    return None if peak is None else peak * 1e12 * num_processes


def link_bandwidth(hardware: Hardware, ranks: Iterable[int]) -> float | None:
    """Bytes/s at which each of some ranks can talk to the others; None when that is not known.

    On one node it is that of the links between its chips; across nodes the network of a node,
    shared by its processes, which all talk at the same time.
    """
    per_node = hardware.processes_per_node
    if per_node is None or len({rank // per_node for rank in ranks}) == 1:
        return None if hardware.link_gb_per_s is None else hardware.link_gb_per_s * 1e9
    network = hardware.network_gbit_per_s
    return None if network is None else network * 1e9 / 8 / per_node


def mfu(
    tokens_per_second: float,
    flops_per_token: float,
    hardware: Hardware,
    num_processes: int,
    dtype: Dtype,
) -> float | None:
    """Model FLOPs utilisation: the share of the peak that the model's own arithmetic uses.

    Source: PaLM, arXiv 2204.02311, appendix B.

    Args:
        tokens_per_second: Throughput of the whole run.
        flops_per_token: See hlat.model.canonical.flops_per_token.
        hardware: Kind of the devices.
        num_processes: Processes of the run, each with a device.
        dtype: Type of the matrix products.

    Returns:
        A share between 0 and 1; None when the peak is not known.
    """
    peak = peak_flops(hardware, num_processes, dtype)
    return None if peak is None else tokens_per_second * flops_per_token / peak


def cost_per_4m_tokens(hardware: Hardware, tokens_per_second: float) -> float | None:
    """Cost per 4 million tokens in USD; None when the price is not known.

    CPT = C / (3600 T) x 4e6 (HLAT paper, section V-F), with C the price of all nodes per hour and T
    the tokens per second of the whole run.
    """
    if hardware.price_usd_per_hour is None:
        return None
    usd_per_second = hardware.nodes * hardware.price_usd_per_hour / 3600
    return usd_per_second / tokens_per_second * 4e6
