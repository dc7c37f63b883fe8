"""Achieved speed of one rank: the peaks of the hardware times the efficiency of its devices."""

import math
from dataclasses import dataclass

from hlat.config import mfu
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.plan.framework_traits import HLAT, FrameworkTraits
from hlat.plan.hardware_efficiency import HardwareEfficiency, load_efficiencies


@dataclass(frozen=True)
class AchievedSpeed:
    """Achieved FLOP/s and bytes/s of a rank; link and network include their efficiency.

    Attributes:
        flops: Speed of matmuls.
        layer_flops: Speed of the matmuls of layers, which differs with float8.
        attention_flops: Speed of attention over long sequences.
        vector_flops: Speed of element-wise operations in fp32; infinite if it is unknown.
        memory: Memory bandwidth.
        link: Bandwidth to ranks of the same node.
        network: Bandwidth of the node to other nodes.
        passes: Times that operators other than matmuls transfer an activation.
        efficiency: Constants of the device.
    """

    flops: float
    layer_flops: float
    attention_flops: float
    vector_flops: float
    memory: float
    link: float
    network: float
    passes: float
    efficiency: HardwareEfficiency


def get_efficiency(config: Config) -> HardwareEfficiency:
    """Return the constants of the run's hardware; raise ConfigError if there are none."""
    hardware, efficiencies = config.hardware, load_efficiencies()
    if hardware.device not in efficiencies:
        raise ConfigError(
            f"hardware={hardware.name} has no constants in hlat/plan/device_efficiency.yaml "
            f"(hardware.device={hardware.device or 'null'}), so its step time is unknown; assume "
            f"one with mfu=0.4, or set hardware.device to one of {', '.join(efficiencies)}"
        )
    return efficiencies[hardware.device]


def compute_achieved_speed(
    config: Config, efficiency: HardwareEfficiency, traits: FrameworkTraits = HLAT
) -> AchievedSpeed:
    """Return the speed of a rank.

    Raises:
        ConfigError: A peak is unknown.
    """
    hardware, dtype = config.hardware, config.precision.compute_dtype
    peaks = {
        f"peak_tflops.{dtype.value}": mfu.compute_peak_flops(hardware, 1, dtype),
        "memory_bandwidth_gb_per_s": hardware.memory_bandwidth_gb_per_s,
        "link_gb_per_s": hardware.link_gb_per_s if config.num_processes > 1 else math.inf,
        "network_gbit_per_s": hardware.network_gbit_per_s if hardware.nodes > 1 else math.inf,
    }
    layer_dtype = traits.matmul_dtype or dtype.value
    layer_peak = hardware.peak_tflops.get(layer_dtype)
    missing = [key for key, peak in peaks.items() if peak is None]
    if traits.matmul_dtype is not None and layer_peak is None:
        missing.append(f"peak_tflops.{layer_dtype}")
    raise_config_errors(f"hardware.{key} is unknown, so is the step time" for key in missing)
    flops, memory, link, network = (peak or 0.0 for peak in peaks.values())
    layer_efficiency = efficiency.compute
    if traits.matmul_dtype is not None:
        layer_efficiency = efficiency.float8 or efficiency.compute
    is_compiled = config.compiler.torch_compile
    return AchievedSpeed(
        flops=flops * efficiency.compute,
        layer_flops=(layer_peak or 0.0) * 1e12 * layer_efficiency,
        attention_flops=flops * (efficiency.attention or efficiency.compute),
        vector_flops=mfu.compute_peak_flops(hardware, 1, Dtype.fp32) or math.inf,
        memory=memory * 1e9,
        link=link * 1e9 * efficiency.link,
        network=network * 1e9 / 8 * efficiency.network,
        passes=efficiency.compiled_passes if is_compiled else efficiency.eager_passes,
        efficiency=efficiency,
    )
