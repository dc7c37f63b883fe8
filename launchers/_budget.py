"""What points of a sweep take of this machine while they run, and what it has for them.

Points that run at once must not take each other's memory or devices, or one ends the others. A
process of its own tells which accelerators torch sees: launchers have no torch.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hlat.config.engine import Backend
from hlat.config.run import Config
from hlat.planning.memory import estimate

_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "neuron": "NEURON_RT_VISIBLE_CORES"}
"""By torch's name of the accelerators: what tells a process which of them it may see. Sources:
CUDA's programming guide; the Neuron runtime's configuration."""
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Devices:
    """Accelerators of this machine.

    Attributes:
        kind: Torch's name of them; cpu: there is none.
        names: As the variable has them.
    """

    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Budget:
    """What points that run at once may use together.

    Attributes:
        jobs: Points.
        cores: Of the CPU.
        memory: Bytes of main memory.
        devices: Accelerators.
    """

    jobs: int
    cores: int
    memory: float
    devices: Devices

    def has_room(self, need: "Need", running: Sequence["Need"]) -> bool:
        """Whether a point can start beside those that run."""
        together = [need, *running]
        return (
            len(together) <= self.jobs
            and sum(one.cores for one in together) <= self.cores
            and sum(one.memory for one in together) <= self.memory
            and sum(one.devices for one in together) <= len(self.devices.names)
        )

    def variables(self, need: "Need", devices: Sequence[str]) -> dict[str, str]:
        """What keeps a point to its threads and devices."""
        own = {_VARIABLES[self.devices.kind]: ",".join(devices)} if devices else {}
        threads = {_THREADS: str(need.threads)} if need.threads else {}
        return threads | own


@dataclass(frozen=True)
class Need:
    """What a point takes while it runs.

    Attributes:
        processes: Of its layout.
        threads: Of each of them; 0: as many as it likes.
        memory: Bytes of main memory, as planned.
        devices: Accelerators.
    """

    processes: int
    threads: int
    memory: float
    devices: int

    @property
    def cores(self) -> int:
        """Of the CPU."""
        return self.processes * self.threads


ALONE = Budget(jobs=1, cores=0, memory=0, devices=Devices("cpu", ()))
"""What points share of which each has the whole machine."""
WHOLE = Need(processes=0, threads=0, memory=0, devices=0)
"""What each of them takes of that: nothing that another could have."""


def budget(jobs: int, cores: int | None, memory_gib: float | None, accelerators: bool) -> Budget:
    """Return what there is: as set, or else what this process may use of this machine.

    Args:
        jobs: Points at once.
        cores: As set.
        memory_gib: As set.
        accelerators: Whether any of the points may use one.
    """
    whole = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return Budget(
        jobs=jobs,
        cores=cores if cores is not None else _own_cores(),
        memory=memory_gib * 2**30 if memory_gib is not None else whole,
        devices=_seen() if accelerators else Devices("cpu", ()),
    )


def need(config: Config, budget: Budget) -> Need:
    """Return what a point takes; it does not depend on how many others happen to run.

    Its threads are those that OMP_NUM_THREADS says, or else its share if all points were like it.
    """
    processes = config.num_processes
    set_by_user = os.environ.get(_THREADS, "").partition(",")[0]
    share = max(1, budget.cores // (budget.jobs * processes))
    in_main_memory = config.hardware.memory_gib is None
    return Need(
        processes=processes,
        threads=int(set_by_user) if set_by_user.isdigit() else share,
        memory=estimate(config).total * processes if in_main_memory else 0.0,
        devices=processes if budget.devices.names and takes_accelerators(config) else 0,
    )


def takes_accelerators(config: Config) -> bool:
    """Whether a run uses accelerators where there are some."""
    return config.engine.device != "cpu"


def problems(config: Config, need: Need, budget: Budget) -> Iterator[str]:
    """Tell why a point cannot run even if no other does."""
    alone = "hydra.launcher.jobs=1"
    if config.engine.name is Backend.nxd:
        yield f"engine.name=nxd takes every NeuronCore that it finds; use {alone}"
    if config.hardware.nodes > 1:
        yield f"hardware.nodes={config.hardware.nodes} are not on this machine; use 1"
    if ":" in config.engine.device:
        yield (
            f"engine.device={config.engine.device} names one device, and points at once are each "
            f"given their own; use engine.device={config.engine.device.partition(':')[0]}"
        )
    if need.cores > budget.cores:
        yield (
            f"{need.processes} processes of {need.threads} threads need {need.cores} cores, and "
            f"hydra.launcher.cores={budget.cores}; use more, or {alone}"
        )
    if need.memory > budget.memory:
        yield (
            f"model={config.model.name} needs {_gib(need.memory)} GiB, and "
            f"hydra.launcher.memory_gib={_gib(budget.memory)}; use more, or {alone}"
        )
    if need.devices > len(budget.devices.names):
        yield (
            f"{need.processes} processes need as many devices, and {budget.devices.kind} has "
            f"{len(budget.devices.names)} here; use a smaller layout, or engine.device=cpu"
        )
    if need.devices and budget.devices.kind not in _VARIABLES:
        yield f"{budget.devices.kind} cannot be shared out; use {alone} or engine.device=cpu"


def devices(kind: str, count: int, environment: Mapping[str, str]) -> Devices:
    """Return so many accelerators, by the names that the user has chosen if there was a choice."""
    chosen = environment.get(_VARIABLES.get(kind, ""), "")
    names = [*_expanded(chosen)] if chosen else [*map(str, range(count))]
    return Devices(kind, tuple(names[:count]))


def _own_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _seen() -> Devices:
    """Those that torch sees."""
    command = [sys.executable, "-m", "hlat.engine.native.device"]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    kind, count = told.split()
    return devices(kind, int(count), os.environ)


def _expanded(chosen: str) -> Iterator[str]:
    """The names in a list, in which Neuron's runtime takes ranges: 0-2,5 is 0, 1, 2 and 5."""
    for name in chosen.replace(" ", "").split(","):
        first, _, last = name.partition("-")
        if first.isdigit() and last.isdigit():
            yield from map(str, range(int(first), int(last) + 1))
        else:
            yield name


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g}"
