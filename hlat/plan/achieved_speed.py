"""Achieved speed of one rank: the peaks of the hardware times the efficiency of its devices."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hlat.config import mfu
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.hardware import HardwareConfig
from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.plan.calibration_file import load_calibration
from hlat.plan.framework_traits import HLAT, FrameworkTraits
from hlat.plan.hardware_efficiency import (
    ASSUMED_PEAKS,
    HardwareEfficiency,
    load_efficiencies,
)


@dataclass(frozen=True)
class AchievedSpeed:
    """Achieved FLOP/s and bytes/s of a rank; link and network include their efficiency.

    The processes of a node share its CPU, so that each of n has 1/n of the speed of one.

    Attributes:
        flops: Speed of matmuls.
        layer_flops: Speed of the matmuls of layers, which differs with float8.
        attention_flops: Speed of attention over long sequences.
        vector_flops: Speed of element-wise operations in fp32; infinite if it is unknown.
        memory: Memory bandwidth.
        link: Bandwidth to ranks of the same node.
        network: Bandwidth of the node to other nodes.
        passes: Times that operators other than matmuls transfer an activation.
        operator_s: Time of an operator besides its FLOPs and bytes; shorter with fewer threads.
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
    operator_s: float
    efficiency: HardwareEfficiency


def get_efficiency(config: Config) -> HardwareEfficiency:
    """Return the constants of the run's hardware; raise ConfigError if there are none."""
    hardware, efficiencies = config.hardware, load_efficiencies()
    if hardware.calibration is not None:
        return load_calibration(Path(hardware.calibration), config)
    if hardware.device not in efficiencies:
        raise ConfigError(
            f"hardware={hardware.name} has no constants in hlat/plan/device_efficiency.yaml "
            f"(hardware.device={hardware.device or 'null'}), so its step time is unknown; assume "
            "one with mfu=0.4, fit constants with hlat plan calibrate, or set hardware.device to "
            f"one of {', '.join(efficiencies)}"
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
    if efficiency.assumes_peaks:
        hardware = _assume_peaks(hardware, dtype)
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
    is_cpu = hardware.name == "cpu"
    share = hardware.nodes / config.num_processes if is_cpu else 1.0
    layer_efficiency = efficiency.compute
    if traits.matmul_dtype is not None:
        layer_efficiency = efficiency.float8 or efficiency.compute
    is_compiled = config.compiler.torch_compile
    return AchievedSpeed(
        flops=flops * share * efficiency.compute,
        layer_flops=(layer_peak or 0.0) * 1e12 * share * layer_efficiency,
        attention_flops=flops * share * (efficiency.attention or efficiency.compute),
        vector_flops=mfu.compute_peak_flops(hardware, 1, Dtype.fp32) or math.inf,
        memory=memory * share * 1e9,
        link=link * 1e9 * efficiency.link,
        network=network * 1e9 / 8 * efficiency.network,
        passes=efficiency.compiled_passes if is_compiled else efficiency.eager_passes,
        operator_s=efficiency.operator_s * share,
        efficiency=efficiency,
    )


def _assume_peaks(hardware: HardwareConfig, dtype: Dtype) -> HardwareConfig:
    """Return the hardware with the units of its constants instead of unknown peaks."""
    assumed: dict[str, Any] = ASSUMED_PEAKS | {
        "peak_tflops": {dtype.value: ASSUMED_PEAKS["peak_tflops"]}
    }
    unknown = {key: peak for key, peak in assumed.items() if not getattr(hardware, key)}
    return replace(hardware, **unknown)
