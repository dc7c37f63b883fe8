"""Stacks that the workers of a node write on `DUMP_SIGNAL`, collected in one file."""

import time
from collections.abc import Sequence
from pathlib import Path

from hlat.distributed.process_signals import get_stacks_path

_DUMP_TIMEOUT_S, _POLL_INTERVAL_S = 5, 0.1
"""Time for workers to write their stacks, and the interval of looking at the files."""
_NUM_UNCHANGED = 5
"""Intervals without a change after which a file is complete: a worker on a busy core may pause."""


class WorkerStacks:
    """Files of the workers' stacks in a directory of the node, and the file that collects them."""

    def __init__(self, ranks: Sequence[int], local_dir: Path, path: Path) -> None:
        self.path = path
        self._ranks = ranks
        self._files = [get_stacks_path(local_dir, rank) for rank in ranks]
        self._sizes = self._get_sizes()

    def has_new(self) -> bool:
        """Return True if a worker has written stacks since the last collection."""
        return self._get_sizes() != self._sizes

    def remove(self) -> None:
        """Remove the files of earlier workers."""
        for file in self._files:
            file.unlink(missing_ok=True)
        self._sizes = self._get_sizes()

    @property
    def are_enabled(self) -> bool:
        """True if all workers write stacks on `DUMP_SIGNAL`, which ends others."""
        return all(file.exists() for file in self._files)

    def collect(self) -> dict[int, str]:
        """Append the stacks of all workers to the file; return the new ones by rank.

        Wait until they are written, or for a timeout.
        """
        deadline, sizes = time.monotonic() + _DUMP_TIMEOUT_S, self._sizes
        num_unchanged = 0
        while num_unchanged < _NUM_UNCHANGED and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
            previous, sizes = sizes, self._get_sizes()
            have_grown = all(new > old for new, old in zip(sizes, self._sizes, strict=True))
            num_unchanged = num_unchanged + 1 if have_grown and sizes == previous else 0
        stacks = {}
        for rank, file, start, end in zip(
            self._ranks, self._files, self._sizes, sizes, strict=True
        ):
            content = file.read_bytes()[start:end] if end > start else b""
            stacks[rank] = content.decode(errors="replace") or "no stacks"
        self._sizes = sizes
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as collected:
            collected.writelines(f"rank {rank}:\n{text}\n" for rank, text in stacks.items())
        return stacks

    def _get_sizes(self) -> list[int]:
        return [file.stat().st_size if file.exists() else 0 for file in self._files]
