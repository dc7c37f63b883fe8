"""File with the constants of a cluster, which `hlat plan calibrate` writes and plans read."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.config.untrusted_files import format_value, load_untrusted_yaml
from hlat.plan.hardware_efficiency import (
    UNKNOWN_HARDWARE,
    HardwareEfficiency,
    load_efficiencies,
)
from hlat.storage.durable_files import replace_file

CONSTANTS = {
    "matmuls": ("compute", "float8", "attention"),
    "other operators": ("compiled_passes", "eager_passes"),
    "start of operators": ("operator_s",),
    "links": ("link",),
    "network": ("network",),
    "start of collectives": ("collective_s", "link_hop_s", "network_hop_s"),
}
"""Constants of `HardwareEfficiency` that a calibration changes by a common factor."""
_NAMES = [name for names in CONSTANTS.values() for name in names]
_KEYS = ("hardware", "device", "dtype", "source", "constants", "interval")


def get_device_efficiency(config: Config) -> HardwareEfficiency:
    """Return the constants of the hardware without a calibration."""
    return load_efficiencies().get(config.hardware.device or "", UNKNOWN_HARDWARE)


def write_calibration(file: Path, config: Config, efficiency: HardwareEfficiency) -> None:
    """Write the constants of the hardware of a run; raise OSError if this is impossible."""
    hardware = config.hardware
    constants = {name: value for name in _NAMES if (value := getattr(efficiency, name))}
    fields = {
        "hardware": hardware.name,
        "device": hardware.device,
        "dtype": config.precision.compute_dtype.value,
        "source": efficiency.source,
        "interval": [_round(end) for end in efficiency.interval],
    }
    lines = [
        f"# Constants of hlat plan from measured runs: hardware.calibration={file.name}",
        *(f"{key}: {json.dumps(value)}" for key, value in fields.items()),
        "constants:",
        *(f"  {name}: {_round(value)}" for name, value in constants.items()),
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, ("\n".join(lines) + "\n").encode())


def load_calibration(file: Path, config: Config) -> HardwareEfficiency:
    """Return the constants in a file.

    Raises:
        ConfigError: The file cannot be read, is no calibration, or is one of other hardware.
    """
    content = load_untrusted_yaml(file)
    name = f"hardware.calibration={format_value(file, 200)}"
    if not isinstance(content, dict) or set(content) != set(_KEYS):
        raise ConfigError(
            f"{name} is no file of hlat plan calibrate: its keys are not {', '.join(_KEYS)}"
        )
    base, hardware = get_device_efficiency(config), config.hardware
    for key, value in (("name", content["hardware"]), ("device", content["device"])):
        if (own := getattr(hardware, key)) != value:
            raise ConfigError(
                f"{name} is for hardware.{key}={format_value(value)}, not {format_value(own)}; "
                "calibrate with runs on this hardware"
            )
    dtype = config.precision.compute_dtype.value
    if base.assumes_peaks and content["dtype"] != dtype:
        raise ConfigError(
            f"{name} is for precision.compute_dtype={format_value(content['dtype'])}, not {dtype}: "
            f"hardware={hardware.name} has no constants; calibrate with runs in {dtype}"
        )
    constants, interval = content["constants"], content["interval"]
    if not isinstance(constants, Mapping) or not set(constants) <= set(_NAMES):
        raise ConfigError(f"{name} has constants other than {', '.join(_NAMES)}")
    if not isinstance(interval, list) or len(interval) != 2:
        raise ConfigError(f"{name} has an interval that is not two numbers")
    low, high = (_parse_number(name, "interval", value) for value in interval)
    values: dict[str, Any] = {key: _parse_number(name, key, constants[key]) for key in constants}
    return replace(
        base,
        **values,
        source=format_value(content["source"], 200),
        interval=(low, high),
        layout_interval=(low, high),
        is_calibrated=True,
    )


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _parse_number(name: str, key: str, value: Any) -> float:
    if isinstance(value, float | int) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ConfigError(f"{name} has {key}={format_value(value)}, which is not a number above 0")
