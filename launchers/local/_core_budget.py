"""Cores, memory and accelerators of this machine, and the requests of concurrent runs.

A subprocess lists the accelerators that torch sees, as launchers do not import torch.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hlat.config.engine_capabilities import ENGINE_CAPABILITIES
from hlat.config.run import Config
from hlat.plan.memory_estimate import estimate_memory

_VISIBLE_DEVICES_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "neuron": "NEURON_RT_VISIBLE_CORES"}
"""Environment variable that selects devices, by torch's device type. Sources: CUDA's programming
guide; the Neuron runtime's configuration."""
_NUM_THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class LocalDevices:
    """Accelerators of this machine by torch's device type; cpu if there is none.

    The ids are those of the environment variable of the device type.
    """

    device_type: str
    device_ids: tuple[str, ...]


@dataclass(frozen=True)
class ResourceRequest:
    """Resources of one run; `threads_per_process` is 0 for no limit of the OMP threads."""

    num_processes: int = 0
    threads_per_process: int = 0
    memory_bytes: float = 0.0
    num_devices: int = 0

    @property
    def num_cores(self) -> int:
        """CPU cores of all threads."""
        return self.num_processes * self.threads_per_process


@dataclass(frozen=True)
class ResourceBudget:
    """Resources that up to `max_jobs` concurrent runs share.

    The default is the budget of a sequential sweep, in which each run makes an empty request and
    uses the whole machine.
    """

    max_jobs: int = 1
    num_cores: int = 0
    memory_bytes: float = 0.0
    devices: LocalDevices = LocalDevices("cpu", ())

    def can_start(self, request: ResourceRequest, running: Sequence[ResourceRequest]) -> bool:
        """Return True if a request fits in addition to those of the running processes."""
        requests = [request, *running]
        return (
            len(requests) <= self.max_jobs
            and sum(r.num_cores for r in requests) <= self.num_cores
            and sum(r.memory_bytes for r in requests) <= self.memory_bytes
            and sum(r.num_devices for r in requests) <= len(self.devices.device_ids)
        )

    def build_environment(
        self, request: ResourceRequest, device_ids: Sequence[str]
    ) -> dict[str, str]:
        """Return the environment variables that limit a run to its threads and devices."""
        variables = {}
        if request.threads_per_process:
            variables[_NUM_THREADS_VARIABLE] = str(request.threads_per_process)
        if device_ids:
            name = _VISIBLE_DEVICES_VARIABLES[self.devices.device_type]
            variables[name] = ",".join(device_ids)
        return variables


def build_budget(
    jobs: int, cores: int | None, memory_gib: float | None, accelerators: bool
) -> ResourceBudget:
    """Return the budget of the given settings, with the limits of this process as defaults."""
    machine_memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return ResourceBudget(
        max_jobs=jobs,
        num_cores=cores if cores is not None else _count_available_cores(),
        memory_bytes=memory_gib * 2**30 if memory_gib is not None else machine_memory,
        devices=_detect_devices() if accelerators else LocalDevices("cpu", ()),
    )


def compute_request(config: Config, budget: ResourceBudget) -> ResourceRequest:
    """Return the request of a run, independent of the other runs.

    OMP_NUM_THREADS sets the number of threads; the default is an equal split of the cores.
    """
    num_processes = config.num_processes
    user_threads = os.environ.get(_NUM_THREADS_VARIABLE, "").partition(",")[0]
    equal_split = max(1, budget.num_cores // (budget.max_jobs * num_processes))
    uses_main_memory = config.hardware.memory_gib is None
    return ResourceRequest(
        num_processes=num_processes,
        threads_per_process=int(user_threads) if user_threads.isdigit() else equal_split,
        memory_bytes=(estimate_memory(config).total * num_processes if uses_main_memory else 0.0),
        num_devices=(
            num_processes if budget.devices.device_ids and uses_accelerators(config) else 0
        ),
    )


def uses_accelerators(config: Config) -> bool:
    """Return True if a run uses the accelerators of the machine."""
    return config.engine.device != "cpu"


def find_budget_violations(
    config: Config, request: ResourceRequest, budget: ResourceBudget
) -> Iterator[str]:
    """Yield a message for each reason that a run does not fit the whole budget."""
    sequential = "hydra.launcher.jobs=1"
    engine, device, devices = config.engine.name, config.engine.device, budget.devices
    if not ENGINE_CAPABILITIES[engine].shares_node:
        yield (f"engine.name={engine.value} uses every accelerator of the node; use {sequential}")
    if config.hardware.nodes > 1:
        yield f"hardware.nodes={config.hardware.nodes} exceeds this machine; use 1"
    if ":" in device:
        yield (
            f"engine.device={device} names one device, and the launcher assigns devices to "
            f"concurrent runs; use engine.device={device.partition(':')[0]}"
        )
    if request.num_cores > budget.num_cores:
        yield (
            f"{request.num_processes} processes of {request.threads_per_process} threads need "
            f"{request.num_cores} cores, and hydra.launcher.cores={budget.num_cores}; use more, or "
            f"{sequential}"
        )
    if request.memory_bytes > budget.memory_bytes:
        yield (
            f"model={config.model.name} needs {_format_gib(request.memory_bytes)} GiB, and "
            f"hydra.launcher.memory_gib={_format_gib(budget.memory_bytes)}; use more, or "
            f"{sequential}"
        )
    if request.num_devices > len(devices.device_ids):
        yield (
            f"{request.num_processes} processes need as many devices, and this machine has "
            f"{len(devices.device_ids)} of type {devices.device_type}; use a smaller layout, or "
            "engine.device=cpu"
        )
    if request.num_devices and devices.device_type not in _VISIBLE_DEVICES_VARIABLES:
        yield (
            f"concurrent runs cannot share devices of type {devices.device_type}; use {sequential} "
            "or engine.device=cpu"
        )


def list_devices(device_type: str, count: int, environment: Mapping[str, str]) -> LocalDevices:
    """Return the visible devices, with the ids that the user has selected in the environment."""
    selected = environment.get(_VISIBLE_DEVICES_VARIABLES.get(device_type, ""), "")
    device_ids = [*_expand_ranges(selected)] if selected else [*map(str, range(count))]
    return LocalDevices(device_type, tuple(device_ids[:count]))


def _count_available_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _detect_devices() -> LocalDevices:
    command = [sys.executable, "-m", "hlat.engine.native.device"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    device_type, count = output.split()
    return list_devices(device_type, int(count), os.environ)


def _expand_ranges(device_list: str) -> Iterator[str]:
    """Yield the ids of a list with ranges, as in the Neuron runtime: 0-2,5 is 0, 1, 2 and 5."""
    for item in device_list.replace(" ", "").split(","):
        first, _, last = item.partition("-")
        if first.isdigit() and last.isdigit():
            yield from map(str, range(int(first), int(last) + 1))
        else:
            yield item


def _format_gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g}"
