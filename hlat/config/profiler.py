"""Training steps that torch.profiler records (docs/profiling.md)."""

from dataclasses import dataclass

from hlat.config.bounds import bounded


@dataclass
class ProfilerConfig:
    """Steps and ranks that torch.profiler records; the files are in profiles/ of the run."""

    steps: list[int] = bounded([], min=1)  # noqa: RUF009 (a field)
    """Recorded steps, such as [20,21]; empty: none. Choose steps after the first ones, in which
    caches are filled and layers are compiled."""
    ranks: list[int] = bounded([0], min=0)  # noqa: RUF009 (a field)
    """Ranks that record."""
    with_stack: bool = False
    """Record the Python calls; a recorded step is then several times slower."""
    memory: bool = False
    """Record allocations in the trace, and a snapshot of the memory on CUDA."""
