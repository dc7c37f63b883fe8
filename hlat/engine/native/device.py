"""The device of a process: a string from the configuration, or torch's own answer.

The same code serves a CPU, a GPU and Trainium 2; nothing here or elsewhere asks which it is.
"""

import os
import resource
import sys

import torch

from hlat import compiler
from hlat.config.errors import ConfigError, MissingDeviceError
from hlat.config.precision import Rounding
from hlat.config.run import Config
from hlat.precision import rounds_by_itself


def find_device(config: Config, local_rank: int) -> torch.device:
    """The named device, or for `auto` the machine's accelerator, or the cpu.

    Of several accelerators each process of a node has the one of its own number.

    Raises:
        ConfigError: The name is no device of this machine.
        MissingDeviceError: There are too few.
    """
    name, accelerator = config.engine.device, _accelerator()
    if name == "auto":
        found = accelerator or torch.device("cpu")
    else:
        here = sorted({"cpu"} | ({accelerator.type} if accelerator else set()))
        if name.partition(":")[0] not in here:
            raise ConfigError(
                f"engine.device={name} is not on this machine; use auto or {' or '.join(here)}"
            )
        found = torch.device(name)
    if found.type == "cpu" or config.num_processes == 1:
        return found
    if local_rank >= (count := torch.accelerator.device_count()):
        raise MissingDeviceError(
            f"engine.device={found.type}: this machine has {count}, and the layout needs one for "
            f"each of {config.num_processes} processes; use a smaller layout or engine.device=cpu"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(found.type, local_rank)


def prepare_device(config: Config, device: torch.device) -> None:
    """Set what compiler, recipe and reproducibility want before the device is used.

    Raises:
        ConfigError: The hardware is to round stochastically, and no SDK is pinned to tell it so.
    """
    os.environ.update(environment(config, device.type))
    if config.engine.deterministic:
        # torch's notes on reproducibility ask for it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error" if config.engine.deterministic else "default")
    # A debugging aid of that mode; writing all memory once more is 6% of a step on a CPU
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def peak_memory(device: torch.device) -> int | None:
    """Return the most memory that this process has held of a device; the device does not wait.

    It is the allocator's own count, and of a CPU the process's resident memory (getrusage(2), which
    counts in KiB on Linux and in bytes on macOS). None: torch has no count for such a device.
    """
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except (AttributeError, RuntimeError):  # no allocator of torch's, as of XLA devices
        return None


def environment(config: Config, device_type: str) -> dict[str, str]:
    """The variables that compiler and recipe want set.

    Raises:
        ConfigError: The hardware is to round stochastically, and no SDK is pinned to tell it so.
    """
    variables = compiler.environment(config.compiler, config.precision)
    stochastic = config.precision.rounding is Rounding.stochastic
    if stochastic and rounds_by_itself(device_type) and not variables:
        raise ConfigError(
            f"precision.rounding=stochastic is the hardware's on engine.device={device_type}, and "
            "compiler.neuron_sdk=null sets no mode; use compiler=neuron_2_33 or another pin"
        )
    return variables


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


if __name__ == "__main__":  # for launchers, which have no torch: what there is, and how many
    print(_accelerator() or "cpu", torch.accelerator.device_count())
